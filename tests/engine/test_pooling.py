"""Requests for a hidden state instead of tokens, among others that want tokens."""

import numpy as np
import pytest
from tests.fixture_files import fixture_file

from quire.core.config import EngineConfig
from quire.core.errors import RowFaultError
from quire.core.request import Ended, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.executors.fake import FakeExecutor
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import load_model

PROMPTS = ([5, 6, 7], [9] * 20, [3], [*range(40, 60)], [*range(40, 60)])
ONE_TOKEN = SamplingParams(max_tokens=1)
SOME_TOKENS = SamplingParams(max_tokens=8, temperature=0.0)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    ended = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Ended):
                ended[event.request_id] = event.output
        engine.check_integrity()
    return ended


def pooled(config: EngineConfig, num_blocks: int, *, together: bool) -> list[RequestOutput]:
    with load_model(fixture_file("tiny/Q4_K_M.gguf")) as model:
        executor = ReferenceExecutor(model, num_blocks=num_blocks, block_size=4)
    engine = Engine(executor, config)
    outputs: list[RequestOutput] = []
    if together:
        for prompt in PROMPTS:
            engine.add_request(prompt, SOME_TOKENS)
        ids = [engine.add_request(prompt, ONE_TOKEN, pooling=True).id for prompt in PROMPTS]
        ended = finish(engine)
        outputs = [ended[name] for name in ids]
    else:
        for prompt in PROMPTS:
            engine.add_request(prompt, ONE_TOKEN, pooling=True)
            outputs += finish(engine).values()
    engine.close()
    return outputs


def test_a_state_does_not_depend_on_its_company() -> None:
    alone = pooled(EngineConfig(chunking=False, plan_ahead=False), 64, together=False)
    config = EngineConfig(max_batch_size=3, max_step_tokens=5)
    for output, expected in zip(pooled(config, 14, together=True), alone, strict=True):
        assert output.error is None
        assert output.finish_reason == "stop"
        assert output.token_ids == []
        assert output.pooled.tobytes() == expected.pooled.tobytes()
    assert np.isfinite(alone[0].pooled).all()
    assert not np.array_equal(alone[0].pooled, alone[1].pooled)


def test_an_executor_that_gives_none_fails_the_request_alone() -> None:
    engine = Engine(FakeExecutor())
    first = engine.add_request([1, 2, 3], ONE_TOKEN, pooling=True)
    second = engine.add_request([1, 2, 3], SOME_TOKENS)
    ended = finish(engine)
    with pytest.raises(RowFaultError, match="POOLED"):
        raise ended[first.id].error or AssertionError
    assert ended[second.id].error is None
