"""Admission: what the engine refuses, with the value and the limit; ids, seeds, the queue."""

from typing import Any

import numpy as np
import pytest
from tests.engine.simulated import finish, new_engine, solo
from tests.engine.toys import greedy, toy_engine

from quire.core.errors import OverloadedError, QuireError, RequestError
from quire.core.request import Status
from quire.core.sampling import Constraint, SamplingParams
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost

CONTEXT = 64


def small_engine(**settings: object) -> Engine:
    executor = FakeExecutor(max_context=CONTEXT, vocabulary_size=100, num_blocks=64, block_size=4)
    return new_engine(executor, **settings)


def refusal(engine: Engine, error: type[QuireError], *arguments: Any, **options: Any) -> str:
    """The refusal's words; nothing of the request may stay behind, and the others go on."""
    bystander = engine.add_request([1, 2, 3], greedy(4))
    num_waiting = engine.snapshot().num_waiting
    with pytest.raises(error) as caught:
        engine.add_request(*arguments, **options)
    assert engine.snapshot().num_waiting == num_waiting
    outputs = finish(engine)
    assert outputs.keys() == {bystander.id}
    expected = solo([1, 2, 3], greedy(4), vocabulary_size=100)
    assert [outputs[bystander.id].token_ids] == expected
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        ("hello", ["token ids", "text"]),
        (b"hello", ["token ids", "text"]),
        (None, ["list of token ids", "None"]),
        (5, ["list of token ids", "5"]),
        ([1, 100], ["token 1 is 100", "0 to 99"]),
        ([-1], ["token 0 is -1", "0 to 99"]),
        ([1.5], ["token 0", "1.5"]),
        ([True], ["token 0", "True"]),
        (["1"], ["token 0", "'1'"]),
        ([1, None], ["token 1", "None"]),
        ([1] * CONTEXT, [f"has {CONTEXT} tokens", f"holds {CONTEXT}"]),
        ([1] * 1000, ["has 1000 tokens", f"holds {CONTEXT}"]),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(prompt: Any, words: list[str]) -> None:
    message = refusal(small_engine(), RequestError, prompt, greedy(1))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 62}, ["prompt (3)", "max_tokens (62)", "65", f"holds {CONTEXT}"]),
        ({"n": 5}, ["n is 5", "holds 4"]),
        ({"stop_token_ids": [100]}, ["stop_token_ids", "100", "0 to 99"]),
        ({"logit_bias": {100: 1.0}}, ["logit_bias", "100", "0 to 99"]),
        ({"stop": ["x"]}, ["stop strings", "tokenizer"]),
        ({"structured": Constraint("regex", "a")}, ["without masks", "structured"]),
    ],
)
def test_params_that_do_not_fit_this_engine_are_refused(
    values: dict[str, Any], words: list[str]
) -> None:
    engine = small_engine(max_batch_size=4)
    message = refusal(engine, RequestError, [1, 2, 3], SamplingParams(**values))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1.5}, ["priority", "1.5"]),
        ({"priority": True}, ["priority", "True"]),
        ({"key": 3}, ["key", "3"]),
        ({"timeout_s": 0}, ["timeout_s", "above 0", "0"]),
        ({"timeout_s": -1.0}, ["timeout_s", "-1.0"]),
        ({"timeout_s": "5"}, ["timeout_s", "'5'"]),
        ({"request_id": 7}, ["request_id", "7"]),
        ({"timeout_s": float("nan")}, ["timeout_s", "nan"]),
        ({"request_id": "request-1"}, ["'request-1'", "in use"]),
        ({"num_generated": -1}, ["num_generated", "from 0 to 0", "-1"]),
        ({"num_generated": 1}, ["num_generated", "from 0 to 0", "1 tokens", "got 1"]),
        ({"num_generated": True}, ["num_generated", "True"]),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: list[str]) -> None:
    message = refusal(small_engine(), RequestError, [1], greedy(1), **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (greedy(2), ["max_tokens is 2", "2 tokens are generated"]),
        (greedy(5, n=2), ["num_generated", "n=1"]),
        (greedy(5, prompt_logprobs=0), ["num_generated", "prompt_logprobs"]),
    ],
)
def test_a_completion_that_cannot_go_on_is_refused(
    params: SamplingParams, words: list[str]
) -> None:
    message = refusal(small_engine(), RequestError, [1, 2, 3], params, num_generated=2)
    assert all(word in message for word in words), message


def test_a_request_the_pool_could_never_hold_is_refused() -> None:
    engine = new_engine(FakeExecutor(num_blocks=4, block_size=4))
    with pytest.raises(RequestError, match=r"17 tokens need 5 blocks .* has 4"):
        engine.add_request([1] * 10, greedy(7))
    engine.add_request([1] * 10, greedy(6))
    (output,) = finish(engine).values()
    assert [output.token_ids] == solo([1] * 10, greedy(6))


def test_without_chunking_a_prompt_must_fit_the_executors_step() -> None:
    engine = new_engine(FakeExecutor(max_step_tokens=16), chunking=False, max_batch_size=8)
    with pytest.raises(RequestError, match="all 20 tokens; it holds 16"):
        engine.add_request([1] * 15, greedy(5))


