"""KVCache with states: a slot for each step, shared by forks and prefixes, never written twice."""

from collections.abc import Callable

import pytest

from quire.core.plan import NO_STATE
from quire.kvcache import BlockTable, KVCache

SIZE = 4  # tokens of a block
PROMPT = list(range(10))  # two full blocks of four and a half


def new_cache(num_states: int = 8, num_blocks: int = 32) -> KVCache:
    return KVCache(num_blocks, SIZE, prefix_reuse=True, num_states=num_states)


def plan(cache: KVCache, table: BlockTable, start: int, end: int) -> tuple[int, ...]:
    """The states of a row of positions start..end."""
    assert cache.extend(table, start, end) == []
    return table.row_states


def collect(cache: KVCache, table: BlockTable, end: int, tokens: list[int] = PROMPT) -> None:
    cache.cache_full_blocks(table, tokens, end)
    cache.state_computed(table, end, end)


def computed(
    cache: KVCache, ends: tuple[int, ...], tokens: list[int] = PROMPT, salt: str | None = "key"
) -> BlockTable:
    """A sequence whose steps ended after so many tokens, all collected."""
    table = cache.new_table(salt)
    start = 0
    for end in ends:
        plan(cache, table, start, end)
        collect(cache, table, end, tokens)
        start = end
    return table


def found_by(cache: KVCache, tokens: list[int], salt: str | None = "key") -> int:
    table = cache.new_table(salt)
    found = cache.match_prefix(table, tokens)
    cache.free(table)
    return found


def slots(table: BlockTable) -> list[int]:
    return [slot for _, slot in table.states]


def test_a_cache_without_states_plans_none() -> None:
    cache = KVCache(4, SIZE, prefix_reuse=True)
    table = cache.new_table("key")
    assert cache.extend(table, 0, 3) == []
    assert (table.row_states, table.states, cache.has_states) == ((), [], False)


def test_each_step_reads_the_state_that_the_one_before_wrote() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    source, first = plan(cache, table, 0, 3)
    assert source == NO_STATE
    source, second = plan(cache, table, 3, 7)
    assert source == first
    source, third = plan(cache, table, 7, 8)
    assert source == second
    assert len({first, second, third}) == 3
    assert [end for end, _ in table.states] == [3, 7, 8]
    cache.check_integrity([table])


def test_a_collected_step_gives_the_states_before_its_own_back() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    plan(cache, table, 0, 3)
    _, first = plan(cache, table, 3, 7)
    cache.state_computed(table, 3, 3)
    assert cache.state_pool.num_used == 2
    _, last = plan(cache, table, 7, 8)
    cache.state_computed(table, 7, 7)
    assert slots(table) == [first, last]
    assert cache.state_pool.num_used == 2


def test_a_state_that_is_needed_is_kept() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    plan(cache, table, 0, 9)
    cache.state_computed(table, 9, 9)
    plan(cache, table, 9, 10)
    cache.state_computed(table, 10, 9)
    assert [end for end, _ in table.states] == [9, 10]


def test_a_step_that_was_not_run_gives_its_state_back() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    _, kept = plan(cache, table, 0, 3)
    plan(cache, table, 3, 7)
    plan(cache, table, 7, 8)
    cache.drop_states(table, 3)
    assert slots(table) == [kept]
    assert cache.state_pool.num_used == 1
    assert plan(cache, table, 3, 5)[0] == kept


def test_a_step_from_a_state_that_is_not_there_is_found() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    plan(cache, table, 0, 3)
    with pytest.raises(AssertionError, match="no state after 2"):
        cache.extend(table, 2, 4)


def test_a_row_within_its_last_block_changes_no_block_table() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    plan(cache, table, 0, 2)
    ids = table.ids
    plan(cache, table, 2, 3)
    assert table.ids is ids, "a decode of a long sequence does not pay for its length"


def test_when_states_run_out_nothing_is_taken() -> None:
    cache = new_cache(num_states=1)
    table = cache.new_table(None)
    plan(cache, table, 0, 3)
    assert cache.extend(table, 3, 9) is None
    assert len(table.ids) == 1
    assert len(table.states) == 1
    cache.check_integrity([table])


def test_when_blocks_run_out_no_state_is_taken() -> None:
    cache = new_cache(num_blocks=1)
    table = cache.new_table(None)
    assert cache.extend(table, 0, 5) is None
    assert cache.state_pool.num_used == 0


def test_a_sequence_gives_all_states_back() -> None:
    cache = new_cache()
    table = computed(cache, (3, 8))
    plan(cache, table, 8, 9)
    cache.free(table)
    assert (table.states, cache.state_pool.num_used) == ([], 0)
    cache.check_integrity([table])


# ---- forks


def test_a_fork_starts_from_the_state_after_its_tokens_without_a_copy() -> None:
    cache = new_cache()
    table = computed(cache, (9,))
    plan(cache, table, 9, 10)
    child = cache.fork(table, 9)
    assert child.states == table.states[:1]
    cache.check_integrity([table, child])
    collect(cache, table, 10)
    source = child.states[0][1]
    assert not cache.state_pool.is_free(source), "the child still needs it"
    copies = cache.extend(child, 9, 10)
    assert copies is not None
    assert child.row_states[0] == source
    assert child.row_states[1] not in slots(table)


