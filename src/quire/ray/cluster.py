"""ClusterLLM: a model whose engines are replicas of a Ray Serve deployment.

The ingress has a record of each live request, as the server has of a worker's: prompt, parameters
with the seed, and every token that came. When a replica dies, its requests go to others behind
those tokens. A request's tokens are a function of its record, so that the stream goes on unchanged.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from quire.core.errors import (
    DeadlineError,
    ExecutorError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestError,
    WorkerCrashError,
)
from quire.core.request import Ended, FinishReason, Piece, RequestOptions, Status
from quire.core.sampling import SamplingParams
from quire.engine.aio import Stream
from quire.engine.stats import Health, Histogram, Snapshot
from quire.engine.step_log import StepRecord
from quire.llm.assembly import EngineFacts, read_text
from quire.llm.devices import Options
from quire.llm.online import OnlineModel
from quire.llm.prompts import Prepared, PromptReader
from quire.ray.prefixes import prefix_hashes
from quire.ray.replica import shifted
from quire.ray.reports import HEARTBEAT_S, ReplicaReports
from quire.structured import Grammars, PreparedGrammar
from quire.worker import messages as wire
from quire.worker.records import Record, new_record

_log = logging.getLogger(__name__)
SILENCE_S = 10 * HEARTBEAT_S  # of a replica, after which its requests go elsewhere
_CRASHES_OF_A_CAUSE = 3  # replicas that died with a request in their batch, without a token since
_UNREACHABLE = 8  # connections to replicas in a row that could not be made, each by a timeout
_LONGEST_BACKOFF_S = 2.0
_LAST_REPORT_S = 2.0  # behind the end of an answer
_GRACE_S = 5.0  # after a request's deadline, which its replica should have kept
_ANSWER_S = 5.0  # for figures; after that the last ones are given
_WEIGHTS_EVERY_S = 30.0  # new replicas get weights that changed since the deployment


class ReplicaLostError(Exception):
    """A replica says nothing any more, or ended an answer in its middle."""


class UnreachableError(Exception):
    """A replica answers by Ray, and its address for reports cannot be connected to."""


@dataclass(slots=True, eq=False)
class _Live:
    """A request here, and its attempt at a replica."""

    record: Record
    prefix: Sequence[int]
    may_run: asyncio.Event = field(default_factory=asyncio.Event)  # cleared while it is paused
    task: "asyncio.Task[None] | None" = None
    attempt: "asyncio.Task[None] | None" = None
    has_ended: bool = False


class _Attempt:
    """A request at a replica."""

    def __init__(self, live: _Live) -> None:
        self.live = live
        self.ended: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()

    def take_piece(self, piece: Piece) -> None:
        live = self.live
        if not live.has_ended:
            live.record.take(piece._replace(request_id=live.record.command.request_id))

    def accept(self) -> None:
        record = self.live.record
        if not record.accepted.done():
            record.accepted.set_result(record.stream.request)

    def finish(self, error: QuireError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class ClusterEngine:
    """An OnlineEngine over the replicas of a deployment. For one event loop."""

    def __init__(
        self, replicas: DeploymentHandle, facts: EngineFacts, *, silence_s: float = SILENCE_S
    ) -> None:
        self.facts = facts
        self.max_unread_tokens = facts.max_unread_tokens
        self.num_lost = 0  # times that a replica was lost with a request
        self._replicas = replicas
        self._live: dict[str, _Live] = {}
        self._attempts: dict[str, _Attempt] = {}  # by the name that a request has at its replica
        self._reports = ReplicaReports(uuid.uuid4().hex, self._take_report, silence_s)
        self._snapshot: Snapshot | None = None
        self._weights: dict[str, float] | None = None
        self._repeating: asyncio.Task[None] | None = None
        self._is_draining = self._is_closed = False
        self._idle = asyncio.Event()

    # ---- what callers ask for

    async def submit(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a request; where no replica runs right now, it waits for one."""
        if self._is_closed:
            raise ExecutorError("the engine is closed")
        if self._is_draining:
            raise OverloadedError("the engine is draining and takes no new requests", 30.0)
        name = options.get("request_id") or f"request-{uuid.uuid4().hex}"
        if name in self._live:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        handle = Stream(self, asyncio.get_running_loop())
        record = new_record(
            name, tuple(prompt), params or SamplingParams(), options, handle, stream
        )
        live = _Live(record, prefix_hashes(record.command.key, record.command.prompt))
        live.may_run.set()
        self._live[name] = live
        live.task = _own_task(self._run(live))
        try:
            await asyncio.shield(record.accepted)
        except asyncio.CancelledError:
            self.cancel(handle)
            raise
        return handle

    def cancel(self, stream: Stream) -> None:
        live = self._live.get(stream.request.id)
        if live is not None and live.record.stream is stream:
            error = RequestCancelledError(f"{stream.request.id} was cancelled")
            self._fail(live, Status.CANCELLED, FinishReason.CANCELLED, error)
            if live.task is not None:
                live.task.cancel()

    def pause(self, stream: Stream) -> None:
        """Nobody reads: give the replica's slot and blocks back. It goes on as after a crash."""
        live = self._live.get(stream.request.id)
        if live is not None and live.may_run.is_set():
            live.may_run.clear()
            if live.attempt is not None:
                live.attempt.cancel()

    def resume(self, stream: Stream) -> None:
        live = self._live.get(stream.request.id)
        if live is not None:
            live.may_run.set()

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        if self._repeating is None:
            self._repeating = _own_task(self._repeat_weights())

    async def _repeat_weights(self) -> None:
        while True:
            with suppress(Exception):  # a replica died: the next time reaches the others
                sent = self._replicas.broadcast("set_key_weights", self._weights)
                await sent.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
            await asyncio.sleep(_WEIGHTS_EVERY_S)

    async def snapshot(self) -> Snapshot:
        """The figures of all replicas together; the last ones where they do not answer."""
        with suppress(TimeoutError):
            asked = self._replicas.broadcast("snapshot")
            answers = await asked.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
            contents = [answer for answer in answers if isinstance(answer, bytes)]
            found = [wire.read_report(content) for content in contents]
            snapshots = [answer.snapshot for answer in found if isinstance(answer, wire.Answer)]
            if snapshots:
                self._snapshot = merged([one for one in snapshots if one is not None])
        if self._snapshot is None:
            raise ExecutorError("no replica gave figures")
        return self._snapshot

    async def latest_steps(self, count: int, after: int | None = None) -> Sequence[StepRecord]:  # noqa: ARG002
        """None: step ids are a replica's own, and steps of several have no order."""
        return []

    async def drain(self, timeout_s: float | None = None) -> None:
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._live:
                    self._idle.clear()
                    await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._repeating is not None:
            self._repeating.cancel()
        for live in list(self._live.values()):
            self.cancel(live.record.stream)
        self._reports.close()

    # ---- one request

    async def _run(self, live: _Live) -> None:
        """Until it has ended, on as many replicas as it takes."""
        timeout_s = live.record.command.timeout_s
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + _GRACE_S):
                await self._run_anywhere(live)
        except TimeoutError:
            error = DeadlineError(f"no replica ran it within {timeout_s:g} s")
            self._fail(live, Status.EXPIRED, FinishReason.TIMEOUT, error)
        except QuireError as error:
            self._fail(live, Status.FAILED, FinishReason.ERROR, error)
        except Exception as error:
            _log.exception("a request could not be given to a replica")
            failure = ExecutorError(f"no replica could be asked: {error!r:.500}")
            self._fail(live, Status.FAILED, FinishReason.ERROR, failure)
        finally:
            if live.attempt is not None:
                live.attempt.cancel()

    async def _run_anywhere(self, live: _Live) -> None:
        num_failed = num_unreachable = 0
        while not live.has_ended:
            await live.may_run.wait()
            before = _num_tokens(live.record)
            live.attempt = asyncio.create_task(self._attempt(live))
            try:
                await asyncio.shield(live.attempt)
            except asyncio.CancelledError:
                own = asyncio.current_task()
                if not live.attempt.cancelled() or (own is not None and own.cancelling()):
                    raise  # this task was cancelled; else the attempt alone, by a pause
            except OverloadedError as error:
                if not live.record.accepted.done():
                    raise
                await asyncio.sleep(min(error.retry_after_s, _LONGEST_BACKOFF_S))
            except QuireError:
                raise
            except Exception as error:
                num_failed = 0 if _num_tokens(live.record) > before else num_failed + 1
                is_unreachable = isinstance(error, UnreachableError)
                num_unreachable = num_unreachable + 1 if is_unreachable else 0
                if num_unreachable >= _UNREACHABLE:
                    raise ExecutorError(
                        f"{num_unreachable} replicas in a row took this request, and none could "
                        f"be connected to for its tokens ({error}): ingresses need TCP "
                        "connections to every node's address, on any port"
                    ) from error
                await self._lost(live, error, num_failed)

    async def _lost(self, live: _Live, error: Exception, num_failed: int) -> None:
        """Judge a request whose replica was lost, then wait a little."""
        record = live.record
        self.num_lost += 1
        about = {"request": record.command.request_id, "error": repr(error)[:300]}
        extra = {"event": "replica_lost", "fields": about}
        _log.warning("a replica was lost; its request goes to another one", extra=extra)
        if record.is_started:
            record.num_crashes += 1
        if record.num_crashes >= _CRASHES_OF_A_CAUSE:
            raise WorkerCrashError(
                f"{record.num_crashes} replicas died while they ran this request, which is the "
                "likely cause; other requests go on"
            )
        await asyncio.sleep(min(_LONGEST_BACKOFF_S, 0.05 * 2 ** min(num_failed, 10)))

    async def _attempt(self, live: _Live) -> None:
        """Give the request to a replica, behind what is known of it, and read its answer."""
        record = live.record
        record.is_started = False
        command = record.resubmission() if record.accepted.done() else record.command
        # A replica may still hold the id that a request had there before.
        name = f"{command.request_id}/{uuid.uuid4().hex[:8]}"
        age_s = time.perf_counter() - record.command.arrived_at
        sent = wire.encode(msgspec.structs.replace(command, request_id=name, arrived_at=age_s))
        attempt = self._attempts[name] = _Attempt(live)
        run = self._replicas.options(method_name="run", stream=True)
        answer = run.remote(sent, live.prefix, self._reports.ingress)
        ending: asyncio.Task[None] | None = None
        try:
            # A replica may have to be started first: that is waited for.
            address = await anext(answer)
            try:
                reader = await self._reports.reader_of(address)
            except OSError as refused:
                raise UnreachableError(repr(refused)) from refused
            ending = asyncio.create_task(_end_of(answer))
            either: list[asyncio.Future[Any]] = [attempt.ended, reader.lost, ending]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():  # its last report, if it sent one, may still be on its way
                await asyncio.wait(
                    either[:2], timeout=_LAST_REPORT_S, return_when=asyncio.FIRST_COMPLETED
                )
            if not attempt.ended.done():
                reason = reader.lost.result() if reader.lost.done() else "its answer has no end"
                raise ReplicaLostError(reason)
            if (error := attempt.ended.result()) is not None:
                raise error
            await ending
        except BackPressureError as error:
            raise OverloadedError("every replica's queue is full", 5.0) from error
        finally:
            del self._attempts[name]
            if ending is None or not ending.done():
                answer.cancel()  # it may have been cancelled here: the replica has to know
                if ending is not None:
                    ending.cancel()

    def _take_report(self, report: wire.Report) -> None:
        """What a step of a replica brought to this ingress. Reports of attempts that were given up
        are for nobody."""
        attempts = self._attempts
        match report:
            case wire.Events(pieces, ended):
                for piece in pieces:
                    if (attempt := attempts.get(piece.request_id)) is not None:
                        attempt.take_piece(piece)
                for end in ended:
                    if (attempt := attempts.get(end.request_id)) is not None:
                        self._end(attempt.live, end)
                        attempt.finish(None)
            case wire.Accepted(name):
                if (attempt := attempts.get(name)) is not None:
                    attempt.accept()
            case wire.Started(names):
                for name in names:
                    if (attempt := attempts.get(name)) is not None:
                        attempt.live.record.is_started = True
            case wire.Refused(name, error):
                if (attempt := attempts.get(name)) is not None:
                    attempt.finish(error.error())

    def _end(self, live: _Live, end: wire.WireEnded) -> None:
        if live.has_ended:
            return
        record, name = live.record, live.record.command.request_id
        # Machines' clocks have nothing in common but how fast they go.
        metrics = shifted(end.metrics, record.metrics.arrived_at - end.metrics.arrived_at)
        output = record.output(msgspec.structs.replace(end, request_id=name, metrics=metrics))
        self._forget(live)
        record.stream.receive(Ended(name, output))

    def _fail(self, live: _Live, status: Status, reason: FinishReason, error: QuireError) -> None:
        if live.has_ended:
            return
        record = live.record
        self._forget(live)
        if not record.accepted.done():
            record.accepted.set_exception(error)
            record.accepted.exception()  # whoever waited may have gone
        record.stream.receive(
            Ended(record.command.request_id, record.failed(status, reason, error))
        )

    def _forget(self, live: _Live) -> None:
        live.has_ended = True
        self._live.pop(live.record.command.request_id, None)
        self._idle.set()


