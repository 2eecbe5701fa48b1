"""The default model, from a chat message to its text, against a float32 forward of the same file.

Takes seconds a chat, so some chats stand for all; `make test-long` runs every one.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fixture_files import FIXTURES

from quire import LLM, RequestOutput, SamplingParams

CHATS: list[dict[str, Any]] = json.loads((FIXTURES / "smollm2" / "golden.json").read_text())[
    "chats"
]
NUM_TOKENS = len(CHATS[0]["greedy_f32"])
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=8, include_stop_token=True)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, device="reference", kv_memory="256MiB") as llm:
        yield llm


def check(llm: LLM, chats: list[dict[str, Any]]) -> Sequence[RequestOutput]:
    outputs = llm.chat([[{"role": "user", "content": chat["user"]}] for chat in chats], GREEDY)
    assert llm.tokenizer is not None
    for chat, output in zip(chats, outputs, strict=True):
        assert output.error is None
        assert output.prompt == chat["prompt"]
        assert list(output.prompt_token_ids) == chat["prompt_tokens"]
        expected = chat["greedy_f32"]
        assert output.token_ids == expected
        assert output.text == llm.tokenizer.decode(expected, continuation=True)
        assert output.logprobs is not None
        top = output.logprobs[0].top
        assert [token for token, _ in top] == [token for token, _ in chat["first_top8"]]
        assert [score for _, score in top] == pytest.approx(
            [score for _, score in chat["first_top8"]], abs=1e-3
        )
    return outputs


def test_some_chats_follow_the_float32_path(smollm2: LLM) -> None:
    check(smollm2, CHATS[:4])


@pytest.mark.long
def test_every_chat_follows_the_float32_path_together_and_alone(smollm2: LLM) -> None:
    together = check(smollm2, CHATS)
    for chat, batched in zip(CHATS, together, strict=True):
        [alone] = check(smollm2, [chat])
        assert alone.logprobs == batched.logprobs
