"""Retry-After: the mean interval between completions, idle times left out."""

import pytest
from tests.engine.simulated import new_engine
from tests.engine.toys import greedy

from quire.core.errors import OverloadedError
from quire.engine import Engine
from quire.engine.stats import CompletionRate
from quire.executors.fake import FakeExecutor, StepCost

TEN_MS = StepCost(a=0.010, b=0.0)


def test_the_interval_is_the_mean_of_the_latest() -> None:
    rate = CompletionRate()
    rate.busy_from(100.0)
    for number in range(1, 200):
        rate.completed(100.0 + number * 0.5)
    assert rate.interval_s(100.0 + 199 * 0.5) == pytest.approx(0.5)


def test_a_change_of_pace_is_noticed() -> None:
    rate = CompletionRate()
    for number in range(100):
        rate.completed(float(number))
    for number in range(100):
        rate.completed(99 + number * 0.1)
    assert rate.interval_s(99 + 9.9) == pytest.approx(0.1, rel=0.02)


def test_idle_hours_do_not_count() -> None:
    rate = CompletionRate()
    rate.busy_from(0.0)
    for number in range(1, 11):
        rate.completed(number * 0.2)
    rate.busy_from(3600.0)
    assert rate.interval_s(3600.0) == pytest.approx(0.2)
    rate.completed(3600.2)
    assert rate.interval_s(3600.2) == pytest.approx(0.2)


def fill(engine: Engine) -> float:
    """Add requests until one is refused; the time after which it may come again."""
    for number in range(1, 1000):
        try:
            engine.add_request([number, 2, 3], greedy(16))
        except OverloadedError as error:
            return error.retry_after_s
    raise AssertionError("the queue has no end")


def keep_full(engine: Engine, num_steps: int) -> float:
    """Step with the queue kept full; the mean time between ends."""
    started_at, ended = engine.clock.now(), sum(engine.stats.requests_ended.values())
    for _ in range(num_steps):
        fill(engine)
        engine.step()
    num_ended = sum(engine.stats.requests_ended.values()) - ended
    return (engine.clock.now() - started_at) / num_ended


def full_engine(**settings: object) -> Engine:
    """Eight places and a queue, both full for long enough to know the pace."""
    engine = new_engine(FakeExecutor(cost=TEN_MS), max_batch_size=8, **settings)
    keep_full(engine, 200)
    return engine


@pytest.mark.parametrize("settings", [{"max_queue_requests": 4}, {"max_queue_tokens": 4 * 19}])
def test_a_refusal_is_right_about_when_there_is_room(settings: dict[str, int]) -> None:
    engine = full_engine(**settings)
    for _ in range(10):
        hint = fill(engine)
        assert hint == pytest.approx(keep_full(engine, 33), rel=0.25)


def test_a_large_request_waits_for_several_places() -> None:
    engine = full_engine(max_queue_tokens=4 * 19)
    hint = fill(engine)
    with pytest.raises(OverloadedError) as caught:
        engine.add_request([1, 2, 3], greedy(3 * 19 - 3))
    assert caught.value.retry_after_s == pytest.approx(3 * hint)


def test_before_anything_completed_the_interval_is_a_second() -> None:
    rate = CompletionRate()
    assert rate.interval_s(50.0) == 1.0
    rate.busy_from(10.0)
    assert rate.interval_s(50.0) == 1.0


def test_the_first_completions_count_from_when_work_arrived() -> None:
    rate = CompletionRate()
    rate.busy_from(10.0)
    rate.completed(12.0)
    assert rate.interval_s(12.0) == 2.0
    rate.completed(13.0)
    assert rate.interval_s(13.0) == 1.5
    assert rate.interval_s(14.0) == 2.0, "nothing completed since"
    assert rate.interval_s(5.0) == 0.0, "a clock that went back"


def test_the_mean_is_of_the_latest_64() -> None:
    rate = CompletionRate()
    rate.busy_from(0.0)
    rate.completed(1000.0)
    for number in range(1, 64):
        rate.completed(1000.0 + number)
    assert rate.interval_s(1063.0) == pytest.approx(1063 / 64)
    rate.completed(1064.0)
    assert rate.interval_s(1064.0) == pytest.approx(1.0), "the first of them is forgotten"
