"""Text to tokens and back, and chat messages to text."""

from quire.tokenizer.chat_template import ChatTemplate
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer, check_vocabulary

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "check_vocabulary"]
