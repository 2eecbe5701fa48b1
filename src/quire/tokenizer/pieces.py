"""What bytes a token stands for, in the two ways vocabularies write them down."""

from collections.abc import Callable

SPACE_MARK = "▁"  # how SentencePiece vocabularies write a space

PieceBytes = Callable[[str], bytes]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
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
