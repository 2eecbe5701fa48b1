"""Routes over stored responses of OpenAI's Responses API: read, streamed again, listed, cancelled
and deleted. A key sees its own alone, whatever its scope."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.server.answers.background import cancelled
from quire.server.answers.store import StoredResponse
from quire.server.calls import CLIENT_GONE, PING, SCOPE_KEY, Call, unavailable
from quire.server.database import StoreError
from quire.server.dialects.responses_answer import ResponseReply, error_event, events_of
from quire.server.dialects.responses_body import Includable, Item
from quire.server.errors import ApiError
from quire.server.middleware import Message, Receive, Scope, Send, disconnected
from quire.server.openapi import STREAM_CONTENT, error_responses, post_error_responses
from quire.server.service import Service
from quire.server.streaming import SSE_HEADERS, SSE_PING

MAX_LISTED = 100  # items in an answer of /input_items
_POLL_S = 0.1  # between two looks for events of a response that is being made
_LOGPROBS = "message.output_text.logprobs"
P = ParamSpec("P")
T = TypeVar("T")


async def stored_by(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the store does, in a thread; a 503 where it cannot."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except StoreError as error:
        raise unavailable(error) from error


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def add_stored_responses(app: FastAPI, service: Service) -> None:
    _add_response(app, service)
    _add_items(app, service)
    _add_cancel(app, service)


async def _find(service: Service, request: Request, response_id: str) -> StoredResponse:
    call: Call = request.scope[SCOPE_KEY]
    found = await stored_by(service.responses.find, call.key_name, response_id)
    if found is None:
        raise _no_response(response_id)
    return found


def _add_response(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/responses/{response_id}",
        summary="A stored response, or its events",
        response_model=ResponseReply,
        responses={**error_responses(400, 404), 200: {"content": STREAM_CONTENT}},
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        asked = _Asked.of(request)
        found = await _find(service, request, response_id)
        if asked.wants_logprobs and not _has_logprobs(found):
            message = f"the response was made without {_LOGPROBS}"
            raise ApiError(400, message, param="include")
        if asked.stream:
            call: Call = request.scope[SCOPE_KEY]
            return StoredStream(service, call, response_id, asked.starting_after)
        return Response(found.body, media_type="application/json")

    @app.delete(
        "/v1/responses/{response_id}",
        summary="Forget a stored response",
        responses=error_responses(400, 404),
    )
    async def delete(request: Request, response_id: str) -> DeletedResponse:
        check_parameters(request)
        call: Call = request.scope[SCOPE_KEY]
        if not await stored_by(service.responses.delete, call.key_name, response_id):
            raise _no_response(response_id)
        service.background.cancel(response_id)
        return DeletedResponse(id=response_id)


def _add_items(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/responses/{response_id}/input_items",
        summary="The items that a stored response was given",
        responses=error_responses(400, 404),
    )
    async def items(request: Request, response_id: str) -> ItemList:
        found = await _find(service, request, response_id)
        return _listed(json.loads(found.input), request)


def _add_cancel(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/responses/{response_id}/cancel",
        summary="End a response that is made in the background",
        response_model=ResponseReply,
        responses=post_error_responses(400, 404),
    )
    async def cancel(request: Request, response_id: str) -> Response:
        check_parameters(request)
        found = await _find(service, request, response_id)
        if not found.is_background:
            raise ApiError(
                400,
                "only a response made in the background can be cancelled (background: true): "
                "close the connection of another one that is being made",
            )
        if found.is_live:
            call: Call = request.scope[SCOPE_KEY]
            ended = (call.key_name, response_id, "cancelled", cancelled(found), 0, b"")
            await stored_by(service.responses.end_response, *ended)  # type: ignore[arg-type]
            service.background.cancel(response_id)
            found = await _find(service, request, response_id)
        return Response(found.body, media_type="application/json")


def _no_response(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id!r:.100}: it was never stored, was deleted, or others "
        "have taken its place",
        code="response_not_found",
    )


def check_parameters(request: Request, *known: str) -> None:
    """Refuse parameters of the query that nobody knows."""
    for name in request.query_params:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            message = f"there is no parameter {name!r:.100}; {there}"
            raise ApiError(400, message, param=name[:100], code="unknown_parameter")


class _Asked(NamedTuple):
    """How a response is to be read."""

    stream: bool
    starting_after: int  # the number of the last event that the client has; -1: none
    wants_logprobs: bool

    @classmethod
    def of(cls, request: Request) -> "_Asked":
        known = ("stream", "starting_after", "include", "include[]", "include_obfuscation")
        check_parameters(request, *known)
        query = request.query_params
        stream, _ = _flag(request, "stream"), _flag(request, "include_obfuscation")
        after = query.get("starting_after")
        if after is not None and (not re.fullmatch(r"\d{1,9}", after) or not stream):
            message = "starting_after must be the number of an event, and needs stream=true"
            raise ApiError(400, message, param="starting_after")
        wants_logprobs = _LOGPROBS in _included(request)
        return cls(stream, -1 if after is None else int(after), wants_logprobs)


def _included(request: Request) -> list[str]:
    """What a query asks to include; OpenAI's client writes include[]."""
    query = request.query_params
    included = [*query.getlist("include"), *query.getlist("include[]")]
    for value in included:
        if value not in get_args(Includable):
            message = f"include has {value!r:.100}; there are {', '.join(get_args(Includable))}"
            raise ApiError(400, message, param="include")
    return included


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise ApiError(400, f"{name} must be true or false, got {value!r:.100}", param=name)
    return value == "true"


