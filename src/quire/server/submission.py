"""From a call to its outputs: the body is prepared off the event loop, its prompts are queued
together within the key's quota, and waited for while the client is there; quire's errors become the
API's.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request

from quire.core.errors import QuireError
from quire.core.request import BACKGROUND, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.aio import Stream
from quire.llm import OnlineModel
from quire.llm.prompts import Prepared
from quire.server.bodies import SMALL_BYTES
from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import ApiError, as_api_error
from quire.server.fields import Strict, obeyed_fields
from quire.server.middleware import ClientGoneError
from quire.server.model_service import ModelService
from quire.server.quotas import demand_of
from quire.server.resuming import digest_of
from quire.server.schemas import CommonFields

_WATCH_AFTER_S = 0.02  # most work has ended by then, and needs no watch for a disconnect

T = TypeVar("T")
B = TypeVar("B", bound=CommonFields)

Prompts = list[tuple[Prepared, SamplingParams]]


class PreparedBody(NamedTuple, Generic[B]):
    """A body and the tokens of its prompts. The text is dropped from the body: it may be large, and
    the answer may take long.
    """

    body: B
    prompts: Prompts


def call_and_model(service: ModelService, request: Request) -> tuple[Call, OnlineModel]:
    """The call and the model that answers it; raises where it cannot be answered now."""
    call: Call = request.scope[SCOPE_KEY]
    llm = service.llm
    if call.identity is not None:
        call.identity = call.identity.of_model(llm.fingerprint)
    return call, llm


async def prepare_body(
    service: ModelService, request: Request, prepare: Callable[[bytes], T], *, is_quick: bool
) -> T:
    """What `prepare` makes of the body. It runs in the pool, unless the body is small and
    `is_quick` to prepare."""
    message = await request.receive()  # the middleware gives it in one piece
    if message["type"] != "http.request":
        raise ClientGoneError
    body: bytes = message["body"]
    call: Call = request.scope[SCOPE_KEY]
    if call.wants_ids:
        llm = service.llm
        call.body_digest = digest_of(body, service.name, llm.fingerprint, llm.device)
    if is_quick and len(body) <= SMALL_BYTES:
        return prepare(body)
    return await run_in_pool(service, request, lambda: prepare(body), len(body))


async def run_in_pool(
    service: ModelService, request: Request, work: Callable[[], T], size: int = 0
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


class ErrorMapper:
    """Turns quire's errors into ApiErrors that name fields of this schema; also a context manager
    that does so. `names`: the schema's names of ChatRequest's fields, where they differ.
    """

    def __init__(
        self, service: ModelService, schema: type[Strict], names: Mapping[str, str] | None = None
    ) -> None:
        self._service = service
        self._names = names or {}
        self._fields = {*obeyed_fields(schema), *self._names}

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, QuireError):
            raise self.as_api_error(error) from error
        if isinstance(error, ApiError):
            self._rename(error)

    async def of(self, work: Awaitable[T]) -> T:
        with self:
            return await work

    def as_api_error(self, error: BaseException) -> ApiError:
        assert isinstance(error, QuireError)
        found = as_api_error(error, self._fields, is_draining=self._service.is_draining)
        self._rename(found)
        return found

    def _rename(self, error: ApiError) -> None:
        """Name the field as the schema does; in the message only a name that is no English word."""
        own = self._names.get(error.param or "")
        if own is None or error.param is None:
            return
        if "_" in error.param:
            error.message = re.sub(rf"(?<![\w.]){error.param}(?!\w)", own, error.message)
        error.param = own


async def submit_all(
    service: ModelService,
    llm: OnlineModel,
    call: Call,
    body: CommonFields,
    prompts: Sequence[tuple[Prepared, SamplingParams]],
    *,
    stream: bool,
    pooling: bool = False,
) -> list[Stream]:
    """Queue all prompts in one turn of the event loop, if the key's quota admits them; or none. A
    503 where the server has begun to end since the body was read."""
    _ = service.llm
    call.quota = service.meter.admit(call.key, demand_of(prompts, pooling=pooling))
    submit = partial(
        llm.submit,
        key=call.key_name,
        priority=BACKGROUND if call.is_background else body.priority or 0,
        timeout_s=body.timeout,
        stream=stream,
        pooling=pooling,
    )
    given = await asyncio.gather(
        *(submit(prompt, params) for prompt, params in prompts), return_exceptions=True
    )
    streams = [accepted for accepted in given if isinstance(accepted, Stream)]
    for failure in given:
        if isinstance(failure, BaseException):
            for accepted in streams:
                accepted.cancel()
            raise failure
    return streams


async def outputs_of(
    request: Request, call: Call, streams: Sequence[Stream]
) -> list[RequestOutput]:
    """Wait for all outputs; cancel the requests if the client disconnects."""
    working = asyncio.create_task(_all_ends(streams))
    leaving = asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = not working.done()
        if is_gone:
            for stream in streams:
                stream.cancel()
        outputs = await working  # also after a disconnect: quotas count them
        call.outputs += outputs
        if is_gone:
            raise ClientGoneError
        return outputs
    finally:
        leaving.cancel()
        working.cancel()
        for stream in streams:
            stream.cancel()


async def _all_ends(streams: Sequence[Stream]) -> list[RequestOutput]:
    """A coroutine to make a task of: a gather() that is cancelled logs unread exceptions."""
    return await asyncio.gather(*(stream.output() for stream in streams))
