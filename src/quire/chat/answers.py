"""Answer: what a completion says, and the events of which it is made while its text comes."""

from dataclasses import dataclass
from typing import NamedTuple


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON text


class Answer(NamedTuple):
    """The message that a completion is. `content` is None where there are tool calls alone."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call begins; its arguments follow. `index` counts the calls of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ArgumentsDelta
