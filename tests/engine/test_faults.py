"""Faults: one request of many goes wrong, steps fail or hang, memory is short, load is shed."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, run_until

from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    RowFaultError,
    StepCancelledError,
)
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, StepResult, Want
from quire.core.request import FinishReason, Request, RequestOutput, Status, WaitReason
from quire.engine import Engine
from quire.engine.execution import Backoff, isolate
from quire.engine.sequence import Sequence
from quire.engine.stats import Health
from quire.engine.step import Row
from quire.executors.fake import FakeExecutor, Faults, StepCost

POISONED = 17  # the sequence that goes wrong
IMPATIENT = {"step_timeout_s": 1.0, "step_grace_s": 1.0}


def is_poisoned(row: SequencePlan) -> bool:
    return row.sequence_id == POISONED and row.end > 6


def requests_of(engine: Engine, firsts: list[int]) -> dict[int, Request]:
    return {i: engine.add_request([i, i + 1, i + 2], greedy(12, logprobs=1)) for i in firsts}


def results(engine: Engine, firsts: list[int]) -> dict[int, RequestOutput]:
    """Outputs by the first prompt token, which counts from 1 as sequences do."""
    requests = requests_of(engine, firsts)
    outputs = finish(engine)
    return {first: outputs[request.id] for first, request in requests.items()}


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (Faults(raises=is_poisoned), ExecutorError),
        (Faults(nan=is_poisoned), RowFaultError),
        (Faults(no_memory=is_poisoned), ExecutorMemoryError),
        (Faults(hangs=is_poisoned), StepCancelledError),
    ],
    ids=["raises", "nan", "no memory", "hangs"],
)
@pytest.mark.parametrize("plan_ahead", [True, False])
def test_one_of_32_goes_wrong_and_the_others_do_not_notice(
    faults: Faults, error: type[Exception], plan_ahead: bool
) -> None:
    firsts = list(range(1, 33))
    executor = FakeExecutor(faults=faults)
    engine = new_engine(executor, plan_ahead=plan_ahead, **IMPATIENT)
    with_it = results(engine, firsts)
    firsts.remove(POISONED)
    without_it = results(new_engine(plan_ahead=plan_ahead), firsts)
    for first in firsts:
        assert with_it[first].status is Status.FINISHED
        assert with_it[first].completions == without_it[first].completions
    culprit = with_it[POISONED]
    assert culprit.status is Status.FAILED
    assert culprit.finish_reason is FinishReason.ERROR
    assert type(culprit.error) is error
    assert tokens_of(culprit) == [solo([17, 18, 19], greedy(12))[0][: len(culprit.token_ids)]]
    assert engine.stats.faults_isolated == {error.__name__: 1}
    assert engine.stats.requests_ended == {"finished": 31, "failed": 1}
    assert engine.snapshot().kv_usage == 0.0


def test_the_time_it_takes_to_find_the_culprit_is_counted() -> None:
    executor = FakeExecutor(faults=Faults(hangs=is_poisoned))
    engine = new_engine(executor, **IMPATIENT)
    outputs = results(engine, list(range(1, 33)))
    # The step and five of its parts, down to the culprit alone, take a second each.
    assert outputs[POISONED].metrics.finished_at == pytest.approx(6.2, abs=0.2)


def test_a_row_that_yields_nan_costs_the_others_no_step() -> None:
    executor = FakeExecutor(faults=Faults(nan=is_poisoned), keep_plans=True)
    results(new_engine(executor), list(range(1, 33)))
    sizes = [len(plan.sequences) for plan in executor.plans]
    assert sizes == [32] * (sizes.count(32)) + [31] * (sizes.count(31))
    assert len(sizes) == 12


def test_several_culprits_are_found_together() -> None:
    poisoned = {3, 4, 11}
    executor = FakeExecutor(faults=Faults(raises=lambda row: row.sequence_id in poisoned))
    outputs = results(new_engine(executor), list(range(1, 17)))
    failed = {first for first, output in outputs.items() if output.status is Status.FAILED}
    assert failed == poisoned


def test_a_fault_of_one_completion_is_the_requests() -> None:
    executor = FakeExecutor(faults=Faults(nan=lambda row: row.sequence_id == 3))
    engine = new_engine(executor)
    engine.add_request([1, 2], greedy(5, n=3))
    (output,) = finish(engine).values()
    assert output.status is Status.FAILED
    assert engine.snapshot().kv_usage == 0.0


class Clumsy(FakeExecutor):
    """Raises what no executor should, now and then without being asked to compute anything."""

    raises_on_submit: Exception | None = None
    raises_on_collect: Exception | None = None

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        error, self.raises_on_submit = self.raises_on_submit, None
        if error is not None:
            raise error
        return super().submit(plan)

    def collect(self, ticket, timeout_s=None):  # type: ignore[no-untyped-def]
        error, self.raises_on_collect = self.raises_on_collect, None
        if error is not None:
            raise error
        return super().collect(ticket, timeout_s)


@pytest.mark.parametrize("error", [RuntimeError("oops"), MemoryError(), KeyError(3)])
@pytest.mark.parametrize("phase", ["raises_on_submit", "raises_on_collect"])
def test_a_step_that_fails_once_for_no_reason_is_run_again(error: Exception, phase: str) -> None:
    executor = Clumsy()
    engine = new_engine(executor, max_batch_size=4, max_step_tokens=64)
    requests = [engine.add_request([i, 2, 3], greedy(8)) for i in range(4)]
    for _ in range(3):
        engine.step()
    setattr(executor, phase, error)
    outputs = finish(engine)
    for request in requests:
        assert outputs[request.id].status is Status.FINISHED
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


def test_a_foreign_error_is_wrapped_and_keeps_its_cause() -> None:
    class Foreign(FakeExecutor):
        def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("by zero")

    engine = new_engine(Foreign())
    engine.add_request([1], greedy(1))
    (output,) = finish(engine).values()
    assert type(output.error) is ExecutorError
    assert "ZeroDivisionError: by zero" in str(output.error)
    assert isinstance(output.error.__cause__, ZeroDivisionError)


# ---- hangs that nothing ends


def stuck_engine(num_requests: int = 3) -> tuple[Engine, dict[str, RequestOutput]]:
    faults = Faults(hangs=lambda row: row.completion_position == 2, heeds_cancel=False)
    engine = new_engine(FakeExecutor(faults=faults), max_batch_size=2, **IMPATIENT)
    for first in range(num_requests):
        engine.add_request([first], greedy(5))
    return engine, finish(engine, check=False)


def test_a_hang_that_does_not_heed_its_flag_ends_every_request_running_or_waiting() -> None:
    engine, outputs = stuck_engine()
    assert len(outputs) == 3
    for output in outputs.values():
        assert output.status is Status.FAILED
        assert type(output.error) is ExecutorError
        assert "did not answer within 2 s" in str(output.error)
    assert engine.health is Health.STUCK
    assert engine.snapshot().health == "stuck"
    assert not engine.has_work


def test_a_stuck_engine_refuses_new_requests() -> None:
    engine, _ = stuck_engine()
    with pytest.raises(ExecutorError, match="restart"):
        engine.add_request([1], greedy(1))


def test_a_hang_found_while_looking_for_a_culprit_ends_likewise() -> None:
    faults = Faults(raises=lambda row: row.sequence_id == 1, heeds_cancel=False)
    executor = FakeExecutor(faults=faults)
    engine = new_engine(executor, **IMPATIENT)
    for first in range(4):
        engine.add_request([first], greedy(5))
    faults.hangs = lambda row: row.sequence_id == 2 and executor.clock.now() > 0
    outputs = finish(engine, check=False)
    assert len(outputs) == 4
    assert all(output.status is Status.FAILED for output in outputs.values())
    assert engine.health is Health.STUCK


# ---- memory


def test_steps_shrink_until_the_memory_suffices() -> None:
    executor = FakeExecutor(faults=Faults(no_memory_above=8), keep_plans=True)
    engine = new_engine(executor, max_batch_size=16)
    requests = [engine.add_request([i, i + 1, i + 2, i + 3], greedy(10)) for i in range(16)]
    outputs = finish(engine)
    for request in requests:
        assert outputs[request.id].status is Status.FINISHED
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.faults_isolated == engine.stats.steps_failed
    assert set(engine.stats.steps_failed) == {"ExecutorMemoryError"}


def test_for_want_of_memory_the_last_in_rank_leave_the_batch() -> None:
    engine = new_engine(FakeExecutor(faults=Faults(no_memory_above=8)), plan_ahead=False)
    requests = [engine.add_request([i, i + 1, i + 2, i + 3], greedy(10)) for i in range(4)]
    run_until(engine, lambda: engine.health_report.batch_limit == 2)
    assert [request.status for request in requests] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.PREEMPTED,
        Status.PREEMPTED,
    ]


def test_a_prompt_too_large_for_the_memory_is_computed_in_smaller_chunks() -> None:
    executor = FakeExecutor(faults=Faults(no_memory_above=50), keep_plans=True)
    engine = new_engine(executor)
    request = engine.add_request(list(range(300)), greedy(4))
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo(request.prompt, request.params)
    assert output.metrics.num_chunks > 5


def test_without_chunks_a_prompt_too_large_for_the_memory_fails() -> None:
    engine = new_engine(FakeExecutor(faults=Faults(no_memory_above=50)), chunking=False)
    large = engine.add_request(list(range(100)), greedy(4))
    small = engine.add_request(list(range(10)), greedy(4))
    outputs = finish(engine)
    assert isinstance(outputs[large.id].error, ExecutorMemoryError)
    assert tokens_of(outputs[small.id]) == solo(small.prompt, small.params)


def test_what_fits_no_memory_at_all_fails_and_the_rest_goes_on() -> None:
    executor = FakeExecutor()
    engine = new_engine(executor, max_batch_size=4)
    requests = [engine.add_request([i], greedy(10)) for i in range(4)]
    for _ in range(3):
        engine.step()
    executor.faults.no_memory = lambda row: row.sequence_id == 2
    outputs = finish(engine)
    assert isinstance(outputs[requests[1].id].error, ExecutorMemoryError)
    for request in (requests[0], *requests[2:]):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


# ---- shedding load


class OneAtATime(FakeExecutor):
    """Fails every step of more than one row while it is broken."""

    is_broken = True

    def _raise_faults(self, plan: StepPlan) -> None:
        if self.is_broken and len(plan.sequences) > 1:
            raise ExecutorError("too many")


def test_batches_that_keep_failing_make_way_for_single_requests_and_come_back() -> None:
    executor = OneAtATime(keep_plans=True)
    engine = new_engine(executor, max_batch_size=4, plan_ahead=False)
    requests = [engine.add_request([i, i + 1], greedy(60)) for i in range(4)]
    assert engine.health is Health.OK
    run_until(engine, lambda: engine.health_report.batch_limit == 1)
    assert engine.snapshot().health == "degraded"
    executor.plans.clear()
    engine.step()
    assert [len(plan.sequences) for plan in executor.plans] == [1]
    late = engine.add_request([9], greedy(40))
    engine.step()
    assert engine.snapshot().waiting_by_reason == {WaitReason.DEGRADED: 1}
    executor.is_broken = False
    executor.plans.clear()
    outputs = finish(engine)
    for request in (*requests, late):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
    sizes = [len(plan.sequences) for plan in executor.plans]
    assert sizes[:14] == [1] * 14
    assert max(sizes) == 4
    assert engine.health is Health.OK
    assert engine.stats.faults_isolated == {"ExecutorError": 3}, "steps; no request failed"


def test_backoff_is_lost_after_three_failures_in_a_row_and_regained_by_doubling() -> None:
    backoff = Backoff(8, 512)
    failure = ExecutorError("no")
    backoff.failed(8, 100, failure)
    backoff.failed(8, 100, failure)
    backoff.succeeded(8)
    assert not backoff.is_degraded
    backoff.failed(8, 100, failure)
    backoff.failed(8, 100, failure)
    assert not backoff.is_lowered, "not three in a row"
    backoff.succeeded(1)  # of one row: it says nothing about batches
    backoff.failed(8, 100, failure)
    assert backoff.is_lowered
    limits = []
    for _ in range(16 * 3):
        limits.append(backoff.batch_limit)
        backoff.succeeded(1)
    assert limits == [1] * 16 + [2] * 16 + [4] * 16
    assert not backoff.is_degraded


def test_a_request_that_fails_alone_says_nothing_about_batches() -> None:
    backoff = Backoff(8, 512)
    for _ in range(10):
        backoff.failed(1, 50, ExecutorError("no"))
    assert not backoff.is_degraded


def test_want_of_memory_halves_batch_and_tokens_at_once() -> None:
    backoff = Backoff(8, 512)
    backoff.failed(6, 100, ExecutorMemoryError("no"))
    assert (backoff.batch_limit, backoff.token_limit) == (3, 50)
    for _ in range(20):
        backoff.failed(1, 1, ExecutorMemoryError("no"))
    assert (backoff.batch_limit, backoff.token_limit) == (1, 1)


# ---- isolation by halves


def fake_rows(sizes: list[int]) -> list[Row]:
    """Rows of so many tokens each, numbered from 0."""
    rows = enumerate(sizes)
    plans = [SequencePlan(i, 0, (1,) * size, None, (), Want.SAMPLE) for i, size in rows]
    return [Row(plan, None, 0) for plan in plans]  # type: ignore[arg-type]


def runner(
    is_bad: Callable[[int], bool], error: type[ExecutorError], runs: list[list[int]]
) -> Callable[[object], list[SequenceResult]]:
    def run(rows: object) -> list[SequenceResult]:
        names = [row.plan.sequence_id for row in rows]  # type: ignore[attr-defined]
        runs.append(names)
        if any(is_bad(name) for name in names):
            raise error("bad")
        return [SequenceResult(name, token=name) for name in names]

    return run


@pytest.mark.parametrize("culprit", range(8))
def test_a_culprit_is_found_in_halves(culprit: int) -> None:
    runs: list[list[int]] = []
    outcome = isolate(fake_rows([1] * 8), runner(lambda i: i == culprit, ExecutorError, runs))
    assert [row.plan.sequence_id for row, _ in outcome.failed] == [culprit]
    sound = [(row.plan.sequence_id, result.token) for row, result in outcome.succeeded]
    assert sound == [(i, i) for i in range(8) if i != culprit]
    assert len(runs) == 6, "two halves at each of three levels"


@pytest.mark.parametrize(
    ("sizes", "short", "failed", "again"),
    [
        ([1, 1, 1, 1], {0, 1, 2, 3}, [0], [1, 2, 3]),  # one must go, so that the others may run
        ([1, 1, 1, 1], {2}, [2], []),  # others ran: it is this one's fault
        ([2], {0}, [], [0]),
        ([9], {0}, [], [0]),  # it may be planned again as smaller chunks
        ([1, 9, 2], {1}, [], [1]),  # ... since no part so large has run
        ([9, 9, 9, 9], {1}, [1], []),  # ... unless one has
        ([1, 9], {0, 1}, [], [0, 1]),  # first make it smaller, then see who must go
    ],
)
def test_for_want_of_memory_as_few_as_possible_must_go(
    sizes: list[int], short: set[int], failed: list[int], again: list[int]
) -> None:
    run = runner(lambda i: i in short, ExecutorMemoryError, [])
    outcome = isolate(fake_rows(sizes), run, can_shrink=True)
    assert [row.plan.sequence_id for row, _ in outcome.failed] == failed
    assert [row.plan.sequence_id for row in outcome.retry] == again


def test_a_row_that_cannot_be_made_smaller_must_go() -> None:
    run = runner(lambda _: True, ExecutorMemoryError, [])
    outcome = isolate(fake_rows([9]), run, can_shrink=False)
    assert len(outcome.failed) == 1


def test_nothing_to_isolate_is_no_error() -> None:
    runs: list[list[int]] = []
    outcome = isolate([], runner(lambda _: True, ExecutorError, runs))
    assert (outcome.succeeded, outcome.failed, outcome.retry, runs) == ([], [], [], [])


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


def test_batch_and_tokens_are_doubled_alike_up_to_their_limits() -> None:
    backoff = Backoff(6, 500)
    backoff.failed(6, 120, ExecutorMemoryError("no"))
    found = []
    for _ in range(4):
        found.append((backoff.batch_limit, backoff.token_limit, backoff.is_degraded))
        for _ in range(16):
            backoff.succeeded(1)
    assert found == [(3, 60, True), (6, 120, True), (6, 240, True), (6, 480, True)]
    assert (backoff.batch_limit, backoff.token_limit, backoff.is_degraded) == (6, 500, False)


def test_want_of_memory_halves_the_smaller_of_the_step_and_the_limit() -> None:
    backoff = Backoff(8, 512)
    backoff.failed(8, 64, ExecutorMemoryError("no"))
    backoff.failed(8, 300, ExecutorMemoryError("no"))
    assert (backoff.batch_limit, backoff.token_limit) == (2, 16)


def test_a_batch_that_fails_after_half_a_recovery_lowers_the_limit_at_once() -> None:
    backoff = Backoff(8, 512)
    for _ in range(3):
        backoff.failed(8, 100, ExecutorError("no"))
    for _ in range(16):
        backoff.succeeded(1)
    assert backoff.batch_limit == 2
    backoff.failed(2, 2, ExecutorError("no"))
    assert backoff.batch_limit == 1


def test_a_failure_starts_the_count_of_successes_again() -> None:
    backoff = Backoff(8, 512)
    backoff.failed(4, 64, ExecutorMemoryError("no"))
    for _ in range(15):
        backoff.succeeded(1)
    backoff.failed(1, 1, ExecutorError("of this row alone"))
    backoff.succeeded(1)
    assert backoff.batch_limit == 2
    for _ in range(15):
        backoff.succeeded(1)
    assert backoff.batch_limit == 4


# ---- the check of the engine's state


def collect_too_much(engine: Engine, sequence: Sequence) -> None:
    sequence.num_pending = -1


def compute_what_is_not_there(engine: Engine, sequence: Sequence) -> None:
    sequence.num_computed = len(sequence.tokens) + sequence.num_pending + 1


def lose_the_flag(engine: Engine, sequence: Sequence) -> None:
    sequence.is_running = False


def lose_the_sequence(engine: Engine, sequence: Sequence) -> None:
    engine._scheduler.running.remove(sequence)
    sequence.is_running = False


def park_what_runs(engine: Engine, sequence: Sequence) -> None:
    engine._scheduler.parked.add(sequence)


def mix_up_the_order(engine: Engine, sequence: Sequence) -> None:
    engine._scheduler.running.reverse()


def lose_a_block(engine: Engine, sequence: Sequence) -> None:
    engine.cache.pool.retain(sequence.block_table.ids[0])


@pytest.mark.parametrize(
    "corrupt",
    [
        collect_too_much,
        compute_what_is_not_there,
        lose_the_flag,
        lose_the_sequence,
        park_what_runs,
        mix_up_the_order,
        lose_a_block,
    ],
)
def test_the_check_finds(corrupt: Callable[[Engine, Sequence], None]) -> None:
    engine = new_engine(max_batch_size=2)
    requests = [engine.add_request([first], greedy(9)) for first in range(3)]
    engine.step()
    engine.step()
    engine.check_integrity()
    corrupt(engine, engine._lifecycle.live[requests[0].id].sequences[0])
    with pytest.raises(AssertionError):
        engine.check_integrity()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(raises=lambda row: row.start == 0),
        Faults(hangs=lambda row: row.start == 0),
        Faults(hangs=lambda row: row.start == 0, heeds_cancel=False),
    ],
    ids=["raises", "hangs", "unresponsive"],
)
def test_a_step_that_fails_adds_nothing_to_the_hosts_time(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.engine.time.perf_counter", lambda: 5.0)
    engine = new_engine(FakeExecutor(faults=faults), plan_ahead=False, **IMPATIENT)
    engine.add_request([1], greedy(3))
    finish(engine)
    assert (engine.stats.host_seconds.total, engine.stats.host_seconds.sum) == (1, 0.0)


class Watched(FakeExecutor):
    """Notes the time that each step is given."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults=faults)
        self.timeouts: list[float | None] = []

    def collect(self, ticket: Any, timeout_s: float | None = None) -> StepResult:
        self.timeouts.append(timeout_s)
        return super().collect(ticket, timeout_s)


