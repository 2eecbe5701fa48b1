"""Random JSON schemas, of what llguidance supports, and whether a value fits one."""

import random
import string
from collections.abc import Callable
from typing import Any

import jsonschema

Schema = dict[str, Any]


def validate(schema: Schema, value: object) -> None:
    """Raises where the value does not fit the schema."""
    jsonschema.Draft202012Validator(schema).validate(value)


def random_schema(draw: random.Random, depth: int = 3) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]]
    kinds = [_string, _pattern, _integer, _number, _constant, _enumeration, _plain]
    if depth:
        kinds += [_object, _object, _array, _any_of, _reference]
    return draw.choice(kinds)(draw, depth)


def _name(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase + "_ü", k=draw.randint(1, 8)))


def _plain(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _string(draw: random.Random, _: int) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}


def _pattern(draw: random.Random, _: int) -> Schema:
    patterns = [r"^[a-f]{2,5}$", r"^\d{1,4}(\.\d{2})?$", r"^(red|green)-[A-Z]$", r"^[^\s]{1,6}$"]
    return {"type": "string", "pattern": draw.choice(patterns)}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}


def _number(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-50, 50)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 99)}


def _constant(draw: random.Random, _: int) -> Schema:
    return {"const": draw.choice([None, True, 5, -1.5, _name(draw), [1, "x"], {"a": [False]}])}


def _enumeration(draw: random.Random, _: int) -> Schema:
    return {"enum": [_name(draw) for _ in range(draw.randint(1, 5))] + [draw.randint(0, 9)]}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    items = random_schema(draw, depth - 1)
    if draw.random() < 0.2:
        first = [random_schema(draw, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _object(draw: random.Random, depth: int) -> Schema:
    names = list(dict.fromkeys(_name(draw) for _ in range(draw.randint(0, 4))))
    required = [name for name in names if draw.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _reference(draw: random.Random, depth: int) -> Schema:
    """A definition that is used twice; only whole schemas have definitions."""
    shared = random_schema(draw, 0)
    if depth < 3:
        return shared
    pair = {"a": {"$ref": "#/$defs/shared"}, "b": {"$ref": "#/$defs/shared"}}
    return {
        "$defs": {"shared": shared},
        "type": "object",
        "properties": pair,
        "required": ["b"],
        "additionalProperties": False,
    }
