"""DRY's sequence breakers as tokens: texts to the tokens that hold them, or that begin them."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from quire.core.errors import RequestError
from quire.core.plan import NO_BREAKERS, Breakers
from quire.tokenizer.tokenizer import Tokenizer

_MAX_TAIL = 20  # tokens after the first; llama.cpp has the same limit
_MAX_SEQUENCES = 65_536
_MAX_REMEMBERED = 64  # lists of breakers


class _Vocabulary(NamedTuple):
    """The bytes of all tokens, for searches in them."""

    joined: bytes
    starts: list[int]  # where each token begins in `joined`, and the end
    backwards: list[tuple[bytes, int]]  # reversed bytes and the token, sorted


class SequenceBreakers:
    """A function from texts to Breakers; it remembers the latest. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._find = lru_cache(maxsize=_MAX_REMEMBERED)(self._found)
        self._vocabulary = lru_cache(maxsize=1)(self._read_vocabulary)

    def __call__(self, texts: Sequence[str]) -> Breakers:
        return self._find(tuple(texts)) if texts else NO_BREAKERS

    def _read_vocabulary(self) -> _Vocabulary:
        pieces = [self._tokenizer.token_bytes(t) for t in range(self._tokenizer.vocabulary_size)]
        starts = [0, *itertools.accumulate(map(len, pieces))]
        backwards = sorted((piece[::-1], token) for token, piece in enumerate(pieces) if piece)
        return _Vocabulary(b"".join(pieces), starts, backwards)

    def _found(self, texts: tuple[str, ...]) -> Breakers:
        tokens: set[int] = set()
        tails: dict[int, set[tuple[int, ...]]] = {}
        num_tails = 0
        for text in texts:
            wanted = _utf8(text)
            whole = set(self._holding(wanted))
            tokens |= whole
            for length in range(1, len(wanted)):
                if tail := self._tail(wanted[length:]):
                    for head in self._ending(wanted[:length]):
                        if head not in whole:
                            tails.setdefault(head, set()).add(tail)
                            num_tails += 1
            if num_tails > _MAX_SEQUENCES:
                raise _wrong(f"{text!r} begins in too many tokens; give shorter breakers")
        return Breakers(
            frozenset(tokens), {head: tuple(sorted(own)) for head, own in tails.items()}
        )

    def _holding(self, wanted: bytes) -> Iterator[int]:
        """Tokens with these bytes in them."""
        joined, starts, _ = self._vocabulary()
        place = joined.find(wanted)
        while place >= 0:
            token = bisect_right(starts, place) - 1
            is_within = place + len(wanted) <= starts[token + 1]
            if is_within:
                yield token
            place = joined.find(wanted, starts[token + 1] if is_within else place + 1)

    def _ending(self, wanted: bytes) -> Iterator[int]:
        """Tokens whose last bytes are these."""
        backwards = self._vocabulary().backwards
        ending = wanted[::-1]
        for piece, token in itertools.islice(backwards, bisect_left(backwards, (ending,)), None):
            if not piece.startswith(ending):
                return
            yield token

    def _tail(self, rest: bytes) -> tuple[int, ...]:
        """The tokens of what follows; none where that is no text."""
        try:
            text = rest.decode()
        except UnicodeDecodeError:
            return ()
        found = self._tokenizer.encode(text, add_special=False, parse_special=False)
        return tuple(found[:_MAX_TAIL])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _wrong(f"{text!r} has characters that UTF-8 has not") from None


def _wrong(message: str) -> RequestError:
    name = "dry_sequence_breakers"
    return RequestError(f"{name}: {message}", param=name)
