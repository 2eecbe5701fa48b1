"""HttpProtocol: uvicorn's HTTP/1.1 with a deadline for every state of a connection, whatever its
client sends or leaves out.

A connection is idle (between requests, or its request still comes), busy (its request is answered)
or lingering (all is answered; what the client still sends is thrown away until it closes). Each
state has a deadline:

    idle        header_timeout_s for a head, keep_alive_s before it; the middleware has the body's
    busy        unread_timeout_s for a client that does not take what is written to it
    lingering   linger_timeout_s and linger_bytes

A connection is closed with something unread only after lingering: the system would answer what
comes after with a reset, and the client would lose the answer with it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_remote_addr

from quire.server.connections import Connections
from quire.server.errors import OPENAI_ERRORS, ApiError

Headers = list[tuple[bytes, bytes]]

_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_UPGRADE_HEADERS = frozenset((b"upgrade", b"connection", b"http2-settings"))
MAX_PIPELINED = 8  # requests that wait on one connection
MAX_HEADERS = 256
MAX_CHUNKS = 16_384  # of a body, and one more for each 64 bytes
MAX_KEPT_BODY = 64 << 10  # bytes that are read after an early answer to keep the connection
MIN_PROGRESS_BYTES = 4096  # that a client must read in unread_timeout_s


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits and deadlines of every connection of a server."""

    connections: Connections
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    unread_timeout_s: float = 60.0
    linger_timeout_s: float = 5.0
    linger_bytes: int = 16 << 20
    keep_alive_s: float = 65.0