def test_a_constraint_that_cannot_be_compiled_is_its_requests_error() -> None:
    def make_grammar(params: SamplingParams) -> Any:
        raise ValueError("unbalanced (")

    engine = toy_engine(FakeExecutor(), make_grammar=make_grammar)
    with pytest.raises(RequestError, match=r"\(regex\) .*unbalanced \("):
        engine.add_request([1], SamplingParams(structured=Constraint("regex", "(")))
    assert not engine.has_work


def test_no_prompts_give_no_results_and_no_error() -> None:
    engine = new_engine()
    assert not engine.has_work
    assert list(engine.run()) == []
    assert engine.step() == []


def test_a_request_may_bring_its_own_id_and_take_one_that_is_free_again() -> None:
    engine = new_engine()
    for _ in range(2):
        assert engine.add_request([1], greedy(1), request_id="mine").id == "mine"
        assert finish(engine).keys() == {"mine"}


def test_a_missing_seed_is_drawn_once_and_kept() -> None:
    engine = new_engine()
    first = engine.add_request([1], SamplingParams(max_tokens=8, ignore_eos=True))
    second = engine.add_request([1], SamplingParams(max_tokens=8, ignore_eos=True))
    assert first.seed != second.seed
    outputs = finish(engine)
    again = SamplingParams(max_tokens=8, ignore_eos=True, seed=first.seed)
    assert [outputs[first.id].token_ids] == solo([1], again)
    assert outputs[first.id].token_ids != outputs[second.id].token_ids


def test_a_negative_seed_is_taken_modulo_two_to_the_64() -> None:
    request = new_engine().add_request([1], SamplingParams(seed=-1))
    assert request.seed == 2**64 - 1


# ---- the bounded queue


def test_the_queue_is_bounded_by_requests() -> None:
    engine = small_engine(max_batch_size=1, max_queue_requests=3)
    requests = [engine.add_request([1], greedy(2)) for _ in range(3)]
    with pytest.raises(OverloadedError, match="3 requests wait; the queue holds 3") as caught:
        engine.add_request([1], greedy(2))
    assert caught.value.retry_after_s > 0
    assert finish(engine).keys() == {request.id for request in requests}
    engine.add_request([1], greedy(2))


def test_the_queue_is_bounded_by_tokens() -> None:
    engine = small_engine(max_batch_size=1, max_queue_tokens=20)
    engine.add_request([1] * 5, greedy(5))
    engine.add_request([1] * 4, greedy(5))
    message = "19 tokens wait and this request asks for 2; the queue holds 20"
    with pytest.raises(OverloadedError, match=message) as caught:
        engine.add_request([1], greedy(1))
    assert caught.value.retry_after_s > 0
    assert len(finish(engine)) == 2


def test_a_request_larger_than_the_whole_queue_may_wait_alone() -> None:
    engine = small_engine(max_queue_tokens=10)
    engine.add_request([1] * 20, greedy(5))
    (output,) = finish(engine).values()
    assert output.status is Status.FINISHED


def test_the_time_to_come_back_follows_the_rate_of_ends() -> None:
    engine = small_engine(max_batch_size=1, max_queue_requests=1)
    for _ in range(4):
        engine.add_request([1], greedy(10))  # about a tenth of a second each
        finish(engine)
    engine.add_request([1], greedy(10))
    with pytest.raises(OverloadedError) as caught:
        engine.add_request([1], greedy(10))
    assert 0.02 < caught.value.retry_after_s < 0.5


def test_a_draining_engine_takes_nothing_new_and_finishes_what_it_has() -> None:
    engine = small_engine()
    request = engine.add_request([1], greedy(3))
    engine.drain()
    with pytest.raises(OverloadedError, match="draining") as caught:
        engine.add_request([1], greedy(3))
    assert caught.value.retry_after_s > 0
    assert finish(engine)[request.id].status is Status.FINISHED


def test_requests_nobody_reads_count_as_waiting() -> None:
    engine = new_engine(max_queue_requests=2)
    for _ in range(2):
        engine.pause(engine.add_request([1], greedy(4)).id)
    with pytest.raises(OverloadedError, match="2 requests wait"):
        engine.add_request([1], greedy(4))


# ---- ids and tokens


def test_tokens_may_be_numpys_integers() -> None:
    engine = new_engine()
    request = engine.add_request(np.array([3, 1, 2]), greedy(4))
    assert request.prompt == (3, 1, 2)
    assert {type(token) for token in request.prompt} == {int}


def test_a_name_made_up_is_never_one_in_use() -> None:
    engine = new_engine()
    engine.add_request([1], greedy(4), request_id="request-1")
    engine.add_request([1], greedy(4), request_id="request-2")
    assert engine.add_request([1], greedy(4)).id not in ("request-1", "request-2")
    assert len(finish(engine)) == 3


