"""Hub: what API processes share, kept in the process that supervises them.

Each process has a Client here: what it holds of the limits, to be given back when it dies.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from quire.server.connections import Connections
from quire.server.errors import ApiError
from quire.server.keys import ApiKey
from quire.server.processes import messages as wire
from quire.server.processes.client import IdleCounts
from quire.server.quotas import Reservation
from quire.server.service import Service
from quire.server.shared import ProcessFigures

C = TypeVar("C")


@dataclass(eq=False)
class Client:
    """An API process, and what it holds."""

    index: int
    groups: Counter[str | None] = field(default_factory=Counter)  # of its connections
    proxied: Counter[str] = field(default_factory=Counter)
    keys: Counter[ApiKey] = field(default_factory=Counter)  # of its open requests
    reservations: dict[int, Reservation] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)
    figures: ProcessFigures = field(default_factory=ProcessFigures)  # the last it told
    num_closing: int = 0  # idle connections that it was asked to close

    @property
    def num_open(self) -> int:
        return self.groups.total()


def _decrement(counts: Counter[C], of: C) -> None:
    """Entries of nothing would be kept for every address that ever came."""
    counts[of] -= 1
    if not counts[of]:
        del counts[of]


class Hub:
    """On the supervisor's event loop. `close_idle` has a process close an idle connection."""

    def __init__(self, service: Service, counts: IdleCounts) -> None:
        settings = service.settings
        self._service = service
        self._counts = counts
        self._limits = Connections(settings.max_connections, settings.max_connections_per_address)
        self._numbers = itertools.count(1)
        self.clients: dict[int, Client] = {}
        self.ended = ProcessFigures()  # of processes that have ended

    def enter(self, client: Client) -> None:
        self.clients[client.index] = client
        self._counts[client.index] = 0

    def leave(self, client: Client) -> None:
        """Give back what a process held."""
        del self.clients[client.index]
        self._counts[client.index] = 0
        self.ended = self.ended.plus(client.figures.ended())
        for key, count in client.keys.items():
            for _ in range(count):
                self._service.limits.leave(key)
        for reservation in client.reservations.values():
            reservation.settle([])
        for name in client.claims:
            self._service.claims.leave(name)

    def totals(self) -> ProcessFigures:
        """As the processes told them last."""
        found = self.ended
        for client in self.clients.values():
            found = found.plus(client.figures)
        return found

    def call(self, client: Client, call: wire.Call) -> wire.Reply | Client | None:
        """The reply to a call that has one; a Client that is to close an idle connection for the
        one that was let in."""
        try:
            return self._call(client, call)
        except ApiError as error:
            return wire.Reply(error=wire.WireApiError.of(error))

    def _call(self, client: Client, call: wire.Call) -> wire.Reply | Client | None:
        service = self._service
        match call:
            case wire.OpenConnection(group):
                return self._open(client, group)
            case wire.CloseConnection(group):
                _decrement(client.groups, group)
                client.num_closing = max(0, client.num_closing - 1)
            case wire.OpenProxied(group):
                if self._num_of(group) >= self._limits.max_per_address:
                    return wire.Reply(limit="address")
                client.proxied[group] += 1
                return wire.Reply()
            case wire.CloseProxied(group):
                _decrement(client.proxied, group)
            case wire.EnterKey(key):
                service.limits.enter(key)
                client.keys[key] += 1
                return wire.Reply()
            case wire.LeaveKey(key):
                _decrement(client.keys, key)
                service.limits.leave(key)
            case wire.Admit(key, demand):
                reservation = service.quotas.reserve(key, demand)
                number = next(self._numbers)
                client.reservations[number] = reservation
                return wire.Reply(reservation=number, headers=list(reservation.headers))
            case wire.Settle(number, prompt, completion):
                client.reservations.pop(number).settle_tokens(prompt, completion)
            case wire.CountUsage(key, prompt, completion):
                service.quotas.count(key, prompt, completion)
            case wire.TakeClaim(name):
                is_taken = service.claims.take(name)
                if is_taken:
                    client.claims.add(name)
                return wire.Reply(is_taken=is_taken)
            case wire.LeaveClaim(name):
                client.claims.discard(name)
                service.claims.leave(name)
            case _:
                return self._keep(call)
        return None

    def _keep(self, call: wire.Call) -> wire.Reply | None:
        service = self._service
        match call:
            case wire.CountFailedKey(group):
                return wire.Reply(penalty_s=service.failed_keys.add(group))
            case wire.AskAnswers():
                return wire.Reply(value=wire.call_answers(service.responses, call))
            case wire.RecordEvent(event, about):
                service.record(event, **about)
            case wire.RecordRepeated(event, group, about, max_groups):
                if service.audit is not None:
                    service.audit.record_repeated(event, group, about, max_groups=max_groups)
        return None

    def _open(self, client: Client, group: str | None) -> wire.Reply | Client:
        if group is not None and self._num_of(group) >= self._limits.max_per_address:
            return wire.Reply(limit="address")
        closing: Client | None = None
        num_open = sum(each.num_open - each.num_closing for each in self.clients.values())
        if num_open >= self._limits.max_connections:
            closing = self._with_idle()
            if closing is None:
                return wire.Reply(limit="connections")
            closing.num_closing += 1
        client.groups[group] += 1
        return closing or wire.Reply()

    def _num_of(self, group: str) -> int:
        return sum(each.groups[group] + each.proxied[group] for each in self.clients.values())

    def _with_idle(self) -> Client | None:
        """The process with most idle connections, if any has one."""
        idle = {
            each.index: self._counts[each.index] - each.num_closing
            for each in self.clients.values()
        }
        index = max(idle, key=idle.__getitem__)
        return self.clients[index] if idle[index] > 0 else None
