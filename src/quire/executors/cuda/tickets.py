"""A submitted step: its rows and results, and the device slots of what it sampled."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from quire.executors.cuda.step_input import PackedRow

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
    scores: Scores | None = None  # of its sample, at its head row
    prompt_scores: tuple[Scores, ...] = ()
    logits: tuple[Array, ...] = ()
    pooled: Array | None = None


class ToSample(NamedTuple):
    """What is left to do of a step whose layers are submitted."""

    rows: list[StepRow]
    slots: list[int]
    num_tokens: int


@dataclass(slots=True)
class CudaTicket:
    plan: StepPlan
    rows: list[StepRow]
    to_sample: ToSample | None = None
    error: Exception | None = None  # of its sampling, where that was submitted later
    num_padding: int = 0
    is_plain: bool = False  # every row is sampled, and wants nothing but its token
    sampled: Array | None = None  # [rows, (token, status)] on the host, once `done`
    finite: Array | None = None  # [tokens]
    begun: Array | None = None  # events of the stream
    done: Array | None = None
    submitted_at: float = 0.0
    is_cancelled: bool = False


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

    def take(self, step_id: int, rows: Sequence[StepRow]) -> list[int]:
        """Slots for a step's samples."""
        known = self._slots.setdefault(step_id, {})
        slots = []
        for row in rows:
            slots.append(self._next)
            known[row.plan.sequence_id] = self._next
            self._next = (self._next + 1) % self._size
        while len(self._slots) > STEPS_REMEMBERED:
            self._slots.popitem(last=False)
        return slots

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

    def follows_fault(self, rows: Sequence[StepRow]) -> bool:
        """Whether any row follows a step in which a row failed."""
        return bool(self._faulted) and any(row.plan.follows in self._faulted for row in rows)

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
    if results is None or samples.follows_fault(ticket.rows):
        results = tuple(_result(ticket, row, samples) for row in ticket.rows)
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
    tokens = sampled[:, 0].tolist()
    return tuple(
        [
            _new_tuple(SequenceResult, (row.plan.sequence_id, token, None, (), None, None, None))
            for row, token in zip(ticket.rows, tokens, strict=True)
        ]
    )


def _result(ticket: CudaTicket, row: StepRow, samples: SampleRing) -> SequenceResult:
    plan = row.plan
    fault = row.fault or _late_fault(ticket, row, samples)
    if fault is not None:
        return SequenceResult(plan.sequence_id, fault=fault)
    token = logprob = None
    if row.head_row is not None:
        assert ticket.sampled is not None
        token = int(ticket.sampled[row.head_row, 0])
        logprob = _sample_score(row, token)
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


def _sample_score(row: StepRow, token: int) -> TokenLogprob | None:
    if row.scores is None:
        return None
    assert row.plan.sampling is not None and row.head_row is not None
    num_top = row.plan.sampling.params.logprobs or 0
    return TokenLogprob(token, *row.scores.of(row.head_row, num_top))


def _entries(scores: Scores, targets: Iterator[int], num_top: int) -> list[TokenLogprob]:
    count = len(scores.results)
    return [TokenLogprob(next(targets), *scores.of(index, num_top)) for index in range(count)]
