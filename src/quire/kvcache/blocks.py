"""BlockPool: hands out numbered blocks, counts who holds them, remembers what full ones contain.

A block is in exactly one of three places:

    vacant    nobody holds it, its contents mean nothing
    idle      nobody holds it, but a hash knows it and can revive it; least recently used first
    held      reference count of at least one; may be known by a hash as well
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._vacant = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can still hand out."""
        return len(self._vacant) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_known(self) -> int:
        """Blocks whose contents can be found by hash."""
        return len(self._hash_of)

    def allocate(self) -> int | None:
        """A block for one holder, evicting the least recently used idle one if need be."""
        if self._vacant:
            block = self._vacant.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self.forget(block)
        else:
            return None
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more holder; revives an idle block."""
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer; the last one leaves the block idle if it is known, else vacant."""
        assert self._references[block] > 0, f"block {block} released more often than retained"
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._vacant.append(block)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write: shared or known contents never change."""
        return self._references[block] == 1 and block not in self._hash_of

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Make a held block's contents findable; False where another block already is."""
        assert self._references[block] > 0, f"block {block} is held by nobody"
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def forget(self, block: int) -> None:
        """Make a block's contents unfindable; its holders keep it."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        if block in self._idle:
            del self._idle[block]
            self._vacant.append(block)

    def forget_all(self) -> None:
        for block in list(self._hash_of):
            self.forget(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the counts are what the holders' block tables say."""
        holders = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            assert count == holders[block], (
                f"block {block}: {count} references, {holders[block]} holders"
            )
        vacant, idle = set(self._vacant), set(self._idle)
        assert len(vacant) == len(self._vacant), "a block is vacant twice"
        assert not vacant & idle, f"blocks both vacant and idle: {vacant & idle}"
        for block in range(self.num_blocks):
            is_free = self._references[block] == 0
            assert is_free == (block in vacant or block in idle), f"block {block} is lost"
        assert not vacant & self._hash_of.keys(), "a vacant block is known by a hash"
        assert idle <= self._hash_of.keys(), "an idle block is not known by a hash"
        assert self._block_of == {h: b for b, h in self._hash_of.items()}, "hashes disagree"
