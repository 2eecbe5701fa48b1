"""TokenFilter: masks for allowed_token_ids and bad_words, alone or over those of a grammar."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.core.errors import RequestError
from quire.core.plan import PendingMask
from quire.tokenizer import Tokenizer

MAX_WORD_TOKENS = 64  # a step looks at as many of the last tokens
BannedAfter = dict[tuple[int, ...], int]  # what begins a bad word -> bits of the tokens that end it


def banned_after(words: Sequence[str], tokenizer: Tokenizer | None) -> BannedAfter:
    """Each word as the tokenizer writes it, with and without a space before it."""
    if tokenizer is None:
        raise RequestError(
            "bad_words needs a tokenizer, and this model has none: use logit_bias",
            param="bad_words",
        )
    banned: BannedAfter = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            tokens = tokenizer.encode(text, add_special=False, parse_special=False)
            if len(tokens) > MAX_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: {word!r:.60} has {len(tokens)} tokens; the limit is "
                    f"{MAX_WORD_TOKENS}",
                    param="bad_words",
                )
            if tokens:
                start = tuple(tokens[:-1])
                banned[start] = banned.get(start, 0) | 1 << tokens[-1]
    return banned


def bits_of(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))


class _FilteredMask:
    """A grammar's mask, once it is there, within others' limits (a PendingMask)."""

    def __init__(self, mask: PendingMask, permitted: int) -> None:
        self._mask = mask
        self._permitted = permitted

    def result(self) -> bytes:
        return _within(self._mask.result(), self._permitted)

    def row(self) -> None:
        return None


def _within(mask: bytes, permitted: int) -> bytes:
    bits = int.from_bytes(mask, "little") & permitted
    return bits.to_bytes(len(mask), "little")


class Masks(Protocol):
    """A grammar that a TokenFilter is put over."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_slow(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def is_complete(self) -> bool: ...

    def allowed(self) -> bytes | PendingMask | None: ...

    def accept(self, token: int) -> None: ...


class TokenFilter:
    """The tokens that one completion may go on with (a Grammar of the engine): a function of the
    request's parameters and of its own tokens."""

    def __init__(self, grammar: Masks | None, permitted: int, banned: BannedAfter) -> None:
        self._grammar = grammar
        self._permitted = permitted & ~banned.get((), 0)
        self._mask = self._permitted.to_bytes(-(-permitted.bit_length() // 8), "little")
        self._banned = banned
        self._lengths = sorted({len(start) for start in banned if start})
        self._last: list[int] = []  # as many of its tokens as a bad word has

    def allowed(self) -> bytes | PendingMask:
        banned = 0
        for length in self._lengths:
            banned |= self._banned.get(tuple(self._last[-length:]), 0)
        permitted = self._permitted & ~banned
        mask = None if self._grammar is None else self._grammar.allowed()
        if mask is None:
            return _within(self._mask, permitted) if banned else self._mask
        if isinstance(mask, bytes):
            return _within(mask, permitted)
        return _FilteredMask(mask, permitted)

    def accept(self, token: int) -> None:
        if self._lengths:
            self._last = [*self._last[1 - self._lengths[-1] :], token]
        if self._grammar is not None:
            self._grammar.accept(token)

    @property
    def is_ready(self) -> bool:
        return self._grammar is None or self._grammar.is_ready

    @property
    def is_slow(self) -> bool:
        return self._grammar is not None and self._grammar.is_slow

    @property
    def failure(self) -> str | None:
        return None if self._grammar is None else self._grammar.failure

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete
