"""KVCache: blocks for sequences, prefixes shared within a key, copies where something is shared."""

from collections.abc import Callable

import pytest

from quire.core.plan import BlockCopy
from quire.kvcache import BlockTable, KVCache

PROMPT = list(range(10))  # two full blocks of four and a half


def new_cache(num_blocks: int = 16, *, prefix_reuse: bool = True) -> KVCache:
    return KVCache(num_blocks, 4, prefix_reuse=prefix_reuse)


def computed(cache: KVCache, tokens: list[int], salt: str | None = "key") -> BlockTable:
    """A sequence whose tokens have all been computed and offered."""
    table = cache.open(salt)
    found = cache.match_prefix(table, tokens)
    copies = cache.extend(table, min(found, len(tokens) - 1), len(tokens))
    assert copies is not None
    cache.settle(copies)
    cache.publish(table, tokens, len(tokens))
    return table


def found_by(cache: KVCache, tokens: list[int], salt: str | None = "key") -> int:
    """How many leading tokens a newcomer would find computed."""
    table = cache.open(salt)
    found = cache.match_prefix(table, tokens)
    cache.close(table)
    return found


def test_tokens_take_as_many_blocks_as_they_fill_even_partly() -> None:
    cache = new_cache()
    assert [cache.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_sequence_gets_blocks_as_it_grows_and_gives_all_back() -> None:
    cache = new_cache()
    table = cache.open("key")
    assert cache.extend(table, 0, 3) == []
    assert len(table.ids) == 1
    assert cache.extend(table, 3, 4) == []
    assert len(table.ids) == 1
    assert cache.extend(table, 4, 9) == []
    assert len(set(table.ids)) == 3
    assert cache.usage == 3 / 16
    cache.check_integrity([table])
    cache.close(table)
    assert cache.usage == 0.0
    assert not table.ids
    cache.check_integrity([])


def test_when_blocks_run_out_nothing_is_taken() -> None:
    cache = new_cache(2)
    table = cache.open("key")
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


def test_a_block_is_known_by_all_that_comes_before_it() -> None:
    cache = new_cache()
    computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found_by(cache, [5, 6, 7, 8]) == 0
    assert found_by(cache, [9, 9, 9, 9, 5, 6, 7, 8]) == 0


def test_only_what_was_computed_is_offered() -> None:
    cache = new_cache()
    table = cache.open("key")
    cache.extend(table, 0, 10)
    cache.publish(table, PROMPT, 7)
    assert found_by(cache, PROMPT) == 4
    cache.publish(table, PROMPT, 8)
    assert found_by(cache, PROMPT) == 8


def test_a_prefix_outlives_its_sequence_until_the_blocks_are_needed() -> None:
    cache = new_cache(3)
    cache.close(computed(cache, PROMPT))
    assert found_by(cache, PROMPT) == 8
    other = computed(cache, [50 + i for i in range(8)])
    assert found_by(cache, PROMPT) == 4, "the tail goes before the prefix"
    cache.check_integrity([other])


def test_the_prefix_used_last_is_kept_longest() -> None:
    cache = new_cache(3)
    first, second = [1] * 4, [2] * 4
    cache.close(computed(cache, first))
    cache.close(computed(cache, second))
    assert found_by(cache, first) == 4  # used again
    computed(cache, [3] * 8)
    assert found_by(cache, first) == 4
    assert found_by(cache, second) == 0


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
    assert cache.pool.num_known == 0


def test_a_shared_block_is_copied_before_it_is_written_and_its_source_stays_until_then() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT[:8])
    second = cache.open("key")
    assert cache.match_prefix(second, PROMPT[:8]) == 8
    shared = second.ids
    copies = cache.extend(second, 7, 8)  # the last token is computed again
    assert copies == [BlockCopy(shared[1], second.ids[1])]
    assert second.ids[0] == shared[0]
    assert second.ids[1] not in shared
    cache.close(first)
    assert not cache.pool.is_free(shared[1]), "the copy may still have to be done again"
    cache.check_integrity([second], copies)
    cache.settle(copies)
    assert cache.pool.is_free(shared[1])
    cache.check_integrity([second])


def test_a_shared_block_that_is_written_from_its_start_is_replaced_without_a_copy() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT[:8])
    second = cache.open("key")
    cache.match_prefix(second, PROMPT[:8])
    assert cache.extend(second, 4, 8) == []
    assert second.ids[1] != first.ids[1]
    cache.check_integrity([first, second])


