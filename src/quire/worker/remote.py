"""RemoteEngine: an engine in a worker process, seen from the server.

It has a record of each live request (records.py). When the worker dies, another one is started and
gets the records.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Unpack, cast

from quire.core.errors import (
    DeadlineError,
    ExecutorError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestError,
    WorkerCrashError,
)
from quire.core.request import (
    BACKGROUND,
    Ended,
    FinishReason,
    Piece,
    Request,
    RequestOptions,
    Status,
)
from quire.core.sampling import SamplingParams
from quire.engine.aio import Stream
from quire.engine.stats import Snapshot
from quire.engine.step_log import StepRecord
from quire.llm.assembly import EngineFacts
from quire.worker import messages as wire
from quire.worker.channel import FrameReader, frame
from quire.worker.launch import Launcher, Worker, emit
from quire.worker.records import CRASHES_OF_A_CAUSE, Record, judge, new_record
from quire.worker.turns import Others

_log = logging.getLogger(__name__)
MAX_FAILED_STARTS = 5  # of workers one after another; then the server gives up
MAX_IDLE_DEATHS = 3  # of workers one after another that died with no request to blame ...
MAX_DEATHS = 12  # ... or with some, and that computed nothing
_STEADY_S = 60.0  # a worker that lived so long did not die of being started
_EXPIRY_S = 0.1  # between looks at the deadlines of requests that no worker has
_EXIT_S = 10.0  # for a worker to end its requests and itself
_ANSWER_S = 2.0  # for figures; after that the last ones are given
HANG_S = 60.0  # without a word, pings included: the worker is killed


class _Connection(asyncio.Protocol):
    """The server's end of a channel, on the event loop."""

    def __init__(self, owner: "RemoteEngine") -> None:
        self._owner = owner
        self._reader = FrameReader()
        self.is_lost = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        for content in self._reader.feed(data):
            self._owner.receive(wire.read_report(content))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_lost.set()
        self._owner.lost(self)


