"""OpenAI's Responses API: the dialect, and the routes of responses that are stored."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.server.calls import SCOPE_KEY, Call
from quire.server.dialect import Dialect, Translation, chat_request
from quire.server.dialects.responses_answer import (
    KeptOfResponse,
    ResponseFrames,
    ResponseReply,
    about,
    new_id,
    reply,
)
from quire.server.dialects.responses_body import (
    CountRequest,
    Item,
    PromptFields,
    ResponsesRequest,
    input_items,
    prompt_fields,
    to_chat,
)
from quire.server.dialects.responses_store import StoredResponse
from quire.server.errors import ApiError
from quire.server.generation import count_prompt_tokens
from quire.server.openapi import error_responses, post_error_responses
from quire.server.service import Service

MAX_LISTED = 100  # items in an answer of /input_items


def _earlier(service: Service, call: Call, body: PromptFields) -> list[Item]:
    """The conversation that the input follows."""
    if body.previous_response_id is None:
        return []
    found = service.responses.find(call.key_name, body.previous_response_id)
    if found is None:
        raise ApiError(
            400,
            f"there is no response {body.previous_response_id!r}: it was never stored, or others "
            "have taken its place; send the conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.conversation()


def _translated(
    service: Service, call: Call, body: ResponsesRequest
) -> Translation[KeptOfResponse]:
    earlier, given = _earlier(service, call, body), input_items(body)
    chat = to_chat(body, [*earlier, *given])
    is_stored = body.store is not False and service.responses.is_open
    kept = KeptOfResponse(
        new_id("resp"),
        about(body, is_stored=is_stored),
        body.wants_logprobs,
        _json(earlier) if is_stored else None,
        _json([{**item, "id": item.get("id") or new_id("msg")} for item in given])
        if is_stored
        else None,
    )
    return Translation(chat, kept)


def _json(items: Sequence[Item]) -> bytes:
    return json.dumps(items).encode()


_FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}

RESPONSES = Dialect(
    schema=ResponsesRequest,
    id_prefix="resp_",
    to_chat=_translated,
    frames=ResponseFrames,
    reply=reply,
    field_names=_FIELD_NAMES,
)


# ---- counting


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def _counted(service: Service, call: Call, body: CountRequest) -> Translation[None]:
    items = [*_earlier(service, call, body), *input_items(body)]
    return Translation(chat_request(prompt_fields(body, items)), None)


_COUNTING = Dialect(
    schema=CountRequest,
    id_prefix="resp_",
    to_chat=_counted,
    frames=ResponseFrames,
    reply=reply,
    field_names=_FIELD_NAMES,
)


async def count_input_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt has; nothing is computed."""
    count = InputTokens(input_tokens=await count_prompt_tokens(service, request, _COUNTING))
    return Response(count.model_dump_json(), media_type="application/json")


# ---- stored responses


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
    """The routes over what is stored: a key sees its own alone, whatever its scope."""

    def find(request: Request, response_id: str) -> StoredResponse:
        call: Call = request.scope[SCOPE_KEY]
        found = service.responses.find(call.key_name, response_id)
        if found is None:
            raise _no_response(response_id)
        return found

    @app.get(
        "/v1/responses/{response_id}",
        summary="A stored response",
        response_model=ResponseReply,
        responses=error_responses(400, 404),
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise ApiError(
                400, "stream is not supported here: the response is whole", param="stream"
            )
        return Response(find(request, response_id).body, media_type="application/json")

    @app.delete(
        "/v1/responses/{response_id}",
        summary="Forget a stored response",
        responses=error_responses(404),
    )
    async def delete(request: Request, response_id: str) -> DeletedResponse:
        call: Call = request.scope[SCOPE_KEY]
        if not service.responses.delete(call.key_name, response_id):
            raise _no_response(response_id)
        return DeletedResponse(id=response_id)

    @app.get(
        "/v1/responses/{response_id}/input_items",
        summary="The items that a stored response was given",
        responses=error_responses(400, 404),
    )
    async def items(request: Request, response_id: str) -> ItemList:
        return _listed(json.loads(find(request, response_id).input), request)

    @app.post(
        "/v1/responses/{response_id}/cancel",
        summary="Refused: responses are made while the client waits",
        responses=post_error_responses(400, 404),
    )
    async def cancel(request: Request, response_id: str) -> Response:
        find(request, response_id)
        raise ApiError(
            400,
            "only a response made in the background can be cancelled, and quire "
            "makes none: close the connection of one that is being made",
        )


def _no_response(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id!r:.100}: it was never stored, was deleted, or others "
        "have taken its place",
        code="response_not_found",
    )


def _listed(items: list[Item], request: Request) -> ItemList:
    """A page of items, the newest first unless `order` is asc."""
    query = request.query_params
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
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
