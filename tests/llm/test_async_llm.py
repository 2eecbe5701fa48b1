"""AsyncLLM: the same answers as LLM, streamed, side by side, and taken back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llm.conftest import KV_MEMORY

from quire import (
    LLM,
    AsyncLLM,
    ConfigError,
    OverloadedError,
    Piece,
    RequestCancelledError,
    RequestError,
    SamplingParams,
)
from quire.llm.prompts import Prompt

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1)
SAMPLED = replace(GREEDY, temperature=1.2, seed=3, ignore_eos=True, max_tokens=30)
SLOW = "reference"  # an answer takes long enough to be left in the middle
QUESTION = [{"role": "user", "content": "hi"}]


def run(path: Path, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    """Do something with a model inside an event loop."""

    async def main() -> None:
        async with AsyncLLM(path, kv_memory=KV_MEMORY, **options) as llm:
            await work(llm)

    asyncio.run(main())


async def collected(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def test_streams_joined_are_what_the_blocking_model_gives(text_model: Path, text_llm: LLM) -> None:
    prompts: list[Prompt] = ["Hello", "a longer prompt than that", [5, 6, 7]]
    expected = text_llm.generate(prompts, SAMPLED)

    async def work(llm: AsyncLLM) -> None:
        streams = await asyncio.gather(
            *(collected(llm.stream(prompt, SAMPLED)) for prompt in prompts)
        )
        for pieces, output in zip(streams, expected, strict=True):
            assert [token for p in pieces for token in p.token_ids] == output.token_ids
            assert [score for p in pieces for score in p.logprobs] == output.logprobs
            assert "".join(piece.text for piece in pieces) == output.text
            assert pieces[-1].finish_reason is output.finish_reason
            assert all(piece.finish_reason is None for piece in pieces[:-1])
        outputs = await asyncio.gather(*(llm.generate(prompt, SAMPLED) for prompt in prompts))
        assert [out.logprobs for out in outputs] == [out.logprobs for out in expected]
        assert [out.prompt for out in outputs] == ["Hello", "a longer prompt than that", None]
        assert llm.stats.stats.batch_size.mean > 1

    run(text_model, work)


def test_chats_are_what_the_blocking_model_gives(text_model: Path, text_llm: LLM) -> None:
    [expected] = text_llm.chat(QUESTION, SAMPLED)

    async def work(llm: AsyncLLM) -> None:
        output = await llm.chat(QUESTION, SAMPLED)
        assert (output.text, output.prompt) == (expected.text, expected.prompt)
        pieces = await collected(llm.chat_stream(QUESTION, SAMPLED))
        assert "".join(piece.text for piece in pieces) == expected.text

    run(text_model, work)


async def wait_until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(120):
        while llm.stats.num_running or llm.stats.num_waiting:
            await asyncio.sleep(0.005)


def test_a_reader_that_leaves_ends_its_request(text_model: Path) -> None:
    long = replace(SAMPLED, max_tokens=480)

    async def work(llm: AsyncLLM) -> None:
        async for _ in llm.stream("Hello", long):
            break
        await wait_until_idle(llm)
        async for _ in llm.chat_stream(QUESTION, long):
            break
        await wait_until_idle(llm)
        assert llm.stats.stats.requests_ended == {"cancelled": 2}
        assert llm.stats.kv_usage == 0.0

    run(text_model, work, device=SLOW)


def test_cancelling_the_task_ends_its_request(text_model: Path) -> None:
    long = replace(SAMPLED, max_tokens=480)

    async def work(llm: AsyncLLM) -> None:
        for waiting in (llm.generate("Hello", long), collected(llm.stream("Hello", long))):
            task = asyncio.ensure_future(waiting)
            while not llm.stats.num_running:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_idle(llm)
        assert llm.stats.stats.requests_ended == {"cancelled": 2}

    run(text_model, work, device=SLOW)


@pytest.mark.parametrize("prompt", ["", [], [600], "x" * 99_999, None])
def test_a_request_that_cannot_run_raises(text_model: Path, prompt: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError):
            await llm.generate(prompt, GREEDY)
        with pytest.raises(RequestError):
            await collected(llm.stream(prompt, GREEDY))
        with pytest.raises(RequestError):
            await llm.chat([{"role": "user", "content": prompt}] if prompt is None else [])
        assert (await llm.generate("fine", GREEDY)).error is None

    run(text_model, work)


def test_a_full_queue_says_when_to_come_back(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        results = await asyncio.gather(
            *(llm.generate([n + 1], GREEDY) for n in range(10)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert refused
        assert all(error.retry_after_s > 0 for error in refused)
        assert len(refused) < 10

    run(text_model, work, max_batch_size=1, max_queue_requests=2)


def test_options_of_a_request_reach_the_engine(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        output = await llm.generate("hi", GREEDY, request_id="mine", key="a", priority=1)
        assert output.request_id == "mine"
        with pytest.raises(RequestError, match="timeout_s must be above 0"):
            await llm.generate("hi", GREEDY, timeout_s=0)

    run(text_model, work)


def test_a_closed_model_says_so(text_model: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(text_model, kv_memory=KV_MEMORY)
        await llm.generate("hi", GREEDY)
        await llm.close()
        await llm.close()
        for call in (llm.generate("hi"), llm.chat(QUESTION), collected(llm.stream("hi"))):
            with pytest.raises(RequestError, match="this AsyncLLM is closed"):
                await call

    asyncio.run(main())


def test_closing_ends_what_runs(text_model: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(text_model, kv_memory=KV_MEMORY, device=SLOW)
        task = asyncio.ensure_future(llm.generate("hi", replace(SAMPLED, max_tokens=480)))
        while not llm.stats.num_running:
            await asyncio.sleep(0.005)
        await llm.close()
        with pytest.raises(RequestCancelledError, match="was cancelled"):
            await task

    asyncio.run(main())


def test_it_is_made_like_the_blocking_model(text_model: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        AsyncLLM(text_model, device="cuda")
    with pytest.raises(ConfigError, match="there is no 'max_batch' here: did you mean"):
        AsyncLLM(text_model, max_batch=2)


# ---- forward passes and the batch size


def test_forward_batch_gives_what_the_blocking_model_gives(text_model: Path, text_llm: LLM) -> None:
    text_llm.clear()
    expected = [*text_llm.forward_batch([[1, 2, 3], [4]]), *text_llm.forward_batch([[5]], 3)]
    text_llm.clear()

    async def work(llm: AsyncLLM) -> None:
        found = [*await llm.forward_batch([[1, 2, 3], [4]]), *await llm.forward_batch([[5]], 3)]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        with pytest.raises(RequestError, match="65 rows were given; a batch holds 64"):
            await llm.forward_batch([[1]] * 65)
        assert len(await llm.forward_batch([[1]] * 65, split=True)) == 65
        await llm.clear()
        assert llm.stats.kv_usage == 0.0

    run(text_model, work)


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_forward_batch_runs_beside_requests_and_changes_none_of_their_tokens(
    text_model: Path, plan_ahead: bool
) -> None:
    params = replace(SAMPLED, max_tokens=60)

    async def work(llm: AsyncLLM) -> None:
        expected = (await llm.generate("Hello", params)).token_ids
        rows = [[n, n + 1] for n in range(40)]
        alone = await llm.forward_batch(rows, split=True)
        request = asyncio.ensure_future(llm.generate("Hello", params))
        while not llm.stats.num_running:
            await asyncio.sleep(0.001)
        beside = await llm.forward_batch(rows, split=True)
        assert not request.done(), "they did not overlap"
        np.testing.assert_array_equal(beside, alone)
        assert (await request).token_ids == expected

    # Steps of four tokens: more of them than an executor remembers samples of.
    run(text_model, work, device=SLOW, max_batch_size=4, max_step_tokens=4, plan_ahead=plan_ahead)


def test_rows_and_requests_leave_each_other_room_in_the_cache(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        await llm.forward_batch([[1] * 500])  # 32 of 64 blocks
        await llm.forward_batch([None, [1]])
        with pytest.raises(RequestError, match=r"rows leave 31 of 64: call clear\(\) first"):
            await llm.generate([1] * 490, replace(GREEDY, max_tokens=22))
        await llm.clear(1)
        long = asyncio.ensure_future(llm.generate([1] * 100, replace(SAMPLED, max_tokens=412)))
        while not llm.stats.num_running:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="rows of earlier calls hold 32, requests 32 of"):
            await llm.forward_batch([None, [1]])
        await llm.clear()
        assert len(await llm.forward_batch([[1]])) == 1
        long.cancel()

    run(text_model, work, device=SLOW)


def test_a_batch_size_is_set_between_requests(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = (await llm.generate("Hello", SAMPLED)).token_ids
        before = asyncio.ensure_future(llm.generate("Hello", SAMPLED))
        while not llm.stats.num_running:
            await asyncio.sleep(0.001)
        setting = asyncio.ensure_future(llm.set_batch_size(4))
        await asyncio.sleep(0)
        after = asyncio.ensure_future(llm.generate("Hello", SAMPLED))
        await setting
        assert llm.max_batch_size == 4
        assert (await before).token_ids == (await after).token_ids == expected
        assert llm.stats.stats.requests_ended == {"finished": 1}, "counters begin anew"
        many = await asyncio.gather(*(llm.generate([n], GREEDY) for n in range(8)))
        assert all(output.error is None for output in many)
        assert llm.stats.stats.batch_size.mean > 2
        with pytest.raises(ConfigError, match="max_batch_size"):
            await llm.set_batch_size(0)
        assert llm.max_batch_size == 4

    run(text_model, work, device=SLOW, max_batch_size=1)


def test_a_batch_size_that_is_no_longer_waited_for_holds_nobody_up(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        paused = await llm.submit("Hello", replace(SAMPLED, max_tokens=400))  # nobody reads it
        while not llm._engine.engine._scheduler.parked:
            await asyncio.sleep(0.001)
        setting = asyncio.ensure_future(llm.set_batch_size(4))
        await asyncio.sleep(0)
        held = asyncio.ensure_future(llm.generate("Hello", GREEDY))
        await asyncio.wait({held}, timeout=0.05)
        assert not held.done(), "it waits for the batch size"
        setting.cancel()
        async with asyncio.timeout(60):  # a guard against waiting for ever
            assert (await held).error is None
            assert (await llm.generate("Hello", GREEDY)).error is None
        assert llm.max_batch_size == 2
        paused.cancel()
        await llm.set_batch_size(4)
        assert llm.max_batch_size == 4

    run(text_model, work, device=SLOW, max_batch_size=2, max_unread_tokens=4)


def test_a_batch_size_changes_neither_weights_nor_draining(text_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        llm.set_key_weights({"a": 3.0})
        await llm.set_batch_size(4)
        await llm.generate("Hello", GREEDY)
        assert llm._engine.engine._key_weights == {"a": 3.0}
        assert llm._engine.engine._scheduler._shares._weights == {"a": 3.0, "b": 2.0}
        await llm.drain()
        await llm.set_batch_size(2)
        with pytest.raises(OverloadedError, match="draining"):
            await llm.generate("Hello", GREEDY)

    run(text_model, work, device=SLOW, max_batch_size=2, key_weights={"b": 2.0})


@pytest.mark.parametrize("weights", [{"a": "x"}, {"a": 0}, {"a": 1000}, 5])
def test_wrong_weights_are_refused_and_end_nothing(text_model: Path, weights: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(ConfigError, match="key_weights"):
            llm.set_key_weights(weights)
        outputs = await asyncio.gather(
            *(llm.generate("Hello", GREEDY, key=key) for key in ("a", "b"))
        )
        assert [output.error for output in outputs] == [None, None]

    run(text_model, work)