async def _end_of(answer: Any) -> None:
    """A replica ends its answer when the request has ended there; or it has died."""
    with suppress(Exception):
        await anext(answer)


def _own_task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that belongs to no HTTP request.

    Tasks inherit context variables. In one, Serve keeps the id of the HTTP request, and gives it to
    every call that is made on its behalf; its router knows one pending call of an id, and others
    with the same id wait for ever. In another, Ray keeps the task whose cancellation cancels all
    calls below it. Both are wrong for a request of several prompts, and for a job that goes on
    after the request that began it.
    """
    return asyncio.create_task(work, context=Context())


def _num_tokens(record: Record) -> int:
    return sum(len(completion.token_ids) for completion in record.completions)


class ClusterLLM(OnlineModel):
    """A model behind a deployment of ModelReplica, as RemoteLLM is one behind a worker."""

    _engine: ClusterEngine
    _grammars: Grammars

    @classmethod
    def load(
        cls, model: str | Path, options: Options, replicas: DeploymentHandle, silence_s: float
    ) -> Self:
        """Read here what turns text into requests, and wait for a replica. On a thread."""
        made = cls()
        text = read_text(model, options)
        made._text = text
        facts = wire.read_report(replicas.facts.remote().result())
        assert isinstance(facts, wire.Ready)
        made._facts = facts.facts
        made._engine = ClusterEngine(replicas, facts.facts, silence_s=silence_s)
        made._grammars = Grammars(text.tokenizer, text.spec.vocabulary_size, text.end_token_ids)
        made.prompts = PromptReader(made.tokenizer, made.max_context)
        return made

    @property
    def num_restarts(self) -> int:
        """Times that a replica was lost with a request."""
        return self._engine.num_lost

    def prepare_grammar(self, params: SamplingParams) -> PreparedGrammar | None:
        """Checked here, and compiled by the replica that runs the request."""
        self._grammars.check(params)
        return None

    async def _with_grammar(self, prepared: Prepared, params: SamplingParams) -> Prepared:  # noqa: ARG002
        return prepared


# ---- the figures of several engines as those of one


_HEALTH_ORDER = (Health.OK, Health.DRAINING, Health.DEGRADED, Health.STUCK)


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Counts are added; shares are of all blocks and of all time; health is the worst one's."""
    if len(snapshots) == 1:
        return snapshots[0]
    worst = max(snapshots, key=lambda one: _HEALTH_ORDER.index(one.health_report.state))
    total = _sum([replace(one, health_report=worst.health_report) for one in snapshots])
    assert isinstance(total, Snapshot)
    return replace(
        total,
        at=worst.at,
        kv_usage=total.num_used_blocks / max(1, total.num_blocks),
        utilisation=total.utilisation / len(snapshots),
        health=worst.health,
        health_report=worst.health_report,
        stats=replace(total.stats, since=worst.stats.since),
    )


def _sum(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Histogram):
        found = Histogram(first.bounds)
        found.counts = [sum(counts) for counts in zip(*(v.counts for v in values), strict=True)]
        found.total, found.sum = sum(v.total for v in values), sum(v.sum for v in values)
        return found
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: sum(value.get(name, 0) for value in values) for name in names}
    if is_dataclass(first):
        kind: Callable[..., Any] = type(first)
        return kind(**{f.name: _sum([getattr(v, f.name) for v in values]) for f in fields(first)})
    return sum(values) if isinstance(first, int | float) else first
