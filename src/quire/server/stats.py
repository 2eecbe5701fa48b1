"""What /v1/stats says: to a key its own figures, to one with the scope those of all."""

import time

from quire.engine.stats import Snapshot
from quire.server.access import may_read_totals
from quire.server.audit import AuditLog
from quire.server.keys import ApiKey
from quire.server.quotas import Quotas, Usage
from quire.server.replies import (
    AuditFigures,
    KeyFigures,
    OwnStatsReply,
    QuotaFigures,
    StatsReply,
)
from quire.server.service import Service


def stats_for(
    service: Service, snapshot: Snapshot, key: ApiKey | None
) -> OwnStatsReply | StatsReply:
    """Where no keys are set, everybody may know everything."""
    own = OwnStatsReply(
        status=service.state.value,
        model=service.name,
        uptime_s=time.time() - service.loaded_at,
        key=None if key is None else key.name,
        own=_figures(service.quotas, snapshot, key, service.quotas.usage_of(key)),
    )
    return _with_totals(own, service, snapshot) if may_read_totals(key) else own


def _with_totals(own: OwnStatsReply, service: Service, snapshot: Snapshot) -> StatsReply:
    stats = snapshot.stats
    return StatsReply(
        **dict(own),
        keys={
            key.name: _figures(service.quotas, snapshot, key, usage)
            for key, usage in _users(service)
        },
        audit=_audit_figures(service.audit),
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        waiting_by_reason={r.value: count for r, count in snapshot.waiting_by_reason.items()},
        queued_tokens=snapshot.queued_tokens,
        kv_cache_usage=snapshot.kv_usage,
        memory_bytes=dict(snapshot.memory_bytes),
        device_utilization=snapshot.utilisation,
        num_steps=stats.num_steps,
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        prefix_cache_queries=stats.prefix_queries,
        prefix_cache_hits=stats.prefix_hits,
        num_preemptions=stats.num_preemptions,
        mean_batch_size=stats.batch_size.mean,
        requests_ended=dict(stats.requests_ended),
        faults_isolated=dict(stats.faults_isolated),
    )


def _audit_figures(audit: AuditLog | None) -> AuditFigures | None:
    if audit is None:
        return None
    seq, last = audit.head
    return AuditFigures(seq=seq, hash=last, num_dropped=audit.num_dropped)


def _users(service: Service) -> list[tuple[ApiKey, Usage]]:
    """The keys in force that have used something."""
    used = service.quotas.by_key()
    keys = [key for key in service.access.ring if key.name in used]
    return [(key, service.quotas.usage_of(key)) for key in keys]


def _figures(quotas: Quotas, snapshot: Snapshot, key: ApiKey | None, usage: Usage) -> KeyFigures:
    name = "" if key is None else key.name
    figures = KeyFigures(
        num_running=snapshot.running_by_key.get(name, 0),
        num_waiting=snapshot.waiting_by_key.get(name, 0),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        tokens_today=usage.today,
    )
    if key is not None and key.tokens_per_minute is not None:
        limit = key.tokens_per_minute
        figures.tokens_per_minute = _quota(limit, usage.owed, 60 * usage.owed / limit)
    if key is not None and key.tokens_per_day is not None:
        figures.tokens_per_day = _quota(key.tokens_per_day, usage.today, quotas.day_left_s)
    return figures


def _quota(limit: int, used: float, resets_in_s: float) -> QuotaFigures:
    return QuotaFigures(limit=limit, left=max(0, int(limit - used)), resets_in_s=resets_in_s)
