"""Answers of chat models: content, reasoning and tool calls, taken from a completion's text."""

from quire.chat.answers import (
    Answer,
    AnswerEvent,
    AnswerParser,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
)

__all__ = [
    "Answer",
    "AnswerEvent",
    "AnswerParser",
    "ArgumentsDelta",
    "ContentDelta",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallBegin",
]