# ---- what just fits


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([0] * (CONTEXT - 1), greedy(1)),
        ([99], greedy(CONTEXT - 1)),
        ([1], greedy(1, n=4)),
        ([1], greedy(1, stop_token_ids=[99])),
        ([1], greedy(1, logit_bias={99: 1.0})),
        ([1], greedy(1, logprobs=20, prompt_logprobs=20)),
    ],
)
def test_what_just_fits_is_run(prompt: list[int], params: SamplingParams) -> None:
    engine = small_engine(max_batch_size=4)
    request = engine.add_request(prompt, params)
    assert finish(engine)[request.id].status is Status.FINISHED


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_scores_than_the_vocabulary_has_tokens(name: str) -> None:
    engine = new_engine(FakeExecutor(vocabulary_size=8))
    engine.add_request([1], greedy(1, **{name: 8}))
    with pytest.raises(RequestError, match=f"{name} is 9; the vocabulary has 8 tokens"):
        engine.add_request([1], greedy(1, **{name: 9}))


def test_without_chunking_a_prompt_may_fill_the_executors_step() -> None:
    engine = new_engine(FakeExecutor(max_step_tokens=16), chunking=False, max_batch_size=8)
    request = engine.add_request([1] * 11, greedy(5))
    assert finish(engine)[request.id].status is Status.FINISHED


def test_a_batch_is_as_large_as_both_engine_and_executor_allow() -> None:
    engine = new_engine(FakeExecutor(max_batch_size=2), max_batch_size=4)
    with pytest.raises(RequestError, match="n is 3; a batch holds 2"):
        engine.add_request([1], greedy(1, n=3))


def test_the_queue_can_be_filled_to_its_last_token() -> None:
    engine = small_engine(max_batch_size=1, max_queue_tokens=20)
    engine.add_request([1] * 5, greedy(5))
    engine.add_request([1] * 4, greedy(6))
    assert engine.snapshot().queued_tokens == 20


def test_the_time_to_retry_after_grows_with_what_must_leave_the_queue_first() -> None:
    engine = small_engine(max_batch_size=1, max_queue_tokens=40)
    for _ in range(4):
        engine.add_request([1] * 5, greedy(5))
    hints = []
    for num_tokens in (2, 10, 20, 30):
        with pytest.raises(OverloadedError) as caught:
            engine.add_request([1], greedy(num_tokens - 1))
        hints.append(caught.value.retry_after_s)
    assert hints == [1.0, 1.0, 2.0, 3.0], "a second for each of ten tokens, as nothing ended yet"


def test_the_shortest_time_to_retry_after_is_ten_milliseconds() -> None:
    executor = FakeExecutor(cost=StepCost(a=0.0, b=0.0))
    engine = new_engine(executor, max_batch_size=1, max_queue_requests=1)
    engine.add_request([1], greedy(1))
    finish(engine)
    engine.add_request([1], greedy(1))
    with pytest.raises(OverloadedError) as caught:
        engine.add_request([1], greedy(1))
    assert caught.value.retry_after_s == 0.01


def test_a_draining_engine_says_to_come_back_in_half_a_minute() -> None:
    engine = small_engine()
    engine.drain()
    with pytest.raises(OverloadedError) as caught:
        engine.add_request([1], greedy(3))
    assert caught.value.retry_after_s == 30.0


@pytest.mark.parametrize(("priority", "arrived_at", "urgency"), [(0, 3.0, 3.0), (2, 3.0, 7.0)])
def test_rank_is_arrival_moved_by_priority(
    priority: int, arrived_at: float, urgency: float
) -> None:
    engine = small_engine(aging_s=2.0)
    request = engine.add_request([1], greedy(3), priority=priority, arrived_at=arrived_at)
    assert engine._lifecycle.live[request.id].sequences[0].rank == (urgency, 1)


def test_end_tokens_stop_a_request_unless_it_says_not_to() -> None:
    engine = small_engine()
    for params, stops in (
        (SamplingParams(max_tokens=3, stop_token_ids=(5,)), {5, 7}),
        (SamplingParams(max_tokens=3, stop_token_ids=(5,), ignore_eos=True), {5}),
    ):
        request = engine.add_request([1], params)
        assert engine._lifecycle.live[request.id].sequences[0].stop_token_ids == stops


def test_idle_time_does_not_count_for_the_time_to_retry_after() -> None:
    engine = new_engine(FakeExecutor(cost=StepCost(a=0.1, b=0.0)), max_queue_requests=1)
    for _ in range(5):
        engine.add_request([1], greedy(2))
        finish(engine)
        engine.clock.sleep(100.0)
    engine.add_request([1], greedy(2))
    with pytest.raises(OverloadedError) as caught:
        engine.add_request([1], greedy(2))
    assert caught.value.retry_after_s == pytest.approx(0.2)


def test_the_time_to_retry_after_counts_what_waits_beyond_the_queues_size() -> None:
    engine = new_engine(max_batch_size=4, max_queue_requests=1)
    requests = []
    for number in range(3):
        requests.append(engine.add_request([number], greedy(50)))
        engine.step()
    for request in requests:
        engine.pause(request.id)
    with pytest.raises(OverloadedError, match="3 requests wait; the queue holds 1") as caught:
        engine.add_request([9], greedy(2))
    assert caught.value.retry_after_s == 3.0
