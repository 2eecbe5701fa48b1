"""StepLog: the latest steps and their rows, for whoever watches the engine."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.engine.step import Row

MAX_STEPS = 256  # that are kept
WATCHED_S = 30.0  # for which steps are kept after somebody asked for them
_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is


class RowRecord(NamedTuple):
    """A row of a step: lengths and ids, nothing of the prompt."""

    sequence_id: int
    request_id: str
    key: str
    num_prompt_tokens: int
    start: int  # position of its first new token
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """One token of the completion; else a chunk of a prompt, or of what is computed again."""
        return self.num_tokens == 1 and self.start >= self.num_prompt_tokens


class StepRecord(NamedTuple):
    """A step that ran."""

    id: int
    at: float  # when it was collected, on the engine's clock
    elapsed_s: float
    rows: tuple[RowRecord, ...]

    @property
    def context(self) -> int:
        """Positions that its rows attended to."""
        return sum(row.start + row.num_tokens for row in self.rows)


class StepLog:
    """A ring of records. Nothing is recorded unless somebody asked lately: steps of an engine that
    nobody watches pay one comparison.

    The engine's thread writes, any thread reads: an entry is replaced as a whole.
    """

    def __init__(self) -> None:
        self._ring: list[StepRecord | None] = [None] * MAX_STEPS
        self._num_recorded = 0
        self._watched_until = float("-inf")

    def record(self, step_id: int, rows: Iterable[Row], elapsed_s: float, now: float) -> None:
        if now > self._watched_until:
            return
        kept = tuple([_row_record(row) for row in rows])
        self._ring[self._num_recorded % MAX_STEPS] = StepRecord(step_id, now, elapsed_s, kept)
        self._num_recorded += 1

    def latest(self, count: int, now: float, after: int | None = None) -> Sequence[StepRecord]:
        """At most `count` of the latest, in order of their ids; only those after the step `after`.
        From now on they are kept for a while."""
        self._watched_until = now + WATCHED_S
        found = sorted(record for record in self._ring[:] if record is not None)
        if after is not None:
            found = [record for record in found if record.id > after]
        return found[len(found) - count :] if count < len(found) else found


def _row_record(row: Row) -> RowRecord:
    plan, request = row.plan, row.sequence.live.request
    return _new_tuple(
        RowRecord,
        (
            plan.sequence_id,
            request.id,
            request.key,
            len(request.prompt),
            plan.start,
            len(plan.tokens) + (plan.follows is not None),
        ),
    )
