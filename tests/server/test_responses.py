"""OpenAI's Responses API with OpenAI's own client: whole, streamed, stored, and by key."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.server.answers import ANSWER, EVENTS, data_of, ended, generation, service, stream_of
from tests.server.servers import NAME, RunningServer, fake_server

from quire.chat import Answer, AnswerEvent, ArgumentsDelta, ToolCall, ToolCallBegin
from quire.server.dialects.responses import RESPONSES
from quire.server.dialects.responses_answer import KeptOfResponse, ResponseFrames, about
from quire.server.dialects.responses_body import (
    ResponsesRequest,
    chat_messages,
    input_items,
    prompt_fields,
)
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing, digest_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": NAME, "input": "Hello there", "max_output_tokens": 8, "temperature": 0.0}
    return client.responses.create(**{**given, **fields})


def chat_of(**fields: Any) -> dict[str, Any]:
    body = ResponsesRequest.model_validate({"input": "Hello", **fields})
    return prompt_fields(body, input_items(body))


def kept_of(**fields: Any) -> KeptOfResponse:
    body = ResponsesRequest.model_validate({"input": "Hello", **fields})
    return KeptOfResponse("resp_1", about(body, is_stored=True), False, b"[]", b"[]")


# ---- bodies


SPACE = {"type": "namespace", "name": "home", "description": "Of the house.", "tools": [TOOL]}


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    """Codex gives the model tools so."""
    called = {"call_id": "a", "name": "weather", "namespace": "home", "arguments": "{}"}
    items = [
        {"type": "function_call", **called},
        {"type": "function_call_output", "call_id": "a", "namespace": "home", "output": "rain"},
    ]
    chat = chat_of(input=items, tools=[SPACE, TOOL])
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "home.weather"
    first, second = [tool["function"] for tool in chat["tools"]]
    assert (first["name"], first["description"]) == ("home.weather", "Of the house.")
    assert (second["name"], "description" in second) == ("weather", False)


def test_a_call_of_a_function_of_a_namespace_names_both() -> None:
    answer = Answer(None, None, (ToolCall("call_a", "home.weather", "{}"),))
    events: list[AnswerEvent] = [
        ToolCallBegin(0, "call_a", "home.weather"),
        ArgumentsDelta(0, "{}"),
    ]
    kept = kept_of(tools=[SPACE, {**TOOL, "name": "time"}])
    whole = json.loads(RESPONSES.reply(service(), generation(kept), *ended(answer, "tool_calls")))
    [call] = whole["output"]
    assert (call["namespace"], call["name"]) == ("home", "weather")
    assert Response.model_validate(whole).tools[0].type == "namespace"
    streamed = stream_of(ResponseFrames(service(), generation(kept)), events, answer)
    [last] = streamed[-1]["response"]["output"]
    assert {**last, "id": ""} == {**call, "id": ""}


def test_what_openais_client_adds_to_an_answers_items_is_taken() -> None:
    """responses.parse() adds them, and model_dump() has them."""
    text = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {"a": 1}}
    call = {"call_id": "a", "name": "weather", "arguments": "{}", "parsed_arguments": {"a": 1}}
    items = [
        {"type": "message", "role": "assistant", "content": [text]},
        {"type": "function_call", **call},
    ]
    bare = [
        {"type": "message", "role": "assistant", "content": "{}"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
    ]
    assert chat_of(input=items) == chat_of(input=bare)


def test_what_codex_says_of_itself_is_taken() -> None:
    assert chat_of(client_metadata={"session_id": "1", "turn_id": "2"}) == chat_of()


def test_items_become_messages_of_a_chat() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "noon"}],
        },
        {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
    ]
    body = ResponsesRequest.model_validate({"input": items})
    calls = {
        call_id: {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("a", "weather"), ("b", "time"), ("c", "time"))
    }
    assert chat_messages("Obey.", input_items(body)) == [
        {"role": "system", "content": "Obey.\n\nBe short."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [calls["a"], calls["b"]],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "assistant", "reasoning_content": "So.", "tool_calls": [calls["c"]]},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
        ),
    ],
)
def test_tools_and_the_choice_of_them(choice: Any, expected: Any) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == expected
    assert chat["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": openai.omit}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "text.format",
        ),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **fields)
    assert caught.value.param == param
    assert caught.value.code is not None


def test_messages_have_the_names_of_fields_that_responses_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, max_output_tokens=10_000)
    assert "max_output_tokens (10000)" in caught.value.message
    assert "max_tokens" not in caught.value.message


# ---- answers


def test_the_model_answers_as_in_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hello there"},
        ],
        max_tokens=8,
        temperature=0.0,
    )
    answer = respond(client, instructions="Be short.", metadata={"a": "b"})
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.instructions == "Be short."
    assert answer.metadata == {"a": "b"}
    assert answer.temperature == 0.0
    assert answer.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    assert answer.usage.output_tokens == 8
    counted = client.responses.input_tokens.count(
        model=NAME, input="Hello there", instructions="Be short."
    )
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asks = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = respond(client, **asks)
    events = list(respond(client, stream=True, **asks))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    [expected] = whole.output[0].content
    scores = [score.logprob for event in deltas for score in event.logprobs]
    assert scores == [score.logprob for score in expected.logprobs]
    assert all(len(score.top_logprobs) == 2 for score in expected.logprobs)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 8
    assert client.responses.retrieve(last.response.id) == last.response


def test_the_client_parses_structured_answers(client: openai.OpenAI) -> None:
    class Count(BaseModel):
        n: int

    parsed = client.responses.parse(
        model=NAME, input="Count", text_format=Count, max_output_tokens=200, temperature=0.0
    )
    assert isinstance(parsed.output_parsed, Count)
    assert parsed.status == "completed"
    with client.responses.stream(
        model=NAME, input="Count", text_format=Count, max_output_tokens=200, temperature=0.0
    ) as stream:
        last = stream.get_final_response()
    assert last.output_parsed == parsed.output_parsed


def test_thoughts_text_and_calls_are_items_in_a_stream_and_whole() -> None:
    whole = json.loads(
        RESPONSES.reply(service(), generation(kept_of()), *ended(ANSWER, "tool_calls"))
    )
    Response.model_validate(whole)
    given = generation(kept_of(tools=[TOOL], metadata={"a": "b"}))
    events = stream_of(ResponseFrames(service(), given), EVENTS, ANSWER)
    for event in events:
        EVENT.validate_python(event)
    streamed = events[-1]["response"]
    assert streamed["status"] == whole["status"] == "completed"
    without_ids = [
        [{**item, "id": None} for item in response["output"]] for response in (whole, streamed)
    ]
    assert without_ids[0] == without_ids[1]
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    assert [event["output_index"] for event in events if "item" in event] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    arguments = [
        event["arguments"]
        for event in events
        if event["type"] == "response.function_call_arguments.done"
    ]
    assert arguments == ['{"city":"Oslo"}', "{}"]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 2


def test_an_empty_answer_has_an_empty_message() -> None:
    events = stream_of(ResponseFrames(service(), generation(kept_of())), [], Answer(None), "stop")
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_stream_that_fails_says_so_and_is_not_stored() -> None:
    holder = service()
    frames = ResponseFrames(holder, generation(kept_of()))
    events = data_of(frames.error(ApiError(500, "broken")))
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "response.failed"),
    ]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert holder.responses.counts()["responses"] == 0


# ---- stored responses


def test_a_response_follows_a_stored_one(client: openai.OpenAI) -> None:
    first = respond(client)
    follows = respond(client, input="And now?", previous_response_id=first.id)
    whole = respond(
        client,
        input=[
            {"role": "user", "content": "Hello there"},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "And now?"},
        ],
    )
    assert follows.output_text == whole.output_text
    assert follows.usage.input_tokens == whole.usage.input_tokens
    third = respond(client, input="Then?", previous_response_id=follows.id)
    assert third.usage.input_tokens > follows.usage.input_tokens
    [item] = client.responses.input_items.list(follows.id).data
    assert item.content[0].text == "And now?"  # type: ignore[union-attr,index]
    listed = client.responses.input_items.list(whole.id, order="asc", limit=2)
    assert [item.type for item in listed] == ["message", "message", "message"], "all pages"


def refer(item_id: str) -> Any:
    return {"type": "item_reference", "id": item_id}


def test_an_item_is_found_by_its_id_alone(client: openai.OpenAI) -> None:
    """Vercel's AI SDK sends what an answer said so."""
    hello: Any = {"role": "user", "content": "Hello there"}
    more: Any = {"role": "user", "content": "And now?"}
    first = respond(client, input=[hello])
    [said], [asked] = first.output, client.responses.input_items.list(first.id).data
    whole = respond(client, input=[hello, said.model_dump(), more])
    referred = [hello, refer(said.id), more]
    assert respond(client, input=referred).output_text == whole.output_text
    both = respond(client, input=[refer(asked.id), refer(said.id), more])
    assert both.output_text == whole.output_text
    counted = client.responses.input_tokens.count(model=NAME, input=referred)
    assert counted.input_tokens == whole.usage.input_tokens
    again = respond(client, input="Then?", previous_response_id=both.id)
    assert again.usage.input_tokens > both.usage.input_tokens


