"""Frames over a socket: a length, then the message. Channel is the worker's end, FrameReader both
ends' way of finding messages in what arrived."""

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_LENGTH_BYTES = 4
_RECEIVE_BYTES = 1 << 18


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameReader:
    """Takes what arrived, gives whole messages; the rest waits for more."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        buffer, start, found = self._buffer, 0, []
        while len(buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(buffer[start:body], "little")
            if end > len(buffer):
                break
            found.append(bytes(buffer[body:end]))
            start = end
        del buffer[:start]
        return found


class Channel:
    """The worker's end. send() may be called by any thread and never blocks: a server that does
    not read costs memory, not steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.is_closed = False
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)

    def send(self, message: bytes) -> None:
        content = frame(message)
        with self._lock:
            if self.is_closed:
                return
            if self._unsent:
                self._unsent += content
                return
            sent = self._try_send(content)
            if sent < len(content):
                self._unsent += content[sent:]
                self._wake.send(b"x")

    def _try_send(self, content: bytes | bytearray) -> int:
        try:
            return self._socket.send(content)
        except BlockingIOError:
            return 0
        except OSError:  # the server has gone: run() finds out and ends the process
            return len(content)

    def run(self, receive: Callable[[list[bytes]], None]) -> None:
        """Read until the other end closes; all messages that arrived together are one call."""
        reader = FrameReader()
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                with self._lock:
                    wanted = selectors.EVENT_READ
                    wanted |= selectors.EVENT_WRITE if self._unsent else 0
                selector.modify(self._socket, wanted)
                for key, ready in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        continue
                    if ready & selectors.EVENT_WRITE:
                        self._send_rest()
                    if ready & selectors.EVENT_READ:
                        try:
                            data = self._socket.recv(_RECEIVE_BYTES)
                        except BlockingIOError:
                            continue
                        except OSError:
                            return
                        if not data:
                            return
                        if messages := reader.feed(data):
                            receive(messages)

    def close(self) -> None:
        """What is sent from now on goes nowhere."""
        with self._lock:
            self.is_closed = True
            self._unsent.clear()
            for each in (self._socket, self._woken, self._wake):
                each.close()

    def flush(self) -> None:
        """Send all that is left, before the process ends."""
        with self._lock:
            self._socket.setblocking(True)
            with suppress(OSError):
                self._socket.sendall(self._unsent)
            self._unsent.clear()

    def _send_rest(self) -> None:
        with self._lock:
            del self._unsent[: self._try_send(self._unsent)]
