"""ModelReplica: one copy of a model, as a Ray Serve deployment.

Its engine is the worker's (`quire.worker`), and so are the messages: a request comes as a Submit
and its answer goes back as the worker's reports (`quire.ray.reports`). The ingress keeps the record
of each request, so that a replica may die at any time.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import ray

from quire.core.request import Ended, Event, RequestMetrics
from quire.engine.stats import Health
from quire.llm.assembly import Assembly, EngineFacts, assemble
from quire.llm.devices import Options
from quire.ray.reports import HEARTBEAT_S, IngressChannel, ReportServer
from quire.worker import messages as wire
from quire.worker.channel import Channel
from quire.worker.process import STUCK_EXIT, WorkerEngine

_log = logging.getLogger(__name__)


class ReplicaEngine(WorkerEngine):
    """The worker's engine, which also says when a request is over."""

    def __init__(self, assembly: Assembly, channel: Channel) -> None:
        super().__init__(assembly, channel)
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, tuple[asyncio.Event, Channel]] = {}  # by request; of the event loop

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException:
            _log.exception("the engine's thread failed")
            os._exit(STUCK_EXIT)  # heartbeats would go on, and its requests would wait for ever

    def add(self, command: wire.Submit, channel: Channel) -> asyncio.Event:
        """On the event loop. Set when the engine has reported its end, or nobody waits for it."""
        end = asyncio.Event()
        self._ends[command.request_id] = (end, channel)
        self.receive([wire.encode(command)], channel)
        return end

    def forget(self, request_id: str) -> None:
        """On the event loop."""
        del self._ends[request_id]

    def leave(self, channel: Channel) -> None:
        super().leave(channel)
        self._loop.call_soon_threadsafe(self._end_all, channel)

    def _end_all(self, channel: Channel) -> None:
        for end, own in self._ends.values():
            if own is channel:
                end.set()

    def _deliver(self, events: Sequence[Event]) -> None:
        super()._deliver(events)
        names = [event.request_id for event in events if isinstance(event, Ended)]
        if names:
            self._loop.call_soon_threadsafe(self._end_each, names)

    def _end_each(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._ends:
                self._ends[name][0].set()


class ModelReplica:
    """The deployment; Serve calls the methods that it knows by name."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, options: Options
    ) -> None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and options.device == "auto":
            options = replace(options, device="cpu")  # Ray gave this replica no GPU
        assembly = await asyncio.to_thread(_load, model, options)
        self._facts = EngineFacts.of(assembly)
        self._channel = IngressChannel()  # of commands that belong to no request
        self._engine = ReplicaEngine(assembly, self._channel)
        self._reports = ReportServer(ray.util.get_node_ip_address(), self._engine.leave)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """On the event loop: where that hangs, no ingress waits for this replica for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._reports.beat()

    async def run(
        self,
        content: bytes,
        prefix: Sequence[int],  # noqa: ARG002
        ingress: str,
    ) -> AsyncIterator[bytes]:
        """Run a request (a Submit whose `arrived_at` is its age in seconds) of an ingress. Gives
        the address of its reports, and ends with the request; leaving early cancels it. `prefix` is
        for the router, which has read it by now."""
        command = wire.read_command(content)
        assert isinstance(command, wire.Submit)
        name = command.request_id
        arrived_at = self._engine.engine.clock.now() - command.arrived_at
        command = msgspec.structs.replace(command, arrived_at=arrived_at)
        channel = self._reports.channel_of(ingress)
        has_ended = self._engine.add(command, channel)
        try:
            yield self._reports.address
            await has_ended.wait()
        finally:
            self._engine.forget(name)
            if not has_ended.is_set():
                self._engine.receive([wire.encode(wire.Cancel(name))], channel)

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


def shifted(metrics: RequestMetrics, by_s: float) -> RequestMetrics:
    """The same on a clock that is ahead by so much."""
    names = ("arrived_at", "started_at", "first_token_at", "finished_at")
    times = {name: getattr(metrics, name) for name in names}
    return replace(metrics, **{name: at + by_s for name, at in times.items() if at is not None})
