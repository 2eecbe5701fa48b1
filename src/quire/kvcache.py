"""Which block of the KV cache belongs to which sequence: block tables, prefix reuse by block hash,
copy-on-write of shared blocks (KVCache), over counted blocks (BlockPool); and which slot holds
which state. Integers, no tensors.

Positions of one sequence, with blocks of four for the drawing:

    position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12
    block            17    |     3      |     9      |  5
                ── full, hashed ────────|── written by this step ──
                     cached, maybe shared           never shared, never cached

A full block is cached under a hash of its tokens and of all blocks before it.

Layers that see the same positions form groups. Each group has blocks of its own for a sequence's
positions, all from one pool. A windowed group gives those back that no later position sees:

    full group       17    |     3      |     9      |  5
    windowed group    -    |     -      |     8      |  2      (out of the window: NO_BLOCK)

So a prefix is found again as far as every full group has all of its blocks, and every windowed
group those that the next position sees.

Layers that keep a state have slots from a pool of their own. A slot holds the state of all these
layers after some number of a sequence's tokens. Each step reads one and writes another:

    state after         8 ── step ──▶ 12 ── step ──▶ 13
    slot                2             0              6

A slot is written by one step and never again while a table holds it or it is cached. So a failed
step can be run again, and forks share slots without copies. When a step is collected, the slots
before the one that it wrote go back. A state after full blocks is cached under the last one's hash;
a prefix is found only where its state is, too.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from quire.core.plan import NO_BLOCK, NO_STATE, BlockCopy
from quire.core.windows import NO_WINDOWS, Window, Windows, peak_blocks

_DIGEST_BYTES = 16
_STATE_SUFFIX = b"state"  # of a block's hash: the key of the state after it


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
    def num_evictable(self) -> int:
        """Free blocks that lookup() can still find."""
        return len(self._evictable)

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
    """The blocks of one sequence, by group; written by KVCache alone."""

    __slots__ = (
        *("cached_keys", "decoded_key", "first_held", "groups", "hashes"),
        *("ids", "num_cached", "other_ids", "row_states", "salt", "states"),
    )

    def __init__(self, salt: str | None, num_groups: int = 1) -> None:
        self.salt = salt  # None: this sequence neither reuses nor offers prefixes
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]  # all of one length
        self.first_held = [0] * num_groups  # entries of a group before this one are NO_BLOCK
        self.hashes: list[bytes] = []  # of the full blocks of its tokens, allocated or not
        self.num_cached = 0  # leading blocks that are cached already
        self.cached_keys: list[bytes] = []  # it cached itself; outlive the loss of its blocks
        # The groups as plans show them, the first and the others; renewed when they change.
        self.ids: tuple[int, ...] = ()
        self.other_ids: tuple[tuple[int, ...], ...] = ((),) * (num_groups - 1)
        self.states: list[tuple[int, int]] = []  # number of tokens, slot; in ascending order
        self.row_states: tuple[int, ...] = ()  # of the row that extend() was last called for
        self.decoded_key: bytes | None = None  # of the last state that it cached in its completion

    @property
    def num_held(self) -> int:
        """Blocks that it refers to."""
        return len(self.groups) * len(self.groups[0]) - sum(self.first_held)

    def held(self) -> Iterator[int]:
        """Its blocks, in each group the last first."""
        for blocks, first in zip(self.groups, self.first_held, strict=True):
            for index in range(len(blocks) - 1, first - 1, -1):
                yield blocks[index]

    def renew_ids(self) -> None:
        self.ids = tuple(self.groups[0])
        if len(self.groups) > 1:
            self.other_ids = tuple([tuple(blocks) for blocks in self.groups[1:]])


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_reuse: bool,
        windows: Windows = NO_WINDOWS,
        num_states: int = 0,
    ) -> None:
        """`num_states`: slots for states; 0: no layer keeps a state."""
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.windows = windows
        self.pool = BlockPool(num_blocks)
        self.state_pool = BlockPool(num_states)
        self.has_states = num_states > 0
        # What tells a group's blocks apart in the index; nothing for the first group.
        self._suffixes = [n.to_bytes(2, "little") if n else b"" for n in range(len(windows))]
        self._windowed = [(n, window) for n, window in enumerate(windows) if window is not None]

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that so many tokens fill, wholly or partly."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of so many tokens holds at once, when at most `chunk` of
        them are in steps that are not collected."""
        return peak_blocks(self.windows, self.block_size, num_tokens, chunk)

    def new_table(self, salt: str | None) -> BlockTable:
        """An empty table; prefixes are reused between tables of equal salt, not at all for None."""
        return BlockTable(salt if self.prefix_reuse else None, len(self.windows))

    # ---- prefixes

    def admission_cost(self, table: BlockTable, tokens: Sequence[int], chunk: int) -> int:
        """Free blocks that admitting a sequence of these tokens takes, at most `chunk` of them at
        once; used prefixes are free."""
        found = self._cached_prefix(table, tokens)
        # Where all is cached the last token is computed again, in a copy of its block.
        is_whole = len(found[0]) * self.block_size == len(tokens)
        whole = self.blocks_for(len(tokens)) + is_whole
        cost = 0
        for window, blocks in zip(self.windows, found, strict=True):
            first = 0
            needed = whole
            if window is not None:
                needed = min(needed, window.most_held(self.block_size, chunk))
                # Blocks that it will have given back are no part of what it holds in the end.
                first = window.first_seen(len(tokens) - 1) // self.block_size
            for block in blocks[first:]:
                needed -= not self.pool.is_free(block)
            cost += needed
        return cost

    def match_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Take the cached leading blocks of `tokens`; the number of tokens in them."""
        assert not table.groups[0], "a prefix is matched before anything is allocated"
        table.groups = self._cached_prefix(table, tokens)
        for group, blocks in enumerate(table.groups):
            first = table.first_held[group] = blocks.count(NO_BLOCK)
            for block in blocks[first:]:
                self.pool.retain(block)
        table.num_cached = len(table.groups[0])
        table.renew_ids()
        if self.has_states and table.num_cached:
            slot = self.state_pool.lookup(table.hashes[table.num_cached - 1] + _STATE_SUFFIX)
            assert slot is not None, "a prefix was found without its state"
            self.state_pool.retain(slot)
            table.states.append((table.num_cached * self.block_size, slot))
        return table.num_cached * self.block_size

    def _cached_prefix(self, table: BlockTable, tokens: Sequence[int]) -> list[list[int]]:
        """The longest prefix of which every group has all cached that the next position sees, and
        after which a state is cached: the blocks of each group."""
        if table.salt is None:
            return [[] for _ in self.windows]
        num_full = len(tokens) // self.block_size
        self._hash_blocks(table, tokens, num_full)
        full = [g for g, window in enumerate(self.windows) if window is None]
        found = {group: self._cached_run(table.hashes[:num_full], group) for group in full}
        length = min([len(blocks) for blocks in found.values()], default=num_full)
        if self.has_states:  # no state is computed again: the last token needs one before it
            length = min(length, (len(tokens) - 1) // self.block_size)
        if self._windowed or self.has_states:
            length = self._seen_run(table.hashes, length, len(tokens))
        for group, window in self._windowed:
            first = self._first_seen(window, length, len(tokens))
            seen = self._cached_run(table.hashes[first:length], group)
            found[group] = [NO_BLOCK] * first + seen
        return [found[group][:length] for group in range(len(self.windows))]

    def _first_seen(self, window: Window, length: int, num_tokens: int) -> int:
        """The first block that the next position sees, after so many blocks; the last token is
        computed in any case."""
        start = min(length * self.block_size, num_tokens - 1)
        return min(length, window.first_seen(start) // self.block_size)

    def _cached_run(self, hashes: Sequence[bytes], group: int) -> list[int]:
        """The blocks of these hashes, up to the first that is not cached."""
        blocks = []
        suffix = self._suffixes[group]
        for block_hash in hashes:
            block = self.pool.lookup(block_hash + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _seen_run(self, hashes: Sequence[bytes], length: int, num_tokens: int) -> int:
        """The most leading blocks, up to `length`, after which every windowed group has cached what
        the next position sees, and a state is cached where layers keep one."""
        while length:
            if self.has_states and not self._has_state_after(hashes[length - 1]):
                length -= 1
                continue
            missing = self._last_missing(hashes, length, num_tokens)
            if missing is None:
                break
            length = missing  # after any number between the two that block is seen as well
        return length

    def _has_state_after(self, block_hash: bytes) -> bool:
        return self.state_pool.lookup(block_hash + _STATE_SUFFIX) is not None

    def _last_missing(self, hashes: Sequence[bytes], length: int, num_tokens: int) -> int | None:
        """A block that is seen after `length` blocks and not cached; None where all are."""
        for group, window in self._windowed:
            suffix = self._suffixes[group]
            first = self._first_seen(window, length, num_tokens)
            for index in range(length - 1, first - 1, -1):
                if self.pool.lookup(hashes[index] + suffix) is None:
                    return index
        return None

    def _hash_blocks(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Hash the first `num_blocks` blocks, each once: a sequence's tokens never change."""
        assert table.salt is not None
        size = self.block_size
        for index in range(len(table.hashes), num_blocks):
            parent = table.hashes[-1] if table.hashes else root_hash(table.salt)
            table.hashes.append(chain(parent, tokens[index * size : (index + 1) * size]))

    # ---- growing

    def blocks_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Free blocks that extend() takes for positions start..end, copies included."""
        count = self.blocks_for(end)
        first = start // self.block_size
        needed = 0
        for blocks in table.groups:
            needed += max(0, count - len(blocks))
            for block in blocks[first:count]:
                needed += not self.pool.is_writable(block)
        return needed

    def extend(self, table: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions start..end writable, with a slot for the state after them; the copies to
        do first, None if blocks or slots ran out.

        The copies' sources are retained until release_sources(), so that a step can be run again.
        """
        needed = self.blocks_needed(table, start, end)
        if needed > self.pool.num_free:
            return None
        if self.has_states and not self._add_state(table, start, end):
            return None
        table.num_cached = min(table.num_cached, start // self.block_size)
        return self._grow(table, start, end) if needed else []

    def _grow(self, table: BlockTable, start: int, end: int) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        count = self.blocks_for(end)
        for blocks in table.groups:
            if start < len(blocks) * self.block_size:
                copies += self._unshare(blocks, start, count)
            while len(blocks) < count:
                blocks.append(self._allocate())
        table.renew_ids()
        return copies

    def _add_state(self, table: BlockTable, start: int, end: int) -> bool:
        """A slot for the state after `end` tokens, computed from that after `start`; False if there
        is none."""
        num_tokens, source = table.states[-1] if table.states else (0, NO_STATE)
        assert num_tokens == start, f"no state after {start} tokens"
        target = self.state_pool.allocate()
        if target is None:
            return False
        table.states.append((end, target))
        table.row_states = (source, target)
        return True

    def drop_states(self, table: BlockTable, num_tokens: int) -> None:
        """States after more tokens than these are not computed: their steps count as never run."""
        while table.states and table.states[-1][0] > num_tokens:
            self.state_pool.release(table.states.pop()[1])

    def _unshare(self, blocks: list[int], start: int, count: int) -> list[BlockCopy]:
        """Replace those of the first `count` blocks from position start on that are not writable;
        copy positions before start."""
        copies = []
        first = start // self.block_size
        for index in range(first, min(count, len(blocks))):
            block = blocks[index]
            if self.pool.is_writable(block):
                continue
            blocks[index] = self._allocate()
            if index * self.block_size < start:
                copies.append(BlockCopy(block, blocks[index]))
            else:
                self.pool.release(block)
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
        child = BlockTable(table.salt, len(table.groups))
        count = self.blocks_for(num_tokens)
        child.groups = [blocks[:count] for blocks in table.groups]
        child.first_held = [min(first, count) for first in table.first_held]
        for block in child.held():
            self.pool.retain(block)
        child.hashes = table.hashes[: num_tokens // self.block_size]
        child.num_cached = min(table.num_cached, len(child.hashes))
        child.cached_keys = table.cached_keys  # of one request: a fault concerns both
        child.states = [state for state in table.states if state[0] == num_tokens]
        for _, slot in child.states:
            self.state_pool.retain(slot)
        child.renew_ids()
        return child

    # ---- what is computed

    def cache_full_blocks(
        self, table: BlockTable, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Let other sequences find the full blocks among the first `num_computed` tokens."""
        if table.salt is None:
            return
        num_full = num_computed // self.block_size
        self._hash_blocks(table, tokens, num_full)
        for blocks, suffix in zip(table.groups, self._suffixes, strict=True):
            for index in range(table.num_cached, num_full):
                key = table.hashes[index] + suffix
                if self.pool.cache(blocks[index], key):
                    table.cached_keys.append(key)
        table.num_cached = max(table.num_cached, num_full)

    def state_computed(
        self, table: BlockTable, num_computed: int, first_needed: int, *, is_decoded: bool = False
    ) -> None:
        """The step was collected that wrote the state after `num_computed` tokens: let others find
        it where that fills blocks, and give back states after fewer tokens than `first_needed`.

        `is_decoded`: the completion came to it. Of these a sequence has the last one cached, or a
        long completion would evict the states of prompts.
        Called after cache_full_blocks(). As in release_unseen(), no step reads them any more.
        """
        if table.salt is not None and num_computed % self.block_size == 0:
            slot = dict(table.states)[num_computed]
            key = table.hashes[num_computed // self.block_size - 1] + _STATE_SUFFIX
            if self.state_pool.cache(slot, key):
                table.cached_keys.append(key)
                if is_decoded:
                    self._uncache_state(table.decoded_key)
                    table.decoded_key = key
        while table.states[0][0] < first_needed:
            self.state_pool.release(table.states.pop(0)[1])

    def _uncache_state(self, key: bytes | None) -> None:
        slot = None if key is None else self.state_pool.lookup(key)
        if slot is not None:
            self.state_pool.uncache(slot)

    def release_unseen(self, table: BlockTable, num_computed: int) -> None:
        """Give back the blocks before all that the last computed position sees.

        Called when a step is collected: no step that may still be run again reads them, and steps
        submitted later come after every step that does. The last computed position may be computed
        again, by a fork.
        """
        is_changed = False
        for group, window in self._windowed:
            first = window.first_seen(num_computed - 1) // self.block_size
            blocks = table.groups[group]
            for index in range(table.first_held[group], first):
                self.pool.release(blocks[index])
                blocks[index] = NO_BLOCK
                is_changed = True
            table.first_held[group] = max(first, table.first_held[group])
        if is_changed:
            table.renew_ids()

    def free(self, table: BlockTable) -> None:
        """Release every block, the last first, so that long tails are evicted before prefixes."""
        for block in table.held():
            self.pool.release(block)
        for group, blocks in enumerate(table.groups):
            blocks.clear()
            table.first_held[group] = 0
        table.num_cached = 0
        table.renew_ids()
        self.drop_states(table, 0)

    def free_faulted(self, table: BlockTable) -> None:
        """Free the table of a faulted sequence; blocks that it computed are never reused."""
        for key in table.cached_keys:
            for pool in (self.pool, self.state_pool):
                found = pool.lookup(key)
                if found is not None:
                    pool.uncache(found)
        self.free(table)

    @property
    def usage(self) -> float:
        return self.pool.num_used / self.pool.num_blocks

    def check_integrity(
        self, tables: Iterable[BlockTable], copies: Iterable[BlockCopy] = ()
    ) -> None:
        """Raise AssertionError unless the pool agrees with these, all live tables and copies."""
        tables = list(tables)
        retained = [list(table.held()) for table in tables]
        self.pool.check_integrity([*retained, [copy.source for copy in copies]])
        self.state_pool.check_integrity([[slot for _, slot in table.states] for table in tables])
        for table in tables:
            lengths = [num_tokens for num_tokens, _ in table.states]
            assert lengths == sorted(set(lengths)), "states are out of order"
            shown = (table.ids, *table.other_ids)
            assert shown == tuple(map(tuple, table.groups)), "ids were not renewed"
            assert table.num_cached <= len(table.ids), "cached what it does not have"
            for blocks, first in zip(table.groups, table.first_held, strict=True):
                assert len(blocks) == len(table.ids), "groups differ in length"
                assert blocks.count(NO_BLOCK) == first, "a block is missing"

    def check_state(self, table: BlockTable, num_computed: int) -> None:
        """Raise AssertionError unless the next step has the state to start from."""
        last = table.states[-1][0] if table.states else 0
        assert last == (num_computed if self.has_states else 0), f"no state after {num_computed}"


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Salted per API key, so that no key can probe another's prompts."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows the blocks `parent` stands for."""
    hasher = blake2b(parent, digest_size=_DIGEST_BYTES)
    hasher.update(array("I", tokens).tobytes())
    return hasher.digest()
