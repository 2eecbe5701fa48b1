"""Pacing: what the model of step times learns, and the budgets and bounds that follow from it."""

import math
import random
from itertools import pairwise

import pytest
from tests.engine.simulated import finish, new_engine
from tests.engine.toys import greedy, run_until

from quire.core.config import EngineConfig
from quire.core.request import WaitReason
from quire.engine.pacing import BatchingDelay, Pacer, StepTimeModel
from quire.executors.fake import FakeExecutor, StepCost

A, B, C = 0.004, 0.0002, 0.000001  # seconds a step, a token, a position of context


def seconds(tokens: int, context: int) -> float:
    return A + B * tokens + C * context


def taught(num_steps: int = 60, seed: int = 0, largest: int = 512) -> StepTimeModel:
    """A model that has seen steps of many sizes."""
    model = StepTimeModel()
    draw = random.Random(seed)
    for _ in range(num_steps):
        tokens, context = draw.randint(1, largest), draw.randint(0, 20_000)
        model.observe(tokens, context, seconds(tokens, context))
    return model


# ---- the model


@pytest.mark.parametrize(("tokens", "context"), [(0, 0), (1, 100), (300, 0), (64, 9000)])
def test_step_times_are_learned(tokens: int, context: int) -> None:
    expected = seconds(tokens, context)
    assert taught().predict(tokens, context) == pytest.approx(expected, rel=0.01)


def test_the_model_gives_its_rates() -> None:
    model = taught()
    assert model.seconds_per_token == pytest.approx(B, rel=0.01)
    assert model.tokens_per_position == pytest.approx(C / B, rel=0.02)
    assert (model.num_observed, model.largest_step > 480) == (60, True)


def test_a_new_model_knows_nothing() -> None:
    model = StepTimeModel()
    assert (model.predict(100, 100), model.seconds_per_token) == (0.0, 0.0)
    assert (model.tokens_per_position, model.tokens_within(1.0, 0)) == (0.0, 0)
    assert (model.num_observed, model.largest_step) == (0, 0)


def test_older_steps_are_forgotten() -> None:
    model = taught(200)
    draw = random.Random(1)
    for _ in range(600):  # the machine became twice as slow
        tokens, context = draw.randint(1, 512), draw.randint(0, 20_000)
        model.observe(tokens, context, 2 * seconds(tokens, context))
    assert model.predict(100, 5000) == pytest.approx(2 * seconds(100, 5000), rel=0.05)


def test_a_thousand_equal_steps_do_not_spoil_the_model() -> None:
    model = taught()
    for _ in range(3000):
        model.observe(8, 800, seconds(8, 800))
    for tokens, context in ((400, 0), (16, 12_000), (1, 1)):
        model.observe(tokens, context, seconds(tokens, context))
    assert max(map(max, model._covariance)) <= 1e6
    assert model.predict(8, 800) == pytest.approx(seconds(8, 800), rel=0.05)


def test_rates_are_never_negative() -> None:
    model = StepTimeModel()
    for tokens in range(1, 40):  # larger steps that take less time
        model.observe(tokens, tokens * 100, 0.1 - tokens * 0.001)
    assert model.seconds_per_token >= 0.0
    assert model.tokens_per_position >= 0.0


def test_tokens_within_a_time() -> None:
    model = taught()
    assert model.tokens_within(0.024, 0) == pytest.approx(100, abs=2)
    assert model.tokens_within(0.024, 10_000) == pytest.approx(50, abs=2)
    assert model.tokens_within(0.001, 0) < 0, "less than a step takes"


def test_where_tokens_cost_nothing_the_largest_step_so_far_is_the_bound() -> None:
    model = StepTimeModel()
    for tokens in (1, 40, 7):
        model.observe(tokens, 0, 0.010)
    model._weights[1] = 0.0
    assert model.tokens_within(1.0, 0) == 40
    assert model.tokens_within(0.0, 0) == 0


# ---- budgets


def pacer(model: StepTimeModel, **settings: object) -> Pacer:
    return Pacer(EngineConfig(max_step_tokens=400, **settings), model)  # type: ignore[arg-type]


