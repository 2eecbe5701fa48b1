"""Bodies: a request's bytes as its schema, refused at the first thing wrong, by the field's name.

The decoder in C reads a body in one call, during which nothing else in the process runs. So it gets
small bodies alone. A larger one is read value by value here, within limits that are counted on the
way, and so is a small one that the decoder refused: this reader knows the field.
"""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any, Never, TypeVar

from pydantic import ValidationError

from quire.server.errors import ApiError
from quire.server.fields import IgnoredFields, Strict
from quire.server.validation import name_of, validation_error

SMALL_BYTES = 8 << 10  # the C decoder takes some hundred microseconds at most
MAX_DEPTH = 64
MAX_NAME = 1024  # characters of a field's name
MAX_NUMBER = 400  # characters: a float written out in full has fewer
_SLICE = 16 << 10  # characters of integers that are decoded at once
_ITEMS_A_TURN = 512  # read in some hundred microseconds, between pauses
_PAUSE_S = 50e-6  # long enough for a waiting thread to take the GIL

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGERS = re.compile(r"[0-9, \t\n\r]+")
_STRINGS = json.JSONDecoder()  # decodes one string at a time
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
B = TypeVar("B", bound=Strict)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much a body may contain, from the largest request that the model can take.

    Integers in lists are token ids; there can be a context of them for each prompt. Everything
    else that JSON has (names, strings, lists, objects, other numbers) counts as an item.
    """

    max_items: int
    max_length: int  # of one object, or of one list without its integers
    max_integers: int


def body_limits(max_context: int, max_prompts: int, max_messages: int) -> BodyLimits:
    """Some items for every message, and some for every token: a template writes at least a comma
    or a line's end for each part of a message and each of a tool call's values."""
    items = 8 * (max_context + max_messages)
    length = max(max_context, max_messages)
    return BodyLimits(min(items, 1 << 18), min(length, 1 << 16), max_prompts * max_context)


def parse_body(
    body: bytes, schema: type[B], limits: BodyLimits, ignored: IgnoredFields | None = None
) -> B:
    """A body as its schema; an ApiError about the first field that is wrong. Unknown fields go to
    `ignored`, where that is given."""
    found = read_json(body, limits)
    try:
        return schema.model_validate(found, context=ignored)
    except ValidationError as error:
        raise validation_error(error) from None


def read_json(body: bytes, limits: BodyLimits) -> Any:
    """The value that a body holds; an ApiError that says what is wrong, and in which field."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"byte {error.start} is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise _refusal("it begins with a byte order mark; leave that out")
    if len(body) <= SMALL_BYTES and text.count("[") + text.count("{") <= MAX_DEPTH:
        try:
            return _DECODER.decode(text)
        except (ValueError, RecursionError):
            pass  # read again below, to name the field
    return _Reader(text, limits).read()


