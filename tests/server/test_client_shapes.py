"""Requests as clients send them that are not installed for tests: editors, pages, benchmarks."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.test_tools import HERMES, Scripted, scripted_server

QUESTION = {"role": "user", "content": "How is it?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "How is it?"}]}
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CACHED = {"cache_control": {"type": "ephemeral"}}

CHATS: dict[str, dict[str, Any]] = {
    "Open WebUI": {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **CALL}]},
            RESULT,
        ],
        "metadata": {"chat_id": None, "features": {"web_search": False}},
        "tools": [TOOL],
        **STREAM,
    },
    "Continue": {
        "messages": [PARTS, {"role": "assistant", "content": " ", "tool_calls": [CALL]}, RESULT],
        "tools": [{**TOOL, "function": {**FUNCTION, "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **STREAM,
    },
    "Cline": {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "How is it?", **CACHED}]},
        ],
        "temperature": 0,
        **STREAM,
    },
    "Zed": {
        "messages": [PARTS, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        "max_completion_tokens": 50,
        "stop": [],
        "prompt_cache_key": "thread",
        "reasoning_effort": None,
        "tools": [TOOL],
        **STREAM,
    },
    "Copilot with a key of one's own": {
        "messages": [{"role": "system", "content": "Be short."}, QUESTION],
        "temperature": 0.1,
        "top_p": 1,
        "n": 1,
        "tools": [TOOL],
        **STREAM,
    },
    "LM Studio": {"messages": [QUESTION], "temperature": 0.7, "max_tokens": -1, "stream": True},
    "OpenRouter": {
        "messages": [QUESTION],
        "reasoning": {"effort": "low"},
        "usage": {"include": True},
        "stream": True,
    },
    "vLLM's benchmark": {
        "messages": [PARTS],
        "temperature": 0.0,
        "max_completion_tokens": 8,
        "ignore_eos": True,
        **STREAM,
    },
}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from scripted_server(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.mark.parametrize("client", CHATS)
def test_a_chat_is_answered(hermes: Scripted, client: str) -> None:
    hermes.says("It is sunny.")
    reply = hermes.server.post("/v1/chat/completions", {"model": "tiny-text", **CHATS[client]})
    assert reply.status == 200, reply.body
    *events, done = reply.body.decode().split("data: ")[1:]
    assert done == "[DONE]\n\n"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text and "It is sunny.".startswith(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True},  # vLLM's benchmark
        {"best_of": 1, "ignore_eos": True},  # SGLang's
    ],
)
def test_benchmarks_get_as_many_tokens_as_they_ask_for(
    hermes: Scripted, fields: dict[str, Any]
) -> None:
    hermes.says("It is sunny and warm.")
    asked = {"prompt": "a b", "temperature": 0.0, "max_tokens": 8, **STREAM, **fields}
    reply = hermes.server.post("/v1/completions", {"model": "tiny-text", **asked})
    *_, last, _ = reply.body.decode().split("data: ")
    assert json.loads(last)["usage"]["completion_tokens"] == 8
