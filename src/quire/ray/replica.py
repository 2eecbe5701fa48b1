"""ModelReplica: one copy of a model, as a Ray Serve deployment.

Its engine is the worker's (`quire.worker`), and so are the messages: a request comes as a Submit
and its answer goes back as the worker's reports. The ingress keeps the record of each request, so
that a replica may die at any time.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.core.request import Piece, RequestMetrics
from quire.engine.stats import Health
from quire.llm.assembly import Assembly, EngineFacts, assemble
from quire.llm.devices import Options
from quire.worker import messages as wire
from quire.worker.channel import Channel
from quire.worker.process import WorkerEngine

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0  # between reports of a request that waits or computes long


class _NoChannel(Channel):
    """There is no socket: ReplicaEngine hands reports over itself."""

    def __init__(self) -> None:
        pass

    def send(self, message: bytes) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Nothing waits. The engine calls it before it ends a process that is stuck."""


class ReplicaEngine(WorkerEngine):
    """The worker's engine, whose reports go to the event loop, each to the request it is about."""

    def __init__(self, assembly: Assembly, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(assembly, _NoChannel())
        self._loop = loop
        self._reports: dict[str, asyncio.Queue[wire.Report]] = {}  # of the loop's thread alone

    def send(self, report: wire.Report) -> None:
        """On any thread."""
        self._loop.call_soon_threadsafe(self._hand_over, report)

    async def reports(self, command: wire.Submit) -> AsyncIterator[wire.Report]:
        """What the engine says of a request, to its end; leaving early cancels it."""
        name = command.request_id
        queue = self._reports[name] = asyncio.Queue()
        has_ended = False
        self.receive([wire.encode(command)])
        try:
            while not has_ended:
                try:
                    report = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    yield wire.Events([], [])
                    continue
                has_ended = _is_last(report)
                yield report
        finally:
            del self._reports[name]
            if not has_ended:
                self.receive([wire.encode(wire.Cancel(name))])

    def _hand_over(self, report: wire.Report) -> None:
        match report:
            case wire.Accepted(name) | wire.Refused(name):
                self._put(name, report)
            case wire.Started(names):
                for name in names:
                    self._put(name, wire.Started([name]))
            case wire.Events(pieces, ended):
                by_request: dict[str, list[Piece]] = {}
                for piece in pieces:
                    by_request.setdefault(piece.request_id, []).append(piece)
                ends = {end.request_id: end for end in ended}
                for name in by_request.keys() | ends.keys():
                    last = [ends[name]] if name in ends else []
                    self._put(name, wire.Events(by_request.get(name, []), last))

    def _put(self, name: str, report: wire.Report) -> None:
        if name in self._reports:  # else nobody reads it any more
            self._reports[name].put_nowait(report)


def _is_last(report: wire.Report) -> bool:
    match report:
        case wire.Refused():
            return True
        case wire.Events(_, ended):
            return bool(ended)
    return False


class ModelReplica:
    """The deployment; Serve calls the methods that it knows by name."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, options: Options
    ) -> None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and options.device == "auto":
            options = replace(options, device="cpu")  # Ray gave this replica no GPU
        assembly = await asyncio.to_thread(_load, model, options)
        self._facts = EngineFacts.of(assembly)
        self._engine = ReplicaEngine(assembly, asyncio.get_running_loop())

    async def run(self, content: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:  # noqa: ARG002
        """Run a request (a Submit whose `arrived_at` is its age in seconds) and give its reports.

        `prefix` is for the router, which has read it by now."""
        command = wire.read_command(content)
        assert isinstance(command, wire.Submit)
        arrived_at = self._engine.engine.clock.now() - command.arrived_at
        reports = self._engine.reports(msgspec.structs.replace(command, arrived_at=arrived_at))
        try:
            async for report in reports:
                yield wire.encode(_relative(report, arrived_at))
        finally:
            await reports.aclose()  # type: ignore[attr-defined]

    async def facts(self) -> bytes:
        return wire.encode(wire.Ready(self._facts))

    async def snapshot(self) -> bytes:
        return wire.encode(wire.Answer(0, snapshot=self._engine.engine.snapshot()))

    async def set_key_weights(self, weights: dict[str, float]) -> None:
        self._engine.receive([wire.encode(wire.KeyWeights(weights))])

    # ---- Serve's hooks

    async def check_health(self) -> None:
        """Raises where the engine cannot go on; Serve then replaces the replica."""
        report = self._engine.engine.snapshot().health_report
        if report.state is Health.STUCK:
            raise RuntimeError(f"the engine is stuck: {report.cause}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What quire.ray.scaling decides on."""
        now = self._engine.engine.snapshot()
        return {
            "running": float(now.num_running),
            "waiting": float(now.num_waiting),
            "kv_usage": now.kv_usage,
        }

    async def __del__(self) -> None:
        """Serve has waited for the requests that ran: those left go on in other replicas."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.post(engine.engine.drain)


def _load(model: str, options: Options) -> Assembly:
    assembly = assemble(model if not Path(model).exists() else Path(model), options)
    assembly.executor.warm_up()
    return assembly


def _relative(report: wire.Report, arrived_at: float) -> wire.Report:
    """With times since the arrival: machines' clocks have nothing in common."""
    if not isinstance(report, wire.Events) or not report.ended:
        return report
    ended = [
        msgspec.structs.replace(end, metrics=shifted(end.metrics, -arrived_at))
        for end in report.ended
    ]
    return wire.Events(report.pieces, ended)


def shifted(metrics: RequestMetrics, by_s: float) -> RequestMetrics:
    """The same on a clock that is ahead by so much."""
    names = ("arrived_at", "started_at", "first_token_at", "finished_at")
    times = {name: getattr(metrics, name) for name in names}
    return replace(metrics, **{name: at + by_s for name, at in times.items() if at is not None})
