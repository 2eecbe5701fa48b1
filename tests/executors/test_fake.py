"""FakeExecutor: tokens depend on what is in the blocks, time is virtual, faults are as set."""

import pytest

from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    StepCancelledError,
    StepTimeoutError,
)
from quire.core.plan import (
    BlockCopy,
    History,
    Sampling,
    SequencePlan,
    SequenceResult,
    StepPlan,
    Want,
)
from quire.core.sampling import SamplingParams
from quire.executors.base import Executor, TokenStore
from quire.executors.fake import FakeExecutor, Faults, StepCost

GREEDY = Sampling(SamplingParams(temperature=0.0), seed=0, index=0)


def new_executor(**options: object) -> FakeExecutor:
    return FakeExecutor(num_blocks=8, block_size=4, **options)  # type: ignore[arg-type]


def row(
    tokens: tuple[int, ...],
    table: tuple[int, ...],
    *,
    start: int = 0,
    name: int = 1,
    sampling: Sampling = GREEDY,
) -> SequencePlan:
    return SequencePlan(name, start, tokens, None, table, Want.SAMPLE, sampling)


def step(executor: FakeExecutor, *rows: SequencePlan, step_id: int = 1) -> list[SequenceResult]:
    return list(executor.collect(executor.submit(StepPlan(step_id, rows))).sequences)


def token_after(executor: FakeExecutor, *rows: SequencePlan) -> int:
    token = step(executor, *rows)[-1].token
    assert token is not None
    return token


def test_it_is_an_executor() -> None:
    executor: Executor = FakeExecutor()
    assert not executor.is_warm
    executor.warm_up()
    assert executor.is_warm
    assert executor.capacity.num_blocks == 256
    assert executor.memory_bytes["kv"] == 256 * 16 * 8


def test_the_token_depends_on_the_context_and_not_on_where_it_stands() -> None:
    same = {token_after(new_executor(), row((1, 2, 3, 4, 5), t)) for t in ((0, 1), (7, 2), (3, 0))}
    assert len(same) == 1
    others = {token_after(new_executor(), row((1, 2, 3, 4, last), (0, 1))) for last in range(50)}
    assert len(others) > 40


def test_chunks_do_not_change_the_token() -> None:
    whole = token_after(new_executor(), row((1, 2, 3, 4, 5), (0, 1)))
    executor = new_executor()
    step(executor, row((1, 2), (0, 1))._replace(want=Want.NOTHING))
    assert token_after(executor, row((3, 4, 5), (0, 1), start=2)) == whole


def test_a_block_overwritten_by_another_sequence_changes_the_token() -> None:
    alone = new_executor()
    step(alone, row((1, 2, 3), (0,)))
    expected = token_after(alone, row((4,), (0,), start=3))
    disturbed = new_executor()
    step(disturbed, row((1, 2, 3), (0,)), row((9,), (0,), name=2))
    assert token_after(disturbed, row((4,), (0,), start=3)) != expected


def test_a_copy_is_done_before_the_rows() -> None:
    executor = new_executor()
    step(executor, row((1, 2, 3), (0,)))
    plan = StepPlan(
        2, (row((9,), (0,), start=0), row((4,), (5,), start=3, name=2)), (BlockCopy(0, 5),)
    )
    copied = executor.collect(executor.submit(plan)).sequences[1].token
    assert copied == token_after(new_executor(), row((1, 2, 3, 4), (0,)))


def test_running_a_step_again_gives_the_same() -> None:
    executor = new_executor()
    first = step(executor, row((1, 2, 3, 4, 5), (0, 1)), row((6,), (2,), name=2))
    assert step(executor, row((1, 2, 3, 4, 5), (0, 1)), step_id=2) == first[:1]
    assert step(executor, row((6,), (2,), name=2), step_id=3) == first[1:]


def test_a_row_can_follow_a_step_that_is_not_collected_yet() -> None:
    executor = new_executor()
    first = executor.submit(StepPlan(1, (row((1, 2), (0,)),)))
    follower = row((), (0,), start=2)._replace(follows=1)
    second = executor.submit(StepPlan(2, (follower,)))
    sampled = executor.collect(first).sequences[0].token
    assert sampled is not None
    expected = token_after(new_executor(), row((1, 2, sampled), (0,)))
    assert executor.collect(second).sequences[0].token == expected


def test_a_row_that_follows_a_faulted_one_faults_alone() -> None:
    executor = new_executor(faults=Faults(nan=lambda plan: plan.sequence_id == 1))
    step(executor, row((1,), (0,)), row((2,), (1,), name=2))
    followers = [row((), (n,), start=1, name=n + 1)._replace(follows=1) for n in (0, 1)]
    faulted, sound = step(executor, *followers, step_id=2)
    assert faulted.fault is not None
    assert sound.token is not None


def test_sampled_tokens_depend_on_the_draw_and_greedy_ones_do_not() -> None:
    hot = SamplingParams(temperature=1.0)
    drawn = {
        token_after(new_executor(), row((1,), (0,), sampling=Sampling(hot, seed, 0)))
        for seed in range(20)
    }
    assert len(drawn) > 15
    cold = {
        token_after(new_executor(), row((1,), (0,), sampling=Sampling(GREEDY.params, seed, 0)))
        for seed in range(20)
    }
    assert len(cold) == 1


def test_history_mask_and_minimum_are_heeded() -> None:
    plain = row((1,), (0,))
    assert token_after(new_executor(), plain) != token_after(
        new_executor(), plain._replace(history=History((1,), (2,)))
    )
    only_nine = bytes([0, 0b10])
    assert token_after(new_executor(), plain._replace(allowed=only_nine)) == 9
    token = token_after(new_executor(), plain)
    later = Sampling(SamplingParams(temperature=0.0, min_tokens=1), 0, 0, (token,))
    assert token_after(new_executor(), plain._replace(sampling=later)) == token + 1


