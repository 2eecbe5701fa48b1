"""Answers of Anthropic's Messages API: whole, as a stream of events, and as errors.

Frames are joined strings, not models: a stream makes one for nearly every token.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.chat import (
    Answer,
    AnswerEvent,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallBegin,
)
from quire.core.request import Piece, RequestOutput
from quire.server.calls import Call
from quire.server.dialect import (
    Choice,
    Dialect,
    GenerationCall,
    Translation,
    arguments_object,
    chat_request,
    traced,
    traces_of,
    usage_of,
)
from quire.server.dialects.anthropic_body import (
    CountTokensRequest,
    KeptOfMessage,
    MessagesRequest,
    kept_of,
    to_chat,
    to_chat_fields,
)
from quire.server.errors import ApiError, ErrorShape
from quire.server.generation import count_prompt_tokens
from quire.server.model_service import ModelService
from quire.server.replies import FinishWord, TraceReport
from quire.server.streaming import SSE_HEADERS

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]
_SIGNATURE = "unsigned"  # clients send it back with the thought

# ---- errors


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def _status(error: ApiError) -> int:
    """A full queue is 529 there: 429 is for the key's own limits."""
    return 529 if error.status == 429 and error.code == "overloaded" else error.status


def _error_fields(error: ApiError) -> dict[str, object]:
    kind = _TYPES.get(_status(error), "invalid_request_error")
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    if error.code == "context_length_exceeded":  # by these words clients know to shorten it
        message = f"prompt is too long: {error.message}"
    found: dict[str, object] = {"type": kind, "message": message}
    if error.param == "thread":  # clients then send the whole conversation
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        found["details"] = details
    return {"type": "error", "error": found}


def _error_body(error: ApiError) -> bytes:
    return json.dumps(_error_fields(error)).encode()


def _error_frame(error: ApiError) -> bytes:
    return b"event: error\ndata: " + _error_body(error) + b"\n\n"


