"""The quick way to plan a decode says what the general way says."""

import pytest
from tests.engine.simulated import finish, new_engine

from quire.core.plan import StepPlan
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