def test_without_a_target_a_step_is_as_large_as_it_can_be() -> None:
    paced = pacer(taught())
    assert not paced.has_target
    assert paced.step_tokens(30, 10_000) == 400
    assert paced.row_tokens(10_000) == 0
    assert paced.admits(1000, lambda: 10**9)


@pytest.mark.parametrize(
    ("targets", "target_s"),
    [
        ({"slo_itl_ms": 30.0}, 0.030),
        ({"slo_ttft_ms": 50.0}, 0.025),  # an arrival waits for a step, then for its own
        ({"slo_itl_ms": 30.0, "slo_ttft_ms": 50.0}, 0.025),
        ({"slo_itl_ms": 20.0, "slo_ttft_ms": 50.0}, 0.020),
    ],
)
def test_a_step_is_planned_for_96_hundredths_of_the_stricter_target(
    targets: dict[str, float], target_s: float
) -> None:
    paced = pacer(taught(), **targets)
    assert paced.has_target
    assert paced._target_s == pytest.approx(0.96 * target_s, rel=1e-9)
    expected = (0.96 * target_s - seconds(0, 4000)) / B
    assert paced.step_tokens(0, 4000) == pytest.approx(expected, abs=2)


def test_a_step_has_room_for_all_decodes_and_the_smallest_chunk_however_slow() -> None:
    paced = pacer(taught(), slo_itl_ms=1.0)
    assert paced.step_tokens(10, 4000) == 10 + 16


def test_steps_grow_to_twice_the_largest_that_was_seen() -> None:
    paced = pacer(StepTimeModel(), slo_itl_ms=1000.0)
    assert paced.step_tokens(3, 0) == 3 + 16, "nothing is known: no token fits for sure"
    model = taught(largest=50)
    assert pacer(model, slo_itl_ms=1000.0).step_tokens(0, 0) == 2 * model.largest_step
    small = taught(largest=20)
    assert pacer(small, slo_itl_ms=1000.0).step_tokens(0, 0) == 64


def test_no_budget_is_above_the_largest_step() -> None:
    assert pacer(taught(), slo_itl_ms=10_000.0).step_tokens(0, 0) == 400


def test_a_rows_context_takes_tokens_from_the_budget() -> None:
    assert pacer(taught(), slo_itl_ms=20.0).row_tokens(10_000) == pytest.approx(50, abs=1)


def test_a_batch_is_admitted_while_it_decodes_within_the_target() -> None:
    paced = pacer(taught(), slo_itl_ms=10.0)  # 9.6 ms: 28 sequences without context
    assert paced.admits(26, lambda: 0)
    assert not paced.admits(30, lambda: 0)
    assert paced.admits(2, lambda: 5000)
    assert not paced.admits(2, lambda: 6000)
    assert paced.admits(1, lambda: 10**6), "one alone always runs"
    assert paced.admits(0, lambda: 10**6)


# ---- tokens in a step with another key's decodes


def test_other_keys_get_what_the_latency_bound_leaves() -> None:
    paced = pacer(taught())  # 15 ms: 55 tokens in all
    assert paced.co_scheduled_tokens(5, 0, []) == pytest.approx(50, abs=1)
    assert paced.co_scheduled_tokens(5, 2000, []) == pytest.approx(40, abs=1)
    assert paced.co_scheduled_tokens(5, 0, [], scale=1.5) == pytest.approx(87, abs=1)


def test_slow_decodes_bound_the_step_to_twice_their_own_time() -> None:
    paced = pacer(taught())
    alone = seconds(50, 10_000)  # 24 ms
    expected = (2 * alone - seconds(50, 10_000)) / B
    assert paced.co_scheduled_tokens(50, 10_000, []) == pytest.approx(expected, abs=2)


def test_the_contexts_of_other_rows_count_in_their_order() -> None:
    paced = pacer(taught())  # 50 tokens; 1000 positions cost 5
    assert paced.co_scheduled_tokens(5, 0, [2000]) == pytest.approx(40, abs=1)
    assert paced.co_scheduled_tokens(5, 0, [2000, 2000]) == pytest.approx(30, abs=1)
    assert paced.co_scheduled_tokens(5, 0, [2000, 9000, 2000]) == pytest.approx(40, abs=1)
    assert paced.co_scheduled_tokens(5, 0, [20_000, 10]) == 8, "the first row is always counted"
    # A token of its own and one for its context: 25 rows fill the 50.
    assert paced.co_scheduled_tokens(5, 0, [200] * 60) == pytest.approx(25, abs=1)


