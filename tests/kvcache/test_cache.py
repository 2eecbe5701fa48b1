"""KVCache: blocks for sequences, prefixes shared within a key, copies where something is shared."""

from collections.abc import Callable

import pytest

from quire.core.plan import BlockCopy
from quire.kvcache import BlockTable, KVCache, chain, root_hash

PROMPT = list(range(10))  # two full blocks of four and a half


def new_cache(num_blocks: int = 16, *, prefix_reuse: bool = True) -> KVCache:
    return KVCache(num_blocks, 4, prefix_reuse=prefix_reuse)


def computed(cache: KVCache, tokens: list[int], salt: str | None = "key") -> BlockTable:
    """A sequence whose tokens have all been computed and cached."""
    table = cache.new_table(salt)
    found = cache.match_prefix(table, tokens)
    copies = cache.extend(table, min(found, len(tokens) - 1), len(tokens))
    assert copies is not None
    cache.release_sources(copies)
    cache.cache_full_blocks(table, tokens, len(tokens))
    return table


def found_by(cache: KVCache, tokens: list[int], salt: str | None = "key") -> int:
    """How many leading tokens a newcomer would find computed."""
    table = cache.new_table(salt)
    found = cache.match_prefix(table, tokens)
    cache.free(table)
    return found


def test_tokens_take_as_many_blocks_as_they_fill_even_partly() -> None:
    cache = new_cache()
    assert [cache.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_sequence_gets_blocks_as_it_grows_and_gives_all_back() -> None:
    cache = new_cache()
    table = cache.new_table("key")
    assert (table.ids, table.num_cached) == ((), 0)
    assert cache.extend(table, 0, 3) == []
    assert len(table.ids) == 1
    assert cache.extend(table, 3, 4) == []
    assert len(table.ids) == 1
    assert cache.extend(table, 4, 9) == []
    assert len(set(table.ids)) == 3
    assert cache.blocks_needed(table, 0, 1) == 0, "it has more than that"
    assert cache.usage == 3 / 16
    cache.check_integrity([table])
    cache.free(table)
    assert cache.usage == 0.0
    assert not table.ids
    assert table.num_cached == 0
    cache.check_integrity([])


def test_when_blocks_run_out_nothing_is_taken() -> None:
    cache = new_cache(2)
    table = cache.new_table("key")
    assert cache.extend(table, 0, 4) == []
    assert cache.extend(table, 4, 13) is None
    assert len(table.ids) == 1
    cache.check_integrity([table])


def test_full_blocks_are_found_again_and_partial_ones_are_not() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    assert found_by(cache, PROMPT) == 8
    assert found_by(cache, [*PROMPT[:8], 99]) == 8
    assert found_by(cache, [*PROMPT[:7], 99]) == 4
    assert found_by(cache, [99, *PROMPT[1:]]) == 0
    cache.check_integrity([table])


def test_a_hash_covers_all_blocks_before_it() -> None:
    cache = new_cache()
    computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found_by(cache, [5, 6, 7, 8]) == 0
    assert found_by(cache, [9, 9, 9, 9, 5, 6, 7, 8]) == 0
    first, other = [1] * 4, [2] * 4
    computed(cache, [*first, *first, *other])
    computed(cache, [*first, *other, *first])
    assert found_by(cache, [*first, *other, *other]) == 8


def test_only_what_was_computed_is_cached() -> None:
    cache = new_cache()
    table = cache.new_table("key")
    cache.extend(table, 0, 10)
    cache.cache_full_blocks(table, PROMPT, 7)
    assert found_by(cache, PROMPT) == 4
    cache.cache_full_blocks(table, PROMPT, 8)
    assert found_by(cache, PROMPT) == 8


def test_a_prefix_outlives_its_sequence_until_the_blocks_are_needed() -> None:
    cache = new_cache(3)
    cache.free(computed(cache, PROMPT))
    assert found_by(cache, PROMPT) == 8
    other = computed(cache, [50 + i for i in range(8)])
    assert found_by(cache, PROMPT) == 4, "the tail goes before the prefix"
    cache.check_integrity([other])


def test_the_prefix_used_last_is_kept_longest() -> None:
    cache = new_cache(3)
    first, second = [1] * 4, [2] * 4
    cache.free(computed(cache, first))
    cache.free(computed(cache, second))
    assert found_by(cache, first) == 4  # used again
    computed(cache, [3] * 8)
    assert found_by(cache, first) == 4
    assert found_by(cache, second) == 0


def test_a_prefix_ends_at_the_first_block_that_is_not_cached() -> None:
    cache = new_cache()
    table = computed(cache, list(range(12)))
    cache.pool.uncache(table.ids[1])
    assert found_by(cache, list(range(12))) == 4
    assert cache.admission_cost(cache.new_table("key"), list(range(12)), 1) == 2
    cache.pool.uncache(table.ids[0])
    assert found_by(cache, list(range(12))) == 0


def test_no_key_finds_what_another_computed() -> None:
    cache = new_cache()
    computed(cache, PROMPT, "alice")
    assert found_by(cache, PROMPT, "alice") == 8
    assert found_by(cache, PROMPT, "bob") == 0
    assert found_by(cache, PROMPT, "") == 0


def test_keys_that_differ_in_lone_surrogates_are_kept_apart() -> None:
    cache = new_cache()
    computed(cache, PROMPT, "\udc80")
    assert found_by(cache, PROMPT, "\udc80") == 8
    assert found_by(cache, PROMPT, "\udc81") == 0


def test_a_sequence_without_salt_neither_reuses_nor_offers() -> None:
    cache = new_cache()
    computed(cache, PROMPT, "key")
    assert found_by(cache, PROMPT, None) == 0
    other = [100 + token for token in PROMPT]
    computed(cache, other, None)
    assert found_by(cache, other, "key") == 0


def test_reuse_switched_off_is_off() -> None:
    cache = new_cache(prefix_reuse=False)
    computed(cache, PROMPT)
    assert found_by(cache, PROMPT) == 0
    assert cache.pool.num_cached == 0


def test_a_shared_block_is_copied_before_it_is_written_and_its_source_stays_until_then() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT[:8])
    second = cache.new_table("key")
    assert cache.match_prefix(second, PROMPT[:8]) == 8
    shared = second.ids
    copies = cache.extend(second, 7, 8)  # the last token is computed again
    assert copies == [BlockCopy(shared[1], second.ids[1])]
    assert second.ids[0] == shared[0]
    assert second.ids[1] not in shared
    cache.free(first)
    assert not cache.pool.is_free(shared[1]), "the copy may still have to be done again"
    cache.check_integrity([second], copies)
    cache.release_sources(copies)
    assert cache.pool.is_free(shared[1])
    cache.check_integrity([second])


