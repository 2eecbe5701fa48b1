"""OpenAI's Responses API: the dialect. `stored_responses.py` has the routes of what is stored."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.server.answers.store import StoredResponse
from quire.server.calls import Call, IdSource, ItemIds, unavailable
from quire.server.database import StoreError
from quire.server.dialect import Dialect, GenerationCall, Translation, chat_request
from quire.server.dialects.responses_answer import (
    KeptOfResponse,
    ResponseFrames,
    ResponseWriter,
    about,
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
from quire.server.dialects.stored_responses import StoredStream
from quire.server.errors import ApiError
from quire.server.generation import count_prompt_tokens
from quire.server.model_service import ModelService


def _earlier(service: ModelService, call: Call, body: PromptFields) -> list[Item]:
    """The conversation that the input follows."""
    if call.stored is not None:
        found: list[Item] = json.loads(call.stored.earlier)
        return found
    if body.previous_response_id is None:
        return []
    try:
        previous = service.responses.find(call.key_name, body.previous_response_id)
    except StoreError as error:
        raise unavailable(error) from error
    if previous is None or previous.status not in ("completed", "incomplete"):
        raise _not_previous(body.previous_response_id, previous)
    return previous.conversation()


def _given(service: ModelService, call: Call, body: PromptFields) -> list[Item]:
    """The input, with the items that it refers to."""
    if call.stored is not None:
        found: list[Item] = json.loads(call.stored.input)
        return found
    known: dict[str, Mapping[str, Item]] = {}  # items of responses by their ids
    items = []
    for number, item in enumerate(input_items(body)):
        if item["type"] == "item_reference":
            item = _referred(service, call, known, number, item["id"])
        items.append(item)
    return items


def _referred(
    service: ModelService,
    call: Call,
    known: dict[str, Mapping[str, Item]],
    number: int,
    item_id: str,
) -> Item:
    response_id = ItemIds.response_of(item_id)
    if response_id not in known:
        try:
            stored = service.responses.find(call.key_name, response_id)
        except StoreError as error:
            raise unavailable(error) from error
        items = [] if stored is None else stored.conversation()
        known[response_id] = {item["id"]: item for item in items if "id" in item}
    found = known[response_id].get(item_id)
    if found is None:
        raise ApiError(
            400,
            f"there is no item {item_id!r:.100}: items are stored with their response, unless that "
            "has store: false; send the item itself",
            param=f"input[{number}].id",
            code="item_not_found",
        )
    return found


def _not_previous(response_id: str, found: StoredResponse | None) -> ApiError:
    message = (
        f"there is no response {response_id!r}: it was never stored, or others have taken its "
        "place; send the conversation as input"
        if found is None
        else f"the response {response_id!r} is {found.status}: it has no output to go on from"
    )
    code = "previous_response_not_found"
    return ApiError(400, message, param="previous_response_id", code=code)


def _translated(
    service: ModelService, call: Call, body: ResponsesRequest
) -> Translation[KeptOfResponse]:
    earlier, given = _earlier(service, call, body), _given(service, call, body)
    chat = to_chat(body, [*earlier, *given])
    is_stored = body.store is not False and service.responses.is_open
    repeated = about(body, is_stored=is_stored)
    if call.stored is not None:
        kept, stored = body.wants_logprobs, call.stored
        return Translation(
            chat, KeptOfResponse(stored.id, repeated, kept, stored.earlier, stored.input)
        )
    name = IdSource(call.identity).new("resp")
    if not is_stored:
        if body.background:
            raise ApiError(400, _NEEDS_STORE, param="background")
        return Translation(chat, KeptOfResponse(name, repeated, body.wants_logprobs, None, None))
    _check_store(service)
    ids = ItemIds(name, mark=1)
    named = [{**item, "id": item.get("id") or ids.new("msg")} for item in given]
    request = None
    if body.background:
        again = body.model_copy(update={"stream": True, "store": True})
        request = again.model_dump_json(exclude_none=True, by_alias=True).encode()
    kept_of = KeptOfResponse(
        name, repeated, body.wants_logprobs, _json(earlier), _json(named), request
    )
    return Translation(chat, kept_of)


_NEEDS_STORE = (
    "a response that is made in the background must be stored: leave store out, and start the "
    "server with --max-stored-responses above 0"
)


def _check_store(service: ModelService) -> None:
    """Before anything is computed."""
    try:
        service.responses.check()
    except StoreError as error:
        found = unavailable(error)
        found.message += "; send store: false for a response that is not stored"
        raise found from error


def _json(items: Sequence[Item]) -> bytes:
    return json.dumps(items).encode()


async def _detach(service: ModelService, generation: GenerationCall) -> Response | None:
    """Answer a response that is made in the background: by what it is now, or by its stream."""
    if generation.kept.request is None:
        return None
    queued = ResponseWriter(service, generation).queued()
    call = generation.call
    try:
        await service.server.background.add(call.key_name, queued)
    except StoreError as error:
        raise unavailable(error) from error
    if generation.body.stream:
        return StoredStream(service.server, call, queued.id, after=-1)
    return Response(queued.body, media_type="application/json")


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
    detach=_detach,
)


# ---- counting


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def _counted(service: ModelService, call: Call, body: CountRequest) -> Translation[None]:
    items = [*_earlier(service, call, body), *_given(service, call, body)]
    return Translation(chat_request(prompt_fields(body, items)), None)


_COUNTING = Dialect(
    schema=CountRequest,
    id_prefix="resp_",
    to_chat=_counted,
    frames=ResponseFrames,
    reply=reply,
    field_names=_FIELD_NAMES,
)


async def count_input_tokens(service: ModelService, request: Request) -> Response:
    """How many tokens the prompt has; nothing is computed."""
    count = InputTokens(input_tokens=await count_prompt_tokens(service, request, _COUNTING))
    return Response(count.model_dump_json(), media_type="application/json")