def test_other_keys_always_get_eight_tokens() -> None:
    slow = StepTimeModel()
    for tokens in range(1, 30):
        slow.observe(tokens, 0, 0.003 + 0.1 * tokens)
    assert pacer(slow).co_scheduled_tokens(1, 0, []) == 8


def test_nothing_is_bounded_before_eight_steps_were_seen() -> None:
    assert pacer(taught(7)).co_scheduled_tokens(5, 0, []) == 400
    assert pacer(taught(8)).co_scheduled_tokens(5, 0, []) < 100


def test_a_model_that_makes_no_sense_bounds_nothing() -> None:
    model = taught()
    model._weights[1] = 0.0
    assert pacer(model).co_scheduled_tokens(5, 0, []) == 400
    model = taught()
    model._weights[0] = -1.0
    assert pacer(model).co_scheduled_tokens(5, 0, []) == 400


# ---- the engine under a target


def test_a_long_prompt_goes_on_though_its_context_alone_costs_more_than_the_target() -> None:
    cost = StepCost(a=0.001, b=0.0001, c=0.0001)  # 200 positions take 20 ms: twice the target
    executor = FakeExecutor(num_blocks=256, cost=cost)
    engine = new_engine(executor, max_batch_size=4, max_step_tokens=64, slo_itl_ms=10.0)
    engine.add_request([1] * 8, greedy(400))
    long = engine.add_request([2] * 600, greedy(4))
    for _ in range(120):
        engine.step()
    assert long.metrics.first_token_at is not None


@pytest.mark.parametrize(("target_ms", "num_running"), [(7.0, 2), (12.0, 7)])
def test_sequences_join_while_their_decodes_stay_within_the_target(
    target_ms: float, num_running: int
) -> None:
    executor = FakeExecutor(num_blocks=512, cost=StepCost(a=0.004, b=0.001))
    engine = new_engine(executor, max_batch_size=16, slo_itl_ms=target_ms)
    for length in range(1, 40):  # it learns what steps take
        engine.add_request([length] * length, greedy(3))
    finish(engine)
    for number in range(12):
        engine.add_request([number], greedy(100))
    start = engine.stats.num_steps
    run_until(engine, lambda: engine.stats.num_steps == start + 40)
    assert engine.snapshot().num_running == num_running
    assert engine.snapshot().waiting_by_reason.keys() == {WaitReason.PACING, WaitReason.QUEUED}


# ---- the batching delay


@pytest.mark.parametrize(
    ("arrivals", "now", "until"),
    [
        ([], 0.0, None),
        ([0.0], 0.0, None),  # one arrival predicts nothing
        ([0.0, 0.0, 0.0], 0.0, None),  # all at once: no gap to predict from
        ([0.0, 0.010], 0.010, 0.040),  # three gaps after the last
        ([0.0, 0.040], 0.040, 0.140),  # the timeout after the oldest that waits
        ([0.0, 0.100], 0.100, 0.200),  # a gap as long as the timeout
        ([0.0, 0.200], 0.200, None),  # rarer than the timeout
        ([0.0, 0.010], 0.040, None),  # the next is late: it is not expected any more
        ([0.0, 0.010, 0.500, 0.510], 0.510, 0.540),  # a pause between: earlier gaps do not count
        ([0.0, 0.010, 0.310, 0.320], 0.320, None),  # shorter than that: they do
        ([0.40, *(0.45 + 0.01 * i for i in range(8))], 0.52, 0.55),  # the last eight count
        ([0.00, *(0.05 + 0.01 * i for i in range(7))], 0.11, 0.11 + 3 * 0.11 / 7),
    ],
)
def test_the_next_arrival_is_predicted(
    arrivals: list[float], now: float, until: float | None
) -> None:
    delay = BatchingDelay(0.100)
    for moment in arrivals:
        delay.arrived(moment, 1)
    oldest = arrivals[-1] if arrivals else now
    assert delay.wait_until(now, oldest, 1) == (None if until is None else pytest.approx(until))


