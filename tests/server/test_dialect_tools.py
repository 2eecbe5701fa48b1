"""Tools and reasoning by Responses and Messages: what a scripted model writes, and what it is shown
of it in the next turn."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tests.server.answers import data_of
from tests.server.test_tools import CALL, HERMES, Scripted, scripted_server

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
TOOL = {"name": "weather", "input_schema": PARAMETERS}
ARGUMENTS = {"city": "Paris", "days": 3}
THOUGHT = "<think>Look it up.</think>"
NAME = "tiny-text"


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from scripted_server(tmp_path_factory.mktemp("hermes"), HERMES)


def shown(scripted: Scripted, ask: Callable[[], object]) -> str:
    """The prompt that a call makes."""
    executor = scripted.server.executor
    executor.keep_plans = True
    executor.plans.clear()
    ask()
    executor.keep_plans = False
    llm = scripted.server.service.loaded
    assert llm is not None and llm.tokenizer is not None
    plans = [plan for plan in executor.plans if plan.sequences]
    tokens = [token for plan in plans for row in plan.sequences for token in row.tokens]
    return llm.tokenizer.decode(tokens, skip_special=False)


# ---- Responses


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": NAME, "input": "Rain?", "tools": [FUNCTION], "max_output_tokens": 400}
    return client.responses.create(**{**given, **fields})


def test_a_response_calls_a_function_and_goes_on_with_its_output(hermes: Scripted) -> None:
    with hermes.server.client() as client:
        hermes.says(f"{THOUGHT}So.\n{CALL}")
        first = respond(client)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output[0].content[0].text == "Look it up."
        assert first.output_text == "So."
        call = first.output[-1]
        assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
        assert first.status == "completed"
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        hermes.says("Yes.")
        by_id = shown(
            hermes, lambda: respond(client, input=[result], previous_response_id=first.id)
        )
        items = [
            {"role": "user", "content": "Rain?"},
            *[item.model_dump() for item in first.output],
            result,
        ]
        assert shown(hermes, lambda: respond(client, input=items)) == by_id
        for text in ('"city": "Paris"', "[tool]It rains.", "<think>Look it up."):
            assert text in by_id


def test_the_clients_stream_helper_sees_the_call(hermes: Scripted) -> None:
    hermes.says(f"{THOUGHT}So.\n{CALL}")
    with (
        hermes.server.client() as client,
        client.responses.stream(model=NAME, input="Rain?", tools=[FUNCTION]) as stream,  # type: ignore[list-item]
    ):
        events = list(stream)
        last = stream.get_final_response()
    assert last.output[-1].parsed_arguments == ARGUMENTS  # type: ignore[union-attr]
    types = [event.type for event in events]
    assert types.index("response.reasoning_text.delta") < types.index("response.output_text.delta")
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert json.loads("".join(deltas)) == ARGUMENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_that_must_call_does(hermes: Scripted) -> None:
    hermes.says("I would rather not.")
    with hermes.server.client() as client:
        forced = respond(client, tool_choice={"type": "function", "name": "weather"})
        assert "function_call" in [item.type for item in forced.output]
        with pytest.raises(openai.BadRequestError) as caught:
            respond(client, tool_choice={"type": "function", "name": "unknown"})
    assert caught.value.param == "tool_choice"


# ---- Messages


def send(hermes: Scripted, **fields: Any) -> Any:
    body = {
        "model": NAME,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [TOOL],
        **fields,
    }
    return hermes.server.post("/v1/messages", body)


THINKING = {"type": "enabled", "budget_tokens": 1024}


def test_a_message_uses_a_tool_and_goes_on_with_its_result(hermes: Scripted) -> None:
    hermes.says(f"{THOUGHT}So.\n{CALL}")
    reply = send(hermes, thinking=THINKING).json
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
    assert reply["content"][0]["thinking"] == "Look it up."
    assert reply["content"][2]["input"] == ARGUMENTS
    assert reply["stop_reason"] == "tool_use"
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    result = {"type": "tool_result", "tool_use_id": reply["content"][2]["id"], "content": "rain"}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [result]},
    ]
    hermes.says("Yes.")
    prompt = shown(hermes, lambda: send(hermes, messages=messages))
    for text in ('"city": "Paris"', "[tool]rain", "<think>Look it up."):
        assert text in prompt


def test_a_stream_of_blocks_has_the_call(hermes: Scripted) -> None:
    hermes.says(f"{THOUGHT}So.\n{CALL}")
    events = data_of(send(hermes, stream=True, thinking=THINKING).body)
    started = [event["content_block"] for event in events if "content_block" in event]
    assert [block["type"] for block in started] == ["thinking", "text", "tool_use"]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    parts = [piece["partial_json"] for piece in pieces if piece["type"] == "input_json_delta"]
    assert json.loads("".join(parts)) == ARGUMENTS
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_without_thinking_the_template_is_told_and_no_block_has_it(hermes: Scripted) -> None:
    hermes.says(f"{THOUGHT}So.")
    replies: list[Any] = []
    prompt = shown(hermes, lambda: replies.append(send(hermes).json))
    assert "[assistant]<think></think>" in prompt
    assert replies[0]["content"] == [{"type": "text", "text": "So."}]
    hermes.says("So.")
    asked = shown(hermes, lambda: send(hermes, thinking=THINKING))
    assert "[assistant]<think></think>" not in asked


def test_a_message_that_must_use_a_tool_does(hermes: Scripted) -> None:
    hermes.says("I would rather not.")
    reply = send(hermes, tool_choice={"type": "any"}).json
    assert "tool_use" in [block["type"] for block in reply["content"]]


def test_tools_count(hermes: Scripted) -> None:
    messages = [{"role": "user", "content": "Rain?"}]
    counts = [
        hermes.server.post(
            "/v1/messages/count_tokens", {"model": NAME, "messages": messages, "tools": tools}
        ).json["input_tokens"]
        for tools in ([], [TOOL])
    ]
    hermes.says("So.")
    assert counts[0] < counts[1] == send(hermes).json["usage"]["input_tokens"]
