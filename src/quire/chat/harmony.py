"""HarmonyParser: answers in gpt-oss's format; MuseParser: in Muse's, which is like it."""

import re

from quire.chat.call_syntax import ParameterTypes, strict_json
from quire.chat.forms import MUSE, ChatForm
from quire.chat.parser import MAX_HEADER, AnswerParser, overlap

_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# How a header begins, and how as far as it has come.
_BEGIN = re.compile(r"\Z|<\||to=|assistant")
_MAY_BEGIN = re.compile(_BEGIN.pattern + r"|<\Z|a(?:s(?:s(?:i(?:s(?:t(?:an?)?)?)?)?)?)?\Z|to?\Z")


class HarmonyParser(AnswerParser):
    """Of gpt-oss's format: messages with a channel each, and a recipient where they are calls."""

    _ends: tuple[str, ...] = _MESSAGE_ENDS

    def __init__(self, form: ChatForm, tools: ParameterTypes | None = None) -> None:
        super().__init__(form, tools)
        self._is_reasoning = False
        self._state = self._message_header

    @property
    def is_thinking(self) -> bool:
        return self._is_reasoning

    @property
    def may_think(self) -> bool:
        return self._state != self._content

    def _message_header(self) -> bool:
        """Up to <|message|>: the channel and the recipient."""
        head, found, rest = self._text.partition("<|message|>")
        begin = _BEGIN if found else _MAY_BEGIN
        if len(head) > MAX_HEADER or not begin.match(head.lstrip()):
            self._state = self._content  # not the format at all
            return True
        if not found:
            if self._is_ended and "<|" not in head:
                self._say_now(head)
            self._text = "" if self._is_ended else self._text
            return False
        self._raw, self._text = head + found, rest
        self._state = self._message
        self._begin_message(head)
        return True

    def _begin_message(self, head: str) -> None:
        to = _RECIPIENT.search(head)
        self._is_reasoning = "<|channel|>analysis" in head and to is None
        if to is not None and self._has_tools:
            self._begin(to[1].removeprefix("functions."))

    def _message(self) -> bool:
        found = min(
            ((at, mark) for mark in self._ends if (at := self._text.find(mark)) >= 0),
            default=None,
        )
        if found is not None:
            at, mark = found
            self._give(self._text[:at])
            self._text = self._text[at + len(mark) if mark != "<|start|>" else at :]
            self._end_message(is_whole=True)
            return True
        keep = 0
        if not self._is_ended:
            keep = max(overlap(self._text, mark) for mark in self._ends)
        self._give(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        if self._is_ended:
            self._end_message(is_whole=not self._is_cut)
        return False

    def _give(self, text: str) -> None:
        if self._is_reasoning:
            self._think(text)
        elif self._call is not None:
            self._raw += text
            self._add_arguments(text)
        else:
            self._say_now(text)

    def _end_message(self, *, is_whole: bool) -> None:
        self._is_reasoning = False
        self._space = ""
        self._state = self._message_header
        if self._call is not None and is_whole:
            try:
                if not isinstance(strict_json("".join(self._call.arguments)), dict):
                    raise ValueError("arguments are an object")
            except (ValueError, RecursionError):
                self._call.broken = "".join(self._call.arguments)
        self._call = None


class MuseParser(HarmonyParser):
    """Messages to the model itself are reasoning, those to the user content, and those to tools
    hold calls."""

    _ends = ("<|eom|>", "<|eot|>", "<|start|>")
    _written: list[str] | None = None  # of a message that holds calls

    def _begin_message(self, head: str) -> None:
        to = _RECIPIENT.search(head)
        self._is_reasoning = to is not None and to[1] == "self"
        if to is not None and to[1] not in ("self", "user") and self._has_tools:
            self._written = []

    def _give(self, text: str) -> None:
        if self._written is not None:
            self._written.append(text)
        else:
            super()._give(text)

    def _end_message(self, *, is_whole: bool) -> None:
        if self._written is not None:
            text, self._written = "".join(self._written), None
            calls = self._calls_in(text)
            for call in calls or ():
                self._begin(call.name)
                self._add_arguments(call.arguments)
            if calls is None:
                self._say_now(text)
            self._call = None
        super()._end_message(is_whole=is_whole)


def parser_of(
    form: ChatForm, tools: ParameterTypes | None = None, *, is_thinking: bool = False
) -> AnswerParser:
    """A parser for one completion; see AnswerParser."""
    if form.is_harmony:
        return HarmonyParser(form, tools)
    if form.calls is MUSE:
        return MuseParser(form, tools)
    return AnswerParser(form, tools, is_thinking=is_thinking)
