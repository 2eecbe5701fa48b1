"""KVCache: gives sequences their blocks, reuses known prefixes, copies what is shared on writing.

Positions of one sequence, with blocks of four for the drawing:

    position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12
    block            17    |     3      |     9      |  5
                ── full, hashed ────────|── written by this step ──
                     known, maybe shared            never shared, never known
"""

from collections.abc import Iterable, Sequence

from quire.core.plan import BlockCopy
from quire.kvcache.blocks import BlockPool
from quire.kvcache.prefixes import chain, root_hash


class BlockTable:
    """The blocks of one sequence; opaque to the scheduler but for their ids."""

    __slots__ = ("blocks", "hashes", "ids", "num_published", "own", "salt")

    def __init__(self, salt: str | None) -> None:
        self.salt = salt  # None: this sequence neither reuses nor offers prefixes
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []  # of its tokens' full blocks, whether it has them or not
        self.num_published = 0  # leading blocks already offered to others
        self.own: list[bytes] = []  # hashes it made findable, though it may have lost the blocks
        self.ids: tuple[int, ...] = ()  # `blocks` as plans show them; renewed when they change


class KVCache:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = True) -> None:
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, wholly or partly."""
        return -(-num_tokens // self.block_size)

    def open(self, salt: str | None) -> BlockTable:
        """An empty table; `salt` None keeps the sequence out of prefix reuse."""
        return BlockTable(salt if self.prefix_reuse else None)

    def cost(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Free blocks that opening these tokens would use up, known prefixes considered."""
        needed = self.blocks_for(len(tokens))
        if table.salt is None:
            return needed
        num_full = len(tokens) // self.block_size
        self._hash_blocks(table, tokens, num_full)
        for place in range(num_full):
            block = self.pool.lookup(table.hashes[place])
            if block is None:
                return needed
            needed -= not self.pool.is_free(block)
        return needed + (num_full * self.block_size == len(tokens))  # the last one is copied

    def match_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Take every known leading block of `tokens`; the number of tokens found computed."""
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
        table.num_published = len(table.blocks)
        table.ids = tuple(table.blocks)
        return len(table.blocks) * self.block_size

    def _hash_blocks(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Know the hashes of the first `num_blocks` blocks; a sequence's tokens never change."""
        assert table.salt is not None
        size = self.block_size
        for place in range(len(table.hashes), num_blocks):
            parent = table.hashes[-1] if table.hashes else root_hash(table.salt)
            table.hashes.append(chain(parent, tokens[place * size : (place + 1) * size]))

    def blocks_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Blocks that writing positions start..end would take from the pool, copies included."""
        needed = self.blocks_for(end) - len(table.blocks)
        first = start // self.block_size
        for block in table.blocks[first : self.blocks_for(end)]:
            needed += not self.pool.is_writable(block)
        return max(0, needed)

    def extend(self, table: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions start..end writable; the copies to do first, or None if blocks ran out.

        The copies' sources are retained until settle(), so that a step can be run again.
        """
        if self.blocks_needed(table, start, end) > self.pool.num_free:
            return None
        copies = self._unshare(table, start, end)
        for _ in range(self.blocks_for(end) - len(table.blocks)):
            table.blocks.append(self._take())
        table.ids = tuple(table.blocks)
        return copies

    def _unshare(self, table: BlockTable, start: int, end: int) -> list[BlockCopy]:
        """Replace the blocks in start..end that others see; copy what is in them before start."""
        copies = []
        first = start // self.block_size
        for place in range(first, min(self.blocks_for(end), len(table.blocks))):
            block = table.blocks[place]
            if self.pool.is_writable(block):
                continue
            table.blocks[place] = self._take()
            if place * self.block_size < start:
                copies.append(BlockCopy(block, table.blocks[place]))
            else:
                self.pool.release(block)
        table.num_published = min(table.num_published, first)
        return copies

    def _take(self) -> int:
        block = self.pool.allocate()
        assert block is not None, "blocks_needed promised a free block"
        return block

    def settle(self, copies: Iterable[BlockCopy]) -> None:
        """The copies were done, or will never be: let go of their sources."""
        for copy in copies:
            self.pool.release(copy.source)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table over the blocks of the first tokens; whoever writes into them copies."""
        twin = BlockTable(table.salt)
        twin.blocks = table.blocks[: self.blocks_for(num_tokens)]
        for block in twin.blocks:
            self.pool.retain(block)
        twin.hashes = table.hashes[: num_tokens // self.block_size]
        twin.num_published = min(table.num_published, len(twin.hashes))
        twin.own = table.own  # of one request: a fault of either concerns both
        twin.ids = tuple(twin.blocks)
        return twin

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks among the first `num_computed` tokens findable."""
        if table.salt is None:
            return
        num_full = num_computed // self.block_size
        self._hash_blocks(table, tokens, num_full)
        for place in range(table.num_published, num_full):
            if self.pool.remember(table.blocks[place], table.hashes[place]):
                table.own.append(table.hashes[place])
        table.num_published = max(table.num_published, num_full)

    def close(self, table: BlockTable) -> None:
        """Give every block back, the last first, so that long tails are evicted before prefixes."""
        for block in reversed(table.blocks):
            self.pool.release(block)
        table.blocks.clear()
        table.num_published = 0
        table.ids = ()

    def disown(self, table: BlockTable) -> None:
        """Close the table of a faulted sequence: what it computed itself is never reused."""
        for block_hash in table.own:
            block = self.pool.lookup(block_hash)
            if block is not None:
                self.pool.forget(block)
        self.close(table)

    @property
    def usage(self) -> float:
        return self.pool.num_held / self.pool.num_blocks

    def check_integrity(
        self, tables: Iterable[BlockTable], copies: Iterable[BlockCopy] = ()
    ) -> None:
        """Raise AssertionError unless the pool agrees with these, all live tables and copies."""
        tables = list(tables)
        retained = [table.blocks for table in tables]
        self.pool.check_integrity([*retained, [copy.source for copy in copies]])
        for table in tables:
            assert table.ids == tuple(table.blocks), "ids were not renewed"
            assert table.num_published <= len(table.blocks), "published what it does not have"
