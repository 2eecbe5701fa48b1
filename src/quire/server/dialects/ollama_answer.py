"""Answers of Ollama's API: whole, as lines of JSON, and as errors."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
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
from quire.core.plan import TokenLogprob
from quire.core.request import Piece, RequestOutput
from quire.server.calls import Call
from quire.server.dialect import Choice, Dialect, GenerationCall, Translation, arguments_object
from quire.server.dialects.ollama_body import (
    FIELD_NAMES,
    AnswerFields,
    GenerateRequest,
    OllamaChatRequest,
    OllamaFields,
    chat_of,
    chat_of_prompt,
    completion_of,
    keep_seconds,
    model_name,
)
from quire.server.errors import ApiError, ErrorShape
from quire.server.generation import answer_conversation, answer_text
from quire.server.model_service import ModelService
from quire.server.replies import FinishWord, LogprobWriter, TokenScore

_HEADERS = (
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

# ---- errors


class OllamaErrorReply(BaseModel):
    error: str


def _error_body(error: ApiError) -> bytes:
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return json.dumps({"error": message}).encode()


OLLAMA_ERRORS = ErrorShape(
    _error_body, lambda error: _error_body(error) + b"\n", reply=OllamaErrorReply
)


# ---- whole answers


class OllamaFunction(BaseModel):
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    id: str
    function: OllamaFunction


class OllamaAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class _Reply(BaseModel):
    """Durations are in nanoseconds; nothing is loaded for a request."""

    model: str
    created_at: str
    done: Literal[True] = True
    done_reason: str
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[TokenScore] | None = None


class OllamaChatReply(_Reply):
    message: OllamaAnswer


class GenerateReply(_Reply):
    response: str
    thinking: str | None = None


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(start: float | None, end: float | None) -> int:
    return 0 if start is None or end is None else max(0, round(1e9 * (end - start)))


def figures(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Counts and durations of an answer; a duration is that of its one request."""
    metrics = outputs[0].metrics
    first = metrics.first_token_at
    return {
        "total_duration": _nanoseconds(metrics.arrived_at, metrics.finished_at),
        "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
        "prompt_eval_duration": _nanoseconds(metrics.started_at, first or metrics.finished_at),
        "eval_count": sum(c.num_tokens for output in outputs for c in output.completions),
        "eval_duration": _nanoseconds(first, metrics.finished_at),
    }


def _done_reason(word: FinishWord) -> str:
    return "length" if word == "length" else "stop"


def _calls(answer: Answer) -> list[OllamaCall] | None:
    return [
        OllamaCall(
            id=call.id,
            function=OllamaFunction(name=call.name, arguments=arguments_object(call.arguments)),
        )
        for call in answer.tool_calls
    ] or None


