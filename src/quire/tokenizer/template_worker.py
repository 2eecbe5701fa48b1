"""The process in which chat templates are rendered: jinja as transformers sets it up, no more.

A template comes with a model file, so it is not trusted to end, to stay small, or to keep inside of
jinja's sandbox. Here it may take what the limits of this process allow; whoever goes over them is
ended by the kernel, and `template_process` starts another. The process imports this module,
`template_text`, `core.lockdown`, jinja2 and the standard library alone: its start costs little.
"""

import codecs
import datetime
import importlib
import json
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypedDict

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.core.lockdown import lock_down
from quire.tokenizer.template_text import MarkingFormatter, Span, TemplateText, joined, marks_of

MEMORY_BYTES = 512 << 20  # of address space, Python's own included
RESIDENT_BYTES = 128 << 20  # a process that uses more is replaced after its answer
MAX_TEMPLATES = 16  # that a process keeps compiled
MAX_RECURSION = 2000  # of calls; transformers' templates have the interpreter's thousand
ENDLESS = "it loops or grows without end"
_CHUNK_BYTES = 1 << 15
HEADER = struct.Struct("<II")  # the lengths of what follows: JSON, and the values in JSON

# Roles that count as the template's own text: templates write <|user|> as '<|' + role + '|>'. Any
# other role is text of the request.
ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "model", "ipython"}
)


# ---- jinja as transformers has it


