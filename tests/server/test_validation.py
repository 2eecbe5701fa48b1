"""What does not fit a schema is told in plain words: the field, what it must be, what it was."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from quire.server.app import BODIES
from quire.server.bodies import BodyLimits, parse_body
from quire.server.dialects.anthropic_body import MessagesRequest
from quire.server.dialects.responses_body import ResponsesRequest
from quire.server.errors import ApiError
from quire.server.fields import IgnoredFields, Strict
from quire.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest

LIMITS = BodyLimits(1 << 20, 1 << 20, 1 << 20)
MESSAGES = [{"role": "user", "content": "hi"}]
# Some of these are wrong for every type, bound and choice.
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 7, 10**30, 0.5, -1e300, 1e300, "", "x", "x" * 5000, "\ud800"),
    *([], [5], ["x"], [[]], [None], ["x"] * 300, [{}], [{"type": 5}], [{"type": "x"}]),
    *({}, {"x": 5}, {"type": 5}, {"type": "x"}, {"5": "x"}, {"type": "json_schema"}),
]
PYDANTICS_WORDS = (
    *("Input should", "Value error", "valid", "Extra inputs", "Field required", "pydantic"),
    *("constrained", "discriminator", "List should", "String should", "Dictionary", "Assertion"),
)


def nested(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> Iterator[Any]:
    """Objects of a schema with one field wrong, and lists of them."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from nested(option, definitions, depth)
    if "items" in schema:
        yield from ([item] for item in nested(schema["items"], definitions, depth))
    if depth:
        fields = schema.get("properties", {})
        consts = {name: field["const"] for name, field in fields.items() if "const" in field}
        for name, field in fields.items():
            for value in (*WRONG, *nested(field, definitions, depth - 1)):
                yield {**consts, name: value}


@pytest.mark.parametrize("schema", BODIES)
def test_no_words_of_pydantics_reach_a_client(schema: type[Strict]) -> None:
    description = schema.model_json_schema()
    definitions = description.get("$defs", {})
    count = 0
    for name, field in description["properties"].items():
        for value in (*WRONG, *nested(field, definitions, 2)):
            try:
                parse_body(json.dumps({name: value}).encode(), schema, LIMITS)
            except ApiError as error:
                count += 1
                assert not any(word in error.message for word in PYDANTICS_WORDS), error.message
                assert error.status == 400
                assert error.code
                assert len(error.message) < 500
    assert count > 10 * len(description["properties"])


def refusal(schema: type[Strict], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(body).encode(), schema, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": "2"}, 'n must be an integer, got "2"'),
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"temperature": "hot"}, 'temperature must be a number, got "hot"'),
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
        ({"stop": 5}, "stop must be a text or a list, got 5"),
        ({"stop": [5]}, "stop[0] must be a text, got 5"),
        ({"stop": ["a", ""]}, 'stop[1] must be at least 1 character long, got ""'),
        ({"logit_bias": []}, "logit_bias must be an object, got a list of 0"),
        (
            {"logit_bias": {"abc": 1}},
            'logit_bias has a name that must be a token id, such as "50", got "abc"',
        ),
        (
            {"service_tier": "priorty"},
            'service_tier must be "auto", "default", "flex", "scale", "priority" or "fast", got '
            '"priorty": did you mean "priority"?',
        ),
        ({"messages": None}, "messages must be a list, got null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ({"user": "u" * 300}, f'user must be at most 256 characters long, got "{"u" * 40}..."'),
        ({"response_format": {"type": "xml"}}, "response_format must be an object whose type is"),
    ],
)
def test_a_message_says_what_is_wanted_and_what_was_given(
    fields: dict[str, Any], message: str
) -> None:
    assert refusal(ChatRequest, {"messages": MESSAGES, **fields}).message.startswith(message)


@pytest.mark.parametrize(
    ("schema", "name", "nearest"),
    [
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "Max_Tokens", "max_tokens"),
        (CompletionRequest, "promt", "prompt"),
        (EmbeddingRequest, "encoding", "encoding_format"),
        (TokenizeRequest, "add_special", "add_special_tokens"),
    ],
)
def test_an_unknown_field_is_a_400_with_the_nearest_known_one(
    schema: type[Strict], name: str, nearest: str
) -> None:
    error = refusal(schema, {name: 1})
    assert (error.param, error.code) == (name, "unknown_field")
    assert error.message == (f"{name} is not a field that quire knows: did you mean {nearest}?")


@pytest.mark.parametrize(
    ("schema", "name", "own"),
    [
        (ResponsesRequest, "messages", "input"),
        (ResponsesRequest, "response_format", "text"),
        (MessagesRequest, "stop", "stop_sequences"),
        (MessagesRequest, "instructions", "system"),
        (CompletionRequest, "messages", "prompt"),
    ],
)
def test_a_field_of_another_api_is_a_400_with_the_name_it_has_here(
    schema: type[Strict], name: str, own: str
) -> None:
    assert refusal(schema, {name: 1}).message.endswith(f"did you mean {own}?")


def test_no_refused_field_is_suggested() -> None:
    assert refusal(CompletionRequest, {"image_dat": 1}).message.endswith(
        "/docs lists those it knows"
    )


def test_an_unknown_field_of_a_nested_object_is_named_with_its_path() -> None:
    messages = [*MESSAGES, {"role": "user", "contents": "x"}]
    error = refusal(ChatRequest, {"messages": messages})
    assert error.param == "messages[1].contents"
    assert "did you mean content?" in error.message


def test_unknown_fields_are_ignored_and_listed_where_the_server_was_told_to() -> None:
    body = {"messages": [{**MESSAGES[0], "mood": "good"}], "zeal": 1, "n": 2}
    ignored = IgnoredFields()
    found = parse_body(json.dumps(body).encode(), ChatRequest, LIMITS, ignored)
    assert (found.n, found.messages[0].content) == (2, "hi")
    assert str(ignored) == "zeal, mood"
    with pytest.raises(ApiError, match="n must be"):  # what is known is checked as ever
        parse_body(json.dumps({**body, "n": "2"}).encode(), ChatRequest, LIMITS, IgnoredFields())


def test_the_list_of_ignored_fields_is_short_and_fits_a_header() -> None:
    names = ["a\r\nset-cookie: x", "ü" * 500, "\ud800", ", ,", *map(str, range(5000))]
    ignored = IgnoredFields()
    body = {"messages": MESSAGES, **dict.fromkeys(names, 1)}
    parse_body(json.dumps(body).encode(), ChatRequest, LIMITS, ignored)
    text = str(ignored)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 8192
    assert len(text.split(", ")) == 16


@pytest.mark.parametrize("schema", BODIES)
def test_every_field_of_a_body_is_described(schema: type[Strict]) -> None:
    description = schema.model_json_schema()
    for part in (description, *description.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            assert field.get("description"), f"{part['title']}.{name}"


def test_neutral_values_are_told_from_others_by_type() -> None:
    for name, value in product(("use_beam_search", "n_keep", "lora"), (True, "0", {"a": 1})):
        error = refusal(ChatRequest, {"messages": MESSAGES, name: value})
        assert (error.param, error.code) == (name, "unsupported_field")
    neutral = {"n_keep": 0, "lora": [], "tfs_z": 1.0, "verbose": False}
    parse_body(json.dumps({"messages": MESSAGES, **neutral}).encode(), ChatRequest, LIMITS)
    assert refusal(ChatRequest, {"messages": MESSAGES, "tfs_z": True}).param == "tfs_z"
