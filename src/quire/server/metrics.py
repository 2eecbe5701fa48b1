"""Figures of the running server: /metrics in Prometheus' text format, under the names that vLLM's
dashboards rely on; /v1/stats, to a key its own, to one with the scope those of all.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.core.request import WaitReason
from quire.engine.stats import Health, Histogram, Snapshot
from quire.engine.step_log import MAX_STEPS, StepRecord
from quire.llm import OnlineModel
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, may_read_totals
from quire.server.model_service import ModelService, State
from quire.server.openapi import MAX_STEP_ID
from quire.server.quotas import Usage
from quire.server.replies import (
    AuditFigures,
    HealthFigures,
    KeyFigures,
    KVBlocks,
    Lane,
    LatestSteps,
    LoadingFigures,
    ModelFigures,
    OwnStatsReply,
    QuotaFigures,
    StatsReply,
    StepFigures,
)
from quire.server.service import Service
from quire.server.shared import ServerFigures

# ---- /metrics


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")


def exposition(service: Service, snapshots: Mapping[str, Snapshot], figures: ServerFigures) -> str:
    """The figures of engines by their models' names, refused requests and connections, usage by
    key. What is the whole server's carries the first model's name."""
    writer = _Writer()
    for writer.model, snapshot in snapshots.items():
        _write_moment(writer, snapshot)
        _write_health(writer, snapshot)
        _write_counters(writer, snapshot)
        _write_histograms(writer, snapshot)
    for model in service.models:
        writer.model = model.name
        writer.gauge("model_loaded", "1 where it is loaded", float(model.loaded is not None))
    writer.model = service.name
    _write_server(writer, figures)
    return writer.text()


def _write_server(writer: "_Writer", figures: ServerFigures) -> None:
    writer.gauge("num_streams", "Answers being streamed", figures.num_streams)
    writer.counters(
        "requests_rejected_total", "Requests refused before the engine", "code", figures.rejected
    )
    _write_connections(writer, figures)
    restarts = figures.num_worker_restarts
    writer.counter("worker_restarts_total", "Workers that died and were replaced", restarts)
    restarts = figures.num_api_restarts
    writer.counter(
        "api_process_restarts_total", "API processes that died and were replaced", restarts
    )
    lost = figures.num_dropped_lines
    writer.counter("log_lines_dropped_total", "Log lines nobody took", lost)
    _write_keys(writer, figures.usage)
    dropped = 0 if figures.audit is None else figures.audit.num_dropped
    writer.counter("audit_events_dropped_total", "Events the audit log could not take", dropped)


def _write_moment(writer: "_Writer", snapshot: Snapshot) -> None:
    writer.gauge("num_requests_running", "Sequences in the batch", snapshot.num_running)
    writer.gauge("num_requests_waiting", "Sequences that wait", snapshot.num_waiting)
    by_reason = {reason.value: snapshot.waiting_by_reason.get(reason, 0) for reason in WaitReason}
    writer.gauges("num_requests_waiting_by_reason", "Why they wait", "reason", by_reason)
    writer.gauge("queued_tokens", "Tokens that the waiting ask for", snapshot.queued_tokens)
    writer.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", snapshot.kv_usage)
    writer.gauges("memory_bytes", "Memory the executor holds", "kind", snapshot.memory_bytes)
    writer.gauge(
        "device_utilization", "Share of the time that a step was in flight", snapshot.utilisation
    )


def _write_health(writer: "_Writer", snapshot: Snapshot) -> None:
    report, stats = snapshot.health_report, snapshot.stats
    states = {state.value: float(state is report.state) for state in Health}
    writer.gauges("engine_health", "1 for the state it is in", "state", states)
    degraded_s = 0.0 if report.since is None else snapshot.at - report.since
    writer.gauge("degraded_seconds", "For how long it has been degraded or stuck", degraded_s)
    writer.gauge("batch_limit", "Sequences a step may hold now", report.batch_limit)
    writer.gauge("step_token_limit", "Tokens a step may hold now", report.token_limit)
    writer.counter("steps_total", "Steps that ran, parts of failed ones too", stats.num_steps)
    failed = dict(stats.steps_failed)
    writer.counters("steps_failed_total", "Steps that failed", "cause", failed)
    retried = stats.num_steps_retried
    writer.counter("steps_retried_total", "Parts of failed steps, run again", retried)
    splits = stats.num_step_splits
    writer.counter("step_splits_total", "Failed steps and parts, split in two", splits)


def _write_connections(writer: "_Writer", figures: ServerFigures) -> None:
    writer.gauge("connections", "Connections that are open", figures.num_connections)
    writer.counters(
        "connections_refused_total", "Connections beyond a limit", "limit", figures.refused
    )
    writer.counters(
        "connections_cut_total", "Connections closed on their client", "reason", figures.cut
    )


def _write_counters(writer: "_Writer", snapshot: Snapshot) -> None:
    stats = snapshot.stats
    for name, text, value in (
        ("num_preemptions_total", "Sequences that gave their blocks up", stats.num_preemptions),
        ("prefix_cache_queries_total", "Prompt tokens looked up", stats.prefix_queries),
        ("prefix_cache_hits_total", "Prompt tokens found computed", stats.prefix_hits),
        ("prompt_tokens_total", "Prompt tokens computed", stats.prompt_tokens),
        ("generation_tokens_total", "Tokens generated", stats.completion_tokens),
        ("padding_tokens_total", "Tokens computed for nobody", stats.padding_tokens),
        ("discarded_rows_total", "Rows of sequences that had ended", stats.discarded_rows),
    ):
        writer.counter(name, text, value)
    ended = dict.fromkeys(_FINISH_REASONS, 0) | dict(stats.finish_reasons)
    writer.counters("request_success_total", "Requests ended", "finished_reason", ended)
    faults = dict(stats.faults_isolated)
    writer.counters("fault_isolated_total", "Faults kept from others", "reason", faults)


def _write_keys(writer: "_Writer", usage: Mapping[str, Usage]) -> None:
    """By the names of keys that used something; without keys there are none."""
    named = {name: used for name, used in usage.items() if name}
    prompts = {name: used.prompt_tokens for name, used in named.items()}
    completions = {name: used.completion_tokens for name, used in named.items()}
    writer.counters("key_prompt_tokens_total", "Prompt tokens of a key", "key", prompts)
    writer.counters("key_generation_tokens_total", "Tokens a key got", "key", completions)


def _write_histograms(writer: "_Writer", snapshot: Snapshot) -> None:
    stats = snapshot.stats
    requests = stats.requests
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From arrival to first token", requests.first_token),
        ("inter_token_latency_seconds", "Between a request's tokens", requests.token_gap),
        ("e2e_request_latency_seconds", "From arrival to end", requests.total),
        ("request_queue_time_seconds", "From arrival to first chunk", requests.queued),
        ("request_prefill_time_seconds", "From first chunk to first token", requests.prefill),
        ("request_decode_time_seconds", "From first token to end", requests.decode),
        ("request_prompt_tokens", "Prompt tokens of a request", requests.prompt_tokens),
        ("request_generation_tokens", "Tokens a request got", requests.completion_tokens),
        ("iteration_tokens_total", "Tokens a step", stats.step_tokens),
        ("batch_size", "Sequences a step", stats.batch_size),
        ("step_seconds", "A step on the executor", stats.step_seconds),
        ("launch_seconds", "The host's part of a step", stats.host_seconds),
    ):
        writer.histogram(name, text, histogram)


class _Writer:
    """Families of the text format; every sample carries a model's name."""

    def __init__(self) -> None:
        self.model = ""
        self._families: dict[str, list[str]] = {}  # lines, by family
        self._lines: list[str]  # of the family that is being written

    def gauge(self, name: str, text: str, value: float) -> None:
        self._family(name, text, "gauge", [("", value)])

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._family(name, text, "gauge", _labelled(label, values))

    def counter(self, name: str, text: str, value: float) -> None:
        self._family(name, text, "counter", [("", value)])

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._family(name, text, "counter", _labelled(label, values))

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        counts = list(histogram.counts)  # a copy: the engine's thread goes on counting
        self._head(name, text, "histogram")
        total = 0
        for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), counts, strict=True):
            total += count
            self._sample(f"{name}_bucket", f',le="{bound}"', total)
        self._sample(f"{name}_sum", "", histogram.sum)
        self._sample(f"{name}_count", "", total)

    def text(self) -> str:
        lines = [line for family in self._families.values() for line in family]
        return "\n".join([*lines, ""])

    def _family(
        self, name: str, text: str, kind: str, samples: Iterable[tuple[str, float]]
    ) -> None:
        self._head(name, text, kind)
        for labels, value in samples:
            self._sample(name, labels, value)

    def _head(self, name: str, text: str, kind: str) -> None:
        head = [f"# HELP quire:{name} {text}.", f"# TYPE quire:{name} {kind}"]
        self._lines = self._families.setdefault(name, head)

    def _sample(self, name: str, labels: str, value: float) -> None:
        model = _escaped(self.model)
        self._lines.append(f'quire:{name}{{model_name="{model}"{labels}}} {value}')