class _MarkingGenerator(CodeGenerator):
    """Compiles the strings of a template to TemplateTexts."""

    def _marked(self, text: str) -> str:
        texts = self.environment.texts  # type: ignore[attr-defined]
        texts.append(TemplateText.whole(text))
        return f"environment.texts[{len(texts) - 1}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if type(node.value) is str:
            self.write(self._marked(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """message['role']: a plain key is found faster."""
        if isinstance(node.arg, nodes.Const):
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(f", {node.arg.value!r})")
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._marked("".join(group))


class _Generation(Extension):
    """{% generation %}: marks, for training, what the model wrote; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, whose strings are TemplateTexts."""

    code_generator_class = _MarkingGenerator
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # it would make lists of constants before they can be marked
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            cache_size=0,
        )
        self.texts: list[TemplateText] = []
        self.filters |= {"tojson": _tojson, "join": _join(self.filters["join"])}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = getattr(value, "__self__", None)
        if type(form) is TemplateText and form._is_whole and value.__name__ == "format":
            return lambda *args, **kwargs: MarkingFormatter(self).marked(form, args, kwargs)
        return super().wrap_str_format(value)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_NOTHING = TemplateText.whole("")


def _join(original: Callable[..., str]) -> Callable[..., str]:
    """Jinja's filter, whose separator is a plain string unless one is given."""

    @pass_eval_context
    def join(context: EvalContext, value: Any, d: str = _NOTHING, attribute: Any = None) -> str:
        separator = d if isinstance(d, TemplateText) else TemplateText(d)
        return original(context, value, separator, attribute)

    return join


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.datetime.now().strftime(format)


# ---- answering


class Question(TypedDict, total=False):
    """What the parent asks: to compile `source`, and to render the values that follow, if any."""

    key: str  # of the template
    source: str  # where this process may not have compiled it
    seconds: float  # of processor time
    tokens: dict[str, str]  # bos_token and eos_token
    max_characters: int  # of the prompt


class Answer(TypedDict, total=False):
    """Text and marks, or the kind of an error and its reason; nothing where it only compiled."""

    text: str
    spans: list[Span]  # of the text that the template wrote
    error: str  # syntax, unknown (not compiled), refused, failed or stopped
    reason: str
    last: bool  # the process ends after it


class _OutputLimitError(Exception):
    """The template has written more than it may."""


class _Templates:
    """The templates that were compiled last, by the key the asker gave them."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[str, Template] = OrderedDict()

    def get(self, key: str, source: str | None) -> Template | None:
        if source is not None:
            self._compiled[key] = TemplateEnvironment().from_string(source)
        if key in self._compiled:
            self._compiled.move_to_end(key)
        if len(self._compiled) > MAX_TEMPLATES:
            self._compiled.popitem(last=False)
        return self._compiled.get(key)


def answer(templates: _Templates, head: Question, values: bytes) -> Answer:
    """The reply to one request: text and marks, or the kind of an error and its reason."""
    try:
        template = templates.get(head["key"], head.get("source"))
    except TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except Exception as error:
        return _error("syntax", _reason(error), last=isinstance(error, MemoryError))
    if template is None:
        return _error("unknown", "")
    if not values:
        return {}
    try:
        marked = _marked_values(decoded(values), head["tokens"])
        text = _render(template, marked, head["max_characters"])
        return {"text": text, "spans": [span for span in marks_of(text) if span[0] < span[1]]}
    except _OutputLimitError:
        return _error("stopped", f"{ENDLESS}; it may write {head['max_characters']} characters")
    except MemoryError:
        return _error("stopped", f"{ENDLESS}; it may hold {MEMORY_BYTES >> 20} MiB", last=True)
    except (SecurityError, RecursionError) as error:
        return _error("stopped", _reason(error), last=isinstance(error, RecursionError))
    except Exception as error:
        if type(error) is TemplateError:  # by raise_exception
            return _error("refused", str(error))
        line = _line(template, error.__traceback__)
        return _error("failed", f"{line}{type(error).__name__}: {str(error)[:1000]}")


def _error(kind: str, reason: str, *, last: bool = False) -> Answer:
    return {"error": kind, "reason": reason[:2000], "last": last}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _marked_values(values: dict[str, Any], tokens: Mapping[str, str]) -> dict[str, Any]:
    """The template's variables: the request's data; tokens and roles as the template's own text."""
    for message in values["messages"]:
        if message["role"] in ROLES:
            message["role"] = TemplateText.whole(message["role"])
    own = {name: TemplateText.whole(text) for name, text in tokens.items()}
    return values | own


def _render(template: Template, values: dict[str, Any], max_characters: int) -> str:
    pieces = []
    left = max_characters
    for piece in template.root_render_func(template.new_context(values)):
        left -= len(piece)
        if left < 0:
            raise _OutputLimitError
        pieces.append(piece)
    return joined(pieces)


def _line(template: Template, traceback: TracebackType | None) -> str:
    """Where in the template an error arose, such as "line 3: "."""
    code = template.root_render_func.__code__
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == code.co_filename:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return "" if line is None else f"line {line}: "


# ---- the process


def read_frame(receive: Callable[[int], bytes], max_bytes: int) -> tuple[bytes, bytes]:
    """The two parts of the next frame; ConnectionError where the other side has closed.

    One request at a time: nothing follows a frame until it is answered.
    """
    buffer = bytearray()
    size = HEADER.size
    first = 0
    while len(buffer) < size:
        part = receive(_CHUNK_BYTES)
        if not part:
            raise ConnectionError
        buffer += part
        if size == HEADER.size and len(buffer) >= size:
            first, second = HEADER.unpack_from(buffer)
            size += first + second
            if size > max_bytes:
                raise ValueError(f"a frame of {size} bytes")
    split = HEADER.size + first
    return bytes(buffer[HEADER.size : split]), bytes(buffer[split:])


def _write(content: bytes) -> None:
    view = memoryview(HEADER.pack(len(content), 0) + content)
    while view:
        view = view[os.write(0, view) :]


def encoded(value: Any) -> bytes:
    """JSON; text that is no Unicode, half a surrogate pair, goes through as it is.

    Written message by message: one call of the encoder lets no other thread run until it is done.
    """
    return "".join(_encoded_parts(value, 3)).encode("utf-8", "surrogatepass")


def _encoded_parts(value: Any, depth: int) -> Iterator[str]:
    """The outermost objects and lists, down to a message's fields, item by item."""
    mark = ""
    if depth and isinstance(value, dict):
        yield "{"
        for name, item in value.items():
            yield f"{mark}{json.dumps(name, ensure_ascii=False)}:"
            yield from _encoded_parts(item, depth - 1)
            mark = ","
        yield "}"
    elif depth and isinstance(value, list):
        yield "["
        for item in value:
            yield mark
            yield from _encoded_parts(item, depth - 1)
            mark = ","
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def decoded(content: bytes) -> Any:
    return json.loads(content.decode("utf-8", "surrogatepass"))


def _import_eagerly() -> None:
    """Load what is otherwise loaded late (modules, codecs, time zone) while files can be read."""
    for module in ("html", "jinja2.debug", "jinja2.constants", "logging", "pprint", "textwrap"):
        importlib.import_module(module)
    for codec in ("ascii", "latin-1", "unicode_escape", "utf-16", "utf-32", "idna"):
        codecs.lookup(codec)
    _strftime_now("%c")


def _resident_bytes(statm: int | None) -> int:
    if statm is None:
        return 0
    return int(os.pread(statm, 200, 0).split()[1]) * resource.getpagesize()


def main() -> None:
    """Answer requests on standard input, a socket, until it closes."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux
        statm = None
    _import_eagerly()
    lock_down(None, MEMORY_BYTES, dies_with_parent=False)
    sys.setrecursionlimit(MAX_RECURSION)
    templates = _Templates()
    while True:
        try:
            head, values = read_frame(partial(os.read, 0), sys.maxsize)
        except ConnectionError:  # the parent closed the socket
            return
        request = decoded(head)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # of processor time; it kills
        reply = answer(templates, request, values)
        reply["last"] = reply.get("last") or _resident_bytes(statm) > RESIDENT_BYTES
        content = encoded(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(content)
