"""Idempotency keys: a request that is sent again gets the answer that it had, computed once.

With the header `Idempotency-Key`, what an answer has besides its body (its id, time and seed) is
stored before it is computed, and the answer itself when it is whole. A repeated request is sent
that answer; where there is none (the client left, a process died, it was too large to be kept) it
is computed again, and because of the seed it is the same. While it is being computed, others with
the same key wait.
"""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from quire.core.sampling import new_seed
from quire.server.answers.store import KeyedAnswer
from quire.server.calls import PING, SCOPE_KEY, AnswerIdentity, Call, unavailable
from quire.server.database import StoreError
from quire.server.errors import ApiError
from quire.server.logs import log
from quire.server.middleware import (
    UPLOADS,
    App,
    ClientGoneError,
    Message,
    Receive,
    Scope,
    Send,
    disconnected,
    replay,
)
from quire.server.service import Service

T = TypeVar("T")
HEADER = b"idempotency-key"
MAX_LENGTH = 255
_SOUND = re.compile(rb"[\x21-\x7e]+(?: +[\x21-\x7e]+)*")
_PART_BYTES = 64 << 10  # of a body that is sent again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2  # between two looks at an answer that is computed
# Statuses of a client's mistakes that another moment would not answer otherwise.
_KEPT_ERRORS = (400, 413, 422)
# Paths whose answers name what they make, which survives a power cut: so must its name before.
_MAKING = (UPLOADS, "/v1/batches")
REPLAYED = ("idempotent-replayed", "true")  # a header


class Idempotent:
    """ASGI middleware behind the one that admits requests; `paths`: those of bodies in JSON."""

    def __init__(self, app: App, service: Service, paths: Collection[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _given(scope)
        if given is None:
            await self._app(scope, receive, send)
            return
        call: Call = scope[SCOPE_KEY]
        # An event id names its answer; requests without a body can be repeated as they are.
        if call.path == UPLOADS:
            call.idempotency_key = given  # the handler looks it up: it is not the bytes that count
        elif call.path in self._paths and call.last_event_id is None:
            await self._answer(scope, receive, send, call, given)
            return
        await self._app(scope, receive, send)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, call: Call, key: str
    ) -> None:
        message = await receive()  # in one piece
        if message["type"] != "http.request":
            raise ClientGoneError
        body: bytes = message["body"]
        digest = await asyncio.to_thread(_digest_of, call, body)
        keyed = KeyedCall(self._service, call, key, digest)
        async with keyed.claimed(receive) as found:
            if found.body is not None:
                await _send_again(send, call, found)
                return
            capture = _Capture(send, self._service.settings.max_idempotency_bytes // 8)
            await self._app(scope, replay([body], receive), capture.send)
            is_good = capture.status == 200 and call.error is None
            if capture.is_whole and (is_good or capture.status in _KEPT_ERRORS):
                body = b"".join(capture.parts)
                await keyed.keep(found, capture.status, capture.headers, body)


class KeyedCall:
    """A call with an idempotency key; `digest`: of all that its answer depends on."""

    def __init__(self, service: Service, call: Call, key: str, digest: str) -> None:
        self._service = service
        self._call = call
        self._key = key
        self._digest = digest

    @asynccontextmanager
    async def claimed(self, receive: Receive) -> AsyncIterator[KeyedAnswer]:
        """What the key stands for, while nobody else computes its answer; where that is not there,
        the call gets its identity. Raises where the key is of another request. `receive`: of a
        request whose body was read."""
        new = KeyedAnswer(
            self._digest,
            uuid.uuid4().hex,
            int(time.time()),
            new_seed() >> 1,  # SQLite's integers have a sign
        )
        name = self._call.key_name
        claim = f"idempotency {len(name)} {name} {self._key}"
        await self._take(claim, receive, new)
        try:
            found = await self._found(new)
            if found.body is None:
                if self._call.path in _MAKING:
                    await _stored(self._service.responses.sync)
                identity = AnswerIdentity(found.name, found.created_at, found.seed)
                self._call.identity = identity
            yield found
        finally:
            self._service.claims.leave(claim)

    async def _take(self, claim: str, receive: Receive, new: KeyedAnswer) -> None:
        """Once nobody else computes this answer."""
        take, pause_s = self._service.claims.take, _FIRST_PAUSE_S
        if take(claim):
            return
        await self._found(new)  # not to wait for another request
        leaving = asyncio.create_task(disconnected(receive))
        try:
            while not take(claim):
                await asyncio.wait({leaving}, timeout=pause_s)
                if leaving.done():
                    raise ClientGoneError
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            leaving.cancel()

    async def _found(self, new: KeyedAnswer) -> KeyedAnswer:
        """What the key stands for."""
        begin = self._service.responses.begin_keyed
        found = await _stored(lambda: begin(self._call.key_name, self._key, new))
        if found.digest != new.digest:
            raise ApiError(
                422,
                f"Idempotency-Key {self._key!r} was used for another request (another body, byte "
                "for byte, or another path) in the last 24 hours: use a new key for a new request",
                code="idempotency_key_reused",
            )
        return found

    async def keep(
        self, found: KeyedAnswer, status: int, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        """The answer is whole."""
        ignored = self._call.ignored_fields
        if ignored.names:
            headers = [*headers, ("x-quire-ignored-fields", str(ignored))]
        answer = replace(found, status=status, headers=headers, body=body)
        end = self._service.responses.end_keyed
        try:
            await asyncio.to_thread(end, self._call.key_name, self._key, answer)
        except StoreError as error:  # a repeated request is computed again, to the same answer
            log("answer_not_kept", logging.ERROR, error=str(error))


def _given(scope: Scope) -> str | None:
    """The key of a POST, checked."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    found: Iterable[tuple[bytes, bytes]] = scope["headers"]
    values = [value for name, value in found if name == HEADER]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) > MAX_LENGTH or not _SOUND.fullmatch(values[0]):
        raise ApiError(
            400,
            f"Idempotency-Key must be given once, as 1 to {MAX_LENGTH} printable ASCII characters",
            code="idempotency_key",
        )
    return values[0].decode()


def _digest_of(call: Call, body: bytes) -> str:
    """Of all that an answer depends on."""
    wanted = f"{call.path}\0{call.wants_trace:d}{call.wants_ids:d}\0"
    found = hashlib.sha256(wanted.encode())
    found.update(body)
    return found.hexdigest()


async def _stored(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except StoreError as error:
        raise unavailable(error) from error


class _Capture:
    """Sends an answer on and keeps it, up to `max_bytes`."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        self._send = send
        self._left = max_bytes
        self._has_end = False
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.parts: list[bytes] = []

    @property
    def is_whole(self) -> bool:
        return self._has_end and self._left >= 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(n.decode(), v.decode("latin-1")) for n, v in message["headers"]]
        elif not message.get(PING):
            self._take(message.get("body", b""))
            self._has_end = not message.get("more_body", False)
        await self._send(message)

    def _take(self, part: bytes) -> None:
        self._left -= len(part)
        if self._left < 0:
            self.parts.clear()
        else:
            self.parts.append(part)


async def _send_again(send: Send, call: Call, answer: KeyedAnswer) -> None:
    """The answer as it was, marked as such. Nothing is computed, and no tokens are counted."""
    call.is_replayed = True
    headers = [(n.encode(), v.encode("latin-1")) for n, v in answer.headers or ()]
    headers.append((REPLAYED[0].encode(), REPLAYED[1].encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    body = answer.body or b""
    for at in range(0, len(body), _PART_BYTES):
        part = body[at : at + _PART_BYTES]
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
