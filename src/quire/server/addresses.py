"""Addresses: whose request it is behind proxies, and how often its keys were wrong.

X-Forwarded-For and Forwarded are lists to which each proxy adds whom it heard from. What a proxy
that is not trusted wrote may be made up: the client is the right-most address that is not trusted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address, ip_address, ip_network

from quire.core.errors import ConfigError
from quire.server.settings import Network

_IPV6_PREFIX = 64  # what one subscriber commonly has to itself
_MAX_HOPS = 32  # of a list that are looked at, from the right

_FREE_FAILURES = 10  # wrong keys that are only that ...
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
    """Whose limits an address falls under: its own, for IPv6 its /64; nobody's on loopback."""
    try:
        found = ip_address(address)
    except ValueError:
        return None  # no address: a socket of the file system
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    if found.is_loopback:
        return None
    if isinstance(found, IPv6Address):
        return str(ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(found)


class Proxies:
    """Those who may speak for others."""

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
        """The address that a request comes from, as far as it can be trusted."""
        if peer not in self:
            return peer
        client = peer
        for hop in _hops(headers):
            address = _address_of(hop)
            if address is None:
                break  # "unknown", or made up: its proxy is the last that is known
            client = address
            if client not in self:
                break
        return client


def _hops(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Whom each proxy heard from, the last one's first."""
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
    """How often each address sent a wrong key: the first ten are free, and from there on each
    doubles the time until the next is welcome. Those that failed longest ago are forgotten."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many, when

    def add(self, group: str) -> float:
        """Book a wrong key; how long its sender should wait, in seconds."""
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