def test_copies_are_counted_before_they_are_promised() -> None:
    cache = new_cache(2)
    computed(cache, PROMPT[:8])
    second = cache.open("key")
    cache.match_prefix(second, PROMPT[:8])
    assert cache.blocks_needed(second, 7, 8) == 1
    assert cache.extend(second, 7, 8) is None


def test_a_fork_shares_every_block_and_each_copies_what_it_writes() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    twin = cache.fork(first, 10)
    assert twin.ids == first.ids
    assert cache.usage == 3 / 16
    copies = cache.extend(twin, 9, 11)
    assert copies == [BlockCopy(first.ids[2], twin.ids[2])]
    assert twin.ids[:2] == first.ids[:2]
    assert cache.extend(first, 10, 11) == [BlockCopy(copies[0].source, first.ids[2])], (
        "the source is held for the copy, so its owner must not write into it either"
    )
    assert len({*first.ids, *twin.ids, copies[0].source}) == 5


def test_the_last_of_two_that_shared_writes_in_place() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    twin = cache.fork(first, 10)
    before = first.ids
    cache.close(twin)
    assert cache.extend(first, 10, 11) == []
    assert first.ids == before


def test_what_opening_costs_is_what_it_takes_from_the_free_blocks() -> None:
    cache = new_cache()
    assert cache.cost(cache.open("key"), PROMPT) == 3
    held = computed(cache, PROMPT)
    assert cache.cost(cache.open("key"), PROMPT) == 1
    assert cache.cost(cache.open("key"), PROMPT[:8]) == 1, "its last block is copied"
    assert cache.cost(cache.open(None), PROMPT) == 3
    cache.close(held)
    assert cache.cost(cache.open("key"), PROMPT) == 3, "idle blocks count as free until revived"


# ---- faults


def test_blocks_of_a_faulted_sequence_are_not_found() -> None:
    cache = new_cache()
    cache.disown(computed(cache, PROMPT))
    assert found_by(cache, PROMPT) == 0
    assert cache.pool.num_known == 0
    cache.check_integrity([])


def test_a_fault_leaves_what_others_computed() -> None:
    cache = new_cache()
    computed(cache, PROMPT[:4])
    faulty = computed(cache, PROMPT)
    cache.disown(faulty)
    assert found_by(cache, PROMPT) == 4


def test_blocks_offered_before_a_preemption_are_forgotten_with_the_fault() -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.close(table)  # pre-empted: its blocks stay findable
    assert cache.match_prefix(table, PROMPT) == 8
    cache.disown(table)
    assert found_by(cache, PROMPT) == 0


def test_blocks_of_a_sibling_that_ended_well_are_forgotten_with_the_fault() -> None:
    cache = new_cache()
    first = computed(cache, PROMPT)
    twin = cache.fork(first, 10)
    cache.close(first)
    cache.disown(twin)
    assert found_by(cache, PROMPT) == 0
    cache.check_integrity([])


def test_a_reader_of_a_forgotten_block_keeps_it() -> None:
    cache = new_cache()
    faulty = computed(cache, PROMPT)
    reader = cache.open("key")
    assert cache.match_prefix(reader, PROMPT) == 8
    cache.disown(faulty)
    cache.check_integrity([reader])
    assert not any(cache.pool.is_free(block) for block in reader.ids)


# ---- the check


def take_a_block_away(cache: KVCache, table: BlockTable) -> None:
    cache.pool.release(table.blocks[0])


def forget_to_renew_the_table(cache: KVCache, table: BlockTable) -> None:
    table.ids = table.ids[:-1]


def publish_too_much(cache: KVCache, table: BlockTable) -> None:
    table.num_published = 9


@pytest.mark.parametrize(
    "corrupt", [take_a_block_away, forget_to_renew_the_table, publish_too_much]
)
def test_the_check_finds(corrupt: Callable[[KVCache, BlockTable], None]) -> None:
    cache = new_cache()
    table = computed(cache, PROMPT)
    cache.check_integrity([table])
    corrupt(cache, table)
    with pytest.raises(AssertionError):
        cache.check_integrity([table])


def test_the_check_wants_every_hold_and_every_copy() -> None:
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
