"""Departures: how often requests end, and so when there will be room for another."""

from collections import deque

_REMEMBERED = 64
_FIRST_INTERVAL_S = 1.0  # before anything has ended


class Departures:
    """The mean time between ends, of the last ones since the engine became busy.

    Times when nothing was there to end say nothing of how fast the engine is, so they do not count.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self._since = 0.0
        self._last_known_s = _FIRST_INTERVAL_S

    def restart(self, now: float) -> None:
        """The first request after a pause is there."""
        if self._ends:
            self._last_known_s = self.interval_s(self._ends[-1])
        self._ends.clear()
        self._since = now

    def add(self, now: float) -> None:
        """A request has ended."""
        if len(self._ends) == _REMEMBERED:
            self._since = self._ends[0]
        self._ends.append(now)

    def interval_s(self, now: float) -> float:
        """The mean time from one end to the next."""
        if not self._ends:
            return max(self._last_known_s, 0.0)
        return max(0.0, now - self._since) / len(self._ends)
