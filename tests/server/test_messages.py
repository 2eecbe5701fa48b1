"""Anthropic's Messages API: what a body means as a chat, and answers in its shapes."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.server.answers import ANSWER, EVENTS, data_of, ended, generation, service, stream_of
from tests.server.servers import NAME, RunningServer, ScriptedExecutor, fake_server

from quire.chat import Answer
from quire.llm.chats import ReasoningSettings
from quire.server.dialects.anthropic_answer import ANTHROPIC_ERRORS, MESSAGES, MessageFrames
from quire.server.dialects.anthropic_body import KeptOfMessage, MessagesRequest, to_chat_fields
from quire.server.errors import ApiError

USER = {"role": "user", "content": "Hello there"}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
SHOWN = KeptOfMessage(shows_thinking=True, omits_thoughts=False)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 8, "messages": [USER], **fields}


def chat_of(**fields: Any) -> dict[str, Any]:
    return to_chat_fields(MessagesRequest.model_validate(body_of(**fields)))


def send(server: RunningServer, **fields: Any) -> Any:
    return server.post("/v1/messages", body_of(temperature=0, **fields))


# ---- bodies


def test_blocks_become_messages_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain", "is_error": True},
                {"type": "text", "text": "Well?"},
                {"type": "text", "text": "Tell."},
            ],
        },
    ]
    assert chat_of(system=[{"type": "text", "text": "Be short."}], messages=messages)[
        "messages"
    ] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: rain"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Well?"}, {"type": "text", "text": "Tell."}],
        },
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
            None,
        ),
    ],
)
def test_tools_and_the_choice_of_them(choice: Any, expected: Any, parallel: bool | None) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice)
    function = {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object"},
    }
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == expected
    assert chat.get("parallel_tool_calls") == parallel


def test_a_form_of_the_answer_has_two_names() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    named = chat_of(output_config={"format": form})
    assert named["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert chat_of(output_format=form)["response_format"] == named["response_format"]
    with pytest.raises(ApiError, match="both ask for a form"):
        chat_of(output_config={"format": form}, output_format=form)


@pytest.mark.parametrize(
    ("settings", "asked", "effort", "budget"),
    [
        (ReasoningSettings(), "low", "low", 2000),
        (ReasoningSettings(), "max", "max", 2000),
        (ReasoningSettings(has_effort=False), "high", None, 2000),
        (ReasoningSettings(has_effort=False), "low", "low", 2000),  # the template refuses it
        (ReasoningSettings(has_effort=False, has_reasoning=False), "low", None, None),
    ],
)
def test_effort_and_budget_go_as_far_as_the_model_thinks(
    settings: ReasoningSettings, asked: str, effort: str | None, budget: int | None
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    body = body_of(thinking=thinking, output_config={"effort": asked})
    chat = to_chat_fields(MessagesRequest.model_validate(body), settings)
    assert (chat.get("reasoning_effort"), chat.get("thinking_token_budget")) == (effort, budget)


def test_a_model_that_does_not_think_takes_what_limits_its_thoughts(tiny: RunningServer) -> None:
    """Claude Code asks every model for thoughts, of high effort."""
    plain = send(tiny).json["content"]
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31_999}):
        reply = send(tiny, thinking=thinking, output_config={"effort": "high"})
        assert reply.json["content"] == plain
    assert send(tiny, output_config={"effort": "high"}).json["content"] == plain
    refused = send(tiny, output_config={"effort": "low"})
    assert "output_config.effort needs thinking" in refused.error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'messages[0] has the role "tool"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            'messages[0].content[0] has the type "image"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "is not supported here; there is text or tool_result",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be text or"),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "w", "max_uses": 3}]},
            'tools[1] has the type "web_search_20250305"',
        ),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"thinking": {"type": "enabled"}}, "needs budget_tokens"),
        ({"container": "c"}, "container is not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            'context_management.edits[0] has the type "clear_tool_uses_20250919"',
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management.edits[0].keep is missing",
        ),
        (
            {
                "context_management": {
                    "edits": [
                        {
                            "type": "clear_thinking_20251015",
                            "keep": {"type": "thinking_turns", "value": 1},
                        }
                    ]
                }
            },
            "context_management.edits[0].keep has the type",
        ),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"max_token": 8}, "did you mean max_tokens?"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_shape(
    fake: RunningServer, fields: dict[str, Any], words: str
) -> None:
    reply = fake.post("/v1/messages", body_of(**fields))
    assert reply.status == 400
    error = reply.json
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


# ---- answers


def test_the_model_answers_as_in_a_chat(tiny: RunningServer) -> None:
    chat = tiny.chat(messages=[USER], max_tokens=8, temperature=0.0).json
    reply = send(tiny).json
    assert reply["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert reply["role"] == "assistant"
    assert reply["model"] == NAME
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
    usage = reply["usage"]
    assert usage["output_tokens"] == 8
    assert usage["cache_read_input_tokens"] > 0
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == (chat["usage"]["prompt_tokens"])
    )
    counted = tiny.post("/v1/messages/count_tokens", {"model": NAME, "messages": [USER]}).json
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_an_answer_may_ask_for_more_tokens_than_the_context_has(text_model: Path) -> None:
    """Claude Code asks for 32,000, whatever the model."""
    talking = ScriptedExecutor([65] * 1000, max_context=256)
    with fake_server(text_model, talking) as server:
        num_prompt = server.post("/v1/messages/count_tokens", {"messages": [USER]}).json[
            "input_tokens"
        ]
        reply = send(server, max_tokens=32_000).json
        assert reply["stop_reason"] == "model_context_window_exceeded"
        assert reply["usage"]["output_tokens"] == 256 - num_prompt
        events = data_of(send(server, max_tokens=32_000, stream=True).body)
        assert events[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
        assert send(server, max_tokens=256 - num_prompt).json["stop_reason"] == "max_tokens"
        long = [{"role": "user", "content": "a b c " * 256}]
        refused = send(server, messages=long, max_tokens=32_000)
        assert refused.status == 400
        assert refused.error["message"].startswith("prompt is too long: ")


def test_an_answer_that_the_client_began_is_continued(tiny: RunningServer) -> None:
    begun = {"role": "assistant", "content": "The sea"}
    asked = tiny.chat(
        messages=[USER, begun],
        max_tokens=8,
        temperature=0.0,
        continue_final_message=True,
        add_generation_prompt=False,
    ).json
    reply = send(tiny, messages=[USER, begun]).json
    [block] = reply["content"]
    assert block["text"] == asked["choices"][0]["message"]["content"]
    assert block["text"] != send(tiny).json["content"][0]["text"]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_an_edit_that_removes_nothing_is_taken_and_answered(
    tiny: RunningServer, keep: object
) -> None:
    """Claude Code sends it with every request."""
    managed = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    plain = send(tiny).json
    reply = send(tiny, context_management=managed).json
    assert reply["content"] == plain["content"]
    assert reply["context_management"] == {"applied_edits": []}
    assert "context_management" not in plain
    events = data_of(send(tiny, context_management=managed, stream=True).body)
    assert events[-2]["context_management"] == {"applied_edits": []}


def test_a_stop_sequence_is_named(tiny: RunningServer) -> None:
    text = send(tiny).json["content"][0]["text"]
    reply = send(tiny, stop_sequences=[text[3:5]]).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert reply["content"][0]["text"] == text[: text.index(text[3:5])]


def test_a_stream_adds_up_to_the_answer(tiny: RunningServer) -> None:
    whole = send(tiny).json
    events = data_of(send(tiny, stream=True).body)
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert events[0]["message"]["content"] == []
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    assert [event["type"] for event in events[-3:]] == [
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


def test_thoughts_text_and_calls_are_blocks_in_a_stream_and_whole() -> None:
    given = generation(SHOWN)
    whole = json.loads(MESSAGES.reply(service(), given, *ended(ANSWER, "tool_calls")))
    blocks: list[dict[str, Any]] = []
    events = stream_of(MessageFrames(service(), given), EVENTS, ANSWER)
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        if event["type"] == "content_block_delta":
            fields = {name: text for name, text in event["delta"].items() if name != "type"}
            for name, text in fields.items():
                blocks[-1][name] = blocks[-1].get(name, "") + text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    assert blocks == whole["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] == 1
    assert whole["usage"]["cache_read_input_tokens"] == 2


@pytest.mark.parametrize(
    ("kept", "thinking"),
    [(KeptOfMessage(False, False), None), (KeptOfMessage(True, True), "")],
)
def test_thoughts_are_left_out_unless_asked_for(kept: KeptOfMessage, thinking: str | None) -> None:
    given = generation(kept)
    whole = json.loads(MESSAGES.reply(service(), given, *ended(ANSWER, "tool_calls")))
    found = [block["thinking"] for block in whole["content"] if block["type"] == "thinking"]
    assert found == ([] if thinking is None else [thinking])
    events = stream_of(MessageFrames(service(), given), EVENTS, ANSWER)
    assert "thinking_delta" not in [
        event["delta"]["type"] for event in events if event["type"] == "content_block_delta"
    ]


def test_an_empty_answer_has_an_empty_block() -> None:
    events = stream_of(MessageFrames(service(), generation(SHOWN)), [], Answer(None), "stop")
    blocks = [event["content_block"] for event in events if "content_block" in event]
    assert blocks == [{"type": "text", "text": ""}]
    reply = json.loads(MESSAGES.reply(service(), generation(SHOWN), *ended(Answer(None), "stop")))
    assert reply["content"] == blocks


# ---- errors and operations


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(429, "full", code="overloaded"), 529, "overloaded_error"),
        (ApiError(429, "too many", code="tokens"), 429, "rate_limit_error"),
        (ApiError(413, "large"), 413, "request_too_large"),
        (ApiError(500, "failed"), 500, "api_error"),
        (ApiError(408, "late"), 408, "timeout_error"),
        (ApiError(418, "teapot", param="x"), 418, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_types(error: ApiError, status: int, kind: str) -> None:
    assert ANTHROPIC_ERRORS.status(error) == status
    [event] = data_of(ANTHROPIC_ERRORS.frame(error))
    assert event == json.loads(ANTHROPIC_ERRORS.body(error))
    assert event["error"]["type"] == kind


def test_a_thread_is_refused_so_that_clients_do_without(fake: RunningServer) -> None:
    reply = fake.post("/v1/messages", body_of(thread={"type": "create"}))
    assert reply.status == 400
    assert reply.error["details"]["error_code"] == "thread_unsupported_request"
    assert "details" not in fake.post("/v1/messages", body_of(max_tokens=None)).error


def test_the_requests_id_is_where_anthropics_client_looks(fake: RunningServer) -> None:
    for body in (body_of(), body_of(max_tokens=None)):
        headers = fake.post("/v1/messages", body).headers
        assert headers["request-id"] == headers["x-request-id"]
    assert "request-id" not in fake.get("/v1/models").headers


def test_paths_below_have_its_errors(fake: RunningServer) -> None:
    reply = fake.post("/v1/messages/batches", {})
    assert reply.status == 404
    assert reply.json["error"]["type"] == "not_found_error"
    refused = fake.post("/v1/messages", body_of(model="claude"))
    assert refused.status == 404
    assert refused.json["error"]["type"] == "not_found_error"


def test_anthropics_clients_get_models_in_their_shape(fake: RunningServer) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = fake.get("/v1/models?limit=1000", headers).json
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (NAME, NAME, False)
    [model] = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", NAME, NAME)
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert fake.get(f"/v1/models/{NAME}", headers).json == model
    assert fake.get("/v1/models").json["object"] == "list"


def test_a_tool_of_the_clients_own_may_name_its_type(fake: RunningServer) -> None:
    for kind in ({"type": "custom"}, {"type": None}, {}):
        assert fake.post("/v1/messages", body_of(tools=[{**TOOL, **kind}])).status == 200
