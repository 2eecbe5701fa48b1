"""TokenizerParts: what a tokenizer is made of, whichever file it was read from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.tokenizer.control_tokens import ControlTokens
from quire.tokenizer.special_tokens import SpecialTokens
from quire.tokenizer.windows import TextEncoder


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Plain data and two functions; `Tokenizer` is what gives them their meaning."""

    encoder: TextEncoder  # finds special tokens in text
    control: ControlTokens  # ... and those that only a template may write
    texts: Sequence[str]  # by id, as the file writes them
    ids: Mapping[str, int]
    piece_bytes: Callable[[int], bytes]  # of a token, whether or not it is shown
    hidden: frozenset[int]  # not part of the text, unless asked for
    special: SpecialTokens
    prefix: tuple[int, ...]  # put before a text ...
    suffix: tuple[int, ...]  # ... and after it
    strip_space: bool  # the text began with a space that encoding put there
    chat_template: str | None
