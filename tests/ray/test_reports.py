"""Reports of replicas to ingresses, over real sockets and without Ray."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from quire.ray import reports
from quire.ray.reports import Address, Hello, IngressChannel, ReplicaReports, ReportServer
from quire.worker import messages as wire
from quire.worker.channel import frame

PATIENCE_S = 60.0  # a guard against waiting for ever; nothing is measured
HOST = "127.0.0.1"


class Lost:
    """The channels that a replica was told are lost."""

    def __init__(self) -> None:
        self.channels: list[IngressChannel] = []
        self._is_new = threading.Semaphore(0)

    def __call__(self, channel: IngressChannel) -> None:
        self.channels.append(channel)
        self._is_new.release()

    def wait(self) -> None:
        assert self._is_new.acquire(timeout=PATIENCE_S)


class Ingress:
    """The names of requests that it was told were accepted."""

    def __init__(self, name: str, silence_s: float = PATIENCE_S) -> None:
        self.names: list[str] = []
        self._is_new = asyncio.Event()
        self.reports = ReplicaReports(name, self._take, silence_s)

    def _take(self, report: wire.Report) -> None:
        if isinstance(report, wire.Accepted):
            self.names.append(report.request_id)
        self._is_new.set()

    async def heard(self, count: int) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.names) < count:
                self._is_new.clear()
                await self._is_new.wait()
        return self.names


def accept(server: ReportServer, ingress: str, *names: str) -> None:
    for name in names:
        server.channel_of(ingress).send(wire.encode(wire.Accepted(name)))


def run(work: Callable[[ReportServer, Lost], Awaitable[None]]) -> None:
    async def main() -> None:
        lost = Lost()
        await work(ReportServer(HOST, lost), lost)

    asyncio.run(main())


def test_each_ingress_gets_its_own_reports_and_those_from_before_it_connected() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        first, second = Ingress("first"), Ingress("second")
        accept(server, "first", "a", "b")
        await first.reports.reader_of(server.address)
        await second.reports.reader_of(server.address)
        accept(server, "second", "x")
        accept(server, "first", "c")
        assert await first.heard(3) == ["a", "b", "c"]
        assert await second.heard(1) == ["x"]
        first.reports.close()
        second.reports.close()

    run(work)


def test_all_requests_of_an_ingress_share_a_connection() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        ingress = Ingress("one")
        asked = (ingress.reports.reader_of(server.address) for _ in range(8))
        readers = await asyncio.gather(*asked)
        assert len(set(map(id, readers))) == 1
        ingress.reports.close()

    run(work)


@pytest.mark.parametrize(
    "said",
    [
        msgspec.msgpack.encode(Hello(b"x" * 16, "one")),
        b"",
        b"junk",
        b"\xff" * 900,
    ],
)
def test_who_does_not_know_the_secret_gets_nothing(said: bytes) -> None:
    async def work(server: ReportServer, lost: Lost) -> None:
        accept(server, "one", "a")
        where = msgspec.msgpack.decode(server.address, type=Address)
        with socket.create_connection((where.host, where.port), PATIENCE_S) as connection:
            connection.sendall(frame(said))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        ingress = Ingress("one")
        await ingress.reports.reader_of(server.address)
        assert await ingress.heard(1) == ["a"]
        assert lost.channels == []
        ingress.reports.close()

    run(work)


def test_a_hello_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_CONNECT_S", 0.3)

    async def work(server: ReportServer, _: Lost) -> None:
        where = msgspec.msgpack.decode(server.address, type=Address)
        with socket.create_connection((where.host, where.port), PATIENCE_S) as connection:
            connection.settimeout(0.05)
            connection.sendall(b"\xff\0\0\0")
            with suppress(ConnectionError):
                for _byte in range(200):  # 10 s of them: each within the time that a hello has
                    with suppress(TimeoutError):
                        connection.sendall(b"x")
                        if connection.recv(1) == b"":
                            return
                raise AssertionError("it was not given up")

    run(work)


def test_an_ingress_that_goes_is_noticed_and_may_come_again() -> None:
    async def work(server: ReportServer, lost: Lost) -> None:
        ingress = Ingress("one")
        before = server.channel_of("one")
        reader = await ingress.reports.reader_of(server.address)
        ingress.reports.close()
        assert reader.lost.done()
        await asyncio.to_thread(lost.wait)
        assert lost.channels == [before] and before.is_closed
        again = Ingress("one")
        accept(server, "one", "a")
        await again.reports.reader_of(server.address)
        assert await again.heard(1) == ["a"]
        again.reports.close()

    run(work)


def test_an_ingress_that_connects_again_keeps_the_new_connection() -> None:
    """Also where the replica finds out about the end of the old one later."""

    async def work(server: ReportServer, lost: Lost) -> None:
        first, again = Ingress("one"), Ingress("one")
        await first.reports.reader_of(server.address)
        await asyncio.to_thread(_wait_until_connected, server, "one")
        old = server.channel_of("one")
        reader = await again.reports.reader_of(server.address)
        async with asyncio.timeout(PATIENCE_S):
            while server.channel_of("one") is old or not server.channel_of("one").is_connected:
                await asyncio.sleep(0.01)
        first.reports.close()
        await asyncio.to_thread(lost.wait)
        assert lost.channels == [old]
        accept(server, "one", "a")
        assert await again.heard(1) == ["a"]
        assert not reader.lost.done()
        again.reports.close()

    run(work)


def _wait_until_connected(server: ReportServer, ingress: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not server.channel_of(ingress).is_connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_ingress_that_never_connects_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ReportServer, lost: Lost) -> None:
        channel = server.channel_of("gone")
        server.beat()
        assert not channel.is_closed
        monkeypatch.setattr(reports, "_NEVER_CONNECTED_S", -1.0)
        server.beat()
        assert lost.channels == [channel] and channel.is_closed
        assert server.channel_of("gone") is not channel

    run(work)


def test_a_replica_that_says_nothing_is_lost_and_one_that_beats_is_not() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        ingress = Ingress("one", silence_s=0.8)
        reader = await ingress.reports.reader_of(server.address)
        for _beat in range(25):
            server.beat()
            await asyncio.sleep(0.05)
        assert not reader.lost.done()
        async with asyncio.timeout(PATIENCE_S):
            assert "said nothing for 0.8 s" in await reader.lost
        ingress.reports.close()

    run(work)


def test_a_replica_that_is_not_there_is_an_error_and_is_tried_again() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        gone = msgspec.msgpack.encode(Address(HOST, port, b""))
        ingress = Ingress("one")
        for _again in range(2):
            with pytest.raises(OSError, match="Connect"):
                await ingress.reports.reader_of(gone)
        await ingress.reports.reader_of(server.address)
        ingress.reports.close()

    run(work)


def test_a_reader_that_is_lost_leaves_the_one_in_its_place() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        ingress = Ingress("one")
        lost = await ingress.reports.reader_of(server.address)
        lost.lose("a test")
        again = await ingress.reports.reader_of(server.address)
        assert again is not lost
        assert await ingress.reports.reader_of(server.address) is again
        ingress.reports.close()

    run(work)


def test_connections_that_ended_or_failed_are_not_kept() -> None:
    async def work(server: ReportServer, _: Lost) -> None:
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        ingress = Ingress("one")
        with pytest.raises(OSError, match="Connect"):
            await ingress.reports.reader_of(msgspec.msgpack.encode(Address(HOST, port, b"")))
        reader = await ingress.reports.reader_of(server.address)
        reader.lose("a test")
        await asyncio.sleep(0)
        assert not ingress.reports._readers
        ingress.reports.close()

    run(work)


def test_two_connections_of_an_ingress_have_a_channel_each() -> None:
    """The first is not waited for by then: its thread was between two statements."""

    async def work(server: ReportServer, lost: Lost) -> None:
        waiting = server.channel_of("one")
        (ours, theirs), (further, other) = socket.socketpair(), socket.socketpair()
        assert server.connect("one", ours) is waiting
        second = server.connect("one", further)
        assert second is not waiting and server.channel_of("one") is second
        for each in (ours, theirs, further, other):
            each.close()
        assert lost.channels == []

    run(work)


def test_an_ingress_that_connects_late_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects after the replica has looked, and before it forgets the channel."""

    class Late(IngressChannel):
        num_asked = 0

        @property
        def is_connected(self) -> bool:
            self.num_asked += 1
            return self.num_asked > 1

    async def work(server: ReportServer, lost: Lost) -> None:
        monkeypatch.setattr(reports, "IngressChannel", Late)
        monkeypatch.setattr(reports, "_NEVER_CONNECTED_S", -1.0)
        channel = server.channel_of("one")
        server.beat()
        assert lost.channels == [] and not channel.is_closed

    run(work)
