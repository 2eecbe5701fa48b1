"""IncrementalDetokenizer: a completion's text as its tokens arrive, never half a character."""

import codecs
from collections.abc import Callable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns tokens into text one at a time.

    The pieces of text, joined, are what `Tokenizer.decode` makes of all the tokens. A character
    whose bytes are spread over several tokens comes out whole, with its last token; bytes that can
    no longer become a character come out as U+FFFD.
    """

    def __init__(self, visible_bytes: Callable[[int], bytes], *, strip_space: bool = False) -> None:
        self._visible_bytes = visible_bytes
        self._decoder = _Utf8Decoder(errors="replace")
        self._strip_space = strip_space  # the space SentencePiece put before the first word

    def add(self, token: int) -> str:
        """The text that is complete now that this token has arrived; often, not always, its own."""
        return self._stripped(self._decoder.decode(self._visible_bytes(token)))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