def _labelled(label: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(f',{label}="{_escaped(key)}"', value) for key, value in sorted(values.items())]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# ---- /v1/stats


class StatsAsked(NamedTuple):
    """What a call of /v1/stats wants: of which model, and so many of the latest steps, after the
    step `after`."""

    num_steps: int = 0
    after: int | None = None
    model: str | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "StatsAsked":
        known = ("steps", "after", "model")
        for name in query:
            if name not in known:
                takes = "/v1/stats takes steps, after and model"
                message = f"unknown query parameter {name!r:.100}; {takes}"
                raise ApiError(400, message, param=name[:100])
        after = _whole(query, "after", MAX_STEP_ID)
        return cls(_whole(query, "steps", MAX_STEPS) or 0, after, query.get("model"))


def _whole(query: Mapping[str, str], name: str, most: int) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) > most:
        raise ApiError(
            400, f"{name} must be a number from 0 to {most}, got {text!r:.100}", param=name
        )
    return int(text)


def stats_for(
    service: ModelService,
    llm: OnlineModel,
    snapshot: Snapshot,
    figures: ServerFigures,
    key: ApiKey | None,
    steps: Sequence[StepRecord] | None = None,
) -> OwnStatsReply | StatsReply:
    """A key's own figures, or all with the scope `stats` or without keys. `llm`: the model, which
    may be unloaded meanwhile."""
    uptime_s = time.time() - service.loaded_at
    own = OwnStatsReply(
        status=service.status,
        model=service.name,
        models=[_model_figures(model) for model in service.server.models],
        uptime_s=uptime_s,
        latest=_latest_steps(service, llm, steps, key, uptime_s - snapshot.at),
        key=None if key is None else key.name,
        own=_key_figures(snapshot, figures, key),
    )
    return _with_totals(own, service, llm, snapshot, figures) if may_read_totals(key) else own


