"""What is wrong with a body, said as one error that names the field."""

from collections.abc import Sequence
from typing import Any

from quire.server.errors import ApiError
from quire.server.json_reader import name_of

_NAMES_OF_KINDS = ("str", "int", "float", "bool", "none")  # what a union was tried as


def refusal_of(errors: Sequence[Any]) -> ApiError:
    """The 400 for a body that does not fit its schema, about the first field that does not."""
    error = errors[0]
    field = _field(error)
    if field is None:
        return ApiError(400, f"the body must be a JSON object: {error['msg']}")
    same = [other for other in errors if _field(other) == field]
    return ApiError(400, _message(field, same), param=field, code=_code(error["type"]))


def _field(error: Any) -> str | None:
    """A path such as messages[0].content, as far as it is one of names and places."""
    steps = error["loc"]
    is_unknown = error["type"] == "extra_forbidden"
    return name_of(
        [
            step
            for number, step in enumerate(steps)
            if isinstance(step, int)
            or (is_unknown and number == len(steps) - 1)
            or (step.isidentifier() and step not in _NAMES_OF_KINDS)
        ]
    )


def _message(field: str, errors: Sequence[Any]) -> str:
    match errors[0]["type"]:
        case "missing":
            return f"{field} is missing"
        case "extra_forbidden":
            return f"{field} is not a field that quire knows"
        case "none_required":
            return f"{field} is not supported: leave it out (see /docs)"
        case "too_long" if field == "tools":
            return "tools is not supported: quire does not call tools yet"
    told = "; or: ".join(dict.fromkeys(error["msg"] for error in errors))
    return f"{field}: {told}"


def _code(kind: str) -> str | None:
    return {"none_required": "unsupported_field", "extra_forbidden": "unknown_field"}.get(kind)
