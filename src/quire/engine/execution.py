"""Execution: submits steps and collects them within a time limit; fault isolation by halves, and
backoff to smaller batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.errors import ExecutorError, ExecutorMemoryError, StepTimeoutError
from quire.core.plan import SequenceResult, StepPlan, StepResult
from quire.engine.step import Row, Step
from quire.executors.base import Executor, Ticket

RunRows = Callable[[Sequence[Row]], Sequence[SequenceResult]]

_FAILURES_TO_DEGRADE = 3  # batches in a row that raise
_SUCCESSES_TO_RECOVER = 16


@dataclass(slots=True)
class Flight:
    """A submitted step; `error` where submitting it already failed. `gave_way`: it was cancelled
    for an arrival, and its rows are planned again."""

    step: Step
    ticket: Ticket
    error: ExecutorError | None = None
    gave_way: bool = False

    def give_way(self) -> None:
        """From any thread, before it is cancelled."""
        self.gave_way = True


class UnresponsiveError(Exception):
    """The executor neither finished a step nor reacted to its cancellation."""


class StepRunner:
    """An executor whose every error is an ExecutorError, and whose steps end in bounded time."""

    def __init__(self, executor: Executor, grace_s: float) -> None:
        self._executor = executor
        self._grace_s = grace_s  # for a step to end after it was cancelled

    def submit(self, step: Step, plan: StepPlan) -> Flight:
        try:
            return Flight(step, self._executor.submit(plan))
        except Exception as error:
            return Flight(step, None, _as_executor_error(error))

    def cancel(self, flight: Flight) -> None:
        if flight.error is None:
            self._executor.cancel(flight.ticket)

    def collect(self, flight: Flight, timeout_s: float | None) -> StepResult:
        """Wait for a step; one that takes longer than `timeout_s` is cancelled."""
        if flight.error is not None:
            raise flight.error
        try:
            try:
                return self._executor.collect(flight.ticket, timeout_s)
            except StepTimeoutError:
                self._executor.cancel(flight.ticket)
                return self._executor.collect(flight.ticket, self._grace_s)
        except StepTimeoutError as error:
            raise UnresponsiveError from error
        except ExecutorError:
            raise
        except Exception as error:
            raise _as_executor_error(error) from error


def _as_executor_error(error: Exception) -> ExecutorError:
    if isinstance(error, ExecutorError):
        return error
    kind = ExecutorMemoryError if isinstance(error, MemoryError) else ExecutorError
    wrapped = kind(f"{type(error).__name__}: {_text_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # an error of a user's function, whose __str__ may fail, too
        return "an error whose text cannot be made"


@dataclass(slots=True)
class Outcome:
    """What became of a failed step's rows, each run again in ever smaller parts."""

    succeeded: list[tuple[Row, SequenceResult]] = field(default_factory=list)
    failed: list[tuple[Row, ExecutorError]] = field(default_factory=list)
    retry: list[Row] = field(default_factory=list)  # to be planned again
    largest_run: int = 0  # tokens of the largest part that ran
    num_splits: int = 0

    @property
    def is_explained(self) -> bool:
        """Whether some rows failed alone and the others ran: then it was not for their number."""
        return bool(self.failed and self.succeeded)


def isolate(rows: Sequence[Row], run: RunRows, *, can_shrink: bool = False) -> Outcome:
    """Run rows in halves until each either succeeds or fails alone.

    `can_shrink`: a row that lacks memory alone can be planned again as smaller chunks.
    """
    outcome = Outcome()
    if len(rows) > 1:
        _run_halves(rows, run, outcome)
    else:
        _run_part(rows, run, outcome)
    _retry_for_memory(outcome, can_shrink=can_shrink)
    return outcome


def _run_halves(rows: Sequence[Row], run: RunRows, outcome: Outcome) -> None:
    outcome.num_splits += 1
    _run_part(rows[: len(rows) // 2], run, outcome)
    _run_part(rows[len(rows) // 2 :], run, outcome)


def _run_part(rows: Sequence[Row], run: RunRows, outcome: Outcome) -> None:
    if not rows:
        return
    try:
        results = run(rows)
    except ExecutorError as error:
        if len(rows) == 1:
            outcome.failed.append((rows[0], error))
            return
        _run_halves(rows, run, outcome)
    else:
        outcome.succeeded.extend(zip(rows, results, strict=True))
        num_tokens = sum(row.plan.num_new_tokens for row in rows)
        outcome.largest_run = max(outcome.largest_run, num_tokens)


def _retry_for_memory(outcome: Outcome, *, can_shrink: bool) -> None:
    """Of rows that failed for lack of memory, retry what may yet fit; at least one fails.

    A chunk with more tokens than any part that ran can be planned again as smaller chunks. Where
    nothing ran and nothing can shrink, only the row with most context fails.
    """
    lacking = [pair for pair in outcome.failed if isinstance(pair[1], ExecutorMemoryError)]
    fitting = max(1, outcome.largest_run)
    too_large = [pair for pair in lacking if pair[0].plan.num_new_tokens > fitting]
    retried = []
    if can_shrink and too_large:
        retried = too_large if outcome.succeeded else lacking
    elif lacking and not outcome.succeeded:
        largest = max(lacking, key=lambda pair: pair[0].plan.end)
        retried = [pair for pair in lacking if pair is not largest]
    for pair in retried:
        outcome.failed.remove(pair)
        outcome.retry.append(pair[0])


class Backoff:
    """Limits on batches: lowered while steps fail, doubled again after a run of successes."""

    def __init__(self, max_batch_size: int, max_step_tokens: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max_step_tokens
        self.batch_limit = max_batch_size
        self.token_limit = max_step_tokens
        self._failures = 0  # batches in a row, not counting those where a row was to blame
        self._successes = 0

    @property
    def is_lowered(self) -> bool:
        return self.batch_limit < self.max_batch_size or self.token_limit < self.max_step_tokens

    @property
    def is_degraded(self) -> bool:
        """Whether limits are lowered, or the last batch failed and no row was to blame."""
        return self._failures > 0 or self.is_lowered

    def failed(
        self, num_rows: int, num_tokens: int, error: ExecutorError, *, is_explained: bool = False
    ) -> None:
        """`is_explained`: some rows failed alone and the others ran."""
        self._successes = 0
        if isinstance(error, ExecutorMemoryError):
            self.batch_limit = max(1, min(self.batch_limit, num_rows) // 2)
            self.token_limit = max(1, min(self.token_limit, num_tokens) // 2)
        elif num_rows > 1 and not is_explained:
            self._failures += 1
            if self._failures >= _FAILURES_TO_DEGRADE:
                self.batch_limit = 1

    def succeeded(self, num_rows: int) -> None:
        """A whole step ran; one of a single row says nothing about batches."""
        if num_rows > 1:
            self._failures = 0
        if not self.is_degraded:
            return
        self._successes += 1
        if self._successes >= _SUCCESSES_TO_RECOVER:
            self._successes = 0
            self.batch_limit = min(self.max_batch_size, self.batch_limit * 2)
            self.token_limit = min(self.max_step_tokens, self.token_limit * 2)
            if not self.is_lowered:
                self._failures = 0
