"""Whom a request is addressed to and which page sent it: Host, Origin and CORS.

A page on the web can have its visitors' browsers talk to a server on their own machine: by posting
to it, or by giving its own name the address 127.0.0.1 (DNS rebinding). The first is seen by Origin,
the second by Host. An address in the place of a name cannot be rebound, so it is always welcome.
"""

import ipaddress
from urllib.parse import urlsplit

from quire.server.errors import ApiError
from quire.server.settings import ServerSettings

Headers = list[tuple[bytes, bytes]]
_PREFLIGHT_AGE_S = 600


def check_host(headers: Headers, settings: ServerSettings) -> None:
    given = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(given) != 1:
        raise ApiError(400, f"one Host header is needed, got {len(given)}", code="host")
    host = _host_name(given[0])
    known = (settings.host, "localhost", *settings.allowed_hosts)
    if host is None or not (_is_address(host) or host in known or "*" in settings.allowed_hosts):
        raise ApiError(
            403,
            f"this server does not go by the name {given[0]!r:.100}; name it with --allowed-host",
            code="host_not_allowed",
        )


def check_origin(headers: Headers, settings: ServerSettings) -> None:
    """Pages of other sites are refused; programs that are no browser send no Origin."""
    origin = _origin(headers)
    if origin is None or origin in settings.cors_origins:
        return
    host = next(value.decode("latin-1") for name, value in headers if name == b"host")
    scheme, _, rest = origin.partition("://")
    if scheme not in ("http", "https") or rest.lower() != host.lower():
        raise ApiError(
            403,
            f"pages of {origin!r:.100} may not use this server; name them with --cors-origin",
            code="origin_not_allowed",
        )


def is_preflight(method: str, headers: Headers, settings: ServerSettings) -> bool:
    """A browser asks whether a page that is named may send what it wants to send."""
    if method != "OPTIONS" or _origin(headers) not in settings.cors_origins:
        return False
    return any(name == b"access-control-request-method" for name, _ in headers)


def cors_headers(headers: Headers, settings: ServerSettings) -> Headers:
    """What lets a named page read the answer; nothing for all others."""
    origin = _origin(headers)
    if origin is None or origin not in settings.cors_origins:
        return []
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
        (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms"),
        (b"access-control-max-age", str(_PREFLIGHT_AGE_S).encode()),
        (b"vary", b"origin"),
    ]


def _origin(headers: Headers) -> str | None:
    for name, value in headers:
        if name == b"origin":
            return value.decode("latin-1")
    return None


def _host_name(value: str) -> str | None:
    """A Host header without its port, in lower case; None where it is malformed."""
    try:
        parts = urlsplit(f"//{value}")
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or "@" in value:
        return None
    return parts.hostname


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
