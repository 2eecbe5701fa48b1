"""Meter: the work a chat template may do, and the operations whose work depends on their values.

Templates come with model files, so they are not trusted to end. Work is counted, not timed: a
thread cannot be stopped from outside, and counts are the same on every machine. One unit is about
one node of a template's syntax, some tenths of a microsecond; eight characters made are another.
Whatever can grow is paid for before it is made.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Undefined

CHARACTERS_PER_UNIT = 8
MAX_INTEGER_BITS = 4096

_SCALARS = (str, int, float, bool, type(None))
_CONTAINERS = (list, tuple, dict)
_NUMBERS = (int, float, bool)

# A printf directive: no width from the arguments, and none that is longer than three digits.
_DIRECTIVE = re.compile(r"%(\(\w+\))?[-+ #0]*\d{0,3}(\.\d{1,3})?[sdifgrx%]")

_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class WorkLimitError(Exception):
    """The template has done all the work it may."""


class Meter:
    """What is left of one rendering's work."""

    __slots__ = ("_left",)

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise WorkLimitError

    def spend_text(self, num_characters: int) -> None:
        self.spend(1 + num_characters // CHARACTERS_PER_UNIT)

    def spend_whole(self, value: Any) -> None:
        """Pay for a walk through a value and all it holds, as often as it holds it."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.spend_text(len(item))
            elif isinstance(item, list | tuple):
                self.spend(1 + len(item))
                stack.extend(item)
            elif isinstance(item, dict):
                self.spend(1 + 2 * len(item))
                stack.extend(item)
                stack.extend(item.values())
            elif isinstance(item, (*_SCALARS, range, Undefined)):
                self.spend(1)
            else:
                raise TypeError(f"a {type(item).__name__} has no text")

    def text(self, value: Any) -> str:
        """A value as a template prints it."""
        if not isinstance(value, str):
            self.spend_whole(value)
        text = str(value)
        self.spend_text(len(text))
        return text

    def items(self, value: Any) -> list[Any]:
        """What a loop over the value goes through."""
        if isinstance(value, Undefined):
            return list(value)
        if not isinstance(value, str | list | tuple | dict | range):
            raise TypeError(f"a {type(value).__name__} cannot be looped over")
        self.spend(1 + 4 * len(value) if isinstance(value, str) else 1 + len(value))
        return list(value)

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        """left + right and its kind."""
        self.spend(1)
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            _check_size(symbol, left, right)
        elif symbol == "%" and isinstance(left, str):
            return self.printf(left, right)
        elif symbol == "+" and isinstance(left, str) and isinstance(right, str):
            self.spend_text(len(left) + len(right))
        elif symbol == "+" and type(left) is type(right) and isinstance(left, list | tuple):
            self.spend(len(left) + len(right))
        elif symbol == "*" and isinstance(left, int) and isinstance(right, str | list | tuple):
            return self.binary("*", right, left)
        elif symbol == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            length = len(left) * max(right, 0)
            self.spend(1 + length // (CHARACTERS_PER_UNIT if isinstance(left, str) else 1))
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            names = type(left).__name__, type(right).__name__
            raise TypeError(f"{names[0]} {symbol} {names[1]} means nothing")
        return _ARITHMETIC[symbol](left, right)

    def compare(self, left: Any, comparison: str, right: Any) -> Any:
        """left == right and its kind."""
        self.spend(1)
        if comparison in ("in", "notin"):
            self._spend_search(left, right)
        elif isinstance(left, str) and isinstance(right, str):
            self.spend_text(min(len(left), len(right)))
        elif isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            self.spend_whole(left)
            self.spend_whole(right)
        return _COMPARISONS[comparison](left, right)

    def _spend_search(self, left: Any, right: Any) -> None:
        if isinstance(left, _CONTAINERS):
            self.spend_whole(left)
            self.spend_whole(right)
            check_key(left if isinstance(right, dict) else None)
        elif isinstance(right, str):
            self.spend_text(len(right))
        elif isinstance(right, list | tuple | range):
            each = 1 + len(left) // CHARACTERS_PER_UNIT if isinstance(left, str) else 1
            self.spend(each * len(right))

    def join(self, separator: str, texts: list[str]) -> str:
        self.spend_text(len(separator) * len(texts) + sum(map(len, texts)))
        return separator.join(texts)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        self.spend_text(len(text))
        found = text.count(old) if count < 0 else min(count, text.count(old))
        self.spend_text(len(text) + found * len(new))
        return text.replace(old, new, count)

    def printf(self, template: str, values: Any) -> str:
        """template % values."""
        self.spend_text(len(template))
        rest, num_directives = _DIRECTIVE.subn("", template)
        if "%" in rest:
            raise ValueError("a % directive that templates may not use")
        for _ in range(num_directives):
            self.spend(1000 // CHARACTERS_PER_UNIT)
            self.spend_whole(values)
        return str(template % values)


def check_key(key: Any) -> None:
    """Keys are plain values: the hash of a tuple of tuples of tuples may take for ever."""
    if not isinstance(key, (*_SCALARS, Undefined)):
        raise TypeError(f"a {type(key).__name__} cannot be a key")


def _check_size(symbol: str, left: Any, right: Any) -> None:
    """Integers have no bound of their own."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if symbol == "**" and right > 0:
            bits = left.bit_length() * right
        if bits > MAX_INTEGER_BITS:
            raise OverflowError(f"an integer of more than {MAX_INTEGER_BITS} bits")
