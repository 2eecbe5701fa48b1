"""Scheduler: decides which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. Each sequence has tokens and a number of computed
tokens, and catches up a chunk at a time. Running sequences that lack one token get it first; what
is left of the step's token budget goes to prompts, key by key, a key's running and waiting ones in
order of rank.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire.core.config import EngineConfig
from quire.core.errors import QuireError, RowFaultError
from quire.core.plan import BlockCopy, Capacity, History, SequencePlan, StepPlan, Want
from quire.core.request import Status, WaitReason
from quire.engine.batching_delay import BatchingDelay
from quire.engine.fairness import Ledger, WaitingLines
from quire.engine.pacing import SMALLEST_CHUNK, Pacer, StepTimeModel
from quire.engine.sequence import Sequence
from quire.engine.stats import EngineStats
from quire.kvcache import KVCache

_DUE_TIMES = 1.5  # what streams bear, a step may take for the prompts of keys in credit
_SHARED_ROOM = 3  # a key over its share fills a third of a step's room beside others

_new_tuple = tuple.__new__  # makes a named tuple without the call that its own constructor is


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
    context: int = 0  # positions its rows attend to

    def plan(self) -> StepPlan:
        copies = tuple([copy for row in self.rows for copy in row.copies])
        return StepPlan(self.id, tuple([row.plan for row in self.rows]), copies)


class Scheduler:
    def __init__(self, config: EngineConfig, capacity: Capacity, stats: EngineStats) -> None:
        self.config = config
        self.cache = KVCache(
            capacity.num_blocks, capacity.block_size, prefix_reuse=config.prefix_reuse
        )
        self._model = StepTimeModel()
        self.pacer = Pacer(config, self._model)
        self._delay = BatchingDelay(config.batch_timeout_ms / 1000)
        self.waiting = WaitingLines()
        self.parked: set[Sequence] = set()  # their readers do not keep up
        self.running: list[Sequence] = []  # by rank
        self.max_batch_size = min(config.max_batch_size, capacity.max_batch_size)
        self.max_step_tokens = min(config.max_step_tokens, capacity.max_step_tokens)
        self.batch_limit = self.max_batch_size  # lowered while batches fail
        self.token_limit = self.max_step_tokens  # lowered while memory is short
        self.wake_at: float | None = None  # when the batching delay ends
        self._failed: list[tuple[Sequence, QuireError]] = []
        self._ledger = Ledger(config.key_weights, self.max_step_tokens)
        self._stats = stats
        self._next_step_id = 1
        self._now = 0.0

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        self._ledger.set_weights(weights)

    def set_limits(self, batch_limit: int, token_limit: int) -> None:
        """How large steps may be while batches fail or memory is short."""
        self.batch_limit = batch_limit
        self.token_limit = token_limit

    def request_arrived(self, now: float) -> None:
        self._delay.arrived(now)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Learn how long steps take."""
        self._model.observe(step.num_tokens, step.context, elapsed_s)

    def take_failed(self) -> list[tuple[Sequence, QuireError]]:
        """Sequences that failed while they were planned, since the last call."""
        failed, self._failed = self._failed, []
        return failed

    # ---- joining and leaving

    def enqueue(self, sequence: Sequence, reason: WaitReason, now: float) -> None:
        sequence.wait_for(reason, now)
        self.waiting.push(sequence.key, sequence)

    def join(self, sequence: Sequence) -> None:
        """Put a sequence among the running and count the places it takes."""
        sequence.joined()
        insort(self.running, sequence, key=lambda running: running.rank)
        self._ledger.reserve(sequence.key, sequence.num_slots)

    def _part(self, sequence: Sequence) -> None:
        sequence.parted()
        self.running.remove(sequence)
        self._ledger.reserve(sequence.key, -sequence.num_slots)

    def release_slots(self, sequence: Sequence) -> None:
        """Hand back the slots a sequence reserved for its siblings."""
        if sequence.is_running:
            self._ledger.reserve(sequence.key, 1 - sequence.num_slots)
        sequence.reserve_slots(1)

    def leave(self, sequence: Sequence, now: float, *, faulted: bool = False) -> None:
        """Take an ended sequence out, wherever it stands, and free its blocks."""
        if sequence.is_running:
            self._part(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.waiting.remove(sequence.key, sequence)
        sequence.wait_for(None, now)
        sequence.lost_blocks()
        if faulted:
            self.cache.disown(sequence.block_table)
        else:
            self.cache.close(sequence.block_table)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence's blocks; it is computed again when its turn comes."""
        self._part(sequence)
        self.restart(sequence)
        sequence.request.metrics.num_preemptions += 1
        self._stats.num_preemptions += 1
        sequence.request.move_to(Status.PREEMPTED, now)
        self.enqueue(sequence, WaitReason.PREEMPTED, now)

    def restart(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back; what it computed counts no longer."""
        self.cache.close(sequence.block_table)
        sequence.lost_blocks()

    def park(self, sequence: Sequence, now: float) -> None:
        """Keep a sequence off the machine until unpark; others take its place."""
        if sequence.is_running:
            self.preempt(sequence, now)
        self.waiting.remove(sequence.key, sequence)
        sequence.wait_for(WaitReason.UNREAD, now)
        self.parked.add(sequence)

    def unpark(self, sequence: Sequence, now: float) -> None:
        self.parked.remove(sequence)
        self.enqueue(sequence, WaitReason.QUEUED, now)

    # ---- the step

    def schedule(self, now: float, *, is_idle: bool) -> Step | None:
        """Plan a step, or None when nothing can be planned now (see wake_at)."""
        self._now = now
        self.wake_at = None
        if is_idle and self._delays_batch():
            return None
        if self.waiting:
            self._admit_waiting()
        step = Step(self._next_step_id)
        self._fill(step)
        if is_idle and not step.rows:
            self._force_progress(step)
        if not step.rows:
            return None
        if self.config.fairness:
            self._account(step)
        self._next_step_id += 1
        return step

    def _account(self, step: Step) -> None:
        """Book what each key is served by the step; a single key has nobody to be fair to."""
        if self._ledger.num_keys + len(self.waiting.keys) < 2:
            return
        served: dict[str, int] = {}
        for row in step.rows:
            key = row.sequence.key
            num_tokens = len(row.plan.tokens) + (row.plan.follows is not None)
            served[key] = served.get(key, 0) + num_tokens
        self._ledger.account(served, self.waiting.keys)

    def new_step_id(self) -> int:
        """An id for a step made of parts of another."""
        self._next_step_id += 1
        return self._next_step_id - 1

    def _delays_batch(self) -> bool:
        if self.running or not self.waiting:
            return False
        sequences = list(self.waiting)
        if sum(sequence.num_slots for sequence in sequences) >= self.batch_limit:
            return False
        oldest = min(sequence.request.metrics.arrived_at for sequence in sequences)
        self.wake_at = self._delay.wait_until(self._now, oldest)
        if self.wake_at is None:
            return False
        for sequence in sequences:
            sequence.wait_for(WaitReason.COMPANY, self._now)
        return True

    def _fill(self, step: Step) -> None:
        """Give each ready sequence its tokens of the step, within the budget."""
        decodes, prompts, context = self._ready()
        budget = self._budget(decodes, prompts, context)
        if self._is_contended(decodes, prompts, budget):
            grants = self._share_out([*decodes, *prompts], budget)
            decodes = [sequence for sequence in decodes if sequence in grants]
        else:
            grants = self._hand_out(prompts, budget - len(decodes))
        if not self.config.chunking and prompts and grants.keys().isdisjoint(prompts):
            grants = {prompts[0]: prompts[0].num_remaining}  # too long for company: it goes alone
            decodes = []
        self._plan_decodes(step, decodes)
        for sequence in prompts:
            if sequence in grants and sequence.is_running:
                self._plan_chunk(step, sequence, grants[sequence])

    def _budget(self, decodes: list[Sequence], prompts: list[Sequence], context: int) -> int:
        """Tokens the step may hold.

        Whoever comes next waits for it to end. Where keys share the machine, those that had their
        share therefore fill only a part of what decodes and the prompts of the others leave, and
        no more than the streams of the others bear.
        """
        budget = min(self.token_limit, self.pacer.step_tokens(len(decodes), context))
        if self._ledger.num_keys < 2 or self.pacer.has_target or not self.config.chunking:
            return budget
        credit = self._ledger.credit
        due = sum(sequence.num_remaining for sequence in prompts if credit(sequence.key) > 0)
        room = max(0, budget - len(decodes) - due)
        shared = budget - room + -(-room // _SHARED_ROOM)
        streams = self._lightest_streams(decodes)
        if not streams:
            return shared
        rows = [s for s in (*decodes, *prompts) if s.key != streams[0].key]
        context = sum(sequence.num_computed for sequence in streams)
        contexts = [s.num_computed for s in sorted(rows, key=_last_decoded)]
        beside = partial(self.pacer.tokens_beside, len(streams), context, contexts)
        due = min(due, beside(times=_DUE_TIMES))
        return min(shared, len(streams) + max(due, beside()))

    def _lightest_streams(self, decodes: list[Sequence]) -> list[Sequence]:
        """The decodes of the key in credit that has fewest of them, if there is one."""
        lines: dict[str, list[Sequence]] = {}
        for sequence in decodes:
            if self._ledger.credit(sequence.key) > 0:
                lines.setdefault(sequence.key, []).append(sequence)
        return min(lines.values(), key=len, default=[])

    def _ready(self) -> tuple[list[Sequence], list[Sequence], int]:
        """Running sequences that lack one token, those that lack more, the context of the first."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        context = 0
        limit = min(self.batch_limit, self.token_limit)
        for sequence in self.running[:limit]:
            num_computed = sequence.num_computed
            length = len(sequence.tokens) + sequence.num_pending
            if length == num_computed + 1:
                if length == sequence.max_length:
                    continue  # its last token is still on its way
                if sequence.num_pending and sequence.grammar is not None:
                    continue  # the next mask follows from a token still on its way
                decodes.append(sequence)
                context += num_computed
            elif length > num_computed:
                prompts.append(sequence)
        for sequence in self.running[limit:]:
            sequence.wait_for(WaitReason.DEGRADED, self._now)
        return decodes, prompts, context

    def _is_contended(self, decodes: list[Sequence], prompts: list[Sequence], budget: int) -> bool:
        """Whether several keys want more than the step can hold."""
        if self._ledger.num_keys < 2:
            return False
        return len(decodes) + sum(sequence.num_remaining for sequence in prompts) > budget

    def _hand_out(self, prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
        """First come, first served: how many tokens each prompt gets."""
        grants: dict[Sequence, int] = {}
        for sequence in prompts:
            cost = self.pacer.row_tokens(sequence.num_computed)
            if not grants:  # the first goes on, however long its context
                cost = min(cost, max(0, budget - SMALLEST_CHUNK))
            budget -= cost
            wanted = sequence.num_remaining
            if budget <= 0 or (wanted > budget and not self.config.chunking):
                break
            grants[sequence] = min(wanted, budget)
            budget -= grants[sequence]
        return grants

    def _share_out(self, sequences: list[Sequence], budget: int) -> dict[Sequence, int]:
        """Between keys by turns: how many tokens each sequence gets.

        Within a key first the decodes, those that waited longest before others, so that all of them
        go on; then prompts in order.
        """
        lines: dict[str, list[Sequence]] = {}
        wanted: dict[str, int] = {}
        for sequence in sequences:
            key = sequence.key
            lines.setdefault(key, []).append(sequence)
            wanted[key] = wanted.get(key, 0) + sequence.num_remaining
        grants = self._grant_streams(lines, budget)
        for sequence in grants:
            wanted[sequence.key] -= 1
        for key, tokens in self._ledger.share_out(wanted, budget - len(grants)).items():
            for sequence in sorted(lines[key], key=_last_decoded):
                if tokens <= 0:
                    break
                if sequence in grants:
                    continue
                if sequence.num_remaining > 1:
                    tokens -= self.pacer.row_tokens(sequence.num_computed)
                grant = min(sequence.num_remaining, max(1, tokens))
                if grant < sequence.num_remaining and not self.config.chunking:
                    break
                grants[sequence] = grant
                tokens -= grant
        return grants

    def _grant_streams(self, lines: dict[str, list[Sequence]], budget: int) -> dict[Sequence, int]:
        """A token for each decode of keys in credit, those with few of them first."""
        grants: dict[Sequence, int] = {}
        for line in sorted(lines.values(), key=len):
            if self._ledger.credit(line[0].key) > 0:
                decodes = [sequence for sequence in line if sequence.num_remaining == 1]
                waited = sorted(decodes, key=_last_decoded)[: max(0, budget - len(grants))]
                grants |= dict.fromkeys(waited, 1)
        return grants

    def _plan_decodes(self, step: Step, decodes: list[Sequence]) -> None:
        """One token each; where blocks run out, the last running sequence gives its own up."""
        for sequence in decodes:
            if not sequence.is_running:
                continue
            if sequence.num_computed < sequence.num_writable and not sequence.is_special:
                self._plan_plain_decode(step, sequence)
                continue
            while not self._plan_row(step, sequence, 1):
                victim = self.running[-1]
                self.preempt(victim, self._now)
                if victim is sequence:
                    break

    def _plan_plain_decode(self, step: Step, sequence: Sequence) -> None:
        """What _plan_row comes to for nearly every row of a large batch, in half the time."""
        start = sequence.num_computed
        is_known = start < len(sequence.tokens)
        row = _new_tuple(
            SequencePlan,
            (
                sequence.id,
                start,
                (sequence.tokens[start],) if is_known else (),
                None if is_known else sequence.last_step,
                sequence.block_table.ids,
                Want.SAMPLE,
                sequence.sampling,
                start + 1 - sequence.prompt_length,
                None,  # history
                None,  # mask
                (),  # prompt targets
            ),
        )
        step.rows.append(_new_tuple(Row, (row, sequence, sequence.epoch, ())))
        step.num_tokens += 1
        step.context += start + 1
        sequence.planned(start + 1, step.id, True)
        if sequence.wait_reason is not None:
            sequence.wait_for(None, self._now)

    def _plan_row(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Add a chunk of the sequence to the step; False if there are no blocks for it."""
        start = sequence.num_computed
        end = start + num_tokens
        copies: tuple[BlockCopy, ...] = ()
        if end > sequence.num_writable:
            found = self.cache.extend(sequence.block_table, start, end)
            if found is None:
                return False
            copies = tuple(found)
            sequence.made_writable(self.cache.blocks_for(end) * self.cache.block_size)
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
        )
        if sequence.is_special:
            row = self._add_extras(row, sequence)
        step.rows.append(Row(row, sequence, sequence.epoch, copies))
        step.num_tokens += num_tokens
        step.context += end
        sequence.planned(end, step.id, row.want is Want.SAMPLE)
        if sequence.wait_reason is not None:
            sequence.wait_for(None, self._now)
        return True

    def _add_extras(self, row: SequencePlan, sequence: Sequence) -> SequencePlan:
        """What only some rows carry: history for penalties, a mask, prompt tokens to score."""
        prompt = sequence.request.prompt
        params = sequence.request.params
        if row.want is Want.SAMPLE and params.needs_history:
            completion = tuple(sequence.tokens[len(prompt) :])
            row = row._replace(history=History(prompt, completion))
        if row.want is Want.SAMPLE and sequence.grammar is not None:
            try:
                row = row._replace(allowed=sequence.grammar.allowed())
            except Exception as error:
                fault = RowFaultError(f"the grammar failed: {error}")
                self._failed.append((sequence, fault))
        if sequence.live.prompt_logprobs is not None and sequence.sampling.index == 0:
            targets = prompt[row.start + 1 : row.end + 1]
            row = row._replace(prompt_targets=targets, sampling=sequence.sampling)
        return row

    def _plan_chunk(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Plan a prompt's chunk, or as much of it as there are blocks for."""
        while num_tokens > 0 and not self._plan_row(step, sequence, num_tokens):
            if not self.config.chunking:
                return
            num_tokens //= 2

    # ---- admission

    def _admit_waiting(self) -> None:
        """Let sequences join: of the keys with most credit first, each up to a step of prompts.

        Where there is no room, they may displace sequences of keys that had more than their share.
        """
        backlog = self._backlog_by_key()
        open_keys = set(self.waiting.keys)
        while open_keys:
            key = min(open_keys, key=self._claim)
            head = self.waiting.line(key)[0]
            if backlog.get(key, 0) >= self.token_limit:
                open_keys.discard(key)
                continue
            reason = self._obstacle(head)
            if reason is None:
                self._admit(head)
                backlog[key] = backlog.get(key, 0) + head.num_remaining
                if not self.waiting.line(key):
                    open_keys.discard(key)
            elif reason is WaitReason.PREEMPTED or not self._displace_for(head):
                if head.wait_reason is not WaitReason.PREEMPTED:
                    head.wait_for(reason, self._now)
                open_keys.discard(key)

    def _backlog_by_key(self) -> dict[str, int]:
        """Prompt tokens of running sequences that no step has computed yet."""
        backlog: dict[str, int] = {}
        for sequence in self.running:
            if sequence.num_remaining > 1:
                key = sequence.key
                backlog[key] = backlog.get(key, 0) + sequence.num_remaining
        return backlog

    def _claim(self, key: str) -> tuple[float, tuple[float, int]]:
        return self._ledger.claim(key), self.waiting.line(key)[0].rank

    def _obstacle(self, sequence: Sequence) -> WaitReason | None:
        if sequence.num_pending:
            return WaitReason.PREEMPTED  # its last sample is still on its way
        if self.running:
            num_slots = self._ledger.num_slots + sequence.num_slots
            if num_slots > self.batch_limit:
                is_full = self.batch_limit == self.max_batch_size
                return WaitReason.BATCH_FULL if is_full else WaitReason.DEGRADED
            if not self.pacer.admits(num_slots, self._expected_context(sequence)):
                return WaitReason.PACING
        room = self.cache.pool.num_free - sum(map(self._blocks_to_come, self.running))
        if self.cache.cost(sequence.block_table, sequence.tokens) > room:
            return WaitReason.NO_BLOCKS
        return None

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks a running sequence still needs for its prompt, or may soon want for its next."""
        return max(
            1, self.cache.blocks_for(len(sequence.tokens)) - len(sequence.block_table.blocks)
        )

    def _expected_context(self, newcomer: Sequence) -> int:
        """The context of the batch once it has grown half way to what its requests ask for."""
        total = 0
        for sequence in (*self.running, newcomer):
            params = sequence.request.params
            total += len(sequence.tokens)
            total += (params.max_tokens - len(sequence.completion.token_ids)) // 2
        return total

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence.key, sequence)
        sequence.admitted(self.cache.match_prefix(sequence.block_table, sequence.tokens))
        sequence.wait_for(None, self._now)
        request = sequence.request
        request.move_to(Status.RUNNING, self._now)
        if request.metrics.started_at is None:
            request.metrics.started_at = self._now
            request.metrics.num_cached_tokens = sequence.num_computed
            if sequence.block_table.salt is not None:
                self._stats.prefix_queries += len(sequence.tokens)
                self._stats.prefix_hits += sequence.num_computed
        self.join(sequence)

    def _displace_for(self, newcomer: Sequence) -> bool:
        """Pre-empt the last sequence of a key that had more than its share, if there is one.

        One that got no token since it was admitted stays, so that each admission is progress.
        """
        victim_key = self._ledger.displaced_by(newcomer.key, newcomer.num_slots)
        if victim_key is None:
            return False
        for sequence in reversed(self.running):
            if sequence.key == victim_key and not sequence.is_fresh:
                self.preempt(sequence, self._now)
                return True
        return False

    def _force_progress(self, step: Step) -> None:
        """Every running sequence lacks blocks: the first takes them from the last."""
        for sequence in list(self.running):
            num_tokens = sequence.num_remaining
            if not num_tokens:
                continue
            if self.config.chunking:
                num_tokens = min(num_tokens, self.token_limit)
            while num_tokens and not self._plan_row(step, sequence, num_tokens):
                if self.running[-1] is sequence:
                    return
                self.preempt(self.running[-1], self._now)
            return


def _last_decoded(sequence: Sequence) -> tuple[float, int]:
    """The step that last sampled for a sequence that lacks one token, of equals first the one that
    had fewer; later for all others."""
    is_decode = sequence.num_remaining == 1
    return (sequence.last_step, sequence.num_steps) if is_decode else (float("inf"), 0)
