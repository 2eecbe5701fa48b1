"""Choices: what a generator decides, read from bytes, so that every generated case is its bytes.

Random bytes give random cases; a coverage-guided fuzzer gives bytes that lead somewhere new. Bytes
that have run out choose the first of everything, which grammars keep for what is plain.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Choices:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    @classmethod
    def drawn(cls, seed: int, number: int, size: int = 1024) -> "Choices":
        """Those of one case of a random run; the same on every machine."""
        return cls(Random(f"{seed}:{number}").randbytes(size))

    @property
    def content(self) -> bytes:
        return self._content

    def below(self, count: int) -> int:
        """An integer from 0 to count - 1."""
        width = 1 if count <= 256 else 2 if count <= 1 << 16 else 4
        taken = self._content[self._place : self._place + width]
        self._place += width
        return int.from_bytes(taken, "little") % count

    def one_in(self, count: int) -> bool:
        """Seldom true; false once the bytes have run out."""
        return self.below(count) == count - 1

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """Up to so many, in any order, perhaps with repeats."""
        return [self.of(options) for _ in range(self.below(most + 1))]

    def text(self, alphabet: Sequence[str], most: int) -> str:
        return "".join(self.some(alphabet, most))