def test_without_a_timeout_there_is_no_delay() -> None:
    delay = BatchingDelay(0.0)
    delay.arrived(0.0, 1)
    delay.arrived(0.0, 2)
    assert delay.wait_until(0.0, 0.0, 2) is None
    delay.arrived(0.010, 1)
    assert delay.wait_until(0.010, 0.010, 1) is None


def delay_that_ran_out(num_waiting: int) -> BatchingDelay:
    """It waited from 10 to 40 ms, and started with so many."""
    delay = BatchingDelay(0.100)
    delay.arrived(0.0, 1)
    delay.arrived(0.010, 1)
    assert delay.wait_until(0.010, 0.010, num_waiting) == pytest.approx(0.040)
    assert delay.wait_until(0.040, 0.010, num_waiting) is None
    delay.arrived(0.050, 1)
    return delay


@pytest.mark.parametrize("came_to", [1, 3])
def test_after_a_delay_that_ran_out_no_more_are_expected_than_came(came_to: int) -> None:
    delay = delay_that_ran_out(came_to)
    assert delay.wait_until(0.050, 0.050, came_to) is None
    if came_to > 1:
        assert delay.wait_until(0.050, 0.050, came_to - 1) is not None


def test_an_arrival_beside_others_makes_as_many_expected_again() -> None:
    delay = delay_that_ran_out(1)
    delay.arrived(0.055, 2)
    assert delay.wait_until(0.055, 0.055, 1) is not None
    assert delay.wait_until(0.055, 0.055, 2) is None


def test_a_longer_delay_is_tried_again_ever_more_rarely() -> None:
    """A delay of 30 ms at most a 64th of the time, and then half of that each time."""
    delay = delay_that_ran_out(1)
    trials: list[float] = []
    now = 0.050
    while len(trials) < 4 and now < 200.0:
        now += 0.010
        delay.arrived(now, 1)
        until = delay.wait_until(now, now, 1)
        if until is not None:
            trials.append(now)
            assert delay.wait_until(until, now, 1) is None
            now = until
    gaps = [after - before for before, after in pairwise([0.040, *trials])]
    assert gaps[0] == pytest.approx(0.030 * 64 * 2, abs=0.1)
    assert [after / before for before, after in pairwise(gaps)] == pytest.approx([2] * 3, rel=0.2)


def test_a_delay_that_brings_more_is_tried_again_sooner() -> None:
    delay = delay_that_ran_out(1)
    now = 5.0
    for moment in (now, now + 0.010):
        delay.arrived(moment, 1)
    assert delay.wait_until(now + 0.010, now + 0.010, 1) is not None
    delay.arrived(now + 0.020, 2)
    assert delay.wait_until(now + 0.050, now + 0.010, 2) is None, "it came to two"
    delay.arrived(now + 0.060, 1)
    assert delay.wait_until(now + 0.060, now + 0.060, 1) is not None, "two are expected now"
    assert delay.wait_until(now + 0.060, now + 0.060, 2) is None
    later = now + 0.051 + 0.040 * 64
    delay.arrived(later - 0.010, 1)
    delay.arrived(later, 1)
    assert delay.wait_until(later, later, 2) is not None


def test_a_batch_that_was_not_delayed_teaches_nothing() -> None:
    delay = BatchingDelay(0.100)
    delay.arrived(0.0, 1)
    delay.arrived(0.010, 1)
    assert delay.wait_until(0.060, 0.010, 1) is None, "it waited for a step, too late for a delay"
    delay.arrived(0.070, 1)
    assert delay.wait_until(0.070, 0.070, 1) is not None


def test_a_delay_that_the_process_slept_through_is_learned_from_like_any_other() -> None:
    def next_trial(looked_at: float) -> float:
        """How long after it looked a batch of as many as are expected is delayed again."""
        delay = BatchingDelay(0.02)
        delay.arrived(0.0, 1)
        delay.arrived(0.015, 2)
        assert delay.wait_until(0.015, 0.0, 2) == 0.02
        assert delay.wait_until(looked_at, 0.0, 2) is None
        for waited_s in range(1, 100):
            now = looked_at + waited_s
            delay.arrived(now, 1)
            delay.arrived(now + 0.015, 2)
            if delay.wait_until(now + 0.015, now, 2) is not None:
                return waited_s
        return math.inf

    assert next_trial(3600.0) == next_trial(0.02) < 10
