"""AnswerParser: a completion's text to content, reasoning and tool calls, as the text comes.

Text that may begin a marker is withheld until that is decided, and nothing else is, but white space
at an end of content or reasoning and the few letters between a call's marker and its arguments.
Where the text is split when it is fed makes no difference to the answer.

What begins like a call and is none comes back as content. Arguments in JSON are given while they
come; a call that breaks off after that has been seen by streams, and in `answer` it is content.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.chat.answers import (
    Answer,
    AnswerEvent,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
)
from quire.chat.call_syntax import (
    ParameterTypes,
    ReadCall,
    is_text,
    json_text,
    read_python,
    strict_json,
)
from quire.chat.forms import GENERIC, CallForm, ChatForm
from quire.chat.object_scanner import ObjectScanner

_LETTERS = string.ascii_letters + string.digits
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = {*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "tool_call_id"}
# How a list of calls begins, bounded: text that may begin one is withheld, and looked at again with
# each piece that comes.
_LISTED = re.compile(r"\[\s{0,200}(?=\{)")  # objects
_PYTHON_LIST = re.compile(r"\[\s{0,200}([A-Za-z_][\w.]{0,200})\(")
_MAY_BE_LIST = re.compile(r"\[\s{0,200}(?:[A-Za-z_][\w.]{0,200})?\Z")  # as far as it has come
MAX_HEADER = 600  # characters of a call before its arguments


class CallIds:
    """Ids of one answer's calls, in order: random, or made of `source` and then the same each
    time."""

    def __init__(self, source: str | None = None) -> None:
        self._source = source
        self._count = 0

    def new(self, length: int = 0) -> str:
        """`length`: of letters alone, where the model's form has ids of a fixed length."""
        drawn = self._drawn(length or 24)
        letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in drawn)
        return letters if length else f"call_{letters}"

    def _drawn(self, count: int) -> bytes:
        if self._source is None:
            return secrets.token_bytes(count)
        self._count += 1
        return hashlib.shake_256(f"{self._source}/call/{self._count}".encode()).digest(count)


