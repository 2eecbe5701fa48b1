"""supervise: several API processes and a worker, as one server.

The process that the user started binds the port, starts the worker and the API processes, replaces
what dies, keeps what they share, and takes the signals. It answers no request itself.
"""

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from functools import partial
from typing import cast

from quire.core.errors import ConfigError, ExecutorError
from quire.server.keys import KeyRing
from quire.server.logs import log
from quire.server.model_service import Replacement, State
from quire.server.processes import messages as wire
from quire.server.processes.client import IdleCounts
from quire.server.processes.hub import Client, Hub
from quire.server.processes.replacing import Followers, WorkerSockets
from quire.server.processes.setup import Setup
from quire.server.runner import (
    OnReady,
    address_of,
    bound_listener,
    handle_signals,
    raise_failure,
    read_certificate,
    run_loop,
)
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.worker import RemoteLLM
from quire.worker.channel import FrameReader, frame
from quire.worker.turns import Turns

COMMAND = (sys.executable, "-P", "-m", "quire.server.processes")
MAX_PROCESSES = 64
_MAX_FAILED_STARTS = 5  # of a process, one after another
_STEADY_S = 10.0  # a process that ran so long did not fail to start
_FIGURES_S = 1.0  # for another process's figures; after that its last ones are taken
_EXIT_S = 15.0  # beyond the time to drain, for processes to end
_BACKLOG = 2048

# Loads the model in a worker that takes channels from a listening socket.
LoadShared = Callable[[Callable[[], None], socket.socket], RemoteLLM]
# From a model and the path of a configuration, None meaning those that are served, to the rest;
# its worker takes channels from the socket.
ReplaceShared = Callable[[str | None, str | None, socket.socket], Replacement]


def supervise(
    settings: ServerSettings,
    setup: Setup,
    load: LoadShared,
    on_ready: OnReady,
    replace: ReplaceShared | None = None,
) -> None:
    """Serve until a signal ends it, as runner.serve does; raises what ended it otherwise.
    `replace`: what `quire reload` makes of its arguments."""
    if not 1 <= setup.num_processes <= MAX_PROCESSES:
        raise ConfigError(
            f"--api-processes must be from 1 to {MAX_PROCESSES}, got {setup.num_processes}"
        )
    read_certificate(settings)  # what is wrong with it is said here
    listeners = _listeners(settings, setup.num_processes)
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:  # for this user alone
        sockets = WorkerSockets(folder)
        try:
            supervisor = _Supervisor(settings, setup, listeners, sockets)
            run_loop(supervisor.run(load, on_ready, replace))
        finally:
            sockets.close_all()


def _listeners(settings: ServerSettings, count: int) -> list[socket.socket]:
    """A socket for each process; the system spreads connections over them. They stay open here:
    what comes while a process is replaced waits for the next."""
    with bound_listener(settings) as probe:  # refuses a port that somebody has, ourselves included
        family, address = probe.family, probe.getsockname()
    listeners = []
    for _ in range(count):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        listeners.append(listener)
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


class _Calls(asyncio.Protocol):
    """The first socket of a process: calls, answered at once."""

    def __init__(self, process: "_Process") -> None:
        self._process = process
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for content in self._reader.feed(data):
            reply = self._process.call(wire.read_call(content))
            if reply is not None:
                self._transport.write(frame(wire.encode(reply)))


class _News(asyncio.Protocol):
    """The second one."""

    def __init__(self, process: "_Process") -> None:
        self._process = process
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        for content in self._reader.feed(data):
            self._process.take(wire.read_notice(content))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._process.lost()