def test_a_shared_block_that_is_written_from_its_start_is_replaced_without_a_copy() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT[:8])
    second = cache.new_table("key")
    cache.match_prefix(second, PROMPT[:8])
    assert cache.extend(second, 4, 8) == []
    assert second.ids[1] != first.ids[1]
    cache.check_integrity([first, second])


def test_copies_are_counted_before_they_are_promised() -> None:
    cache = new_cache(2)
    computed(cache, PROMPT[:8])
    second = cache.new_table("key")
    cache.match_prefix(second, PROMPT[:8])
    assert cache.blocks_needed(second, 7, 8) == 1
    assert cache.extend(second, 7, 8) is None


def test_a_fork_shares_every_block_and_each_copies_what_it_writes() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    child = cache.fork(first, 10)
    assert child.ids == first.ids
    assert cache.usage == 3 / 16
    copies = cache.extend(child, 9, 11)
    assert copies == [BlockCopy(first.ids[2], child.ids[2])]
    assert child.ids[:2] == first.ids[:2]
    assert cache.extend(first, 10, 11) == [BlockCopy(copies[0].source, first.ids[2])], (
        "the source is retained for the copy, so its owner must not write into it either"
    )
    assert len({*first.ids, *child.ids, copies[0].source}) == 5


def test_the_last_of_two_that_shared_writes_in_place() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    child = cache.fork(first, 10)
    before = first.ids
    cache.free(child)
    assert cache.extend(first, 10, 11) == []
    assert first.ids == before


def test_admission_cost_is_what_a_sequence_takes_from_the_free_blocks() -> None:
    cache = new_cache()
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 1) == 3
    used = computed(cache, PROMPT)
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 1) == 1
    assert cache.admission_cost(cache.new_table("key"), PROMPT[:8], 1) == 1, (
        "its last block is copied"
    )
    assert cache.admission_cost(cache.new_table(None), PROMPT, 1) == 3
    cache.free(used)
    assert cache.admission_cost(cache.new_table("key"), PROMPT, 1) == 3, (
        "evictable blocks count as free until revived"
    )


