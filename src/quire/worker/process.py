"""The worker: loads a model and runs its engine for the server at the other end of a channel.

With a listening socket it has further channels, one for each process that connects: their requests
share the engine, each channel gets what its own requests bring, and its end cancels them.

It ends with the first channel. It also ends, on purpose, where its engine is stuck: the server
starts another one, and every request goes on there.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from quire.core.heap import settle_heap
from quire.core.progress import reporting
from quire.core.request import BACKGROUND, Event, Piece, Request
from quire.engine.aio import EngineThread
from quire.engine.stats import Health
from quire.llm.assembly import Assembly, EngineFacts, assemble_examined
from quire.llm.devices import Options
from quire.structured import PreparedGrammar
from quire.worker import messages as wire
from quire.worker.channel import Channel

STUCK_EXIT = 70  # the engine cannot go on
_SWITCH_INTERVAL_S = 0.0005  # as in the server: the channel's thread must not wait long
_NUM_COMPILERS = 4  # threads that compile constraints


class LogSender(logging.Handler):
    """Sends records to the server, whose log they belong in."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        about = dict(getattr(record, "fields", {}))
        if record.exc_info:
            about["traceback"] = logging.Formatter().formatException(record.exc_info)
        event = getattr(record, "event", None)
        line = wire.Log(record.name, record.levelno, record.getMessage(), event, about)
        self._channel.send(wire.encode(line))


