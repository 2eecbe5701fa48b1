"""What all executors share: capacity, checks of rows and copies, samples that rows follow."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.executors.cpu import running
from tests.executors.reference import plans
from tests.fixture_files import fixture_file

from quire.batching import CallableExecutor
from quire.core.errors import ConfigError, ExecutorError, RowFaultError
from quire.core.plan import BlockCopy, Capacity, SequencePlan, SequenceResult, StepPlan, Want
from quire.executors.base import (
    BLOCK_SIZE,
    STEPS_REMEMBERED,
    Executor,
    ExecutorBase,
    StepSamples,
    model_capacity,
)
from quire.executors.fake import FakeExecutor
from quire.model.loading import load_model

PATH = fixture_file("tiny/Q4_0.gguf")
CAPACITY = Capacity(
    num_blocks=4,
    block_size=BLOCK_SIZE,
    max_context=40,
    vocabulary_size=10,
    max_batch_size=2,
    max_step_tokens=64,
)


def row(start: int, tokens: tuple[int, ...], table: tuple[int, ...], **more: Any) -> SequencePlan:
    return SequencePlan(7, start, tokens, None, table, Want.NOTHING)._replace(**more)


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (row(0, (9, 0), (3,)), None),
        (row(39, (1,), (0, 1, 3)), None),
        (row(0, (10,), (0,)), "token 10 is outside the vocabulary of 10"),
        (row(0, (-1,), (0,)), "token -1 is outside the vocabulary of 10"),
        (row(0, (1,), (0,), prompt_targets=(10,)), "token 10 is outside the vocabulary"),
        (row(0, (), (0,)), "positions 0 to 0 are not within the context of 40"),
        (row(-1, (1,), (0,)), "positions -1 to 0 are not within the context of 40"),
        (row(39, (1, 1), (0, 1, 3)), "positions 39 to 41 are not within the context of 40"),
        (row(16, (1,), (0,)), "1 blocks do not hold 17 positions"),
        (row(16, (1,), (0, 4)), r"the block table \(0, 4\) leaves the 4 blocks"),
        (row(16, (1,), (-1, 0)), r"the block table \(-1, 0\) leaves the 4 blocks"),
        (row(0, (1,), (0, 4)), None),  # the second block is not used yet
    ],
)
def test_a_row_that_leaves_vocabulary_context_or_blocks_is_a_fault(
    plan: SequencePlan, fault: str | None
) -> None:
    executor = ExecutorBase(CAPACITY)
    if fault is None:
        executor._check_row(plan, plan.end)
        return
    with pytest.raises(RowFaultError, match=fault):
        executor._check_row(plan, plan.end)


@pytest.mark.parametrize(
    ("start", "states", "fault"),
    [
        (0, (-1, 0), None),
        (3, (1, 2), None),
        (3, (), "the row has 0 states; of 3 slots it should have one to read and one to write"),
        (3, (1,), "the row has 1 states"),
        (0, (0, 1), "starts at 0 from state 0 and writes state 1"),
        (3, (-1, 1), "starts at 3 from state -1"),
        (3, (-2, 1), "starts at 3 from state -2"),
        (3, (3, 1), "from state 3 and writes state 1, of 3 slots"),
        (3, (1, 3), "from state 1 and writes state 3, of 3 slots"),
        (3, (1, -1), "writes state -1"),
        (3, (1, 1), "from state 1 and writes state 1"),
    ],
)
def test_a_row_reads_one_state_and_writes_another(
    start: int, states: tuple[int, ...], fault: str | None
) -> None:
    executor = ExecutorBase(CAPACITY._replace(num_states=3))
    plan = row(start, (1,), (0,), states=states)
    if fault is None:
        executor._check_row(plan, plan.end)
        return
    with pytest.raises(RowFaultError, match=fault):
        executor._check_row(plan, plan.end)


def test_a_model_without_states_has_rows_without() -> None:
    plan = row(0, (1,), (0,), states=(-1, 0))
    with pytest.raises(RowFaultError, match="has 2 states; of 0 slots it should have none"):
        ExecutorBase(CAPACITY)._check_row(plan, plan.end)


@pytest.mark.parametrize(("source", "target"), [(4, 0), (0, 4), (-1, 0), (0, -1)])
def test_a_copy_of_a_block_that_there_is_not_concerns_the_whole_step(
    source: int, target: int
) -> None:
    executor = ExecutorBase(CAPACITY)
    executor._check_copies(StepPlan(3, (), (BlockCopy(0, 3), BlockCopy(3, 0))))
    with pytest.raises(ExecutorError, match=f"step 3 copies block {source} to {target}, .* 4 bl"):
        executor._check_copies(StepPlan(3, (), (BlockCopy(source, target),)))


def test_a_model_runs_as_far_as_its_context_and_its_blocks_reach() -> None:
    with load_model(PATH) as model:
        spec = model.spec
    assert model_capacity(spec, 2, 8, 64) == Capacity(2, 16, 32, spec.vocabulary_size, 8, 64)
    assert model_capacity(spec, 1 << 20, 8, 64).max_context == spec.context_length
    assert model_capacity(spec, 2, 8, 64, block_size=4).max_context == 8
    assert model_capacity(spec, 2, 8, 64, num_states=5).num_states == 5
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"):
        model_capacity(spec, 0, 8, 64)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        model_capacity(spec, 2, 8, 64, block_size=0)


def test_samples_are_kept_for_the_last_steps_and_parts_of_a_step_add_up() -> None:
    samples = StepSamples()
    samples.remember(0, [SequenceResult(7, 3), SequenceResult(8)])
    samples.remember(0, [SequenceResult(8, 4)])
    follower = row(1, (), (0,), follows=0)
    assert samples.resolved(follower).tokens == (3,)
    assert samples.resolved(follower._replace(sequence_id=8)).tokens == (4,)
    with pytest.raises(RowFaultError, match="step 0 sampled no token for this sequence"):
        samples.resolved(follower._replace(sequence_id=9))
    for step_id in range(1, STEPS_REMEMBERED):
        samples.remember(step_id, [])
    assert samples.resolved(follower).tokens == (3,)
    samples.remember(STEPS_REMEMBERED, [])
    with pytest.raises(RowFaultError, match="step 0 sampled no token"):
        samples.resolved(follower)


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "callable": lambda: CallableExecutor(lambda *_: None, CAPACITY),
    "fake": FakeExecutor,
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_row_that_follows_no_sample_is_a_fault_of_its_own(name: str) -> None:
    executor = EXECUTORS[name]()
    plan = StepPlan(2, (row(1, (), (0,), follows=1), row(0, (1,), (1,), sequence_id=8)))
    follower, sound = executor.collect(executor.submit(plan), 60).sequences
    assert follower == SequenceResult(7, fault="step 1 sampled no token for this sequence")
    assert sound == SequenceResult(8)
    executor.close()


def test_every_executor_names_its_kernels() -> None:
    for name, make in EXECUTORS.items():
        executor = make()
        assert (list(executor.kernels), executor.fallback) == ([], None), name
        executor.close()
    with plans.opened(PATH) as reference, running.opened(PATH) as native:
        assert list(reference.kernels) == ["numpy float32, one row at a time"]
        assert all(kernel.startswith("cpu/") for kernel in native.kernels)
