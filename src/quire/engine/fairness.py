"""Whose turn it is: queues by key, deficit round robin between them, shares of the batch."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from quire.engine.sequence import Sequence

_QUANTUM = 64  # prompt tokens a turn is worth


class WaitingLines:
    """Sequences that wait, one line a key, the most important first."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self.num_tokens = 0  # that the waiting ask for

    def push(self, key: str, sequence: Sequence) -> None:
        insort(self._lines.setdefault(key, []), sequence, key=_rank)
        self.num_tokens += sequence.request.num_tokens_asked

    def remove(self, key: str, sequence: Sequence) -> None:
        line = self._lines[key]
        at = bisect_left(line, sequence.rank, key=_rank)
        assert line[at] is sequence, f"{sequence.id} does not wait under {key!r}"
        del line[at]
        self.num_tokens -= sequence.request.num_tokens_asked
        if not line:
            del self._lines[key]

    def line(self, key: str) -> list[Sequence]:
        return self._lines.get(key, [])

    @property
    def keys(self) -> list[str]:
        return list(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())


class RoundRobin:
    """Deficit round robin: each turn adds to a key's credit by its weight; tokens use it up.

    A key whose work ends loses its credit, so that nobody saves up for a burst.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._credit: dict[str, float] = {}
        self._order: deque[str] = deque()

    def weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)

    def keep(self, keys: Iterable[str]) -> None:
        """Only these keys have work now; newcomers take the last turn."""
        wanted = dict.fromkeys(keys)
        for key in [key for key in self._order if key not in wanted]:
            self._order.remove(key)
            del self._credit[key]
        for key in wanted:
            if key not in self._credit:
                self._order.append(key)
                self._credit[key] = 0.0

    def next_turn(self) -> tuple[str, int]:
        """The key whose turn it is, and the tokens it may use."""
        key = self._order[0]
        self._order.rotate(-1)
        turn = _QUANTUM * self.weight(key)
        most = max(1.0, 2 * turn)  # a key that cannot join for a while does not save up either
        self._credit[key] = min(self._credit[key] + turn, most)
        return key, int(self._credit[key])

    def spend(self, key: str, tokens: int) -> None:
        self._credit[key] -= tokens


class Shares:
    """How many places in the batch each key holds, against what is fair."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.held: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.held.values())

    def add(self, key: str, num_slots: int) -> None:
        self.held[key] = self.held.get(key, 0) + num_slots
        if not self.held[key]:
            del self.held[key]

    def fair(self, key: str, waiting_keys: Iterable[str], num_slots: int) -> float:
        """The places `key` may claim when all these and the holders want some."""
        keys = {key, *waiting_keys, *self.held}
        return num_slots * self._weight(key) / sum(self._weight(k) for k in keys)

    def most_over(self, waiting_keys: Iterable[str], num_slots: int) -> str | None:
        """The key furthest above its fair share, if any is above."""
        waiting = list(waiting_keys)
        over = {
            key: held / self._weight(key)
            for key, held in self.held.items()
            if held > self.fair(key, waiting, num_slots)
        }
        return max(over, key=lambda key: over[key]) if over else None

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
