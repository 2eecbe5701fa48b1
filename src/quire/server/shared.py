"""SharedState: what all requests of a server share besides its model: limits, quotas, connections,
audit log, stored responses; and the figures of all that.

A server with several API processes has one of these, in the process that started them; there they
have a SharedState that asks it (`server/processes`).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.core.version import own_version
from quire.server.answers.claims import Claims
from quire.server.answers.store import AnswerLimits, AnswerStore
from quire.server.audit import AuditHead, AuditLog, AuditSink, open_audit_log, settings_digest
from quire.server.connections import Connections, FailedKeys, open_connections
from quire.server.keys import KeyRing
from quire.server.quotas import Quotas, QuotaSaver, RequestLimits, Usage
from quire.server.settings import ServerSettings
from quire.server.usage_file import UsageFile


@dataclass(kw_only=True)
class ProcessFigures:
    """What one process counts of its own."""

    rejected: dict[str, int] = field(default_factory=dict)  # requests, by status
    num_streams: int = 0
    num_connections: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # connections, by limit
    cut: dict[str, int] = field(default_factory=dict)  # connections, by reason
    num_dropped_lines: int = 0

    def plus(self, other: "ProcessFigures") -> "ProcessFigures":
        return ProcessFigures(
            rejected=_sum(self.rejected, other.rejected),
            num_streams=self.num_streams + other.num_streams,
            num_connections=self.num_connections + other.num_connections,
            refused=_sum(self.refused, other.refused),
            cut=_sum(self.cut, other.cut),
            num_dropped_lines=self.num_dropped_lines + other.num_dropped_lines,
        )

    def ended(self) -> "ProcessFigures":
        """What stays of it when its process has ended: counters, not gauges."""
        return ProcessFigures(
            rejected=self.rejected,
            refused=self.refused,
            cut=self.cut,
            num_dropped_lines=self.num_dropped_lines,
        )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))


@dataclass(kw_only=True)
class ServerFigures(ProcessFigures):
    """Those of all processes of a server, and what they share."""

    usage: dict[str, Usage]  # by key, of those that used something
    day_left_s: float
    audit: AuditHead | None
    num_worker_restarts: int = 0
    num_api_restarts: int = 0


@dataclass
class SharedState:
    connections: Connections
    limits: RequestLimits
    quotas: Quotas
    failed_keys: FailedKeys
    responses: AnswerStore
    claims: Claims
    audit: AuditSink | None
    # Where another process keeps them: has the keys read again there, or raises a ConfigError.
    reload_keys: Callable[[], Awaitable[None]] | None = None
    # What processes of the same server call it, in locks of the state folder; "" for the default.
    server_name: str = ""

    @classmethod
    def of(cls, settings: ServerSettings) -> "SharedState":
        """That of one process, or of the one that keeps it for others; raises a ConfigError."""
        limits = RequestLimits()
        folder = settings.state_folder
        quotas = Quotas(limits, None if folder is None else UsageFile(folder))
        quotas.open(settings.keys)
        return cls(
            connections=open_connections(settings),
            limits=limits,
            quotas=quotas,
            failed_keys=FailedKeys(),
            responses=open_answers(settings),
            claims=Claims(),
            audit=open_audit_log(settings),
        )

    @contextmanager
    def kept(self, settings: ServerSettings, state: Callable[[], str]) -> Iterator[None]:
        """While the server runs: usage is saved, and the audit log has a first and a last line.
        Leaving waits for the disk."""
        saver = QuotaSaver(self.quotas)
        if self.audit is not None:
            self.audit.record("start", version=own_version(), settings=settings_digest(settings))
        yield
        saver.close()
        self.responses.close()
        if self.audit is not None:
            self.audit.close(state=state())

    async def own_folder(self) -> None:
        """Returns when no earlier process of this server uses the state folder any more."""

    async def figures(
        self, own: ProcessFigures, ring: KeyRing, num_worker_restarts: int
    ) -> ServerFigures:
        """Of the whole server; `own` are those of the process that asks."""
        return self.figures_of(own, ring, num_worker_restarts)

    def figures_of(
        self, processes: ProcessFigures, ring: KeyRing, num_worker_restarts: int = 0
    ) -> ServerFigures:
        usage = dict(self.quotas.by_key())
        for key in ring:
            if key.name in usage:
                usage[key.name] = self.quotas.usage_of(key)  # as of now
        audit = None
        if isinstance(self.audit, AuditLog):
            seq, last = self.audit.head
            audit = AuditHead(seq, last, self.audit.num_dropped)
        return ServerFigures(
            **vars(processes),
            usage=usage,
            day_left_s=self.quotas.day_left_s,
            audit=audit,
            num_worker_restarts=num_worker_restarts,
        )


def answer_limits(settings: ServerSettings) -> AnswerLimits:
    return AnswerLimits(
        max_responses=settings.max_stored_responses,
        max_response_bytes=settings.max_stored_bytes,
        max_response_age_s=settings.max_stored_days * 86400.0,
        max_keyed=settings.max_idempotency_keys,
        max_keyed_bytes=settings.max_idempotency_bytes,
    )


def open_answers(settings: ServerSettings) -> AnswerStore:
    """The store in the state folder, or in memory without one; its file is opened when needed."""
    return AnswerStore(settings.state_folder, answer_limits(settings))
