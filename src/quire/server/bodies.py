"""Bodies: from a request's bytes to what its endpoint works with, without blocking the event loop.

A body that does not fit its schema is one error that names the field.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import ApiError
from quire.server.json_reader import SMALL_BYTES, BodyLimits, name_of, read_json
from quire.server.middleware import ClientGoneError
from quire.server.schemas import Strict
from quire.server.service import Service

_WATCH_AFTER_S = 0.02  # most work has ended by then, and needs no watch for a disconnect
B = TypeVar("B", bound=Strict)
T = TypeVar("T")


def parse_body(body: bytes, schema: type[B], limits: BodyLimits) -> B:
    """A body as its schema; an ApiError about the first field that is wrong."""
    found = read_json(body, limits)
    try:
        return schema.model_validate(found)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from None


async def prepare_body(
    service: Service, request: Request, prepare: Callable[[bytes], T], *, is_quick: bool
) -> T:
    """What `prepare` makes of the body. It runs in the pool, unless the body is small and
    `is_quick` to prepare."""
    message = await request.receive()  # the middleware gives it in one piece
    if message["type"] != "http.request":
        raise ClientGoneError
    body: bytes = message["body"]
    if is_quick and len(body) <= SMALL_BYTES:
        return prepare(body)
    return await run_in_pool(service, request, lambda: prepare(body), len(body))


async def run_in_pool(
    service: Service, request: Request, work: Callable[[], T], size: int = 0
) -> T:
    """Work that would block the event loop; cancelled when the client goes away."""
    working = service.pool.submit(_queue_of(request), work, size)
    leaving: asyncio.Future[None] | None = None

    def watch() -> None:
        nonlocal leaving
        leaving = asyncio.ensure_future(wait_for_disconnect(request))
        leaving.add_done_callback(lambda _: working.cancel())

    watching = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, watch)
    try:
        return await working
    except asyncio.CancelledError:
        if leaving is not None and leaving.done():
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()
        if leaving is not None:
            leaving.cancel()


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _queue_of(request: Request) -> str:
    """The work pool's queue: one for every key; without keys, one for every address."""
    call: Call = request.scope[SCOPE_KEY]
    if call.key is not None:
        return f"key {call.key.name}"
    return f"address {call.client}"


# ---- what is wrong with a body


_UNION_MEMBERS = ("str", "int", "float", "bool", "none")  # as pydantic's paths name them


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The 400 for a body that does not fit its schema, about the first field that does not."""
    error = errors[0]
    field = _field(error)
    if field is None:
        return ApiError(400, f"the body must be a JSON object: {error['msg']}")
    same = [other for other in errors if _field(other) == field]
    return ApiError(400, _message(field, same), param=field, code=_code(error["type"]))


def _field(error: Any) -> str | None:
    """A path such as messages[0].content, as far as it is one of names and indices."""
    steps = error["loc"]
    is_unknown = error["type"] == "extra_forbidden"
    return name_of(
        [
            step
            for number, step in enumerate(steps)
            if isinstance(step, int)
            or (is_unknown and number == len(steps) - 1)
            or (step.isidentifier() and step not in _UNION_MEMBERS)
        ]
    )


def _message(field: str, errors: Sequence[Any]) -> str:
    match errors[0]["type"]:
        case "missing":
            return f"{field} is missing"
        case "extra_forbidden":
            return f"{field} is not a field that quire knows"
        case "none_required":
            return f"{field} is not supported: leave it out (see /docs)"
        case "too_long" if field == "tools":
            return "tools is not supported: quire does not call tools yet"
    reasons = dict.fromkeys(error["msg"] for error in errors)
    return f"{field}: {'; or: '.join(reasons)}"


def _code(kind: str) -> str | None:
    return {"none_required": "unsupported_field", "extra_forbidden": "unknown_field"}.get(kind)
