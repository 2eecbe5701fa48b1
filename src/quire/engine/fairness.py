"""Fairness: waiting queues by API key, deficit round robin between keys, and how many tokens of a
step each sequence gets.

A key's background requests (`quire.core.request.BACKGROUND`) have a queue and a share of their own.
They get what all others leave: they join the batch while nobody else waits, lose their slots and
blocks to whoever does, and are given tokens of a step after all others, within a bound on its time.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from quire.core.config import EngineConfig
from quire.engine.pacing import SMALLEST_CHUNK, Pacer
from quire.engine.sequence import Sequence

_QUANTUM = 16  # tokens a turn of the round robin is worth, times the key's weight
_MAX_CREDIT_STEPS = 4  # bounds credit and debt, in steps of max_step_tokens
_HEADROOM_DIVISOR = 3  # keys without credit get a third of a shared step's headroom
_ANY_LENGTH = 1 << 30  # of a chunk
_PROMPT_BOUND_SCALE = 2.0  # latency bound for prompts of keys in credit, times that for the others
_BACKGROUND_MARK = "\0"  # begins the share of a key's background requests


def share_of(key: str, *, background: bool) -> str:
    """What a key's sequences are queued and charged under."""
    return _BACKGROUND_MARK + key if background else key


def is_background(share: str) -> bool:
    return share.startswith(_BACKGROUND_MARK)


@dataclass(slots=True)
class QueueLoad:
    """What waits, of the background or of all others."""

    num_sequences: int = 0
    num_tokens: int = 0  # that they ask for

    def add(self, num_sequences: int, num_tokens: int) -> None:
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens


