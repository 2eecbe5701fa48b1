"""EitherExecutor: two executors of one model, each sequence on one of them.

A sequence that begins in a step of few sequences is computed by `small`, any other by `large`. It
stays there: its keys and values are in that executor's blocks alone. Where it begins anew, as after
a pre-emption, it is chosen for again. Both have all block numbers, so the engine knows nothing of
it; a block's content is on the side that wrote it last.

Which executor computes a row depends on the batch, and so do its bits: this is for
`invariant=False` alone. No two requests may share blocks: a prefix would be on one side, and its
continuation on the other (`prefix_reuse=False`). Forks of a request do share them, and are on its
side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.clock import Clock
from quire.core.errors import ConfigError
from quire.core.plan import BlockCopy, SequencePlan, SequenceResult, StepPlan, StepResult
from quire.executors.base import Executor, ExecutorBase, Ticket

_SMALL, _LARGE = 0, 1


class _Part(NamedTuple):
    """What one side has of a step."""

    side: int
    rows: tuple[int, ...]  # indices in the plan
    ticket: Ticket


@dataclass(slots=True)
class EitherTicket:
    plan: StepPlan
    parts: list[_Part]
    results: dict[int, StepResult]  # of the sides that were collected


class EitherExecutor(ExecutorBase):
    """`most_sequences`: the largest step in which a sequence is given to `small`."""

    def __init__(
        self, small: Executor, large: Executor, most_sequences: int, clock: Clock | None = None
    ) -> None:
        one, other = small.capacity, large.capacity
        for name in ("num_blocks", "block_size", "windows", "vocabulary_size"):
            if getattr(one, name) != getattr(other, name):
                raise ConfigError(
                    f"two executors of one model need the same {name}, got {getattr(one, name)} "
                    f"and {getattr(other, name)}"
                )
        self._sides = (small, large)
        self._most = most_sequences
        self._side_of = bytearray([_LARGE]) * one.num_blocks  # by block: who wrote it last
        super().__init__(
            other._replace(
                max_context=min(one.max_context, other.max_context),
                max_batch_size=min(one.max_batch_size, other.max_batch_size),
                max_step_tokens=min(one.max_step_tokens, other.max_step_tokens),
            ),
            kernels=[*small.kernels, *large.kernels],
            fallback=small.fallback or large.fallback,
            is_warm=small.is_warm and large.is_warm,
            clock=clock,
        )

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        small, large = (side.memory_bytes for side in self._sides)
        return {**small, **{f"gpu_{kind}": size for kind, size in large.items()}}

    def warm_up(self) -> None:
        for side in self._sides:
            side.warm_up()
            self.fallback = self.fallback or side.fallback
        super().warm_up()

    def submit(self, plan: StepPlan) -> EitherTicket:
        self._check_open()
        self._check_copies(plan)
        copies: tuple[list[BlockCopy], list[BlockCopy]] = ([], [])
        for copy in plan.copies:
            side = self._side_of[copy.target] = self._side_of[copy.source]
            copies[side].append(copy)
        rows: tuple[list[int], list[int]] = ([], [])
        for index, row in enumerate(plan.sequences):
            rows[self._place(row, len(plan.sequences))].append(index)
        parts = []
        for side, executor in enumerate(self._sides):
            if rows[side] or copies[side]:
                own = tuple(plan.sequences[index] for index in rows[side])
                ticket = executor.submit(StepPlan(plan.step_id, own, tuple(copies[side])))
                parts.append(_Part(side, tuple(rows[side]), ticket))
        return EitherTicket(plan, parts, {})

    def _place(self, row: SequencePlan, num_sequences: int) -> int:
        """The side of a row, which the blocks that it writes are on from now on. A row out of
        bounds goes to any side, which faults it."""
        size, num_blocks = self.capacity.block_size, len(self._side_of)
        if row.start <= 0:
            side = _SMALL if num_sequences <= self._most else _LARGE
        else:
            before = row.block_table[(row.start - 1) // size : (row.start - 1) // size + 1]
            known = bool(before) and 0 <= before[0] < num_blocks
            side = self._side_of[before[0]] if known else _LARGE
        for table in (row.block_table, *row.other_tables):
            for block in table[max(0, row.start) // size : -(-row.end // size)]:
                if 0 <= block < num_blocks:
                    self._side_of[block] = side
        return side

    def collect(self, ticket: EitherTicket, timeout_s: float | None = None) -> StepResult:
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        for part in ticket.parts:
            if part.side not in ticket.results:
                left = None if deadline is None else max(0.0, deadline - self._clock.now())
                result = self._sides[part.side].collect(part.ticket, left)
                ticket.results[part.side] = result
        return _merged(ticket, self._clock.now())

    def cancel(self, ticket: EitherTicket) -> None:
        for part in ticket.parts:
            self._sides[part.side].cancel(part.ticket)

    def close(self) -> None:
        super().close()
        for side in self._sides:
            side.close()


def _merged(ticket: EitherTicket, now: float) -> StepResult:
    """The rows of both sides, in the plan's order."""
    rows: dict[int, SequenceResult] = {}
    for part in ticket.parts:
        rows.update(zip(part.rows, ticket.results[part.side].sequences, strict=True))
    found = list(ticket.results.values())
    started = min((result.started_at for result in found), default=now)
    ended = max((result.started_at + result.elapsed_s for result in found), default=now)
    return StepResult(
        ticket.plan.step_id,
        started,
        ended - started,
        tuple(rows[index] for index in range(len(rows))),
        sum(result.padding_tokens for result in found),
    )