@pytest.mark.parametrize("timeout_s", [10.0, 1.0, None])
def test_parts_of_a_step_that_raised_have_the_time_of_a_whole_step(timeout_s: float | None) -> None:
    executor = Watched(Faults(raises=lambda row: row.sequence_id == 2))
    engine = new_engine(executor, step_timeout_s=timeout_s, step_grace_s=2.0)
    requests = [engine.add_request([first], greedy(3)) for first in range(3)]
    outputs = finish(engine)
    statuses = [outputs[request.id].status for request in requests]
    assert statuses == [Status.FINISHED, Status.FAILED, Status.FINISHED]
    assert set(executor.timeouts) == {timeout_s}


def test_parts_of_a_step_that_hung_have_the_time_of_the_grace_alone() -> None:
    executor = FakeExecutor(cost=StepCost(a=0.5))
    executor.faults.hangs = lambda row: row.sequence_id == 2
    engine = new_engine(executor, step_timeout_s=10.0, step_grace_s=2.0, plan_ahead=False)
    requests = [engine.add_request([first], greedy(1)) for first in range(2)]
    outputs = finish(engine)
    assert [outputs[r.id].status for r in requests] == [Status.FINISHED, Status.FAILED]
    assert engine.clock.now() == pytest.approx(10.0 + 0.5 + 2.0, abs=1.0)


