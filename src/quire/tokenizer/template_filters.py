"""The filters and tests that chat templates may use, each paying for its work.

Where jinja's own filter is sound once it is paid for, it does the work. Filters that give a
generator in jinja give a list here, so that nothing is computed unpaid later.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2.filters
import jinja2.tests
from jinja2 import Undefined, pass_context
from jinja2.runtime import Context

from quire.tokenizer.template_meter import Meter

_FILTER_UNITS = 4
_SORT_FACTOR = 20  # no sort compares an item with more others
_MAX_INDENT = 64  # characters
_MAX_SEPARATOR = 8
_MAX_DIGITS = 30  # of a rounding


class MeteredContext(Context):
    """The variables of one rendering, and the meter that its work is paid from."""

    meter: Meter


Filter = Callable[..., Any]  # of a context, a value, and of what the template gives
Test = Callable[..., bool]


def _on_text(change: Callable[..., Any]) -> Filter:
    """A filter whose work is in proportion to the text of its value."""

    def apply(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        text = context.meter.text(value)
        for argument in (*args, *kwargs.values()):
            context.meter.spend_whole(argument)
        return change(text, *args, **kwargs)

    return apply


def _on_whole(change: Callable[..., Any], factor: int = 1) -> Filter:
    """A filter of jinja's that may look at all of its value, `factor` times."""

    def apply(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(factor):
            context.meter.spend_whole([value, *args, *kwargs.values()])
        return change(value, *args, **kwargs)

    return apply


def _on_items(change: Callable[..., Any], factor: int = 1) -> Filter:
    """The same for a filter that wants the environment and gives back some of the items."""

    def apply(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = context.meter.items(value)
        for _ in range(factor):
            context.meter.spend_whole([items, *args, *kwargs.values()])
        return change(context.environment, items, *args, **kwargs)

    return apply


def _unique(environment: Any, items: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return list(jinja2.filters.sync_do_unique(environment, items, *args, **kwargs))


def _default(
    _context: MeteredContext, value: Any, default_value: Any = "", boolean: bool = False
) -> Any:
    return jinja2.filters.do_default(value, default_value, boolean)


def _length(_context: MeteredContext, value: Any) -> int:
    return len(value)


def _first(context: MeteredContext, value: Any) -> Any:
    items = context.meter.items(value)
    return items[0] if items else context.environment.undefined("there is no first item")


def _last(context: MeteredContext, value: Any) -> Any:
    items = context.meter.items(value)
    return items[-1] if items else context.environment.undefined("there is no last item")


def _list(context: MeteredContext, value: Any) -> list[Any]:
    return context.meter.items(value)


def _items(context: MeteredContext, value: Any) -> list[Any]:
    context.meter.spend(2 * len(value))
    return list(jinja2.filters.do_items(value))


def _reverse(context: MeteredContext, value: Any) -> Any:
    items = context.meter.items(value)[::-1]
    return "".join(items) if isinstance(value, str) else items


def _string(context: MeteredContext, value: Any) -> str:
    return context.meter.text(value)


def _join(context: MeteredContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    meter = context.meter
    found = [_attribute(context, item, attribute) for item in meter.items(value)]
    return meter.join(meter.text(d), [meter.text(item) for item in found])


def _replace(context: MeteredContext, value: Any, old: Any, new: Any, count: Any = None) -> str:
    meter = context.meter
    times = -1 if count is None else int(count)
    return meter.replace(meter.text(value), meter.text(old), meter.text(new), times)


def _trim(context: MeteredContext, value: Any, chars: str | None = None) -> str:
    text = context.meter.text(value)
    context.meter.spend(len(text) * len(chars or "") // 64)  # each is searched for in chars
    return text.strip(chars)


def _indent(context: MeteredContext, value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> str:
    length = len(width) if isinstance(width, str) else width
    if length > _MAX_INDENT:
        raise ValueError(f"indent takes at most {_MAX_INDENT} characters")
    text = context.meter.text(value)
    context.meter.spend_text(len(text) + (text.count("\n") + 2) * length)
    return jinja2.filters.do_indent(text, width, *args, **kwargs)


def _format(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> str:
    return context.meter.printf(context.meter.text(value), kwargs or args)


def _round(_context: MeteredContext, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > _MAX_DIGITS:
        raise ValueError(f"round takes at most {_MAX_DIGITS} digits")
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


def _sum(context: MeteredContext, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    total = start
    for item in context.meter.items(value):
        total = context.meter.binary("+", total, _attribute(context, item, attribute))
    return total


def _tojson(
    context: MeteredContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: plain JSON, letters outside ASCII as they are."""
    context.meter.spend_whole([value, indent, separators])
    if (len(indent) if isinstance(indent, str) else indent or 0) > _MAX_INDENT:
        raise ValueError(f"indent takes at most {_MAX_INDENT} characters")
    if any(len(separator) > _MAX_SEPARATOR for separator in separators or ()):
        raise ValueError(f"separators take at most {_MAX_SEPARATOR} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Indentation grows with depth, so it is paid for piece by piece.
    pieces = [encoder.encode(value)] if indent is None else encoder.iterencode(value)
    return "".join(_paid_pieces(context.meter, pieces))


def _paid_pieces(meter: Meter, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        meter.spend_text(len(piece))
        yield piece


def _attribute(context: MeteredContext, item: Any, path: Any) -> Any:
    """An item's attribute by a path such as "function.name"; the item itself for no path."""
    if path is None:
        return item
    for part in path.split(".") if isinstance(path, str) else [path]:
        context.meter.spend(1)
        key = int(part) if isinstance(part, str) and part.isdigit() else part
        item = context.environment.getitem(item, key)
    return item


def _map(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    items = context.meter.items(value or [])
    if args:
        apply = FILTERS[_known(args[0], FILTERS)]
        return [apply(context, item, *args[1:], **kwargs) for item in items]
    found = [_attribute(context, item, kwargs["attribute"]) for item in items]
    default = kwargs.get("default")
    if default is None:
        return found
    return [default if isinstance(item, Undefined) else item for item in found]


def _choose(by_attribute: bool, wanted: bool) -> Filter:
    """select, reject, selectattr and rejectattr."""

    def choose(context: MeteredContext, value: Any, *args: Any) -> list[Any]:
        path, rest = (args[0], args[1:]) if by_attribute else (None, args)
        chosen = []
        for item in context.meter.items(value or []):
            found = _attribute(context, item, path)
            passes = _passes(context, found, *rest) if rest else bool(found)
            if passes == wanted:
                chosen.append(item)
        return chosen

    return choose


def _passes(context: MeteredContext, value: Any, name: Any, *args: Any) -> bool:
    return bool(TESTS[_known(name, TESTS)](context, value, *args))


def _known(name: Any, table: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"no filter or test of the name {str(name)[:100]!r}")
    return name


def _paid(function: Filter) -> Filter:
    """A filter or test as jinja calls it: with the context, and for a price."""

    @pass_context
    def call(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.meter.spend(_FILTER_UNITS)
        return function(context, value, *args, **kwargs)

    return call


def _of_value(test: Callable[..., Any]) -> Test:
    return lambda _context, value, *args: bool(test(value, *args))


def _of_number(test: Callable[..., Any]) -> Test:
    """A test that computes; on text % would format."""

    def apply(_context: MeteredContext, value: Any, *args: Any) -> bool:
        if not all(isinstance(number, int | float) for number in (value, *args)):
            raise TypeError("this test is for numbers")
        return bool(test(value, *args))

    return apply


def _comparing(comparison: str) -> Test:
    return lambda context, value, other: context.meter.compare(value, comparison, other)


_ALIASES = {
    "count": "length",
    "d": "default",
    "e": "escape",
    "equalto": "eq",
    "==": "eq",
    "!=": "ne",
    "lessthan": "lt",
    "<": "lt",
    "<=": "le",
    "greaterthan": "gt",
    ">": "gt",
    ">=": "ge",
}


def _with_aliases(table: dict[str, Filter]) -> dict[str, Filter]:
    paid = {name: _paid(function) for name, function in table.items()}
    return paid | {alias: paid[name] for alias, name in _ALIASES.items() if name in paid}


FILTERS: Mapping[str, Filter] = _with_aliases(
    {
        "abs": _on_whole(abs),
        "capitalize": _on_text(str.capitalize),
        "default": _default,
        "dictsort": _on_whole(jinja2.filters.do_dictsort, _SORT_FACTOR),
        "escape": _on_text(lambda text: str(jinja2.filters.FILTERS["escape"](text))),
        "first": _first,
        "float": _on_whole(jinja2.filters.do_float),
        "format": _format,
        "indent": _indent,
        "int": _on_whole(jinja2.filters.do_int),
        "items": _items,
        "join": _join,
        "last": _last,
        "length": _length,
        "list": _list,
        "lower": _on_text(str.lower),
        "map": _map,
        "max": _on_items(jinja2.filters.do_max),
        "min": _on_items(jinja2.filters.do_min),
        "reject": _choose(by_attribute=False, wanted=False),
        "rejectattr": _choose(by_attribute=True, wanted=False),
        "replace": _replace,
        "reverse": _reverse,
        "round": _round,
        "safe": _string,
        "select": _choose(by_attribute=False, wanted=True),
        "selectattr": _choose(by_attribute=True, wanted=True),
        "sort": _on_items(jinja2.filters.do_sort, _SORT_FACTOR),
        "string": _string,
        "sum": _sum,
        "title": _on_text(jinja2.filters.do_title),
        "tojson": _tojson,
        "trim": _trim,
        "unique": _on_items(_unique),
        "upper": _on_text(str.upper),
    }
)

_JINJA_TESTS: Mapping[str, Any] = jinja2.tests.TESTS
_PLAIN_TESTS = (
    *("defined", "undefined", "none", "string", "number", "integer", "float", "boolean"),
    *("true", "false", "mapping", "sequence", "iterable", "sameas"),
)

TESTS: Mapping[str, Test] = _with_aliases(
    {
        **{name: _of_value(_JINJA_TESTS[name]) for name in _PLAIN_TESTS},
        **{name: _of_number(_JINJA_TESTS[name]) for name in ("even", "odd", "divisibleby")},
        "lower": _on_text(str.islower),
        "upper": _on_text(str.isupper),
        **{name: _comparing(name) for name in ("eq", "ne", "lt", "gt", "in")},
        "le": _comparing("lteq"),
        "ge": _comparing("gteq"),
    }
)
