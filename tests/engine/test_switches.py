"""Each switch, off: what it would have done does not happen, and the tokens are the same."""

from collections.abc import Callable
from functools import partial

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, play, rows_of

from quire.core.plan import StepPlan
from quire.executors.fake import FakeExecutor, StepCost

SHARED = list(range(100, 140))


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_prefix_reuse(prefix_reuse: bool) -> None:
    engine = new_engine(prefix_reuse=prefix_reuse)
    cached = []
    for _ in range(3):
        request = engine.add_request(SHARED, greedy(3))
        output = finish(engine)[request.id]
        assert tokens_of(output) == solo(SHARED, greedy(3))
        cached.append(output.metrics.num_cached_tokens)
    assert cached == ([0, 32, 32] if prefix_reuse else [0, 0, 0])
    assert (engine.stats.prefix_hits > 0) is prefix_reuse
    assert (engine.snapshot().num_cached_blocks > 0) is prefix_reuse


def num_tokens(plan: StepPlan) -> int:
    return sum(row.num_new_tokens for row in plan.sequences)


@pytest.mark.parametrize("chunking", [True, False])
def test_chunking(chunking: bool) -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor, chunking=chunking, max_batch_size=8, max_step_tokens=16)
    prompts = [[i] * length for i, length in enumerate((10, 40, 3, 12, 8))]
    requests = [engine.add_request(prompt, greedy(4)) for prompt in prompts]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
    chunks = [outputs[request.id].metrics.num_chunks for request in requests]
    large = [plan for plan in executor.plans if num_tokens(plan) > 16]
    if chunking:
        assert max(chunks) > 1
        assert large == []
    else:
        assert chunks == [1] * 5
        assert [rows_of(executor, i + 1)[0].num_new_tokens for i in range(5)] == [10, 40, 3, 12, 8]
        # A prompt longer than the budget has a step to itself; no other step exceeds the budget.
        large = [
            plan for plan in executor.plans if sum(r.num_new_tokens for r in plan.sequences) > 16
        ]
        assert [len(plan.sequences) for plan in large] == [1]


@pytest.mark.parametrize("plan_ahead", [True, False])
def test_planning_ahead(plan_ahead: bool) -> None:
    executor = FakeExecutor(keep_plans=True, vocabulary_size=20)
    engine = new_engine(executor, plan_ahead=plan_ahead)
    prompts = [[i] for i in range(10)]
    params = greedy(30, ignore_eos=False)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = finish(engine)
    for request in requests:
        expected = solo(request.prompt, params, vocabulary_size=20)
        assert tokens_of(outputs[request.id]) == expected
    ahead = [row for plan in executor.plans for row in plan.sequences if row.follows is not None]
    assert bool(ahead) is plan_ahead
    assert (engine.stats.discarded_rows > 0) is plan_ahead, "rows planned past the end token"


def longest_step(**targets: object) -> float:
    """Of a running request's steps, while long prompts come in beside it."""
    executor = FakeExecutor(cost=StepCost(a=0.005, b=0.0001), num_blocks=1024, keep_plans=True)
    engine = new_engine(executor, **targets)
    script: list[tuple[float, Callable[[], object]]] = [
        (0.1 * i, partial(engine.add_request, [i] * 600, greedy(5))) for i in range(1, 12)
    ]
    play(engine, [(0.0, lambda: engine.add_request([999], greedy(400))), *script])
    own = [p for p in executor.plans if any(row.sequence_id == 1 for row in p.sequences)]
    return max(executor.cost.seconds(plan) for plan in own[20:])  # the first ones teach it


def test_pacing() -> None:
    assert longest_step() > 0.050, "as many tokens as a step holds"
    assert longest_step(slo_itl_ms=15.0) < 1.1 * 0.015
    assert longest_step(slo_ttft_ms=30.0) < 1.1 * 0.015, "two steps to a first token"