def test_an_item_that_was_not_stored_is_not_found(client: openai.OpenAI) -> None:
    [unstored] = respond(client, store=False).output
    for item_id in (unstored.id, "rs_1", "x"):
        with pytest.raises(openai.BadRequestError, match="send the item itself") as caught:
            respond(client, input=[{"role": "user", "content": "Hi"}, refer(item_id)])
        assert (caught.value.param, caught.value.code) == ("input[1].id", "item_not_found")


def test_stored_responses_are_found_until_deleted_and_others_never(client: openai.OpenAI) -> None:
    stored, unstored = respond(client), respond(client, store=False)
    assert stored.store is True
    assert unstored.store is False
    assert client.responses.retrieve(stored.id) == stored
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(stored.id)
    client.responses.delete(stored.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(stored.id)


KEYS = {name: f"{name}-{'k' * 20}" for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def keyed(text_model: Path) -> Iterator[RunningServer]:
    ring = KeyRing([ApiKey(name, digest_of(secret)) for name, secret in KEYS.items()])
    with fake_server(text_model, keys=ring) as server:
        yield server


def test_a_key_does_not_see_what_another_stored(keyed: RunningServer) -> None:
    with keyed.client(KEYS["alice"]) as alice, keyed.client(KEYS["bob"]) as bob:
        stored = respond(alice)
        for refused in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                refused(stored.id)
        with pytest.raises(openai.NotFoundError):
            list(bob.responses.input_items.list(stored.id))
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            respond(bob, previous_response_id=stored.id)
        with pytest.raises(openai.BadRequestError, match="there is no item"):
            respond(bob, input=[refer(stored.output[0].id)])
        assert alice.responses.retrieve(stored.id).id == stored.id


def test_nothing_is_stored_where_the_operator_says_so(text_model: Path) -> None:
    with fake_server(text_model, max_stored_responses=0) as server, server.client() as client:
        answer = respond(client)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
