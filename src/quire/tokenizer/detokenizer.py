"""Tokens to text: a token's bytes, in the two ways vocabularies write them, and
IncrementalDetokenizer: a completion's text as its tokens arrive, never half a character.
"""

from collections.abc import Callable
from encodings.utf_8 import IncrementalDecoder

SPACE_MARK = "▁"  # how SentencePiece vocabularies write a space

PieceBytes = Callable[[str], bytes]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
_TO_LATIN_1 = {ord(letter): chr(byte) for letter, byte in BYTE_ALPHABET.items()}


def byte_level_bytes(text: str) -> bytes:
    """The bytes of a byte-level token; one with letters outside the alphabet is plain text."""
    if all(letter in BYTE_ALPHABET for letter in text):
        return text.translate(_TO_LATIN_1).encode("latin-1")
    return text.encode()


def sentencepiece_bytes(text: str) -> bytes:
    """The bytes of a SentencePiece token; byte tokens are read by `byte_token_value`."""
    return text.replace(SPACE_MARK, " ").encode()


def byte_token_value(text: str) -> int | None:
    """The byte that a token such as <0x0A> stands for; None for any other token."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None


def _whole_text(content: bytes) -> str | None:
    """The text of bytes that are whole characters; None for others."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


class IncrementalDetokenizer:
    """Turns tokens into text one at a time.

    The pieces of text, joined, are what `Tokenizer.decode` makes of all the tokens. A character
    whose bytes are spread over several tokens comes out whole, with its last token; bytes that can
    no longer become a character come out as U+FFFD.
    """

    def __init__(
        self,
        visible_bytes: Callable[[int], bytes],
        *,
        strip_space: bool = False,
        whole_texts: dict[int, str | None] | None = None,
    ) -> None:
        """`whole_texts`: kept by whoever makes detokenizers of the same bytes; the texts of tokens
        that are whole characters, None for the others."""
        self._visible_bytes = visible_bytes
        self._whole_texts = {} if whole_texts is None else whole_texts
        self._decoder = IncrementalDecoder(errors="replace")
        self._strip_space = strip_space  # the space SentencePiece put before the first word

    def add(self, token: int) -> str:
        """The text that is complete now that this token has arrived; often, not always, its own."""
        if not self._decoder.buffer and not self._strip_space:
            text = self._whole_texts.get(token, "")
            if text == "":
                text = _whole_text(self._visible_bytes(token))
                if text != "":  # not for ids beyond the vocabulary, of which there is no end
                    self._whole_texts[token] = text
            if text is not None:
                return text
        return self._stripped(self._decoder.decode(self._visible_bytes(token)))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
