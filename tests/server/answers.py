"""Calls without a server, for frames and replies: the events of an answer go in, bytes come out."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from quire.chat import (
    Answer,
    AnswerEvent,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
)
from quire.core.request import Completion, FinishReason, RequestMetrics, RequestOutput, Status
from quire.core.sampling import SamplingParams
from quire.llm.prompts import Prepared
from quire.server.answers.store import AnswerLimits, AnswerStore
from quire.server.calls import Call
from quire.server.dialect import Choice, GenerationCall
from quire.server.replies import FinishWord
from quire.server.schemas import ChatRequest

EVENTS: tuple[AnswerEvent, ...] = (
    ReasoningDelta("Let me "),
    ReasoningDelta("see."),
    ContentDelta("I look "),
    ContentDelta("it up."),
    ToolCallBegin(0, "call_a", "weather"),
    ArgumentsDelta(0, '{"city":'),
    ArgumentsDelta(0, '"Oslo"}'),
    ToolCallBegin(1, "call_b", "time"),
    ArgumentsDelta(1, "{}"),
)
ANSWER = Answer(
    "I look it up.",
    "Let me see.",
    (ToolCall("call_a", "weather", '{"city":"Oslo"}'), ToolCall("call_b", "time", "{}")),
)


def service(max_stored: int = 10) -> Any:
    store = AnswerStore(limits=AnswerLimits(max_stored, 1 << 20))
    return SimpleNamespace(name="tiny", responses=store)


def generation(kept: Any) -> GenerationCall:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    prompts = [(Prepared([1, 2, 3]), SamplingParams(temperature=0.5))]
    llm = cast(Any, SimpleNamespace(tokenizer=None))
    call = Call("POST", "/v1/somewhere", "an-id")
    return GenerationCall(body, prompts, call, llm, "answer-id", 1000, kept)


def ended(
    answer: Answer, word: FinishWord, stop_reason: str | int | None = None
) -> tuple[list[RequestOutput], list[Choice]]:
    """What a request leaves when its answer has ended so: 3 prompt tokens, 2 of them cached."""
    reason = FinishReason.LENGTH if word == "length" else FinishReason.STOP
    completion = Completion(0, [7, 8, 9, 10], finish_reason=reason, stop_reason=stop_reason)
    metrics = RequestMetrics(arrived_at=0.0, num_cached_tokens=2)
    output = RequestOutput("id", (1, 2, 3), [completion], metrics, Status.FINISHED)
    return [output], [Choice(0, completion, answer, word)]


def stream_of(
    frames: Any, events: Sequence[AnswerEvent], answer: Answer, word: FinishWord = "tool_calls"
) -> list[dict[str, Any]]:
    """The data of all events that frames write for an answer, one event of it at a time."""
    written = frames.opening(0)
    for event in events:
        written += frames.chunk(0, [event], [], None)
    written += frames.chunk(0, [], [], word)
    return data_of(written + frames.ending(*ended(answer, word)))


def data_of(written: bytes) -> list[dict[str, Any]]:
    """Server-sent events; each has its type as its name."""
    found = []
    for event in written.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
