"""What an API process has in place of state of its own: objects that ask the supervisor."""

import mmap
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.request import RequestOutput
from quire.server.answers.claims import Claims
from quire.server.answers.store import AnswerLimits, AnswerStore
from quire.server.audit import Fields
from quire.server.connections import Connection, Connections, FailedKeys, open_connections
from quire.server.keys import ApiKey, KeyRing
from quire.server.processes import messages as wire
from quire.server.quotas import Demand, QuotaReservation, Quotas, RequestLimits, tokens_of
from quire.server.settings import ServerSettings
from quire.server.shared import (
    ProcessFigures,
    ServerFigures,
    SharedState,
    answer_limits,
    open_answers,
)
from quire.worker.channel import FrameReader, frame

_COUNT_BYTES = 8


class Caller:
    """Asks the supervisor, from any thread. An answer takes a tenth of a millisecond: the
    supervisor does nothing else that takes long. The process ends with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self._lock = threading.Lock()

    def ask(self, call: wire.Call) -> wire.Reply:
        content = frame(wire.encode(call))
        with self._lock:
            try:
                self._socket.sendall(content)
                while True:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        os._exit(1)
                    if found := self._reader.feed(data):
                        return wire.read_reply(found[0])
            except OSError:
                os._exit(1)

    def tell(self, call: wire.Call) -> None:
        content = frame(wire.encode(call))
        with self._lock:
            try:
                self._socket.sendall(content)
            except OSError:
                os._exit(1)


class IdleCounts:
    """How many idle connections each process has: memory that all of them and the supervisor map;
    each process writes its own count."""

    def __init__(self, descriptor: int, num_processes: int) -> None:
        self._memory = mmap.mmap(descriptor, num_processes * _COUNT_BYTES)

    @staticmethod
    def create(num_processes: int) -> int:
        """A descriptor of memory for so many."""
        descriptor = os.memfd_create("quire-idle")
        os.ftruncate(descriptor, num_processes * _COUNT_BYTES)
        return descriptor

    def __getitem__(self, index: int) -> int:
        at = index * _COUNT_BYTES
        return int.from_bytes(self._memory[at : at + _COUNT_BYTES], "little")

    def __setitem__(self, index: int, count: int) -> None:
        at = index * _COUNT_BYTES
        self._memory[at : at + _COUNT_BYTES] = count.to_bytes(_COUNT_BYTES, "little")


class SharedConnections(Connections):
    """Counted by the supervisor; the process's own descriptors are a limit as well."""

    def __init__(
        self, settings: ServerSettings, caller: Caller, counts: IdleCounts, index: int
    ) -> None:
        own = open_connections(settings)
        super().__init__(own.max_connections, own.max_per_address, own.proxies)
        self._caller = caller
        self._counts = counts
        self._index = index

    def _count(self, group: str | None) -> str | None:
        if self.num_open >= self.max_connections and not self.close_one_idle():
            return "connections"
        return self._caller.ask(wire.OpenConnection(group)).limit

    def _uncount(self, group: str | None) -> None:
        self._caller.tell(wire.CloseConnection(group))

    def _count_request(self, group: str) -> bool:
        return self._caller.ask(wire.OpenProxied(group)).limit is None

    def _uncount_request(self, group: str) -> None:
        self._caller.tell(wire.CloseProxied(group))

    def enter(self, connection: Connection, address: str) -> str | None:
        group = super().enter(connection, address)
        self._publish()
        return group

    def leave(self, connection: Connection, group: str | None) -> None:
        super().leave(connection, group)
        self._publish()

    def set_busy(self, connection: Connection) -> None:
        super().set_busy(connection)
        self._publish()

    def set_idle(self, connection: Connection) -> None:
        super().set_idle(connection)
        self._publish()

    def set_lingering(self, connection: Connection) -> None:
        super().set_lingering(connection)
        self._publish()

    def _publish(self) -> None:
        self._counts[self._index] = self.num_idle


