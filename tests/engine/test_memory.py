"""Blocks: pre-emption when they run out, prefixes used again, prompts shared by n completions."""

from dataclasses import replace

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, rows_of, run_until

from quire.core.errors import RequestError
from quire.core.request import FinishReason, Status, WaitReason
from quire.core.sampling import SamplingParams
from quire.core.windows import Window, Windows, peak_blocks
from quire.engine import Engine
from quire.executors.fake import FakeExecutor

SHARED = list(range(100, 140))


def test_with_a_pool_for_two_eight_requests_get_their_tokens() -> None:
    # Each grows to 32 tokens: eight blocks of four, of which there are sixteen.
    executor = FakeExecutor(num_blocks=16, block_size=4)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=64)
    requests = [engine.add_request([i] * 8, greedy(24)) for i in range(8)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
    assert engine.stats.num_preemptions > 0
    counted = sum(output.metrics.num_preemptions for output in outputs.values())
    assert counted == engine.stats.num_preemptions
    assert engine.snapshot().kv_usage == 0.0


def test_the_youngest_of_the_lowest_priority_gives_its_blocks_up() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=4)
    engine = new_engine(executor, max_batch_size=3)
    first = engine.add_request([1] * 4, greedy(24))
    urgent = engine.add_request([2] * 4, greedy(24), priority=-1)
    last = engine.add_request([3] * 4, greedy(24))
    run_until(engine, lambda: engine.stats.num_preemptions > 0)
    assert last.status is Status.PREEMPTED
    assert first.status is urgent.status is Status.RUNNING
    assert engine.snapshot().waiting_by_reason == {WaitReason.PREEMPTED: 1}
    outputs = finish(engine)
    assert outputs[last.id].metrics.waited_for[WaitReason.PREEMPTED] > 0
    for request in (first, urgent, last):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


# ---- prefixes


def test_a_known_prefix_is_not_computed_again() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor)
    engine.add_request([*SHARED, 1], greedy(2))
    finish(engine)
    executor.plans.clear()
    request = engine.add_request([*SHARED, 2], greedy(2))
    output = finish(engine)[request.id]
    assert output.metrics.num_cached_tokens == 32  # two blocks of sixteen
    assert executor.plans[0].sequences[0].start == 32
    assert tokens_of(output) == solo(request.prompt, request.params)
    assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (82, 32)


def test_a_prefix_that_is_known_in_full_still_computes_its_last_token() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor)
    prompt = SHARED[:32]
    for _ in range(2):
        executor.plans.clear()
        request = engine.add_request(prompt, greedy(3))
        output = finish(engine)[request.id]
        assert tokens_of(output) == solo(prompt, greedy(3))
    assert output.metrics.num_cached_tokens == 31
    row = executor.plans[0].sequences[0]
    assert (row.start, row.num_new_tokens) == (31, 1)
    assert len(executor.plans[0].copies) == 1, "the known block is copied, not written into"


def test_completions_are_known_prefixes_too() -> None:
    engine = new_engine()
    first = engine.add_request(SHARED, greedy(30))
    tokens = finish(engine)[first.id].token_ids
    chat = engine.add_request([*SHARED, *tokens, 5], greedy(3))
    output = finish(engine)[chat.id]
    assert output.metrics.num_cached_tokens == 64
    assert tokens_of(output) == solo(chat.prompt, chat.params)


def test_nothing_is_found_across_keys() -> None:
    engine = new_engine()
    engine.add_request(SHARED, greedy(2), key="alice")
    finish(engine)
    for key, cached in (("bob", 0), ("", 0), ("alice", 32)):
        request = engine.add_request([*SHARED, 1], greedy(2), key=key)
        assert finish(engine)[request.id].metrics.num_cached_tokens == cached


def test_a_request_for_prompt_scores_skips_the_prefix_cache() -> None:
    engine = new_engine()
    engine.add_request(SHARED, greedy(1))
    finish(engine)
    request = engine.add_request(SHARED, greedy(1, prompt_logprobs=0))
    output = finish(engine)[request.id]
    assert output.metrics.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(SHARED) - 1


def test_blocks_of_a_faulted_request_are_not_found() -> None:
    executor = FakeExecutor()
    executor.faults.nan = lambda row: row.sequence_id == 1 and row.completion_position == 3
    engine = new_engine(executor)
    engine.add_request(SHARED, greedy(10))
    assert next(iter(finish(engine).values())).status is Status.FAILED
    assert engine.snapshot().num_cached_blocks == 0
    request = engine.add_request(SHARED, greedy(2))
    output = finish(engine)[request.id]
    assert output.metrics.num_cached_tokens == 0
    assert tokens_of(output) == solo(SHARED, greedy(2))


# ---- n completions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_completions_of_one_request_share_the_blocks_of_its_prompt(temperature: float) -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor)
    params = SamplingParams(n=4, max_tokens=6, temperature=temperature, seed=3, ignore_eos=True)
    request = engine.add_request(SHARED, params)  # two blocks and a half
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo(SHARED, params)
    assert len({tuple(tokens) for tokens in tokens_of(output)}) == (1 if temperature == 0 else 4)
    last = next(plan.sequences for plan in executor.plans if len(plan.sequences) == 4)
    assert len({row.block_table[:2] for row in last}) == 1, "full prompt blocks are shared"
    assert len({row.block_table[2] for row in last}) == 4, "half-full ones are copied"
    assert sum(len(plan.copies) for plan in executor.plans) in (3, 4)
    computed = sum(row.num_new_tokens for plan in executor.plans for row in plan.sequences)
    assert computed == 40 + 3 + 4 * 5, "the prompt once; its last token again for each sibling"


