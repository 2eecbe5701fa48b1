"""Health: what the engine says of itself while steps fail, in virtual time."""

import logging

import pytest
from tests.engine.simulated import finish, new_engine
from tests.engine.toys import greedy, run_until

from quire.core.errors import ExecutorError
from quire.core.plan import StepPlan
from quire.engine import Engine
from quire.engine.health import REPEATS_S, FaultLog, HealthMonitor
from quire.engine.stats import EngineStats
from quire.executors.fake import FakeExecutor, Faults, StepCost


class Moody(FakeExecutor):
    """Fails every step of more than one row while it has an error to raise."""

    error: Exception | None = None

    def _raise_faults(self, plan: StepPlan) -> None:
        if self.error is not None and len(plan.sequences) > 1:
            raise self.error


def moody_engine(num_requests: int = 4, max_tokens: int = 60) -> tuple[Moody, Engine]:
    executor = Moody(cost=StepCost(a=1.0, b=0.0))
    engine = new_engine(executor, max_batch_size=4, plan_ahead=False)
    for first in range(num_requests):
        engine.add_request([first], greedy(max_tokens))
    return executor, engine


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The engine's log: each line's event and fields."""
    found = [record.__dict__ for record in caplog.records if record.name == "quire.engine"]
    return [{"event": line["event"], **line["fields"]} for line in found]


def test_the_report_says_since_when_and_why_and_what_steps_may_hold() -> None:
    executor, engine = moody_engine()
    engine.step()
    assert engine.health_report.state == "ok"
    assert (engine.health_report.cause, engine.health_report.since) == (None, None)
    started = engine.clock.now()
    executor.error = ExecutorError("no batches today")
    engine.step()
    first = engine.health_report
    assert (first.state, first.cause) == ("degraded", "no batches today")
    assert (first.batch_limit, first.last_failed_step) == (4, 2), "once is not a rule"
    run_until(engine, lambda: engine.health_report.batch_limit == 1)
    report = engine.health_report
    assert report.since == first.since
    assert report.since is not None
    assert started < report.since < engine.clock.now()
    assert (report.max_batch_size, report.token_limit) == (4, report.max_step_tokens)
    executor.error = None
    finish(engine)
    healthy = engine.health_report
    assert (healthy.state, healthy.cause, healthy.since) == ("ok", None, None)
    assert (healthy.batch_limit, healthy.last_failed_step) == (4, report.last_failed_step)


def test_a_batch_that_runs_whole_ends_it_before_the_limits_are_lowered() -> None:
    executor, engine = moody_engine()
    executor.error = ExecutorError("just once")
    engine.step()
    assert engine.health == "degraded"
    executor.error = None
    engine.step()
    assert engine.health == "ok"


def test_steps_of_one_row_end_it_after_a_while() -> None:
    executor, engine = moody_engine(num_requests=2, max_tokens=1)
    executor.error = ExecutorError("just once")
    finish(engine)
    engine.add_request([1], greedy(30))
    for _ in range(15):
        engine.step()
    assert engine.health == "degraded"
    engine.step()
    assert engine.health == "ok"


def test_a_cause_is_told_once_then_counted_then_that_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    executor, engine = moody_engine(max_tokens=400)
    executor.error = ExecutorError("no batches today")
    run_until(engine, lambda: engine.clock.now() > 3 * REPEATS_S)
    executor.error = None
    finish(engine)
    first, *counts, over = lines(caplog)
    assert first["event"] == "step_failed"
    assert (first["step"], first["count"], first["cause"]) == (1, 1, "ExecutorError")
    assert first["requests"] == [f"request-{n}" for n in (1, 2, 3, 4)]
    assert {line["event"] for line in counts} == {"step_failed"}
    assert 2 <= len(counts) <= 4, "one a minute, and the rest at the end"
    assert "error" not in counts[0]
    failed = engine.stats.steps_failed["ExecutorError"]
    told = [line["count"] for line in (first, *counts)]
    assert sum(count for count in told if isinstance(count, int)) == failed
    assert (over["event"], over["failed_steps"]) == ("recovered", failed)


def test_causes_are_told_apart_by_type_and_place_not_by_their_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FaultLog()

    def raised(error: Exception) -> Exception:
        try:
            raise error
        except Exception as caught:
            return caught

    for number in range(5):
        log.report("step_failed", "it failed", raised(ValueError(f"row {number}")), 0.0, {})
    log.report("step_failed", "it failed", raised(KeyError(1)), 0.0, {})
    log.report("request_failed", "it failed", raised(KeyError(1)), 0.0, {})
    assert [line["cause"] for line in lines(caplog)] == ["ValueError", "KeyError", "KeyError"]
    log.flush(1.0)
    log.flush(2.0)
    assert [line["count"] for line in lines(caplog)[3:]] == [4]


def test_causes_without_end_are_one_beyond_a_number(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog()
    for number in range(200):
        kind = type(f"Error{number}", (Exception,), {})
        log.report("step_failed", "it failed", kind(), 0.0, {})
    assert len(lines(caplog)) == 65
    assert lines(caplog)[-1]["cause"] == "others"


def test_errors_that_cause_each_other_in_a_circle_are_told_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    executor, engine = moody_engine(max_tokens=2)
    executor.error = first
    finish(engine)
    assert len(lines(caplog)) == 1


def test_requests_name_the_steps_that_they_were_in() -> None:
    executor = FakeExecutor(faults=Faults(raises=lambda row: row.sequence_id == 3))
    engine = new_engine(executor, plan_ahead=False)
    requests = [engine.add_request([first], greedy(3)) for first in range(4)]
    outputs = finish(engine)
    metrics = [outputs[request.id].metrics for request in requests]
    # Step 1 fails, then 3 of its parts: 2 runs, 3 fails, 4 (the culprit) fails, 5 runs.
    assert [each.failed_steps for each in metrics] == [[1], [1], [1, 3, 4], [1, 3]]
    assert [each.first_step for each in metrics] == [1] * 4
    assert [each.last_step for each in metrics] == [7, 7, 4, 7]


def test_the_latest_failed_steps_of_a_request_are_kept() -> None:
    executor, engine = moody_engine(num_requests=2, max_tokens=300)
    executor.error = ExecutorError("no")
    outputs = finish(engine)
    for output in outputs.values():
        assert len(output.metrics.failed_steps) == 16
        assert output.metrics.failed_steps == sorted(output.metrics.failed_steps)
        assert output.metrics.failed_steps[-1] == engine.health_report.last_failed_step


def test_a_row_of_its_own_names_its_step_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(nan=lambda row: row.sequence_id == 2 and row.completion_position == 2)
    engine = new_engine(FakeExecutor(faults=faults), plan_ahead=False)
    for first in range(3):
        engine.add_request([first], greedy(5))
    outputs = finish(engine)
    assert outputs["request-2"].metrics.failed_steps == [3]
    assert outputs["request-1"].metrics.failed_steps == []
    (line,) = lines(caplog)
    assert (line["event"], line["step"], line["requests"]) == ("request_failed", 3, ["request-2"])
    assert engine.stats.faults_isolated == {"RowFaultError": 1}
    assert engine.stats.steps_failed == {}


def test_the_end_of_the_engine_is_no_isolated_fault(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine()
    for first in range(3):
        engine.add_request([first], greedy(5))
    engine.step()
    engine.fail_all(ExecutorError("the engine failed: a bug"))
    engine.fail_all(ExecutorError("another"))
    assert engine.stats.faults_isolated == {}
    assert engine.stats.requests_ended == {"failed": 3}
    report = engine.health_report
    assert (report.state, report.cause) == ("stuck", "the engine failed: a bug")
    assert report.since == engine.clock.now()
    with pytest.raises(ExecutorError, match="the engine failed: a bug; restart the process"):
        engine.add_request([1], greedy(1))
    (line,) = lines(caplog)
    assert (line["event"], line["num_requests"]) == ("engine_ended", 3)


def test_an_executor_that_does_not_answer_says_how_long(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(hangs=lambda _: True, heeds_cancel=False)
    engine = new_engine(FakeExecutor(faults=faults), step_timeout_s=2.0, step_grace_s=1.0)
    request = engine.add_request([1], greedy(1))
    finish(engine, check=False)
    assert engine.health_report.cause == "the executor did not answer within 3 s"
    assert engine.stats.faults_isolated == {}
    assert engine.health_report.last_failed_step == 1
    assert request.metrics.failed_steps == [1]
    assert [(line["event"], line["step"]) for line in lines(caplog)] == [("engine_ended", 1)]
    with pytest.raises(ExecutorError, match="did not answer within 3 s; restart the process"):
        engine.add_request([1], greedy(1))


def test_a_failed_step_whose_requests_were_all_cancelled_is_no_isolated_fault() -> None:
    executor, engine = moody_engine(num_requests=2)
    executor.error = ExecutorError("no")
    engine = new_engine(executor)  # plans ahead: a step is in flight between two calls
    requests = [engine.add_request([first], greedy(5)) for first in range(2)]
    engine.step()
    for request in requests:
        engine.cancel(request.id)
    finish(engine)
    assert engine.stats.steps_failed == {"ExecutorError": 1}
    assert engine.stats.faults_isolated == {}


def test_recovery_counts_no_failures_from_before_it_was_degraded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = HealthMonitor(EngineStats())
    for step_id in range(3):  # each explained by a row of its own
        monitor.step_failed(step_id, ["a"], ExecutorError("a row"), 0.0)
    monitor.step_failed(3, ["a"], ExecutorError("the batch"), 1.0)
    monitor.degraded(1.0)
    monitor.step_failed(4, ["a"], ExecutorError("the batch"), 2.0)
    monitor.recovered(3.0)
    over = lines(caplog)[-1]
    assert (over["event"], over["failed_steps"], over["degraded_s"]) == ("recovered", 2, 2.0)
