"""Text to tokens and back, and chat messages to text."""

from typing import TYPE_CHECKING

from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer, check_vocabulary

if TYPE_CHECKING:
    from quire.tokenizer.chat_template import ChatTemplate

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "check_vocabulary"]


def __getattr__(name: str) -> object:
    """ChatTemplate, imported when first used: reading a model file needs no jinja."""
    if name != "ChatTemplate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.tokenizer.chat_template import ChatTemplate

    return ChatTemplate
