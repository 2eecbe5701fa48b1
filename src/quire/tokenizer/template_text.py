"""TemplateText: a string that knows which of its characters were written in the chat template.

A control token in a prompt is structure if the template wrote it, and mere letters if a request
did. So every string in a template, the model's own tokens and the usual names of roles are a
TemplateText when they are rendered; all other text is the request's. It is a str to everything that
looks at it, so that templates do as they do without it, and its operations keep track of where its
characters come from. An operation without a rule here gives a plain str: text can lose its marks,
but none can gain a mark it should not have.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from jinja2.sandbox import SandboxedFormatter

Span = tuple[int, int]


class TemplateText(str):
    """A string some of whose characters, in `_spans`, were written in the template.

    Spans are in order and disjoint; two may touch where (even empty) request text was between them.
    """

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: object = "", spans: Iterable[Span] = ()) -> "TemplateText":
        return _made(str(text), tuple(spans))

    @classmethod
    def whole(cls, text: str) -> "TemplateText":
        """Text that the template wrote, all of it."""
        return cls(text, [(0, len(text))])

    @property
    def _is_whole(self) -> bool:
        return self._spans == ((0, len(self)),)

    def __str__(self) -> str:
        return self  # str(x) keeps the marks

    def __add__(self, other: Any) -> Any:
        """The most frequent operation, so it has a fast path."""
        if type(other) is str:
            return _made(str.__add__(self, other), self._spans)
        return joined((self, other)) if type(other) is TemplateText else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return joined((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, count: Any) -> Any:
        if not isinstance(count, int):
            return super().__mul__(count)
        if self._is_whole:
            return TemplateText.whole(super().__mul__(count))
        return joined([self] * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return _same(super().__mod__(values), lambda: _formatted(self, values))

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        text = super().__getitem__(index)
        if not isinstance(index, slice):
            start = range(len(self))[index]
            return _cut(self, start, start + 1)
        start, stop, step = index.indices(len(self))
        return _cut(self, start, stop) if step == 1 else text

    def strip(self, chars: str | None = None) -> str:
        return _stripped(self, super().lstrip(chars), super().rstrip(chars))

    def lstrip(self, chars: str | None = None) -> str:
        return _stripped(self, super().lstrip(chars), self)

    def rstrip(self, chars: str | None = None) -> str:
        return _stripped(self, self, super().rstrip(chars))

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return _located(self, super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return _located(self, super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return _located(self, super().splitlines(keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = _located(self, list(super().partition(sep)), 0)
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = _located(self, list(super().rpartition(sep)), 0)
        return head, middle, tail

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return _same(
            super().replace(old, new, count),
            lambda: TemplateText.join(TemplateText(new, marks_of(new)), self.split(old, count)),
        )

    def join(self, parts: Iterable[str], /) -> str:
        listed = list(parts)
        text = super().join(listed)  # raises where a part is no text
        between = [piece for part in listed for piece in (self, part)][1:]
        return _same(text, lambda: joined(between))


def _made(text: str, spans: tuple[Span, ...]) -> TemplateText:
    made = str.__new__(TemplateText, text)
    made._spans = spans
    return made


def marks_of(text: str) -> tuple[Span, ...]:
    return text._spans if isinstance(text, TemplateText) else ()


def joined(pieces: Iterable[str]) -> str:
    """Pieces as one text; marks touch and become one only where two marked pieces meet."""
    listed = pieces if isinstance(pieces, tuple | list) else list(pieces)
    spans: list[Span] = []
    position = 0
    opened = -1  # the start of a span that reaches the end of the piece before; -1: none
    for piece in listed:
        length = len(piece)
        if type(piece) is not TemplateText or not piece._spans:
            opened = -1
        else:
            for start, end in piece._spans:
                if opened >= 0 and start == 0:
                    spans[-1] = (opened, position + end)
                else:
                    spans.append((position + start, position + end))
                opened = -1
            if end == length:
                opened = spans[-1][0]
        position += length
    text = "".join(listed)
    return _made(text, tuple(spans)) if spans else text


def _same(text: str, marked: Callable[[], str]) -> str:
    """The marked text if it is the same text, else the text without marks."""
    try:
        other = marked()
    except Exception:
        return text
    return other if other == text else text


def _cut(text: TemplateText, start: int, stop: int) -> str:
    stop = max(start, stop)
    inside = (
        (max(begin, start) - start, min(end, stop) - start)
        for begin, end in text._spans
        if begin < stop and end > start
    )
    return TemplateText(str.__getitem__(text, slice(start, stop)), inside)


def _stripped(text: TemplateText, from_left: str, from_right: str) -> str:
    return _cut(text, len(text) - len(from_left), len(from_right))


def _located(text: TemplateText, pieces: list[str], gap: int) -> list[str]:
    """Pieces of a text, in order and `gap` characters or any blanks apart, with their marks."""
    found = []
    position = 0
    for piece in pieces:
        start = position if gap else text.find(piece, position)
        found.append(_cut(text, start, start + len(piece)))
        position = start + len(piece) + gap
    return [mine if mine == piece else piece for mine, piece in zip(found, pieces, strict=True)]


_DIRECTIVE = re.compile(r"%(?:\((?P<key>\w+)\))?[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrsa%]")


def _formatted(template: TemplateText, values: Any) -> str:
    """template % values piece by piece."""
    plain = str.__str__(template)
    given = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    position = 0
    for match in _DIRECTIVE.finditer(plain):
        pieces.append(template[position : match.start()])
        directive = match.group()
        if directive.endswith("%"):
            pieces.append(template[match.start() : match.start() + 1])
        elif match["key"]:
            pieces.append(directive % values)
        else:
            value = next(given)
            pieces.append(str(value) if directive == "%s" else directive % (value,))
        position = match.end()
    return joined([*pieces, template[position:]])


class MarkingFormatter(SandboxedFormatter):
    """str.format for a format that the template wrote: the text between its fields is its own."""

    def marked(self, form: str, args: Any, kwargs: Any) -> str:
        self._form, self._pieces = form, list[str]()
        text = self.vformat(form, args, kwargs)
        return _same(text, lambda: joined(self._pieces))

    def parse(self, format_string: str) -> Iterator[Any]:
        for part in super().parse(format_string):
            if format_string is self._form:
                self._pieces.append(TemplateText.whole(part[0]))
            yield part

    def format_field(self, value: Any, format_spec: str) -> Any:
        text = super().format_field(value, format_spec)
        self._pieces.append(value if isinstance(value, str) and value == text else text)
        return text
