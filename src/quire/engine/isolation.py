"""Fault isolation: finds the rows that make a step fail, and keeps the rest going."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.errors import ExecutorError, ExecutorMemoryError
from quire.core.plan import SequenceResult
from quire.engine.scheduler import Row

RunRows = Callable[[Sequence[Row]], Sequence[SequenceResult]]

_FAILURES_TO_DEGRADE = 3  # batches in a row that raise
_SUCCESSES_TO_RECOVER = 16


@dataclass(slots=True)
class Outcome:
    """What became of a failed step's rows, each run again in ever smaller parts."""

    sound: list[tuple[Row, SequenceResult]] = field(default_factory=list)
    culprits: list[tuple[Row, ExecutorError]] = field(default_factory=list)
    retry: list[Row] = field(default_factory=list)  # to be planned again
    largest_run: int = 0  # tokens of the largest part that ran


def isolate(rows: Sequence[Row], run: RunRows, *, can_shrink: bool = False) -> Outcome:
    """Run rows in halves until each either succeeds or fails alone.

    `can_shrink`: a row that lacks memory alone can be planned again as smaller chunks.
    """
    outcome = Outcome()
    if len(rows) == 1:
        _run_part(rows, run, outcome)
    else:
        _run_part(rows[: len(rows) // 2], run, outcome)
        _run_part(rows[len(rows) // 2 :], run, outcome)
    _spare(outcome, can_shrink=can_shrink)
    return outcome


def _run_part(rows: Sequence[Row], run: RunRows, outcome: Outcome) -> None:
    if not rows:
        return
    try:
        results = run(rows)
    except ExecutorError as error:
        if len(rows) == 1:
            outcome.culprits.append((rows[0], error))
            return
        _run_part(rows[: len(rows) // 2], run, outcome)
        _run_part(rows[len(rows) // 2 :], run, outcome)
    else:
        outcome.sound.extend(zip(rows, results, strict=True))
        num_tokens = sum(row.plan.num_new_tokens for row in rows)
        outcome.largest_run = max(outcome.largest_run, num_tokens)


def _spare(outcome: Outcome, *, can_shrink: bool) -> None:
    """For want of memory only what cannot be made smaller must go, and of that only the largest.

    A chunk with more tokens than any part that ran may just be too large: it is planned again.
    """
    short = [pair for pair in outcome.culprits if isinstance(pair[1], ExecutorMemoryError)]
    most = max(1, outcome.largest_run)
    too_large = [pair for pair in short if pair[0].plan.num_new_tokens > most]
    spared = []
    if can_shrink and too_large:
        spared = too_large if outcome.sound else short
    elif short and not outcome.sound:
        largest = max(short, key=lambda pair: pair[0].plan.end)
        spared = [pair for pair in short if pair is not largest]
    for pair in spared:
        outcome.culprits.remove(pair)
        outcome.retry.append(pair[0])


class Backoff:
    """How large batches may be: smaller while they keep failing, then larger again."""

    def __init__(self, max_batch_size: int, max_step_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self.batch_limit = max_batch_size
        self.token_limit = max_step_tokens
        self._failures = 0
        self._successes = 0

    @property
    def is_degraded(self) -> bool:
        return self.batch_limit < self._max_batch_size or self.token_limit < self._max_step_tokens

    def failed(self, num_rows: int, num_tokens: int, error: ExecutorError) -> None:
        self._successes = 0
        if isinstance(error, ExecutorMemoryError):
            self.batch_limit = max(1, min(self.batch_limit, num_rows) // 2)
            self.token_limit = max(1, min(self.token_limit, num_tokens) // 2)
        elif num_rows > 1:
            self._failures += 1
            if self._failures >= _FAILURES_TO_DEGRADE:
                self.batch_limit = 1

    def succeeded(self) -> None:
        self._failures = 0
        if not self.is_degraded:
            return
        self._successes += 1
        if self._successes >= _SUCCESSES_TO_RECOVER:
            self._successes = 0
            self.batch_limit = min(self._max_batch_size, self.batch_limit * 2)
            self.token_limit = min(self._max_step_tokens, self.token_limit * 2)
