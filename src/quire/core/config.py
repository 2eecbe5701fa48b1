"""EngineConfig: every setting of the engine, resolved once and frozen; and choices that options on
every layer share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.errors import ConfigError
from quire.core.plan import Capacity

# How I2_S tensors are packed, by the builds of bitnet.cpp that read and write them.
I2S_PACKINGS = ("x86", "arm")
_ANY_LENGTH = 1 << 30  # of a context


def check_i2s_packing(value: str | None) -> None:
    if value not in (None, *I2S_PACKINGS):
        raise ConfigError(f"i2s_packing must be one of {', '.join(I2S_PACKINGS)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine batches.

    What can be switched off: `fairness`, `prefix_reuse` and `chunking` by False, the batching delay
    by `batch_timeout_ms=0`, pacing by leaving both targets None.
    """

    max_batch_size: int = 64  # sequences a step
    max_step_tokens: int = 512  # tokens a step, prompts and completions together
    max_queue_requests: int = 1024
    max_queue_tokens: int = 4_000_000  # prompt and requested completion tokens waiting
    batch_timeout_ms: float = 0.0  # longest batching delay after the oldest arrival
    chunking: bool = True  # a prompt may be spread over several steps
    prefix_reuse: bool = True
    fairness: bool = True  # between keys; off: one queue by priority and arrival
    key_weights: Mapping[str, float] = field(default_factory=dict)  # 1.0 unless named
    aging_s: float = 10.0  # waiting this long is worth one level of priority
    slo_itl_ms: float | None = None  # target for the time between a request's tokens
    slo_ttft_ms: float | None = None  # target for the time to its first token
    plan_ahead: bool = True  # plan step n + 1 while step n runs
    step_timeout_s: float | None = 120.0  # a step that takes longer is cancelled ...
    step_grace_s: float = 10.0  # ... and given up if it does not end
    max_unread_tokens: int = 4096  # a stream nobody reads pauses its request here
    timeout_s: float | None = None  # deadline of requests that bring none

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_step_tokens", "max_queue_requests", "max_queue_tokens"):
            _at_least_one(name, getattr(self, name))
        _at_least_one("max_unread_tokens", self.max_unread_tokens)
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_batch_size "
                f"({self.max_batch_size}): each running sequence takes one token a step"
            )
        _positive_or_zero("batch_timeout_ms", self.batch_timeout_ms)
        for name in ("aging_s", "step_grace_s"):
            _positive(name, getattr(self, name))
        for name in ("slo_itl_ms", "slo_ttft_ms", "step_timeout_s", "timeout_s"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        check_key_weights(self.key_weights)

    @property
    def smallest_chunk(self) -> int:
        """Tokens of one sequence in steps that are not collected: as few as it can go on with."""
        return (1 if self.chunking else _ANY_LENGTH) + self.plan_ahead

    @property
    def states_per_sequence(self) -> int:
        """Slots for each sequence of a batch, of a model that keeps states: the state that its next
        step starts from, one for each step that is planned and not collected, and one beside them
        for cached prefixes and rows of forward_batch."""
        return self.states_per_running + 1

    @property
    def states_per_running(self) -> int:
        """The most slots that a running sequence holds."""
        return 2 + self.plan_ahead

    def batch_size(self, capacity: Capacity) -> int:
        """Sequences that a batch holds: no more than the executor takes and has states for, so
        that no running sequence ever waits for a state."""
        size = min(self.max_batch_size, capacity.max_batch_size)
        if not capacity.num_states:
            return size
        if capacity.num_states < self.states_per_sequence:
            raise ConfigError(
                f"the executor has {capacity.num_states} slots for states, and a sequence needs "
                f"{self.states_per_sequence}: give it more memory"
            )
        return min(size, capacity.num_states // self.states_per_sequence)


def check_key_weights(weights: Mapping[str, float]) -> None:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"key_weights must map names to weights, got {weights!r}")
    for key, weight in weights.items():
        _positive(f"key_weights[{key!r}]", weight)
        if not 0.01 <= weight <= 100:
            raise ConfigError(f"key_weights[{key!r}] must be from 0.01 to 100, got {weight}")


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")


def _positive_or_zero(name: str, value: object) -> None:
    if value != 0:
        _positive(name, value)
