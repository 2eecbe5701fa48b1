"""Whose turn it is: queues by key, deficit round robin between them, shares of the batch."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from quire.engine.sequence import Sequence

_QUANTUM = 16  # tokens a turn is worth
_STEPS_OF_CREDIT = 4  # a key can save up this many steps' tokens


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
        for line in list(self._lines.values()):  # copies: another thread may look at the queue
            yield from list(line)

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())


class Ledger:
    """What each key has of the batch and has been served, and what it may claim of both.

    Deficit round robin with credit that ages: every step, each key with work earns its fair share
    of the step's tokens and pays for those it got. Who took less than it earned goes first, up to
    its credit, so that a key below its share hardly notices another far above. What nobody has
    earned goes round in turns. Credit and debt are bounded, and end with a key's work.
    """

    def __init__(self, weights: Mapping[str, float], max_step_tokens: int) -> None:
        self._weights = weights
        self._most = float(_STEPS_OF_CREDIT * max_step_tokens)
        self._credit: dict[str, float] = {}
        self._slots: dict[str, int] = {}
        self._order: deque[str] = deque()
        self.num_slots = 0  # held by all keys together

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights from the next step on; credit and places stay as they are."""
        self._weights = weights

    @property
    def num_keys(self) -> int:
        """Keys that have slots in the batch."""
        return len(self._slots)

    def reserve(self, key: str, num_slots: int) -> None:
        """Places in the batch taken, or given back."""
        self.num_slots += num_slots
        self._slots[key] = self._slots.get(key, 0) + num_slots
        if not self._slots[key]:
            del self._slots[key]

    def account(self, served: Mapping[str, int], waiting: Iterable[str]) -> None:
        """Book a step: what each key was served, and the share that each key with work earned."""
        keys = {*self._slots, *waiting}
        for key in [key for key in self._credit if key not in keys]:
            del self._credit[key]
        if len(keys) < 2:
            return
        fair = sum(served.values()) / sum(self._weight(key) for key in keys)
        for key in keys:
            credit = self.credit(key) + fair * self._weight(key) - served.get(key, 0)
            self._credit[key] = max(-self._most, min(credit, self._most))

    def credit(self, key: str) -> float:
        """Tokens the key has earned and not used; one that comes new has as many as it can."""
        return self._credit.get(key, self._most)

    def claim(self, key: str) -> float:
        """What orders keys when places come free: lower first."""
        return -self.credit(key) / self._weight(key)

    def displaced_by(self, newcomer: str, num_slots: int) -> str | None:
        """The key that must give way in the batch to a newcomer of another, if one must: one in
        debt to a key in credit, or one that still has no less after the exchange."""
        holders = [key for key in self._slots if key != newcomer]
        if not holders:
            return None
        poorest = max(holders, key=self.claim)
        if self.credit(newcomer) > num_slots and self.credit(poorest) < 0:
            return poorest
        largest = max(holders, key=self._slots_for_weight)
        after = (self._slots[largest] - num_slots) / self._weight(largest)
        claimed = (self._slots.get(newcomer, 0) + num_slots) / self._weight(newcomer)
        return largest if claimed <= after else None

    def share_out(self, wanted: Mapping[str, int], budget: int) -> dict[str, int]:
        """How many tokens of a step each key gets, when together they want more."""
        granted = dict.fromkeys(wanted, 0)
        # Of equal claims goes first that of the key which has less of the batch: it came later.
        for key in sorted(wanted, key=lambda key: (self.claim(key), self._slots_for_weight(key))):
            granted[key] = min(wanted[key], budget, max(0, int(self.credit(key))))
            budget -= granted[key]
        self._order.extend(key for key in wanted if key not in self._order)
        while budget > 0 and granted != wanted:
            key = self._order.popleft()
            if key not in wanted:
                continue
            self._order.append(key)
            turn = max(1, int(_QUANTUM * self._weight(key)))
            grant = min(wanted[key] - granted[key], turn, budget)
            granted[key] += grant
            budget -= grant
        return granted

    def _slots_for_weight(self, key: str) -> float:
        return self._slots.get(key, 0) / self._weight(key)

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
