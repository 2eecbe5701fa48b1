"""TokenStore: a key-value cache that holds tokens, for executors without a model of their own."""

from array import array
from collections.abc import Sequence

_UNWRITTEN = -1


class TokenStore:
    """Tokens in block slots, written and read through block tables only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots = array("q", [_UNWRITTEN]) * (num_blocks * block_size)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self._slots.itemsize

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        size = self.block_size
        for position, token in enumerate(tokens, start):
            self._slots[table[position // size] * size + position % size] = token

    def read(self, table: Sequence[int], end: int) -> "array[int]":
        """The tokens at positions 0..end."""
        size = self.block_size
        found = array("q")
        for block in table[: -(-end // size)]:
            found += self._slots[block * size : (block + 1) * size]
        return found[:end]

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        self._slots[target * size : (target + 1) * size] = self._slots[
            source * size : (source + 1) * size
        ]