class SharedLimits(RequestLimits):
    """Those of keys that have none need nobody."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def enter(self, key: ApiKey) -> None:
        if _has_request_limits(key):
            _checked(self._caller.ask(wire.EnterKey(key)))

    def leave(self, key: ApiKey) -> None:
        if _has_request_limits(key):
            self._caller.tell(wire.LeaveKey(key))


def _has_request_limits(key: ApiKey) -> bool:
    return key.max_concurrent is not None or key.requests_per_minute is not None


def _checked(reply: wire.Reply) -> wire.Reply:
    if reply.error is not None:
        raise reply.error.error()
    return reply


@dataclass(slots=True)
class _Counted:
    """A call that needs no reservation: its usage is told when it ends."""

    caller: Caller
    key: ApiKey | None
    headers: tuple[tuple[str, str], ...] = ()

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        self.caller.tell(wire.CountUsage(self.key, *tokens_of(outputs)))


@dataclass(slots=True)
class _Reserved:
    caller: Caller
    number: int
    headers: tuple[tuple[str, str], ...]

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        self.caller.tell(wire.Settle(self.number, *tokens_of(outputs)))


class SharedQuotas(Quotas):
    def __init__(self, caller: Caller, limits: RequestLimits) -> None:
        super().__init__(limits)
        self._caller = caller

    def admit(self, key: ApiKey | None, demand: Demand) -> QuotaReservation:
        limits = () if key is None else _token_limits(key)
        if all(limit is None for limit in limits):
            return _Counted(self._caller, key)
        reply = _checked(self._caller.ask(wire.Admit(key, demand)))
        return _Reserved(self._caller, reply.reservation, tuple(reply.headers))

    def open(self, ring: KeyRing) -> None:
        """The supervisor has the file."""


def _token_limits(key: ApiKey) -> tuple[float | None, ...]:
    return key.tokens_per_minute, key.tokens_per_day, key.requests_per_minute


class SharedFailedKeys(FailedKeys):
    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller = caller

    def add(self, group: str) -> float:
        return self._caller.ask(wire.CountFailedKey(group)).penalty_s


class SharedClaims(Claims):
    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller = caller

    def take(self, name: str) -> bool:
        return self._caller.ask(wire.TakeClaim(name)).is_taken

    def leave(self, name: str) -> None:
        self._caller.tell(wire.LeaveClaim(name))


class AskedAnswers(AnswerStore):
    """Those that the supervisor has in memory, where there is no folder to share."""

    def __init__(self, limits: AnswerLimits, caller: Caller) -> None:
        super().__init__(None, limits)
        self._caller = caller

    @property
    def is_used(self) -> bool:
        return True  # perhaps by another process


def _asking(method: str) -> Callable[..., Any]:
    def ask(self: AskedAnswers, *arguments: object) -> Any:
        call = wire.AskAnswers(method, msgspec.Raw(wire.encode(arguments)))
        return wire.read_value(method, self._caller.ask(call).value)

    return ask


for _method in wire.ANSWER_METHODS:
    setattr(AskedAnswers, _method, _asking(_method))


class SharedAudit:
    """The way to the one audit log, whose lines are a chain."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def record(self, event: str, **about: object) -> None:
        self._caller.tell(wire.RecordEvent(event, about))

    def record_repeated(
        self, event: str, group: Fields, about: Fields, *, max_groups: int = 256
    ) -> None:
        self._caller.tell(wire.RecordRepeated(event, dict(group), dict(about), max_groups))

    def reopen(self) -> None:
        """The supervisor does, on SIGHUP."""

    def close(self, timeout_s: float = 5.0, **about: object) -> None:
        """The supervisor does, at its end."""


def _answers(settings: ServerSettings, caller: Caller) -> AnswerStore:
    if settings.state_folder is not None:
        return open_answers(settings)
    return AskedAnswers(answer_limits(settings), caller)


AskTotals = Callable[[ProcessFigures], Awaitable[ServerFigures]]


class AskingState(SharedState):
    """The state that the supervisor keeps."""

    def __init__(
        self,
        settings: ServerSettings,
        caller: Caller,
        counts: IdleCounts,
        index: int,
        ask_totals: AskTotals,
        reload_keys: Callable[[], Awaitable[None]],
    ) -> None:
        limits = SharedLimits(caller)
        super().__init__(
            connections=SharedConnections(settings, caller, counts, index),
            limits=limits,
            quotas=SharedQuotas(caller, limits),
            failed_keys=SharedFailedKeys(caller),
            responses=_answers(settings, caller),
            claims=SharedClaims(caller),
            audit=None if settings.audit_log is None else SharedAudit(caller),
            reload_keys=reload_keys,
        )
        self._ask_totals = ask_totals

    @contextmanager
    def kept(self, settings: ServerSettings, state: Callable[[], str]) -> Iterator[None]:  # noqa: ARG002
        yield  # the supervisor saves
        self.responses.close()

    async def figures(
        self,
        own: ProcessFigures,
        ring: KeyRing,  # noqa: ARG002
        num_worker_restarts: int,  # noqa: ARG002
    ) -> ServerFigures:
        return await self._ask_totals(own)
