"""Streams that are resumed: behind any event, a client gets exactly what it lacks."""

import json
from collections import defaultdict
from typing import Any

import openai
import pytest
from tests.server.servers import QUESTION, RunningServer
from tests.worker.test_server import TOOL

from quire.server.errors import ApiError
from quire.server.resuming import EventId, Mark

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WANTS_IDS = {"x-quire-resume": "1"}
USAGE = {"include_usage": True}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": QUESTION, "max_tokens": 24}),
    (CHAT, {"messages": QUESTION, "max_tokens": 24, "temperature": 1.0, "stream_options": USAGE}),
    (CHAT, {"messages": QUESTION, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": QUESTION, "max_tokens": 10, "n": 3, "temperature": 1.0, "stop": ["e"]}),
    (CHAT, {"messages": QUESTION, "max_tokens": 40, "temperature": 1.0, "tools": [TOOL],
            "tool_choice": "required"}),
    (CHAT, {"messages": QUESTION, "max_tokens": 30, "temperature": 1.0, "return_token_ids": True,
            "response_format": {"type": "json_object"}}),
    (TEXT, {"prompt": ["one", "two"], "n": 2, "max_tokens": 8, "temperature": 1.0, "logprobs": 1}),
    (TEXT, {"prompt": "x", "max_tokens": 12, "echo": True, "seed": 3, "temperature": 1.0,
            "stream_options": {**USAGE, "continuous_usage_stats": True}}),
]  # fmt: skip

Event = tuple[str | None, Any]  # its id, its data


def events_of(content: bytes) -> list[Event]:
    found = []
    for event in content.decode().split("\n\n")[:-1]:
        if event == ": ping":
            continue
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        data = fields["data"]
        found.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


def said(events: list[Event]) -> object:
    """What events say together, however tokens share them."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    rest = []
    for _, data in events:
        if data == "[DONE]":
            rest.append(data)
            continue
        if not data["choices"]:
            rest.append({name: data[name] for name in ("id", "created", "model")})
            rest.append({**data["usage"], "prompt_tokens_details": None})
        for choice in data["choices"]:
            whole = choices[choice["index"]]
            delta = choice.get("delta", {})
            whole["text"].append(choice.get("text") or delta.get("content") or "")
            whole["roles"] += [delta["role"]] if "role" in delta else []
            for call in delta.get("tool_calls", []):
                whole["names"] += [call["function"]["name"]] if "id" in call else []
                whole["arguments"].append(call["function"]["arguments"])
            scores = choice["logprobs"] or {}
            whole["scores"] += scores.get("content") or scores.get("token_logprobs") or []
            whole["offsets"] += scores.get("text_offset") or []
            whole["token_ids"] += choice.get("token_ids") or []
            whole["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    joined = {
        index: {**whole, "text": "".join(whole["text"]), "arguments": "".join(whole["arguments"])}
        for index, whole in choices.items()
        if any(any(part) for part in whole.values())
    }
    return joined, rest


@pytest.mark.parametrize("path, body", CALLS)
def test_behind_any_event_a_client_gets_exactly_the_rest(
    tiny: RunningServer, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "stream": True}
    whole = events_of(tiny.post(path, body, WANTS_IDS).body)
    assert whole[-1] == (None, "[DONE]") and all(name for name, _ in whole[:-1])
    for at, (name, data) in enumerate(whole[:-1]):
        assert name is not None
        resumed = tiny.post(path, body, {"Last-Event-ID": name})
        rest = events_of(resumed.body)
        assert said(rest) == said(whole[at + 1 :]), name
        ids = {(frame["id"], frame["created"]) for _, frame in rest[:-1]}
        assert ids <= {(data["id"], data["created"])}
        if rest[:-1]:
            assert rest[-2][0] == whole[-2][0], "ids go on as if nothing had happened"


def test_a_client_of_openai_reads_streams_with_ids(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "seed": 1, "model": "tiny-text"}
    plain = client.chat.completions.create(**body)
    stream = client.chat.completions.create(**body, stream=True, extra_headers=WANTS_IDS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == plain.choices[0].message.content


def test_streams_have_no_ids_unless_they_are_asked_for(tiny: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    assert b"id: " not in tiny.post(TEXT, body).body


BODY = {"prompt": "x", "max_tokens": 4, "stream": True}


@pytest.mark.parametrize(
    "path, body, code",
    [
        (TEXT, {**BODY, "prompt": "y"}, "resume_mismatch"),
        (TEXT, {**BODY, "n": 2}, "resume_mismatch"),
        (TEXT, {**BODY, "stream": False}, "not_resumable"),
        (
            "/v1/messages",
            {"model": "tiny-text", "messages": QUESTION, "max_tokens": 4, "stream": True},
            "not_resumable",
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4, "stream": True}, "not_resumable"),
        ("/api/chat", {"model": "tiny-text", "messages": QUESTION}, "not_resumable"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    tiny: RunningServer, path: str, body: dict[str, Any], code: str
) -> None:
    name = events_of(tiny.post(TEXT, BODY, WANTS_IDS).body)[0][0]
    assert name is not None
    refused = tiny.post(path, body, {"Last-Event-ID": name})
    assert refused.status == 400, refused.body
    assert b"Last-Event-ID" in refused.body
    if path == TEXT:
        assert refused.error["code"] == code


@pytest.mark.parametrize(
    "text", ["", "1", "1/a/1/b/1/x", f"1/a/1/{'0' * 32}/{2**64}/x", f"1/a/1/{'0' * 32}/1/-1", "é"]
)
def test_an_id_of_somebody_else_is_refused(tiny: RunningServer, text: str) -> None:
    refused = tiny.post(TEXT, BODY, {"Last-Event-ID": text})
    assert refused.status == 400 and refused.error["code"] == "event_id"


def test_ids_are_read_as_they_were_written() -> None:
    marks = (Mark(), Mark(0), Mark(12), Mark(7, is_finished=True))
    for has_ending in (False, True):
        found = EventId("cmpl-a.b:c_d", 1794874297, "0f" * 16, 2**64 - 1, marks, has_ending)
        assert EventId.read(str(found)) == found
    with pytest.raises(ApiError):
        EventId.read("1/" + "a" * 10_000)


def test_more_tokens_than_there_are_leave_the_end(tiny: RunningServer) -> None:
    name = events_of(tiny.post(TEXT, BODY, WANTS_IDS).body)[0][0]
    assert name is not None
    beyond = str(EventId.read(name)).rpartition("/")[0] + "/99999f"
    resumed = tiny.post(TEXT, BODY, {"Last-Event-ID": beyond})
    assert events_of(resumed.body) == [(None, "[DONE]")]