class _Reader:
    """Recursive descent over one text."""

    def __init__(self, text: str, limits: BodyLimits) -> None:
        self._text = text
        self._limits = limits
        self._num_items = 0
        self._num_integers = 0
        self._path: list[str | int] = []

    def read(self) -> Any:
        try:
            value, end = self._value(self._skip(0))
            if self._skip(end) != len(self._text):
                raise JSONDecodeError("Extra data", self._text, end)
        except JSONDecodeError as error:
            raise _refusal(str(error)[:200], self._path) from None
        return value

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()

    def _value(self, at: int) -> tuple[Any, int]:
        """The value that begins at a character, and the character after it."""
        mark = self._text[at : at + 1]
        self._count_item()
        match mark:
            case '"':
                return _STRINGS.raw_decode(self._text, at)
            case "{":
                return self._object(self._skip(at + 1))
            case "[":
                return self._list(self._skip(at + 1))
            case "t" | "f" | "n":
                word, value = _WORDS[mark]
                if self._text.startswith(word, at):
                    return value, at + len(word)
        return self._number(at)

    def _count_item(self) -> None:
        self._num_items += 1
        if self._num_items % _ITEMS_A_TURN == 0:
            _pause()
        if self._num_items > self._limits.max_items:
            self._refuse(f"the body holds more than {self._limits.max_items} values by here")

    def _number(self, at: int) -> tuple[int | float, int]:
        found = _NUMBER.match(self._text, at)
        if found is None:
            raise JSONDecodeError("Expecting value", self._text, at)
        if found.end() - at > MAX_NUMBER:
            self._refuse(f"a number of {found.end() - at} characters; at most {MAX_NUMBER}")
        if not (found[1] or found[2]):
            return int(found[0]), found.end()
        number = float(found[0])
        if math.isinf(number):
            self._refuse(f"{found[0]:.40} is too large for a number")
        return number, found.end()

    def _list(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        if self._text.startswith("]", at):
            return items, at + 1
        self._enter(0)
        at = self._integers(items, at)
        num_integers = len(items)
        while True:
            self._path[-1] = len(items)
            self._check_length(len(items) - num_integers)
            item, at = self._value(self._skip(at))
            items.append(item)
            at = self._skip(at)
            mark = self._text[at : at + 1]
            if mark == "]":
                self._path.pop()
                return items, at + 1
            if mark != ",":
                raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at += 1

    def _integers(self, items: list[Any], at: int) -> int:
        """Take the integers that a list begins with, all but the last, a slice at a time."""
        while found := _INTEGERS.match(self._text, at, at + _SLICE):
            comma = self._text.rfind(",", at, found.end())
            if comma < at:
                break
            try:
                some = json.loads(f"[{self._text[at:comma]}]")
            except ValueError:
                break  # the loop over single values finds the position
            if not some:
                break  # likewise: a comma without a value
            self._num_integers += len(some)
            self._path[-1] = len(items)
            if self._num_integers > self._limits.max_integers:
                self._refuse(
                    f"the body holds more than {self._limits.max_integers} integers by here"
                )
            items += some
            at = comma + 1
            _pause()
        return at

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        if self._text.startswith("}", at):
            return found, at + 1
        self._enter("")
        while True:
            self._check_length(len(found))
            name, at = self._name(at)
            if name in found:
                self._refuse("the field is given twice")
            at = self._skip(at)
            if not self._text.startswith(":", at):
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            found[name], at = self._value(self._skip(at + 1))
            at = self._skip(at)
            mark = self._text[at : at + 1]
            if mark == "}":
                self._path.pop()
                return found, at + 1
            if mark != ",":
                raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self._skip(at + 1)

    def _name(self, at: int) -> tuple[str, int]:
        if not self._text.startswith('"', at):
            self._path[-1] = ""
            message = "Expecting property name enclosed in double quotes"
            raise JSONDecodeError(message, self._text, at)
        self._count_item()
        name, end = _STRINGS.raw_decode(self._text, at)
        self._path[-1] = name
        if len(name) > MAX_NAME:
            self._refuse(f"a name of {len(name)} characters; at most {MAX_NAME}")
        return name, end

    def _check_length(self, length: int) -> None:
        if length >= self._limits.max_length:
            self._refuse(f"a list or object of more than {self._limits.max_length} values")

    def _enter(self, step: str | int) -> None:
        self._path.append(step)
        if len(self._path) > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep")

    def _refuse(self, what: str) -> Never:
        """Raise for JSON beyond the limits."""
        field = name_of(self._path)
        raise ApiError(400, f"{field or 'the body'}: {what}", param=field, code="invalid_body")


def _pause() -> None:
    """Release the GIL: the event loop and the engine would otherwise wait a whole switch interval
    for it, at every token of every stream."""
    time.sleep(_PAUSE_S)


def _refusal(what: str, path: Sequence[str | int] = ()) -> ApiError:
    """The error for what is no JSON."""
    field = name_of(path)
    reason = f"{field}: {what}" if field else what
    return ApiError(400, f"the body is no JSON: {reason}", param=field, code="invalid_json")


# ---- what the decoder in C refuses


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs) or any(len(name) > MAX_NAME for name in found):
        raise ValueError
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError
    return number


def _no_constant(_: str) -> Never:
    raise ValueError


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
)
