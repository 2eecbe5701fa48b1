"""What the engine knows of itself, against runs small enough to count by hand."""

from itertools import pairwise

import pytest
from tests.engine.simulated import finish, new_engine
from tests.engine.toys import greedy, play, run_until

from quire.core.request import RequestMetrics, Status, WaitReason
from quire.engine import Engine
from quire.engine.stats import EngineStats, Health, Histogram
from quire.executors.fake import FakeExecutor, Faults, StepCost

TEN_MS = StepCost(a=0.010, b=0.0)


def small_run() -> tuple[Engine, list[RequestMetrics]]:
    """Two requests of 3 + 2 tokens, then a pause of 20 ms, then one of 2 + 1 tokens."""
    engine = new_engine(FakeExecutor(cost=TEN_MS, block_size=2), prefix_reuse=True)
    metrics = [engine.add_request([first, 8, 9], greedy(2)).metrics for first in (1, 2)]
    finish(engine)
    engine.clock.sleep(0.020)
    metrics.append(engine.add_request([1, 8, 9, 4], greedy(1)).metrics)
    finish(engine)
    return engine, metrics


def test_the_counters_of_a_small_run() -> None:
    stats = small_run()[0].stats
    assert stats.num_steps == 3
    assert stats.prompt_tokens == 3 + 3 + 2
    assert stats.completion_tokens == 2 + 2 + 1
    assert stats.requests_ended == {"finished": 3}
    assert stats.faults_isolated == {}
    assert stats.num_preemptions == stats.discarded_rows == stats.padding_tokens == 0
    assert stats.prefix_queries == 3 + 3 + 4
    assert stats.prefix_hits == 2, "the first block of the first prompt"


def test_what_the_requests_of_a_small_run_met_with() -> None:
    engine, _ = small_run()
    requests = engine.stats.requests
    assert engine.stats.finish_reasons == {"length": 3}
    assert (requests.first_token.total, requests.total.total, requests.queued.total) == (3, 3, 3)
    assert requests.first_token.sum == pytest.approx(3 * 0.010)
    assert requests.total.sum == pytest.approx(2 * 0.020 + 0.010)
    assert requests.prefill.sum == pytest.approx(3 * 0.010)
    assert requests.decode.sum == pytest.approx(2 * 0.010)
    assert requests.token_gap.total == 2
    assert requests.token_gap.sum == pytest.approx(0.020)
    assert requests.prompt_tokens.sum == 3 + 3 + 4
    assert requests.completion_tokens.sum == 2 + 2 + 1


def test_the_histograms_of_a_small_run() -> None:
    stats = small_run()[0].stats
    sizes, tokens, seconds = stats.batch_size, stats.step_tokens, stats.step_seconds
    assert (sizes.total, sizes.sum) == (3, 2 + 2 + 1)
    assert sizes.counts[:2] == [1, 2], "one step of one sequence, two of two"
    assert (tokens.total, tokens.sum) == (3, 6 + 2 + 2)
    assert seconds.total == 3
    assert seconds.sum == pytest.approx(0.030)
    assert stats.host_seconds.total >= 3
    assert stats.host_seconds.sum > 0


def test_utilisation_is_the_share_of_time_with_a_step_in_flight() -> None:
    engine, _ = small_run()
    assert engine.stats.busy_s == pytest.approx(0.030)
    assert engine.snapshot().at == pytest.approx(0.050)
    assert engine.snapshot().utilisation == pytest.approx(0.6)


def test_the_metrics_of_the_requests_of_a_small_run() -> None:
    first, _, third = small_run()[1]
    assert (first.arrived_at, first.started_at) == (0.0, 0.0)
    assert first.first_token_at == pytest.approx(0.010)
    assert first.finished_at == pytest.approx(0.020)
    assert (first.num_chunks, first.num_steps, first.num_cached_tokens) == (1, 2, 0)
    assert third.arrived_at == pytest.approx(0.040)
    assert third.time_to_first_token_s == third.total_s == pytest.approx(0.010)
    assert (third.num_chunks, third.num_steps, third.num_cached_tokens) == (1, 1, 2)
    assert third.queued_s == 0.0
    assert third.num_preemptions == 0


