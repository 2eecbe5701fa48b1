"""Reports of a replica's engine to the ingresses: a TCP connection for each pair, so that what a
step brings is one message, whatever the number of streams. Ray carries a request and its end.

A replica listens on its node's address. Whoever connects says a secret, which the replica gives
only by Ray, and the name of its ingress. What is reported before an ingress has connected waits.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import msgspec

from quire.worker import messages as wire
from quire.worker.channel import Channel, FrameReader, frame

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0  # between reports of a replica that has nothing to say
_CONNECT_S = 10.0
_NEVER_CONNECTED_S = 60.0  # an ingress that died meanwhile
_HELLO_BYTES = 1024
_BACKLOG = 1024


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a replica's reports are to be had."""

    host: str
    port: int
    secret: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What an ingress says first."""

    secret: bytes
    ingress: str


_read_address = msgspec.msgpack.Decoder(Address).decode
_read_hello = msgspec.msgpack.Decoder(Hello).decode


# ---- in a replica


class IngressChannel(Channel):
    """The channel of one ingress's requests in a replica; without a socket until it connects."""

    def __init__(self) -> None:
        self.is_closed = False
        self.made_at = time.monotonic()
        self._connected: Channel | None = None
        self._waiting: list[bytes] = []
        self._own_lock = threading.Lock()

    @property
    def is_connected(self) -> bool:
        return self._connected is not None

    def send(self, message: bytes) -> None:
        with self._own_lock:
            if self._connected is None:
                if not self.is_closed:
                    self._waiting.append(message)
                return
        self._connected.send(message)

    def connect(self, connection: socket.socket) -> None:
        """Send what waits, then what comes."""
        channel = Channel(connection)
        with self._own_lock:
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                channel.send(message)
            self._connected = channel

    def run(self, receive: Callable[[list[bytes]], None]) -> None:
        assert self._connected is not None
        self._connected.run(receive)

    def close(self) -> None:
        with self._own_lock:
            self.is_closed = True
            self._waiting.clear()
            if self._connected is not None:
                self._connected.close()

    def flush(self) -> None:
        if self._connected is not None:
            self._connected.flush()


class ReportServer:
    """A replica's side. `on_lost` is called, on a thread, with the channel of an ingress that has
    gone: nobody waits for its requests."""

    def __init__(self, host: str, on_lost: Callable[[IngressChannel], None]) -> None:
        self._on_lost = on_lost
        self._secret = secrets.token_bytes(16)
        self._channels: dict[str, IngressChannel] = {}
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(_BACKLOG)
        self.address = msgspec.msgpack.encode(
            Address(host, self._listener.getsockname()[1], self._secret)
        )
        threading.Thread(target=self._accept, name="quire-reports", daemon=True).start()

    def channel_of(self, ingress: str) -> IngressChannel:
        """On any thread. Another one after that of an ingress was lost."""
        with self._lock:
            found = self._channels.get(ingress)
            if found is None or found.is_closed:
                found = self._channels[ingress] = IngressChannel()
            return found

    def connect(self, ingress: str, connection: socket.socket) -> IngressChannel:
        """An ingress that connects again has given up the connection before."""
        with self._lock:
            found = self._channels.get(ingress)
            if found is None or found.is_closed or found.is_connected:
                found = self._channels[ingress] = IngressChannel()
            found.connect(connection)
            return found

    def beat(self) -> None:
        """Tell every ingress that this replica is there; forget those that never connected."""
        with self._lock:
            channels = list(self._channels.items())
        late = time.monotonic() - _NEVER_CONNECTED_S
        for ingress, channel in channels:
            if channel.is_connected:
                channel.send(_NOTHING)
            elif channel.made_at < late and self._forget(ingress, channel):
                self._drop(channel)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # too many files are open, or whoever connected has gone
                continue
            threading.Thread(
                target=self._serve, args=[connection], name="quire-ingress", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, msgspec.DecodeError):
            set_up(connection)
            hello = _read_hello(_read_frame(connection))
            if hmac.compare_digest(hello.secret, self._secret):
                self._serve_ingress(connection, hello.ingress)
                return
            _log.warning("somebody who has not the secret asked for reports")
        connection.close()

    def _serve_ingress(self, connection: socket.socket, ingress: str) -> None:
        channel = self.connect(ingress, connection)
        channel.run(lambda _: None)
        with self._lock:
            if self._channels.get(ingress) is channel:
                del self._channels[ingress]
        self._drop(channel)

    def _forget(self, ingress: str, channel: IngressChannel) -> bool:
        """Whether it was forgotten: it may have been connected meanwhile."""
        with self._lock:
            if channel.is_connected or self._channels.get(ingress) is not channel:
                return False
            del self._channels[ingress]
            return True

    def _drop(self, channel: IngressChannel) -> None:
        channel.close()
        self._on_lost(channel)


