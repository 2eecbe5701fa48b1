"""A step under way: what was asked of each row, where its answers will be, what they come to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from quire.core.plan import SequencePlan, SequenceResult, StepPlan, TokenLogprob
from quire.executors.cuda import sampling
from quire.executors.cuda.planes import Array
from quire.executors.cuda.sampling import Scores
from quire.executors.cuda.step_input import PackedRow

_FAULTS = {
    sampling.NOT_FINITE: "the logits are not finite",
    sampling.NOTHING_ALLOWED: "the mask allows no token",
    sampling.TOO_LARGE: "the penalties make the logits infinite",
}

HasFaulted = Callable[[SequencePlan], bool]  # whether the step that a row follows failed for it


@dataclass(slots=True)
class StepRow:
    """A row of a step: where its answers will be."""

    plan: SequencePlan
    fault: str | None = None
    packed: PackedRow | None = None
    answer: int | None = None  # its row of the head
    # On the host once the step is done:
    scores: tuple[Scores, int] | None = None  # of its sample, with its place there
    prompt_scores: list[Scores] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    pooled: Array | None = None


@dataclass(slots=True)
class CudaTicket:
    plan: StepPlan
    rows: list[StepRow]
    num_padding: int = 0
    is_plain: bool = False  # every row is sampled and asks for nothing else
    answers: Array | None = None  # [rows, 2] on the host, once `done`
    finite: Array | None = None  # [tokens]
    begun: Array | None = None  # events of the stream
    done: Array | None = None
    submitted_at: float = 0.0
    is_cancelled: bool = False


def plain_results(ticket: CudaTicket) -> tuple[SequenceResult, ...] | None:
    """The results where every row was sampled, is sound and asked for no more: the usual step,
    without a look at each row. None for any other."""
    answers, finite = ticket.answers, ticket.finite
    if not ticket.is_plain or answers is None or finite is None:
        return None
    if not finite.all() or not (answers[:, 1] == sampling.FINITE).all():
        return None
    tokens = answers[:, 0].tolist()
    return tuple(
        [
            SequenceResult(row.plan.sequence_id, token)
            for row, token in zip(ticket.rows, tokens, strict=True)
        ]
    )


def result_of(ticket: CudaTicket, row: StepRow, has_faulted: HasFaulted) -> SequenceResult:
    plan = row.plan
    fault = row.fault or _late_fault(ticket, row, has_faulted)
    if fault is not None:
        return SequenceResult(plan.sequence_id, fault=fault)
    token = logprob = None
    if row.answer is not None:
        assert ticket.answers is not None
        token = int(ticket.answers[row.answer, 0])
        logprob = _sample_score(row, token)
    num_top = (plan.sampling.params.prompt_logprobs or 0) if plan.sampling is not None else 0
    targets = iter(plan.prompt_targets)
    prompt = tuple(
        entry for scores in row.prompt_scores for entry in _entries(scores, targets, num_top)
    )
    logits = torch.cat(row.logits).numpy() if row.logits else None
    pooled = None if row.pooled is None else row.pooled.cpu().numpy()
    return SequenceResult(plan.sequence_id, token, logprob, prompt, logits, pooled)


def _late_fault(ticket: CudaTicket, row: StepRow, has_faulted: HasFaulted) -> str | None:
    """What only the device could tell."""
    plan, packed = row.plan, row.packed
    assert packed is not None and ticket.finite is not None
    if plan.follows is not None and has_faulted(plan):
        return f"step {plan.follows} sampled no token for this sequence"
    if not ticket.finite[packed.first : packed.last + 1].all():
        return "the hidden state is not finite"
    if row.answer is not None:
        assert ticket.answers is not None
        return _FAULTS.get(int(ticket.answers[row.answer, 1]))
    if row.logits and not all(bool(torch.isfinite(part).all()) for part in row.logits):
        return _FAULTS[sampling.NOT_FINITE]
    return None


def _sample_score(row: StepRow, token: int) -> TokenLogprob | None:
    if row.scores is None:
        return None
    scores, place = row.scores
    assert row.plan.sampling is not None
    num_top = row.plan.sampling.params.logprobs or 0
    return _entry(scores, place, token, num_top)


def _entries(scores: Scores, targets: Iterator[int], num_top: int) -> list[TokenLogprob]:
    count = len(scores.logprobs)
    return [_entry(scores, place, next(targets), num_top) for place in range(count)]


def _entry(scores: Scores, place: int, token: int, num_top: int) -> TokenLogprob:
    tokens = scores.top_tokens[place, :num_top].tolist()
    top = tuple(zip(tokens, scores.top_logprobs[place, :num_top].tolist(), strict=True))
    return TokenLogprob(token, float(scores.logprobs[place]), int(scores.ranks[place]), top)