def test_a_fork_of_a_part_goes_its_own_way() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    child = cache.fork(first, 6)
    assert (child.ids, child.num_cached) == (first.ids[:2], 1)
    own = [*PROMPT[:6], 90, 91, 92, 93, 94, 95]
    copies = cache.extend(child, 6, 12)
    assert copies == [BlockCopy(first.ids[1], child.ids[1])]
    cache.release_sources(copies)
    cache.cache_full_blocks(child, own, 12)
    assert (found_by(cache, own), found_by(cache, PROMPT)) == (12, 8)
    cache.check_integrity([first, child])


def test_writing_into_blocks_of_its_own_takes_none_from_a_full_pool() -> None:
    cache = new_cache(1)
    table = cache.new_table("key")
    assert cache.extend(table, 0, 1) == []
    assert cache.blocks_needed(table, 1, 4) == 0
    assert cache.extend(table, 1, 4) == []
    assert cache.extend(table, 4, 5) is None


def test_a_shared_block_behind_one_of_its_own_is_replaced_too() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    before = table.ids
    cache.pool.uncache(before[0])
    assert cache.extend(table, 0, 8) == []
    assert (table.ids[0], table.ids[2]) == (before[0], before[2])
    assert table.ids[1] != before[1]
    cache.check_integrity([table])


def test_what_is_written_again_is_cached_again() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    before = table.ids
    assert table.num_cached == 2
    assert cache.extend(table, 5, 10) == [BlockCopy(before[1], table.ids[1])]
    assert (table.ids[0], table.num_cached) == (before[0], 1)
    cache.release_sources([BlockCopy(before[1], table.ids[1])])
    cache.cache_full_blocks(table, PROMPT, 10)
    assert table.num_cached == 2
    cache.check_integrity([table])


def test_caching_fewer_tokens_than_before_changes_nothing() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.cache_full_blocks(table, PROMPT, 5)
    assert table.num_cached == 2
    assert cache.pool.num_cached == 2


# ---- faults


def test_blocks_of_a_faulted_sequence_are_not_found() -> None:
    cache = new_cache()
    cache.free_faulted(computed(cache, PROMPT))
    assert found_by(cache, PROMPT) == 0
    assert cache.pool.num_cached == 0
    cache.check_integrity([])


def test_a_fault_leaves_what_others_computed() -> None:
    cache = new_cache()
    computed(cache, PROMPT[:4])
    faulty = computed(cache, PROMPT)
    cache.free_faulted(faulty)
    assert found_by(cache, PROMPT) == 4


def test_blocks_cached_before_a_preemption_are_uncached_with_the_fault() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.free(table)  # pre-empted: its blocks stay cached
    assert cache.match_prefix(table, PROMPT) == 8
    cache.free_faulted(table)
    assert found_by(cache, PROMPT) == 0


def test_blocks_of_a_sibling_that_ended_well_are_uncached_with_the_fault() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    child = cache.fork(first, 10)
    cache.free(first)
    cache.free_faulted(child)
    assert found_by(cache, PROMPT) == 0
    cache.check_integrity([])


def test_a_reader_of_an_uncached_block_keeps_it() -> None:
    cache = new_cache()
    faulty = computed(cache, PROMPT)
    reader = cache.new_table("key")
    assert cache.match_prefix(reader, PROMPT) == 8
    cache.free_faulted(faulty)
    cache.check_integrity([reader])
    assert not any(cache.pool.is_free(block) for block in reader.ids)


# ---- the check


def take_a_block_away(cache: KVCache, table: BlockTable) -> None:
    cache.pool.release(table.ids[0])


def forget_to_renew_the_table(cache: KVCache, table: BlockTable) -> None:
    table.ids = table.ids[:-1]


def cache_too_much(cache: KVCache, table: BlockTable) -> None:
    table.num_cached = 9


@pytest.mark.parametrize("corrupt", [take_a_block_away, forget_to_renew_the_table, cache_too_much])
def test_the_check_finds(corrupt: Callable[[KVCache, BlockTable], None]) -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.check_integrity([table])
    corrupt(cache, table)
    with pytest.raises(AssertionError):
        cache.check_integrity([table])


def test_the_check_wants_every_table_and_every_copy() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT[:8])
    other = cache.fork(table, 8)
    copies = cache.extend(other, 7, 8)
    assert copies
    cache.check_integrity([table, other], copies)
    with pytest.raises(AssertionError):
        cache.check_integrity([table], copies)
    with pytest.raises(AssertionError):
        cache.check_integrity([table, other])


def test_hashes_are_of_128_bits() -> None:
    assert len(root_hash("key")) == len(chain(root_hash("key"), [1, 2])) == 16