class RemoteEngine:
    """An OnlineEngine over a worker, which is replaced when it dies. For one event loop.

    `on_stuck` is called if no worker can be started any more.
    """

    def __init__(
        self,
        worker: Worker,
        facts: EngineFacts,
        launcher: Launcher,
        on_stuck: Callable[[], None] | None = None,
        *,
        hang_s: float = HANG_S,
        max_idle_deaths: int = MAX_IDLE_DEATHS,
        prefix: str = "request-",
        others: Others | None = None,
    ) -> None:
        self.worker = worker
        self.facts = facts
        self.max_unread_tokens = facts.max_unread_tokens
        self.num_restarts = 0
        self._launcher = launcher
        self._on_stuck = on_stuck
        self._hang_s = hang_s
        self._max_idle_deaths = max_idle_deaths
        self._others = others
        self._has_turn = self._waits_for_turn = False  # to run a likely cause, among processes
        self._prefix = prefix  # of requests' names, which are unique in a worker
        self._records: dict[str, Record] = {}
        self._apart: deque[Record] = deque()  # likely causes of crashes, to be run one at a time
        self._probed: Record | None = None
        self._is_alone = False  # the probed one: others wait until it has a token
        self._calls: dict[int, tuple[wire.Command, asyncio.Future[wire.Answer], int]] = {}
        self._numbers = itertools.count(1)
        self._outgoing: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._connection: _Connection | None = None
        self._weights: dict[str, float] | None = None
        self._snapshot: Snapshot | None = None
        self._heard_at = self._connected_at = time.monotonic()
        self._load_s = 1.0  # that the last worker took to be there
        self._has_computed = False  # the worker there is now
        self._num_deaths = 0  # in a row, of workers that computed nothing
        self._drained: asyncio.Future[None] | None = None
        self._is_closed = False
        self._is_suspended = False  # its worker was ended on purpose
        self.failure: ExecutorError | None = None
        self._successor: RemoteEngine | None = None  # which has the requests now
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_recovering(self) -> bool:
        """Whether no worker runs, and one is being started."""
        return self._transport is None and not self._is_closed and self.failure is None

    async def open(self) -> None:
        """Take the channel onto the event loop that requests come from."""
        self._loop = asyncio.get_running_loop()
        await self._connect()
        self._run(self._watch())

    async def _connect(self) -> None:
        transport, connection = await self._loop.create_unix_connection(
            lambda: _Connection(self), sock=self.worker.socket
        )
        self._transport = cast(asyncio.WriteTransport, transport)
        self._connection = connection
        self._heard_at = self._connected_at = time.monotonic()
        self._has_computed = False

    # ---- what callers ask for

    async def submit(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a request; where no worker runs right now, it waits for the next one."""
        if self._successor is not None:
            return await self._successor.submit(prompt, params, stream=stream, **options)
        self._check_open()
        record = self._record(tuple(prompt), params or SamplingParams(), stream, options)
        _check_encodes(record.command)
        if self._transport is None:
            self._check_queue(record.stream.request)
        self._records[record.command.request_id] = record
        if self._transport is not None and not self._is_alone:
            self._send_record(record)
        try:
            await asyncio.shield(record.accepted)
        except asyncio.CancelledError:
            record.stream.cancel()
            raise
        return record.stream

    def _record(
        self, prompt: tuple[int, ...], params: SamplingParams, stream: bool, options: RequestOptions
    ) -> Record:
        name = options.get("request_id") or f"{self._prefix}{next(self._numbers)}"
        if name in self._records:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        return new_record(name, prompt, params, options, Stream(self, self._loop), stream)

    def _check_queue(self, request: Request) -> None:
        """The engine's limits, for what waits for a worker."""
        waiting = [r.stream.request for r in self._records.values() if not r.accepted.done()]
        num_tokens = sum(other.num_tokens_asked for other in waiting)
        is_long = num_tokens + request.num_tokens_asked > self.facts.max_queue_tokens
        if len(waiting) >= self.facts.max_queue_requests or (waiting and is_long):
            raise OverloadedError(
                f"the worker is being replaced, and {len(waiting)} requests of {num_tokens} tokens "
                f"wait for it; the queue holds {self.facts.max_queue_requests} requests and "
                f"{self.facts.max_queue_tokens} tokens",
                max(1.0, self._load_s),
            )

    def cancel(self, stream: Stream) -> None:
        record = self._records.get(stream.request.id)
        if record is None or record.stream is not stream or record.is_cancelled:
            return
        record.is_cancelled = True
        if record.is_sent and self._transport is not None:
            self._send(wire.Cancel(stream.request.id))
        else:
            self._cancelled(record)

    def pause(self, stream: Stream) -> None:
        self._set_paused(stream, True)

    def resume(self, stream: Stream) -> None:
        self._set_paused(stream, False)

    def _set_paused(self, stream: Stream, is_paused: bool) -> None:
        record = self._records.get(stream.request.id)
        if record is None or record.stream is not stream:
            return
        record.is_paused = is_paused
        if record.is_sent and self._transport is not None:
            kind = wire.Pause if is_paused else wire.Resume
            self._send(kind(stream.request.id))

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        if self._transport is not None:
            self._send(wire.KeyWeights(self._weights))

    async def prepare(self, params: SamplingParams) -> None:
        """Have a constraint compiled; raises where it is refused."""
        await self._call(lambda number: wire.Prepare(number, params))

    async def snapshot(self) -> Snapshot:
        """The worker's; the last one where it does not answer."""
        with suppress(TimeoutError, QuireError):
            async with asyncio.timeout(None if self._snapshot is None else _ANSWER_S):
                self._snapshot = (await self._call(wire.AskSnapshot)).snapshot
        if self._snapshot is None:
            raise self.failure or ExecutorError("the worker gave no figures")
        return self._snapshot

    async def latest_steps(self, count: int, after: int | None = None) -> Sequence[StepRecord]:
        with suppress(TimeoutError, QuireError):
            async with asyncio.timeout(_ANSWER_S):
                found = await self._call(lambda number: wire.AskSteps(number, count, after))
                return found.steps or []
        return []

    async def _call(self, make: Callable[[int], wire.Command]) -> wire.Answer:
        if self._successor is not None:
            return await self._successor._call(make)
        self._check_open(is_request=False)
        number = next(self._numbers)
        answer: asyncio.Future[wire.Answer] = self._loop.create_future()
        command = make(number)
        _check_encodes(command)
        self._calls[number] = (command, answer, 0)
        if self._transport is not None:
            self._send(command)
        try:
            found = await answer
        except ExecutorError:
            if self._successor is None:
                raise
            return await self._successor._call(make)
        finally:
            self._calls.pop(number, None)
        if found.error is not None:
            raise found.error.error()
        return found

    async def drain(self, timeout_s: float | None = None) -> None:
        has_nothing = self._transport is None and not self._records  # and no worker to ask
        if self._is_closed or self.failure is not None or has_nothing:
            await self.close()
            return
        self._drained = self._loop.create_future()
        if self._transport is not None:
            self._send(wire.Drain())
        try:
            async with asyncio.timeout(timeout_s):  # wait_for() may lose a cancellation
                await asyncio.shield(self._drained)
        except TimeoutError:
            await self.close()

    async def close(self) -> None:
        """End every request and the worker."""
        if not self._is_closed:
            self._is_closed = True
            for task in self._tasks:
                task.cancel()
            if self._transport is not None:
                self._send(wire.Close())
                # A worker that others have goes on without this channel.
                await self._leave(_EXIT_S if self._others is None else 0.0)
            await asyncio.to_thread(self._launcher.abort)
        await asyncio.to_thread(self.worker.end, _EXIT_S)
        for record in list(self._records.values()):
            self._cancelled(record)
        self._fail_calls(ExecutorError("the engine is closed"))

    async def _leave(self, timeout_s: float) -> None:
        """Let the worker close the channel, or close it. The event loop must know before the socket
        is closed: the next one may get the same number."""
        transport, connection = self._transport, self._connection
        assert transport is not None and connection is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for() may lose a cancellation
                await connection.is_lost.wait()
        transport.abort()
        await connection.is_lost.wait()

    def _check_open(self, *, is_request: bool = True) -> None:
        if self.failure is not None:
            raise self.failure
        if self._is_closed:
            raise ExecutorError("the engine is closed")
        if is_request and self._drained is not None:
            raise OverloadedError("the engine is draining and takes no new requests", 30.0)

    # ---- the channel

    def _send(self, command: wire.Command) -> None:
        """Written at the end of the loop's iteration: what is sent in one arrives together."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame(wire.encode(command)))

    def _flush(self) -> None:
        content, self._outgoing = b"".join(self._outgoing), []
        if self._transport is not None:
            self._transport.write(content)

    def _send_record(self, record: Record, *, is_anew: bool = False) -> None:
        self._send(record.resubmission() if is_anew else record.command)
        record.is_sent = True
        if record.is_paused and record is not self._probed:  # which is to get a token
            self._send(wire.Pause(record.command.request_id))

    def receive(self, report: wire.Report) -> None:
        self._heard_at = time.monotonic()
        match report:
            case wire.Events(pieces, ended):
                self._take(pieces, ended)
            case wire.Accepted(name):
                self._accepted(name)
            case wire.Refused(name, error):
                self._refused(name, error.error())
            case wire.Started(names):
                for name in names:
                    if name in self._records:
                        self._records[name].is_started = True
            case wire.Answer() as answer:
                waiting = self._calls.get(answer.call)
                if waiting is not None and not waiting[1].done():
                    waiting[1].set_result(answer)
            case wire.Log() as line:
                emit(line)
            case wire.Drained():
                self._end_drain()

    def _end_drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _take(self, pieces: Sequence[Piece], ended: Sequence[wire.WireEnded]) -> None:
        records = self._records
        self._has_computed = True
        for piece in pieces:
            record = records.get(piece.request_id)
            if record is not None:
                record.take(piece)
        for end in ended:
            record = records.pop(end.request_id, None)
            if record is not None:
                record.stream.receive(Ended(end.request_id, record.output(end)))
        probed = self._probed
        if probed is not None and (
            probed.num_crashes == 0 or probed.command.request_id not in records
        ):
            self._probe_next()

    def _accepted(self, name: str) -> None:
        record = self._records.get(name)
        if record is None:
            return
        record.is_taken = True
        if not record.accepted.done():
            record.accepted.set_result(record.stream.request)

    def _refused(self, name: str, error: QuireError) -> None:
        record = self._records.pop(name, None)
        if record is None:
            return
        if record.accepted.done():
            self._end(record, Status.FAILED, FinishReason.ERROR, error)
        else:
            record.accepted.set_exception(error)
        if record is self._probed:
            self._probe_next()

    def _finish(self, record: Record) -> None:
        """Every completion has its end, and the worker died before it said that of the request."""
        name = record.command.request_id
        self._records.pop(name, None)
        record.stream.receive(Ended(name, record.finished()))

    def _cancelled(self, record: Record) -> None:
        name = record.command.request_id
        error = RequestCancelledError(f"{name} was cancelled")
        self._end(record, Status.CANCELLED, FinishReason.CANCELLED, error)

    def _end(self, record: Record, status: Status, reason: FinishReason, error: QuireError) -> None:
        name = record.command.request_id
        self._records.pop(name, None)
        record.stream.receive(Ended(name, record.failed(status, reason, error)))
        if not record.accepted.done():
            record.accepted.set_exception(error)
            record.accepted.exception()  # whoever waited may have gone

    # ---- when the worker dies

    def lost(self, connection: _Connection) -> None:
        """The channel is closed: the worker has ended, or does not answer."""
        if connection is not self._connection or self._is_closed or self._is_suspended:
            return
        self._transport = self._connection = None
        self._outgoing.clear()
        self._run(self._recover_or_fail())

    async def _recover_or_fail(self) -> None:
        try:
            await self._recover()
        except Exception as error:
            _log.exception("recovering from a worker's death failed")
            self.fail_all(ExecutorError(f"recovering from a worker's death failed: {error}"))

    async def _recover(self) -> None:
        self._run(self._expire())
        ended = await asyncio.to_thread(self.worker.end)
        self._log_death(ended)
        suspects = self._suspects()
        if self._dies_of_itself(bool(suspects)):
            words = await asyncio.to_thread(self.worker.last_words) or "nothing"
            self.fail_all(
                ExecutorError(
                    f"{self._num_deaths} workers in a row died before they computed anything, the "
                    f"last one with {ended}; on standard error it said: {words}"
                )
            )
            return
        has_probed, others = self._probed is not None, self._others
        are_all = others is None or await others.has_only_suspects(
            len(suspects), has_probed=has_probed
        )
        self._judge(suspects, are_all=are_all)
        self._end_turn()
        self._drop_calls()
        for record in list(self._records.values()):
            record.is_sent = record.is_taken = record.is_started = False
            if record.is_cancelled:
                self._cancelled(record)
        if self._drained is not None and not self._records:
            self._end_drain()  # without another worker: nothing is left for it
        elif await self._started_anew():
            self.num_restarts += 1
            self._resubmit()
            self._log_restart()

    def _suspects(self) -> list[Record]:
        """Which requests may have ended the worker: those in its batch, and those that it was
        given and had not taken yet, as their constraints may be compiled then."""
        sent = [record for record in self._records.values() if record.is_sent]
        return [record for record in sent if record.is_started or not record.is_taken] or sent

    def _dies_of_itself(self, has_suspects: bool) -> bool:
        """Count a death; whether no further worker would do better."""
        lived_s = time.monotonic() - self._connected_at
        self._num_deaths += 1
        if self._has_computed or lived_s > _STEADY_S:
            self._num_deaths = 1 if not self._has_computed else 0
        has_calls = any(isinstance(call, wire.Prepare) for call, _, _ in self._calls.values())
        limit = MAX_DEATHS if has_suspects or has_calls else self._max_idle_deaths
        return self._num_deaths >= limit

    async def _expire(self) -> None:
        """Hold requests to their deadlines that no worker has."""
        while self.is_recovering or any(not r.is_sent for r in self._records.values()):
            now = time.perf_counter()
            for record in [r for r in self._records.values() if not r.is_sent]:
                timeout_s = record.command.timeout_s
                if timeout_s is None and record.command.priority < BACKGROUND:
                    timeout_s = self.facts.timeout_s
                waited = now - record.command.arrived_at
                if timeout_s is not None and waited > timeout_s:
                    name = record.command.request_id
                    error = DeadlineError(f"{name} ran out of time after {waited:.3f} s")
                    self._end(record, Status.EXPIRED, FinishReason.TIMEOUT, error)
            await asyncio.sleep(_EXPIRY_S)

    def _judge(self, suspects: Sequence[Record], *, are_all: bool) -> None:
        """Refuse the likely cause of two crashes; of several, each is run apart from the others."""
        cause, twice = judge(suspects, self._probed, are_all=are_all)
        if cause is not None:
            error = WorkerCrashError(
                f"the worker died {cause.num_crashes} times while it ran this request, which is "
                "the likely cause; other requests go on"
            )
            self._end(cause, Status.FAILED, FinishReason.ERROR, error)
        waiting = dict.fromkeys([*(r for r in self._apart if r is not cause), *twice])
        self._probed = None
        # Who was probed at a crash goes first: quite alone, before anything else is sent.
        self._apart = deque(sorted(waiting, key=lambda record: record.num_probed == 0))

    def _drop_calls(self) -> None:
        """A call that was open at two crashes is not made again."""
        for number, (command, answer, count) in list(self._calls.items()):
            self._calls[number] = (command, answer, count + 1)
            if count + 1 >= CRASHES_OF_A_CAUSE and not answer.done():
                answer.set_exception(WorkerCrashError("the worker died while it answered this"))

    async def _started_anew(self) -> bool:
        error: Exception | None = None
        for attempt in range(MAX_FAILED_STARTS):
            began = time.monotonic()
            try:
                self.worker, self.facts = await asyncio.to_thread(self._launcher.start)
                self._load_s = time.monotonic() - began
                await self._connect()
                return True
            except (QuireError, OSError) as failed:
                error = failed
                extra = {"event": "worker_not_started", "fields": {"error": str(error)}}
                _log.error("no worker could be started: %s", error, extra=extra)
                await asyncio.sleep(min(10.0, 0.5 * 2**attempt))
        self.fail_all(ExecutorError(f"no worker could be started any more: {error}"))
        return False

    def fail_all(self, failure: ExecutorError) -> None:
        """Nothing goes on: every request ends, and the server for its supervisor."""
        self.failure = failure
        _log.critical("%s", failure, extra={"event": "worker_given_up", "fields": {}})
        for record in list(self._records.values()):
            self._end(record, Status.FAILED, FinishReason.ERROR, failure)
        self._fail_calls(failure)
        self._end_drain()
        if self._on_stuck is not None:
            self._on_stuck()

    def _fail_calls(self, failure: ExecutorError) -> None:
        for _, answer, _ in self._calls.values():
            if not answer.done():
                answer.set_exception(failure)

    def _resubmit(self) -> None:
        if self._weights is not None:
            self._send(wire.KeyWeights(self._weights))
        for record in list(self._records.values()):
            if record.is_finished:
                self._finish(record)
        for command, _, _ in self._calls.values():
            self._send(command)
        self._is_alone = True  # until _probe_next() says otherwise
        self._probe_next()

    def _log_death(self, ended: str) -> None:
        """As the worker's own where this process started it: a death is said once."""
        count = len(self._records)
        running = sum(record.is_started for record in self._records.values())
        fields = {"reason": ended, "requests": count, "running": running}
        if self.worker.is_own:
            extra = {"event": "worker_died", "fields": fields}
            _log.error("the worker died: %s; %d requests wait", ended, count, extra=extra)
        else:
            extra = {"event": "channel_lost", "fields": fields}
            _log.info("the channel to the worker is lost; %d requests wait", count, extra=extra)

    def _log_restart(self) -> None:
        count = len(self._records)
        if self.worker.is_own:
            fields = {"pid": self.worker.pid, "requests": count}
            extra = {"event": "worker_restarted", "fields": fields}
            _log.warning("another worker runs; %d requests go on", count, extra=extra)
        else:
            extra = {"event": "channel_restored", "fields": {"requests": count}}
            _log.info("another worker's channel is there; %d requests go on", count, extra=extra)

    def _probe_next(self) -> None:
        """Run the next likely cause, once the last one got a token or ended. One that was probed
        at a crash is run alone: what happens to others beside it is not its doing."""
        before, self._probed = self._probed, None
        if self._transport is None:
            self._end_turn()
            return
        if before is not None and before.is_paused and before.command.request_id in self._records:
            self._send(wire.Pause(before.command.request_id))
        while self._apart and self._apart[0].command.request_id not in self._records:
            self._apart.popleft()
        if self._is_alone and not (self._apart and self._apart[0].num_probed):
            self._is_alone = False
            self._send_held()
        if self._others is None or self._has_turn or not self._apart:
            self._probe_first()
            self._end_turn()
        elif not self._waits_for_turn:
            self._run(self._probe_in_turn(self._others))

    async def _probe_in_turn(self, others: Others) -> None:
        self._waits_for_turn = True
        await others.take_turn()
        self._waits_for_turn, self._has_turn = False, True
        self._probe_next()

    def _end_turn(self) -> None:
        """Unless a likely cause runs, other processes may run theirs."""
        if self._has_turn and self._probed is None and self._others is not None:
            self._has_turn = False
            self._others.end_turn()

    def _probe_first(self) -> None:
        if self._apart:
            self._probed = self._apart.popleft()
            self._send_record(self._probed, is_anew=self._probed.accepted.done())
        elif self._drained is not None:
            self._send(wire.Drain())

    def _send_held(self) -> None:
        """What the worker does not have yet, but for what is run apart."""
        apart = set(map(id, self._apart))
        for record in self._records.values():
            if not record.is_sent and id(record) not in apart:
                self._send_record(record, is_anew=record.accepted.done())

    # ---- a planned change

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._records)

    def take_over(self, old: "RemoteEngine") -> None:
        """Go on with every request of another engine, which ends: of the same weights, so that
        each gets the tokens that it would have got there. Where its worker has died, they go on
        in the next one."""
        old._successor = self
        self._numbers, self.num_restarts = old._numbers, old.num_restarts
        self._records, old._records = old._records, {}
        self._weights = self._weights if old._weights is None else old._weights
        self._drained, old._drained = old._drained, None  # whoever waits for it waits for these
        for record in list(self._records.values()):
            record.stream.move_to(self)
            record.is_sent = record.is_taken = record.is_started = False
            if record.is_cancelled:
                self._cancelled(record)
        self._apart.extend(old._apart)
        if self._transport is not None:
            self._resubmit()
        old._fail_calls(ExecutorError("the worker was replaced"))  # they are made again here

    async def suspend(self) -> None:
        """End the worker and keep its requests, for take_over() or revive()."""
        self._is_suspended = True
        self.worker.kill()
        if self._transport is not None:
            await self._leave(_EXIT_S)
        self._transport = self._connection = None
        self._outgoing.clear()
        for record in list(self._records.values()):
            record.is_sent = record.is_taken = record.is_started = False
        self._run(self._expire())
        await asyncio.to_thread(self.worker.end, 0.0)

    async def revive(self) -> None:
        """Go on after suspend() with a worker as before."""
        self._is_suspended = False
        if await self._started_anew():
            self._resubmit()

    async def _watch(self) -> None:
        """Kill a worker that says nothing for long: it hangs. Time in which this process did not
        run either, stopped or suspended, does not count."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._hang_s / 4)
            slept = time.monotonic() - before
            if self._transport is None or slept > self._hang_s / 2:
                self._heard_at = time.monotonic()
            elif time.monotonic() - self._heard_at > self._hang_s:
                _log.error("the worker said nothing for %g s and is killed", self._hang_s)
                self.worker.kill()
            else:
                self._send(wire.Ping(0))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_encodes(command: wire.Command) -> None:
    """Before it is kept, to be sent again to any other worker."""
    try:
        wire.encode(command)
    except (ValueError, TypeError, OverflowError) as error:  # a lone surrogate, a huge number
        raise RequestError(f"the request cannot be written as a message: {error}") from None