class ErrorObject(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None  # left out where there are none


class MessagesError(BaseModel):
    type: Literal["error"] = "error"
    error: ErrorObject


ANTHROPIC_ERRORS = ErrorShape(
    _error_body,
    _error_frame,
    _status,
    reply=MessagesError,
    overloaded=529,
    id_header=b"request-id",
)


# ---- whole answers


class OutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """`input_tokens` are those that were computed; cached ones are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails(thinking_tokens=0)
    service_tier: Literal["standard"] = "standard"


class AppliedEdits(BaseModel):
    """What `context_management` removed; the edits that are taken remove nothing."""

    applied_edits: list[dict[str, Any]] = []


class MessageReply(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | None = None  # left out unless asked for
    quire_trace: list[TraceReport] | None = None  # left out unless asked for


class TokensCount(BaseModel):
    input_tokens: int


def _usage(outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> MessageUsage:
    usage = usage_of(outputs, choices)
    thinking = usage.completion_tokens_details.reasoning_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(thinking_tokens=thinking),
    )


def _stop(choice: Choice, kept: KeptOfMessage) -> tuple[StopReason, str | None]:
    """The reason of the end, and the stop sequence if it was one."""
    if choice.finish_reason == "length":
        is_full = choice.completion.num_tokens < kept.max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens", None
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    sequence = choice.completion.stop_reason
    return ("stop_sequence", sequence) if isinstance(sequence, str) else ("end_turn", None)


def _blocks(answer: Answer, kept: KeptOfMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning and kept.shows_thinking:
        thought = "" if kept.omits_thoughts else answer.reasoning
        blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content or ""})
    for call in answer.tool_calls:
        given = arguments_object(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _reply(
    service: ModelService,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    [choice] = choices
    reason, sequence = _stop(choice, generation.kept)
    reply = MessageReply(
        id=generation.answer_id,
        model=service.name,
        content=_blocks(choice.answer, generation.kept),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(outputs, choices),
        context_management=AppliedEdits() if generation.kept.names_edits else None,
        quire_trace=traces_of(generation.call, outputs),
    )
    return reply.model_dump_json(exclude=_not_asked_for(reply)).encode()


def _not_asked_for(reply: MessageReply) -> set[str]:
    return {name for name in ("context_management", "quire_trace") if getattr(reply, name) is None}


# ---- streams


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


class MessageFrames:
    """Blocks come one after another: each is closed before the next begins."""

    headers = SSE_HEADERS
    ping = _event("ping").encode()

    def __init__(self, service: ModelService, generation: GenerationCall) -> None:
        self._id = generation.answer_id
        self._call = generation.call
        self._model = service.name
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._kept: KeptOfMessage = generation.kept
        self._num_blocks = 0
        self._open: str | None = None  # the type of the open block

    def opening(self, _index: int) -> bytes:
        message = MessageReply(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage(
                input_tokens=self._num_prompt_tokens, cache_read_input_tokens=0, output_tokens=0
            ),
        )
        fields = message.model_dump(exclude=_not_asked_for(message))
        return _event("message_start", message=fields).encode()

    def chunk(
        self,
        _index: int,
        events: Sequence[AnswerEvent],
        _pieces: Sequence[Piece],
        finish_reason: FinishWord | None,
    ) -> bytes:
        parts = [self._written(event) for event in events]
        if finish_reason is not None:
            if not self._num_blocks:  # clients look at the first block
                parts.append(self._begin("text", text=""))
            parts.append(self._close())
        return "".join(parts).encode()

    def _written(self, event: AnswerEvent) -> str:
        match event:
            case ContentDelta(text):
                begin = "" if self._open == "text" else self._begin("text", text="")
                return begin + self._delta("text_delta", text=text)
            case ReasoningDelta(text):
                return self._thought(text)
            case ToolCallBegin(_, call_id, name):
                return self._begin("tool_use", id=call_id, name=name, input={})
            case ArgumentsDelta(_, text):
                return self._delta("input_json_delta", partial_json=text)

    def _thought(self, text: str) -> str:
        if not self._kept.shows_thinking:
            return ""
        begin = ""
        if self._open != "thinking":
            begin = self._begin("thinking", thinking="", signature="")
        return (
            begin
            if self._kept.omits_thoughts
            else begin + self._delta("thinking_delta", thinking=text)
        )

    def _begin(self, kind: str, **fields: Any) -> str:
        closed = self._close()
        self._open = kind
        self._num_blocks += 1
        block = {"type": kind, **fields}
        index = self._num_blocks - 1
        return closed + _event("content_block_start", index=index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> str:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> str:
        if self._open is None:
            return ""
        signed = ""
        if self._open == "thinking":
            signed = self._delta("signature_delta", signature=_SIGNATURE)
        self._open = None
        return signed + _event("content_block_stop", index=self._num_blocks - 1)

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        reason, sequence = _stop(choices[0], self._kept)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(outputs, choices).model_dump(exclude={"service_tier"})
        others: dict[str, Any] = traced(self._call, outputs)
        if self._kept.names_edits:
            others["context_management"] = AppliedEdits().model_dump()
        last = _event("message_delta", delta=delta, usage=usage, **others)
        return (last + _event("message_stop")).encode()

    def error(self, error: ApiError) -> bytes:
        return _error_frame(error)


# ---- the dialect


def _translated(
    service: ModelService, _call: Call, body: MessagesRequest
) -> Translation[KeptOfMessage]:
    settings = service.llm.prompts.reasoning_settings
    return Translation(to_chat(body, settings), kept_of(body))


_FIELD_NAMES = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

MESSAGES = Dialect(
    schema=MessagesRequest,
    id_prefix="msg_",
    to_chat=_translated,
    frames=MessageFrames,
    reply=_reply,
    errors=ANTHROPIC_ERRORS,
    field_names=_FIELD_NAMES,
    fits_max_tokens=True,
)


def _counted(
    service: ModelService, _call: Call, body: CountTokensRequest
) -> Translation[KeptOfMessage]:
    settings = service.llm.prompts.reasoning_settings
    return Translation(chat_request(to_chat_fields(body, settings)), kept_of(body))


_COUNTING = Dialect(
    schema=CountTokensRequest,
    id_prefix="msg_",
    to_chat=_counted,
    frames=MessageFrames,
    reply=_reply,
    errors=ANTHROPIC_ERRORS,
    field_names=_FIELD_NAMES,
)


async def count_tokens(service: ModelService, request: Request) -> Response:
    """How many tokens the prompt of a conversation has; nothing is computed."""
    num_tokens = await count_prompt_tokens(service, request, _COUNTING)
    reply = TokensCount(input_tokens=num_tokens)
    return Response(reply.model_dump_json(), media_type="application/json")
