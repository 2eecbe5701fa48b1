"""Connections: how many there are, how many each address holds, which gives way to a new one."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Protocol

from quire.server.addresses import Proxies, address_group
from quire.server.errors import ApiError
from quire.server.logs import log
from quire.server.settings import ServerSettings

_SHARE = 8  # of all connections, one address may hold the eighth part ...
_LEAST = 8  # ... and these in any case
_RETRY_S = 1.0
_MAX_REFUSED = 16  # connections beyond the limits that may stay until they have read so
_SPARE_DESCRIPTORS = 32  # for the model's files, and for connections that are being refused


class Connection(Protocol):
    def give_way(self) -> None:
        """Close at once."""


class Connections:
    """The open connections of a server. Those between requests, or whose request still comes, may
    be closed for a newcomer; those that compute an answer may not."""

    def __init__(
        self,
        max_connections: int,
        max_per_address: int | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address or max(_LEAST, max_connections // _SHARE)
        self.num_open = 0
        self.refused: Counter[str] = Counter()  # by which limit
        self.cut: Counter[str] = Counter()  # connections closed by a deadline or bound, by which
        self._proxies = proxies or Proxies()
        self._by_group: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # longest idle first
        self._lingering: dict[Connection, None] = {}  # answered, and waiting to be closed
        self._refused: dict[Connection, None] = {}  # not counted: they read their refusal

    def enter(self, connection: Connection, address: str) -> str | None:
        """Count a connection in as idle, with the group that it must leave with; an ApiError for
        one too many, which may stay to read it until more of its kind come."""
        group = None if address in self._proxies else address_group(address)
        if group is not None and self._by_group[group] >= self.max_per_address:
            raise self._refusal(connection, "address", 429, f"{group} has too many connections")
        if self.num_open >= self.max_connections and not self._make_room():
            message = "the server has too many connections"
            raise self._refusal(connection, "connections", 503, message)
        self.num_open += 1
        self._idle[connection] = None
        if group is not None:
            self._by_group[group] += 1
        return group

    def leave(self, connection: Connection, group: str | None) -> None:
        if connection in self._refused:
            del self._refused[connection]
            return
        self.num_open -= 1
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        if group is not None:
            self._drop(group)

    @contextmanager
    def held_for(self, group: str | None) -> Iterator[None]:
        """Count a request that a proxy makes for an address as that address's connection."""
        if group is None:
            yield
            return
        if self._by_group[group] >= self.max_per_address:
            self.refused["address"] += 1
            raise ApiError(
                429,
                f"{group} has too many requests open",
                code="too_many_connections",
                retry_after_s=_RETRY_S,
            )
        self._by_group[group] += 1
        try:
            yield
        finally:
            self._drop(group)

    def set_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """It is the last to give way from here on."""
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        self._idle[connection] = None

    def set_lingering(self, connection: Connection) -> None:
        if connection not in self._refused:
            self._idle.pop(connection, None)
            self._lingering[connection] = None

    def _drop(self, group: str) -> None:
        self._by_group[group] -= 1
        if not self._by_group[group]:
            del self._by_group[group]

    def _refusal(self, connection: Connection, limit: str, status: int, message: str) -> ApiError:
        self.refused[limit] += 1
        if len(self._refused) >= _MAX_REFUSED:
            next(iter(self._refused)).give_way()
        self._refused[connection] = None
        return ApiError(status, message, code="too_many_connections", retry_after_s=_RETRY_S)

    def _make_room(self) -> bool:
        for line in (self._lingering, self._idle):
            for connection in line:
                self.cut["made room"] += 1
                del line[connection]
                connection.give_way()
                return True
        return False


def open_connections(settings: ServerSettings) -> Connections:
    """As many as the settings allow, as far as there are descriptors for them."""
    room = settings.max_connections
    descriptors = _num_descriptors()
    if descriptors is not None and descriptors - _SPARE_DESCRIPTORS < room:
        room = max(1, descriptors - _SPARE_DESCRIPTORS)
        log("few_descriptors", logging.WARNING, available=descriptors, max_connections=room)
    proxies = Proxies(settings.trusted_proxies)
    return Connections(room, settings.max_connections_per_address, proxies)


def _num_descriptors() -> int | None:
    """That can still be opened, where the system tells: as many as it lets the process have."""
    with suppress(ImportError, OSError, ValueError):
        resource = import_module("resource")  # not on Windows
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard != resource.RLIM_INFINITY:
            return int(hard) - len(os.listdir("/proc/self/fd"))
    return None
