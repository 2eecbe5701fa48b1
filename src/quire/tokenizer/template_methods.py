"""The methods and functions that chat templates may call; nothing else in them can be called.

A template never holds a method of Python's: what it looks up on a value is one of these, which pays
for its work before doing it. None changes a value.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from quire.tokenizer.template_meter import CHARACTERS_PER_UNIT, Meter, check_key

MAX_RANGE = 100_000

_CALL_UNITS = 4
_LOOP_ATTRIBUTES = frozenset(
    {
        *("index", "index0", "revindex", "revindex0", "first", "last", "length"),
        *("depth", "depth0", "previtem", "nextitem"),
    }
)
_PLAIN_STRING_METHODS = (
    *("upper", "lower", "title", "capitalize", "swapcase", "casefold"),
    *("startswith", "endswith", "removeprefix", "removesuffix"),
    *("find", "rfind", "index", "rindex", "count"),
    *("isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum", "isspace", "isupper", "islower"),
    *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"),
)
_FORMAT_FIELD = re.compile(r"\d{0,4}|[A-Za-z_]\w*")
# Directives of strftime, without the widths that some systems know.
_TIME_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,64}", re.DOTALL)

Function = Callable[..., Any]  # of a meter, and of what the template gives


class TemplateError(Exception):
    """The template refuses these messages, in its own words."""


@dataclass(frozen=True, slots=True)
class Method:
    """A function that a template may call, with the value it was looked up on.

    It is no named tuple: templates could take one apart.
    """

    function: Function
    owner: tuple[Any, ...] = ()

    def call(self, meter: Meter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meter.spend(_CALL_UNITS)
        return self.function(meter, *self.owner, *args, **kwargs)


def find_method(value: Any, name: str) -> Method | None:
    """The method that templates know by this name on such a value."""
    for kind, methods in _METHODS:
        if isinstance(value, kind):
            function = methods.get(name)
            return None if function is None else Method(function, (value,))
    return None


def loop_attribute(loop: LoopContext, name: str) -> Any:
    """An attribute of `loop`; AttributeError for one that templates may not see."""
    if name not in _LOOP_ATTRIBUTES:
        raise AttributeError(name)
    return getattr(loop, name)


def _string_method(name: str) -> Function:
    method = getattr(str, name)
    # What is stripped, or searched for from the right, is compared at each character of the text.
    compares = name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition")

    def call(meter: Meter, text: str, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        meter.spend_whole(given)
        compared = max((len(a) for a in given if isinstance(a, str)), default=0) if compares else 0
        meter.spend_text(len(text) * (1 + compared // CHARACTERS_PER_UNIT))
        result = method(text, *args, **kwargs)
        if isinstance(result, list):
            meter.spend(4 * len(result))
        return result

    return call


def _join(meter: Meter, separator: str, values: Any) -> str:
    texts = meter.items(values)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("join takes strings")
    return meter.join(separator, texts)


def _replace(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    return meter.replace(text, old, new, count)


def _format(meter: Meter, template: str, /, *args: Any, **kwargs: Any) -> str:
    """str.format for {}, {0} and {name} alone: no attributes, no conversions, no widths."""
    meter.spend_text(len(template))
    texts: list[str] = []
    unnamed = iter(args)
    for literal, field, spec, conversion in string.Formatter().parse(template):
        texts.append(literal)
        if field is None:
            continue
        if spec or conversion or not _FORMAT_FIELD.fullmatch(field):
            raise ValueError(f"format takes {{}}, {{0}} and {{name}}, not {{{field[:100]}}}")
        if field == "":
            texts.append(meter.text(next(unnamed)))
        else:
            texts.append(meter.text(args[int(field)] if field.isdecimal() else kwargs[field]))
    return meter.join("", texts)


def _get(_meter: Meter, mapping: dict[Any, Any], key: Any, default: Any = None) -> Any:
    check_key(key)
    return mapping.get(key, default)


def _items(meter: Meter, mapping: dict[Any, Any]) -> list[Any]:
    meter.spend(2 * len(mapping))
    return list(mapping.items())


def _keys(meter: Meter, mapping: dict[Any, Any]) -> list[Any]:
    return meter.items(mapping)


def _values(meter: Meter, mapping: dict[Any, Any]) -> list[Any]:
    meter.spend(len(mapping))
    return list(mapping.values())


def _index(meter: Meter, values: Any, value: Any) -> int:
    meter.spend_whole(values)
    meter.spend_whole(value)
    return int(values.index(value))


def _count(meter: Meter, values: Any, value: Any) -> int:
    meter.spend_whole(values)
    meter.spend_whole(value)
    return int(values.count(value))


def _cycle(_meter: Meter, loop: LoopContext, *values: Any) -> Any:
    return loop.cycle(*values)


_METHODS: tuple[tuple[type, Mapping[str, Function]], ...] = (
    (
        str,
        {
            **{name: _string_method(name) for name in _PLAIN_STRING_METHODS},
            "join": _join,
            "replace": _replace,
            "format": _format,
        },
    ),
    (dict, {"get": _get, "items": _items, "keys": _keys, "values": _values}),
    (list, {"index": _index, "count": _count}),
    (tuple, {"index": _index, "count": _count}),
    (LoopContext, {"cycle": _cycle}),
)


def _range(_meter: Meter, *bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise OverflowError(f"a range of more than {MAX_RANGE} numbers")
    return numbers


def _dict(_meter: Meter, /, **values: Any) -> dict[str, Any]:
    return values


def _namespace(_meter: Meter, /, **values: Any) -> Namespace:
    return Namespace(values)


def _raise_exception(meter: Meter, message: Any) -> None:
    raise TemplateError(meter.text(message)[:1000])


def _strftime_now(meter: Meter, form: str) -> str:
    meter.spend(16 + len(form))
    if not _TIME_FORMAT.fullmatch(form):
        raise ValueError(f"strftime_now cannot use the format {form[:100]!r}")
    return datetime.now().strftime(form)


FUNCTIONS: Mapping[str, Method] = {
    "range": Method(_range),
    "dict": Method(_dict),
    "namespace": Method(_namespace),
    "raise_exception": Method(_raise_exception),
    "strftime_now": Method(_strftime_now),
}
