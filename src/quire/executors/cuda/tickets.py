"""A submitted step: its rows and results, and the device slots of what it sampled."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, cast

import numpy as np
import torch

from quire.core.plan import (
    SequencePlan,
    SequenceResult,
    StepPlan,
    TokenLogprob,
    check_fields,
)
from quire.executors.base import (
    HIDDEN_NOT_FINITE,
    LOGITS_INFINITE,
    LOGITS_NOT_FINITE,
    NO_TOKEN_ALLOWED,
    STEPS_REMEMBERED,
    no_sample,
)
from quire.executors.cuda.kernels import layers
from quire.executors.cuda.planes import Array
from quire.executors.cuda.sampling import Scores
from quire.executors.cuda.step_input import BodyRows, Integers, PackedRow, PlanColumns

_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is
# In the order in which _plain_results() writes them.
_RESULT_FIELDS = (
    "sequence_id",
    "token",
    "logprob",
    "prompt_logprobs",
    "logits",
    "pooled",
    "fault",
)
check_fields(SequenceResult, _RESULT_FIELDS)
_FAULTS = {
    layers.NOT_FINITE: LOGITS_NOT_FINITE,
    layers.NOTHING_ALLOWED: NO_TOKEN_ALLOWED,
    layers.TOO_LARGE: LOGITS_INFINITE,
}


@dataclass(slots=True)
class StepRow:
    """A row of a step: where its results will be."""

    plan: SequencePlan
    fault: str | None = None
    packed: PackedRow | None = None
    head_row: int | None = None  # where it is sampled
    # On the host once the step is done:
    prompt_scores: tuple[Scores, ...] = ()
    logits: tuple[Array, ...] = ()
    pooled: Array | None = None


class StepRows(NamedTuple):
    """What a step computes: its sound rows by column, and those of them that are sampled."""

    plans: Sequence[SequencePlan]
    body: BodyRows
    sampled: Sequence[int] | None  # indices; None: all are
    slots: Sequence[int]  # of the sampled ones' tokens
    has_more: bool = False  # a row wants logits, a pooled state or scores of its prompt
    columns: PlanColumns | None = None  # of `plans`, where they were wanted before

    @property
    def sampled_plans(self) -> Sequence[SequencePlan]:
        if self.sampled is None:
            return self.plans
        return [self.plans[index] for index in self.sampled]

    @property
    def sampled_sources(self) -> list[int]:
        """The slots of their pending tokens; -1: none."""
        sources = self.body.sources
        found: list[int] = (sources if self.sampled is None else sources[self.sampled]).tolist()
        return found

    @property
    def lasts(self) -> Integers:
        """Where each sampled row ends in the body."""
        lasts: Integers = np.cumsum(self.body.counts, dtype=np.int32) - 1
        return lasts if self.sampled is None else lasts[self.sampled]

    def one_by_one(self) -> list[StepRow]:
        ends = np.cumsum(self.body.counts).tolist()
        counts, sources = self.body.counts.tolist(), self.body.sources.tolist()
        columns = zip(self.plans, ends, counts, sources, strict=True)
        rows = [
            StepRow(
                plan, None, PackedRow(plan, end - count, end - 1, None if source < 0 else source)
            )
            for plan, end, count, source in columns
        ]
        indices = range(len(rows)) if self.sampled is None else self.sampled
        for head_row, index in enumerate(indices):
            rows[index].head_row = head_row
        return rows


@dataclass(slots=True)
class CudaTicket:
    plan: StepPlan
    computed: StepRows | None = None  # None: no row is sound
    rows: list[StepRow] | None = None  # of the plan, where they had to be looked at one by one
    is_sampled: bool = True  # False: the masks of its grammars are pending
    error: Exception | None = None  # of its sampling, where that was submitted later
    num_padding: int = 0
    is_plain: bool = False  # every row is sampled, and wants nothing but its token and its score
    scores: Scores | None = None  # of the sampled rows, by head row
    sampled: Array | None = None  # [rows, (token, status)] on the host, once `done`
    finite: Array | None = None  # [tokens]
    begun: Array | None = None  # events of the stream
    done: Array | None = None
    submitted_at: float = 0.0
    is_cancelled: bool = False

    def one_by_one(self) -> list[StepRow]:
        """Its rows; made when they are first wanted, which most steps' never are."""
        if self.rows is None:
            self.rows = [] if self.computed is None else self.computed.one_by_one()
        return self.rows


