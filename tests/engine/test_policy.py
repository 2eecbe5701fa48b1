"""Policy, with unequal cases: who is admitted, who fails for want of memory, what keys may owe."""

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.test_faults import fake_rows
from tests.engine.toys import greedy

from quire.core.errors import ExecutorMemoryError
from quire.core.request import WaitReason
from quire.engine.execution import isolate
from quire.engine.fairness import DeficitRoundRobin
from quire.executors.fake import FakeExecutor

# ---- admission


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_a_newcomer() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    long = engine.add_request([1] * 128, greedy(4), key="a")  # 8 blocks, of which two a step
    engine.step()
    late = engine.add_request(
        [2] * 90, greedy(4), key="b"
    )  # 6 of the 10 that are free; 6 are spoken for
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert snapshot.waiting_by_reason == {WaitReason.NO_BLOCKS: 1}
    outputs = finish(engine)
    assert engine.stats.num_preemptions == 0
    for request in (long, late):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


def test_a_newcomer_that_fits_beside_what_is_spoken_for_joins() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    engine.add_request([1] * 128, greedy(4), key="a")
    engine.step()
    engine.add_request([2] * 60, greedy(4), key="b")  # 4 of the 4 that nobody needs
    engine.step()
    assert engine.snapshot().num_running == 2


# ---- want of memory


@pytest.mark.parametrize("largest", [0, 1, 2, 3])
def test_where_no_row_finds_memory_the_one_with_most_context_fails(largest: int) -> None:
    sizes = [5, 9, 7, 6]
    sizes[largest] = 40
    rows = fake_rows(sizes)

    def run(_rows: object) -> list[object]:
        raise ExecutorMemoryError("no memory")

    outcome = isolate(rows, run)  # type: ignore[arg-type]
    assert [row.plan.sequence_id for row, _ in outcome.failed] == [largest]
    assert sorted(row.plan.sequence_id for row in outcome.retry) == sorted({0, 1, 2, 3} - {largest})
    assert not outcome.succeeded


# ---- what keys may owe and save


def shares_of(*keys: str, weights: dict[str, float] | None = None) -> DeficitRoundRobin:
    shares = DeficitRoundRobin(weights or {}, 100)
    for key in keys:
        shares.reserve_slots(key, 1)
    return shares


def test_debt_is_bounded_by_four_steps() -> None:
    shares = shares_of("greedy", "idle")
    for _ in range(100):
        shares.charge({"greedy": 100}, ["idle"])
    assert shares.credit("greedy") == -400.0
    for _ in range(8):  # as long as it took to get into it: debt is forgiven at the same rate
        shares.charge({"idle": 100}, [])
    assert shares.credit("greedy") == 0.0


def test_credit_is_bounded_by_four_steps() -> None:
    shares = shares_of("patient", "busy")
    for _ in range(100):
        shares.charge({"busy": 100}, [])
    assert shares.credit("patient") == 400.0
    assert shares.credit("nobody yet") == 400.0


def test_a_key_that_left_owes_nothing_when_it_comes_back() -> None:
    shares = shares_of("a", "b")
    shares.charge({"a": 100}, [])
    shares.charge({"a": 100}, [])
    shares.reserve_slots("a", -1)
    shares.charge({"b": 100}, ["c"])
    assert shares.credit("a") == 400.0


def test_shares_go_by_weight() -> None:
    shares = shares_of("heavy", "light", weights={"heavy": 3.0})
    shares.charge({"heavy": 50, "light": 50}, [])
    assert shares.credit("heavy") == 400.0  # it earned 75 and got 50, and may save no more
    assert shares.credit("light") == 375.0  # it earned 25


def test_what_is_wanted_beyond_the_step_goes_to_credit_first_then_round() -> None:
    shares = shares_of("flood", "small")
    for _ in range(10):
        shares.charge({"flood": 100}, [])
    assert shares.split({"flood": 500, "small": 30}, 100) == {"flood": 70, "small": 30}
    assert shares.split({"flood": 500, "small": 300}, 100) == {"flood": 0, "small": 100}


def test_a_newcomer_displaces_a_key_in_debt_and_none_that_is_not() -> None:
    shares = shares_of("flood", "fair")
    shares.reserve_slots("flood", 7)
    for _ in range(10):
        shares.charge({"flood": 100}, ["new"])
    assert shares.victim_key("new", 1) == "flood"
    even = shares_of("a", "b")
    assert even.victim_key("c", 1) is None
