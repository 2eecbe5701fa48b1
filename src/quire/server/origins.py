"""Host, Origin and CORS: which web pages may use the server.

A page on the web can make its visitors' browsers talk to a server on their own machine: by posting
to it, or by giving its own name the address 127.0.0.1 (DNS rebinding). The first is seen by Origin,
the second by Host. An address instead of a name cannot be rebound, so it is always allowed.

Pages of localhost may use a server that listens on loopback: whoever serves them already runs
programs on this machine. A rebound page has its own name in Origin, not localhost.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from quire.server.errors import ApiError
from quire.server.settings import ServerSettings, is_loopback

Headers = list[tuple[bytes, bytes]]

_PREFLIGHT_AGE_S = 600
_MAX_REQUESTED = 64  # header names of a preflight that are looked at
# What clients in browsers send: ours, OpenAI's (which Stainless makes) and Anthropic's.
_REQUEST_HEADER = re.compile(
    r"authorization|x-api-key|api-key|content-type|accept|user-agent|x-request-id|x-quire-trace"
    r"|x-quire-resume|last-event-id|idempotency-key"
    r"|traceparent|(?:x-stainless|openai|anthropic)-[a-z0-9-]{1,64}"
)
_USUAL_HEADERS = ("authorization", "content-type", "x-api-key", "x-request-id")


def check_host(headers: Headers, settings: ServerSettings) -> None:
    given = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(given) != 1:
        raise ApiError(400, f"one Host header is needed, got {len(given)}", code="host")
    host = _host_name(given[0])
    known = {name.lower() for name in (settings.host, "localhost", *settings.allowed_hosts)}
    if host is None or not (_is_address(host) or host in known or "*" in known):
        raise ApiError(
            403,
            f"this server does not go by the name {given[0]!r:.100}; name it with --allowed-host",
            code="host_not_allowed",
        )


def check_origin(headers: Headers, settings: ServerSettings) -> None:
    """Pages of other sites are refused; programs that are no browser send no Origin."""
    origin = _header(headers, b"origin")
    if origin is None or _may_use(origin, settings):
        return
    host = _header(headers, b"host") or ""
    scheme, _, rest = origin.partition("://")
    if scheme not in ("http", "https") or rest.lower() != host.lower():
        raise ApiError(
            403,
            f"pages of {origin!r:.100} may not use this server; name them with --cors-origin",
            code="origin_not_allowed",
        )


def _may_use(origin: str | None, settings: ServerSettings) -> bool:
    """Whether pages of another origin than the server's own may use it."""
    if origin is None:
        return False
    return origin in settings.cors_origins or (is_loopback(settings.host) and _is_local(origin))


def _is_local(origin: str) -> bool:
    scheme, _, rest = origin.partition("://")
    host = _host_name(rest)
    return scheme in ("http", "https") and host is not None and is_loopback(host)


def is_preflight(method: str, headers: Headers, settings: ServerSettings) -> bool:
    """Whether it is a CORS preflight of an allowed origin."""
    if method != "OPTIONS" or not _may_use(_header(headers, b"origin"), settings):
        return False
    return _header(headers, b"access-control-request-method") is not None


def cors_headers(headers: Headers, settings: ServerSettings) -> Headers:
    """CORS headers for an allowed origin; none for others."""
    origin = _header(headers, b"origin")
    if origin is None or not _may_use(origin, settings):
        return []
    found = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": ", ".join(_allowed_headers(headers)),
        "access-control-expose-headers": "x-request-id, retry-after, retry-after-ms, "
        "x-quire-ignored-fields, idempotent-replayed",
        "access-control-max-age": str(_PREFLIGHT_AGE_S),
        "vary": "origin, access-control-request-headers",
    }
    return [(name.encode(), value.encode("latin-1")) for name, value in found.items()]


def _allowed_headers(headers: Headers) -> list[str]:
    """The usual ones, and those that a preflight asks for and that clients are known to send."""
    asked = (_header(headers, b"access-control-request-headers") or "").lower()
    names = [name.strip() for name in asked.split(",", _MAX_REQUESTED)[:_MAX_REQUESTED]]
    return list(dict.fromkeys((*_USUAL_HEADERS, *filter(_REQUEST_HEADER.fullmatch, names))))


def _header(headers: Headers, wanted: bytes) -> str | None:
    for name, value in headers:
        if name == wanted:
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
