"""Which of a server's models a request is for, by the `model` of its body."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.server.bodies import SMALL_BYTES
from quire.server.calls import SCOPE_KEY, Call
from quire.server.dialects.ollama_body import ShowRequest, model_name
from quire.server.fields import Strict
from quire.server.middleware import ClientGoneError
from quire.server.model_service import ModelService
from quire.server.service import Service
from quire.server.submission import run_in_pool, wait_for_disconnect

# The answer to a body for which its model need not be loaded; None: it must be.
AnswerUnloaded = Callable[[ModelService, Any], Response | None]


class Chosen(NamedTuple):
    model: ModelService
    request: Request  # with its body still to be read


async def choose_model(
    service: Service,
    request: Request,
    schema: type[Strict],
    answer_unloaded: AnswerUnloaded | None = None,
) -> Chosen | Response:
    """The model that a body asks for, loaded; or the answer of one that needs no loaded model. An
    ApiError where the body is unsound or names a model that there is not: nothing is loaded for
    that."""
    if len(service.models) == 1 and service.residency is None:
        return Chosen(service.first, request)
    message = await request.receive()  # the middleware gives it in one piece
    if message["type"] != "http.request":
        raise ClientGoneError
    data: bytes = message["body"]
    find = partial(_model_of, service, request, schema, data)
    if len(data) <= SMALL_BYTES:
        model, body = find()
    else:
        model, body = await run_in_pool(service.first, request, find, len(data))
    if answer_unloaded is not None and (answer := answer_unloaded(model, body)) is not None:
        return answer
    del body  # it may be large, and loading take long
    await load_model(request, model)
    return Chosen(model, Request(request.scope, _followed(message, request)))


def _followed(message: Any, request: Request) -> Any:
    waiting = [message]

    async def receive() -> Any:
        return waiting.pop() if waiting else await request.receive()

    return receive


def _model_of(
    service: Service, request: Request, schema: type[Strict], data: bytes
) -> tuple[ModelService, Any]:
    """The model and the body, by the reader that the model's own handler uses: what the two would
    read otherwise (a name twice, half a character) is refused."""
    call: Call = request.scope[SCOPE_KEY]
    body: Any = service.read_body(call, data, schema)
    name = body.model
    if isinstance(body, ShowRequest):
        name = body.model or body.name
    is_ollama = request.scope["path"].startswith("/api/")
    return service.model_of(model_name(name) if is_ollama else name), body


async def load_model(request: Request, model: ModelService) -> None:
    """Have a model loaded that is loaded on demand, unless the client goes before. It stays loaded
    until the caller awaits something. `request` has no body that is still to be read."""
    residency = model.server.residency
    if residency is None or residency.has(model):
        return
    call: Call = request.scope[SCOPE_KEY]
    leaving = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        if not await residency.load(model, leaving, is_background=call.is_background):
            raise ClientGoneError
    finally:
        leaving.cancel()
