"""Middleware: what every request passes before the application sees it.

In order: its address, its Host and Origin, its key and what that key is for, its kind of body, its
key's limits, its body within size and time. It also gives each a request id and writes its line of
the log.
"""

import asyncio
from asyncio import sleep
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from quire.server.calls import CLIENT_GONE, SCOPE_KEY, Call, new_call
from quire.server.connections import Connections, FailedKeys, Proxies, address_group
from quire.server.errors import ApiError, ErrorShape
from quire.server.keys import Access, RequiredScope, required_scope
from quire.server.origins import check_host, check_origin, cors_headers, is_preflight
from quire.server.paths import check_path
from quire.server.quotas import RequestLimits
from quire.server.settings import ServerSettings

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

UPLOADS = "/v1/files"
_SLOWEST_UPLOAD = 32 << 10  # bytes a second of a file, beside the time of a body
_FORM_BYTES = 64 << 10  # of a form around its file
_MAX_DELAYED = 64
_LONGEST_DELAY_S = 2.0
_LOOPBACK_DELAY_S = 0.1


class ClientGoneError(Exception):
    """The client disconnected."""


class Middleware:
    """ASGI middleware; `on_done` gets every call when it has ended."""

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        access: Access,
        limits: RequestLimits,
        connections: Connections,
        failed_keys: FailedKeys,
        on_done: Callable[[Call], None],
        error_shape: Callable[[str], ErrorShape],
    ) -> None:
        self._app = app
        self._settings = settings
        self._access = access
        self._on_done = on_done
        self._error_shape = error_shape  # of a path
        self._limits = limits
        self._num_buffered = 0  # bytes of bodies
        self._connections = connections
        self._proxies = Proxies(settings.trusted_proxies)
        self._failed_keys = failed_keys
        self._num_delayed = 0  # answers to wrong keys that wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        # No web sockets: uvicorn refuses those.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        call = new_call(scope["method"], scope["path"], headers)
        call.error_shape = self._error_shape(call.path)
        scope[SCOPE_KEY] = call
        extra = [(b"x-request-id", call.id.encode()), *cors_headers(headers, self._settings)]
        if call.error_shape.id_header is not None:
            extra.append((call.error_shape.id_header, call.id.encode()))

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                limits = () if call.quota is None else call.quota.headers
                added = [(name.encode(), value.encode()) for name, value in limits]
                if call.ignored_fields.names:
                    added.append((b"x-quire-ignored-fields", str(call.ignored_fields).encode()))
                message = {**message, "headers": [*message["headers"], *added, *extra]}
            await send(message)

        try:
            await self._admit(scope, receive, send_marked, call)
        except ApiError as error:
            call.note(error)
            await send_error(send_marked, error, call.error_shape)
        except ClientGoneError:
            call.error = CLIENT_GONE
        finally:
            self._on_done(call)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        """Find the client. A request that a proxy makes for a client counts as the client's."""
        peer = (scope.get("client") or ("", 0))[0]
        if peer not in self._proxies:
            call.client = peer
            await self._check_and_forward(scope, receive, send, call)
            return
        call.client = self._proxies.client_of(peer, scope["headers"])
        group = None if call.client in self._proxies else address_group(call.client)
        with self._connections.proxied_request(group):
            await self._check_and_forward(scope, receive, send, call)

    async def _check_and_forward(
        self, scope: Scope, receive: Receive, send: Send, call: Call
    ) -> None:
        headers: Headers = scope["headers"]
        check_host(headers, self._settings)
        check_origin(headers, self._settings)
        if is_preflight(scope["method"], headers, self._settings):
            await _send(send, 204, b"", [])
            return
        if required_scope(scope["path"]) is not RequiredScope.NO_KEY:
            await self._authenticate(call, _presented_key(headers))
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        check_path(call.path)  # before its content type: there it may be right
        is_upload = call.path == UPLOADS
        _check_content_type(headers, call.path)
        key = call.key
        if key is not None:
            self._limits.enter(key)
        try:
            if is_upload:
                body = self._limited(headers, receive)
            else:
                body = replay([await self._read_body(headers, receive)], receive)
            await self._app(scope, body, send)
        finally:
            if key is not None:
                self._limits.leave(key)

    async def _authenticate(self, call: Call, presented: str) -> None:
        try:
            call.key = self._access.key_of(presented)
            self._access.check(call.key, call.path)
        except ApiError as error:
            if error.status == 401 and presented:
                await self._slow_down(call, error)
            raise

    async def _slow_down(self, call: Call, error: ApiError) -> None:
        """Delay answers to an address that keeps sending wrong keys, and make them 429s. Right keys
        are never delayed: many clients may share the address. On loopback, which all users of the
        machine share, the answer stays a 401. The number of delayed answers is bounded."""
        group = address_group(call.client)
        wait_s = self._failed_keys.add(group or "loopback")
        if not wait_s:
            return
        if self._num_delayed < min(_MAX_DELAYED, self._connections.max_connections // 8):
            self._num_delayed += 1
            try:
                await sleep(min(wait_s, _LONGEST_DELAY_S if group else _LOOPBACK_DELAY_S))
            finally:
                self._num_delayed -= 1
        error.retry_after_s = wait_s
        if group is not None:
            raise ApiError(
                429,
                "too many wrong API keys came from this address, this one among them",
                code="too_many_failed_keys",
                retry_after_s=wait_s,
                headers=(("connection", "close"),),
            )

    # ---- the body

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body, within its limits of size and time."""
        limit = self._settings.max_body_bytes
        length = _header(headers, b"content-length")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for part in _parts(receive):
                    size += len(part)
                    self._num_buffered += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    self._check_buffered()
                    parts.append(part)
        except TimeoutError:
            raise self._late() from None
        finally:
            self._num_buffered -= size
        return b"".join(parts)

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """The application's `receive` for a file, which it takes part by part. It may take the time
        of a body, and more with each part that comes: one that trickles is given up."""
        limit = self._settings.max_file_bytes + _FORM_BYTES
        length = _header(headers, b"content-length")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(self._settings.max_file_bytes, "--max-file-bytes")
        size, is_whole = 0, False
        started = asyncio.get_running_loop().time()
        usual_s = self._settings.body_timeout_s

        async def limited() -> Message:
            nonlocal size, is_whole
            if is_whole:  # whoever waits now, waits for the client to go
                return await receive()
            now = asyncio.get_running_loop().time()
            deadline = started + usual_s + size / _SLOWEST_UPLOAD
            try:
                async with asyncio.timeout_at(min(now + usual_s, deadline)):
                    message = await receive()
            except TimeoutError:
                raise self._late(size) from None
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(self._settings.max_file_bytes, "--max-file-bytes")
            is_whole = not message.get("more_body", False)
            return message

        return limited

    def _late(self, num_uploaded: int | None = None) -> ApiError:
        """`num_uploaded`: bytes of a file that have come."""
        text = f"the body did not come within {self._settings.body_timeout_s:g} s"
        if num_uploaded is not None:
            text += (
                f" and as long as {_SLOWEST_UPLOAD:,} bytes a second take: {num_uploaded:,} have "
                "come; send the file faster, or in parts"
            )
        return ApiError(
            408,
            text,
            code="timeout",
            headers=(("connection", "close"),),
        )

    def _check_buffered(self) -> None:
        if self._num_buffered > self._settings.max_buffered_bytes:
            raise ApiError(
                503,
                "too many large requests are coming in at once",
                code="overloaded",
                retry_after_s=1.0,
                headers=(("connection", "close"),),
            )


async def _parts(receive: Receive) -> Any:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone; its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def replay(body: list[bytes], receive: Receive) -> Receive:
    """The application's `receive`: the body in one piece, to which no reference is kept here; then
    whatever follows."""

    async def replayed() -> Message:
        if not body:
            return await receive()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return replayed


def _too_large(limit: int, option: str = "--max-body-bytes") -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit:,} bytes, which is this server's {option}",
        code="body_too_large",
        headers=(("connection", "close"),),
    )


_ALSO_JSON = ("", "application/x-www-form-urlencoded", "application/octet-stream")


def _check_content_type(headers: Headers, path: str) -> None:
    """JSON, but for files: web pages can post forms and plain text across origins without a
    preflight. Of a form that a page posts the origin is checked before.

    Ollama reads any body as JSON: its documentation's curl posts a form, and LiteLLM, where it has
    a key, names no type, or bytes. Such bodies are taken on its routes of programs that are no
    browser: those send Origin with every POST."""
    wanted = "multipart/form-data" if path == UPLOADS else "application/json"
    kind = _header(headers, b"content-type").partition(";")[0].strip().lower()
    is_browser = any(name in (b"origin", b"sec-fetch-site") for name, _ in headers)
    is_ollama = path.startswith("/api/") and not is_browser
    if kind != wanted and not (is_ollama and kind in _ALSO_JSON):
        raise ApiError(
            415,
            f"the content type must be {wanted}, got {kind!r:.100}",
            code="content_type",
        )
    encoding = _header(headers, b"content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"the body must be sent as it is, not {encoding!r:.100}", code="content_encoding"
        )


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    for found, value in headers:
        if found == name:
            return value.decode("latin-1")
    return ""


def _presented_key(headers: Headers) -> str:
    """As an Authorization header has it; Anthropic's clients have a header of their own, and so
    have those for Azure."""
    given = _header(headers, b"authorization")
    if not given:
        given = _header(headers, b"x-api-key") or _header(headers, b"api-key")
        return f"Bearer {given}" if given else ""
    return given


async def send_error(send: Send, error: ApiError, shape: ErrorShape) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers]
    headers.append((b"content-type", b"application/json"))
    with suppress(OSError):  # the client went away
        await _send(send, shape.status(error), shape.body(error), headers)


async def _send(send: Send, status: int, body: bytes, headers: Headers) -> None:
    if status != 204:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
