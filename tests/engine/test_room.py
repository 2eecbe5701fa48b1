"""Who is let in: room that admitted prompts will still take, ids, and requests nobody reads."""

import numpy as np
import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of

from quire.core.errors import OverloadedError
from quire.core.sampling import SamplingParams
from quire.executors.fake import FakeExecutor, StepCost

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_prompts_are_admitted_only_while_there_is_room_for_all_of_them() -> None:
    executor = FakeExecutor(num_blocks=24, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=64)
    requests = [engine.add_request([i] * 160, GREEDY) for i in range(8)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, GREEDY)
    assert engine.stats.num_preemptions == 0  # two prompts of ten blocks fit, three do not


def test_tokens_may_be_numpys_integers() -> None:
    engine = new_engine()
    request = engine.add_request(np.array([3, 1, 2]), GREEDY)
    assert request.prompt == (3, 1, 2)
    assert {type(token) for token in request.prompt} == {int}


def test_a_name_made_up_is_never_one_in_use() -> None:
    engine = new_engine()
    engine.add_request([1], GREEDY, request_id="request-1")
    engine.add_request([1], GREEDY, request_id="request-2")
    assert engine.add_request([1], GREEDY).id not in ("request-1", "request-2")
    assert len(finish(engine)) == 3


def test_requests_nobody_reads_count_as_waiting() -> None:
    engine = new_engine(max_queue_requests=2)
    for _ in range(2):
        engine.pause(engine.add_request([1], GREEDY).id)
    with pytest.raises(OverloadedError, match="2 requests wait"):
        engine.add_request([1], GREEDY)


def test_a_long_prompt_goes_on_though_its_context_alone_costs_more_than_the_target() -> None:
    cost = StepCost(a=0.001, b=0.0001, c=0.0001)  # 200 positions take 20 ms: twice the target
    executor = FakeExecutor(num_blocks=256, cost=cost)
    engine = new_engine(executor, max_batch_size=4, max_step_tokens=64, slo_itl_ms=10.0)
    engine.add_request([1] * 8, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    long = engine.add_request([2] * 600, GREEDY)
    for _ in range(120):
        engine.step()
    assert long.metrics.first_token_at is not None
