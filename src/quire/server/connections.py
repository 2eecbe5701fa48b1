"""Connections and client addresses: how many connections there are, how many each address has, and
which is closed for a new one; whose request it is behind proxies; how often its keys were wrong.

X-Forwarded-For and Forwarded are lists to which each proxy adds whom it heard from. What a proxy
that is not trusted wrote may be made up: the client is the right-most address that is not trusted.
"""

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

from quire.core.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.logs import log
from quire.server.settings import Network, ServerSettings

# ---- addresses


_IPV6_PREFIX = 64  # commonly one subscriber's
_MAX_HOPS = 32  # that are read of a list, from the right

_FREE_FAILURES = 10  # wrong keys without a penalty ...
_FORGOTTEN_S = 6.0  # ... and of which one is forgotten each 6 s
_MAX_PENALTY_S = 60.0
_MAX_ADDRESSES = 4096


def read_networks(listed: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks such as 10.0.0.0/8."""
    found = []
    for name in listed:
        try:
            found.append(ip_network(name.strip()))
        except ValueError as error:
            raise ConfigError(f"trusted proxy {name!r}: {error}") from None
    return tuple(found)


def address_group(address: str) -> str | None:
    """The group that an address is counted in: itself, or its /64 for IPv6; None on loopback."""
    try:
        found = ip_address(address)
    except ValueError:
        return None  # a Unix socket
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    if found.is_loopback:
        return None
    if isinstance(found, IPv6Address):
        return str(ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(found)


class Proxies:
    """Trusted proxies: their forwarding headers are believed."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        try:
            found = ip_address(address)
        except ValueError:
            return False
        if isinstance(found, IPv6Address):
            found = found.ipv4_mapped or found
        return any(found in network for network in self._networks)

    def client_of(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The client's address: the right-most that is not a trusted proxy's."""
        if peer not in self:
            return peer
        client = peer
        for hop in _hops(headers):
            address = _address_of(hop)
            if address is None:
                break  # "unknown", or malformed
            client = address
            if client not in self:
                break
        return client


def _hops(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The hops of the forwarding headers, the nearest first."""
    plain = [value for name, value in headers if name == b"x-forwarded-for"]
    if plain:
        text = b",".join(plain).decode("latin-1")
        return [hop.strip() for hop in reversed(text.rsplit(",", _MAX_HOPS)[-_MAX_HOPS:])]
    listed = b",".join(value for name, value in headers if name == b"forwarded").decode("latin-1")
    hops = []
    for hop in reversed(listed.rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]):
        pairs = [pair.strip().partition("=") for pair in hop.split(";")]
        hops += [value.strip('"') for name, _, value in pairs if name.lower() == "for"]
    return hops


def _address_of(hop: str) -> str | None:
    """The address of 10.0.0.1, 10.0.0.1:80, ::1 or [::1]:80."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return None


class FailedKeys:
    """Wrong keys by address: the first ten have no penalty, from there on each doubles it. The
    addresses that failed longest ago are evicted."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # count, last at

    def add(self, group: str) -> float:
        """Count a wrong key; the penalty in seconds."""
        now = self._now()
        count, last = self._failures.pop(group, (0.0, now))
        count = max(0.0, count - (now - last) / _FORGOTTEN_S) + 1
        excess = count - _FREE_FAILURES
        penalty = 0.0 if excess <= 0 else min(_MAX_PENALTY_S, 2.0 ** (excess - 1))
        self._failures[group] = (min(count, _FREE_FAILURES + 8.0), now)
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)
        return penalty

    def __len__(self) -> int:
        return len(self._failures)


# ---- connections


_ADDRESS_SHARE = 8  # an address may have an eighth of all connections ...
_MIN_PER_ADDRESS = 8  # ... and these in any case
_RETRY_S = 1.0
_MAX_REFUSED = 16  # connections beyond the limits that stay open to read their refusal
_RESERVED_DESCRIPTORS = 32  # for the model's files, and for connections that are being refused


class Connection(Protocol):
    def close_now(self) -> None:
        """Close at once."""


