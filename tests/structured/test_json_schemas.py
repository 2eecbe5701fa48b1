"""Schemas as libraries write them: taken where the same can be said in words of llguidance's."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.structured.test_grammars import byte_level
from tests.structured.walks import grammars_of, walk

from quire.core.errors import RequestError
from quire.core.sampling import Constraint, SamplingParams
from quire.structured import Grammars
from quire.tokenizer import Tokenizer

NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
RECORD = {"type": "object", "additionalProperties": NUMBER}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> Grammars:
    return grammars_of(tokenizer)


def closed(**properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Paints(BaseModel):
    model_config = ConfigDict(extra="forbid")

    coats: dict[Colour, Literal[1, 2]]
    sizes: dict[Annotated[str, Field(min_length=1, max_length=2)], Literal[1, 2]]
    where: Path = Field(max_length=3)


TAKEN: dict[str, Any] = {
    "names of any text": {**RECORD, "propertyNames": {"type": "string", "description": "x"}},
    "names of a list": {**RECORD, "propertyNames": {"enum": ["a", 2, "b"]}, "required": ["b"]},
    "names of a pattern": {
        **RECORD,
        "propertyNames": {"type": "string", "pattern": "^[a-c]{1,2}$"},
    },
    "names of a length": {**RECORD, "propertyNames": {"minLength": 2, "maxLength": 3}},
    "one name": {**RECORD, "propertyNames": {"const": "a"}, "minProperties": 1},
    "names by reference": {
        "$defs": {"a/b": {"type": "string", "enum": ["x", "y"]}},
        **RECORD,
        "propertyNames": {"$ref": "#/$defs/a~1b"},
    },
    "names beside properties": {
        "type": "object",
        "properties": {"a": NUMBER},
        "additionalProperties": False,
        "propertyNames": {"type": "string"},
    },
    "what may not be there": closed(a={"anyOf": [{"not": {}}, NUMBER]}),
    "no property that may be there": {"type": "object", "additionalProperties": {"not": {}}},
    "items that may be alike": {
        "type": "array",
        "items": NUMBER,
        "maxItems": 2,
        "uniqueItems": False,
    },
    "a property named not": closed(**{"not": {"const": {"not": {}}}}),
    "a format within a property named default": closed(
        default={"type": "string", "format": "path", "maxLength": 2},
        enum={"type": "string", "format": "topic", "maxLength": 2},
    ),
    "a dialect by another address": {
        "$schema": "https://json-schema.org/draft-07/schema#",
        **NUMBER,
    },
    "a dialect without version": {"$schema": "http://json-schema.org/schema#", **NUMBER},
    "pydantic's": Paints.model_json_schema(),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_written_fits_the_schema_as_it_was_given(
    name: str, made: Grammars, tokenizer: Tokenizer
) -> None:
    schema = TAKEN[name]
    for seed in range(8):
        found = walk(made, Constraint.json(schema), tokenizer.end_token_ids, seed, 4000)
        assert found.is_complete
        value = json.loads(tokenizer.decode(found.tokens, continuation=True))
        jsonschema.Draft202012Validator(schema).validate(value)


REFUSED: list[tuple[Any, str]] = [
    ({"a": {**RECORD, "propertyNames": {"format": "uuid"}}}, "at #/properties/a: "),
    ({"a": {**RECORD, "propertyNames": {"pattern": "a", "minLength": 2}}}, "propertyNames"),
    ({"a": {**RECORD, "properties": {}, "propertyNames": {"pattern": "a"}}}, "propertyNames"),
    ({"a": {**RECORD, "propertyNames": {"$ref": "#/$defs/none"}}}, "propertyNames"),
    ({"a": {"not": {"type": "string"}}}, 'at #/properties/a: Unimplemented keys: ["not"]'),
    ({"a": {"uniqueItems": True}}, "uniqueItems"),
    ({"a": {"not": {}}}, "'a' is unsatisfiable"),
]


@pytest.mark.parametrize(("properties", "part"), REFUSED)
def test_what_cannot_be_said_is_refused(properties: Any, part: str, made: Grammars) -> None:
    schema = {**closed(**properties), "$schema": "https://json-schema.org/draft/2020-12/schema"}
    with pytest.raises(RequestError) as caught:
        made.prepare(SamplingParams(structured=Constraint.json(schema)))
    assert part in str(caught.value)


def test_a_dialect_of_others_is_refused(made: Grammars) -> None:
    constraint = Constraint.json({"$schema": "https://example.org/draft-07/schema#", **NUMBER})
    with pytest.raises(RequestError, match=r"example\.org"):
        made.prepare(SamplingParams(structured=constraint))


# ---- in answers with calls

CALLS: Any = {"begin": ["<"], "between": [","], "suffix": [""], "end": [">"], "max": 1}


def answer(schema: Any, text: Any = None) -> Constraint:
    """A call with these arguments, or a text of this form."""
    choice = {"name": "paint", "prefix": ["paint"], "schema": schema}
    value = {"calls": {**CALLS, "choices": [choice]}}
    if text is not None:
        value["text"] = {"prefix": [], "kind": "json_schema", "value": json.dumps(text)}
    return Constraint("answer", json.dumps(value))


FORMAT = {"type": "string", "format": "path", "maxLength": 2}


def test_schemas_of_calls_and_texts_are_taken_likewise(
    made: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = answer(closed(a=FORMAT), closed(b={**FORMAT, "format": "topic"}))
    texts = set()
    for seed in range(12):
        found = walk(made, constraint, tokenizer.end_token_ids, seed, 400)
        assert found.is_complete
        text = tokenizer.decode(found.tokens, continuation=True)
        texts.add(text[0])
        assert json.loads(text.removeprefix("<paint").removesuffix(">")).keys() <= {"a", "b"}
    assert texts == {"<", "{"}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (answer(closed(a=FORMAT, b={"type": 3})), "tool 'paint': at #/properties/b: "),
        (answer(closed(a=FORMAT), closed(b={"not": NUMBER})), "at #/properties/b: Unimplemented"),
    ],
)
def test_a_wrong_schema_is_named_without_what_it_was_put_into(
    constraint: Constraint, message: str, made: Grammars
) -> None:
    with pytest.raises(RequestError) as caught:
        made.prepare(SamplingParams(structured=constraint))
    assert str(caught.value).startswith(message)
    assert "call_0" not in str(caught.value)


def test_llguidances_own_settings_hold_in_calls_too(made: Grammars, tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {"oneOf": [NUMBER, {"type": "number", "enum": [1]}]}
    with pytest.raises(RequestError, match="oneOf"):
        made.prepare(SamplingParams(structured=answer(schema)))
    schema = {**schema, "x-guidance": {"coerce_one_of": True}}
    assert walk(made, answer(schema), tokenizer.end_token_ids, 0, 40).is_complete
