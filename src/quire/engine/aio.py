"""AsyncEngine: the engine on a thread of its own, requests and streams on the event loop.

OnlineEngine is what callers need of it.

Commands go to the thread through an inbox that is looked at between steps; events come back through
the loop. The thread is woken at the end of an iteration of the loop, so that all arrivals
of one iteration are in one batch.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar, Unpack

from quire.core.errors import ExecutorError, RequestError
from quire.core.request import (
    BACKGROUND,
    Ended,
    Event,
    Piece,
    Request,
    RequestOptions,
    RequestOutput,
)
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.stats import Health, Snapshot
from quire.engine.step_log import StepRecord

Command = Callable[[], object]
T = TypeVar("T")


class OnlineEngine(Protocol):
    """What runs requests of event loops: AsyncEngine, or an engine in another process."""

    max_unread_tokens: int

    async def submit(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> "Stream":
        """Queue a request (options as for Engine.add_request); raises if it is refused."""

    def cancel(self, stream: "Stream") -> None: ...

    def pause(self, stream: "Stream") -> None: ...

    def resume(self, stream: "Stream") -> None: ...

    def set_key_weights(self, weights: Mapping[str, float]) -> None: ...

    async def snapshot(self) -> Snapshot: ...

    async def latest_steps(self, count: int, after: int | None = None) -> Sequence[StepRecord]: ...

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing new, wait for what runs; what is left after the timeout is cancelled."""

    async def close(self) -> None:
        """End every request."""