def test_what_is_not_faked_is_a_fault_of_its_row() -> None:
    (result,) = step(new_executor(), row((1,), (0,))._replace(want=Want.LOGITS))
    assert result.fault is not None
    assert "LOGITS" in result.fault


# ---- time


def test_a_step_takes_its_cost_and_steps_queue_up() -> None:
    executor = new_executor(cost=StepCost(a=1.0, b=0.1, c=0.01))
    first = executor.submit(StepPlan(1, (row((1, 2, 3), (0,)), row((1,), (1,), name=2))))
    second = executor.submit(StepPlan(2, (row((4,), (0,), start=3),)))
    result = executor.collect(first)
    assert result.started_at == 0.0
    assert result.elapsed_s == pytest.approx(1.0 + 0.1 * 4 + 0.01 * 4)
    assert executor.clock.now() == pytest.approx(1.44)
    result = executor.collect(second)
    assert result.started_at == pytest.approx(1.44)
    assert executor.clock.now() == pytest.approx(1.44 + 1.0 + 0.1 + 0.04)


# ---- faults


def test_faults_strike_the_step_or_the_row_they_are_told_to() -> None:
    def is_second(plan: SequencePlan) -> bool:
        return plan.sequence_id == 2

    rows = row((1,), (0,)), row((2,), (1,), name=2)
    with pytest.raises(ExecutorError):
        step(new_executor(faults=Faults(raises=is_second)), *rows)
    with pytest.raises(ExecutorMemoryError):
        step(new_executor(faults=Faults(no_memory=is_second)), *rows)
    with pytest.raises(ExecutorMemoryError):
        step(new_executor(faults=Faults(no_memory_above=1)), *rows)
    step(new_executor(faults=Faults(no_memory_above=2)), *rows)
    first, second = step(new_executor(faults=Faults(nan=is_second)), *rows)
    assert first.token is not None
    assert (second.token, second.fault) == (None, "the logits are NaN")


def test_a_hang_takes_the_time_it_is_given_and_ends_when_its_flag_is_heeded() -> None:
    executor = new_executor(faults=Faults(hangs=lambda _: True))
    ticket = executor.submit(StepPlan(1, (row((1,), (0,)),)))
    with pytest.raises(StepTimeoutError):
        executor.collect(ticket, 3.0)
    assert executor.clock.now() == 3.0
    executor.cancel(ticket)
    with pytest.raises(StepCancelledError):
        executor.collect(ticket, 3.0)
    executor.faults.heeds_cancel = False
    with pytest.raises(StepTimeoutError):
        executor.collect(ticket, 3.0)


# ---- the store beneath


def test_the_store_is_read_and_written_through_tables() -> None:
    store = TokenStore(num_blocks=4, block_size=2)
    store.write((3, 1), 0, (10, 11, 12))
    assert list(store.read((3, 1), 3)) == [10, 11, 12]
    assert list(store.read((3,), 1)) == [10]
    assert list(store.read((1,), 1)) == [12]
    store.write((3, 1), 1, (20,))
    assert list(store.read((3, 1), 3)) == [10, 20, 12]
    store.copy(3, 0)
    store.write((3,), 0, (99,))
    assert list(store.read((0,), 2)) == [10, 20]


# ---- states


def with_states(row: SequencePlan, source: int, target: int) -> SequencePlan:
    return row._replace(states=(source, target))


def test_a_token_depends_on_the_state_that_its_row_starts_from() -> None:
    found = []
    for first in (3, 4):
        executor = new_executor(num_states=4)
        step(executor, with_states(row((first,), (0,)), -1, 0))
        step(executor, with_states(row((5,), (0,)), -1, 1))  # the same block, another state
        found.append(token_after(executor, with_states(row((6,), (0,), start=1), 0, 2)))
    assert found[0] != found[1]


def test_states_are_those_of_all_tokens_however_they_are_computed() -> None:
    tokens = (3, 4, 5, 6, 7)
    whole = token_after(new_executor(keeps_states=True), row(tokens, (0, 1)))
    executor = new_executor(num_states=4)
    step(executor, with_states(row(tokens[:2], (0, 1)), -1, 3))
    step(executor, with_states(row(tokens[2:4], (0, 1), start=2), 3, 1))
    assert token_after(executor, with_states(row(tokens[4:], (0, 1), start=4), 1, 0)) == whole
    assert whole != token_after(new_executor(), row(tokens, (0, 1)))


def test_a_state_that_was_never_written_cannot_be_read() -> None:
    executor = new_executor(num_states=4)
    with pytest.raises(ExecutorError, match=r"step 1 reads states \{2\}, never written"):
        step(executor, with_states(row((3,), (0,), start=1), 2, 0))


@pytest.mark.parametrize(("target", "is_shared"), [(1, True), (2, True), (3, False)])
def test_rows_of_a_step_share_no_state_that_one_writes(target: int, is_shared: bool) -> None:
    executor = new_executor(num_states=4)
    step(executor, with_states(row((3,), (0,)), -1, 1))
    rows = (
        with_states(row((3,), (0,), start=1), 1, 2),
        with_states(row((3,), (1,), name=2), -1, target),
    )
    if not is_shared:
        step(executor, *rows)
        return
    with pytest.raises(ExecutorError, match="rows write states"):
        step(executor, *rows)


def test_a_row_without_states_is_a_fault_where_there_are_any() -> None:
    (result,) = step(new_executor(num_states=4), row((3,), (0,)))
    assert result.fault is not None
    assert "0 states" in result.fault
