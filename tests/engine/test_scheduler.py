"""Scheduler: who joins the batch, who is pre-empted for it, and how rows are planned."""

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy

from quire.core.plan import StepPlan
from quire.core.request import WaitReason
from quire.core.sampling import SamplingParams
from quire.engine.sequence import Sequence
from quire.engine.step import RowPlanner, Step
from quire.executors.fake import FakeExecutor


def plans_of_a_run(*, plan_ahead: bool) -> list[StepPlan]:
    executor = FakeExecutor(keep_plans=True, num_blocks=20, block_size=4)
    engine = new_engine(executor, max_batch_size=6, max_step_tokens=16, plan_ahead=plan_ahead)
    for i in range(9):
        params = SamplingParams(max_tokens=5 + i, seed=i, n=2 if i == 3 else 1)
        engine.add_request(range(i, 2 * i + 1), params, key=str(i % 2))
    finish(engine)
    return executor.plans


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_the_quick_way_plans_what_the_general_way_plans(
    plan_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = plans_of_a_run(plan_ahead=plan_ahead)

    def general(self: RowPlanner, step: Step, sequence: Sequence) -> None:
        assert self.plan_row(step, sequence, 1)

    monkeypatch.setattr(RowPlanner, "plan_plain_decode", general)
    assert quick == plans_of_a_run(plan_ahead=plan_ahead)


# ---- blocks that running sequences still need


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_a_newcomer() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    long = engine.add_request([1] * 128, greedy(4), key="a")  # 8 blocks, of which two a step
    engine.step()
    late = engine.add_request([2] * 90, greedy(4), key="b")  # 6 of 10 free blocks, 6 still needed
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert snapshot.waiting_by_reason == {WaitReason.NO_BLOCKS: 1}
    outputs = finish(engine)
    assert engine.stats.num_preemptions == 0
    for request in (long, late):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


def test_a_newcomer_that_fits_into_the_headroom_joins() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    engine.add_request([1] * 128, greedy(4), key="a")
    engine.step()
    engine.add_request([2] * 60, greedy(4), key="b")  # 4 of the 4 that are not needed
    engine.step()
    assert engine.snapshot().num_running == 2


def test_prompts_are_admitted_only_while_there_is_room_for_all_of_them() -> None:
    executor = FakeExecutor(num_blocks=24, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=64)
    requests = [engine.add_request([i] * 160, greedy(4)) for i in range(8)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, greedy(4))
    assert engine.stats.num_preemptions == 0  # two prompts of ten blocks fit, three do not
