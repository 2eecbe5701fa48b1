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

from quire.core.request import RequestMetrics
from quire.engine.stats import Health
from quire.llm.assembly import Assembly, EngineFacts, assemble
from quire.llm.devices import Options
from quire.worker import messages as wire
from quire.worker.channel import Channel
from quire.worker.process import WorkerEngine

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0  # between reports of a request that waits or computes long


class _RequestChannel(Channel):
    """A channel of the worker's engine for one request, without a socket: its reports wait here for
    the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closed = False
        self._loop = loop
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, message: bytes) -> None:
        """On any thread."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    def flush(self) -> None:
        """Nothing waits for a socket."""

    def close(self) -> None:
        self.is_closed = True

    async def receive(self) -> wire.Report:
        """The next report; an empty one where there is none for a while."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                message = await self._messages.get()
        except TimeoutError:
            return wire.Events([], [])
        report: wire.Report = wire.read_report(message)
        return report


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
        self._loop = asyncio.get_running_loop()
        self._channel = _RequestChannel(self._loop)  # of commands that belong to no request
        self._engine = WorkerEngine(assembly, self._channel)

    async def run(self, content: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:  # noqa: ARG002
        """Run a request (a Submit whose `arrived_at` is its age in seconds) and give its reports;
        leaving early cancels it. `prefix` is for the router, which has read it by now."""
        command = wire.read_command(content)
        assert isinstance(command, wire.Submit)
        arrived_at = self._engine.engine.clock.now() - command.arrived_at
        command = msgspec.structs.replace(command, arrived_at=arrived_at)
        channel = _RequestChannel(self._loop)
        has_ended = False
        self._engine.receive([wire.encode(command)], channel)
        try:
            while not has_ended:
                report = await channel.receive()
                has_ended = _is_last(report)
                yield wire.encode(_relative(report, arrived_at))
        finally:
            channel.close()
            if not has_ended:
                self._engine.receive([wire.encode(wire.Cancel(command.request_id))], channel)

    async def facts(self) -> bytes:
        return wire.encode(wire.Ready(self._facts))

    async def snapshot(self) -> bytes:
        return wire.encode(wire.Answer(0, snapshot=self._engine.engine.snapshot()))

    async def set_key_weights(self, weights: dict[str, float]) -> None:
        self._engine.receive([wire.encode(wire.KeyWeights(weights))], self._channel)

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