def test_a_fork_takes_no_state_that_it_does_not_start_from() -> None:
    cache = new_cache()
    table = cache.new_table(None)
    for start, end in ((0, 3), (3, 8), (8, 9)):
        plan(cache, table, start, end)
    assert cache.fork(table, 8).states == table.states[1:2]


def test_a_fork_from_the_beginning_starts_from_no_state() -> None:
    cache = new_cache()
    child = cache.fork(computed(cache, (1,)), 0)
    assert plan(cache, child, 0, 1)[0] == NO_STATE


# ---- prefixes


def test_a_prefix_is_found_where_a_state_is() -> None:
    cache = new_cache()
    table = computed(cache, (4, 8, 10))
    assert found_by(cache, [*PROMPT[:8], 99]) == 8
    assert found_by(cache, [*PROMPT[:7], 99]) == 4
    cache.free(table)
    assert cache.state_pool.num_used == 0
    newcomer = cache.new_table("key")
    assert cache.match_prefix(newcomer, PROMPT) == 8
    ((num_tokens, slot),) = newcomer.states
    assert num_tokens == 8
    assert plan(cache, newcomer, 8, 10)[0] == slot
    cache.check_integrity([newcomer])


def test_blocks_without_a_state_are_no_prefix() -> None:
    cache = new_cache()
    computed(cache, (10,))
    assert found_by(cache, [*PROMPT, 99]) == 0
    computed(cache, (4, 10), [5, *PROMPT])
    assert found_by(cache, [5, *PROMPT]) == 4


def test_a_state_without_blocks_is_no_prefix() -> None:
    cache = new_cache()
    table = computed(cache, (4, 8, 10))
    cache.pool.uncache(table.ids[1])
    assert found_by(cache, PROMPT) == 4


def test_the_last_token_is_computed_from_a_state_before_it() -> None:
    cache = new_cache()
    computed(cache, (4, 8))
    assert found_by(cache, PROMPT[:8]) == 4
    assert found_by(cache, PROMPT[:9]) == 8
    assert cache.admission_cost(cache.new_table("key"), PROMPT[:8], 8) == 1


def test_a_prefix_is_used_again_as_it_was_found_and_evicted_in_order_of_use() -> None:
    cache = new_cache(num_states=3)
    first, second = [1] * 5, [2] * 5
    cache.free(computed(cache, (4, 5), first))
    cache.free(computed(cache, (4, 5), second))
    assert found_by(cache, first) == 4  # used again
    cache.free(computed(cache, (1, 2), [3] * 5))  # two states at once, of which one was empty
    assert found_by(cache, first) == 4
    assert found_by(cache, second) == 0


def test_no_key_finds_anothers_state_and_without_salt_none_is_cached() -> None:
    cache = new_cache()
    computed(cache, (4, 8), salt=None)
    assert cache.state_pool.num_cached == 0
    computed(cache, (4, 8))
    assert found_by(cache, PROMPT, "other") == 0
    assert found_by(cache, PROMPT, None) == 0


def test_a_fault_hides_the_states_that_it_computed() -> None:
    cache = new_cache()
    before = computed(cache, (4,))
    faulty = cache.new_table("key")
    assert cache.match_prefix(faulty, PROMPT) == 4
    plan(cache, faulty, 4, 8)
    collect(cache, faulty, 8)
    assert found_by(cache, PROMPT) == 8
    cache.free_faulted(faulty)
    assert found_by(cache, PROMPT) == 4, "another computed that"
    assert cache.state_pool.num_cached == 1
    cache.check_integrity([before])


def test_of_the_states_of_a_completion_the_last_one_is_found() -> None:
    cache = new_cache()
    tokens = [*PROMPT, *PROMPT, *PROMPT]
    table = computed(cache, (8,), tokens)
    for start in range(8, 24, 4):
        plan(cache, table, start, start + 4)
        cache.cache_full_blocks(table, tokens, start + 4)
        cache.state_computed(table, start + 4, start + 4, is_decoded=start >= 12)
    assert [found_by(cache, tokens[:end]) for end in (9, 13, 17, 21, 25)] == [8, 12, 12, 12, 24]
    assert cache.state_pool.num_cached == 3
    cache.check_integrity([table])


# ---- the check


def take_a_state_away(cache: KVCache, table: BlockTable) -> None:
    cache.state_pool.release(table.states[0][1])


def forget_a_state(cache: KVCache, table: BlockTable) -> None:
    table.states.pop()


def swap_states(cache: KVCache, table: BlockTable) -> None:
    table.states.reverse()


@pytest.mark.parametrize("corrupt", [take_a_state_away, forget_a_state, swap_states])
def test_the_check_finds(corrupt: Callable[[KVCache, BlockTable], None]) -> None:
    cache = new_cache()
    table = computed(cache, (3,))
    plan(cache, table, 3, 4)
    cache.check_integrity([table])
    corrupt(cache, table)
    with pytest.raises(AssertionError):
        cache.check_integrity([table])


def test_the_check_wants_the_state_to_go_on_from() -> None:
    cache = new_cache()
    table = computed(cache, (3,))
    cache.check_state(table, 3)
    with pytest.raises(AssertionError, match="no state after 4"):
        cache.check_state(table, 4)
