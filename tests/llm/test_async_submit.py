"""AsyncLLM over a loaded model: streams in the caller's hands, pooled states, draining."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.llm.conftest import KV_MEMORY

from quire import AsyncLLM, SamplingParams
from quire.core.errors import OverloadedError, RequestCancelledError
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import Options

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def loaded(model: Path) -> Assembly:
    return assemble(model, Options(device="reference", kv_memory=KV_MEMORY))


def test_a_submitted_stream_gives_what_generate_gives(text_model: Path) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        async with AsyncLLM.of(loaded(text_model)) as llm:
            expected = await llm.generate("Hello", params)
            stream = await llm.submit((await llm.read("Hello")).tokens, params, key="a")
            text = ""
            while pieces := await stream.take():
                text += "".join(piece.text for piece in pieces)
            assert text == expected.text
            chat = await llm.read_chat([{"role": "user", "content": "Hello"}])
            assert len(chat.tokens) > len(expected.prompt_token_ids)

    asyncio.run(main())


def test_pooling_gives_a_state_and_no_tokens(text_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM.of(loaded(text_model)) as llm:
            streams = [await llm.submit("Hello", stream=False, pooling=True) for _ in range(2)]
            first, second = [await stream.output() for stream in streams]
            assert first.token_ids == []
            assert first.pooled.shape == (256,)
            assert np.array_equal(first.pooled, second.pooled)

    asyncio.run(main())


def test_draining_waits_for_what_runs_and_then_does_not(text_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM.of(loaded(text_model)) as llm:
            short = await llm.submit("Hello", SamplingParams(max_tokens=5, ignore_eos=True))
            await llm.drain(60.0)
            assert (await short.output()).error is None
            with pytest.raises(OverloadedError, match="draining"):
                await llm.submit("Hello")
        async with AsyncLLM.of(loaded(text_model)) as llm:
            long = await llm.submit("Hello", LONG)
            await llm.drain(0.05)
            assert isinstance((await long.output()).error, RequestCancelledError)

    asyncio.run(main())