class WorkerEngine(EngineThread):
    """The engine's thread; `receive` is called on the channel's."""

    def __init__(self, assembly: Assembly, channel: Channel) -> None:
        super().__init__(assembly.new_engine(self._report_started))
        self._assembly = assembly
        self._channel = channel
        self._owners: dict[str, Channel] = {}  # of live requests; of the engine's thread
        self._queued: dict[str, Request] = {}  # accepted and not started; of the engine's thread
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "quire-constraint")
        # By request whose constraint is being compiled: what came for it meanwhile.
        self._preparing: dict[str, list[wire.Command]] = {}
        self._draining: list[Channel] = []  # those whose drain waits for them
        self._lock = threading.Lock()  # of both

    def attach(self, connection: socket.socket) -> None:
        """Serve a further channel, on a thread of its own."""
        channel = Channel(connection)
        _send(channel, wire.Ready(EngineFacts.of(self._assembly)))

        def run() -> None:
            channel.run(lambda contents: self.receive(contents, channel))
            channel.close()
            self.leave(channel)

        threading.Thread(target=run, name="quire-channel", daemon=True).start()

    def leave(self, channel: Channel) -> None:
        """On any thread: end the requests of a channel whose other end has gone."""
        self.post(partial(self._cancel_all, channel))

    # ---- on the channel's thread

    def receive(self, contents: Sequence[bytes], channel: Channel) -> None:
        """What arrived together is done between the same two steps, in its order."""
        adding: list[wire.Submit] = []
        for content in contents:
            command = wire.read_command(content)
            if isinstance(command, wire.Submit) and not _needs_preparing(command):
                adding.append(command)
                continue
            if adding:
                self._post_all(adding, channel)
                adding = []
            if not self._waits(command, channel):
                self._do(command, channel)
        if adding:
            self._post_all(adding, channel)

    def _post_all(self, adding: Sequence[wire.Submit], channel: Channel) -> None:
        self.post(partial(self._add_all, adding, channel))
        if any(command.priority < BACKGROUND for command in adding):
            self.engine.arrival_waits()

    def _waits(self, command: wire.Command, channel: Channel) -> bool:
        """Whether it is for a request whose constraint is being compiled, or a drain, which is for
        all: it is done behind that."""
        with self._lock:
            match command:
                case wire.Submit(request_id=name):
                    self._preparing[name] = []
                case wire.Cancel(name) | wire.Pause(name) | wire.Resume(name):
                    if name in self._preparing:
                        self._preparing[name].append(command)
                        return True
                case wire.Drain():
                    if self._preparing:
                        self._draining.append(channel)
                        return True
        return False

    def _prepared(self, name: str, channel: Channel) -> None:
        """Do what came for a request while its constraint was compiled."""
        with self._lock:
            commands = self._preparing.pop(name, [])
            draining: list[Channel] = []
            if not self._preparing:
                draining, self._draining = self._draining, []
        for command in commands:
            self._do(command, channel)
        for waiting in draining:
            self._do(wire.Drain(), waiting)

    def _do(self, command: wire.Command, channel: Channel) -> None:
        engine = self.engine
        match command:
            case wire.Submit():
                self._compilers.submit(self._prepare_and_add, command, channel)
            case wire.Cancel(request_id):
                self.post(lambda: engine.cancel(request_id))
            case wire.Pause(request_id):
                self.post(lambda: engine.pause(request_id))
            case wire.Resume(request_id):
                self.post(lambda: engine.resume(request_id))
            case wire.Prepare():
                self._compilers.submit(self._prepare, command, channel)
            case wire.AskSnapshot(call):
                self.post(lambda: _send(channel, wire.Answer(call, snapshot=engine.snapshot())))
            case wire.AskSteps(call, count, after):
                self._compilers.submit(self._answer_steps, channel, call, count, after)
            case wire.Ping(call):
                _send(channel, wire.Answer(call))
            case wire.KeyWeights(weights):
                self.post(lambda: engine.set_key_weights(weights))
            case wire.Drain():
                self.post_drain().add_done_callback(lambda _: _send(channel, wire.Drained()))
            case wire.Close() if channel is not self._channel:
                self.leave(channel)
            case wire.Close():
                self.end()

    def end(self) -> None:
        """End every request, then the process."""
        self._is_closed = True
        thread = self._start_and_wake()
        thread.join()
        self._channel.flush()
        os._exit(0)

    # ---- on a thread that compiles

    def _answer_steps(self, channel: Channel, call: int, count: int, after: int | None) -> None:
        _send(channel, wire.Answer(call, steps=list(self.engine.latest_steps(count, after))))

    def _prepare(self, command: wire.Prepare, channel: Channel) -> None:
        try:
            self._assembly.grammars.check(command.params)
        except BaseException as error:
            _send(channel, wire.Answer(command.call, wire.WireError.of(error)))
        else:
            _send(channel, wire.Answer(command.call))

    def _prepare_and_add(self, command: wire.Submit, channel: Channel) -> None:
        params, breakers = command.params, self._assembly.breakers
        try:
            kept = self._assembly.grammars.prepare(params) if params.needs_mask else None
            if "dry" in params.order and breakers is not None:
                breakers(params.dry_sequence_breakers)
        except BaseException as error:
            _send(channel, wire.Refused(command.request_id, wire.WireError.of(error)))
            self._prepared(command.request_id, channel)
        else:
            # With the grammar, so that it stays in the cache until the engine looks for it.
            self.post(partial(self._add_prepared, command, channel, kept))
            if command.priority < BACKGROUND:
                self.engine.arrival_waits()

    # ---- on the engine's thread

    def _add_all(self, commands: Sequence[wire.Submit], channel: Channel) -> None:
        for command in commands:
            self._add(command, channel)

    def _add_prepared(
        self, command: wire.Submit, channel: Channel, _kept: PreparedGrammar | None
    ) -> None:
        self._add(command, channel)
        self._prepared(command.request_id, channel)

    def _cancel_all(self, channel: Channel) -> None:
        """End the requests of a process that has gone, or goes."""
        for name, owner in list(self._owners.items()):
            if owner is channel:
                self.engine.cancel(name)

    def _add(self, command: wire.Submit, channel: Channel) -> None:
        if channel.is_closed:
            return
        try:
            request = self.engine.add_request(
                command.prompt,
                command.params,
                request_id=command.request_id,
                key=command.key,
                priority=command.priority,
                timeout_s=command.timeout_s,
                stream=True,
                pooling=command.pooling,
                num_generated=command.num_generated,
                arrived_at=command.arrived_at,
                resumed=command.resumed,
            )
        except Exception as error:
            _send(channel, wire.Refused(command.request_id, wire.WireError.of(error)))
        else:
            self._queued[request.id] = request
            self._owners[request.id] = channel
            _send(channel, wire.Accepted(request.id))

    def _report_started(self) -> None:
        """Before the executor has a step: what may end the process is known by then."""
        if not self._queued:
            return
        started: dict[Channel, list[str]] = {}
        for name, request in list(self._queued.items()):
            if request.metrics.started_at is not None:
                del self._queued[name]
                started.setdefault(self._owners[name], []).append(name)
        for channel, names in started.items():
            _send(channel, wire.Started(names))

    def _deliver(self, events: Sequence[Event]) -> None:
        if self.engine.health is Health.STUCK:
            self._channel.flush()
            os._exit(STUCK_EXIT)  # what it says of its requests is not sent: they go on elsewhere
        if not events:
            return
        by_channel: dict[Channel, wire.Events] = {}
        owners = self._owners
        for event in events:
            channel = owners[event.request_id]
            report = by_channel.get(channel)
            if report is None:
                report = by_channel[channel] = wire.Events([], [])
            if isinstance(event, Piece):
                report.pieces.append(event)
                continue
            self._queued.pop(event.request_id, None)
            del owners[event.request_id]
            report.ended.append(wire.WireEnded.of(event.output))
        for channel, report in by_channel.items():
            _send(channel, report)