class WaitingQueues:
    """Sequences that wait, one queue a key, each in order of rank."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}
        self._loads = {False: QueueLoad(), True: QueueLoad()}

    def push(self, key: str, sequence: Sequence) -> None:
        insort(self._queues.setdefault(key, []), sequence, key=_rank)
        self._loads[is_background(key)].add(1, sequence.request.num_tokens_asked)

    def remove(self, key: str, sequence: Sequence) -> None:
        queue = self._queues[key]
        index = bisect_left(queue, sequence.rank, key=_rank)
        assert queue[index] is sequence, f"{sequence.id} does not wait under {key!r}"
        del queue[index]
        self._loads[is_background(key)].add(-1, -sequence.request.num_tokens_asked)
        if not queue:
            del self._queues[key]

    def load(self, *, background: bool) -> QueueLoad:
        return self._loads[background]

    @property
    def num_tokens(self) -> int:
        """That all who wait ask for."""
        return sum(load.num_tokens for load in self._loads.values())

    def queue(self, key: str) -> list[Sequence]:
        return self._queues.get(key, [])

    @property
    def keys(self) -> list[str]:
        return list(self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in list(self._queues.values()):  # copies: another thread may read the queues
            yield from list(queue)

    def __len__(self) -> int:
        return sum(load.num_sequences for load in self._loads.values())


class DeficitRoundRobin:
    """What each key has of the batch (slots) and is owed of it (credit, in tokens).

    Each step, every key with work earns its weighted share of the step's tokens and pays for those
    it got. Keys with most credit go first, up to their credit, so that a key below its share is
    hardly slowed by one far above. What no credit covers is split by turns. Credit and debt are
    bounded, and end with a key's work.
    """

    def __init__(self, weights: Mapping[str, float], max_step_tokens: int) -> None:
        self._weights = weights
        self._max_credit = float(_MAX_CREDIT_STEPS * max_step_tokens)
        self._credit: dict[str, float] = {}
        self._slots: dict[str, int] = {}
        self._turns: deque[str] = deque()
        self.num_slots = 0  # of all keys together
        self.num_background_slots = 0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights from the next step on; credit and slots stay as they are."""
        self._weights = weights

    @property
    def num_keys(self) -> int:
        """Keys that have slots in the batch, those of background requests counted apart."""
        return len(self._slots)

    @property
    def has_rivals(self) -> bool:
        """Whether keys that are not in the background share the batch."""
        if not self.num_background_slots:
            return len(self._slots) > 1
        return sum(not is_background(key) for key in self._slots) > 1

    def reserve_slots(self, key: str, num_slots: int) -> None:
        """Take slots of the batch, or give them back (below 0)."""
        self.num_slots += num_slots
        if is_background(key):
            self.num_background_slots += num_slots
        self._slots[key] = self._slots.get(key, 0) + num_slots
        if not self._slots[key]:
            del self._slots[key]

    def charge(self, served: Mapping[str, int], waiting: Iterable[str]) -> None:
        """After a step: credit each key with work its share, charge the tokens it was served.

        The background shares what it got alone.
        """
        keys = {*self._slots, *waiting}
        for key in [key for key in self._credit if key not in keys]:
            del self._credit[key]
        behind = {key for key in keys if is_background(key)}
        for group in (keys - behind, behind):
            self._charge_group(group, served)

    def _charge_group(self, keys: set[str], served: Mapping[str, int]) -> None:
        if len(keys) < 2:
            return
        total = sum(served.get(key, 0) for key in keys)
        share = total / sum(self._weight(key) for key in keys)
        for key in keys:
            credit = self.credit(key) + share * self._weight(key) - served.get(key, 0)
            self._credit[key] = max(-self._max_credit, min(credit, self._max_credit))

    def credit(self, key: str) -> float:
        """Tokens the key earned and did not use; below 0: debt. A new key starts with the most."""
        return self._credit.get(key, self._max_credit)

    def precedence(self, key: str) -> float:
        """Orders keys that compete: lower first."""
        return -self.credit(key) / self._weight(key)

    def victim_key(self, newcomer: str, num_slots: int) -> str | None:
        """The key to pre-empt for a newcomer of another key, if there is one.

        It is a key in debt while the newcomer's has credit, or the key with most slots for its
        weight, if it has no fewer than the newcomer's after the exchange. The background's go
        first, to whoever is not in it.
        """
        others = [key for key in self._slots if key != newcomer]
        behind = [key for key in others if is_background(key)]
        if behind and not is_background(newcomer):
            return max(behind, key=self._weighted_slots)
        if is_background(newcomer):
            others = behind
        if not others:
            return None
        poorest = max(others, key=self.precedence)
        if self.credit(newcomer) > num_slots and self.credit(poorest) < 0:
            return poorest
        largest = max(others, key=self._weighted_slots)
        after = (self._slots[largest] - num_slots) / self._weight(largest)
        claimed = (self._slots.get(newcomer, 0) + num_slots) / self._weight(newcomer)
        return largest if claimed <= after else None

    def split(self, wanted: Mapping[str, int], budget: int) -> dict[str, int]:
        """How many tokens of a step each key gets, where together they want more."""
        granted = dict.fromkeys(wanted, 0)
        # Of equal precedence, the key with fewer slots goes first: it arrived later.
        for key in sorted(
            wanted, key=lambda key: (self.precedence(key), self._weighted_slots(key))
        ):
            granted[key] = min(wanted[key], budget, max(0, int(self.credit(key))))
            budget -= granted[key]
        self._turns.extend(key for key in wanted if key not in self._turns)
        while budget > 0 and granted != wanted:
            key = self._turns.popleft()
            if key not in wanted:
                continue
            self._turns.append(key)
            quantum = max(1, int(_QUANTUM * self._weight(key)))
            grant = min(wanted[key] - granted[key], quantum, budget)
            granted[key] += grant
            budget -= grant
        return granted

    def _weighted_slots(self, key: str) -> float:
        return self._slots.get(key, 0) / self._weight(key)

    def _weight(self, key: str) -> float:
        return self._weights.get(key.removeprefix(_BACKGROUND_MARK), 1.0)


class Ready(NamedTuple):
    """Running sequences that can have a row in the next step, in order of rank."""

    decodes: list[Sequence]  # lack one token
    prompts: list[Sequence]  # lack more
    num_cached: int  # positions of the decodes that are computed already

    def part(self, *, background: bool) -> "Ready":
        decodes = [s for s in self.decodes if is_background(s.key) is background]
        prompts = [s for s in self.prompts if is_background(s.key) is background]
        return Ready(decodes, prompts, sum(sequence.num_computed for sequence in decodes))


