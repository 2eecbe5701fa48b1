"""Answers of OpenAI's Responses API: whole, and as a stream of events.

Items and events are joined strings, not models: a stream makes one for nearly every token, and the
text of an answer is in four of the events that end it.
"""

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
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
from quire.core.sampling import new_seed
from quire.server.answers.store import Status, StoredResponse
from quire.server.calls import ItemIds
from quire.server.dialect import Choice, GenerationCall, traced, usage_of
from quire.server.dialects.responses_body import (
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
    called_name,
)
from quire.server.errors import ApiError
from quire.server.model_service import ModelService
from quire.server.replies import FinishWord, LogprobWriter
from quire.server.streaming import SSE_HEADERS, SSE_PING

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseReply(BaseModel):
    """A response, as far as quire fills it in; fields of the body are repeated beside these."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
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
    request: bytes | None = None  # the body of one that is to be made in the background


def about(body: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """The fields of a body as a response repeats them."""
    form = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    choice = body.tool_choice
    return {
        "background": bool(body.background),
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
        "tools": [_repeated(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _repeated(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {"strict": None, "parameters": None, **_dumped(tool)}
    return {**_dumped(tool), "tools": [_repeated(each) for each in tool.tools]}


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(exclude_none=True, by_alias=True)


# ---- items of the output


class MessageItem:
    """Text of the model."""

    def __init__(self, ids: ItemIds) -> None:
        self.id = ids.new("msg")
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

    def __init__(self, ids: ItemIds) -> None:
        self.id = ids.new("rs")
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

    def __init__(self, ids: ItemIds, call_id: str, name: str, namespace: str | None = None) -> None:
        self.id = ids.new("fc")
        self._head = f'"call_id":{json.dumps(call_id)},"name":{json.dumps(name)}'
        if namespace is not None:
            self._head += f',"namespace":{json.dumps(namespace)}'
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

    def __init__(self, service: ModelService, generation: GenerationCall) -> None:
        self._service = service
        self._kept: KeptOfResponse = generation.kept
        self._call = generation.call
        self.ids = ItemIds(self._kept.id)
        self._namespaced = {
            called_name(space["name"], each["name"]): (each["name"], space["name"])
            for space in self._kept.about["tools"]
            for each in space.get("tools", ())
        }
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

    def items_of(self, answer: Answer, logprobs: str) -> list[OutputItem]:
        """The items of a whole answer. Log-probabilities are those of an answer that is text alone:
        of others they would be those of markers too."""
        items: list[OutputItem] = []
        if answer.reasoning:
            items.append(ReasoningItem(self.ids))
            items[-1].add(answer.reasoning)
        if answer.content or not answer.tool_calls:
            message = MessageItem(self.ids)
            message.add(
                answer.content or "", "" if answer.reasoning or answer.tool_calls else logprobs
            )
            items.append(message)
        for call in answer.tool_calls:
            items.append(self.call_item(call.id, call.name))
            items[-1].add(call.arguments)
        return items

    def call_item(self, call_id: str, called: str) -> CallItem:
        """`called`: the function as the model calls it, with its namespace."""
        name, namespace = self._namespaced.get(called, (called, None))
        return CallItem(self.ids, call_id, name, namespace)

    @property
    def keeps_events(self) -> bool:
        """Of one that is made in the background they are stored as they come."""
        return self._kept.earlier is not None and self._call.stored is None

    def queued(self) -> StoredResponse:
        """One that is yet to be made, in the background."""
        kept, identity = self._kept, self._call.identity
        assert kept.earlier is not None and kept.input is not None
        assert kept.request is not None
        seed = new_seed() if identity is None else identity.seed
        return StoredResponse(
            kept.id,
            kept.earlier,
            kept.input,
            self._written("queued", []).encode(),
            status="queued",
            created_at=self._fixed["created_at"],
            seed=seed >> 1,  # SQLite's integers have a sign
            request=kept.request,
        )

    def begun(self) -> str:
        return self._written("in_progress", [])

    def ended(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Choice], items: Sequence[str]
    ) -> str:
        is_cut = choices[0].finish_reason == "length"
        return self._written(
            "incomplete" if is_cut else "completed",
            items,
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(outputs, choices),
            **traced(self._call, outputs),
        )

    def keep(self, written: str, status: Status, events: Sequence[str] = ()) -> None:
        """Have a whole response stored before its end is sent, where it is to be."""
        kept, call = self._kept, self._call
        if kept.earlier is None or kept.input is None:
            return
        body, sent = written.encode(), "".join(events).encode()
        stored = StoredResponse(kept.id, kept.earlier, kept.input, body, sent, status)
        if call.stored is None:
            call.writes.append(partial(self._service.responses.put, call.key_name, stored))
        else:
            call.made = stored

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


def response_status(choices: Sequence[Choice]) -> Literal["completed", "incomplete"]:
    return "incomplete" if choices[0].finish_reason == "length" else "completed"


def reply(
    service: ModelService,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    [choice] = choices
    scores = choice.completion.logprobs
    logprobs = "" if not scores else LogprobWriter(generation.llm.tokenizer).entries(scores)
    writer = ResponseWriter(service, generation)
    *first, last = writer.items_of(choice.answer, logprobs)
    items = [item.json("completed") for item in first]
    items.append(last.json(last_status(choice.finish_reason)))
    written = writer.ended(outputs, choices, items)
    writer.keep(written, response_status(choices))
    return written.encode()


# ---- streams


class ResponseFrames:
    """Items come one after another: each is closed before the next begins."""

    headers = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, service: ModelService, generation: GenerationCall) -> None:
        self._writer = ResponseWriter(service, generation)
        self._logprobs = LogprobWriter(generation.llm.tokenizer)
        self._num_events = 0
        self._kept_events: list[str] | None = [] if self._writer.keeps_events else None
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
                parts.append(self._begin(MessageItem(self._writer.ids)))
            parts.append(self._close(last_status(finish_reason)))
        return "".join(parts).encode()

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        status = response_status(choices)
        response = self._writer.ended(outputs, choices, self._done)
        event = self._event(f"response.{status}", f'"response":{response}')
        self._writer.keep(response, status, self._kept_events or ())
        return event.encode()

    def error(self, error: ApiError) -> bytes:
        begun = b"" if self._num_events else self.opening(0)
        failed = self._writer.failed(error, self._done)
        if not self._writer.keeps_events and error.status != 503:  # which another moment answers
            self._writer.keep(failed, "failed")
        return begun + self._event("response.failed", f'"response":{failed}').encode()

    def _written(self, event: AnswerEvent) -> str:
        match event:
            case ContentDelta(text):
                begun = ""
                if not isinstance(self._open, MessageItem):
                    begun = self._begin(MessageItem(self._writer.ids))
                assert isinstance(self._open, MessageItem)
                logprobs = self._logprobs.entries(self._scores) if self._scores else ""
                self._scores = []
                return begun + self._item_event(*self._open.delta(text, logprobs))
            case ReasoningDelta(text):
                self._scores = []
                begun = ""
                if not isinstance(self._open, ReasoningItem):
                    begun = self._begin(ReasoningItem(self._writer.ids))
                assert isinstance(self._open, ReasoningItem)
                return begun + self._item_event(*self._open.delta(text))
            case ToolCallBegin(_, call_id, name):
                self._scores = []
                return self._begin(self._writer.call_item(call_id, name))
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
        event = _event(kind, self._num_events, fields)
        self._num_events += 1
        if self._kept_events is not None:
            self._kept_events.append(event)
        return event


def _event(kind: str, number: int, fields: str) -> str:
    head = f'"type":"{kind}","sequence_number":{number}'
    return f"event: {kind}\ndata: {{{head},{fields}}}\n\n"


def error_event(error: ApiError, number: int) -> str:
    """The end of a stream of stored events that cannot be read on."""
    about = {"code": error.code, "message": error.message, "param": error.param}
    return _event("error", number, json.dumps(about)[1:-1])


# ---- events of a response that was not streamed


_NOT_YET: dict[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "usage": None,
    "error": None,
    "output": [],
}


def events_of(body: bytes) -> str:
    """The events of a stored response that was answered in one piece: each item in one delta."""
    response = json.loads(body)
    begun = f'"response":{json.dumps({**response, **_NOT_YET})}'
    events = [("response.created", begun), ("response.in_progress", begun)]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    events.append((f"response.{response['status']}", f'"response":{json.dumps(response)}'))
    return "".join([_event(kind, at, fields) for at, (kind, fields) in enumerate(events)])


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    where = f'"item_id":"{item["id"]}","output_index":{index}'
    is_call = item["type"] == "function_call"
    empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
    begun = {**item, "status": "in_progress", **empty}
    yield "response.output_item.added", f'"output_index":{index},"item":{json.dumps(begun)}'
    for kind, fields in _content_events(item):
        yield kind, f"{where},{fields}"
    yield "response.output_item.done", f'"output_index":{index},"item":{json.dumps(item)}'


def _content_events(item: dict[str, Any]) -> list[tuple[str, str]]:
    ids = ItemIds("")  # events name the stored item
    if item["type"] == "function_call":
        call = CallItem(ids, item["call_id"], item["name"])
        return [*call.begin(), call.delta(item["arguments"]), *call.end()]
    [part] = item["content"]
    if item["type"] == "reasoning":
        thoughts = ReasoningItem(ids)
        return [*thoughts.begin(), thoughts.delta(part["text"]), *thoughts.end()]
    message = MessageItem(ids)
    logprobs = ",".join(map(json.dumps, part["logprobs"]))
    return [*message.begin(), message.delta(part["text"], logprobs), *message.end()]