def stats_of_unloaded(
    service: ModelService, figures: ServerFigures, key: ApiKey | None
) -> OwnStatsReply:
    """Of a model that has no engine now: what is known without one."""
    return OwnStatsReply(
        status=service.status,
        model=service.name,
        models=[_model_figures(model) for model in service.server.models],
        uptime_s=0.0,
        key=None if key is None else key.name,
        own=_key_figures(None, figures, key),
        latest=None,
    )


def _model_figures(model: ModelService) -> ModelFigures:
    need = model.need
    return ModelFigures(
        name=model.name,
        status=model.status,
        predicted_bytes=None if need is None else need.num_bytes,
        loading=loading_figures(model),
    )


def loading_figures(model: ModelService) -> LoadingFigures | None:
    """How far it is; None where it is not being loaded."""
    if model.state is not State.LOADING:
        return None
    phases = model.phases
    return LoadingFigures(phase=phases.phase or "starting", percent=int(100 * phases.done))


def _latest_steps(
    service: ModelService,
    llm: OnlineModel,
    steps: Sequence[StepRecord] | None,
    key: ApiKey | None,
    offset_s: float,
) -> LatestSteps | None:
    """`offset_s`: from the engine's clock to that of uptime_s."""
    if steps is None:
        return None
    sees_all = may_read_totals(key)
    floor = _floor(service, llm) if sees_all else None
    found = LatestSteps(lanes={}, steps=[])
    for step in steps:
        rows = [row for row in step.rows if sees_all or (key is not None and row.key == key.name)]
        if not rows:
            continue
        found.steps.append(
            StepFigures(
                id=step.id,
                at=step.at + offset_s,
                elapsed_s=step.elapsed_s,
                floor_s=None if floor is None else floor(step.context),
                chunks=[(r.sequence_id, r.start, r.num_tokens) for r in rows if not r.is_decode],
                decodes=[(r.sequence_id, r.start) for r in rows if r.is_decode],
            )
        )
        for row in rows:
            found.lanes[row.sequence_id] = Lane(
                request=row.request_id, key=row.key, prompt_tokens=row.num_prompt_tokens
            )
    return found