def _reply(
    is_chat: bool,
    service: ModelService,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    [choice] = choices
    answer = choice.answer
    shared: dict[str, Any] = {
        "model": service.name,
        "created_at": now(),
        "done_reason": _done_reason(choice.finish_reason),
        **figures(outputs),
    }
    scores = choice.completion.logprobs
    if scores is not None:
        shared["logprobs"] = _scores(LogprobWriter(generation.llm.tokenizer), scores)
    content, thinking = answer.content or "", answer.reasoning or None
    reply: _Reply
    if is_chat:
        message = OllamaAnswer(content=content, thinking=thinking, tool_calls=_calls(answer))
        reply = OllamaChatReply(message=message, **shared)
    else:
        reply = GenerateReply(response=content, thinking=thinking, **shared)
    return reply.model_dump_json(exclude_none=True).encode()


def _scores(writer: LogprobWriter, scores: Sequence[TokenLogprob]) -> Any:
    return json.loads(writer.for_chat(scores))["content"]


# ---- streams


class _Frames:
    """Lines for what came at once, one each for thoughts, text and calls, and a last one with
    counts. A call is written whole."""

    headers = _HEADERS
    ping = b""  # clients read every line

    def __init__(self, is_chat: bool, service: ModelService, generation: GenerationCall) -> None:
        self._is_chat = is_chat
        self._model = service.name
        self._logprobs = LogprobWriter(generation.llm.tokenizer)
        self._call: ToolCallBegin | None = None  # whose arguments are coming
        self._arguments = ""

    def opening(self, _index: int) -> bytes:
        return b""

    def chunk(
        self,
        _index: int,
        events: Sequence[AnswerEvent],
        pieces: Sequence[Piece],
        finish_reason: FinishWord | None,
    ) -> bytes:
        content = "".join([event.text for event in events if isinstance(event, ContentDelta)])
        thought = "".join([event.text for event in events if isinstance(event, ReasoningDelta)])
        calls = self._whole_calls(events, is_last=finish_reason is not None)
        scores = [score for piece in pieces for score in piece.logprobs]
        said = []  # clients take a line for one of these
        if thought:
            said.append(self._said("", {"thinking": thought}))
        if content:
            said.append(self._said(content, {}))
        if calls:
            said.append(self._said("", {"tool_calls": calls}))
        if scores:
            said = said or [self._said("", {})]
            said[-1]["logprobs"] = _scores(self._logprobs, scores)
        return b"".join([self._line({**fields, "done": False}) for fields in said])

    def _whole_calls(self, events: Sequence[AnswerEvent], *, is_last: bool) -> list[Any]:
        whole = []
        for event in events:
            if isinstance(event, ToolCallBegin):
                whole += self._ended_call()
                self._call = event
            elif isinstance(event, ArgumentsDelta):
                self._arguments += event.text
        return whole + (self._ended_call() if is_last else [])

    def _ended_call(self) -> list[Any]:
        if self._call is None:
            return []
        function = {"name": self._call.name, "arguments": arguments_object(self._arguments)}
        call = {"id": self._call.id, "function": function}
        self._call, self._arguments = None, ""
        return [call]

    def _said(self, content: str, more: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": content, **more}}
        return {"response": content, **more}

    def _line(self, fields: dict[str, Any]) -> bytes:
        shared = {"model": self._model, "created_at": now()}
        return json.dumps({**shared, **fields}).encode() + b"\n"

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        reason = _done_reason(choices[0].finish_reason)
        counts = {"load_duration": 0, **figures(outputs)}
        return self._line({**self._said("", {}), "done": True, "done_reason": reason, **counts})

    def error(self, error: ApiError) -> bytes:
        return OLLAMA_ERRORS.frame(error)


# ---- the dialects


class _LoadOnlyError(Exception):
    """The body asks for no answer: clients send it to have the model loaded."""


class _RawPromptError(Exception):
    """The body is for a prompt without a template."""

    def __init__(self, body: GenerateRequest) -> None:
        super().__init__()
        self.body = body


def keep_loaded(service: ModelService, body: OllamaFields) -> None:
    """Obey keep_alive, where models are loaded on demand."""
    if body.keep_alive is not None:
        service.keep_s = keep_seconds(body.keep_alive)


def _check(service: ModelService, body: AnswerFields) -> None:
    service.check_model(model_name(body.model))
    keep_loaded(service, body)
    options = body.options
    if options is None:
        return
    context = service.llm.max_context
    if options.num_ctx is not None and options.num_ctx > context:
        message = f"num_ctx is {options.num_ctx}; this server's context holds {context} tokens"
        raise ApiError(400, message, param="options.num_ctx")
    if options.num_predict == 0:
        message = "num_predict is 0: ask for at least one token, or leave it out"
        raise ApiError(400, message, param="options.num_predict")


def _stops(body: AnswerFields) -> bool:
    """Whether a body without a prompt asks that the model is unloaded, as `ollama stop` does."""
    return body.keep_alive is not None and keep_seconds(body.keep_alive) == 0


def _load(body: AnswerFields) -> None:
    """Raise: what was asked is that the model is loaded, or that it is not, which a server that
    loads models on demand has answered before."""
    if _stops(body):
        message = "the server keeps its model: end the server to unload it"
        raise ApiError(400, message, param="keep_alive")
    raise _LoadOnlyError


def _to_chat(service: ModelService, _call: Call, body: OllamaChatRequest) -> Translation[None]:
    _check(service, body)
    if not body.messages:
        _load(body)
    return Translation(chat_of(body), None)


def _to_chat_of_prompt(
    service: ModelService, _call: Call, body: GenerateRequest
) -> Translation[None]:
    _check(service, body)
    if not body.prompt and not body.suffix:
        _load(body)
    if body.raw or body.suffix or not service.llm.prompts.can_chat:
        raise _RawPromptError(body)
    return Translation(chat_of_prompt(body), None)


OLLAMA_CHAT = Dialect(
    schema=OllamaChatRequest,
    id_prefix="chat-",
    to_chat=_to_chat,
    frames=partial(_Frames, True),
    reply=partial(_reply, True),
    errors=OLLAMA_ERRORS,
    field_names=FIELD_NAMES,
    fits_max_tokens=True,
)
GENERATE = Dialect(
    schema=GenerateRequest,
    id_prefix="generate-",
    to_chat=_to_chat_of_prompt,
    frames=partial(_Frames, False),
    reply=partial(_reply, False),
    errors=OLLAMA_ERRORS,
    field_names=FIELD_NAMES,
    fits_max_tokens=True,
)


async def answer_chat(service: ModelService, request: Request) -> Response:
    try:
        return await answer_conversation(service, request, OLLAMA_CHAT)
    except _LoadOnlyError:
        return _empty_chat(service, "load")


async def answer_prompt(service: ModelService, request: Request) -> Response:
    try:
        return await answer_conversation(service, request, GENERATE)
    except _LoadOnlyError:
        return _empty_answer(service, "load")
    except _RawPromptError as raw:
        body = completion_of(raw.body)
    return await answer_text(service, request, body, GENERATE)


def stop_chat(service: ModelService, body: OllamaChatRequest) -> Response | None:
    """Unload the model, where that is all that is asked: it is not loaded for that."""
    if body.messages or not _stops(body) or service.server.residency is None:
        return None
    service.unload_soon()
    return _empty_chat(service, "unload")


def stop_generate(service: ModelService, body: GenerateRequest) -> Response | None:
    """The same, by a prompt that is not there."""
    if body.prompt or body.suffix or not _stops(body) or service.server.residency is None:
        return None
    service.unload_soon()
    return _empty_answer(service, "unload")


def _empty_chat(service: ModelService, reason: str) -> Response:
    fields = _empty_fields(service, reason)
    return _written(OllamaChatReply(message=OllamaAnswer(content=""), **fields))


def _empty_answer(service: ModelService, reason: str) -> Response:
    return _written(GenerateReply(response="", **_empty_fields(service, reason)))


def _empty_fields(service: ModelService, reason: str) -> dict[str, Any]:
    return {"model": service.name, "created_at": now(), "done_reason": reason}


def _written(reply: _Reply) -> Response:
    content = reply.model_dump_json(exclude_none=True).encode() + b"\n"
    return Response(content, media_type="application/json")
