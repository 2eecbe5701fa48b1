"""A tokenizer for models without one, whose tokens stand for text of every kind that a large
vocabulary has: constraints over a dummy model's tokens cost what they cost over a real one's.
"""

import itertools
from collections.abc import Iterator
from functools import cached_property

_PUNCTUATION = '{}[]",:\\ \n\t-.eE'
_ONSETS = ("", *"bcdfghjklmnprstvwz", "ch", "sh", "st", "tr", "pl", "qu")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou", "ee", "io", "ü", "é")
_CODAS = ("", "n", "r", "s", "t", "l", "nd", "ng", "ck", "sch")


class WordTokenizer:
    """So many tokens: every byte, runs of JSON's punctuation, numbers, and words of syllables."""

    bos_token_id = None
    hidden_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocabulary_size: int) -> None:
        self._tokens = list(itertools.islice(_texts(), vocabulary_size))

    def token_bytes(self, token: int) -> bytes:
        """Nothing for what stands beyond the vocabulary for the end of a text."""
        return self._tokens[token] if token < len(self._tokens) else b""

    def encode(self, text: str, **_flags: bool) -> list[int]:
        """The longest token first; none is special."""
        rest, found = text.encode(), []
        while rest:
            lengths = range(min(len(rest), self._longest), 0, -1)
            token = next(self._ids[rest[:n]] for n in lengths if rest[:n] in self._ids)
            found.append(token)
            rest = rest[len(self._tokens[token]) :]
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self._tokens)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokens))


def _texts() -> Iterator[bytes]:
    """Each once, for ever: words have ever more syllables."""
    known = set()
    for text in _candidates():
        if text not in known:
            known.add(text)
            yield text


def _candidates() -> Iterator[bytes]:
    yield from (bytes([value]) for value in range(256))
    for length in (2, 3):
        yield from ("".join(c).encode() for c in itertools.product(_PUNCTUATION, repeat=length))
    yield from (str(number).encode() for number in range(1000))
    syllables = ["".join(parts) for parts in itertools.product(_ONSETS, _VOWELS, _CODAS)]
    for count in itertools.count(1):
        for parts in itertools.product(syllables, repeat=count):
            word = "".join(parts)
            yield from (form.encode() for form in (word, f" {word}", word.title(), f" {word}s"))