def _floor(service: ModelService, llm: OnlineModel) -> Callable[[int], float] | None:
    """From a step's context to the time that reading what it needs takes; None: not known."""
    read, bandwidth = llm.step_read, service.settings.memory_bandwidth
    if read is None or bandwidth is None:
        return None
    return lambda context: read.seconds(context, bandwidth)


def _with_totals(
    own: OwnStatsReply,
    service: ModelService,
    llm: OnlineModel,
    snapshot: Snapshot,
    figures: ServerFigures,
) -> StatsReply:
    stats = snapshot.stats
    return StatsReply(
        **dict(own),
        keys={
            key.name: _key_figures(snapshot, figures, key)
            for key in service.server.access.ring
            if key.name in figures.usage
        },
        health=_health_figures(snapshot),
        device=llm.device,
        device_reason=llm.device_reason,
        audit=None if figures.audit is None else AuditFigures(**figures.audit._asdict()),
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        waiting_by_reason={r.value: count for r, count in snapshot.waiting_by_reason.items()},
        queued_tokens=snapshot.queued_tokens,
        kv_cache_usage=snapshot.kv_usage,
        kv_blocks=KVBlocks(
            total=snapshot.num_blocks,
            used=snapshot.num_used_blocks,
            cached=snapshot.num_evictable_blocks,
        ),
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


def _health_figures(snapshot: Snapshot) -> HealthFigures:
    report, stats = snapshot.health_report, snapshot.stats
    return HealthFigures(
        status=report.state.value,
        cause=report.cause,
        since_s=None if report.since is None else snapshot.at - report.since,
        batch_limit=report.batch_limit,
        max_batch_size=report.max_batch_size,
        step_token_limit=report.token_limit,
        max_step_tokens=report.max_step_tokens,
        last_failed_step=report.last_failed_step,
        steps_failed=dict(stats.steps_failed),
        steps_retried=stats.num_steps_retried,
        step_splits=stats.num_step_splits,
    )


def _key_figures(
    snapshot: Snapshot | None, of_all: ServerFigures, key: ApiKey | None
) -> KeyFigures:
    name = "" if key is None else key.name
    usage = of_all.usage.get(name) or Usage()
    figures = KeyFigures(
        num_running=0 if snapshot is None else snapshot.running_by_key.get(name, 0),
        num_waiting=0 if snapshot is None else snapshot.waiting_by_key.get(name, 0),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        tokens_today=usage.today,
    )
    if key is not None and key.tokens_per_minute is not None:
        limit = key.tokens_per_minute
        figures.tokens_per_minute = _quota(limit, usage.owed, 60 * usage.owed / limit)
    if key is not None and key.tokens_per_day is not None:
        figures.tokens_per_day = _quota(key.tokens_per_day, usage.today, of_all.day_left_s)
    return figures


def _quota(limit: int, used: float, resets_in_s: float) -> QuotaFigures:
    return QuotaFigures(limit=limit, left=max(0, int(limit - used)), resets_in_s=resets_in_s)
