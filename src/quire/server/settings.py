"""ServerSettings: where the server listens, whom it lets in, and its limits."""

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.keys import KeyRing

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_COUNTS = (
    *("max_body_bytes", "max_buffered_bytes", "max_header_bytes"),
    *("max_connections", "max_connections_per_address", "max_stored_bytes"),
    *("max_file_bytes", "max_job_bytes", "max_jobs", "max_job_lines"),
    *("max_idempotency_keys", "max_idempotency_bytes"),
)
_ALLOWED_HOST = re.compile(r"\*|[\w.-]+")
_TIMES = (
    *("header_timeout_s", "body_timeout_s", "unread_timeout_s", "linger_timeout_s"),
    *("keep_alive_s", "ping_interval_s", "max_stored_days"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of the server; refused where it would be open to everybody by mistake."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None  # speak TLS with this certificate ...
    tls_key: Path | None = None  # ... and this key, or the one in the certificate's file
    tls_key_password: str | None = field(default=None, repr=False)
    model_names: tuple[str, ...] = ("quire",)  # the first is the one that answers carry
    keys: KeyRing = field(default_factory=KeyRing)
    no_auth: bool = False  # listen beyond loopback although there are no keys
    parse_control_tokens: bool = False  # in chat messages, where no key says whether
    allowed_hosts: tuple[str, ...] = ()  # in Host, beside addresses and localhost
    cors_origins: tuple[str, ...] = ()  # web pages that may use it, as scheme://host[:port]
    ignore_unknown_fields: bool = False  # of bodies, instead of refusing them
    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 256 << 20  # of all bodies together, while they come
    max_header_bytes: int = 64 << 10
    max_connections: int = 4096
    max_stored_responses: int = 1000  # of /v1/responses; 0: none is stored
    max_stored_bytes: int = 64 << 20  # of them together
    max_stored_days: float = 30.0
    max_idempotency_keys: int = 10_000  # whose answers are kept for a day
    max_idempotency_bytes: int = 64 << 20  # of these answers together
    max_connections_per_address: int | None = None  # an eighth of all; no limit on loopback
    trusted_proxies: tuple[Network, ...] = ()  # whose forwarding headers are believed
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    unread_timeout_s: float = 60.0  # for a client that does not read its answer
    linger_timeout_s: float = 5.0  # for the rest of a body that was answered early
    keep_alive_s: float = 65.0  # longer than the usual 60 s of proxies
    drain_timeout_s: float = 30.0
    ping_interval_s: float = 15.0  # of comments in silent streams
    otlp_endpoint: str | None = None  # where traces go
    audit_log: Path | None = None  # the file of security events
    audit_key: Path | None = None  # a file with the key of the hashes in it
    audit_requests: bool = False  # one line a request as well
    state_folder: Path | None = None  # keeps quotas by the day and jobs across restarts
    max_file_bytes: int = 200 << 20  # of an uploaded file
    max_job_bytes: int = 1 << 30  # of a key's files together
    max_jobs: int = 16  # a key's batches that have not ended
    max_job_lines: int = 200_000  # of these together
    page: bool = True  # at /
    memory_bandwidth: float | None = None  # bytes a second, for the floor of steps

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("the model needs a name to be served under")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_stored_responses < 0:
            raise ConfigError(
                f"max_stored_responses must be 0 or more, got {self.max_stored_responses}"
            )
        for name in _TIMES:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout_s must be 0 or more, got {self.drain_timeout_s}")
        bandwidth = self.memory_bandwidth
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise ConfigError(
                f"memory_bandwidth must be a number above 0, got {bandwidth / 1e9:g} GB/s"
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("a TLS key needs its certificate: give --tls-cert too")
        for host in self.allowed_hosts:
            _check_allowed_host(host)
        for origin in self.cors_origins:
            _check_origin(origin)
        if self.otlp_endpoint is not None:
            _check_collector(self.otlp_endpoint)
        if self.keys and self.parse_control_tokens:
            raise ConfigError(
                "with API keys, parse_control_tokens is said of each: write parse_control_tokens = "
                "true into the table of a key that may write control tokens into its messages"
            )
        if not self.keys and not self.no_auth and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines and there are no API keys: give "
                "--api-keys FILE or set QUIRE_API_KEY, or say --no-auth to let everybody in"
            )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_allowed_host(host: str) -> None:
    if not _ALLOWED_HOST.fullmatch(host):
        raise ConfigError(
            f"allowed host {host!r:.100}: expected a name such as llm.example.com, without a port, "
            "or * for every name; several are given by --allowed-host several times"
        )


def _check_collector(url: str) -> None:
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or rest.strip("/") == "":
        raise ConfigError(f"OTLP endpoint {url!r}: expected a URL such as http://HOST:4318")


def _check_origin(origin: str) -> None:
    scheme, separator, rest = origin.partition("://")
    if scheme not in ("http", "https") or not separator or not rest or "/" in rest or "*" in rest:
        raise ConfigError(f"CORS origin {origin!r}: expected https://HOST or https://HOST:PORT")
