"""Models that keep states: where chunks end, how many sequences run, what forks and prefixes start
from. Random runs with states are in test_random.py."""

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, RequestError
from quire.core.plan import NO_STATE, Capacity
from quire.core.sampling import SamplingParams
from quire.executors.fake import FakeExecutor

PROMPT = list(range(100, 140))  # two blocks of sixteen, and half of one


def executor_with(num_states: int = 64, **options: object) -> FakeExecutor:
    return FakeExecutor(num_states=num_states, keep_plans=True, **options)  # type: ignore[arg-type]


def solo_tokens(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    return solo(prompt, params, keeps_states=True)


def chunks(executor: FakeExecutor) -> list[tuple[int, int]]:
    """Start and end of every row."""
    return [(row.start, row.end) for plan in executor.plans for row in plan.sequences]


# ---- where chunks end


def test_without_prefix_reuse_a_prompt_is_one_chunk() -> None:
    executor = executor_with()
    engine = new_engine(executor, prefix_reuse=False)
    engine.add_request(PROMPT, greedy(2))
    finish(engine)
    assert chunks(executor) == [(0, 40), (40, 41)]


def test_chunks_end_after_full_blocks_the_last_before_the_last_token() -> None:
    executor = executor_with()
    engine = new_engine(executor, max_step_tokens=20, max_batch_size=4)
    engine.add_request(PROMPT, greedy(1))
    engine.add_request([7] * 32, greedy(1), key="other")
    finish(engine)
    own = [row for plan in executor.plans for row in plan.sequences if row.sequence_id == 1]
    assert [row.end for row in own][:2] == [16, 32]
    assert own[-1].end == 40
    other = [row for plan in executor.plans for row in plan.sequences if row.sequence_id == 2]
    assert 16 in [row.end for row in other]


def test_a_prompt_of_full_blocks_leaves_a_state_before_its_last_token() -> None:
    executor = executor_with()
    engine = new_engine(executor)
    engine.add_request(PROMPT[:32], greedy(1))
    finish(engine)
    assert chunks(executor) == [(0, 16), (16, 32)]


def test_a_step_with_less_room_than_a_block_makes_progress() -> None:
    executor = executor_with()
    engine = new_engine(executor, max_step_tokens=6, max_batch_size=2)
    request = engine.add_request(PROMPT, greedy(2))
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo_tokens(PROMPT, request.params)
    assert chunks(executor)[:4] == [(0, 6), (6, 12), (12, 16), (16, 22)]


def test_without_chunking_only_siblings_split_a_prompt() -> None:
    executor = executor_with()
    engine = new_engine(executor, chunking=False)
    engine.add_request(PROMPT, greedy(1))
    engine.add_request(PROMPT[:20], greedy(1, n=2), key="other")
    finish(engine)
    assert chunks(executor) == [(0, 40), (0, 19), (19, 20), (19, 20)]


# ---- forks


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 40])
@pytest.mark.parametrize("prefix_reuse", [False, True])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_siblings_start_from_the_state_before_the_last_prompt_token(
    length: int, prefix_reuse: bool, plan_ahead: bool
) -> None:
    executor = executor_with()
    engine = new_engine(executor, prefix_reuse=prefix_reuse, plan_ahead=plan_ahead)
    params = greedy(5, n=3, temperature=1.0, seed=3)
    request = engine.add_request(PROMPT[:length], params)
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo_tokens(PROMPT[:length], params)
    rows = [row for plan in executor.plans for row in plan.sequences]
    last = [row.states for row in rows if row.end == length]
    assert len(last) == 3
    assert len({source for source, _ in last}) == 1, "they share it"
    assert len({target for _, target in last}) == 3
    assert engine.cache.state_pool.num_used == 0


# ---- prefixes


def test_a_prefix_goes_on_from_its_state() -> None:
    executor = executor_with()
    engine = new_engine(executor)
    engine.add_request(PROMPT, greedy(1))
    finish(engine)
    executor.plans.clear()
    request = engine.add_request([*PROMPT[:35], 7], greedy(3))
    output = finish(engine)[request.id]
    assert output.metrics.num_cached_tokens == 32
    assert executor.plans[0].sequences[0].states[0] != NO_STATE
    assert tokens_of(output) == solo_tokens([*PROMPT[:35], 7], request.params)


def test_a_conversation_goes_on_from_a_state_of_its_last_answer() -> None:
    engine = new_engine(executor_with())
    first = engine.add_request(PROMPT, greedy(12))
    (answer,) = tokens_of(finish(engine)[first.id])
    prompt = [*PROMPT, *answer, 7, 8, 9]
    request = engine.add_request(prompt, greedy(3))
    output = finish(engine)[request.id]
    assert output.metrics.num_cached_tokens == 48
    assert tokens_of(output) == solo_tokens(prompt, request.params)


def test_a_long_completion_leaves_the_states_of_prompts() -> None:
    engine = new_engine(executor_with(8), max_batch_size=2)
    engine.add_request(PROMPT, greedy(1))
    finish(engine)
    long = engine.add_request([7, 8], greedy(300))
    (answer,) = tokens_of(finish(engine)[long.id])
    request = engine.add_request(PROMPT, greedy(1))
    assert finish(engine)[request.id].metrics.num_cached_tokens == 32
    request = engine.add_request([7, 8, *answer, 9], greedy(1))
    assert finish(engine)[request.id].metrics.num_cached_tokens == 288


# ---- how many run


def test_a_batch_holds_as_many_sequences_as_have_states() -> None:
    config = EngineConfig(plan_ahead=True)
    capacity = Capacity(256, 16, 4096, 1000, max_batch_size=8, max_step_tokens=512)
    assert config.batch_size(capacity) == 8
    assert config.batch_size(capacity._replace(num_states=32)) == 8
    assert config.batch_size(capacity._replace(num_states=31)) == 7
    assert EngineConfig(plan_ahead=False).batch_size(capacity._replace(num_states=17)) == 5


def test_states_for_less_than_a_sequence_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 slots for states, and a sequence needs 4"):
        new_engine(executor_with(3), plan_ahead=True)
    new_engine(executor_with(3), plan_ahead=False)


def test_more_completions_than_have_states_are_refused() -> None:
    engine = new_engine(executor_with(12), plan_ahead=False)
    with pytest.raises(RequestError, match="n is 5; a batch holds 4 sequences"):
        engine.add_request(PROMPT, greedy(2, n=5))


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_no_running_sequence_waits_for_a_state(plan_ahead: bool, prefix_reuse: bool) -> None:
    num_states = 3 * (3 + plan_ahead)
    settings = {"plan_ahead": plan_ahead, "prefix_reuse": prefix_reuse, "max_step_tokens": 32}
    engine = new_engine(executor_with(num_states), max_batch_size=8, **settings)
    requests = [
        engine.add_request(PROMPT[: 9 + index], greedy(6, n=1 + index % 3, temperature=1.0, seed=1))
        for index in range(12)
    ]
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, engine.cache.state_pool.num_used)
    assert engine.stats.num_preemptions == 0
    assert most <= 3 * (2 + plan_ahead), "the others are for prefixes"
    assert engine.stats.completion_tokens == sum(6 * r.params.n for r in requests)
    assert engine.cache.state_pool.num_used == 0
