"""Which requests share a step, and when it starts: in virtual time, exactly."""

import pytest
from tests.engine.simulated import finish, new_engine, solo
from tests.engine.toys import Script, ended, greedy, play, rows_of

from quire.core.request import RequestOutput, WaitReason
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost

QUICK = StepCost(a=0.001, b=0.0)  # a millisecond a step


def recording(**settings: object) -> tuple[FakeExecutor, Engine]:
    executor = FakeExecutor(keep_plans=True, cost=QUICK)
    return executor, new_engine(executor, **settings)


def one_token_each(engine: Engine, times: list[float]) -> Script:
    return [(at, lambda: engine.add_request([1], greedy(1))) for at in times]


def shapes(executor: FakeExecutor) -> list[list[int]]:
    """New tokens of each row of each step."""
    return [[row.num_new_tokens for row in plan.sequences] for plan in executor.plans]


def test_four_concurrent_requests_complete_in_one_batch() -> None:
    executor, engine = recording(max_batch_size=4, batch_timeout_ms=100)
    for first in range(4):
        engine.add_request([first, 50, 51], greedy(3))
    outputs = finish(engine)
    assert shapes(executor) == [[3] * 4, [1] * 4, [1] * 4]
    assert all(output.metrics.queued_s == 0.0 for output in outputs.values()), "full: no waiting"
    assert executor.clock.now() == pytest.approx(0.003)


def test_a_lone_request_starts_at_once() -> None:
    executor = FakeExecutor(cost=StepCost(a=0.020))
    engine = new_engine(executor, max_batch_size=10, batch_timeout_ms=50)
    engine.add_request([1, 2, 3], greedy(3))
    (output,) = finish(engine).values()
    assert output.metrics.queued_s == 0.0
    assert output.metrics.total_s is not None
    assert output.metrics.total_s < 0.100


def test_prompts_of_different_lengths_run_together_and_match_solo_runs() -> None:
    executor, engine = recording(max_batch_size=8)
    prompts = [[5], [6, 7, 8, 9], [10, 11]]
    ids = [engine.add_request(prompt, greedy(6)).id for prompt in prompts]
    outputs = finish(engine)
    assert shapes(executor)[0] == [1, 4, 2]
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert [outputs[request_id].token_ids] == solo(prompt, greedy(6))


def test_a_hundred_batched_take_less_than_half_the_time_of_a_hundred_alone() -> None:
    prompts = [[i, i + 1, i + 2] for i in range(100)]
    alone = FakeExecutor()
    engine = new_engine(alone)
    apart: list[RequestOutput] = []
    for prompt in prompts:
        engine.add_request(prompt, greedy(10))
        apart.extend(finish(engine).values())
    together = FakeExecutor()
    engine = new_engine(together, max_batch_size=100)
    ids = [engine.add_request(prompt, greedy(10)).id for prompt in prompts]
    outputs = finish(engine)
    assert together.clock.now() < 0.5 * alone.clock.now()
    assert [outputs[name].token_ids for name in ids] == [output.token_ids for output in apart]


# ---- the batching delay


def test_a_batch_is_delayed_for_expected_arrivals_no_longer_than_the_timeout() -> None:
    executor, engine = recording(max_batch_size=64, batch_timeout_ms=50)
    times = [i / 100 for i in range(12)]  # one every 10 ms
    play(engine, one_token_each(engine, times))
    starts = [len(plan.sequences) for plan in executor.plans]
    # The first predicts nothing. The second waits 50 ms, with those at 20, 30, 40, 50 and
    # 60 ms; the one at 70 ms waits for those up to 110 ms, then until no more are due.
    assert starts == [1, 6, 5]


def test_the_wait_is_booked_under_its_reason() -> None:
    _, engine = recording(max_batch_size=64, batch_timeout_ms=50)
    times = [0.0, 0.010, 0.020]
    outputs = ended(play(engine, one_token_each(engine, times)))
    by_arrival = sorted(outputs, key=lambda output: output.metrics.arrived_at)
    # Three mean gaps of 10 ms after the last arrival, no arrival is expected.
    assert by_arrival[1].metrics.started_at == pytest.approx(0.050)
    assert by_arrival[1].metrics.waited_for[WaitReason.BATCHING_DELAY] == pytest.approx(0.040)
    assert by_arrival[2].metrics.waited_for[WaitReason.BATCHING_DELAY] == pytest.approx(0.030)


