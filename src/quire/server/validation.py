"""Bodies that do not fit their schema, in our words: which field, what it must be, what it was."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from quire.server.errors import ApiError
from quire.server.fields import UNKNOWN, UNSUPPORTED

MAX_PARAM = 200  # characters of a field's name with its path
_MAX_SHOWN = 40  # characters of a value
_MAX_ERRORS = 100  # of one body; lists end at their first
_UNION_MEMBERS = ("str", "int", "float", "bool", "none")  # as pydantic's paths name them

Details = Mapping[str, Any]  # of one error, as pydantic gives them

_KINDS = {
    "string_type": "a text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "string_unicode": "text without halves of surrogate pairs",
}
_BOUNDS: Mapping[str, Callable[[Details], str]] = {
    "greater_than": lambda context: f"above {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"at least {_number(context['ge'])}",
    "less_than": lambda context: f"below {_number(context['lt'])}",
    "less_than_equal": lambda context: f"at most {_number(context['le'])}",
    "string_too_short": lambda context: f"at least {_characters(context['min_length'])} long",
    "string_too_long": lambda context: f"at most {_characters(context['max_length'])} long",
    "too_short": lambda context: f"at least {context['min_length']} long",
    "too_long": lambda context: f"at most {context['max_length']} long",
    "string_pattern_mismatch": lambda _: 'a token id, such as "50"',  # the one pattern: TokenText
}


_OF_NAME = ("[key]",)  # ends the path of an error about a name in an object


def validation_error(error: ValidationError) -> ApiError:
    """The 400 for a body that does not fit its schema, about the first field that does not."""
    errors = error.errors(include_url=False)[:_MAX_ERRORS]
    first = [other for other in errors if other["loc"][:1] == errors[0]["loc"][:1]]
    # Of a union the member that the value fits best fails deepest inside it.
    path = max((_path(other) for other in first), key=len)
    same = [other for other in first if _path(other) == path]
    field = name_of(path)
    if field is None:
        return ApiError(400, f"the body {_complaint(same)}", code="invalid_body")
    return ApiError(400, f"{field} {_complaint(same)}", param=field, code=_code(same[0]["type"]))


def name_of(path: Sequence[str | int]) -> str | None:
    """A path as messages[0].content; a long one is truncated."""
    found = ""
    for step in path:
        if isinstance(step, int):
            found += f"[{step}]"
        elif step:
            found += f".{step[:MAX_PARAM]}" if found else step[:MAX_PARAM]
        if len(found) > MAX_PARAM:
            break
    return found[:MAX_PARAM] or None


def _path(error: Any) -> list[str | int]:
    """Names and indices, without the members of unions that pydantic tried."""
    steps: Sequence[str | int] = error["loc"]
    if tuple(steps[-1:]) == _OF_NAME:
        steps = steps[:-2]  # the object that has the name
    is_unknown = error["type"] == UNKNOWN
    return [
        step
        for number, step in enumerate(steps)
        if isinstance(step, int)
        or (is_unknown and number == len(steps) - 1)
        or (step.isidentifier() and step[0].islower() and step not in _UNION_MEMBERS)
    ]


def _complaint(errors: Sequence[Any]) -> str:
    """What is wrong with a field, to be read after its name."""
    if errors[0]["type"] == "missing":
        return "is missing"
    expected: dict[str, None] = {}
    hint = ""
    for error in errors:
        kind, context = error["type"], error.get("ctx", {})
        if kind == "literal_error":
            choices = _choices(context["expected"])
            expected |= dict.fromkeys(map(_shown, choices))
            hint = hint or _nearest(error["input"], choices)
        elif kind in _KINDS or kind in _BOUNDS:
            expected[_KINDS[kind] if kind in _KINDS else _BOUNDS[kind](context)] = None
        else:
            return str(error["msg"])  # our own words
    of_name = "has a name that " if errors[0]["loc"][-1:] == _OF_NAME else ""
    given = _shown(errors[0]["input"])
    return f"{of_name}must be {_listed(list(expected))}, got {given}{hint}"


def _choices(expected: str) -> list[str | bool]:
    """Those of a Literal, from pydantic's list of them."""
    words: dict[str, str | bool] = {"True": True, "False": False}
    found = re.findall(r"'([^']*)'|(True|False|[0-9]+)", expected)
    return [text or words.get(other, other) for text, other in found]


def _nearest(given: object, choices: Sequence[str | bool]) -> str:
    if not isinstance(given, str):
        return ""
    texts = [choice for choice in choices if isinstance(choice, str)]
    close = get_close_matches(given[:_MAX_SHOWN].lower(), texts, 1)
    return f": did you mean {_shown(close[0])}?" if close else ""


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _shown(value: object) -> str:
    """A value in few characters, whatever its size."""
    if isinstance(value, str):
        end = "..." if len(value) > _MAX_SHOWN else ""
        return json.dumps(value[:_MAX_SHOWN] + end, ensure_ascii=False)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return json.dumps(value)[:_MAX_SHOWN]


def _number(bound: float) -> str:
    """An integer as it is, whatever its size, and without a point where there is nothing after."""
    return str(int(bound)) if bound == int(bound) else str(bound)


def _characters(count: int) -> str:
    return f"{count} character{'s' * (count != 1)}"


def _code(kind: str) -> str:
    if kind in (UNKNOWN, UNSUPPORTED):
        return kind
    return "missing_field" if kind == "missing" else "invalid_field"