class HttpProtocol(HttpToolsProtocol):
    """The limits are set once, by `protocol_class`, on a subclass."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]
        self._lowest: asyncio.Transport | None = None  # of the connection, beneath any TLS
        self._group: str | None = None  # of its address, for the connection's limits
        self._cycle_transport: _CycleTransport
        self._answering: RequestResponseCycle | None = None
        self._num_head_bytes = 0  # received, of a head that has not ended
        self._num_parsed_bytes = 0  # of a request's URL, headers and trailers
        self._num_chunks = 0  # of its body, and their bytes
        self._num_body_bytes = 0
        self._is_in_head = True
        self._wants_keep_alive = True
        self._is_discarding = False  # what comes is not parsed any more
        self._num_discarded = 0
        self._is_lingering = False
        self._is_shutting_down = False
        self._deadline: asyncio.TimerHandle | None = None  # for receiving
        self._unread_deadline: asyncio.TimerHandle | None = None  # for the client to read
        self._num_unread = 0

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycle_transport = _CycleTransport(transport, self._close_gently)
        try:
            self.enter(transport)
        except ApiError as error:
            self._refuse(error)
        else:
            self._set_deadline(self.limits.header_timeout_s, self._on_head_deadline)

    def enter(self, transport: asyncio.Transport) -> None:
        """Count the connection, once: with TLS that is before its handshake."""
        if self._lowest is None:
            self._lowest = transport
            peer = get_remote_addr(transport)
            self._group = self.limits.connections.enter(self, peer[0] if peer else "")

    def leave(self) -> None:
        if self._lowest is not None:
            self._lowest = None
            self.limits.connections.leave(self, self._group)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._stop_deadline()
        self._stop_unread_deadline()
        for cycle in (self._answering, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # also after an error

    def close_now(self) -> None:
        if self._lowest is not None:
            self._lowest.abort()

    def shutdown(self) -> None:
        self._is_shutting_down = True
        if self._is_lingering:
            self.transport.abort()
        elif not self.transport.is_closing():
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came since the last answer; if that was not read either, the client is gone."""
        if self.transport.get_write_buffer_size():
            self._cut("unread")
        else:
            super().timeout_keep_alive_handler()

    # ---- receiving

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            self._discard(len(data))
            return
        self._unset_keepalive_if_required()
        if self._is_in_head:
            self._num_head_bytes += len(data)
        self._parse(data)
        if self._is_in_head and self._num_head_bytes and not self._is_discarding:
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(self._headers_too_large())
            elif self._deadline is None:  # a later request of a connection that was kept
                self._set_deadline(self.limits.header_timeout_s, self._on_head_deadline)

    def _parse(self, data: bytes) -> None:
        while not self._is_discarding:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "this is no valid HTTP request", code="http"))

    def _head_without_upgrade(self) -> bytes:
        """An upgrade to another protocol may be ignored: the request is parsed again without it.
        Java's client asks for one with each first request."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(ApiError(400, "this server is no proxy", code="http"))
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [
            b"%s: %s" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS
        ]
        return b"\r\n".join([*lines, b"\r\n"])

    def on_message_begin(self) -> None:
        if self._is_discarding:
            return
        self._num_parsed_bytes = 0
        # A head has begun, maybe in the same packet as the end of the last body.
        self._num_head_bytes = self._num_head_bytes or 1
        self._num_chunks = self._num_body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_discarding:
            return
        self._num_parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers after a chunked body are headers too."""
        if self._is_discarding:
            return
        self._num_parsed_bytes += len(name) + len(value) + 4
        if (
            self._num_parsed_bytes > self.limits.max_header_bytes
            or len(self.headers) >= MAX_HEADERS
        ):
            self._refuse(self._headers_too_large())
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_discarding:
            return
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_deadline()
        if self._num_parsed_bytes > self.limits.max_header_bytes:  # by its URL
            self._refuse(self._headers_too_large())
        if self._is_discarding or self.parser.should_upgrade():
            return
        framing = [header for header in self.headers if header[0] in _FRAMING]
        if not self.url.startswith(b"/"):
            self._take_host_from_url()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._answer_no_more()
        elif any(not _is_understood(header) for header in framing):
            self._refuse(ApiError(501, "of transfer encodings there is chunked", code="http"))
        else:
            super().on_headers_complete()
            self._set_up(self.cycle, framing)

    def _take_host_from_url(self) -> None:
        """The host of an absolute URL replaces the header (RFC 9112, 3.2.2)."""
        _, separator, rest = self.url.partition(b"://")
        if separator:
            host = rest.partition(b"/")[0].partition(b"?")[0]
            self.headers[:] = [
                (name, host if name == b"host" else value) for name, value in self.headers
            ]

    def _set_up(self, cycle: RequestResponseCycle, framing: Headers) -> None:
        """An answer before the end of the body closes the connection, unless the body is small."""
        cycle.transport = self._cycle_transport  # type: ignore[assignment]
        self._wants_keep_alive = cycle.keep_alive
        if framing:
            self.limits.connections.set_idle(self)
            if cycle.waiting_for_100_continue or any(map(_announces_much, framing)):
                cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.0":  # no chunked encoding: closing ends the body
            cycle.chunked_encoding = False
            cycle.expected_content_length = _UNKNOWN_LENGTH

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if self._is_discarding:
            return
        self._num_chunks += 1
        self._num_body_bytes += len(body)
        if self._num_chunks > MAX_CHUNKS + self._num_body_bytes // 64:
            self._refuse(ApiError(413, "the body comes in too many small parts", code="http"))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_discarding or self.parser.should_upgrade():
            return
        self._is_in_head = True
        super().on_message_complete()
        cycle = self.cycle
        if cycle.response_complete:  # it was answered early; the next may come now
            self._stop_deadline()
            self._wait_for_next()
            return
        if not cycle.response_started and not self._is_shutting_down:
            cycle.keep_alive = self._wants_keep_alive
        if cycle is self._answering:
            self.limits.connections.set_busy(self)

    # ---- sending

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        has_more = bool(self.pipeline)
        super().on_response_complete()
        if has_more or self.transport.is_closing():
            return
        if not self._is_in_head:  # the rest of the body comes, or the connection is closed
            self._unset_keepalive_if_required()
            self._set_deadline(self.limits.linger_timeout_s, self._on_linger_deadline)
            self.limits.connections.set_lingering(self)
        else:
            self.limits.connections.set_idle(self)

    def _wait_for_next(self) -> None:
        """Idle until the next request, or for keep_alive_s."""
        self.limits.connections.set_idle(self)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_deadline is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_unread_deadline()

    def _watch_reader(self) -> None:
        """Close the connection unless the client reads something in unread_timeout_s; repeat."""
        self._num_unread = self.transport.get_write_buffer_size()
        self._unread_deadline = self.loop.call_later(
            self.limits.unread_timeout_s, self._on_unread_deadline
        )

    def _on_unread_deadline(self) -> None:
        self._unread_deadline = None
        taken = self._num_unread - self.transport.get_write_buffer_size()
        if taken < MIN_PROGRESS_BYTES or self.transport.is_closing():
            self._cut("unread")
        else:
            self._watch_reader()

    def _stop_unread_deadline(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    # ---- deadlines and closing

    def _set_deadline(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, then)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_head_deadline(self) -> None:
        self._deadline = None
        self.limits.connections.cut["head"] += 1
        if self._num_head_bytes:
            seconds = self.limits.header_timeout_s
            self._refuse(ApiError(408, f"the headers did not come within {seconds:g} s"))
        elif not self.transport.is_closing():
            self.transport.close()

    def _headers_too_large(self) -> ApiError:
        return ApiError(
            431,
            f"the headers are larger than {self.limits.max_header_bytes} bytes "
            f"or more than {MAX_HEADERS}",
        )

    def send_400_response(self, _: str) -> None:
        raise AssertionError("parse errors are answered by _refuse")

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request and close. A running answer is never written into: it is
        finished first, and the connection is closed without this one."""
        if self._is_discarding or self.transport.is_closing():
            return
        self._stop_deadline()
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            is_own = cycle is self.cycle and cycle.more_body and not cycle.response_started
            if not is_own:
                self._answer_no_more()
                return
            cycle.disconnected = True  # whoever waits for its body stops
            cycle.message_event.set()
        elif not self._is_in_head and self.cycle is not None and self.cycle.response_complete:
            self._linger()  # the error is in the rest of a body that was answered
            return
        self.transport.write(refusal_bytes(error))
        self._linger()

    def _answer_no_more(self) -> None:
        """Finish the requests so far, accept no more, then close."""
        self._is_discarding = True
        self._stop_deadline()
        last = self.pipeline[0][0] if self.pipeline else self._answering
        if last is not None:
            last.keep_alive = False

    def _close_gently(self) -> None:
        """Close once everything is written; linger if the client may still be sending."""
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._is_in_head and not self._num_head_bytes and not self._is_discarding:
            self.transport.close()
            self._stop_unread_deadline()
            self._watch_reader()
        else:
            self._linger()

    def _linger(self) -> None:
        self._is_discarding = self._is_lingering = True
        self._unset_keepalive_if_required()
        self.limits.connections.set_lingering(self)
        self._set_deadline(self.limits.linger_timeout_s, self._on_linger_deadline)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _on_linger_deadline(self) -> None:
        self._cut("linger")

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > self.limits.linger_bytes:
            if self._is_lingering:
                self._cut("linger")
            else:
                self.flow.pause_reading()

    def _cut(self, reason: str) -> None:
        self.limits.connections.cut[reason] += 1
        self.transport.abort()


class _CycleTransport:
    """The transport that a cycle writes to; closing it may linger."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _UnknownLength(int):
    """An expected length that every length satisfies: the body ends with the connection."""

    def __lt__(self, _: object) -> bool:
        return False

    def __sub__(self, _: object) -> "_UnknownLength":
        return self

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


_UNKNOWN_LENGTH = _UnknownLength()


def _is_understood(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name != b"transfer-encoding" or value.lower() == b"chunked"


def _announces_much(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"transfer-encoding" or int(value) > MAX_KEPT_BODY


def refusal_bytes(error: ApiError) -> bytes:
    """An error as a whole response with connection: close."""
    body = OPENAI_ERRORS.body(error)  # nobody knows the path yet
    head = [STATUS_LINE[error.status], b"content-type: application/json\r\n"]
    head += [b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in error.headers]
    head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
    return b"".join([*head, body])


def protocol_class(limits: ConnectionLimits) -> type[HttpProtocol]:
    """The protocol with these limits, as uvicorn takes it: a class."""
    return type("HttpProtocol", (HttpProtocol,), {"limits": limits})