def test_a_batch_that_is_full_while_waiting_starts_at_once() -> None:
    executor, engine = recording(max_batch_size=3, batch_timeout_ms=50)
    times = [0.0, 0.010, 0.020, 0.030]
    play(engine, one_token_each(engine, times))
    assert [len(plan.sequences) for plan in executor.plans] == [1, 3]
    assert executor.clock.now() == pytest.approx(0.031)


def test_without_a_timeout_no_batch_is_delayed() -> None:
    executor, engine = recording(batch_timeout_ms=0)
    times = [i / 100 for i in range(5)]
    outputs = ended(play(engine, one_token_each(engine, times)))
    assert [len(plan.sequences) for plan in executor.plans] == [1] * 5
    assert all(output.metrics.queued_s == 0.0 for output in outputs)


def test_a_deadline_that_falls_into_the_wait_is_kept() -> None:
    _, engine = recording(max_batch_size=64, batch_timeout_ms=50)
    script = [
        *one_token_each(engine, [0.0, 0.010]),
        (0.020, lambda: engine.add_request([2], greedy(1), timeout_s=0.005)),
    ]
    outputs = {output.prompt_token_ids: output for output in ended(play(engine, script))}
    assert outputs[(2,)].metrics.finished_at == pytest.approx(0.025)


def closed_loop(engine: Engine, rounds: list[int], think_s: float = 0.0) -> list[RequestOutput]:
    """Clients that each send the next request when all of the last round have their answers; so
    many clients in each round."""
    outputs: list[RequestOutput] = []
    for num_clients in rounds:
        for _ in range(num_clients):
            engine.add_request([1], greedy(1))
        outputs += ended(play(engine, []))
        engine.clock.sleep(think_s)
    return outputs


def delayed(outputs: list[RequestOutput]) -> list[bool]:
    return [WaitReason.BATCHING_DELAY in output.metrics.waited_for for output in outputs]


@pytest.mark.parametrize("think_s", [0.0, 0.004])
def test_a_caller_that_sends_one_request_after_another_waits_once(think_s: float) -> None:
    executor = FakeExecutor(cost=StepCost(a=0.005, b=0.0))
    engine = new_engine(executor, max_batch_size=8, batch_timeout_ms=20)
    outputs = closed_loop(engine, [1] * 50, think_s)
    assert delayed(outputs) == [False, True] + [False] * 48
    assert all(output.metrics.total_s == pytest.approx(0.005) for output in outputs[2:])


def test_callers_in_step_start_when_all_of_them_have_come() -> None:
    executor, engine = recording(max_batch_size=8, batch_timeout_ms=20)
    outputs = closed_loop(engine, [3] * 20)
    assert sum(delayed(outputs)) <= 3, "one round finds that no more than three come"
    assert [len(plan.sequences) for plan in executor.plans] == [3] * 20


def test_the_delay_comes_back_when_others_come() -> None:
    executor = FakeExecutor(cost=StepCost(a=0.005, b=0.0), keep_plans=True)
    engine = new_engine(executor, max_batch_size=8, batch_timeout_ms=20, plan_ahead=False)
    closed_loop(engine, [1] * 10)
    executor.plans.clear()
    start = engine.clock.now()
    # Three callers, 2 ms apart; each sends its next request 1 ms after its answer.
    arrivals = [start, start + 0.002, start + 0.004]
    outputs: list[RequestOutput] = []
    while len(outputs) < 30:
        for at in [at for at in arrivals if at <= engine.clock.now()]:
            arrivals.remove(at)
            engine.add_request([1], greedy(1), arrived_at=at)
        found = ended(engine.step())
        outputs += found
        arrivals += [engine.clock.now() + 0.001 for _ in found]
        due = engine.wake_at
        if due is not None:
            engine.clock.sleep(min([due, *arrivals]) - engine.clock.now())
    sizes = [len(plan.sequences) for plan in executor.plans]
    assert sizes[0] == 1, "it was alone so far"
    assert sizes[3:] == [3] * len(sizes[3:]), "from there on they run together"
    assert len(sizes) <= 14


