"""The engine over the reference executor: a request's tokens do not depend on its batch."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.fixture_files import fixture_file

from quire.core.config import EngineConfig
from quire.core.request import Ended, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, load_model

BASE = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
SAMPLED = replace(BASE, temperature=1.5, seed=11, top_p=0.9)
PENALISED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, seed=12)
FORKED = replace(SAMPLED, n=3, seed=13)
SCORED = replace(BASE, prompt_logprobs=0)
SHARED = tuple(range(40, 60))  # a prefix that several prompts begin with
REQUESTS = [
    ((*SHARED, tail), params)
    for tail, params in enumerate((BASE, SAMPLED, PENALISED, FORKED, SCORED, BASE))
] + [((5, 6, 7), SAMPLED), ((9,) * 30, PENALISED)]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(fixture_file("tiny/Q4_K_M.gguf")) as found:
        yield found


def outputs(
    model: Model,
    requests: list[tuple[tuple[int, ...], SamplingParams]],
    config: EngineConfig,
    num_blocks: int,
) -> list[RequestOutput]:
    executor = ReferenceExecutor(model, num_blocks=num_blocks, block_size=4)
    engine = Engine(executor, config)
    ids = [engine.add_request(prompt, params).id for prompt, params in requests]
    ended = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Ended):
                ended[event.request_id] = event.output
        engine.check_integrity()
    engine.close()
    return [ended[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def solo(model: Model) -> list[RequestOutput]:
    """Every request alone: whole prompt at once, nothing reused, blocks in plenty."""
    config = EngineConfig(chunking=False, prefix_reuse=False, plan_ahead=False)
    return [outputs(model, [request], config, num_blocks=96)[0] for request in REQUESTS]


def content(output: RequestOutput) -> object:
    assert output.error is None
    completions = [(c.token_ids, c.logprobs, c.finish_reason) for c in output.completions]
    return completions, output.prompt_logprobs


@pytest.mark.parametrize(
    ("plan_ahead", "max_step_tokens", "num_blocks"),
    [*itertools.product((True, False), (512, 9), (96,)), (True, 9, 30), (False, 64, 30)],
)
def test_batched_chunked_reused_and_preempted_runs_equal_solo_runs(
    model: Model,
    solo: list[RequestOutput],
    plan_ahead: bool,
    max_step_tokens: int,
    num_blocks: int,
) -> None:
    config = EngineConfig(max_batch_size=9, max_step_tokens=max_step_tokens, plan_ahead=plan_ahead)
    together = outputs(model, REQUESTS, config, num_blocks)
    assert [content(output) for output in together] == [content(output) for output in solo]
    if max_step_tokens == 9:
        assert any(output.metrics.num_chunks > 1 for output in together)
        assert any(output.metrics.num_cached_tokens > 0 for output in together)
    if num_blocks == 30:
        assert any(output.metrics.num_preemptions > 0 for output in together)
