"""Answers of chat models: content, reasoning and tool calls, taken from a completion's text."""

from quire.chat.answers import (
    Answer,
    AnswerEvent,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
)
from quire.chat.call_syntax import parameter_types
from quire.chat.forms import ChatForm, form_of
from quire.chat.harmony import parser_of
from quire.chat.parser import AnswerParser, CallIds

__all__ = [
    "Answer",
    "AnswerEvent",
    "AnswerParser",
    "ArgumentsDelta",
    "CallIds",
    "ChatForm",
    "ContentDelta",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallBegin",
    "form_of",
    "parameter_types",
    "parser_of",
]
