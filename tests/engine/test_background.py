"""Background requests get what others leave of the queue, the batch, the blocks and the steps."""

import random
from collections.abc import Callable
from math import inf
from statistics import quantiles
from typing import Any, NamedTuple

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, run_until

from quire.core.errors import OverloadedError
from quire.core.plan import StepResult
from quire.core.request import BACKGROUND, Ended, Request, Status
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost

BATCH = 8


def prompt(number: int, length: int = 40) -> list[int]:
    """No two begin alike, so that nothing of them is found in the prefix cache."""
    rest = [(number * 31 + place * 7) % 1000 for place in range(2, length)]
    return [number % 1000, number // 1000, *rest]


class ArrivalsInSteps(FakeExecutor):
    """A step during which requests arrive, as they do where the engine has a thread of its own."""

    next_arrival = inf
    on_arrival: Callable[[], None] = staticmethod(lambda: None)

    def collect(self, ticket: Any, timeout_s: float | None = None) -> StepResult:
        if ticket.done_at is not None and ticket.started_at < self.next_arrival < ticket.done_at:
            self.clock.advance_to(self.next_arrival)
            self.on_arrival()
        return super().collect(ticket, timeout_s)


def busy(num_lines: int = 40, **settings: Any) -> tuple[ArrivalsInSteps, Engine, list[Request]]:
    """An engine whose batch is full of background requests."""
    num_blocks = settings.pop("num_blocks", 512)
    executor = ArrivalsInSteps(
        keep_plans=True, num_blocks=num_blocks, cost=settings.pop("cost", StepCost())
    )
    engine = new_engine(executor, **{"max_batch_size": BATCH, "plan_ahead": False, **settings})
    executor.on_arrival = engine.arrival_waits
    lines = [
        engine.add_request(prompt(n), greedy(30), key="job", priority=BACKGROUND)
        for n in range(num_lines)
    ]
    run_until(engine, lambda: len(running(engine)) == BATCH)
    return executor, engine, lines


def running(engine: Engine) -> list[Request]:
    return [sequence.request for sequence in engine._scheduler.running]


def test_an_arrival_takes_a_full_batchs_slot_in_the_next_step_and_has_it_to_itself() -> None:
    executor, engine, _ = busy()
    mine = engine.add_request(prompt(99), greedy(4), key="me")
    engine.step()
    assert mine in running(engine)
    (sequence,) = engine._lifecycle.live[mine.id].sequences
    assert [row.sequence_id for row in executor.plans[-1].sequences] == [sequence.id]


def test_a_whole_batch_of_others_leaves_no_slot() -> None:
    _, engine, _ = busy()
    mine = [engine.add_request(prompt(50 + n), greedy(4), key="me") for n in range(BATCH)]
    engine.step()
    assert running(engine) == mine


def test_the_background_waits_while_anybody_else_does() -> None:
    _, engine, _ = busy()
    mine = [engine.add_request(prompt(50 + n), greedy(9), key="me") for n in range(3 * BATCH)]
    while any(request.status is not Status.FINISHED for request in mine):
        engine.step()
        if any(request.status is Status.WAITING for request in mine):
            assert not [request for request in running(engine) if request.is_background]


def test_one_that_was_admitted_just_now_gives_way_too() -> None:
    _, engine, _ = busy()
    for sequence in list(engine._scheduler.running):
        engine._scheduler.preempt(sequence, engine.clock.now())
    engine._scheduler._admit_waiting()
    assert all(s.is_newly_admitted for s in engine._scheduler.running)
    mine = engine.add_request(prompt(99), greedy(4), key="me")
    engine.step()
    assert mine in running(engine)


def test_blocks_are_taken_from_the_background_first() -> None:
    _, engine, lines = busy(num_blocks=40)
    mine = [engine.add_request(prompt(50 + n), greedy(60), key="me") for n in range(4)]
    finish(engine)
    assert {request.metrics.num_preemptions for request in mine} == {0}
    assert sum(request.metrics.num_preemptions for request in lines) > 0


def test_pre_empted_lines_get_the_tokens_they_would_have_got_alone() -> None:
    _, engine, lines = busy(num_blocks=60)
    for n in range(30):
        engine.add_request(prompt(50 + n), greedy(5 + n % 7), key="me")
    found = finish(engine)
    for line in lines:
        assert tokens_of(found[line.id]) == solo(line.prompt, line.params)


def test_lines_that_wait_fill_nobody_elses_queue() -> None:
    _, engine, _ = busy(num_lines=24, max_queue_requests=24)
    with pytest.raises(OverloadedError):
        for n in range(30):
            engine.add_request(prompt(n), greedy(4), key="job", priority=BACKGROUND)
    for n in range(24):
        engine.add_request(prompt(50 + n), greedy(4), key="me")
    with pytest.raises(OverloadedError):
        engine.add_request(prompt(99), greedy(4), key="me")


def test_the_usual_time_limit_is_for_those_that_somebody_waits_for() -> None:
    engine = new_engine(FakeExecutor(), timeout_s=5.0)
    line = engine.add_request(prompt(1), greedy(4), priority=BACKGROUND)
    limited = engine.add_request(prompt(1), greedy(4), priority=BACKGROUND, timeout_s=1.0)
    mine = engine.add_request(prompt(2), greedy(4))
    assert (line.deadline, limited.deadline, mine.deadline) == (None, 1.0, 5.0)


def test_background_keys_share_by_weight_what_is_left() -> None:
    executor = FakeExecutor()
    engine = new_engine(executor, max_batch_size=BATCH, key_weights={"heavy": 3.0})
    for n in range(60):
        for key in ("heavy", "light"):
            engine.add_request(prompt(n), greedy(30), key=key, priority=BACKGROUND)
    events = []
    while len(engine._lifecycle.live) > 60:
        events += engine.step()
    keys = [
        "heavy" if int(event.request_id.split("-")[1]) % 2 else "light"
        for event in events
        if isinstance(event, Ended)
    ]
    assert keys.count("heavy") > 2 * keys.count("light") > 0


# ---- a step gives way to an arrival


_TENTH = StepCost(0.1, 0.0, 0.0)  # seconds a step


def step_with_arrival(executor: ArrivalsInSteps, engine: Engine, after_s: float) -> float:
    """A step in the middle of which a request comes; when."""
    executor.next_arrival = engine.clock.now() + after_s
    engine.step()
    at, executor.next_arrival = executor.next_arrival, inf
    return at


def test_a_step_of_the_background_alone_gives_way_and_its_rows_are_planned_again() -> None:
    executor, engine, lines = busy(cost=_TENTH)
    at = step_with_arrival(executor, engine, 0.02)
    assert engine.clock.now() == pytest.approx(at), "the step ended at once"
    mine = engine.add_request(prompt(99), greedy(4), key="me", arrived_at=at)
    engine.step()
    assert mine.metrics.time_to_first_token_s == pytest.approx(0.1)
    assert engine.stats.steps_failed == {} and engine.stats.num_steps_retried == 0
    found = finish(engine)
    for line in lines:
        assert tokens_of(found[line.id]) == solo(line.prompt, line.params)


def test_a_step_that_others_have_rows_in_goes_on() -> None:
    executor, engine, _ = busy(cost=_TENTH)
    engine.add_request(prompt(98), greedy(9), key="me")
    engine.step()
    started = engine.clock.now()
    step_with_arrival(executor, engine, 0.02)
    assert engine.clock.now() == pytest.approx(started + 0.1)


def test_a_step_that_is_planned_when_a_request_arrives_gives_way() -> None:
    _, engine, _ = busy(cost=_TENTH)
    engine.arrival_waits()
    started = engine.clock.now()
    engine.step()
    assert engine.clock.now() == started
    engine.step()  # nobody was added after all: the background goes on
    assert engine.clock.now() == pytest.approx(started + 0.1)


def test_with_steps_planned_ahead_none_gives_way() -> None:
    executor, engine, _ = busy(cost=_TENTH, plan_ahead=True)
    started = engine.clock.now()
    step_with_arrival(executor, engine, 0.02)
    assert engine.clock.now() == pytest.approx(started + 0.1)


def test_arrivals_take_a_bounded_share_of_the_backgrounds_time() -> None:
    """Requests that are refused, or of one token, could come within every step."""
    executor, engine, _ = busy(num_lines=400, cost=_TENTH)
    for _ in range(400):
        step_with_arrival(executor, engine, 0.09)
    lost_s = engine.clock.now() - 0.1 * engine.stats.num_steps
    assert 0.05 * engine.clock.now() < lost_s < 0.08 * engine.clock.now()


# ---- what the others notice, in virtual time


class Case(NamedTuple):
    cost: StepCost
    plan_ahead: bool
    arrivals: float  # a second
    seconds: float


_CPU = Case(StepCost(0.010, 0.0015, 1e-6), False, 0.7, 60.0)  # a small model on two cores
_SMALL = Case(StepCost(0.0025, 0.00055, 1e-6), False, 2.0, 60.0)  # SmolLM2 on them
_SLOW_READS = Case(StepCost(0.008, 0.00044, 9e-7), False, 1.0, 60.0)  # a large fixed part
_GPU = Case(StepCost(0.004, 0.00001, 1e-8), True, 40.0, 6.0)


def _figures(case: Case, *, job: bool, others: bool) -> tuple[float, float]:
    """95th percentile of the others' first tokens, and the job's tokens a second."""
    executor = ArrivalsInSteps(cost=case.cost, num_blocks=4096)
    engine = new_engine(executor, max_batch_size=32, plan_ahead=case.plan_ahead)
    executor.on_arrival = engine.arrival_waits
    lines: set[str] = set()
    moments = random.Random(3)

    def add_line() -> None:
        number = len(lines)
        made = engine.add_request(
            prompt(number), greedy(24 + number % 17), key="job", priority=BACKGROUND
        )
        lines.add(made.id)

    script: list[tuple[float, Any]] = []
    mine: list[Request] = []
    at = 0.0
    while others and at < case.seconds:
        at += moments.expovariate(case.arrivals)
        length = moments.randrange(80, 160)

        def arrive(at: float = at, length: int = length) -> None:
            tokens = prompt(len(mine) + 7, length)
            mine.append(engine.add_request(tokens, greedy(16), key="me", arrived_at=at))

        script.append((at, arrive))
    if job:
        for _ in range(64):
            add_line()
    done = 0
    while engine.clock.now() < case.seconds:
        while script and script[0][0] <= engine.clock.now():
            script.pop(0)[1]()
        executor.next_arrival = script[0][0] if script else inf
        if not engine.has_work:
            engine.clock.sleep(script[0][0] - engine.clock.now() if script else case.seconds)
            continue
        for event in engine.step():
            if isinstance(event, Ended) and event.request_id in lines:
                done += event.output.completions[0].num_tokens + len(event.output.prompt_token_ids)
                add_line()
    first = [r.metrics.time_to_first_token_s for r in mine if r.metrics.time_to_first_token_s]
    return quantiles(first, n=20)[-1] if others else 0.0, done / case.seconds


@pytest.mark.parametrize("case", [_CPU, _SMALL, _SLOW_READS, _GPU])
def test_first_tokens_come_as_without_a_job_and_the_job_gets_what_is_left(case: Case) -> None:
    alone_s, _ = _figures(case, job=False, others=True)
    _, alone_rate = _figures(case, job=True, others=False)
    beside_s, rate = _figures(case, job=True, others=True)
    interactive_rate = case.arrivals * (120 + 16)
    assert beside_s < 1.3 * alone_s
    assert rate > 0.8 * (alone_rate - interactive_rate)