class SampleRing:
    """Sampled tokens in slots on the device, where rows that follow a step read them.

    Slots of steps that nobody can follow any more are used again.
    """

    def __init__(self, max_batch_size: int, device: str) -> None:
        size = max_batch_size * (STEPS_REMEMBERED + 2)
        self.tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._size = size
        self._next = 0
        self._slots: OrderedDict[int, dict[int, int]] = OrderedDict()  # by step, by sequence
        self._faulted: dict[int, set[int]] = {}  # by step, the sequences it gave no token

    def take(self, step_id: int, sequence_ids: Sequence[int]) -> list[int]:
        """Slots for a step's samples."""
        first, size = self._next, self._size
        slots = [slot % size for slot in range(first, first + len(sequence_ids))]
        self._next = (first + len(sequence_ids)) % size
        self._slots.setdefault(step_id, {}).update(zip(sequence_ids, slots, strict=True))
        while len(self._slots) > STEPS_REMEMBERED:
            self._slots.popitem(last=False)
        return slots

    def sources_of(
        self, steps: Sequence[int | None], sequence_ids: Sequence[int]
    ) -> list[int] | None:
        """The slots of the tokens that rows follow, -1 where a row follows none; None: a row has no
        token to begin with, which slot_of() says of each."""
        if self._faulted and not self._faulted.keys().isdisjoint(steps):
            return None
        if steps.count(steps[0]) == len(steps) and steps[0] is not None:
            found = list(map(self._slots.get(steps[0], {}).get, sequence_ids))
        else:
            slots = self._slots
            found = [
                -1 if step is None else slots.get(step, {}).get(sequence_id)
                for step, sequence_id in zip(steps, sequence_ids, strict=True)
            ]
        return None if None in found else cast(list[int], found)

    def slot_of(self, plan: SequencePlan) -> int:
        """The slot of the token that a row follows; RowFaultError where there is none."""
        assert plan.follows is not None
        known = self._slots.get(plan.follows)
        slot = None if known is None else known.get(plan.sequence_id)
        if slot is None or (self._faulted and self.has_faulted(plan)):
            raise no_sample(plan.follows)
        return slot

    def has_faulted(self, plan: SequencePlan) -> bool:
        """Whether the step that a row follows turned out to have no token for it."""
        return (
            plan.follows is not None
            and bool(self._faulted)
            and plan.sequence_id in self._faulted.get(plan.follows, ())
        )

    def follows_fault(self, plan: StepPlan) -> bool:
        """Whether any row follows a step in which a row failed."""
        return bool(self._faulted) and any(row.follows in self._faulted for row in plan.sequences)

    def remember_faults(self, step_id: int, results: Sequence[SequenceResult]) -> None:
        """Rows that follow these have no token to begin with."""
        failed = {result.sequence_id for result in results if result.fault is not None}
        if failed:
            self._faulted.setdefault(step_id, set()).update(failed)
        while len(self._faulted) > STEPS_REMEMBERED:
            del self._faulted[next(iter(self._faulted))]


def results_of(ticket: CudaTicket, samples: SampleRing) -> tuple[SequenceResult, ...]:
    """The results of a step that is done; what failed in it is noted for the rows that follow."""
    results = _plain_results(ticket)
    if results is None or samples.follows_fault(ticket.plan):
        results = tuple(_result(ticket, row, samples) for row in ticket.one_by_one())
        samples.remember_faults(ticket.plan.step_id, results)
    return results


def _plain_results(ticket: CudaTicket) -> tuple[SequenceResult, ...] | None:
    """The results where every row was sampled, is sound and asked for nothing else: the usual
    step, without Python work for each row beyond its result. None for any other step."""
    sampled, finite = ticket.sampled, ticket.finite
    if not ticket.is_plain or sampled is None or finite is None:
        return None
    if not finite.all() or not (sampled[:, 1] == layers.FINITE).all():
        return None
    plans, tokens = ticket.plan.sequences, sampled[:, 0].tolist()
    computed = ticket.computed
    if computed is None or computed.columns is None:
        ids: Sequence[int] = [plan.sequence_id for plan in plans]
    else:
        ids = computed.columns.sequence_id
    none = repeat(None)
    scores: Iterable[TokenLogprob | None] = none
    if ticket.scores is not None:
        scores = ticket.scores.of_all(tokens)
    rows = zip(ids, tokens, scores, repeat(()), none, none, none)
    return tuple(map(_new_tuple, repeat(SequenceResult), rows))


def _result(ticket: CudaTicket, row: StepRow, samples: SampleRing) -> SequenceResult:
    plan = row.plan
    fault = row.fault or _late_fault(ticket, row, samples)
    if fault is not None:
        return SequenceResult(plan.sequence_id, fault=fault)
    token = logprob = None
    if row.head_row is not None:
        assert ticket.sampled is not None
        token = int(ticket.sampled[row.head_row, 0])
        logprob = _sample_score(ticket.scores, row, token)
    num_top = plan.num_target_logprobs
    targets = iter(plan.prompt_targets)
    prompt = tuple(
        entry for scores in row.prompt_scores for entry in _entries(scores, targets, num_top)
    )
    logits = torch.cat(row.logits).numpy() if row.logits else None
    pooled = None if row.pooled is None else row.pooled.cpu().numpy()
    return SequenceResult(plan.sequence_id, token, logprob, prompt, logits, pooled)


def _late_fault(ticket: CudaTicket, row: StepRow, samples: SampleRing) -> str | None:
    """The fault of a row that was found on the device, if any."""
    plan, packed = row.plan, row.packed
    assert packed is not None and ticket.finite is not None
    if plan.follows is not None and samples.has_faulted(plan):
        return str(no_sample(plan.follows))
    if not ticket.finite[packed.first : packed.last + 1].all():
        return HIDDEN_NOT_FINITE
    if row.head_row is not None:
        assert ticket.sampled is not None
        return _FAULTS.get(int(ticket.sampled[row.head_row, 1]))
    if row.logits and not all(bool(torch.isfinite(part).all()) for part in row.logits):
        return _FAULTS[layers.NOT_FINITE]
    return None


def _sample_score(scores: Scores | None, row: StepRow, token: int) -> TokenLogprob | None:
    assert row.plan.sampling is not None and row.head_row is not None
    num_top = row.plan.sampling.params.logprobs
    if scores is None or num_top is None:
        return None
    return TokenLogprob(token, *scores.of(row.head_row, num_top))


def _entries(scores: Scores, targets: Iterator[int], num_top: int) -> list[TokenLogprob]:
    count = len(scores.results)
    return [TokenLogprob(next(targets), *scores.of(index, num_top)) for index in range(count)]