@dataclass(slots=True)
class _Call:
    """A call that has begun, and the text that it was read from."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    broken: str | None = None  # the text, where it turned out to be no call


class AnswerParser:
    """One for each completion. Without `form` all text is content; without `tools`, there are no
    calls. `tools`: parameters of each tool by its name (see `parameter_types`). `is_thinking`: the
    prompt has opened the reasoning."""

    def __init__(
        self,
        form: ChatForm | None = None,
        tools: ParameterTypes | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        self.call_ids = CallIds()
        self._calls_form: CallForm = GENERIC if form is None else form.calls
        self._separators = self._calls_form.separators
        self._read = self._calls_form.read  # of calls in a syntax of their own, and their end
        self._close = next(iter(self._calls_form.closes), "")
        self._wrappers = () if form is None else form.wrappers
        self._reasoning = None if form is None else form.reasoning
        self._tools: Mapping[str, Mapping[str, bool]] = tools or {}
        self._has_tools = form is not None and bool(tools)
        self._text = ""  # not decided yet
        self._raw = ""  # taken since calls were opened, or since the last whole call
        self._num_searched = 0  # characters of the text that have no end of a call
        self._space = ""  # white space that content or reasoning may end with
        self._events: list[AnswerEvent] = []
        self._said: list[str | _Call] = []  # content and calls, in order
        self._thought: list[str] = []
        self._num_calls = 0
        self.num_reasoning_tokens = 0  # of those that were fed
        self._call: _Call | None = None
        self._object: ObjectScanner | None = None
        self._is_ended = False
        self._is_cut = False
        self._state: Callable[[], bool] = self._content if form is None else self._start
        if is_thinking and self._reasoning is not None:
            self._state = self._thinking

    # ---- what callers use

    def feed(self, text: str, *, num_tokens: int = 0) -> list[AnswerEvent]:
        """What is certain now that this text has come, which so many tokens are."""
        was_thinking = self.is_thinking
        self._text += text
        events = self._run()
        if was_thinking or self.is_thinking:
            self.num_reasoning_tokens += num_tokens
        return events

    def end(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """What was withheld: no text follows. `is_cut`: the completion ended for its length; a
        call's arguments may then be unfinished."""
        self._is_ended, self._is_cut = True, is_cut
        return self._run()

    @property
    def is_thinking(self) -> bool:
        return self._state == self._thinking

    @property
    def may_think(self) -> bool:
        """Whether reasoning goes on or may still begin: then tokens are fed one by one, so that
        those of the reasoning can be counted."""
        return self._reasoning is not None and self._state in (self._start, self._thinking)

    @property
    def answer(self) -> Answer:
        """All that has been said so far."""
        calls = [item for item in self._said if isinstance(item, _Call) and item.broken is None]
        content = "".join(
            item if isinstance(item, str) else item.broken or "" for item in self._said
        )
        return Answer(
            content if content or not calls else None,
            "".join(self._thought) or None,
            tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in calls),
        )

    # ---- states: each takes what it can of the text, and says whether to go on

    def _run(self) -> list[AnswerEvent]:
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def _start(self) -> bool:
        """Before the first letter: reasoning, a call or content."""
        text = self._text.lstrip()
        if not text and not self._is_ended:
            return False
        tags: dict[str, Callable[[], bool]] = {}
        if self._reasoning is not None:  # the end alone: there is no reasoning
            tags = {
                self._reasoning.open: self._thinking,
                self._reasoning.close: self._after_thinking,
            }
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is not None:
            self._text = text[len(tag) :]
            self._state = tags[tag]
        elif not self._is_ended and text and any(tag.startswith(text) for tag in tags):
            return False  # may become one
        else:
            self._state = self._begin_content
        return True

    def _begin_content(self) -> bool:
        """After reasoning, or where there is none: calls that nothing marks, or content."""
        self._state = self._content
        if not (self._has_tools and self._calls_form.bare_json):
            return True
        text = self._text.lstrip()
        if not self._is_ended and _MAY_BE_LIST.match(text):
            self._state = self._begin_content
            return False
        listed, python = _LISTED.match(text), _PYTHON_LIST.match(text)
        if listed is not None or text.startswith("{"):
            self._raw, self._text = "", text
            if listed is not None:
                self._take(listed.end())
                self._separators = "[],"
            self._object = ObjectScanner(is_bare=True)
            self._state = self._in_object
        elif python is not None and python[1] in self._tools:
            self._raw, self._text = "", text
            self._read, self._close = read_python, ""
            self._state = self._in_syntax
        return True

    def _thinking(self) -> bool:
        assert self._reasoning is not None
        close = self._reasoning.close
        at = self._text.find(close)
        if at < 0:
            keep = 0 if self._is_ended else overlap(self._text, close)
            self._think(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        self._think(self._text[:at])
        self._space = ""
        self._text = self._text[at + len(close) :]
        self._state = self._after_thinking
        return True

    def _think(self, text: str) -> None:
        text = self._space + text
        if not self._thought:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._thought.append(shown)
            self._events.append(ReasoningDelta(shown))

    def _after_thinking(self) -> bool:
        """White space between reasoning and content belongs to neither."""
        self._text = self._text.lstrip()
        if not self._text and not self._is_ended:
            return False
        self._state = self._begin_content
        return True

    def _content(self) -> bool:
        opens = (*(self._calls_form.opens if self._has_tools else ()), *self._wrappers)
        found = min(((at, o) for o in opens if (at := self._text.find(o)) >= 0), default=None)
        if found is not None:
            at, opened = found
            self._say(self._text[:at])
            if opened in self._wrappers:
                self._text = self._text[at + len(opened) :]
                return True
            self._raw, self._text = (
                self._text[at : at + len(opened)],
                self._text[at + len(opened) :],
            )
            self._state = self._opened(opened)
            return True
        keep = 0
        if not self._is_ended:
            keep = max((overlap(self._text, opened) for opened in opens), default=0)
        self._say(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        if self._is_ended:
            self._say_space()
        return False

    def _say(self, text: str) -> None:
        """White space at the end is withheld where a call may follow, which drops it."""
        text = self._space + text
        shown = text.rstrip() if self._has_tools else text
        self._space = text[len(shown) :]
        self._say_now(shown)

    def _say_space(self) -> None:
        space, self._space = self._space, ""
        self._say_now(space)

    def _say_now(self, text: str) -> None:
        if text:
            self._said.append(text)
            self._events.append(ContentDelta(text))

    # ---- calls

    def _opened(self, opened: str) -> Callable[[], bool]:
        """The state after a marker that begins calls."""
        form = self._calls_form
        if form.read is not None:
            self._read, self._close = form.read, form.closes[0]
            return self._in_syntax
        if form.header is not None and opened == form.call_open:
            return self._in_header
        return self._between

    def _between(self) -> bool:
        """Before a call, or after one: another, or content again."""
        form = self._calls_form
        self._skip_separators()
        text = self._text
        if not text:
            return self._leave_calls() if self._is_ended else False
        opened = next((mark for mark in form.opens if text.startswith(mark)), None)
        if opened is not None:
            self._take(len(opened))
            self._state = self._opened(opened)
            return True
        if form.header is None and text[0] == "{":
            self._object = ObjectScanner()
            self._state = self._in_object
            return True
        marks = (*form.opens, *form.closes)
        if not self._is_ended and any(mark.startswith(text) for mark in marks):
            return False
        return self._leave_calls()

    def _skip_separators(self) -> None:
        """White space, separators and markers of ends."""
        form = self._calls_form
        while True:
            rest = self._text.lstrip(string.whitespace + self._separators)
            closed = next((mark for mark in form.closes if rest.startswith(mark)), "")
            taken = len(self._text) - len(rest) + len(closed)
            if not taken:
                return
            self._take(taken)

    def _leave_calls(self) -> bool:
        """Content again; a marker without a call was content itself."""
        is_call = bool(self._said) and isinstance(self._said[-1], _Call)
        raw, self._raw = self._raw, ""
        self._state = self._content
        if not (is_call and _is_closed(raw, self._calls_form, self._separators)):
            self._fail(raw)
        self._separators = self._calls_form.separators
        return True

    def _fail(self, raw: str) -> None:
        """It was no call after all."""
        self._say_space()
        self._say_now(raw)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self._raw += taken
        return taken

    def _refuse(self) -> bool:
        """What was opened is no call: its text is content, and content follows."""
        raw, self._raw = self._raw, ""
        call, self._call = self._call, None
        self._object = None
        self._state = self._content
        if call is None:
            self._fail(raw)
            return True
        given = "".join(call.arguments)
        call.broken = raw
        rest = raw[raw.rfind(given) + len(given) :]
        if rest:  # streams have seen the call up to here
            self._events.append(ContentDelta(rest))
        return True

    def _in_header(self) -> bool:
        """The name of a call whose arguments follow in JSON."""
        header = self._calls_form.header
        assert header is not None
        found = header.match(self._text)
        if found is None:
            if self._is_ended or len(self._text) > MAX_HEADER:
                return self._refuse()
            return False
        self._take(found.end())
        self._object = ObjectScanner(call_name=found["name"])
        self._begin(found["name"], found.groupdict().get("id"))
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        """A call's JSON: the whole call, or its arguments where its name came before."""
        scanner = self._object
        assert scanner is not None
        end = scanner.scan(self._text)
        taken = self._take(end)
        if scanner.is_bare and not self._may_be_call(scanner):
            return self._refuse()
        self._give_arguments(scanner, taken)
        if scanner.is_done:
            return self._end_object(scanner)
        if not self._is_ended:
            return False
        if self._is_cut and self._call is not None:
            self._call = None
            self._raw = ""
            self._state = self._content
            return True
        return self._refuse()

    def _may_be_call(self, scanner: ObjectScanner) -> bool:
        """Of JSON that nothing marks as a call."""
        if any(key not in _KNOWN_KEYS for key in scanner.values):
            return False
        name = scanner.text_of(_NAME_KEYS)
        return name is None or name in self._tools

    def _give_arguments(self, scanner: ObjectScanner, taken: str) -> None:
        """Give what has come of the arguments, once the name is known."""
        if scanner.call_name is not None:
            self._add_arguments(taken)
            return
        name, span = scanner.text_of(_NAME_KEYS), scanner.span_of(_ARGUMENT_KEYS)
        if name is None or span is None:
            return
        start, end = span
        if self._call is None:
            if scanner.text[start] != "{":
                return
            self._begin(name)
        self._add_arguments(scanner.since(start + scanner.num_given, end))
        scanner.num_given = end - start

    def _end_object(self, scanner: ObjectScanner) -> bool:
        read = scanner.call_name is None
        try:
            value = strict_json(scanner.text)
            if read:
                self._end_call(value)
        except (ValueError, RecursionError):
            return self._refuse()
        if scanner.is_bare and self._call is None:
            return self._refuse()
        self._call = self._object = None
        self._raw = ""
        self._state = self._between
        return True

    def _end_call(self, value: Any) -> None:
        """A whole call as JSON; its arguments may have been given already."""
        if isinstance(value.get("function"), dict):
            value = value["function"]
        if self._call is not None:
            return
        name = next((value[key] for key in _NAME_KEYS if key in value), None)
        arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
        if not isinstance(name, str) or not name or not is_text(name):
            raise ValueError("a call has a name")
        if isinstance(arguments, str) and is_text(arguments):
            text, arguments = arguments, strict_json(arguments)
        else:
            text = json_text(arguments)
        if not isinstance(arguments, dict) and arguments is not None:
            raise ValueError("arguments are an object")
        self._begin(name)
        self._add_arguments(text if arguments is not None else "{}")

    def _in_syntax(self) -> bool:
        """Calls in a syntax of their own, read when they are whole."""
        close = self._close
        at = self._text.find(close, self._num_searched) if close else -1
        if at < 0 and not self._is_ended:
            self._num_searched = max(0, len(self._text) - len(close))
            return False
        self._num_searched = 0
        body = self._text if at < 0 else self._text[:at]
        calls = self._calls_in(body)
        self._take(len(body) + (len(close) if at >= 0 else 0))
        if calls is None:
            return self._refuse()
        for call in calls:
            self._begin(call.name)
            self._add_arguments(call.arguments)
        self._call, self._raw = None, ""
        self._state = self._between
        return True

    def _calls_in(self, text: str) -> list[ReadCall] | None:
        assert self._read is not None
        try:
            return self._read(text, self._tools)
        except (ValueError, RecursionError):
            return None

    def _begin(self, name: str, given_id: str | None = None) -> None:
        self._space = ""
        call = _Call(given_id or self.call_ids.new(self._calls_form.id_length), name)
        self._said.append(call)
        self._call = call
        self._events.append(ToolCallBegin(self._num_calls, call.id, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text and self._call is not None:
            self._call.arguments.append(text)
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))


def _is_closed(raw: str, form: CallForm, separators: str) -> bool:
    """Whether only separators and ends came since the last call."""
    rest = raw
    for mark in form.closes:
        rest = rest.replace(mark, "")
    return not rest.strip(string.whitespace + separators)


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker` without being all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
