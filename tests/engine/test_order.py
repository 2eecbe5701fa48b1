"""Who goes first and who must stop: priorities, aging, keys, deadlines, cancellation, pauses."""

from typing import Any

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import ended, greedy, play, run_until

from quire.core.errors import DeadlineError, RequestCancelledError
from quire.core.request import Ended, FinishReason, Status, WaitReason
from quire.core.sampling import SamplingParams
from quire.executors.fake import FakeExecutor


def order_of_ends(requests: list[dict[str, Any]], **settings: Any) -> list[int]:
    """One at a time: the first prompt tokens of the requests in the order they ended."""
    engine = new_engine(max_batch_size=1, **settings)
    for first, options in enumerate(requests):
        engine.add_request([first], greedy(2), **options)
    return [output.prompt_token_ids[0] for output in finish(engine).values()]


def test_of_equals_the_first_to_come_is_the_first_to_run() -> None:
    assert order_of_ends([{}] * 5) == [0, 1, 2, 3, 4]


def test_lower_priority_numbers_go_first() -> None:
    requests = [{"priority": p} for p in (2, 0, 1, -1)]
    assert order_of_ends(requests) == [3, 1, 2, 0]


def test_waiting_an_aging_time_is_worth_a_level_of_priority() -> None:
    engine = new_engine(max_batch_size=1, aging_s=1.0)
    blocker = engine.add_request([99], greedy(200))  # runs for about two seconds
    script = [
        (0.1, lambda: engine.add_request([0], greedy(1), priority=1)),
        (0.6, lambda: engine.add_request([1], greedy(1))),  # half a second later, a level above
        (1.3, lambda: engine.add_request([2], greedy(1))),  # over a second later
    ]
    outputs = ended(play(engine, script))
    assert outputs[0].request_id == blocker.id
    assert [output.prompt_token_ids[0] for output in outputs[1:]] == [1, 0, 2]


def test_with_fairness_a_key_is_not_kept_waiting_by_anothers_queue() -> None:
    requests = [{"key": "busy"}] * 6 + [{"key": "quiet"}]
    assert order_of_ends(requests, fairness=True).index(6) <= 2


def test_without_fairness_keys_do_not_count() -> None:
    requests = [{"key": "busy"}] * 6 + [{"key": "quiet"}]
    assert order_of_ends(requests, fairness=False) == [0, 1, 2, 3, 4, 5, 6]


# ---- deadlines


def test_a_deadline_ends_a_request_that_waits() -> None:
    engine = new_engine(max_batch_size=1)
    engine.add_request([1], greedy(20))
    late = engine.add_request([2], greedy(5), timeout_s=0.055)
    output = finish(engine)[late.id]
    assert output.status is Status.EXPIRED
    assert isinstance(output.error, DeadlineError)
    assert late.id in str(output.error)
    assert output.finish_reason is FinishReason.TIMEOUT
    assert output.token_ids == []
    assert output.metrics.finished_at == pytest.approx(0.055, abs=0.011)  # within a step


def test_a_deadline_ends_a_running_request_with_the_tokens_it_got_and_frees_its_blocks() -> None:
    engine = new_engine()
    request = engine.add_request([1, 2, 3], greedy(100), timeout_s=0.055)
    run_until(engine, lambda: engine.clock.now() >= 0.055)
    assert engine.snapshot().kv_usage > 0
    (event,) = engine.step()
    assert isinstance(event, Ended)
    assert event.output.status is Status.EXPIRED
    assert engine.snapshot().kv_usage == 0.0
    num_tokens = len(event.output.token_ids)
    assert num_tokens > 0
    assert tokens_of(event.output) == [solo([1, 2, 3], greedy(100))[0][:num_tokens]]
    assert engine.cancel(request.id) is False
    finish(engine)


def test_the_deadline_of_the_config_is_for_requests_that_bring_none() -> None:
    engine = new_engine(timeout_s=0.02)
    first = engine.add_request([1], greedy(50))
    second = engine.add_request([2], greedy(50), timeout_s=100.0)
    outputs = finish(engine)
    assert outputs[first.id].status is Status.EXPIRED
    assert outputs[second.id].status is Status.FINISHED


def test_a_deadline_counts_from_the_arrival_not_from_the_hand_over() -> None:
    engine = new_engine()
    engine.clock.sleep(1.0)
    request = engine.add_request([1], greedy(50), timeout_s=0.5, arrived_at=0.4)
    assert request.deadline == pytest.approx(0.9)
    (event,) = engine.step()
    assert isinstance(event, Ended)
    assert event.output.status is Status.EXPIRED


