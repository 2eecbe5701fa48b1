"""Background: responses that are made whether or not their client stays.

One is a row of the AnswerStore from the moment it is asked for; a process that has its claim makes
it, by the server's own handler. Where that process or the whole server dies, the response is made
anew: its id, its time and its seed are in the row, so its events are the same.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quire.server.answers.claims import Claims
from quire.server.answers.store import AnswerStore, StoredResponse
from quire.server.calls import PING, AnswerIdentity, Call
from quire.server.database import StoreError
from quire.server.errors import OPENAI_ERRORS, ApiError
from quire.server.jobs.lines import receive_of, scope_of
from quire.server.keys import ApiKey
from quire.server.logs import LOGGER, log
from quire.server.middleware import App, Message

PATH = "/v1/responses"
MAX_LIVE = 64  # of one API key
_MAX_RUNNING = 256  # in one process
_SWEEP_S = 1.0  # between two looks for what nobody makes
_FLUSH_S = 0.2  # between two writes of events
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_GIVING_UP_S = 0.1  # within which a server knows that it has lost its model
_MAX_LOSSES = 5  # of its model, before a response fails
_LAST_EVENT = 1 << 62  # a number that no event has
_BUSY = (429, 503)  # statuses of a request that another moment would have had room for

FindKey = Callable[[str], ApiKey | None]  # by its name; raises a LookupError without one


class Background:
    """On the event loop; started once the model is loaded."""

    def __init__(
        self,
        store: AnswerStore,
        claims: Claims,
        find_key: FindKey,
        num_losses: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_losses`: how often the server has lost a model."""
        self._num_losses = num_losses
        self._store = store
        self._claims = claims
        self._find_key = find_key
        self._app: App | None = None
        self._on_done: Callable[[Call], None] = lambda _: None
        self._sweeping: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._failure: str | None = None  # why the store could not be used the last time

    def answer_by(self, app: App, on_done: Callable[[Call], None]) -> None:
        self._app, self._on_done = app, on_done

    def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """What is being made is made anew by the next process."""
        tasks = [*self._running.values(), *([self._sweeping] if self._sweeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, owner: str, response: StoredResponse) -> None:
        """Have it made, unless it is there: its id may be that of an idempotency key, sent again.
        Raises an ApiError where the key has too many, or it cannot be stored."""
        if await asyncio.to_thread(self._store.find, owner, response.id) is not None:
            return
        live = await asyncio.to_thread(self._store.live)
        count = sum(1 for holder, _ in live if holder == owner)
        if count >= MAX_LIVE:
            message = f"{count} background responses of the key have not ended; cancel some first"
            raise ApiError(429, message, code="too_many_responses", retry_after_s=5.0)
        if not await asyncio.to_thread(self._store.put, owner, response):
            raise ApiError(400, "the response is too large to be stored", param="background")
        self._wake.set()

    def cancel(self, response_id: str) -> None:
        """Another process that makes it finds out by itself."""
        if (task := self._running.get(response_id)) is not None:
            task.cancel()

    async def _sweep(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._take_all()
            except StoreError as error:
                self._report(str(error))
            except Exception:  # a bug, or a supervisor that is gone: the next look may go well
                LOGGER.exception("responses_interrupted")
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):  # wait_for() may lose a cancellation
                    await self._wake.wait()

    async def _take_all(self) -> None:
        """All that nobody makes."""
        if self._app is None or not self._store.is_used:
            return
        live = await asyncio.to_thread(self._store.live)
        self._report(None)
        for owner, response_id in live:
            self._take(owner, response_id)

    def _report(self, failure: str | None) -> None:
        if failure is not None and failure != self._failure:
            log("answers_unavailable", logging.ERROR, error=failure)
        self._failure = failure

    def _take(self, owner: str, response_id: str) -> None:
        if response_id in self._running or len(self._running) >= _MAX_RUNNING:
            return
        if self._claims.take(_claim(response_id)):
            task = asyncio.create_task(self._make(owner, response_id))
            self._running[response_id] = task
            task.add_done_callback(lambda _: self._left(response_id))

    def _left(self, response_id: str) -> None:
        del self._running[response_id]
        self._claims.leave(_claim(response_id))

    async def _make(self, owner: str, response_id: str) -> None:
        assert self._app is not None
        pause_s, num_lost = _FIRST_PAUSE_S, 0
        try:
            while True:
                num_losses = self._num_losses()
                stored = await asyncio.to_thread(self._store.find, owner, response_id)
                if stored is None or not stored.is_live:
                    return
                making = _Making(self._app, self._store, owner, stored)
                is_over = await making.run(self._find_key, self._on_done)
                if making.has_failed:
                    await asyncio.sleep(_GIVING_UP_S)
                    is_lost = self._num_losses() != num_losses
                    num_lost += is_lost
                    is_over = not is_lost or num_lost >= _MAX_LOSSES
                if is_over:
                    await making.end()
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except StoreError as error:  # it stays as it is, and is tried again
            self._report(str(error))
            await asyncio.sleep(_LONGEST_PAUSE_S)
        except Exception:
            LOGGER.exception("response_interrupted")
            await asyncio.sleep(_LONGEST_PAUSE_S)


def _claim(response_id: str) -> str:
    return f"response {response_id}"


class _Making:
    """One attempt: its events go to the store as they come."""

    def __init__(self, app: App, store: AnswerStore, owner: str, stored: StoredResponse) -> None:
        self._app = app
        self._store = store
        self._owner = owner
        self._stored = stored
        self._status: int | None = None
        self._content = b""  # not written yet
        self._num_written = 0  # events
        self._has_begun = False
        self._made: StoredResponse | None = None
        self._failure: tuple[str, str] | None = None  # a code and a message

    async def run(self, find_key: FindKey, on_done: Callable[[Call], None]) -> bool:
        """Whether it is over, and end() may be called: False where another moment is needed."""
        try:
            key = find_key(self._owner)
        except LookupError as error:
            self._failure = ("server_error", str(error))
            return True
        stored = self._stored
        call = Call("POST", PATH, uuid.uuid4().hex, key=key)
        call.error_shape = OPENAI_ERRORS
        call.stored = stored
        call.identity = AnswerIdentity(stored.id, stored.created_at, stored.seed)
        answering = asyncio.create_task(self._answer(call))
        try:
            while not (await asyncio.wait({answering}, timeout=_FLUSH_S))[0]:
                if not await self._flush():
                    return True  # cancelled or deleted
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            on_done(call)
        self._made = call.made
        if self._status in _BUSY or (self._status == 200 and self._made is None):
            return False
        if self._status != 200:
            message: str = json.loads(self._content)["error"]["message"]
            is_own = self._status is not None and self._status < 500
            self._failure = ("invalid_prompt" if is_own else "server_error", message)
        return True

    @property
    def has_failed(self) -> bool:
        """By an error of the server."""
        if self._made is not None:
            return self._made.status == "failed"
        return self._status is not None and self._status >= 500 and self._status not in _BUSY

    async def _answer(self, call: Call) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = call.status = message["status"]
            elif not message.get(PING):
                self._content += message.get("body", b"")

        await self._app(scope_of(call), receive_of(self._stored.request), send)

    async def _flush(self) -> bool:
        """False where it was cancelled or deleted."""
        store, stored = self._store, self._stored
        if self._status != 200 or not self._content:
            found = await asyncio.to_thread(store.find, self._owner, stored.id)
            return found is not None and found.is_live
        if not self._has_begun and not await self._begin():
            return False
        content, self._content = self._content, b""
        if not await asyncio.to_thread(store.add_events, stored.id, self._num_written, content):
            return False
        self._num_written += content.count(b"\n\n")
        return True

    async def _begin(self) -> bool:
        self._has_begun = True
        body = _changed(self._stored.body, status="in_progress")
        return await asyncio.to_thread(
            self._store.begin_response, self._owner, self._stored.id, body
        )

    async def end(self) -> None:
        """Store what became of it, unless it was cancelled or deleted."""
        if self._failure is not None:
            await self._fail(*self._failure)
        if self._made is None or not (self._has_begun or await self._begin()):
            return
        made = self._made
        log("response", response=made.id, key=self._owner, status=made.status)
        await asyncio.to_thread(
            self._store.end_response,
            *(self._owner, made.id, made.status, made.body, self._num_written, self._content),
        )

    async def _fail(self, code: str, message: str) -> None:
        """It cannot be made; its events are made of this, unless an attempt before this one left
        some: then the last one follows these."""
        error = {"code": code, "message": message}
        body = _changed(self._stored.body, status="failed", error=error)
        stored = self._stored
        left = await asyncio.to_thread(self._store.events, stored.id, _LAST_EVENT)
        number = sum(first + data.count(b"\n\n") for first, data in left)  # of the last run
        last = _failed_event(body, number) if left else b""
        log("response", logging.WARNING, response=stored.id, key=self._owner, error=message)
        await asyncio.to_thread(
            self._store.end_response, self._owner, stored.id, "failed", body, number, last
        )


def _changed(body: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(body), **changes}).encode()


def _failed_event(body: bytes, number: int) -> bytes:
    head = f'"type":"response.failed","sequence_number":{number}'
    return f'event: response.failed\ndata: {{{head},"response":{body.decode()}}}\n\n'.encode()


def cancelled(stored: StoredResponse) -> bytes:
    """The body of one that was cancelled before its end."""
    return _changed(stored.body, status="cancelled")