class Connections:
    """The open connections of a server. An idle one (between requests, or still receiving) may be
    closed for a new one; one with a running request may not."""

    def __init__(
        self,
        max_connections: int,
        max_per_address: int | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address or max(
            _MIN_PER_ADDRESS, max_connections // _ADDRESS_SHARE
        )
        self.num_open = 0
        self.refused: Counter[str] = Counter()  # by which limit
        self.cut: Counter[str] = Counter()  # connections that were closed, by deadline or limit
        self.proxies = proxies or Proxies()
        self._by_group: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # longest idle first
        self._lingering: dict[Connection, None] = {}  # answered, and waiting to be closed
        self._refused: dict[Connection, None] = {}  # not counted in num_open

    @property
    def num_idle(self) -> int:
        """Connections that may be closed for new ones."""
        return len(self._idle) + len(self._lingering)

    def enter(self, connection: Connection, address: str) -> str | None:
        """Count a connection as idle; its group, for `leave`. An ApiError where there are too many:
        the connection may stay open to read that, until `_MAX_REFUSED` others do."""
        group = None if address in self.proxies else address_group(address)
        limit = self._count(group)
        if limit == "address":
            raise self._refusal(connection, limit, 429, f"{group} has too many connections")
        if limit is not None:
            message = "the server has too many connections"
            raise self._refusal(connection, limit, 503, message)
        self.num_open += 1
        self._idle[connection] = None
        return group

    def _count(self, group: str | None) -> str | None:
        """Count a connection of a group; the limit that it would exceed, if any."""
        if group is not None and self._by_group[group] >= self.max_per_address:
            return "address"
        if self.num_open >= self.max_connections and not self.close_one_idle():
            return "connections"
        if group is not None:
            self._by_group[group] += 1
        return None

    def _uncount(self, group: str | None) -> None:
        if group is not None:
            self._by_group[group] -= 1
            if not self._by_group[group]:
                del self._by_group[group]

    def _count_request(self, group: str) -> bool:
        """Count a request as its group's connection; whether there was room for it."""
        if self._by_group[group] >= self.max_per_address:
            return False
        self._by_group[group] += 1
        return True

    def _uncount_request(self, group: str) -> None:
        self._uncount(group)

    def leave(self, connection: Connection, group: str | None) -> None:
        if connection in self._refused:
            del self._refused[connection]
            return
        self.num_open -= 1
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        self._uncount(group)

    @contextmanager
    def proxied_request(self, group: str | None) -> Iterator[None]:
        """Count a request that a proxy makes for an address as that address's connection."""
        if group is None:
            yield
            return
        if not self._count_request(group):
            self.refused["address"] += 1
            raise ApiError(
                429,
                f"{group} has too many requests open",
                code="too_many_connections",
                retry_after_s=_RETRY_S,
            )
        try:
            yield
        finally:
            self._uncount_request(group)

    def set_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """It becomes the last that is closed for a new one."""
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        self._idle[connection] = None

    def set_lingering(self, connection: Connection) -> None:
        if connection not in self._refused:
            self._idle.pop(connection, None)
            self._lingering[connection] = None

    def _refusal(self, connection: Connection, limit: str, status: int, message: str) -> ApiError:
        self.refused[limit] += 1
        if len(self._refused) >= _MAX_REFUSED:
            next(iter(self._refused)).close_now()
        self._refused[connection] = None
        return ApiError(status, message, code="too_many_connections", retry_after_s=_RETRY_S)

    def close_one_idle(self) -> bool:
        """Close the connection that matters least, for a new one; whether there was one."""
        for group in (self._lingering, self._idle):
            for connection in group:
                self.cut["made room"] += 1
                del group[connection]
                connection.close_now()
                return True
        return False


def open_connections(settings: ServerSettings) -> Connections:
    """With the limit of the settings, or of the file descriptors if that is lower."""
    room = settings.max_connections
    descriptors = _num_descriptors()
    if descriptors is not None and descriptors - _RESERVED_DESCRIPTORS < room:
        room = max(1, descriptors - _RESERVED_DESCRIPTORS)
        log("few_descriptors", logging.WARNING, available=descriptors, max_connections=room)
    proxies = Proxies(settings.trusted_proxies)
    return Connections(room, settings.max_connections_per_address, proxies)


def _num_descriptors() -> int | None:
    """How many can still be opened, after raising the soft limit; None where there is no limit."""
    with suppress(ImportError, OSError, ValueError):
        resource = import_module("resource")  # not on Windows
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard != resource.RLIM_INFINITY:
            return int(hard) - len(os.listdir("/proc/self/fd"))
    return None