def test_chunks_are_counted() -> None:
    engine = new_engine(max_step_tokens=8, max_batch_size=4)
    request = engine.add_request(list(range(20)), greedy(3))
    finish(engine)
    assert request.metrics.num_chunks == 3
    assert request.metrics.num_steps == 5


def test_rows_planned_for_what_had_ended_are_counted_as_discarded() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(50))
    run_until(engine, lambda: engine.stats.completion_tokens == 3)
    engine.cancel(request.id)
    finish(engine)
    assert engine.stats.discarded_rows == 1


def test_ends_are_counted_by_status_and_faults_by_type() -> None:
    executor = FakeExecutor(faults=Faults(nan=lambda row: row.sequence_id == 1))
    engine = new_engine(executor)
    engine.add_request([1], greedy(2))
    engine.add_request([2], greedy(2))
    engine.add_request([3], greedy(90), timeout_s=0.05)
    cancelled = engine.add_request([4], greedy(2))
    engine.cancel(cancelled.id)
    finish(engine)
    assert engine.stats.requests_ended == {
        "failed": 1,
        "finished": 1,
        "expired": 1,
        "cancelled": 1,
    }
    assert engine.stats.faults_isolated == {"RowFaultError": 1}


def test_a_snapshot_tells_who_runs_and_who_waits_for_what() -> None:
    engine = new_engine(FakeExecutor(num_blocks=16), max_batch_size=2)
    for key in ("a", "a", "a", "b"):
        engine.add_request([1, 2, 3], greedy(10), key=key)
    before = engine.snapshot()
    assert (before.num_running, before.num_waiting) == (0, 4)
    assert before.waiting_by_reason == {WaitReason.QUEUED: 4}
    assert before.waiting_by_key == {"a": 3, "b": 1}
    assert before.queued_tokens == 4 * 13
    assert before.kv_usage == 0.0
    assert before.utilisation == 0.0
    engine.step()
    after = engine.snapshot()
    assert (after.num_running, after.num_waiting) == (2, 2)
    assert after.queued_tokens == 2 * 13
    assert WaitReason.BATCH_FULL in after.waiting_by_reason
    assert sum(after.waiting_by_reason.values()) == 2
    assert after.kv_usage == 2 / 16
    assert after.memory_bytes["kv"] > 0
    assert after.stats is engine.stats
    finish(engine)
    assert engine.snapshot().num_running == engine.snapshot().num_waiting == 0


def test_a_request_that_lacks_blocks_says_so() -> None:
    engine = new_engine(FakeExecutor(num_blocks=4, block_size=4), max_batch_size=4)
    engine.add_request([1] * 9, greedy(4))
    engine.step()
    waiting = engine.add_request([2] * 9, greedy(4))
    engine.step()
    assert engine.snapshot().waiting_by_reason == {WaitReason.NO_BLOCKS: 1}
    finish(engine)
    assert waiting.metrics.waited_for[WaitReason.NO_BLOCKS] > 0


def test_the_reasons_of_a_wait_add_up_to_it() -> None:
    engine = new_engine(max_batch_size=1)
    engine.add_request([1], greedy(5))
    waiting = engine.add_request([2], greedy(5))
    finish(engine)
    metrics = waiting.metrics
    assert metrics.queued_s == pytest.approx(sum(metrics.waited_for.values()))
    assert metrics.queued_s is not None
    assert metrics.queued_s > 0.03


def test_health_is_told() -> None:
    engine = new_engine()
    assert engine.snapshot().health == "ok"
    engine.drain()
    assert engine.health is Health.DRAINING
    assert engine.snapshot().health == "draining"


def test_a_histogram_counts_a_value_at_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram([1, 2, 4])
    assert histogram.mean == 0.0
    for value in (0.5, 1, 1.5, 2, 5, 100):
        histogram.add(value)
    assert histogram.counts == [2, 2, 0, 2]
    assert histogram.total == 6
    assert histogram.mean == pytest.approx(110 / 6)


# ---- transitions