def test_a_lone_caller_loses_less_and_less_of_its_time() -> None:
    executor = FakeExecutor(cost=StepCost(a=0.005, b=0.0), num_blocks=64)
    engine = new_engine(executor, max_batch_size=8, batch_timeout_ms=20)
    outputs = closed_loop(engine, [1] * 4000)
    waits = [output.metrics.queued_s or 0.0 for output in outputs]
    for count in (1000, 2000, 4000):
        assert sum(waits[:count]) < count * 0.005 / 64
    assert sum(delayed(outputs)) <= 5, "each after twice the time"
    assert sum(waits[2000:]) < 0.5 * sum(waits[:2000])


def test_callers_that_never_meet_are_batched_again_after_a_while() -> None:
    executor, engine = recording(max_batch_size=64, batch_timeout_ms=50)
    closed_loop(engine, [1] * 10, think_s=0.009)
    executor.plans.clear()
    start = engine.clock.now()
    # One every 10 ms, whose steps take 1 ms each: none finds another.
    play(engine, one_token_each(engine, [start + i / 100 for i in range(1000)]))
    sizes = [len(plan.sequences) for plan in executor.plans]
    assert sizes[0] == 1
    assert sum(sizes) == 1000
    assert sum(sizes[-50:]) / 50 > 4, "five or six come within the timeout"


# ---- joining and leaving


def test_a_request_joins_while_others_run_and_leaves_at_once_when_done() -> None:
    executor, engine = recording()
    script = [
        (0.0, lambda: engine.add_request([1, 2], greedy(10))),
        (0.004, lambda: engine.add_request([3, 4, 5], greedy(2))),
    ]
    outputs = {output.prompt_token_ids: output for output in ended(play(engine, script))}
    together = [len(plan.sequences) for plan in executor.plans]
    assert together.count(2) == 2, "exactly the two steps of the short one"
    assert len(rows_of(executor, 1)) == 10
    assert outputs[(3, 4, 5)].metrics.finished_at == pytest.approx(0.006, abs=0.0011)
    for prompt, params in (((1, 2), greedy(10)), ((3, 4, 5), greedy(2))):
        assert [outputs[prompt].token_ids] == solo(prompt, params)


def test_a_freed_place_is_taken_by_the_next_in_line() -> None:
    executor, engine = recording(max_batch_size=2, plan_ahead=False)
    for first, count in enumerate([2, 5, 3]):
        engine.add_request([first], greedy(count))
    finish(engine)
    rows = [[row.sequence_id for row in plan.sequences] for plan in executor.plans]
    assert rows == [[1, 2], [1, 2], [2, 3], [2, 3], [2, 3]]


# ---- chunks


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_no_step_holds_more_tokens_than_its_budget(budget: int) -> None:
    executor, engine = recording(max_batch_size=7, max_step_tokens=budget)
    prompts = [list(range(100, 100 + length)) for length in (50, 1, 33, 8, 90)]
    ids = [
        engine.add_request(prompt, greedy(5), key=str(i % 2)).id for i, prompt in enumerate(prompts)
    ]
    outputs = finish(engine)
    assert max(sum(shape) for shape in shapes(executor)) <= budget
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert [outputs[request_id].token_ids] == solo(prompt, greedy(5))


def test_running_sequences_get_their_token_before_prompts_get_chunks() -> None:
    executor, engine = recording(max_batch_size=4, max_step_tokens=8)
    script = [
        (0.0, lambda: engine.add_request([1], greedy(20))),
        (0.0055, lambda: engine.add_request(list(range(40)), greedy(1))),
    ]
    play(engine, script)
    long_prompt = [plan for plan in executor.plans if len(plan.sequences) == 2]
    assert len(long_prompt) == 6
    assert all(plan.sequences[0].num_new_tokens == 1 for plan in long_prompt)
    assert [plan.sequences[1].num_new_tokens for plan in long_prompt] == [7, 7, 7, 7, 7, 5]


@pytest.mark.parametrize("plan_ahead", [True, False])
def test_the_next_step_is_planned_while_one_runs_unless_told_not_to(plan_ahead: bool) -> None:
    executor, engine = recording(plan_ahead=plan_ahead)
    engine.add_request([1], greedy(4))
    finish(engine)
    follows = [row.follows is not None for row in rows_of(executor, 1)]
    assert follows == [False, plan_ahead, plan_ahead, plan_ahead]
