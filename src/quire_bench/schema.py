"""check: holds data to a JSON schema, as much of the language as our schema uses.

It keeps the schema file the one place that says what a receipt is, without a further dependency;
the tests hold it to the verdicts of a full implementation.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

_REMARKS = frozenset({"$schema", "title", "description"})
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


class Mismatch(Exception):  # noqa: N818  # caught and told by whoever knows what the data is
    """Where data leaves a schema, and how."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")
        self.place = place
        self.problem = problem


def check(data: object, schema: Mapping[str, Any], place: str = "") -> None:
    """Raise Mismatch where the data is not as the schema says."""
    for keyword, wanted in schema.items():
        if keyword not in _REMARKS:
            _CHECKS[keyword](data, wanted, schema, place)


def _check_type(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not any(_is_a(data, name) for name in names):
        raise Mismatch(_named(place), f"must be {' or '.join(names)}, got {_shown(data)}")


def _is_a(data: object, name: str) -> bool:
    if isinstance(data, bool):
        return name == "boolean"
    if isinstance(data, float) and not math.isfinite(data):
        return False  # JSON has no such number
    if isinstance(data, float) and name == "integer":
        return data.is_integer()
    return isinstance(data, _TYPES[name])


def _check_enum(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    if isinstance(data, bool) or data not in wanted:
        options = " or ".join(map(repr, wanted))
        raise Mismatch(_named(place), f"must be {options}, got {_shown(data)}")


def _check_pattern(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    if isinstance(data, str) and not re.search(wanted, data):
        raise Mismatch(_named(place), f"must match {wanted}, got {_shown(data)}")


def _check_required(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    missing = [name for name in wanted if isinstance(data, dict) and name not in data]
    if missing:
        raise Mismatch(_named(_inside(place, missing[0])), "is missing")


def _check_properties(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    if isinstance(data, dict):
        for name in wanted.keys() & data.keys():
            check(data[name], wanted[name], _inside(place, name))


def _check_others(data: object, wanted: Any, schema: Mapping[str, Any], place: str) -> None:
    if not isinstance(data, dict):
        return
    for name in data.keys() - schema.get("properties", {}).keys():
        if wanted is False:
            raise Mismatch(_named(_inside(place, name)), "is no field of a receipt")
        check(data[name], wanted, _inside(place, name))


def _check_items(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    if isinstance(data, list):
        for index, item in enumerate(data):
            check(item, wanted, f"{place}[{index}]")


def _check_least(data: object, wanted: Any, _: Mapping[str, Any], place: str) -> None:
    if isinstance(data, list) and len(data) < wanted:
        raise Mismatch(_named(place), f"must have at least {wanted} items, got {len(data)}")


_CHECKS = {
    "type": _check_type,
    "enum": _check_enum,
    "pattern": _check_pattern,
    "required": _check_required,
    "properties": _check_properties,
    "additionalProperties": _check_others,
    "items": _check_items,
    "minItems": _check_least,
}


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _named(place: str) -> str:
    return f"field {place!r}" if place else "whole"


def _shown(data: object) -> str:
    return f"{data!r:.100}"
