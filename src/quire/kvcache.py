"""Which block of the KV cache belongs to which sequence: block tables, prefix reuse by block hash,
copy-on-write of shared blocks (KVCache), over counted blocks (BlockPool). Integers, no tensors.

Positions of one sequence, with blocks of four for the drawing:

    position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12
    block            17    |     3      |     9      |  5
                ── full, hashed ────────|── written by this step ──
                     cached, maybe shared           never shared, never cached

A full block is cached under a hash of its tokens and of all blocks before it.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from quire.core.plan import BlockCopy

_DIGEST_BYTES = 16


class BlockPool:
    """Numbered blocks with reference counts, and the index of cached ones by hash.

    A block is in exactly one of three states:

        empty       no references, contents undefined
        evictable   no references, but cached: lookup() finds it, retain() revives it; LRU order
        used        one reference or more; cached as well once it is full
    """

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


class BlockTable:
    """The blocks of one sequence; written by KVCache alone."""

    __slots__ = ("blocks", "cached_hashes", "hashes", "ids", "num_cached", "salt")

    def __init__(self, salt: str | None) -> None:
        self.salt = salt  # None: this sequence neither reuses nor offers prefixes
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []  # of the full blocks of its tokens, allocated or not
        self.num_cached = 0  # leading blocks that are cached already
        self.cached_hashes: list[bytes] = []  # it cached itself; outlive the loss of its blocks
        self.ids: tuple[int, ...] = ()  # `blocks` as plans show them; renewed when they change


class KVCache:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool) -> None:
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, wholly or partly."""
        return -(-num_tokens // self.block_size)

    def new_table(self, salt: str | None) -> BlockTable:
        """An empty table; prefixes are reused between tables of equal salt, not at all for None."""
        return BlockTable(salt if self.prefix_reuse else None)

    def admission_cost(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Free blocks that admitting a sequence of these tokens takes; used prefixes are free."""
        needed = self.blocks_for(len(tokens))
        if table.salt is None:
            return needed
        num_full = len(tokens) // self.block_size
        self._hash_blocks(table, tokens, num_full)
        for index in range(num_full):
            block = self.pool.lookup(table.hashes[index])
            if block is None:
                return needed
            needed -= not self.pool.is_free(block)
        # All is cached: the last token is computed again, in a copy of its block.
        return needed + (num_full * self.block_size == len(tokens))

    def match_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Take every cached leading block of `tokens`; the number of tokens in them."""
        assert not table.blocks, "a prefix is matched before anything is allocated"
        if table.salt is None:
            return 0
        self._hash_blocks(table, tokens, len(tokens) // self.block_size)
        for block_hash in table.hashes:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            self.pool.retain(block)
            table.blocks.append(block)
        table.num_cached = len(table.blocks)
        table.ids = tuple(table.blocks)
        return len(table.blocks) * self.block_size

    def _hash_blocks(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Hash the first `num_blocks` blocks, each once: a sequence's tokens never change."""
        assert table.salt is not None
        size = self.block_size
        for index in range(len(table.hashes), num_blocks):
            parent = table.hashes[-1] if table.hashes else root_hash(table.salt)
            table.hashes.append(chain(parent, tokens[index * size : (index + 1) * size]))

    def blocks_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Free blocks that extend() takes for positions start..end, copies included."""
        needed = self.blocks_for(end) - len(table.blocks)
        first = start // self.block_size
        for block in table.blocks[first : self.blocks_for(end)]:
            needed += not self.pool.is_writable(block)
        return max(0, needed)

    def extend(self, table: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions start..end writable; the copies to do first, None if blocks ran out.

        The copies' sources are retained until release_sources(), so that a step can be run again.
        """
        if self.blocks_needed(table, start, end) > self.pool.num_free:
            return None
        copies = self._unshare(table, start, end)
        for _ in range(self.blocks_for(end) - len(table.blocks)):
            table.blocks.append(self._allocate())
        table.ids = tuple(table.blocks)
        return copies

    def _unshare(self, table: BlockTable, start: int, end: int) -> list[BlockCopy]:
        """Replace the blocks in start..end that are not writable; copy positions before start."""
        copies = []
        first = start // self.block_size
        for index in range(first, min(self.blocks_for(end), len(table.blocks))):
            block = table.blocks[index]
            if self.pool.is_writable(block):
                continue
            table.blocks[index] = self._allocate()
            if index * self.block_size < start:
                copies.append(BlockCopy(block, table.blocks[index]))
            else:
                self.pool.release(block)
        table.num_cached = min(table.num_cached, first)
        return copies

    def _allocate(self) -> int:
        block = self.pool.allocate()
        assert block is not None, "blocks_needed promised a free block"
        return block

    def release_sources(self, copies: Iterable[BlockCopy]) -> None:
        """The copies were done, or never will be."""
        for copy in copies:
            self.pool.release(copy.source)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first tokens; both copy before they write."""
        child = BlockTable(table.salt)
        child.blocks = table.blocks[: self.blocks_for(num_tokens)]
        for block in child.blocks:
            self.pool.retain(block)
        child.hashes = table.hashes[: num_tokens // self.block_size]
        child.num_cached = min(table.num_cached, len(child.hashes))
        child.cached_hashes = table.cached_hashes  # of one request: a fault concerns both
        child.ids = tuple(child.blocks)
        return child

    def cache_full_blocks(
        self, table: BlockTable, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Let other sequences find the full blocks among the first `num_computed` tokens."""
        if table.salt is None:
            return
        num_full = num_computed // self.block_size
        self._hash_blocks(table, tokens, num_full)
        for index in range(table.num_cached, num_full):
            if self.pool.cache(table.blocks[index], table.hashes[index]):
                table.cached_hashes.append(table.hashes[index])
        table.num_cached = max(table.num_cached, num_full)

    def free(self, table: BlockTable) -> None:
        """Release every block, the last first, so that long tails are evicted before prefixes."""
        for block in reversed(table.blocks):
            self.pool.release(block)
        table.blocks.clear()
        table.num_cached = 0
        table.ids = ()

    def free_faulted(self, table: BlockTable) -> None:
        """Free the table of a faulted sequence; blocks that it computed are never reused."""
        for block_hash in table.cached_hashes:
            block = self.pool.lookup(block_hash)
            if block is not None:
                self.pool.uncache(block)
        self.free(table)

    @property
    def usage(self) -> float:
        return self.pool.num_used / self.pool.num_blocks

    def check_integrity(
        self, tables: Iterable[BlockTable], copies: Iterable[BlockCopy] = ()
    ) -> None:
        """Raise AssertionError unless the pool agrees with these, all live tables and copies."""
        tables = list(tables)
        retained = [table.blocks for table in tables]
        self.pool.check_integrity([*retained, [copy.source for copy in copies]])
        for table in tables:
            assert table.ids == tuple(table.blocks), "ids were not renewed"
            assert table.num_cached <= len(table.blocks), "cached what it does not have"


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Salted per API key, so that no key can probe another's prompts."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows the blocks `parent` stands for."""
    hasher = blake2b(parent, digest_size=_DIGEST_BYTES)
    hasher.update(array("I", tokens).tobytes())
    return hasher.digest()