def _has_logprobs(stored: StoredResponse) -> bool:
    items = json.loads(stored.body)["output"]
    return any(part.get("logprobs") for item in items for part in item.get("content") or ())


# ---- streams


class StoredStream(Response):
    """The events of a stored response behind the event `after`; of one that is being made, as they
    come."""

    def __init__(self, service: Service, call: Call, response_id: str, after: int) -> None:
        self._service = service
        self._call = call
        self._id = response_id
        self._next = after + 1
        self.background = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self._call.is_streaming = True
        following = asyncio.create_task(self._follow(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                self._call.error = CLIENT_GONE
            else:
                await following
        finally:
            following.cancel()
            leaving.cancel()

    async def _follow(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        last = b""
        try:
            await self._send_events(send)
        except ApiError as error:
            self._call.note(error)
            last = error_event(error, self._next).encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        store, interval_s = self._service.responses, self._service.settings.ping_interval_s
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        is_live = True
        while is_live:
            found = await stored_by(store.find, self._call.key_name, self._id)
            is_live = found is not None and found.is_live  # before its events are read
            content = b"" if found is None else await self._events(found)
            if content or loop.time() - sent_at >= interval_s:
                message: Message = {"type": "http.response.body", "more_body": True}
                message["body"] = content or SSE_PING
                message[PING] = not content
                await send(message)
                sent_at = loop.time()
            if is_live:
                await asyncio.sleep(_POLL_S)

    async def _events(self, found: StoredResponse) -> bytes:
        """Those that have come and were not sent."""
        runs = await stored_by(self._service.responses.events, found.id, self._next)
        if not runs and not found.is_live and found.status != "cancelled":
            runs = [(0, events_of(found.body).encode())]
        content = b""
        for first, data in runs:
            events = data.split(b"\n\n")[:-1]
            for event in events[max(0, self._next - first) :]:
                content += event + b"\n\n"
            self._next = max(self._next, first + len(events))
        return content


# ---- items


def _listed(items: list[Item], request: Request) -> ItemList:
    """A page of items, the newest first unless `order` is asc."""
    check_parameters(request, "limit", "order", "after", "include", "include[]")
    if _LOGPROBS in _included(request):
        raise ApiError(400, "items of the input have no logprobs", param="include")
    query = request.query_params
    limit = query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_LISTED:
        raise ApiError(400, f"limit must be from 1 to {MAX_LISTED}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", param="order")
    found = items if order == "asc" else items[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(found) if item["id"] == after]
        if not places:
            raise ApiError(400, f"there is no item {after!r:.100}", param="after")
        found = found[places[0] + 1 :]
    page = found[: int(limit)]
    return ItemList(
        data=[_item(item) for item in page],
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(found) > len(page),
    )


def _item(item: Item) -> Item:
    """Text is a part there."""
    if item["type"] != "message" or not isinstance(item["content"], str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    part = {"type": kind, "text": item["content"]}
    return {**item, "status": "completed", "content": [part]}
