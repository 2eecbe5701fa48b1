"""ScalingPolicy: how many replicas, from what the replicas' own engines say.

Serve copies this module into its controller: it imports the standard library alone.
"""

import math
from typing import Any


class ScalingPolicy:
    """A policy of Serve's autoscaler; bounds and delays are Serve's own.

    As many replicas as keep the sequences that run and wait at `target_load` of the batches'
    slots, and the KV cache at `target_kv_usage`: whichever needs more.
    """

    def __init__(
        self, max_batch_size: int, target_load: float = 0.8, target_kv_usage: float = 0.8
    ) -> None:
        self._slots = max_batch_size * target_load
        self._kv_usage = target_kv_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        figures = context.aggregated_metrics or {}
        in_engines = _sum(figures, "running") + _sum(figures, "waiting")
        # Before the first figures come, Serve's own count of requests stands in.
        sequences = max(in_engines + context.total_queued_requests, 0.0)
        if not figures:
            sequences = context.total_num_requests
        wanted = max(sequences / self._slots, _sum(figures, "kv_usage") / self._kv_usage)
        return math.ceil(wanted), dict(context.policy_state)


def _sum(figures: dict[str, dict[Any, float]], name: str) -> float:
    return sum(figures.get(name, {}).values())