class Grants(NamedTuple):
    """Who gets how much of a step."""

    decodes: list[Sequence]  # one token each
    chunks: dict[Sequence, int]  # tokens of each prompt, in order of rank


class StepBudget:
    """Sizes a step in tokens, and splits it between the sequences that are ready."""

    def __init__(
        self,
        config: EngineConfig,
        pacer: Pacer,
        shares: DeficitRoundRobin,
        max_chunk: int | None = None,
    ) -> None:
        """`max_chunk`: tokens of one sequence in a step, where prompts may be spread."""
        self._chunking = config.chunking
        self._max_chunk = max_chunk if max_chunk is not None and config.chunking else _ANY_LENGTH
        self._pacer = pacer
        self._shares = shares

    def split(self, ready: Ready, token_limit: int) -> Grants:
        if not self._shares.num_background_slots:
            return self._split(ready, token_limit)
        first = self._split(ready.part(background=False), token_limit)
        behind = ready.part(background=True)
        budget = self._background_tokens(first, behind, token_limit)
        last = self._split_rest(behind, budget, is_alone=not (first.decodes or first.chunks))
        return Grants([*first.decodes, *last.decodes], {**first.chunks, **last.chunks})

    def _background_tokens(self, first: Grants, behind: Ready, token_limit: int) -> int:
        """Tokens of the step that are left to the background, beside what the others got."""
        sizes = [*(1 for _ in first.decodes), *first.chunks.values()]
        rows = [*first.decodes, *first.chunks]
        others = sorted((*behind.decodes, *behind.prompts), key=_decode_order)
        room = self._pacer.background_tokens(
            sum(sizes),
            sum(sequence.num_computed for sequence in rows),
            (sequence.num_computed for sequence in others),
            has_prompts=bool(first.chunks),
        )
        return max(0, min(room, token_limit - sum(sizes)))

    def _split_rest(self, behind: Ready, budget: int, *, is_alone: bool) -> Grants:
        sequences = [*behind.decodes, *behind.prompts]
        grants = self._split_by_key(sequences, budget) if budget else {}
        if is_alone and not grants and behind.prompts:  # without chunks: it runs alone
            return Grants([], {behind.prompts[0]: behind.prompts[0].num_remaining})
        return Grants(
            [sequence for sequence in behind.decodes if sequence in grants],
            {s: grants[s] for s in behind.prompts if s in grants},
        )

    def _split(self, ready: Ready, token_limit: int) -> Grants:
        decodes, prompts, _ = ready
        budget = self._size(ready, token_limit)
        if self._is_contended(ready, budget):
            grants = self._split_by_key([*decodes, *prompts], budget)
            decodes = [sequence for sequence in decodes if sequence in grants]
        else:
            grants = self._split_by_rank(prompts, budget - len(decodes))
        chunks = {sequence: grants[sequence] for sequence in prompts if sequence in grants}
        if prompts and not chunks and not self._chunking:  # too long to share a step: it runs alone
            return Grants([], {prompts[0]: prompts[0].num_remaining})
        return Grants(decodes, chunks)

    def _size(self, ready: Ready, token_limit: int) -> int:
        """Tokens the step may hold.

        With several keys in the batch a step is kept short, as an arrival waits for its end: of the
        headroom that decodes and prompts of keys in credit leave, only a part is used, and the step
        stays within the latency bound of the protected decodes.
        """
        decodes, prompts, num_cached = ready
        budget = min(token_limit, self._pacer.step_tokens(len(decodes), num_cached))
        if not self._shares.has_rivals or self._pacer.has_target or not self._chunking:
            return budget
        credit = self._shares.credit
        in_credit = sum(sequence.num_remaining for sequence in prompts if credit(sequence.key) > 0)
        headroom = max(0, budget - len(decodes) - in_credit)
        shared = budget - headroom + -(-headroom // _HEADROOM_DIVISOR)
        protected = self._protected_decodes(decodes)
        if not protected:
            return shared
        others = [s for s in (*decodes, *prompts) if s.key != protected[0].key]
        each_cached = [sequence.num_computed for sequence in sorted(others, key=_decode_order)]
        num_cached = sum(sequence.num_computed for sequence in protected)
        bounded = partial(self._pacer.co_scheduled_tokens, len(protected), num_cached, each_cached)
        in_credit = min(in_credit, bounded(scale=_PROMPT_BOUND_SCALE))
        return min(shared, len(protected) + max(in_credit, bounded()))

    def _protected_decodes(self, decodes: list[Sequence]) -> list[Sequence]:
        """The decodes of the key in credit that has fewest: those a long step would slow most."""
        by_key: dict[str, list[Sequence]] = {}
        for sequence in decodes:
            if self._shares.credit(sequence.key) > 0:
                by_key.setdefault(sequence.key, []).append(sequence)
        return min(by_key.values(), key=len, default=[])

    def _is_contended(self, ready: Ready, budget: int) -> bool:
        """Whether several keys want more than the step can hold."""
        if not self._shares.has_rivals:
            return False
        wanted = len(ready.decodes) + sum(sequence.num_remaining for sequence in ready.prompts)
        return wanted > budget

    def _split_by_rank(self, prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
        """First come, first served: how many tokens each prompt gets."""
        grants: dict[Sequence, int] = {}
        for sequence in prompts:
            cost = self._pacer.row_tokens(sequence.num_computed)
            if not grants:  # the first makes progress, however long its context
                cost = min(cost, max(0, budget - SMALLEST_CHUNK))
            budget -= cost
            wanted = sequence.num_remaining
            if budget <= 0 or (wanted > budget and not self._chunking):
                break
            grants[sequence] = min(wanted, budget, self._max_chunk)
            budget -= grants[sequence]
        return grants

    def _split_by_key(self, sequences: list[Sequence], budget: int) -> dict[Sequence, int]:
        """Deficit round robin: how many tokens each sequence gets.

        Decodes of keys in credit come first. Within a key, decodes go before prompts, and those
        that waited longest before others, so that all of them progress.
        """
        by_key: dict[str, list[Sequence]] = {}
        wanted: dict[str, int] = {}
        for sequence in sequences:
            key = sequence.key
            by_key.setdefault(key, []).append(sequence)
            wanted[key] = wanted.get(key, 0) + sequence.num_remaining
        grants = self._grant_decodes(by_key, budget)
        for sequence in grants:
            wanted[sequence.key] -= 1
        for key, tokens in self._shares.split(wanted, budget - len(grants)).items():
            waiting = [sequence for sequence in by_key[key] if sequence not in grants]
            self._grant_within_key(sorted(waiting, key=_decode_order), tokens, grants)
        return grants

    def _grant_decodes(
        self, by_key: Mapping[str, list[Sequence]], budget: int
    ) -> dict[Sequence, int]:
        """A token for each decode of keys in credit, keys with few of them first."""
        grants: dict[Sequence, int] = {}
        for sequences in sorted(by_key.values(), key=len):
            if self._shares.credit(sequences[0].key) > 0:
                decodes = [sequence for sequence in sequences if sequence.num_remaining == 1]
                first = sorted(decodes, key=_decode_order)[: max(0, budget - len(grants))]
                grants |= dict.fromkeys(first, 1)
        return grants

    def _grant_within_key(
        self, sequences: list[Sequence], tokens: int, grants: dict[Sequence, int]
    ) -> None:
        for sequence in sequences:
            if tokens <= 0:
                break
            if sequence.num_remaining > 1:
                tokens -= self._pacer.row_tokens(sequence.num_computed)
            grant = min(sequence.num_remaining, max(1, tokens), self._max_chunk)
            if grant < sequence.num_remaining and not self._chunking:
                break
            grants[sequence] = grant
            tokens -= grant


def _decode_order(sequence: Sequence) -> tuple[float, int]:
    """Sorts decodes by the step that last sampled for them, then by the rows they had; prompts
    come after them."""
    is_decode = sequence.num_remaining == 1
    return (sequence.last_step, sequence.num_steps) if is_decode else (float("inf"), 0)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
