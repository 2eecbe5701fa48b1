"""The sandbox of chat templates: a subset of jinja whose every operation is allowed and paid for.

A template is parsed by jinja, checked against the lists of what templates may use, rewritten so
that loops, comparisons and the like go through the meter, and compiled by jinja. What it can reach
is closed: JSON values, the functions and methods of `template_methods`, and its own macros.
"""

from collections.abc import Iterator
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.tokenizer.template_filters import FILTERS, TESTS, MeteredContext
from quire.tokenizer.template_meter import CHARACTERS_PER_UNIT, check_key
from quire.tokenizer.template_methods import FUNCTIONS, Method, find_method, loop_attribute

MAX_LOOP_DEPTH = 16
_MACRO_UNITS = 16

_ALLOWED_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Break),
    *(nodes.Continue, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.NSRef, nodes.Name, nodes.Const),
    *(nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.CondExpr),
    *(nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword, nodes.Getattr, nodes.Getitem),
    *(nodes.Slice, nodes.Compare, nodes.Operand, nodes.Concat),
    *(nodes.BinExpr, nodes.UnaryExpr),
)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, narrowed to what chat templates need."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    context_class = MeteredContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before it is paid for
            finalize=_print,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            cache_size=0,
        )
        self.globals = dict(FUNCTIONS)
        self.filters = {**FILTERS, **_OPERATIONS}
        self.tests = dict(TESTS)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute: a method or attribute that templates know, or else a key."""
        method = find_method(obj, attribute)
        if method is not None:
            return method
        if isinstance(obj, Namespace | LoopContext):
            return self._special_attribute(obj, attribute)
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument]: an item, or else a method of that name."""
        if isinstance(obj, Undefined):
            return obj[argument]  # raises, saying what is undefined
        if isinstance(obj, dict | list | tuple | str | range):
            check_key(argument)
            try:
                return obj[argument]
            except (LookupError, TypeError):
                pass
        if not isinstance(argument, str):
            return self.undefined(obj=obj, name=str(argument) if type(argument) is int else None)
        method = find_method(obj, argument)
        if method is None and hasattr(type(obj), argument):
            raise SecurityError(f"it reads {argument!r} of a {type(obj).__name__}")
        return self.undefined(obj=obj, name=argument) if method is None else method

    def _special_attribute(self, obj: Namespace | LoopContext, attribute: str) -> Any:
        try:
            if isinstance(obj, LoopContext):
                return loop_attribute(obj, attribute)
            return getattr(obj, attribute)
        except AttributeError:
            return self.undefined(obj=obj, name=attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """__obj(*args, **kwargs), the names chosen so that no keyword is in the way."""
        assert isinstance(__context, MeteredContext)
        for name in ("_loop_vars", "_block_vars"):  # jinja's own, for functions that want them
            kwargs.pop(name, None)
        if isinstance(__obj, Method):
            return __obj.call(__context.meter, args, kwargs)
        if isinstance(__obj, Macro | Undefined):  # calling what is undefined says so
            __context.meter.spend(_MACRO_UNITS)
            return __obj(*args, **kwargs)
        raise SecurityError(f"a template may not call a {type(__obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, MeteredContext)
        return context.meter.binary(operator, left, right)


@pass_context
def _print(context: MeteredContext, value: Any) -> str:
    return context.meter.text(value)


@pass_context
def _counted(context: MeteredContext, iterable: Any, units: int) -> Iterator[Any]:
    """The items of a loop, each paying for one pass through the loop's body."""
    if not isinstance(iterable, str | list | tuple | dict | range | Undefined):
        raise TypeError(f"a {type(iterable).__name__} cannot be looped over")
    for item in iterable:
        context.meter.spend(units)
        yield item


@pass_context
def _spent(context: MeteredContext, value: Any, units: int) -> Any:
    context.meter.spend(units)
    return value


@pass_context
def _compared(context: MeteredContext, left: Any, comparison: str, right: Any) -> Any:
    return context.meter.compare(left, comparison, right)


@pass_context
def _concatenated(context: MeteredContext, *values: Any) -> str:
    return context.meter.join("", [context.meter.text(value) for value in values])


@pass_context
def _sliced(context: MeteredContext, value: Any, start: Any, stop: Any, step: Any) -> Any:
    if isinstance(value, str | list | tuple | range):
        context.meter.spend_text(len(value) * (1 if isinstance(value, str) else 8))
        return value[start:stop:step]
    return context.environment.undefined(obj=value, name="a slice")


def _checked_key(key: Any) -> Any:
    check_key(key)
    return key


# No template can name these: they are no identifiers.
_OPERATIONS = {
    "<counted>": _counted,
    "<spent>": _spent,
    "<compared>": _compared,
    "<concatenated>": _concatenated,
    "<sliced>": _sliced,
    "<key>": _checked_key,
}


class _GenerationTag(Extension):
    """{% generation %}: marks, for training, what the model wrote; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_syntax(template: nodes.Template) -> None:
    """Refuse, by SecurityError, what is outside the subset; must come before `metered`."""
    _check_node(template, 0)


def _check_node(node: nodes.Node, loop_depth: int) -> None:
    _check_kind(node)
    if isinstance(node, nodes.For):
        loop_depth += 1
        if loop_depth > MAX_LOOP_DEPTH:
            raise SecurityError(f"it nests more than {MAX_LOOP_DEPTH} loops")
    for child in node.iter_child_nodes():
        _check_node(child, loop_depth)


def _check_kind(node: nodes.Node) -> None:
    if not isinstance(node, _ALLOWED_NODES):
        raise SecurityError(f"it uses {type(node).__name__}, which chat templates may not")
    if isinstance(node, nodes.Filter | nodes.Test):
        table = FILTERS if isinstance(node, nodes.Filter) else TESTS
        if node.name not in table:
            kind = type(node).__name__.lower()
            raise SecurityError(
                f"it uses the {kind} {node.name!r}; allowed: {', '.join(sorted(table))}"
            )
    if isinstance(node, nodes.Filter | nodes.Test | nodes.Call) and (
        node.dyn_args is not None or node.dyn_kwargs is not None
    ):
        raise SecurityError("it passes arguments by * or **")
    if isinstance(node, nodes.For) and node.recursive:
        raise SecurityError("it has a recursive loop")
    if isinstance(node, nodes.Compare) and len(node.ops) > 1:
        raise SecurityError("it chains comparisons")
    if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
        raise SecurityError(f"it reads the attribute {node.attr!r}")


class Metered(NodeTransformer):
    """Rewrites a template so that all work that can repeat or grow is paid for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        units = _units(node)
        self.generic_visit(node)
        node.iter = _operation(node.iter, "<counted>", nodes.Const(units))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._pay_on_entry(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._pay_on_entry(node)

    def _pay_on_entry(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        payment = _operation(nodes.Const(None), "<spent>", nodes.Const(_units(node)))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(payment))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operand = node.ops[0]
        return _operation(node.expr, "<compared>", nodes.Const(operand.op), operand.expr)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _operation(node.nodes[0], "<concatenated>", *node.nodes[1:])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        given = [bound or nodes.Const(None) for bound in bounds]
        return _operation(node.node, "<sliced>", *given)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _operation(node.key, "<key>")
        return node


def _operation(value: nodes.Node, name: str, *args: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


def _units(node: nodes.Node) -> int:
    """What one pass through a node costs at most, loops and calls in it apart."""
    return 1 + sum(
        1 + len(part.data) // CHARACTERS_PER_UNIT if isinstance(part, nodes.TemplateData) else 1
        for part in node.find_all(nodes.Node)
    )