def test_every_request_ends_once_and_its_transitions_are_in_order() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=4)
    executor.faults.nan = lambda row: row.sequence_id == 3 and row.end > 9
    engine = new_engine(executor, max_batch_size=4, step_timeout_s=1.0, step_grace_s=1.0)
    requests = [engine.add_request([i] * 6, greedy(16)) for i in range(6)]
    requests.append(engine.add_request([7], greedy(20), timeout_s=0.1))
    script = [(0.08, lambda: engine.cancel(requests[1].id))]
    events = play(engine, script)
    ends = [event.request_id for event in events]
    assert sorted(ends) == sorted(request.id for request in requests)
    assert {request.status for request in requests} == {
        Status.FINISHED,
        Status.FAILED,
        Status.CANCELLED,
        Status.EXPIRED,
    }
    assert any(t.status is Status.PREEMPTED for request in requests for t in request.transitions)
    for request in requests:
        statuses = [transition.status for transition in request.transitions]
        times = [transition.at for transition in request.transitions]
        assert statuses[0] is Status.WAITING
        assert [status.is_final for status in statuses] == [False] * (len(statuses) - 1) + [True]
        assert times == sorted(times)
        assert times[0] == request.metrics.arrived_at
        assert times[-1] == request.metrics.finished_at
        assert all(before is not after for before, after in pairwise(statuses))


# ---- histograms


def test_the_bounds_that_dashboards_are_made_for() -> None:
    stats = EngineStats()
    powers = tuple(2**exponent for exponent in range(18))
    assert stats.batch_size.bounds == stats.step_tokens.bounds == powers[:14]
    assert stats.requests.prompt_tokens.bounds == powers
    assert stats.requests.completion_tokens.bounds == powers
    step_seconds = "1e-5 3e-5 1e-4 3e-4 1e-3 2e-3 5e-3 .01 .02 .05 .1 .2 .5 1 2 5 10"
    for seconds in (stats.step_seconds, stats.host_seconds):
        assert seconds.bounds == tuple(map(float, step_seconds.split()))
    latencies = (
        ".001 .002 .005 .01 .02 .03 .05 .075 .1 .15 .2 .3 .5 .75 1 1.5 2 3 5 7.5 10 20 30 60 120 "
        "300 600"
    )
    requests = stats.requests
    times = (requests.first_token, requests.token_gap, requests.total, requests.queued)
    for histogram in (*times, requests.prefill, requests.decode):
        assert histogram.bounds == tuple(map(float, latencies.split()))


def test_a_value_can_be_counted_several_times() -> None:
    histogram = Histogram([1, 2])
    histogram.add(2, 3)
    histogram.add(0.5)
    assert (histogram.counts, histogram.total, histogram.sum) == ([1, 3, 0], 4, 6.5)
    assert histogram.mean == 6.5 / 4


def test_new_counters_are_zero() -> None:
    stats = EngineStats()
    counters = (
        stats.num_steps, stats.prompt_tokens, stats.completion_tokens, stats.padding_tokens,
        stats.discarded_rows, stats.num_preemptions, stats.prefix_queries, stats.prefix_hits,
        stats.busy_s, stats.since, stats.batch_size.total, stats.batch_size.sum,
    )  # fmt: skip
    assert counters == (0,) * len(counters)
    assert set(stats.batch_size.counts) == {0}
    assert len(stats.batch_size.counts) == 15


def test_phases_that_a_request_did_not_reach_are_left_out() -> None:
    requests = EngineStats().requests
    requests.record(RequestMetrics(1.0, finished_at=3.0), 5, 0)
    assert (requests.total.sum, requests.total.total) == (2.0, 1)
    requests.record(RequestMetrics(1.0, started_at=2.0, finished_at=3.0), 5, 0)
    assert (requests.queued.sum, requests.queued.total) == (1.0, 1)
    others = (requests.first_token, requests.prefill, requests.decode)
    assert [histogram.total for histogram in others] == [0, 0, 0]
    assert (requests.prompt_tokens.total, requests.completion_tokens.sum) == (2, 0)


def test_a_snapshot_right_at_the_start_has_no_utilisation() -> None:
    assert new_engine().snapshot().utilisation == 0.0
