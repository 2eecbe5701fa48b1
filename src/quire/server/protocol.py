"""GuardedProtocol: uvicorn's HTTP/1.1 with a limit on the size and time of a request's head.

Without it a client could send headers for ever, or one byte a minute, and hold a connection.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import ApiError

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """The limits are set once, by `guarded`, on a class of their own."""

    max_header_bytes = 64 << 10
    header_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0  # received, of a head that has not ended
        self._num_parsed_bytes = 0  # of a request's URL, headers and trailers
        self._is_in_head = True
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._deadline is None:  # a later request of a connection that was kept
                self._start_deadline()
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > self.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        self._num_parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._num_parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also of the trailers that may follow a body in chunks."""
        self._num_parsed_bytes += len(name) + len(value) + 4
        if self._num_parsed_bytes > self.max_header_bytes:
            self._refuse_headers()
        elif not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_deadline()
        if self._num_parsed_bytes > self.max_header_bytes:  # by its URL
            self._refuse_headers()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        if not self._is_refused:
            super().on_message_complete()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._num_head_bytes:
            self._refuse(408, f"the headers did not come within {self.header_timeout_s:g} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers are larger than {self.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        is_repeated, self._is_refused = self._is_refused, True
        if is_repeated or self.transport.is_closing():
            return
        body = ApiError(status, message).body
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, _REASONS[status])
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + length + body)
        self.transport.close()


def guarded(max_header_bytes: int, header_timeout_s: float) -> type[GuardedProtocol]:
    """The protocol with these limits, as uvicorn takes it."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("GuardedProtocol", (GuardedProtocol,), limits)