_NOTHING = wire.encode(wire.Events([], []))


def _read_frame(connection: socket.socket) -> bytes:
    """The first one; an OSError where it is too long or takes too long, however it trickles."""
    reader, size, deadline = FrameReader(), 0, time.monotonic() + _CONNECT_S
    while size < _HELLO_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(_HELLO_BYTES)
        size += len(data)
        if messages := reader.feed(data):
            return messages[0]
        if not data:
            break
    raise OSError("no hello")


def set_up(connection: socket.socket) -> None:
    """Send at once, and notice a machine that has gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        silence_ms = int(1000 * 10 * HEARTBEAT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)


# ---- in an ingress


class ReportReader(asyncio.Protocol):
    """Reports of one replica. `take` gets each; `lost` is set when no more come."""

    def __init__(self, hello: bytes, take: Callable[[wire.Report], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hello = hello
        self._take = take
        self._reader = FrameReader()
        self._heard_at = time.monotonic()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        set_up(transport.get_extra_info("socket"))
        self._transport.write(frame(self._hello))

    def data_received(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        for content in self._reader.feed(data):
            self._take(wire.read_report(content))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(f"its connection ended ({exc or 'closed'})")

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()


class ReplicaReports:
    """An ingress's connections, one for each replica that it has requests at."""

    def __init__(self, ingress: str, take: Callable[[wire.Report], None], silence_s: float) -> None:
        self.ingress = ingress
        self._take = take
        self._silence_s = silence_s
        self._readers: dict[bytes, asyncio.Task[ReportReader]] = {}  # by encoded address
        self._watching: asyncio.Task[None] | None = None

    async def reader_of(self, address: bytes) -> ReportReader:
        """Connected; raises an OSError where that cannot be."""
        found = self._readers.get(address)
        if found is None or (found.done() and _is_over(found)):
            found = self._readers[address] = asyncio.create_task(self._connect(address))
            found.add_done_callback(partial(self._connected, address))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return await asyncio.shield(found)

    async def _connect(self, address: bytes) -> ReportReader:
        where = _read_address(address)
        hello = msgspec.msgpack.encode(Hello(where.secret, self.ingress))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):  # a TimeoutError is an OSError
            _, reader = await loop.create_connection(
                lambda: ReportReader(hello, self._take), where.host, where.port
            )
        return reader

    def _connected(self, address: bytes, connecting: "asyncio.Task[ReportReader]") -> None:
        """Keep it as long as it lasts; by its end another one may have its place."""

        def forget(_: object = None) -> None:
            if self._readers.get(address) is connecting:
                del self._readers[address]

        if _is_over(connecting):
            forget()
        else:
            connecting.result().lost.add_done_callback(forget)

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._silence_s / 8)
            if time.monotonic() - before > self._silence_s / 2:
                continue  # this process did not run either: what was sent is still to be read
            for connected in list(self._readers.values()):
                if connected.done() and not _is_over(connected):
                    reader = connected.result()
                    if reader.silent_s() > self._silence_s:
                        reader.lose(f"it said nothing for {self._silence_s:g} s")

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for connected in list(self._readers.values()):
            if connected.done() and not _is_over(connected):
                connected.result().lose("this ingress ends")
            else:
                connected.cancel()


def _is_over(connecting: "asyncio.Task[ReportReader]") -> bool:
    """Whether what was connected is lost, or could not be connected."""
    if connecting.cancelled() or connecting.exception() is not None:
        return True
    return connecting.result().lost.done()