class Stream:
    """One request's pieces as they come; reading slowly pauses the request, leaving cancels it."""

    def __init__(self, owner: OnlineEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.request: Request
        self._owner = owner
        self.loop = loop
        self._pieces: deque[Piece] = deque()
        self._num_unread = 0
        self._is_paused = False
        self._output: RequestOutput | None = None
        self._news = asyncio.Event()
        self._due = asyncio.Event()  # the end, or the time to look at what has come

    def move_to(self, owner: OnlineEngine) -> None:
        """Another engine goes on with the request."""
        self._owner = owner

    def accepted(self, request: Request) -> None:
        """The engine took the request that this stream was made for."""
        self.request = request

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, once; raises the request's error where it ended with one."""
        try:
            while (piece := await self._next()) is not None:
                yield piece
        finally:
            self.cancel()
        if self._output is not None and self._output.error is not None:
            raise self._output.error

    async def _next(self) -> Piece | None:
        while not self._pieces and self._output is None:
            self._news.clear()
            await self._news.wait()
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._num_unread -= len(piece.token_ids)
        if self._is_paused and self._num_unread <= self._owner.max_unread_tokens // 2:
            self._is_paused = False
            self._owner.resume(self)
        return piece

    async def take(self, not_before: float = 0.0) -> list[Piece]:
        """Every piece that has come, waiting for one; none: the request has ended (see output).

        `not_before`, on the loop's clock: let pieces gather until then, or until the request ends.
        """
        if self._output is None and not_before > self.loop.time():
            self._due.clear()
            timer = self.loop.call_at(not_before, self._due.set)
            try:
                await self._due.wait()
            finally:
                timer.cancel()
        while not self._pieces and self._output is None:
            self._news.clear()
            await self._news.wait()
        pieces = list(self._pieces)
        self._drop_pieces()
        return pieces

    async def output(self) -> RequestOutput:
        """Wait for the end, whatever it is; pieces need not be read."""
        try:
            while self._output is None:
                self._drop_pieces()
                self._news.clear()
                await self._news.wait()
        finally:
            self.cancel()
        return self._output

    def _drop_pieces(self) -> None:
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            self._owner.resume(self)

    def cancel(self) -> None:
        """End the request; nothing happens if it has ended."""
        if self._output is None:
            self._owner.cancel(self)

    def receive(self, event: Event) -> None:
        """On the event loop: take what the engine reports."""
        if isinstance(event, Ended):
            self._output = event.output
            self._due.set()
        else:
            self._pieces.append(event)
            self._num_unread += len(event.token_ids)
            if self._num_unread > self._owner.max_unread_tokens and not self._is_paused:
                self._is_paused = True
                self._owner.pause(self)
        self._news.set()


class EngineThread:
    """An engine on a thread of its own, which does commands between steps; `_deliver` is called
    there with what each step brought. `on_stuck` is called if the executor stops answering."""

    def __init__(self, engine: Engine, on_stuck: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self._on_stuck = on_stuck
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._idle_waiters: list[Future[None]] = []  # of the engine's thread alone
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what several threads write
        self._is_closed = False

    def _deliver(self, events: Sequence[Event]) -> None:
        """On the engine's thread: hand on what happened."""
        raise NotImplementedError

    def _became_idle(self) -> None:
        """On the engine's thread: every request has ended."""

    # ---- from anywhere

    def post(self, command: Command) -> None:
        """Have the engine's thread do something between two steps."""
        self._inbox.append(command)
        self._start_and_wake()

    def post_drain(self) -> "Future[None]":
        """Have the engine take nothing new; done when what runs has ended."""
        done: Future[None] = Future()

        def begin() -> None:
            self.engine.drain()
            self._idle_waiters.append(done)

        self.post(begin)
        return done

    def _start_and_wake(self) -> threading.Thread:
        with self._lock:  # two event loops may be the first at once
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
                self._thread.start()
        self._wake.set()
        return self._thread

    # ---- on the engine's thread

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._do_commands()
                events = self.engine.step()
            except Exception as error:  # a bug of ours: every waiting caller gets an error
                failure = ExecutorError(f"the engine failed: {error!r}")
                failure.__cause__ = error
                events = self.engine.fail_all(failure)
            self._deliver(events)
            if self.engine.health is Health.STUCK:
                self._report_stuck()
            if not self.engine.has_work:
                self._became_idle()
                self._resolve_idle_waiters()
            self._sleep()
        self._do_commands()
        self._became_idle()
        self.engine.close()
        self._deliver(self.engine.take_events())
        self._resolve_idle_waiters()

    def _do_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _sleep(self) -> None:
        """Until there is something to do: a command, or the time the engine named."""
        wake_at = self.engine.wake_at
        if wake_at is not None:
            seconds = wake_at - self.engine.clock.now()
            self._wake.wait(None if seconds == float("inf") else max(0.0, seconds))
        self._wake.clear()

    def _resolve_idle_waiters(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():  # else its caller was cancelled
                waiter.set_result(None)

    def _report_stuck(self) -> None:
        on_stuck, self._on_stuck = self._on_stuck, None
        if on_stuck is not None:
            on_stuck()


class _Arrival(NamedTuple):
    """A request to be added by the engine's thread."""

    add: Command
    is_background: bool


class AsyncEngine(EngineThread):
    """For one or more event loops; `on_stuck` is called if the executor stops answering."""

    def __init__(self, engine: Engine, on_stuck: Callable[[], None] | None = None) -> None:
        super().__init__(engine, on_stuck)
        self.max_unread_tokens = engine.config.max_unread_tokens
        self._streams: dict[str, Stream] = {}  # of the engine's thread alone
        # Of the engine's thread alone: what replaces the engine, and arrivals that wait for it.
        self._replacement: tuple[Callable[[], Engine], Future[None]] | None = None
        self._held: list[Command] = []
        self._arrivals: dict[asyncio.AbstractEventLoop, list[_Arrival]] = {}  # of this iteration

    # ---- on the event loop

    async def submit(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a request (options as for Engine.add_request); raises if it is refused."""
        loop = asyncio.get_running_loop()
        handle = Stream(self, loop)
        accepted: Future[Request] = Future()
        arrived_at = self.engine.clock.now()  # the engine's thread may be in a step for long

        def add() -> None:
            if self._replacement is not None:
                self._held.append(add)
                return
            if not accepted.set_running_or_notify_cancel():
                return  # its caller was cancelled
            try:
                request = self.engine.add_request(
                    prompt, params, stream=stream, arrived_at=arrived_at, **options
                )
            except Exception as error:
                accepted.set_exception(error)
            else:
                handle.accepted(request)
                self._streams[request.id] = handle
                accepted.set_result(request)

        is_background = options.get("priority", 0) >= BACKGROUND
        self._post_after_iteration(_Arrival(add, is_background), loop)
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            self.post(lambda: self._cancel_if_accepted(accepted))
            raise
        return handle

    async def generate(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Run a request to its end; an error of the request is in the output."""
        handle = await self.submit(prompt, params, stream=False, **options)
        return await handle.output()

    async def call(self, function: Callable[[], T]) -> T:
        """What a function returns or raises that the engine's thread runs between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise ExecutorError("the engine is closed")
            self._inbox.append(run)
        self._start_and_wake()
        return await asyncio.wrap_future(done)

    async def replace_engine(self, make: Callable[[], Engine]) -> None:
        """Run requests in another engine once those of this one have ended; new ones wait."""
        done: Future[None] = Future()

        def begin() -> None:
            if self._replacement is not None:
                raise RequestError(
                    "another call sets max_batch_size already", param="max_batch_size"
                )
            self._replacement = (make, done)

        try:
            await self.call(begin)
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self.post(lambda: self._cancel_replacement(done))
            raise

    def _post_after_iteration(self, arrival: "_Arrival", loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._is_closed:
                raise ExecutorError("the engine is closed")
            if loop not in self._arrivals:
                self._arrivals[loop] = []
                loop.call_soon(self._post_arrivals, loop)
            self._arrivals[loop].append(arrival)

    def _post_arrivals(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            arrivals = self._arrivals.pop(loop, [])
        self.post(lambda: _do_all(arrival.add for arrival in arrivals))
        if not all(arrival.is_background for arrival in arrivals):
            self.engine.arrival_waits()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing new, wait for what runs; what is left after the timeout is cancelled."""
        if self._is_closed:
            await self.close()
            return
        done = self.post_drain()
        try:
            async with asyncio.timeout(timeout_s):  # wait_for() may lose a cancellation
                await asyncio.wrap_future(done)
        except TimeoutError:
            await self.close()

    async def close(self) -> None:
        """End every request and the thread."""
        with self._lock:
            self._inbox.extend(
                arrival.add for arrivals in self._arrivals.values() for arrival in arrivals
            )
            self._arrivals.clear()
            self._is_closed = True
        thread = self._start_and_wake()  # also if nothing ever ran: it closes the executor
        await asyncio.to_thread(thread.join)

    def cancel(self, stream: Stream) -> None:
        self.post(lambda: self.engine.cancel(stream.request.id))

    def pause(self, stream: Stream) -> None:
        self.post(lambda: self.engine.pause(stream.request.id))

    def resume(self, stream: Stream) -> None:
        self.post(lambda: self.engine.resume(stream.request.id))

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        self.post(lambda: self.engine.set_key_weights(weights))

    async def snapshot(self) -> Snapshot:
        return self.engine.snapshot()

    async def latest_steps(self, count: int, after: int | None = None) -> Sequence[StepRecord]:
        return self.engine.latest_steps(count, after)

    # ---- on the engine's thread

    def _became_idle(self) -> None:
        """The engine is idle or closing: let what waits for that go on."""
        if self._replacement is None:
            return
        make, done = self._replacement
        self._replacement = None
        if done.set_running_or_notify_cancel():
            try:
                if self._is_closed or self.engine.health is Health.STUCK:
                    raise ExecutorError("the engine is closed")
                engine = make()
                engine.take_over(self.engine)
                self.engine = engine
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        self._release_held()

    def _cancel_replacement(self, done: Future[None]) -> None:
        """Its caller was cancelled: what waits for it goes on in the engine there is."""
        if self._replacement is not None and self._replacement[1] is done:
            self._replacement = None
            self._release_held()

    def _release_held(self) -> None:
        held, self._held = self._held, []
        _do_all(held)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their streams, one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]] = {}
        for event in events:
            stream = self._streams[event.request_id]
            if isinstance(event, Ended):
                del self._streams[event.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, deliveries in by_loop.items():
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_hand_over, deliveries)

    def _cancel_if_accepted(self, accepted: Future[Request]) -> None:
        if accepted.done() and not accepted.cancelled() and accepted.exception() is None:
            self.engine.cancel(accepted.result().id)


def _do_all(commands: Iterable[Command]) -> None:
    for command in commands:
        command()


def _hand_over(deliveries: list[tuple[Stream, Event]]) -> None:
    for stream, event in deliveries:
        stream.receive(event)
