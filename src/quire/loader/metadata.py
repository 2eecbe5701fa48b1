"""Metadata: what a model file says of itself; its getters name the field that is wrong. Fields: the
part of it under one prefix, and refusals of what quire does not compute.
"""

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from quire.core.errors import ModelFileError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Lazy:
    """A value that is decoded at each access, because it may be large."""

    decode: Callable[[], object]


class Metadata(Mapping[str, object]):
    """The fields of one file: a plain mapping, and typed getters.

    Each getter raises ModelFileError, with the file, the field, its value and what was expected,
    where the field is missing (and no default is given) or is not what the getter's name says.
    Arrays of numbers in GGUF are read-only numpy arrays, arrays of strings are tuples. A field that
    is null (JSON) is a missing field.
    """

    def __init__(self, source: str, fields: Mapping[str, object]) -> None:
        self._source = source  # the file, as errors call it
        self._fields = {key: value for key, value in fields.items() if value is not None}

    def __getitem__(self, key: str) -> object:
        value = self._fields[key]
        return value.decode() if isinstance(value, Lazy) else value

    def __contains__(self, key: object) -> bool:
        return key in self._fields  # the inherited test would decode the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def replaced(self, changes: Mapping[str, object]) -> "Metadata":
        """The same with other values for these fields; None takes a field away."""
        return Metadata(self._source, {**self._fields, **changes})

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        low: int | None = None,
        high: int | None = None,
    ) -> int:
        value = self._present(key, default)
        expected = "an integer" + _bounds(low, high)
        if not _is_integer(value) or not _within(value, low, high):
            raise self._wrong(key, value, expected)
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> float:
        """A finite float; integers are taken too."""
        value = self._present(key, default)
        expected = "a finite number" + _bounds(low, high)
        if not _is_integer(value) and not isinstance(value, float):
            raise self._wrong(key, value, expected)
        # Compared before it is converted: an integer may be too large for a float.
        if not -_LARGEST <= value <= _LARGEST or not _within(value, low, high):
            raise self._wrong(key, value, expected)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        items = self._items(key, "an array of integers")
        good = tuple(item for item in items if _is_integer(item))
        if len(good) != len(items):
            raise self._wrong(key, items, "an array of integers")
        return good

    def numbers(self, key: str) -> tuple[float, ...]:
        items = self._items(key, "an array of numbers")
        good = tuple(item for item in items if _is_integer(item) or isinstance(item, float))
        if len(good) != len(items):
            raise self._wrong(key, items, "an array of numbers")
        try:
            return tuple(float(item) for item in good)
        except OverflowError:
            raise self._wrong(key, items, "an array of numbers that a float can hold") from None

    def booleans(self, key: str) -> tuple[bool, ...]:
        items = self._items(key, "an array of booleans")
        good = tuple(item for item in items if isinstance(item, bool))
        if len(good) != len(items):
            raise self._wrong(key, items, "an array of booleans")
        return good

    def texts(self, key: str) -> tuple[str, ...]:
        items = self._items(key, "an array of strings")
        good = tuple(item for item in items if isinstance(item, str))
        if len(good) != len(items):
            raise self._wrong(key, items, "an array of strings")
        return good

    def section(self, key: str) -> "Metadata":
        """A field that holds fields of its own, as JSON objects do."""
        value = self._present(key, None)
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Metadata(f"{self._source}: {key}", value)

    def error(self, key: str, message: str) -> ModelFileError:
        """An error about a field, for checks beyond the getters."""
        return ModelFileError(f"{self._source}: {key} {message}")

    def _present(self, key: str, default: object) -> object:
        if key in self._fields:
            return self[key]
        if default is None:
            raise self.error(key, "is missing")
        return default

    def _items(self, key: str, expected: str) -> Sequence[object]:
        value = self._present(key, None)
        if isinstance(value, np.ndarray):
            items: list[object] = value.tolist()
            return items
        if isinstance(value, list | tuple):
            return value
        raise self._wrong(key, value, expected)

    def _wrong(self, key: str, value: object, expected: str) -> ModelFileError:
        return self.error(key, f"must be {expected}, got {reprlib.repr(value)}")


_LARGEST = np.finfo(np.float64).max.item()


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""


class Fields:
    """Metadata under one prefix; a field that is null counts as absent."""

    def __init__(self, metadata: Metadata, where: str, prefix: str = "") -> None:
        self._metadata = metadata
        self._where = where  # the file, for refusals; other errors come from the metadata
        self._prefix = prefix

    def get(self, key: str) -> object:
        """The value as in the file, or None."""
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        return self._metadata.integer(self._prefix + key, default, low=low, high=high)

    def optional_integer(self, key: str, *, high: int) -> int | None:
        return None if self.get(key) is None else self.integer(key, high=high)

    def number(self, key: str, default: float | None = None) -> float:
        return self._metadata.number(self._prefix + key, default)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        return self._metadata.boolean(self._prefix + key, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._metadata.text(self._prefix + key, default)

    def numbers(self, key: str) -> tuple[float, ...]:
        return self._metadata.numbers(self._prefix + key)

    def integers(self, key: str) -> tuple[int, ...]:
        return self._metadata.integers(self._prefix + key)

    def booleans(self, key: str) -> tuple[bool, ...]:
        return self._metadata.booleans(self._prefix + key)

    def section(self, key: str) -> "Fields":
        """A nested object; an empty one where the key is absent."""
        where = f"{self._where}: {key}"
        if self.get(key) is None:
            return Fields(Metadata(where, {}), where)
        return Fields(self._metadata.section(self._prefix + key), where)

    def refuse(self, neutral: Mapping[str, Collection[object]]) -> None:
        """Raise where a field that quire does not compute has another value than these."""
        for key, values in neutral.items():
            value = self.get(key)
            if value is not None and (isinstance(value, np.ndarray) or value not in values):
                raise self.unsupported(key)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise at the first key under the prefix that is not known."""
        for name in self._metadata:
            key = name.removeprefix(self._prefix)
            if name.startswith(self._prefix) and key not in known:
                raise self.unsupported(key)

    def unsupported(self, key: str, supported: Collection[str] = ()) -> UnsupportedModelError:
        value = reprlib.repr(self.get(key))
        only = f"; supported: {', '.join(supported)}" if supported else ""
        return UnsupportedModelError(
            f"{self._where}: {self._prefix + key} = {value} is not supported{only}"
        )
