"""What a request may say: one policy for the fields of every body, and the base class that has it.

A field is one of three:

- obeyed: it changes the answer as its description says;
- accepted: it cannot change the answer; it is read and has no effect;
- refused: it would change the answer and quire cannot do that. A 400 names it and says why; null
  and values that ask for nothing are taken.

A name that no client is known to send is a 400 too, with the nearest known name. With
`--ignore-unknown-fields` it is dropped instead, and named in the answer's header
`x-quire-ignored-fields` and in the log.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

UNKNOWN = "unknown_field"  # types of errors, and the codes of their answers
UNSUPPORTED = "unsupported_field"
Refused = Any  # the type of a refused field
_ACCEPTED = "Accepted: "
_REFUSED = "Refused: "
_MAX_COMPARED = 64  # characters of an unknown name that is compared with the known ones
_MAX_IGNORED = 16  # names in a header and a log line
# What one API calls by one name and another by another.
_SAME_MEANING = (
    ("messages", "input", "prompt"),
    ("max_tokens", "max_output_tokens"),
    ("stop", "stop_sequences"),
    ("system", "instructions"),
    ("response_format", "text", "output_config"),
    ("reasoning_effort", "reasoning", "thinking"),
    ("seed", "random_seed"),
)


class Standing(StrEnum):
    OBEYED = "obeyed"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class FieldPolicy(NamedTuple):
    """What becomes of a field."""

    standing: Standing
    text: str  # what it does, or why it does nothing
    neutral: tuple[object, ...] = ()  # of a refused field: values that ask for nothing


def accepted(why: str, **constraints: Any) -> Any:
    """A field that cannot change the answer."""
    return Field(default=None, description=f"{_ACCEPTED}{why}", **constraints)


def refused(reason: str, *neutral: JsonValue) -> Any:
    """A field that quire cannot obey: why, with what to do instead; and the values beside null that
    ask for nothing."""
    return Field(
        default=None,
        description=f"{_REFUSED}{reason}",
        json_schema_extra={"enum": [None, *neutral]},
    )


def policy_of(field: FieldInfo) -> FieldPolicy:
    extra = field.json_schema_extra
    allowed = extra.get("enum") if isinstance(extra, dict) else None
    return policy_of_text(field.description or "", allowed)


def policy_of_text(text: str, allowed: Any = None) -> FieldPolicy:
    """From a field's description, and of a refused one the values that it may have."""
    if text.startswith(_REFUSED):
        return FieldPolicy(Standing.REFUSED, text.removeprefix(_REFUSED), tuple(allowed[1:]))
    if text.startswith(_ACCEPTED):
        return FieldPolicy(Standing.ACCEPTED, text.removeprefix(_ACCEPTED))
    return FieldPolicy(Standing.OBEYED, text)


@cache
def policies(schema: type[BaseModel]) -> Mapping[str, FieldPolicy]:
    """All fields of a body by the names that clients give them."""
    return {field.alias or name: policy_of(field) for name, field in schema.model_fields.items()}


def obeyed_fields(schema: type[BaseModel]) -> list[str]:
    """In the order of the schema."""
    found = policies(schema).items()
    return [name for name, policy in found if policy.standing is Standing.OBEYED]


class IgnoredFields:
    """The first few unknown fields of a body, where the server was told to ignore them."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self.names) == _MAX_IGNORED:
                return
            self.names[quote(name[:_MAX_COMPARED], safe="", errors="replace")] = None

    def __str__(self) -> str:
        """ASCII without separators of its own: fit for a header."""
        return ", ".join(self.names)


class Strict(BaseModel):
    """No unknown fields, no strings for numbers, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _apply_policy(cls, data: Any, info: ValidationInfo) -> Any:
        """Refuse the first unknown or refused field, without an error for each of many."""
        if not isinstance(data, dict):
            return data
        known = policies(cls)
        unknown = data.keys() - known.keys()
        ignored = info.context
        if unknown and not isinstance(ignored, IgnoredFields):
            raise _unknown_field(next(name for name in data if name in unknown), known)
        for name, value in data.items():
            policy = known.get(name)
            if policy is not None and policy.standing is Standing.REFUSED:
                _check_neutral(name, value, policy)
        if not isinstance(ignored, IgnoredFields):
            return data
        ignored.add(name for name in data if name in unknown)
        return {name: value for name, value in data.items() if name not in unknown}


def _unknown_field(name: str, known: Mapping[str, FieldPolicy]) -> ValidationError:
    usable = [each for each, policy in known.items() if policy.standing is not Standing.REFUSED]
    close = _elsewhere(name, usable) or get_close_matches(name[:_MAX_COMPARED].lower(), usable, 1)
    hint = f"did you mean {close[0]}?" if close else "/docs lists those it knows"
    return field_error(UNKNOWN, f"is not a field that quire knows: {hint}", name)


def _elsewhere(name: str, usable: Sequence[str]) -> list[str]:
    """The fields here that mean what another API calls by this name."""
    return [each for names in _SAME_MEANING if name in names for each in names if each in usable]


def _check_neutral(name: str, value: object, policy: FieldPolicy) -> None:
    if value is None or any(_same(value, each) for each in policy.neutral):
        return
    raise field_error(UNSUPPORTED, f"is not supported: {policy.text}", name)


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: 1 is 1.0 and not true."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def field_error(kind: str, words: str, *path: str | int) -> ValidationError:
    """An error in our words at a path within what is validated."""
    sound = [
        step if isinstance(step, int) else step.encode("utf-8", "replace").decode() for step in path
    ]
    custom = PydanticCustomError(kind, "{words}", {"words": words})
    return ValidationError.from_exception_data(
        "body", [InitErrorDetails(type=custom, loc=tuple(sound), input=None)]
    )
