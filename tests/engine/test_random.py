"""Random runs of the engine against solo runs of each request, and proof that they find faults."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from tests.engine.machine import EngineMachine, machine_with, state_slots

from quire.core.plan import BlockCopy
from quire.kvcache import BlockPool, BlockTable, KVCache

STEPS = 50
PARTS = 8  # so that workers can share them
EXAMPLES_A_PART = 120


def run_machine(
    name: str, num_examples: int, kind: type[EngineMachine] = EngineMachine, **more: Any
) -> None:
    """Hypothesis derives a repeatable run from the machine's name."""
    machine = type(name, (kind,), {})
    more.setdefault("phases", [Phase.generate, Phase.shrink])  # explaining takes minutes
    options = settings(max_examples=num_examples, stateful_step_count=STEPS, **more)
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_gets_the_tokens_of_its_solo_run(part: int) -> None:
    run_machine(f"EngineMachine{part}", EXAMPLES_A_PART)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_gets_the_tokens_of_its_solo_run_at_length(part: int) -> None:
    run_machine(f"LongEngineMachine{part}", 40 * EXAMPLES_A_PART)


Mutate = Callable[[pytest.MonkeyPatch], None]


def forget_to_copy(patch: pytest.MonkeyPatch) -> None:
    extend = KVCache.extend

    def broken(self: KVCache, table: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        copies = extend(self, table, start, end)
        if copies:
            self.release_sources(copies)
        return None if copies is None else []

    patch.setattr(KVCache, "extend", broken)


def write_into_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "is_writable", lambda self, block: True)


def share_blocks_between_different_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("quire.kvcache.chain", lambda parent, tokens: bytes(tokens[:1]))


def free_a_block_that_is_still_used(patch: pytest.MonkeyPatch) -> None:
    retain = BlockPool.retain

    def broken(self: BlockPool, block: int) -> None:
        if self._references[block] == 0:  # forgets to count the second reference
            retain(self, block)

    patch.setattr(BlockPool, "retain", broken)


def cache_a_block_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    cache_full_blocks = KVCache.cache_full_blocks

    def broken(self: KVCache, table: BlockTable, tokens: list[int], num_computed: int) -> None:
        reach = min(len(table.ids) * self.block_size, len(tokens))
        cache_full_blocks(self, table, tokens, max(num_computed, reach))

    patch.setattr(KVCache, "cache_full_blocks", broken)


def give_back_what_the_next_position_sees(patch: pytest.MonkeyPatch) -> None:
    release_unseen = KVCache.release_unseen

    def broken(self: KVCache, table: BlockTable, num_computed: int) -> None:
        release_unseen(self, table, min(num_computed + self.block_size, len(table.ids)))

    patch.setattr(KVCache, "release_unseen", broken)


def give_back_what_a_failed_step_reads_again(patch: pytest.MonkeyPatch) -> None:
    extend = KVCache.extend

    def broken(self: KVCache, table: BlockTable, start: int, end: int) -> list[BlockCopy] | None:
        self.release_unseen(table, start + 1)  # when a step is planned, not when one is collected
        return extend(self, table, start, end)

    patch.setattr(KVCache, "extend", broken)


def take_a_prefix_without_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "_last_missing", lambda self, hashes, length, num_tokens: None)


def find_one_group_in_another(patch: pytest.MonkeyPatch) -> None:
    lookup = BlockPool.lookup
    cache = BlockPool.cache
    patch.setattr(BlockPool, "lookup", lambda self, key: lookup(self, key[:16]))
    patch.setattr(BlockPool, "cache", lambda self, block, key: cache(self, block, key[:16]))


def give_back_the_state_that_a_step_in_flight_reads(patch: pytest.MonkeyPatch) -> None:
    state_computed = KVCache.state_computed

    def broken(
        self: KVCache, table: BlockTable, num_computed: int, first_needed: int, **more: Any
    ) -> None:
        if first_needed == num_computed:  # no siblings are to come
            first_needed = table.states[-1][0]  # of a step in flight, which reads the one before
        state_computed(self, table, num_computed, first_needed, **more)

    patch.setattr(KVCache, "state_computed", broken)


def give_back_the_state_that_siblings_start_from(patch: pytest.MonkeyPatch) -> None:
    state_computed = KVCache.state_computed

    def broken(
        self: KVCache, table: BlockTable, num_computed: int, first_needed: int, **more: Any
    ) -> None:
        state_computed(self, table, num_computed, num_computed, **more)

    patch.setattr(KVCache, "state_computed", broken)


def fork_with_the_last_state(patch: pytest.MonkeyPatch) -> None:
    fork = KVCache.fork

    def broken(self: KVCache, table: BlockTable, num_tokens: int) -> BlockTable:
        child = fork(self, table, num_tokens)
        if child.states:
            self.state_pool.release(child.states[0][1])
            self.state_pool.retain(table.states[-1][1])
            child.states = [(num_tokens, table.states[-1][1])]
        return child

    patch.setattr(KVCache, "fork", broken)


def cache_a_state_before_its_blocks_are_full(patch: pytest.MonkeyPatch) -> None:
    state_computed = KVCache.state_computed

    def broken(
        self: KVCache, table: BlockTable, num_computed: int, first_needed: int, **more: Any
    ) -> None:
        if table.salt is not None and num_computed > self.block_size:
            key = table.hashes[num_computed // self.block_size - 1] + b"state"
            self.state_pool.cache(dict(table.states)[num_computed], key)
        state_computed(self, table, num_computed, first_needed, **more)

    patch.setattr(KVCache, "state_computed", broken)


def keep_states_that_were_rolled_back(patch: pytest.MonkeyPatch) -> None:
    drop_states = KVCache.drop_states

    def broken(self: KVCache, table: BlockTable, num_tokens: int) -> None:
        if not num_tokens:
            drop_states(self, table, num_tokens)

    patch.setattr(KVCache, "drop_states", broken)


OF_BLOCKS = [
    forget_to_copy,
    write_into_shared_blocks,
    share_blocks_between_different_prompts,
    free_a_block_that_is_still_used,
    cache_a_block_before_it_is_full,
    give_back_what_the_next_position_sees,
    give_back_what_a_failed_step_reads_again,
    take_a_prefix_without_its_window,
    find_one_group_in_another,
]
OF_STATES = [
    give_back_the_state_that_a_step_in_flight_reads,
    give_back_the_state_that_siblings_start_from,
    fork_with_the_last_state,
    cache_a_state_before_its_blocks_are_full,
    keep_states_that_were_rolled_back,
]


@pytest.mark.parametrize("mutate", [*OF_BLOCKS, *OF_STATES])
def test_a_broken_allocator_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_machine(
            f"Broken{mutate.__name__}",
            4 * EXAMPLES_A_PART,
            machine_with(state_slots if mutate in OF_STATES else st.just(0)),
            phases=[Phase.generate],
            report_multiple_bugs=False,
        )