def test_batches_of_two_that_keep_failing_count() -> None:
    backoff = Backoff(8, 512)
    for _ in range(3):
        backoff.failed(2, 10, ExecutorError("no"))
    assert backoff.batch_limit == 1


class Forgetful(FakeExecutor):
    """Gives no result for the last row of a step."""

    def collect(self, ticket: Any, timeout_s: float | None = None) -> StepResult:
        result = super().collect(ticket, timeout_s)
        return result._replace(sequences=result.sequences[:-1])


def test_a_result_without_some_of_its_rows_is_a_bug_that_shows() -> None:
    engine = new_engine(Forgetful(), plan_ahead=False)
    for first in range(2):
        engine.add_request([first], greedy(2))
    with pytest.raises(ValueError, match="shorter"):
        engine.step()


def test_a_row_of_a_sequence_that_lost_its_blocks_is_not_run_again() -> None:
    executor = Clumsy(keep_plans=True)
    engine = new_engine(executor)
    requests = [engine.add_request([first] * 5, greedy(6)) for first in range(2)]
    engine.step()  # a step is in flight
    engine.pause(requests[1].id)
    executor.raises_on_collect = RuntimeError("oops")
    engine.step()
    engine.check_integrity()
    again = [[row.sequence_id for row in plan.sequences] for plan in executor.plans[1:]]
    assert [2 in step for step in again] == [False] * len(again)
    engine.resume(requests[1].id)
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
