"""Structured output over HTTP: fields of OpenAI, vLLM and llama.cpp, with the official client."""

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict
from tests.server.servers import NAME, RunningServer

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]
DATE = r"\d{4}-\d{2}"
COLOURS = ["red", "green"]
GBNF = 'root ::= "yes" | "no"'
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "count": {"type": "integer", "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


class Paint(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


def is_date(text: str) -> bool:
    return re.fullmatch(r"[0-9]{4}-[0-9]{2}", text) is not None


def fits(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"colour", "count"} and found["colour"] in COLOURS


def is_object(text: str) -> bool:
    return text.startswith("{")  # the tiny model does not end it


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, fits),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "description": "x", "schema": SCHEMA, "strict": True},
            }
        },
        fits,
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, fits),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, fits),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, fits),
    ({"structured_outputs": {"json": SCHEMA}}, fits),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, fits),
    ({"structured_outputs": {"regex": DATE, "choice": None}}, is_date),
    ({"structured_outputs": {"choice": COLOURS}}, COLOURS.__contains__),
    ({"structured_outputs": {"grammar": GBNF}}, ("yes", "no").__contains__),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"guided_json": SCHEMA}, fits),
    ({"guided_regex": DATE}, is_date),
    ({"guided_choice": COLOURS}, COLOURS.__contains__),
    ({"guided_grammar": 'start: "a"{3}'}, "aaa".__eq__),
    ({"regex": DATE}, is_date),
    ({"ebnf": GBNF}, ["yes", "no"].__contains__),
    ({"structured_outputs": {"regex": DATE}, "guided_regex": DATE}, is_date),
    ({"grammar": GBNF}, ("yes", "no").__contains__),
    ({"json_schema": SCHEMA}, fits),
]


@pytest.mark.parametrize(("fields", "is_right"), FORMS)
def test_every_way_to_ask_is_followed(tiny: RunningServer, fields: Any, is_right: Any) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 100, "seed": 3, **fields}
    reply = tiny.post("/v1/chat/completions", chat)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert is_right(choice["message"]["content"])
    assert choice["finish_reason"] == ("length" if is_right is is_object else "stop")
    text = {"prompt": ["a", "b"], "max_tokens": 100, "seed": 3, **fields}
    reply = tiny.post("/v1/completions", text)
    assert reply.status == 200, reply.body
    assert all(is_right(choice["text"]) for choice in reply.json["choices"])


def test_the_clients_parse_gives_a_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=NAME, messages=MESSAGES, response_format=Paint, max_tokens=100, n=3, seed=1
    )
    assert all(isinstance(choice.message.parsed, Paint) for choice in parsed.choices)


def test_the_clients_stream_helper_gives_a_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, response_format=Paint, max_tokens=100, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds
    assert isinstance(final.choices[0].message.parsed, Paint)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"not": {"const": 1}}},
            }
        },
        "response_format",
        "at #: Unimplemented keys",
    ),
    (
        {"structured_outputs": {"json": {"properties": {"a": {"type": "objekt"}}}}},
        "structured_outputs",
        "at #/properties/a: Invalid type: objekt",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON schema"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "non-empty strings"),
    ({"grammar": "root ::= x"}, "grammar", "'x', which is not defined"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "json_schema", "grammar and json_schema both ask"),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
        "response_format",
        "give one of them",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs one json_schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": SCHEMA},
                "schema": SCHEMA,
            }
        },
        "response_format",
        "needs one json_schema",
    ),
    ({"guided_regex": "a" * 600_000}, "guided_regex", "the limit is 524288"),
]


@pytest.mark.parametrize(("fields", "param", "part"), WRONG)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_be_followed_is_a_400_that_says_where(
    fake: RunningServer, path: str, fields: Any, param: str, part: str
) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
    reply = fake.post(path, {**body, "max_tokens": 5, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert part in reply.error["message"]


@pytest.mark.parametrize("nothing", [{"response_format": {"type": "text"}}, {"grammar": ""}])
def test_what_asks_for_any_text_beside_a_constraint_asks_for_nothing(
    tiny: RunningServer, nothing: dict[str, Any]
) -> None:
    fields = {**nothing, "guided_choice": COLOURS}
    reply = tiny.post("/v1/completions", {"prompt": "a", "max_tokens": 9, **fields})
    assert reply.json["choices"][0]["text"] in COLOURS


def test_a_hostile_grammar_ends_its_own_request(tiny: RunningServer) -> None:
    """It overflows the stack of whoever compiles it; others are answered meanwhile and after."""
    rules = "\n".join(f'a{n}: a{n + 1} "x"' for n in range(6000))
    body = {"prompt": "a", "max_tokens": 5}

    async def both() -> tuple[Any, Any]:
        grammar = f'start: a0\n{rules}\na6000: "y"'
        hostile = asyncio.to_thread(tiny.post, "/v1/completions", {**body, "grammar": grammar})
        other = asyncio.to_thread(tiny.post, "/v1/completions", {**body, "guided_regex": "[ab]{3}"})
        return await asyncio.gather(hostile, other)

    hostile, other = asyncio.run(both())
    assert (hostile.status, hostile.error["param"]) == (400, "grammar")
    assert re.fullmatch("[ab]{3}", other.json["choices"][0]["text"])
