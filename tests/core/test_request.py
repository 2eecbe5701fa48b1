"""Request: its statuses, its metrics, and the short names of its output."""

import pytest

from quire.core.request import (
    Completion,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    Status,
    Transition,
)
from quire.core.sampling import SamplingParams


def new_request(**params: int) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(**params), 0, "", 0, None, RequestMetrics(10.0))  # type: ignore[arg-type]


def test_each_transition_keeps_its_time() -> None:
    request = new_request()
    request.move_to(Status.WAITING, 10.0)
    request.move_to(Status.RUNNING, 11.0)
    assert request.status is Status.RUNNING
    assert request.transitions == [
        Transition(Status.WAITING, 10.0),
        Transition(Status.RUNNING, 11.0),
    ]


@pytest.mark.parametrize("status", [status for status in Status if status.is_final])
def test_a_request_ends_once(status: Status) -> None:
    request = new_request()
    request.move_to(status, 1.0)
    with pytest.raises(AssertionError, match="ended twice"):
        request.move_to(Status.FINISHED, 2.0)


def test_what_is_final() -> None:
    final = {status for status in Status if status.is_final}
    assert final == {Status.FINISHED, Status.CANCELLED, Status.EXPIRED, Status.FAILED}


def test_a_request_asks_for_its_prompt_once_and_for_each_completion() -> None:
    assert new_request(max_tokens=5, n=4).num_tokens_asked == 3 + 20
    assert new_request(n=4).num_tokens_asked == 3, "it does not say how many"


def test_times_are_unknown_until_they_happen() -> None:
    unknown = RequestMetrics(10.0)
    assert unknown.queued_s is unknown.time_to_first_token_s is unknown.total_s is None
    metrics = RequestMetrics(10.0, started_at=10.5, first_token_at=11.0, finished_at=14.0)
    assert (metrics.queued_s, metrics.time_to_first_token_s, metrics.total_s) == (0.5, 1.0, 4.0)


def test_the_short_names_mean_the_first_completion() -> None:
    first = Completion(0, [4], "four", [], FinishReason.STOP)
    second = Completion(1, [5], "five", None, FinishReason.LENGTH)
    output = RequestOutput("r", (1,), [first, second], RequestMetrics(0.0), Status.FINISHED)
    assert (output.text, output.token_ids, output.logprobs) == ("four", [4], [])
    assert output.finish_reason is FinishReason.STOP