def _send(channel: Channel, report: wire.Report) -> None:
    channel.send(wire.encode(report))


def _needs_preparing(command: wire.Submit) -> bool:
    return command.params.needs_mask or "dry" in command.params.order


class Worker:
    """From the first message to the end of the process."""

    def __init__(self, connection: socket.socket, listener: socket.socket | None = None) -> None:
        self._channel = Channel(connection)
        self._listener = listener  # for further channels
        self._engine: WorkerEngine | None = None

    def run(self) -> None:
        logging.getLogger().addHandler(LogSender(self._channel))
        logging.captureWarnings(True)
        self._channel.run(self._receive)
        os._exit(0)  # the server has gone; a step may be under way

    def _receive(self, contents: list[bytes]) -> None:
        if self._engine is not None:
            self._engine.receive(contents, self._channel)
            return
        command = wire.read_command(contents[0])
        if not isinstance(command, wire.Start):  # closed while it loads
            os._exit(0)
        # On a thread of its own, so that the end of the channel is noticed meanwhile.
        threading.Thread(target=self._load, args=[command], name="quire-load", daemon=True).start()

    def _send_progress(self, phase: str, done: float) -> None:
        self._channel.send(wire.encode(wire.Loading(phase, done)))

    def _load(self, command: wire.Start) -> None:
        try:
            options = Options(**command.options)
            path = command.path
            with reporting(self._send_progress):
                assembly = assemble_examined(Path(path), options)
                assembly.executor.warm_up()
            engine = WorkerEngine(assembly, self._channel)
        except BaseException as error:
            self._channel.send(wire.encode(wire.Failed(wire.WireError.of(error))))
            self._channel.flush()
            os._exit(1)
        settle_heap()
        self._engine = engine
        _send(self._channel, wire.Ready(EngineFacts.of(assembly)))
        while self._listener is not None:
            with suppress(OSError):  # whoever connected has gone, or too many files are open
                engine.attach(self._listener.accept()[0])


def _end_process(found: threading.ExceptHookArgs) -> None:
    """A thread that failed leaves requests that nobody goes on with: another worker does."""
    name = "?" if found.thread is None else found.thread.name
    error = (found.exc_type, found.exc_value or found.exc_type(), found.exc_traceback)
    logging.getLogger(__name__).error("the thread %s failed", name, exc_info=error)
    os._exit(STUCK_EXIT)


def main(descriptor: int, listener: int | None = None) -> None:
    if sys.stderr is not None:  # it may have been closed
        faulthandler.enable()  # where it crashes is on standard error
    # It ends with the channel: who ends the server, by the whole group of processes too, has its
    # requests finish first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = _end_process
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    further = None if listener is None else socket.socket(fileno=listener)
    Worker(socket.socket(fileno=descriptor), further).run()