def test_the_deadline_of_an_ended_request_does_not_hit_another_of_the_same_id() -> None:
    engine = new_engine()
    engine.add_request([1], greedy(1), request_id="x", timeout_s=0.1)
    finish(engine)
    again = engine.add_request([1], greedy(50), request_id="x", timeout_s=10.0)
    assert finish(engine)[again.id].status is Status.FINISHED


def test_a_paused_request_still_has_its_deadline() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(50), timeout_s=0.3)
    engine.pause(request.id)
    assert finish(engine)[request.id].status is Status.EXPIRED
    assert engine.clock.now() == pytest.approx(0.3)


@pytest.mark.parametrize("is_paused", [True, False])
def test_siblings_of_a_first_completion_that_is_out_of_the_batch_wait_as_it_does(
    is_paused: bool,
) -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor)
    request = engine.add_request([1, 2], SamplingParams(max_tokens=6, n=3, seed=5, ignore_eos=True))
    engine.step()  # the prompt is under way, its sample pending
    if is_paused:
        engine.pause(request.id)
    else:
        (first,) = engine._lifecycle.live[request.id].sequences
        engine._scheduler.preempt(first, engine.clock.now())
    for _ in range(4):
        engine.step()
    assert (len(executor.plans) == 1) == is_paused
    engine.resume(request.id)
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo([1, 2], request.params)


def test_resuming_what_is_not_paused_or_not_there_changes_nothing() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(5))
    engine.step()
    engine.resume("nobody")
    engine.resume(request.id)
    assert tokens_of(finish(engine)[request.id]) == solo([1], greedy(5))
    engine.resume(request.id)


# ---- cancellation


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancelling_frees_the_blocks_at_once(num_steps: int) -> None:
    engine = new_engine(FakeExecutor(num_blocks=8, block_size=4), max_step_tokens=64)
    request = engine.add_request(list(range(10)), greedy(15))
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel(request.id)
    engine.check_integrity()
    assert engine.snapshot().kv_usage == 0.0
    output = finish(engine)[request.id]
    assert output.status is Status.CANCELLED
    assert isinstance(output.error, RequestCancelledError)
    assert output.finish_reason is FinishReason.CANCELLED


def test_cancelling_what_is_not_live_says_so() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(1))
    finish(engine)
    assert engine.cancel(request.id) is False
    assert engine.cancel("nobody") is False
    assert engine.take_events() == []


def test_others_do_not_notice_a_cancellation() -> None:
    engine = new_engine(FakeExecutor(num_blocks=12, block_size=4), max_batch_size=4)
    doomed = engine.add_request(list(range(12)), greedy(12))
    others = [engine.add_request([i, i + 1], greedy(12)) for i in range(20, 23)]
    for _ in range(4):
        engine.step()
    engine.cancel(doomed.id)
    newcomer = engine.add_request(list(range(30, 42)), greedy(12))  # takes the freed blocks
    outputs = finish(engine)
    for request in (*others, newcomer):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


def test_a_request_cancelled_before_it_ran_is_told_of_by_run() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(1))
    engine.cancel(request.id)
    assert [output.request_id for output in ended(engine.run())] == [request.id]


# ---- pauses


def test_a_paused_request_keeps_no_blocks_and_goes_on_where_it_was() -> None:
    engine = new_engine()
    request = engine.add_request([1, 2, 3], greedy(10))
    other = engine.add_request([4], greedy(30))
    for _ in range(4):
        engine.step()
    engine.pause(request.id)
    engine.check_integrity()
    snapshot = engine.snapshot()
    assert snapshot.waiting_by_reason == {WaitReason.UNREAD: 1}
    assert snapshot.num_running == 1
    outputs = ended(run_until(engine, lambda: engine.wake_at == float("inf")))
    assert [output.request_id for output in outputs] == [other.id]
    engine.resume(request.id)
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo([1, 2, 3], greedy(10))
    assert output.metrics.waited_for[WaitReason.UNREAD] > 0.2


def test_run_returns_when_all_that_is_left_is_paused() -> None:
    engine = new_engine()
    request = engine.add_request([1], greedy(3))
    engine.pause(request.id)
    assert list(engine.run()) == []
    engine.resume(request.id)
    assert [output.request_id for output in ended(engine.run())] == [request.id]
