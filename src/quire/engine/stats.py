"""What the engine knows of itself: counters, histograms, and a snapshot of the moment."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.core.request import WaitReason

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SECONDS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
)  # fmt: skip


class Histogram:
    """Counts of values by upper bound, with their sum: what Prometheus calls a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.total = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += 1
        self.sum += value

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
    num_steps: int = 0
    prompt_tokens: int = 0  # computed for prompts, recomputation included
    completion_tokens: int = 0  # delivered
    padding_tokens: int = 0
    discarded_rows: int = 0  # planned ahead for sequences that had ended
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # ... and found computed
    faults_isolated: dict[str, int] = field(default_factory=dict)  # by error type
    requests_ended: dict[str, int] = field(default_factory=dict)  # by status
    busy_s: float = 0.0  # time with a step in flight
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The moment: what runs, what waits and why, what is held."""

    at: float
    num_running: int
    num_waiting: int
    waiting_by_reason: Mapping[WaitReason, int]
    waiting_by_key: Mapping[str, int]
    queued_tokens: int
    kv_usage: float
    num_known_blocks: int
    memory_bytes: Mapping[str, int]
    utilisation: float  # share of the time since the start that a step was in flight
    health: str
    stats: EngineStats
