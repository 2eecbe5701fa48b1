"""Kinds of rows that a step may have, for benchmarks of the host: how each is asked for, and a text
that all of them may be given."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.core.sampling import Constraint

_ITEM_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "count", "tags", "is_new"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _ITEM_SCHEMA}
_KINDS_OF_VALUES: Sequence[Mapping[str, Any]] = (
    {"type": "string", "maxLength": 24},
    {"type": "integer", "minimum": 0, "maximum": 100_000},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    {"type": "boolean"},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"anyOf": [{"type": "null"}, {"type": "number"}]},
)
_NAMES = ("Lena", "a longer name with several words", "naïve “quotes”", "x")
_LEAST_TOKENS = 8  # of an item, whatever the tokenizer


def document(num_tokens: int) -> str:
    """A text of the schema that has more tokens."""
    items = [
        {
            "name": _NAMES[index % len(_NAMES)],
            "count": 17 * index,
            "tags": ["red", "blue"][: index % 3],
            "is_new": index % 2 == 0,
        }
        for index in range(num_tokens // _LEAST_TOKENS + 4)
    ]
    return json.dumps(items, ensure_ascii=False)


def own_schema(number: int, num_tokens: int) -> str:
    """A schema with properties and kinds of values of its own, of which no text is shorter than so
    many tokens."""
    count = len(_KINDS_OF_VALUES)
    properties = {
        f"field_{number}_{place}": _KINDS_OF_VALUES[(number + place) % count]
        for place in range(3 + number % count)
    }
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": num_tokens})


class Kind(NamedTuple):
    """Fields of SamplingParams, and of the body of a completion."""

    params: Mapping[str, Any]
    body: Mapping[str, Any]


def _same(**fields: Any) -> Kind:
    return Kind(fields, fields)


KINDS: Mapping[str, Kind] = {
    "greedy": _same(temperature=0.0),
    "sampled": _same(temperature=1.0, seed=7),
    "filtered": _same(temperature=0.8, top_p=0.95, top_k=50, seed=7),
    "penalties": _same(temperature=0.8, presence_penalty=0.5, seed=7),
    "logprobs": _same(temperature=0.0, logprobs=5),
    "constrained": Kind(
        {"temperature": 0.0, "structured": Constraint("json_schema", json.dumps(_SCHEMA))},
        {"temperature": 0.0, "structured_outputs": {"json": _SCHEMA}},
    ),
}
