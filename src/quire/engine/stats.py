"""Statistics of the engine: counters, histograms, the rate of completions, and snapshots."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quire.core.request import RequestMetrics, WaitReason

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SECONDS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
)  # fmt: skip
_LATENCIES = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5,
    2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_LENGTHS = (*_COUNTS, 16384, 32768, 65536, 131072)
_NUM_COMPLETIONS = 64  # that the mean interval is taken of
_FIRST_INTERVAL_S = 1.0  # before anything has completed


class Histogram:
    """Counts of values by upper bound, with their sum: what Prometheus calls a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.total = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += times
        self.sum += value * times

    @property
    def mean(self) -> float:
        return self.sum / self.total if self.total else 0.0


@dataclass(slots=True)
class EngineStats:
    """Counted since the engine was made; read it at any time."""

    batch_size: Histogram = field(default_factory=lambda: Histogram(_COUNTS))  # sequences a step
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_COUNTS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    host_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_steps: int = 0  # that ran, parts of failed ones included
    steps_failed: dict[str, int] = field(default_factory=dict)  # by the type of the root error
    num_step_splits: int = 0  # times that a failed step, or a part of one, was split in two
    num_steps_retried: int = 0  # parts of failed steps that were run again, whatever came of them
    prompt_tokens: int = 0  # computed for prompts, recomputation included
    completion_tokens: int = 0  # delivered
    padding_tokens: int = 0
    discarded_rows: int = 0  # planned ahead for sequences that had ended
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # ... and found computed
    # By error type. An isolated fault is a request that failed alone, or a step that failed though
    # each of its rows could be run.
    faults_isolated: dict[str, int] = field(default_factory=dict)
    requests_ended: dict[str, int] = field(default_factory=dict)  # by status
    finish_reasons: dict[str, int] = field(default_factory=dict)  # of requests: their first's
    requests: "RequestStats" = field(default_factory=lambda: RequestStats())
    busy_s: float = 0.0  # time with a step in flight
    since: float = 0.0

    def count_isolated(self, error: BaseException) -> None:
        """Count an isolated fault."""
        kind = type(error).__name__
        self.faults_isolated[kind] = self.faults_isolated.get(kind, 0) + 1


def _latencies() -> Histogram:
    return Histogram(_LATENCIES)


def _lengths() -> Histogram:
    return Histogram(_LENGTHS)


@dataclass(slots=True)
class RequestStats:
    """Times in seconds and lengths in tokens of requests: recorded when a request ends, token gaps
    as tokens come."""

    first_token: Histogram = field(default_factory=_latencies)
    token_gap: Histogram = field(default_factory=_latencies)
    total: Histogram = field(default_factory=_latencies)
    queued: Histogram = field(default_factory=_latencies)
    prefill: Histogram = field(default_factory=_latencies)  # from its start to its first token
    decode: Histogram = field(default_factory=_latencies)  # from its first token to its end
    prompt_tokens: Histogram = field(default_factory=_lengths)
    completion_tokens: Histogram = field(default_factory=_lengths)

    def record(self, metrics: RequestMetrics, num_prompt: int, num_completion: int) -> None:
        """A request has ended, for whatever reason; phases that it did not reach are left out."""
        self.prompt_tokens.add(num_prompt)
        self.completion_tokens.add(num_completion)
        for histogram, start, end in (
            (self.first_token, metrics.arrived_at, metrics.first_token_at),
            (self.total, metrics.arrived_at, metrics.finished_at),
            (self.queued, metrics.arrived_at, metrics.started_at),
            (self.prefill, metrics.started_at, metrics.first_token_at),
            (self.decode, metrics.first_token_at, metrics.finished_at),
        ):
            if start is not None and end is not None:
                histogram.add(end - start)


class CompletionRate:
    """The mean interval between the latest completions, for Retry-After.

    Only busy time counts: while nothing runs, nothing can complete.
    """

    def __init__(self) -> None:
        self._completions: deque[float] = deque(maxlen=_NUM_COMPLETIONS)
        self._since = 0.0
        self._last_interval_s = _FIRST_INTERVAL_S

    def busy_from(self, now: float) -> None:
        """Work arrived after a time without any."""
        if self._completions:
            self._last_interval_s = self.interval_s(self._completions[-1])
        self._completions.clear()
        self._since = now

    def completed(self, now: float) -> None:
        if len(self._completions) == _NUM_COMPLETIONS:
            self._since = self._completions[0]
        self._completions.append(now)

    def interval_s(self, now: float) -> float:
        """The mean time from one completion to the next."""
        if not self._completions:
            return max(self._last_interval_s, 0.0)
        return max(0.0, now - self._since) / len(self._completions)


class Health(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"  # batches failed lately; smaller ones run
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STUCK = "stuck"  # the executor does not answer, or the engine failed: restart the process


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The engine's state with its reason; `cause` and `since` only while it is degraded or stuck.

    The limits are what steps may hold now, lowered while batches fail or memory is short.
    """

    state: Health
    cause: str | None  # the error of the last step that failed, or what ended the engine
    since: float | None  # on the engine's clock
    last_failed_step: int | None
    batch_limit: int
    max_batch_size: int
    token_limit: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one time: what runs, what waits and why, how much memory is used."""

    at: float
    num_running: int
    num_waiting: int
    waiting_by_reason: Mapping[WaitReason, int]
    waiting_by_key: Mapping[str, int]
    running_by_key: Mapping[str, int]
    queued_tokens: int
    kv_usage: float
    num_blocks: int  # of the KV cache
    num_used_blocks: int  # that sequences hold
    num_evictable_blocks: int  # that none holds, and in which a prefix can still be found
    num_cached_blocks: int  # that a prefix can be found in, held or not
    memory_bytes: Mapping[str, int]
    utilisation: float  # share of the time since the start that a step was in flight
    health: str
    health_report: HealthReport
    stats: EngineStats
