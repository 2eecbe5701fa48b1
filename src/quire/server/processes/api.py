"""An API process: a server that shares its port, its worker and its limits with others."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import cast

from quire.core.errors import ConfigError, ExecutorError
from quire.core.progress import report
from quire.llm import OnlineModel
from quire.llm.devices import Options
from quire.server.keys import KeyRing
from quire.server.logs import log, set_up_logs, take_over_standard_streams
from quire.server.model_service import State
from quire.server.processes import messages as wire
from quire.server.processes.client import AskingState, Caller, IdleCounts
from quire.server.processes.replacing import NextWorker
from quire.server.processes.setup import Setup
from quire.server.runner import Certificate, read_certificate, run_loop, run_service
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.server.shared import ProcessFigures, ServerFigures
from quire.worker import RemoteLLM
from quire.worker.attached import Attacher
from quire.worker.channel import FrameReader, frame


class _ApiProcess(asyncio.Protocol):
    """The second socket, and what its news do."""

    def __init__(
        self, setup: Setup, caller: Caller, counts: IdleCounts, certificate: Certificate | None
    ) -> None:
        self._setup = setup
        self._certificate = certificate
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[wire.Told]] = {}
        self._load: wire.Load | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_load = threading.Event()
        self.has_given_up = False  # its supervisor says why
        self._drains: set[asyncio.Task[None]] = set()
        settings = _own_settings(setup)
        state = AskingState(
            settings, caller, counts, setup.index, self._ask_totals, self._reload_keys
        )
        self.service = Service(settings, self._attach_first, state)
        self._next_worker = NextWorker(self.service, self._attach, self._tell)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        os._exit(1)  # without its supervisor nobody counts

    def data_received(self, data: bytes) -> None:
        for content in self._reader.feed(data):
            self._take(wire.read_news(content))

    def _take(self, news: wire.News) -> None:
        service = self.service
        match news:
            case wire.Load():
                self._load = news
                self._next_worker.begin(news)
                self._may_load.set()
            case wire.Prepare():
                self._run(self._next_worker.prepare(news))
            case wire.Switch():
                self._next_worker.switch(news)
            case wire.Forget():
                self._run(self._next_worker.forget())
            case wire.Loading(phase, done):
                if service.state is State.LOADING:
                    service.phases(phase, done)
            case wire.Keys(keys):
                service.access.replace(KeyRing(keys, _read_by_supervisor))
            case wire.ReadCertificate():
                if self._certificate is not None:
                    self._certificate.reload()
            case wire.CloseIdle():
                service.connections.close_one_idle()
            case wire.Drain():
                self._drains.add(asyncio.ensure_future(service.drain()))
            case wire.GiveUp(reason):
                self.has_given_up = True
                service.give_up(reason)
            case wire.AskFigures(call):
                self._tell(wire.OwnFigures(call, service.own_figures()))
            case wire.Told(call):
                if (asked := self._asked.pop(call, None)) is not None and not asked.done():
                    asked.set_result(news)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tell_up(self) -> None:
        self._tell(wire.Up())

    def _tell(self, notice: wire.Notice) -> None:
        self._transport.write(frame(wire.encode(notice)))

    async def _ask(self, make: Callable[[int], wire.Question]) -> wire.Told:
        number = next(self._numbers)
        asked: asyncio.Future[wire.Told] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self._tell(make(number))
        return await asked

    # ---- the other processes, as the engine needs them

    async def has_only_suspects(self, num_suspects: int, *, has_probed: bool) -> bool:
        told = await self._ask(lambda number: wire.ReportSuspects(number, num_suspects, has_probed))
        return told.are_all

    async def take_turn(self) -> None:
        await self._ask(wire.TakeTurn)

    def end_turn(self) -> None:
        self._tell(wire.EndTurn())

    async def _ask_totals(self, own: ProcessFigures) -> ServerFigures:
        figures = (await self._ask(lambda number: wire.AskTotals(number, own))).figures
        assert figures is not None
        return figures

    async def _reload_keys(self) -> None:
        told = await self._ask(wire.AskReload)
        if told.error is not None:
            raise ConfigError(told.error)

    def _attach_first(self, on_stuck: Callable[[], None]) -> OnlineModel:
        """On the thread that loads: once there is a worker."""
        self._may_load.wait()
        assert self._load is not None
        return self._attach(self._load, False, on_stuck)

    def _attach(
        self, load: wire.Load, continues: bool, on_stuck: Callable[[], None]
    ) -> OnlineModel:
        """On the thread that loads: read what turns text into requests, and connect."""
        report("connecting", 0.0)
        prefix = f"request-{os.getpid()}-"
        attacher = Attacher(load.socket, continues=continues)
        options = Options(**load.options)
        return RemoteLLM.attach(load.path, options, attacher, on_stuck, prefix=prefix, others=self)


def _read_by_supervisor() -> KeyRing:
    raise AssertionError("the supervisor reads the keys")


def _own_settings(setup: Setup) -> ServerSettings:
    """The share of a process, of what each holds on its own."""
    settings = setup.settings
    keys = KeyRing(settings.keys, _read_by_supervisor if setup.has_key_file else None)
    buffered = max(settings.max_body_bytes, settings.max_buffered_bytes // setup.num_processes)
    return replace(settings, keys=keys, max_buffered_bytes=buffered)


def _first_frame(connection: socket.socket) -> bytes:
    """Nothing follows it until the process has said that it is there."""
    size = int.from_bytes(_exactly(connection, 4), "little")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            os._exit(1)
        found += data
    return bytes(found)


async def _run(
    setup: Setup,
    caller: Caller,
    news: socket.socket,
    listener: socket.socket,
    counts: IdleCounts,
) -> None:
    certificate = read_certificate(setup.settings)
    news.setblocking(False)
    loop = asyncio.get_running_loop()
    process = _ApiProcess(setup, caller, counts, certificate)
    await loop.create_unix_connection(lambda: process, sock=news)
    if setup.is_replacement:  # what comes meanwhile waits at the port, and gets no 503
        await process.service.open()
    try:
        await run_service(process.service, listener, process.tell_up, certificate)
    except ExecutorError:
        if not process.has_given_up:
            raise


def main(calls: int, news: int, listener: int, idle: int) -> None:
    # Who ends the server, by the whole group of processes too, has its requests finish first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    second = socket.socket(fileno=news)
    setup = Setup.decode(_first_frame(second))
    take_over_standard_streams(set_up_logs(setup.log_format, setup.log_level))
    counts = IdleCounts(idle, setup.num_processes)
    own_listener = socket.socket(fileno=listener)
    caller = Caller(socket.socket(fileno=calls))
    try:
        run_loop(_run(setup, caller, second, own_listener, counts))
    except Exception as error:
        log("api_process_failed", logging.ERROR, error=f"{type(error).__name__}: {error}")
        sys.exit(1)
