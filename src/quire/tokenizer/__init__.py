"""Text to tokens and back, and chat messages to text."""

from quire.tokenizer.chat_template import ChatTemplate

__all__ = ["ChatTemplate"]
