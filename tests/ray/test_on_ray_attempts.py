"""An ingress's requests at replicas that answer otherwise than they should: real connections, and
in the place of Serve's handle one that says what to answer."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.errors import ExecutorError
from quire.core.request import FinishReason, Piece, RequestMetrics, Status
from quire.ray import cluster, replica
from quire.ray.cluster import ClusterEngine
from quire.ray.reports import ReplicaReports, ReportReader, ReportServer
from quire.worker import messages as wire
from quire.worker.process import STUCK_EXIT, WorkerEngine

PATIENCE_S = 60.0

# What a replica does with a request (its name there) of an ingress.
Behaviour = Callable[[ReportServer, str, str], None]


class Answer:
    """What Serve gives for a call that streams."""

    def __init__(self, contents: list[bytes], *, has_end: bool) -> None:
        self._contents = contents
        self._has_end = has_end
        self.is_cancelled = False

    async def __anext__(self) -> bytes:
        if not self._contents:
            if not self._has_end:
                await asyncio.Event().wait()
            raise StopAsyncIteration
        return self._contents.pop(0)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Each attempt is given to the next behaviour."""

    def __init__(self, server: ReportServer, *behaviours: Behaviour) -> None:
        self._server = server
        self._behaviours = list(behaviours)
        self.num_asked = 0
        self.ends_answers = True

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, content: bytes, _prefix: Any, ingress: str) -> Answer:
        command = wire.read_command(content)
        assert isinstance(command, wire.Submit)
        self._behaviours[self.num_asked](self._server, ingress, command.request_id)
        self.num_asked += 1
        return Answer([self._server.address], has_end=self.ends_answers)


def say(server: ReportServer, ingress: str, *reports: wire.Report) -> None:
    for report in reports:
        server.channel_of(ingress).send(wire.encode(report))


def say_nothing(_server: ReportServer, _ingress: str, _name: str) -> None:
    """The answer ends, and no report came."""


def finish(server: ReportServer, ingress: str, name: str) -> None:
    piece = Piece(name, 0, (5,), "five", (), None, None, False)
    end = wire.WireEnded(
        name,
        Status.FINISHED,
        [wire.WireCompletion("five", FinishReason.LENGTH, None, False)],
        RequestMetrics(1000.0, 1001.0, 1002.0, 1003.0),
        None,
        None,
        None,
    )
    say(server, ingress, wire.Accepted(name), wire.Started([name]), wire.Events([piece], [end]))


def completed(*behaviours: Behaviour) -> tuple[Any, int]:
    """The output of a request, and how many attempts it took."""

    async def main() -> tuple[Any, int]:
        handle: Any = Handle(ReportServer("127.0.0.1", lambda _: None), *behaviours)
        facts: Any = SimpleNamespace(max_unread_tokens=1000)
        engine = ClusterEngine(handle, facts)
        async with asyncio.timeout(PATIENCE_S):
            stream = await engine.submit([1, 2, 3])
            output = await stream.output()
        await engine.close()
        return output, handle.num_asked

    return asyncio.run(main())


def test_an_answer_whose_reports_are_lost_is_asked_for_again() -> None:
    output, num_asked = completed(say_nothing, finish)
    assert num_asked == 2
    assert output.completions[0].token_ids == [5]


def test_a_request_whose_replicas_cannot_be_reached_ends_with_what_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes it by Ray, and listens where nobody gets through."""
    monkeypatch.setattr(cluster, "_LONGEST_BACKOFF_S", 0.01)

    async def refuse(_: ReplicaReports, address: bytes) -> ReportReader:
        raise TimeoutError("a test")

    monkeypatch.setattr(ReplicaReports, "_connect", refuse)
    with pytest.raises(ExecutorError, match="need TCP connections to every node's address"):
        completed(*[say_nothing] * cluster._UNREACHABLE)


def test_times_are_since_the_arrival_here_whatever_the_replicas_clock() -> None:
    output, num_asked = completed(finish)
    metrics = output.metrics
    assert num_asked == 1
    assert metrics.finished_at - metrics.arrived_at == pytest.approx(3.0)


def test_a_request_whose_time_ends_as_it_is_paused_ends() -> None:
    def accept(server: ReportServer, ingress: str, name: str) -> None:
        say(server, ingress, wire.Accepted(name))

    async def main() -> None:
        handle: Any = Handle(ReportServer("127.0.0.1", lambda _: None), accept)
        handle.ends_answers = False
        facts: Any = SimpleNamespace(max_unread_tokens=1000)
        engine = ClusterEngine(handle, facts)
        stream = await engine.submit([1, 2, 3])
        [live] = engine._live.values()
        assert live.task is not None
        engine.pause(stream)
        live.task.cancel()  # as asyncio.timeout does
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([live.task])
        await engine.close()

    asyncio.run(main())


def test_a_replica_whose_engines_thread_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats would go on."""

    def fail(_: WorkerEngine) -> None:
        raise KeyError("a test")

    ended: list[int] = []
    monkeypatch.setattr(WorkerEngine, "_run", fail)
    monkeypatch.setattr("os._exit", ended.append)
    replica.ReplicaEngine._run(object.__new__(replica.ReplicaEngine))
    assert ended == [STUCK_EXIT]
