"""Step: the rows that one step computes, and how they are planned from sequences."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.errors import QuireError, RowFaultError
from quire.core.plan import (
    BlockCopy,
    FollowingMasks,
    History,
    PendingMask,
    SequencePlan,
    StepPlan,
    Want,
    check_fields,
)
from quire.engine.sequence import Sequence
from quire.kvcache import KVCache

_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is
_SAMPLE = Want.SAMPLE  # a global is found faster than an enum's member
# In the order in which plan_decodes() writes them.
_ROW_FIELDS = (
    "sequence_id",
    "start",
    "tokens",
    "follows",
    "block_table",
    "want",
    "sampling",
    "completion_position",
    "history",
    "allowed",
    "prompt_targets",
    "other_tables",
    "states",
)
check_fields(SequencePlan, _ROW_FIELDS)
check_fields(History, ("prompt", "completion"))


class Row(NamedTuple):
    """A planned chunk and the sequence it belongs to."""

    plan: SequencePlan
    sequence: Sequence
    epoch: int  # the sequence's when planned: a later one means it lost its blocks since
    copies: tuple[BlockCopy, ...] = ()


@dataclass(slots=True)
class Step:
    """A step being planned, then in flight."""

    id: int
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0
    context: int = 0  # positions its rows attend to, their own included
    planned_at: float = 0.0
    has_masks: bool = False  # for some row's sample
    # Of the rows whose mask depends on a token that is pending.
    following_masks: FollowingMasks = field(default_factory=FollowingMasks)

    def plan(self) -> StepPlan:
        copies = tuple([copy for row in self.rows for copy in row.copies])
        return StepPlan(self.id, tuple([row.plan for row in self.rows]), copies)


class RowPlanner:
    """Adds rows to a step, with the blocks they need."""

    def __init__(self, cache: KVCache, *, chunking: bool) -> None:
        self._cache = cache
        self._chunking = chunking
        self._failed: list[tuple[Sequence, QuireError]] = []

    def take_failed(self) -> list[tuple[Sequence, QuireError]]:
        """Sequences that failed while they were planned, since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def plan_decodes(
        self,
        step: Step,
        sequences: Iterable[Sequence],
        plan_other: Callable[[Step, Sequence], None],
    ) -> None:
        """Add a row of one token for each running sequence: nearly all of a large batch have a
        writable next position and no row extras, or a mask and a history alone, and are planned
        here in half the time of plan_row(); `plan_other` plans the rest."""
        rows, step_id = step.rows, step.id
        num_tokens = context = 0
        for sequence in sequences:
            if not sequence.is_running:
                continue
            start = sequence.num_computed
            has_extras = sequence.has_row_extras
            if start >= sequence.num_writable or (has_extras and not sequence.has_short_extras):
                plan_other(step, sequence)
                continue
            tokens = sequence.tokens
            is_known = start < len(tokens)
            allowed = history = None
            if has_extras and sequence.grammar is not None:
                allowed = self._mask_of(step, sequence, not is_known)
            if has_extras and sequence.needs_history:
                history = _history_of(sequence)
            table = sequence.block_table
            plan = (
                sequence.id,
                start,
                (tokens[start],) if is_known else (),
                None if is_known else sequence.last_step,
                table.ids,
                _SAMPLE,
                sequence.sampling,
                start + 1 - sequence.prompt_length,
                history,
                allowed,
                (),  # prompt targets
                table.other_ids,
                (),  # states: with any, no position is ever writable before it is planned
            )
            row = (_new_tuple(SequencePlan, plan), sequence, sequence.epoch, ())
            rows.append(_new_tuple(Row, row))
            num_tokens += 1
            context += start + 1
            sequence.planned(start + 1, step_id, True)
            if sequence.wait_reason is not None:
                sequence.wait_for(None, step.planned_at)
        step.num_tokens += num_tokens
        step.context += context

    def plan_chunk(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Add a prompt's chunk, or as much of it as there are blocks for."""
        while num_tokens > 0 and not self.plan_row(step, sequence, num_tokens):
            if not self._chunking:
                return
            num_tokens //= 2

    def plan_row(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Add a row of so many tokens, or fewer where a state is wanted in between; False if there
        are no blocks for it."""
        start = sequence.num_computed
        end = start + num_tokens
        if self._cache.has_states:
            end = self._end_at_state(sequence, end)
        copies: tuple[BlockCopy, ...] = ()
        if end > sequence.num_writable:
            found = self._cache.extend(sequence.block_table, start, end)
            if found is None:
                return False
            copies = tuple(found)
            if not self._cache.has_states:  # else the next row asks for a state in any case
                sequence.made_writable(self._cache.blocks_for(end) * self._cache.block_size)
        known = len(sequence.tokens)
        is_last = end == known + sequence.num_pending
        row = SequencePlan(
            sequence.id,
            start,
            tuple(sequence.tokens[start:end]),
            sequence.last_step if end > known else None,
            sequence.block_table.ids,
            sequence.goal if is_last else Want.NOTHING,
            sequence.sampling if is_last else None,
            end - sequence.prompt_length if is_last else 0,
            other_tables=sequence.block_table.other_ids,
            states=sequence.block_table.row_states,
        )
        if sequence.has_row_extras:
            row = self._add_extras(step, row, sequence)
        step.rows.append(Row(row, sequence, sequence.epoch, copies))
        step.num_tokens += end - start
        step.context += end
        sequence.planned(end, step.id, row.want is Want.SAMPLE)
        if sequence.wait_reason is not None:
            sequence.wait_for(None, step.planned_at)
        return True

    def _end_at_state(self, sequence: Sequence, end: int) -> int:
        """Where a chunk up to `end` ends, so that states exist which others start from.

        Siblings compute the prompt's last token again: it gets a step of its own. A prefix is found
        where a state after full blocks is cached: chunks end at multiples of the block size, the
        last of them before the last token. That is one more small step for most prompts.
        """
        start, size = sequence.num_computed, self._cache.block_size
        if sequence.has_siblings_to_come and start < sequence.prompt_length - 1:
            end = min(end, sequence.prompt_length - 1)
        if sequence.block_table.salt is None or not self._chunking:
            return end
        full = min(end, start + sequence.num_remaining - 1) // size * size
        return full if full > start else end

    def _add_extras(self, step: Step, row: SequencePlan, sequence: Sequence) -> SequencePlan:
        """What only some rows carry: history for penalties, a mask, prompt tokens to score."""
        prompt = sequence.request.prompt
        if row.want is Want.SAMPLE and sequence.needs_history:
            row = row._replace(history=_history_of(sequence))
        if row.want is Want.SAMPLE and sequence.grammar is not None:
            row = row._replace(allowed=self._mask_of(step, sequence, row.follows is not None))
        if sequence.live.prompt_logprobs is not None and sequence.sampling.index == 0:
            targets = prompt[row.start + 1 : row.end + 1]
            row = row._replace(prompt_targets=targets, sampling=sequence.sampling)
        return row

    def _mask_of(
        self, step: Step, sequence: Sequence, follows_sample: bool
    ) -> bytes | PendingMask | FollowingMasks | None:
        """The mask of its row; a grammar that raises fails the sequence, whose row has none."""
        step.has_masks = True
        if follows_sample:
            return sequence.mask_follows(step.following_masks)
        assert sequence.grammar is not None
        try:
            return sequence.grammar.allowed()
        except Exception as error:
            fault = RowFaultError(f"the grammar failed: {error}")
            self._failed.append((sequence, fault))
            return None


def _history_of(sequence: Sequence) -> History:
    """Of its next row."""
    completion = tuple(sequence.tokens[sequence.prompt_length :])
    return _new_tuple(History, (sequence.live.request.prompt, completion))