class _Process:
    """An API process that was started."""

    def __init__(self, owner: "_Supervisor", client: Client) -> None:
        self.client = client
        self.started_at = time.monotonic()
        self.is_up = False
        self._owner = owner
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[wire.Done | None]] = {}
        self._news: asyncio.WriteTransport
        self._popen: subprocess.Popen[bytes]

    async def start(self, setup: Setup, listener: socket.socket, idle: int) -> None:
        calls, their_calls = socket.socketpair()
        news, their_news = socket.socketpair()
        with their_calls, their_news:
            given = [their_calls.fileno(), their_news.fileno(), listener.fileno(), idle]
            self._popen = subprocess.Popen(
                [*COMMAND, *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the supervisor alone
            )
        loop = asyncio.get_running_loop()
        for each in (calls, news):
            each.setblocking(False)
        await loop.create_unix_connection(lambda: _Calls(self), sock=calls)
        transport, _ = await loop.create_unix_connection(lambda: _News(self), sock=news)
        self._news = cast(asyncio.WriteTransport, transport)
        self._news.write(frame(setup.encode()))

    @property
    def pid(self) -> int:
        return self._popen.pid

    def tell(self, news: wire.News) -> None:
        self._news.write(frame(wire.encode(news)))

    def call(self, call: wire.Call) -> wire.Reply | None:
        reply = self._owner.hub.call(self.client, call)
        if isinstance(reply, Client):
            self._owner.processes[reply.index].tell(wire.CloseIdle())
            return wire.Reply()
        return reply

    def take(self, notice: wire.Notice) -> None:
        match notice:
            case wire.Up():
                self.is_up = True
                self._owner.turns.enter(self.client.index)
                self._owner.on_up()
            case wire.OwnFigures(call, figures):
                self.client.figures = figures
                if (asked := self._asked.pop(call, None)) is not None and not asked.done():
                    asked.set_result(None)
            case wire.Done(call):
                if (asked := self._asked.pop(call, None)) is not None and not asked.done():
                    asked.set_result(notice)
            case wire.Retired(path):
                self._owner.followers.retired(self, path)
            case wire.AskTotals(call, own):
                self.client.figures = own
                self._owner.run_task(self._owner.tell_totals(self, call))
            case wire.AskReload(call):
                self._owner.run_task(self._owner.reload_for(self, call))
            case wire.ReportSuspects(call, num_suspects, has_probed):
                self._owner.run_task(self._tell_suspects(call, num_suspects, has_probed))
            case wire.TakeTurn(call):
                self._owner.run_task(self._tell_turn(call))
            case wire.EndTurn():
                self._owner.turns.end(self.client.index)

    async def _tell_suspects(self, call: int, num_suspects: int, has_probed: bool) -> None:
        turns, index = self._owner.turns, self.client.index
        are_all = await turns.report(index, num_suspects, has_probed=has_probed)
        self.tell(wire.Told(call, are_all=are_all))

    async def _tell_turn(self, call: int) -> None:
        await self._owner.turns.take(self.client.index)
        self.tell(wire.Told(call))

    async def ask_figures(self) -> None:
        """Have it tell its figures; the last ones stay where it does not answer."""
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(wire.AskFigures(number))
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIGURES_S):  # wait_for() may lose a cancellation
                await asked

    async def ask(self, make: Callable[[int], wire.Prepare | wire.Switch]) -> wire.Done | None:
        """Its answer; None: it has ended."""
        number = next(self._numbers)
        asked: asyncio.Future[wire.Done | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self.tell(make(number))
        return await asked

    def lost(self) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        self._owner.run_task(self._owner.ended(self))

    def end(self, timeout_s: float) -> str:
        """Wait for its end, or cause it; how it ended, in words."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class _Supervisor:
    def __init__(
        self,
        settings: ServerSettings,
        setup: Setup,
        listeners: Sequence[socket.socket],
        sockets: WorkerSockets,
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._listeners = listeners
        self._sockets = sockets
        self.followers = Followers(lambda: self.processes.values(), sockets)
        self._idle = IdleCounts.create(setup.num_processes)
        self.processes: dict[int, _Process] = {}
        self.turns = Turns()
        self.hub: Hub
        self._service: Service
        self._num_restarts = 0
        self._num_failed: dict[int, int] = {}  # starts in a row, by index
        self._is_ending = False
        self._all_up = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._failure: ExecutorError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, load: LoadShared, on_ready: OnReady, replace: ReplaceShared | None) -> None:
        _, attaching = self._sockets.next()
        make = None if replace is None else partial(self._replacement, replace)
        service = Service(self._settings, lambda stuck: load(stuck, attaching), replace=make)
        self._service = service
        service.elsewhere = self.followers
        service.on_retired = self.followers.on_retired
        self.hub = Hub(service, IdleCounts(self._idle, self._setup.num_processes))
        service.on_new_keys = self._tell_keys
        service.on_progress = self._tell_progress
        loop = asyncio.get_running_loop()
        self._loop = loop
        reloads = [*service.reloads, lambda: self._tell_all(wire.ReadCertificate())]
        handle_signals(loop, self._drain, service, reloads)
        with service.shared.kept(self._settings, lambda: service.state.value):
            for index in range(self._setup.num_processes):
                await self._start(index)
            await service.open()
            if service.state is State.READY:
                self._tell_all(self._load_news())
                self.run_task(self._greet(on_ready))
            await service.has_ended.wait()
            await self._end_processes()
            service.pool.close()
        log("stopped", state=service.state.value)
        raise_failure(service)
        if self._failure is not None:
            raise self._failure

    async def _greet(self, on_ready: OnReady) -> None:
        await self._all_up.wait()
        address = address_of(self._listeners[0], self._settings)
        pids = [process.pid for process in self.processes.values()]
        log("ready", address=address, model=self._service.name, api_processes=pids)
        on_ready(address)

    # ---- processes

    async def _start(self, index: int) -> None:
        process = _Process(self, Client(index))
        setup = replaced(
            self._setup,
            index=index,
            settings=replaced(self._settings, keys=self._service.access.ring),
            is_replacement=self._service.state is State.READY,
            has_key_file=self._settings.keys.can_be_read_again,
        )
        await process.start(setup, self._listeners[index], self._idle)
        self.processes[index] = process
        self.hub.enter(process.client)
        if self._service.state is State.READY:
            process.tell(self._load_news())

    def _load_news(self) -> wire.Load:
        if self.followers.load is None:
            llm = self._service.loaded
            assert isinstance(llm, RemoteLLM)
            self.followers.begin(llm, self._settings.model_names, self._setup.options)
        assert self.followers.load is not None
        return self.followers.load

    def _replacement(
        self, replace: ReplaceShared, model: str | None, config: str | None
    ) -> Replacement:
        return replace(model, config, self._sockets.next()[1])

    def on_up(self) -> None:
        if all(process.is_up for process in self.processes.values()):
            self._all_up.set()

    async def ended(self, process: _Process) -> None:
        """Its sockets are closed: start another in its place, unless all are to end."""
        index = process.client.index
        reason = await asyncio.to_thread(process.end, 0.5)
        self.hub.leave(process.client)
        self.turns.leave(index)
        del self.processes[index]
        if self._is_ending:
            if not self.processes:
                self._all_ended.set()
            return
        log("api_process_died", logging.ERROR, index=index, pid=process.pid, reason=reason)
        is_steady = process.is_up and time.monotonic() - process.started_at > _STEADY_S
        self._num_failed[index] = 1 if is_steady else self._num_failed.get(index, 0) + 1
        while not await self._is_replaced(index, reason):
            self._num_failed[index] += 1

    async def _is_replaced(self, index: int, reason: str) -> bool:
        """Whether all is done for a process that ended: False where none could be started."""
        if self._num_failed[index] > _MAX_FAILED_STARTS:
            self._failure = ExecutorError(
                f"an API process ended {_MAX_FAILED_STARTS + 1} times in a row: {reason}; the log "
                "has what it said"
            )
            self._service.has_ended.set()
            return True
        if self._num_failed[index] > 1:
            await asyncio.sleep(min(10.0, 0.25 * 2 ** self._num_failed[index]))
        if self._is_ending:
            return True
        self._num_restarts += 1
        try:
            await self._start(index)
        except OSError as error:  # no process, no descriptor: perhaps later
            log("api_process_not_started", logging.ERROR, index=index, reason=str(error))
            return False
        return True

    async def _drain(self) -> None:
        """As Service.drain, of all processes; then the worker ends."""
        is_first = not self._is_ending
        self._is_ending = True
        self._tell_all(wire.Drain())
        if is_first:
            await self._wait_for_processes(self._settings.drain_timeout_s + _EXIT_S)
            await self._service.drain()

    async def _wait_for_processes(self, timeout_s: float) -> None:
        if self.processes:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_ended.wait()

    async def _end_processes(self) -> None:
        """Those that still run: nothing was drained, the server has failed."""
        self._is_ending = True
        failure = self._service.failure or self._failure
        self._tell_all(wire.GiveUp(str(failure or "the server has ended")))
        await self._wait_for_processes(_EXIT_S)
        for process in list(self.processes.values()):
            await asyncio.to_thread(process.end, 0.0)

    # ---- what is told to all

    def _tell_all(self, news: wire.News) -> None:
        for process in self.processes.values():
            process.tell(news)

    def _tell_keys(self, ring: KeyRing) -> None:
        self._tell_all(wire.Keys(list(ring)))

    def _tell_progress(self, phase: str, done: float) -> None:
        """On the thread that loads."""
        self._loop.call_soon_threadsafe(self._tell_all, wire.Loading(phase, done))

    async def tell_totals(self, process: _Process, call: int) -> None:
        others = [each for each in self.processes.values() if each is not process]
        await asyncio.gather(*(each.ask_figures() for each in others))
        service = self._service
        restarts = 0 if service.loaded is None else service.loaded.num_restarts
        figures = service.shared.figures_of(self.hub.totals(), service.access.ring, restarts)
        figures.num_api_restarts = self._num_restarts
        process.tell(wire.Told(call, figures))

    async def reload_for(self, process: _Process, call: int) -> None:
        error = None
        try:
            await self._service.reload_keys()
        except ConfigError as failed:
            error = str(failed)
        process.tell(wire.Told(call, error=error))

    def run_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
