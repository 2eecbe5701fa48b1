"""BlockPool: numbered blocks with reference counts, and the index of cached ones by hash.

A block is in exactly one of three states:

    empty       no references, contents undefined
    evictable   no references, but cached: lookup() finds it, retain() revives it; LRU order
    used        one reference or more; cached as well once it is full
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can still give: empty and evictable ones."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that lookup() can find."""
        return len(self._hash_of)

    def allocate(self) -> int | None:
        """A block with one reference, an empty one if there is any; None if all are used."""
        if self._empty:
            block = self._empty.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self.uncache(block)
        else:
            return None
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a used or evictable block."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; after the last one a cached block is evictable, any other empty."""
        assert self._references[block] > 0, f"block {block} released more often than retained"
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._empty.append(block)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_writable(self, block: int) -> bool:
        """Whether its one owner may write: contents that are shared or cached never change."""
        return self._references[block] == 1 and block not in self._hash_of

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Let lookup() find a used block; False where the block or the hash is cached already."""
        assert self._references[block] > 0, f"block {block} has no references"
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def uncache(self, block: int) -> None:
        """Hide a block from lookup(); its references stay."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        if block in self._evictable:
            del self._evictable[block]
            self._empty.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the reference counts are those of the block tables."""
        counted = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            assert count == counted[block], (
                f"block {block}: {count} references, {counted[block]} in block tables"
            )
        empty, evictable = set(self._empty), set(self._evictable)
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert not empty & evictable, f"blocks both empty and evictable: {empty & evictable}"
        for block in range(self.num_blocks):
            is_free = self._references[block] == 0
            assert is_free == (block in empty or block in evictable), f"block {block} is lost"
        assert not empty & self._hash_of.keys(), "an empty block is cached"
        assert evictable <= self._hash_of.keys(), "an evictable block is not cached"
        assert self._block_of == {h: b for b, h in self._hash_of.items()}, "hashes disagree"
