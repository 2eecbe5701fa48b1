"""Answers of OpenAI's Responses API: whole, and as a stream of events.

Items and events are joined strings, not models: a stream makes one for nearly every token, and the
text of an answer is in four of the events that end it.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

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
from quire.server.dialect import Choice, GenerationCall, traced, usage_of
from quire.server.dialects.responses_body import ResponsesRequest
from quire.server.dialects.responses_store import StoredResponse
from quire.server.errors import ApiError
from quire.server.replies import FinishWord, LogprobWriter
from quire.server.service import Service
from quire.server.streaming import SSE_HEADERS, SSE_PING

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseReply(BaseModel):
    """A response, as far as quire fills it in; fields of the body are repeated beside these."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class KeptOfResponse(NamedTuple):
    """What the answer needs of the body. `earlier` and `input` are None where it is not stored."""

    id: str
    about: dict[str, Any]  # the body's fields that a response repeats
    with_logprobs: bool
    earlier: bytes | None
    input: bytes | None


def new_id(kind: str) -> str:
    """Not the request's: a client may choose that, and what is stored must not be guessed."""
    return f"{kind}_{uuid.uuid4().hex}"


def about(body: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """The fields of a body as a response repeats them."""
    form = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    choice = body.tool_choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "text": {"format": {"type": "text"} if form is None else _dumped(form)},
        "tool_choice": (choice or "auto") if not isinstance(choice, BaseModel) else _dumped(choice),
        "tools": [{"strict": None, "parameters": None, **_dumped(t)} for t in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(exclude_none=True, by_alias=True)


# ---- items of the output


class MessageItem:
    """Text of the model."""

    def __init__(self) -> None:
        self.id = new_id("msg")
        self._text: list[str] = []
        self._logprobs: list[str] = []

    def add(self, text: str, logprobs: str = "") -> None:
        """`logprobs`: entries as JSON, without the list around them."""
        self._text.append(text)
        if logprobs:
            self._logprobs.append(logprobs)

    def json(self, status: ItemStatus) -> str:
        content = "" if status == "in_progress" else self._part()
        return (
            f'{{"id":"{self.id}","type":"message","status":"{status}","role":"assistant",'
            f'"content":[{content}]}}'
        )

    def _part(self) -> str:
        return (
            f'{{"type":"output_text","text":{json.dumps("".join(self._text))},"annotations":[],'
            f'"logprobs":[{",".join(self._logprobs)}]}}'
        )

    def begin(self) -> list[tuple[str, str]]:
        return [("response.content_part.added", f'"content_index":0,"part":{self._part()}')]

    def delta(self, text: str, logprobs: str) -> tuple[str, str]:
        self.add(text, logprobs)
        fields = f'"content_index":0,"delta":{json.dumps(text)},"logprobs":[{logprobs}]'
        return "response.output_text.delta", fields

    def end(self) -> list[tuple[str, str]]:
        text = json.dumps("".join(self._text))
        logprobs = ",".join(self._logprobs)
        done = f'"content_index":0,"text":{text},"logprobs":[{logprobs}]'
        return [
            ("response.output_text.done", done),
            ("response.content_part.done", f'"content_index":0,"part":{self._part()}'),
        ]


class ReasoningItem:
    """Thoughts of the model, as the content of the item; there is no summary of them."""

    def __init__(self) -> None:
        self.id = new_id("rs")
        self._text: list[str] = []

    def add(self, text: str) -> None:
        self._text.append(text)

    def json(self, status: ItemStatus) -> str:
        content = "" if status == "in_progress" else self._part()
        return (
            f'{{"id":"{self.id}","type":"reasoning","status":"{status}","summary":[],'
            f'"content":[{content}]}}'
        )

    def _part(self) -> str:
        return f'{{"type":"reasoning_text","text":{json.dumps("".join(self._text))}}}'

    def begin(self) -> list[tuple[str, str]]:
        return [("response.content_part.added", f'"content_index":0,"part":{self._part()}')]

    def delta(self, text: str) -> tuple[str, str]:
        self.add(text)
        return "response.reasoning_text.delta", f'"content_index":0,"delta":{json.dumps(text)}'

    def end(self) -> list[tuple[str, str]]:
        text = json.dumps("".join(self._text))
        return [
            ("response.reasoning_text.done", f'"content_index":0,"text":{text}'),
            ("response.content_part.done", f'"content_index":0,"part":{self._part()}'),
        ]


class CallItem:
    """A call of a function."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = new_id("fc")
        self._head = f'"call_id":{json.dumps(call_id)},"name":{json.dumps(name)}'
        self._name = name
        self._arguments: list[str] = []

    def add(self, text: str) -> None:
        self._arguments.append(text)

    def json(self, status: ItemStatus) -> str:
        arguments = json.dumps("".join(self._arguments))
        return (
            f'{{"id":"{self.id}","type":"function_call","status":"{status}",{self._head},'
            f'"arguments":{arguments}}}'
        )

    def begin(self) -> list[tuple[str, str]]:
        return []

    def delta(self, text: str) -> tuple[str, str]:
        self.add(text)
        return "response.function_call_arguments.delta", f'"delta":{json.dumps(text)}'

    def end(self) -> list[tuple[str, str]]:
        arguments = json.dumps("".join(self._arguments))
        fields = f'"name":{json.dumps(self._name)},"arguments":{arguments}'
        return [("response.function_call_arguments.done", fields)]


OutputItem = MessageItem | ReasoningItem | CallItem


def items_of(answer: Answer, logprobs: str) -> list[OutputItem]:
    """The items of a whole answer. Log-probabilities are those of an answer that is text alone:
    of others they would be those of markers too."""
    items: list[OutputItem] = []
    if answer.reasoning:
        items.append(ReasoningItem())
        items[-1].add(answer.reasoning)
    if answer.content or not answer.tool_calls:
        message = MessageItem()
        message.add(answer.content or "", "" if answer.reasoning or answer.tool_calls else logprobs)
        items.append(message)
    for call in answer.tool_calls:
        items.append(CallItem(call.id, call.name))
        items[-1].add(call.arguments)
    return items


# ---- responses


def _usage(outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> dict[str, Any]:
    usage = usage_of(outputs, choices)
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details.model_dump(),
        "total_tokens": usage.total_tokens,
    }


class ResponseWriter:
    """Writes one call's response in each of its states."""

    def __init__(self, service: Service, generation: GenerationCall) -> None:
        self._service = service
        self._kept: KeptOfResponse = generation.kept
        self._call = generation.call
        _, params = generation.prompts[0]
        self._fixed = {
            "id": self._kept.id,
            "object": "response",
            "created_at": generation.created,
            "model": service.name,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **self._kept.about,
        }

    def begun(self) -> str:
        return self._written("in_progress", [])

    def ended(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Choice], items: Sequence[str]
    ) -> str:
        """The whole response, which is stored where it is to be."""
        is_cut = choices[0].finish_reason == "length"
        written = self._written(
            "incomplete" if is_cut else "completed",
            items,
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(outputs, choices),
            **traced(self._call, outputs),
        )
        kept = self._kept
        if kept.earlier is not None and kept.input is not None:
            stored = StoredResponse(kept.id, kept.earlier, kept.input, written.encode())
            self._service.responses.put(self._call.key_name, stored)
        return written

    def failed(self, error: ApiError, items: Sequence[str]) -> str:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self._written("failed", items, error={"code": code, "message": error.message})

    def _written(self, status: str, items: Sequence[str], **changed: Any) -> str:
        response = {
            **self._fixed,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **changed,
        }
        return f'{json.dumps(response)[:-1]},"output":[{",".join(items)}]}}'


def last_status(finish_reason: FinishWord) -> ItemStatus:
    return "incomplete" if finish_reason == "length" else "completed"


def reply(
    service: Service,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    [choice] = choices
    scores = choice.completion.logprobs
    logprobs = "" if not scores else LogprobWriter(generation.llm.tokenizer).entries(scores)
    *first, last = items_of(choice.answer, logprobs)
    written = [item.json("completed") for item in first]
    written.append(last.json(last_status(choice.finish_reason)))
    writer = ResponseWriter(service, generation)
    return writer.ended(outputs, choices, written).encode()


# ---- streams


class ResponseFrames:
    """Items come one after another: each is closed before the next begins."""

    headers = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, service: Service, generation: GenerationCall) -> None:
        self._writer = ResponseWriter(service, generation)
        self._logprobs = LogprobWriter(generation.llm.tokenizer)
        self._num_events = 0
        self._open: OutputItem | None = None
        self._done: list[str] = []  # items
        self._scores: list[TokenLogprob] = []  # of tokens whose text has not come

    def opening(self, _index: int) -> bytes:
        begun = f'"response":{self._writer.begun()}'
        events = [("response.created", begun), ("response.in_progress", begun)]
        return "".join([self._event(kind, fields) for kind, fields in events]).encode()

    def chunk(
        self,
        _index: int,
        events: Sequence[AnswerEvent],
        pieces: Sequence[Piece],
        finish_reason: FinishWord | None,
    ) -> bytes:
        self._scores += [score for piece in pieces for score in piece.logprobs]
        parts = [self._written(event) for event in events]
        if finish_reason is not None:
            if self._open is None and not self._done:
                parts.append(self._begin(MessageItem()))
            parts.append(self._close(last_status(finish_reason)))
        return "".join(parts).encode()

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        kind = "incomplete" if choices[0].finish_reason == "length" else "completed"
        response = self._writer.ended(outputs, choices, self._done)
        return self._event(f"response.{kind}", f'"response":{response}').encode()

    def error(self, error: ApiError) -> bytes:
        begun = b"" if self._num_events else self.opening(0)
        failed = self._writer.failed(error, self._done)
        return begun + self._event("response.failed", f'"response":{failed}').encode()

    def _written(self, event: AnswerEvent) -> str:
        match event:
            case ContentDelta(text):
                begun = "" if isinstance(self._open, MessageItem) else self._begin(MessageItem())
                assert isinstance(self._open, MessageItem)
                logprobs = self._logprobs.entries(self._scores) if self._scores else ""
                self._scores = []
                return begun + self._item_event(*self._open.delta(text, logprobs))
            case ReasoningDelta(text):
                self._scores = []
                begun = ""
                if not isinstance(self._open, ReasoningItem):
                    begun = self._begin(ReasoningItem())
                assert isinstance(self._open, ReasoningItem)
                return begun + self._item_event(*self._open.delta(text))
            case ToolCallBegin(_, call_id, name):
                self._scores = []
                return self._begin(CallItem(call_id, name))
            case ArgumentsDelta(_, text):
                self._scores = []
                assert isinstance(self._open, CallItem)
                return self._item_event(*self._open.delta(text))

    def _begin(self, item: OutputItem) -> str:
        closed = self._close("completed")
        self._open = item
        fields = f'"output_index":{len(self._done)},"item":{item.json("in_progress")}'
        added = self._event("response.output_item.added", fields)
        begun = [self._item_event(kind, fields) for kind, fields in item.begin()]
        return closed + added + "".join(begun)

    def _close(self, status: ItemStatus) -> str:
        if self._open is None:
            return ""
        item = self._open
        parts = [self._item_event(kind, fields) for kind, fields in item.end()]
        written = item.json(status)
        done = f'"output_index":{len(self._done)},"item":{written}'
        parts.append(self._event("response.output_item.done", done))
        self._done.append(written)
        self._open = None
        return "".join(parts)

    def _item_event(self, kind: str, fields: str) -> str:
        """An event about the open item."""
        assert self._open is not None
        where = f'"item_id":"{self._open.id}","output_index":{len(self._done)}'
        return self._event(kind, f"{where},{fields}")

    def _event(self, kind: str, fields: str) -> str:
        head = f'"type":"{kind}","sequence_number":{self._num_events}'
        self._num_events += 1
        return f"event: {kind}\ndata: {{{head},{fields}}}\n\n"
