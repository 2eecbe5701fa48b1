"""BatchingDelay: whether an idle engine should wait a moment for more requests to batch."""

from collections import deque

_RECENT = 8  # arrivals remembered
_PATIENCE = 3.0  # give up when the next arrival is this many mean gaps late


class BatchingDelay:
    """Predicts the next arrival from the recent ones.

    Waiting is worth it only while the gaps between arrivals are shorter than the timeout: a lone
    request on a quiet engine starts at once.
    """

    def __init__(self, batch_timeout_s: float) -> None:
        self._timeout_s = batch_timeout_s
        self._arrivals: deque[float] = deque(maxlen=_RECENT)

    def arrived(self, now: float) -> None:
        if self._arrivals and now - self._arrivals[-1] > self._timeout_s * _PATIENCE:
            self._arrivals.clear()  # the engine had gone quiet
        self._arrivals.append(now)

    def wait_until(self, now: float, oldest_arrival: float) -> float | None:
        """Until when to delay the batch, or None to start now."""
        if self._timeout_s == 0.0 or len(self._arrivals) < 2:
            return None
        gap = (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)
        if gap == 0.0 or gap > self._timeout_s:
            return None
        deadline = min(oldest_arrival + self._timeout_s, self._arrivals[-1] + _PATIENCE * gap)
        return deadline if deadline > now else None
