"""KVCache with groups of layers: windowed ones hold what the next position sees, and no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.plan import NO_BLOCK, NO_STATE, BlockCopy
from quire.core.windows import Window, Windows
from quire.kvcache import BlockTable, KVCache

SIZE = 4  # tokens of a block
FULL_AND_WINDOW: Windows = (None, Window(6))
PROMPT = list(range(24))  # six full blocks


def new_cache(
    windows: Windows = FULL_AND_WINDOW, num_blocks: int = 64, num_states: int = 0
) -> KVCache:
    return KVCache(num_blocks, SIZE, prefix_reuse=True, windows=windows, num_states=num_states)


def advance(cache: KVCache, table: BlockTable, tokens: list[int], start: int, end: int) -> None:
    """Compute positions start..end as a step does."""
    copies = cache.extend(table, start, end)
    assert copies is not None
    cache.release_sources(copies)
    cache.cache_full_blocks(table, tokens, end)
    cache.release_unseen(table, end)


def computed(
    cache: KVCache, tokens: list[int], salt: str | None = "key", chunk: int = SIZE
) -> BlockTable:
    table = cache.new_table(salt)
    start = min(cache.match_prefix(table, tokens), len(tokens) - 1)
    while start < len(tokens):
        end = min(start + chunk, len(tokens))
        advance(cache, table, tokens, start, end)
        start = end
    return table


def found_by(cache: KVCache, tokens: list[int]) -> int:
    table = cache.new_table("key")
    found = cache.match_prefix(table, tokens)
    cache.free(table)
    return found


def evict(cache: KVCache, block: int) -> None:
    cache.pool.uncache(block)


def test_a_windowed_group_gives_back_what_no_later_position_sees() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT, None)
    full, windowed = table.groups
    assert len(set(full)) == 6
    # Position 23 sees 18 to 23: blocks 4 and 5.
    assert windowed[:4] == [NO_BLOCK] * 4
    assert len(set(windowed[4:]) - {NO_BLOCK}) == 2
    assert table.num_held == 8 == cache.pool.num_used
    assert table.other_ids == (tuple(windowed),)
    cache.check_integrity([table])
    cache.free(table)
    assert cache.usage == 0.0
    cache.check_integrity([table])


def test_a_block_of_which_one_position_is_seen_is_kept() -> None:
    cache = new_cache((Window(6),))
    table = computed(cache, PROMPT[:17], None)
    assert table.first_held == [2]  # position 16 sees 11 to 16
    advance(cache, table, PROMPT, 17, 18)
    assert table.first_held == [3]  # position 17 sees 12 to 17


def test_a_chunked_group_gives_all_back_at_the_end_of_its_chunk() -> None:
    cache = new_cache((None, Window(8, is_chunked=True)))
    table = computed(cache, PROMPT[:16], None)
    assert table.first_held == [0, 2]
    advance(cache, table, PROMPT, 16, 20)
    assert table.first_held == [0, 4]


def test_while_a_chunk_is_computed_its_blocks_are_held_beside_the_window() -> None:
    cache = new_cache((Window(6),))
    table = computed(cache, PROMPT[:12], None)
    assert table.num_held == 2
    assert cache.blocks_needed(table, 12, 24) == 3
    cache.extend(table, 12, 24)
    assert table.num_held == 5
    assert cache.peak_blocks(24, 12) == 6


def test_every_group_grows_by_a_block_of_its_own_or_none_does() -> None:
    cache = new_cache(num_blocks=5)
    table = cache.new_table(None)
    assert cache.extend(table, 0, 8) == []
    assert cache.blocks_needed(table, 8, 9) == 2
    assert cache.extend(table, 8, 9) is None
    assert (table.num_held, cache.pool.num_free) == (4, 1)
    assert len({*table.groups[0], *table.groups[1]}) == 4


# ---- prefixes


def test_a_prefix_is_found_with_the_blocks_that_the_next_position_sees() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    table = cache.new_table("key")
    assert cache.match_prefix(table, [*PROMPT, 99]) == 24
    assert table.groups[0] == first.groups[0]
    # Position 24 sees 19 to 24.
    assert table.groups[1] == [NO_BLOCK] * 4 + first.groups[1][4:]
    assert table.first_held == [0, 4]
    cache.check_integrity([first, table])


def test_where_all_is_cached_the_window_is_that_of_the_last_token() -> None:
    cache = new_cache((Window(5),))
    cache.free(computed(cache, PROMPT))
    table = cache.new_table("key")
    assert cache.match_prefix(table, PROMPT) == 24
    assert table.first_held == [4]  # position 23, which is computed again, sees 19 to 23
    other = cache.new_table("key")
    assert cache.match_prefix(other, [*PROMPT, 99]) == 24
    assert other.first_held == [5]  # position 24 sees 20 to 24


def test_a_windowed_group_that_lost_a_block_shortens_the_prefix() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT, chunk=24)  # in one step: no block was given back before
    cache.free(table)
    lookup = cache.pool.lookup
    windowed = [lookup(h + b"\1\0") for h in table.hashes]
    assert windowed[4] is not None
    evict(cache, windowed[4])
    # After 5 or 6 blocks the lost one is seen; after 4 the blocks 2 and 3 are.
    assert found_by(cache, [*PROMPT, 99]) == 16
    assert windowed[2] is not None
    evict(cache, windowed[2])
    assert found_by(cache, [*PROMPT, 99]) == 8


def test_a_block_before_the_window_may_be_lost() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT, chunk=24)
    cache.free(table)
    for block_hash in table.hashes[:4]:
        block = cache.pool.lookup(block_hash + b"\1\0")
        assert block is not None
        evict(cache, block)
    assert found_by(cache, [*PROMPT, 99]) == 24


def test_a_full_group_that_lost_a_block_shortens_the_prefix() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT, chunk=24)
    evict(cache, table.groups[0][3])
    assert found_by(cache, [*PROMPT, 99]) == 12


def test_groups_do_not_find_each_others_blocks() -> None:
    cache = new_cache((None, None))
    table = computed(cache, PROMPT)
    other = cache.new_table("key")
    cache.match_prefix(other, PROMPT)
    assert other.groups == table.groups
    assert not set(table.groups[0]) & set(table.groups[1])


def test_a_fault_hides_the_blocks_of_every_group() -> None:
    cache = new_cache()
    cache.free_faulted(computed(cache, PROMPT))
    assert cache.pool.num_cached == 0


def test_admission_costs_what_a_sequence_holds_at_most() -> None:
    cache = new_cache()
    fresh = cache.new_table("key")
    # Of the full group six blocks; of the other two before its chunk and the chunk's.
    assert cache.admission_cost(fresh, PROMPT, 1) == 6 + 3
    assert cache.admission_cost(fresh, PROMPT, 4) == 6 + 4
    assert cache.admission_cost(fresh, PROMPT, 24) == 6 + 6
    used = computed(cache, PROMPT)
    # All but the copies of the last block, and what the windowed group moves on through.
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 1) == 1 + 1
    cache.free(used)
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 1) == 7 + 3


def test_a_used_block_that_will_be_out_of_the_window_saves_nothing() -> None:
    cache = new_cache((Window(6),))
    used = computed(cache, PROMPT[:8])
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 4) == 4
    cache.check_integrity([used])


# ---- forks


def test_a_fork_shares_what_is_held_and_each_copies_in_every_group() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT[:22])
    child = cache.fork(first, 22)
    assert child.groups == first.groups
    assert child.first_held == first.first_held
    copies = cache.extend(child, 21, 22)
    assert copies == [
        BlockCopy(first.groups[0][5], child.groups[0][5]),
        BlockCopy(first.groups[1][5], child.groups[1][5]),
    ]
    cache.check_integrity([first, child], copies)
    cache.release_sources(copies)
    cache.free(first)
    cache.check_integrity([child])


def test_a_fork_can_compute_the_last_position_again() -> None:
    for size in range(1, 10):
        cache = new_cache((Window(size),))
        for length in range(1, 24):
            table = computed(cache, PROMPT[:length], None)
            first = Window(size).first_seen(length - 1) // SIZE
            assert table.first_held[0] <= first, (size, length)
            cache.free(table)


# ---- anything


actions = st.lists(
    st.tuples(
        st.sampled_from(["start", "grow", "grow", "grow", "lose", "fork", "free", "fault"]),
        st.integers(0, 7),
        st.integers(1, 9),
    ),
    max_size=60,
)
groupings = st.sampled_from(
    [FULL_AND_WINDOW, (Window(3),), (None, Window(5), Window(4, is_chunked=True)), (None, None)]
)


class Sequences:
    """Live sequences of one cache, computed chunk by chunk."""

    def __init__(self, windows: Windows, num_blocks: int, num_states: int) -> None:
        self.cache = new_cache(windows, num_blocks, num_states)
        self.contents: dict[tuple[int, int], int] = {}  # of (block, offset): the token
        self.states: dict[int, list[int]] = {NO_STATE: []}  # of slots: all tokens
        self.live: list[tuple[BlockTable, list[int], int]] = []  # table, tokens, computed
        self.grown: set[BlockTable] = set()

    def start(self, kind: int, length: int) -> None:
        tokens = [kind % 2, *range(3 * length)]
        table = self.cache.new_table("key")
        found = self.cache.match_prefix(table, tokens)
        self.live.append((table, tokens, min(found, len(tokens) - 1)))

    def grow(self, index: int, chunk: int) -> None:
        table, tokens, start = self.live.pop(index)
        end = min(start + chunk, len(tokens))
        copies = self.cache.extend(table, start, end) if end > start else []
        if copies is None:  # pre-empted
            self.cache.free(table)
            return
        for source, target in copies:
            for offset in range(SIZE):
                self.contents[target, offset] = self.contents.get((source, offset), NO_BLOCK)
        self.cache.release_sources(copies)
        for blocks in table.groups:
            for position in range(start, end):
                self.contents[blocks[position // SIZE], position % SIZE] = tokens[position]
        if end > start:
            self.check_reads(table, tokens, end)
            self.cache.cache_full_blocks(table, tokens, end)
            self.cache.release_unseen(table, end)
            self.grown.add(table)
            if self.cache.has_states:
                self.write_state(table, tokens, start, end)
        self.live.append((table, tokens, end))

    def write_state(self, table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        """The step reads the state after `start` tokens and writes that after `end`."""
        source, target = table.row_states
        assert self.states[source] == tokens[:start]
        self.states[target] = tokens[:end]
        self.cache.state_computed(table, end, end)

    def lose(self, index: int, chunk: int) -> None:
        """Plan a chunk that is never computed."""
        table, tokens, start = self.live[index]
        end = min(start + chunk, len(tokens))
        copies = self.cache.extend(table, start, end) if end > start else []
        if copies is None or copies:  # whether they were copied is unknown
            self.cache.release_sources(copies or ())
            self.cache.free(table)
            self.live.pop(index)
        else:
            self.cache.drop_states(table, start)

    def check_reads(self, table: BlockTable, tokens: list[int], end: int) -> None:
        """What the last position sees is what was written there."""
        for blocks, window in zip(table.groups, self.cache.windows, strict=True):
            first = 0 if window is None else window.first_seen(end - 1)
            for position in range(first, end):
                block = blocks[position // SIZE]
                assert block != NO_BLOCK
                assert self.contents[block, position % SIZE] == tokens[position]

    def fork(self, index: int) -> None:
        table, tokens, end = self.live[index]
        if table in self.grown:  # its last position was computed, not only found
            child = self.cache.fork(table, end)
            start = end if self.cache.has_states else end - 1
            self.live.append((child, [*tokens[:end], 77, 78, 79, 80, 81], start))


@settings(max_examples=400)
@given(groupings, st.integers(8, 40), st.sampled_from([0, 0, 3, 6, 30]), actions)
def test_a_position_always_reads_what_was_written_for_it(
    windows: Windows, num_blocks: int, num_states: int, todo: list[tuple[str, int, int]]
) -> None:
    sequences = Sequences(windows, num_blocks, num_states)
    for action, which, size in todo:
        if action == "start":
            sequences.start(which, size)
        elif sequences.live:
            index = which % len(sequences.live)
            if action == "grow":
                sequences.grow(index, size)
            elif action == "lose":
                sequences.lose(index, size)
            elif action == "fork":
                sequences.fork(index)
            else:
                table, _, _ = sequences.live.pop(index)
                (sequences.cache.free if action == "free" else sequences.cache.free_faulted)(table)
        sequences.cache.check_integrity([table for table, _, _ in sequences.live])


def test_the_check_finds_a_block_given_back_too_early() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.check_integrity([table])
    table.groups[1][5] = NO_BLOCK
    with pytest.raises(AssertionError):
        cache.check_integrity([table])