def test_the_places_of_all_completions_are_kept_from_the_start() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor, max_batch_size=4, plan_ahead=False)
    engine.add_request([1], greedy(5, n=3))
    engine.add_request([2], greedy(5, n=2))
    finish(engine)
    assert max(len(plan.sequences) for plan in executor.plans) <= 4
    assert rows_of(executor, 2) != []
    first_steps = [{row.sequence_id for row in plan.sequences} for plan in executor.plans[:3]]
    assert all(2 not in step for step in first_steps), "there is no room for two more yet"


def test_one_completion_ends_while_the_others_go_on() -> None:
    params = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=0, ignore_eos=True)
    tokens = solo([1, 2], params)
    stop = tokens[1][7]
    assert stop not in (*tokens[0], *tokens[1][:7], *tokens[2])
    engine = new_engine()
    request = engine.add_request([1, 2], replace(params, stop_token_ids=(stop,)))
    output = finish(engine)[request.id]
    assert tokens_of(output) == [tokens[0], tokens[1][:7], tokens[2]]
    reasons = [completion.finish_reason for completion in output.completions]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]


def test_a_block_is_cached_when_its_last_position_is_computed() -> None:
    engine = new_engine(max_step_tokens=15, max_batch_size=4, plan_ahead=False)
    engine.add_request(SHARED, greedy(1))
    cached = []
    for _ in range(3):
        engine.step()
        cached.append(engine.snapshot().num_cached_blocks)
    assert cached == [0, 1, 2], "after 15, 30 and 40 tokens"


@pytest.mark.parametrize("plan_ahead", [True, False])
@pytest.mark.parametrize(("max_tokens", "num_cached"), [(8, 0), (9, 1)])
def test_the_last_token_of_a_completion_is_not_computed(
    plan_ahead: bool, max_tokens: int, num_cached: int
) -> None:
    engine = new_engine(plan_ahead=plan_ahead)
    engine.add_request(SHARED[:8], greedy(max_tokens))
    finish(engine)
    assert engine.snapshot().num_cached_blocks == num_cached


# ---- windows

WINDOWS: Windows = (None, Window(6), Window(6))


def windowed(num_blocks: int, windows: Windows = WINDOWS, **settings: object) -> Engine:
    executor = FakeExecutor(num_blocks=num_blocks, block_size=2, windows=windows)
    return new_engine(executor, **settings)


@pytest.mark.parametrize("plan_ahead", [True, False])
def test_a_long_request_runs_where_only_its_windows_fit(plan_ahead: bool) -> None:
    """One block less, and it is refused: what it holds at most is known beforehand."""
    prompt, params = tuple(range(60)), greedy(20)
    needed = peak_blocks(WINDOWS, 2, 80, 1 + plan_ahead)
    assert needed < 2 * 80 // 2, "all of one group and a half would not fit"
    engine = windowed(needed, plan_ahead=plan_ahead, max_step_tokens=64)
    request = engine.add_request(prompt, params)
    output = finish(engine)[request.id]
    assert tokens_of(output) == solo(prompt, params, windows=WINDOWS)
    assert request.metrics.num_preemptions == 0
    small = windowed(needed - 1, plan_ahead=plan_ahead, max_step_tokens=64)
    with pytest.raises(RequestError, match=f"80 tokens need {needed} blocks"):
        small.add_request(prompt, params)


def test_a_lone_decode_waits_for_the_step_that_frees_its_block() -> None:
    """All blocks are taken by a chunk in flight; pre-empted for the next, it would begin anew."""
    windows: Windows = (Window(6),)
    engine = windowed(5, windows, plan_ahead=True, prefix_reuse=False, max_step_tokens=64)
    request = engine.add_request(tuple(range(10)), greedy(6))
    for _ in range(40):
        engine.step()
    assert not engine.has_work
    assert request.metrics.num_preemptions == 0


def test_requests_that_fit_by_their_windows_run_together() -> None:
    prompt, params = tuple(range(60)), greedy(10)
    each = peak_blocks(WINDOWS, 2, 70, 8)
    engine = windowed(2 * each, plan_ahead=False, max_step_tokens=8, max_batch_size=2)
    for shift in (0, 1):
        engine.add_request([token + shift for token in prompt], params)
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, engine.snapshot().num_running)
    assert most == 2
    assert engine.stats.num_preemptions == 0


def test_a_prefix_is_reused_with_what_its_windows_keep() -> None:
    prompt, params = tuple(range(61)), greedy(4)
    engine = windowed(400, plan_ahead=False, max_step_tokens=16, max_batch_size=4)
    engine.add_request(prompt, params)
    finish(engine)
    again = engine.add_request((*prompt, 5), params)
    output = finish(engine)[again.id]
    assert again.metrics.num_cached_tokens == 60
    assert tokens_of(output) == solo((*prompt, 5), params, windows=WINDOWS)
