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


class SequenceBlocks:
    """One sequence's hold on the cache; opaque to the scheduler but for its table."""

    __slots__ = ("blocks", "hashes", "num_published", "own", "salt", "table")

    def __init__(self, salt: str | None) -> None:
        self.salt = salt  # None: this sequence neither reuses nor offers prefixes
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []  # of its tokens' full blocks, whether held or not
        self.num_published = 0  # leading blocks already offered to others
        self.own: list[bytes] = []  # hashes it made findable, though it may have lost the blocks
        self.table: tuple[int, ...] = ()  # what plans show; renewed when the blocks change


class KVCache:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = True) -> None:
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, wholly or partly."""
        return -(-num_tokens // self.block_size)

    def open(self, salt: str | None) -> SequenceBlocks:
        """A hold with nothing in it; `salt` None keeps the sequence out of prefix reuse."""
        return SequenceBlocks(salt if self.prefix_reuse else None)

    def cost(self, hold: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Free blocks that opening these tokens would use up, known prefixes considered."""
        needed = self.blocks_for(len(tokens))
        if hold.salt is None:
            return needed
        num_full = len(tokens) // self.block_size
        self._hash_blocks(hold, tokens, num_full)
        for place in range(num_full):
            block = self.pool.lookup(hold.hashes[place])
            if block is None:
                return needed
            needed -= not self.pool.is_free(block)
        return needed + (num_full * self.block_size == len(tokens))  # the last one is copied

    def match_prefix(self, hold: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Take every known leading block of `tokens`; the number of tokens found computed."""
        assert not hold.blocks, "a prefix is matched before anything is allocated"
        if hold.salt is None:
            return 0
        self._hash_blocks(hold, tokens, len(tokens) // self.block_size)
        for block_hash in hold.hashes:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            self.pool.retain(block)
            hold.blocks.append(block)
        hold.num_published = len(hold.blocks)
        hold.table = tuple(hold.blocks)
        return len(hold.blocks) * self.block_size

    def _hash_blocks(self, hold: SequenceBlocks, tokens: Sequence[int], num_blocks: int) -> None:
        """Know the hashes of the first `num_blocks` blocks; a sequence's tokens never change."""
        assert hold.salt is not None
        size = self.block_size
        for place in range(len(hold.hashes), num_blocks):
            parent = hold.hashes[-1] if hold.hashes else root_hash(hold.salt)
            hold.hashes.append(chain(parent, tokens[place * size : (place + 1) * size]))

    def blocks_needed(self, hold: SequenceBlocks, start: int, end: int) -> int:
        """Blocks that writing positions start..end would take from the pool, copies included."""
        needed = self.blocks_for(end) - len(hold.blocks)
        first = start // self.block_size
        for block in hold.blocks[first : self.blocks_for(end)]:
            needed += not self.pool.is_writable(block)
        return max(0, needed)

    def extend(self, hold: SequenceBlocks, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions start..end writable; the copies to do first, or None if blocks ran out.

        The copies' sources stay held until settle(), so that a step can be run again.
        """
        if self.blocks_needed(hold, start, end) > self.pool.num_free:
            return None
        copies = self._unshare(hold, start, end)
        for _ in range(self.blocks_for(end) - len(hold.blocks)):
            hold.blocks.append(self._take())
        hold.table = tuple(hold.blocks)
        return copies

    def _unshare(self, hold: SequenceBlocks, start: int, end: int) -> list[BlockCopy]:
        """Replace the blocks in start..end that others see, keeping what they hold before start."""
        copies = []
        first = start // self.block_size
        for place in range(first, min(self.blocks_for(end), len(hold.blocks))):
            block = hold.blocks[place]
            if self.pool.is_writable(block):
                continue
            hold.blocks[place] = self._take()
            if place * self.block_size < start:
                copies.append(BlockCopy(block, hold.blocks[place]))
            else:
                self.pool.release(block)
        hold.num_published = min(hold.num_published, first)
        return copies

    def _take(self) -> int:
        block = self.pool.allocate()
        assert block is not None, "blocks_needed promised a free block"
        return block

    def settle(self, copies: Iterable[BlockCopy]) -> None:
        """The copies were done, or will never be: let go of their sources."""
        for copy in copies:
            self.pool.release(copy.source)

    def fork(self, hold: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """A second hold on the blocks of the first tokens; whoever writes into them copies."""
        twin = SequenceBlocks(hold.salt)
        twin.blocks = hold.blocks[: self.blocks_for(num_tokens)]
        for block in twin.blocks:
            self.pool.retain(block)
        twin.hashes = hold.hashes[: num_tokens // self.block_size]
        twin.num_published = min(hold.num_published, len(twin.hashes))
        twin.own = hold.own  # of one request: a fault of either concerns both
        twin.table = tuple(twin.blocks)
        return twin

    def publish(self, hold: SequenceBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks among the first `num_computed` tokens findable."""
        if hold.salt is None:
            return
        num_full = num_computed // self.block_size
        self._hash_blocks(hold, tokens, num_full)
        for place in range(hold.num_published, num_full):
            if self.pool.remember(hold.blocks[place], hold.hashes[place]):
                hold.own.append(hold.hashes[place])
        hold.num_published = max(hold.num_published, num_full)

    def close(self, hold: SequenceBlocks) -> None:
        """Give every block back, the last first, so that long tails are evicted before prefixes."""
        for block in reversed(hold.blocks):
            self.pool.release(block)
        hold.blocks.clear()
        hold.num_published = 0
        hold.table = ()

    def disown(self, hold: SequenceBlocks) -> None:
        """Close the hold of a faulted sequence: what it computed itself is never reused."""
        for block_hash in hold.own:
            block = self.pool.lookup(block_hash)
            if block is not None:
                self.pool.forget(block)
        self.close(hold)

    @property
    def usage(self) -> float:
        return self.pool.num_held / self.pool.num_blocks

    def check_integrity(
        self, holds: Iterable[SequenceBlocks], copies: Iterable[BlockCopy] = ()
    ) -> None:
        """Raise AssertionError unless the pool agrees with these, all live holds and copies."""
        holds = list(holds)
        tables = [hold.blocks for hold in holds]
        self.pool.check_integrity([*tables, [copy.source for copy in copies]])
        for hold in holds:
            assert hold.table == tuple(hold.blocks), "a table was not renewed"
            assert hold.num_published <= len(hold.blocks), "published what it does not hold"
