"""Scheduler: decides which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. Each sequence has tokens and a number of computed
tokens, and catches up a chunk at a time. Running sequences that lack one token (decodes) get it
first; what is left of the step's token budget goes to prompts, in order of rank within a key. How
the budget is split between keys is in fairness.py, how a row is planned in step.py.
"""

from bisect import insort
from collections.abc import Mapping
from functools import partial

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.plan import Capacity
from quire.core.request import Status, WaitReason
from quire.engine.fairness import (
    DeficitRoundRobin,
    Ready,
    StepBudget,
    WaitingQueues,
    is_background,
)
from quire.engine.pacing import BatchingDelay, Pacer, StepTimeModel
from quire.engine.sequence import Sequence
from quire.engine.stats import EngineStats
from quire.engine.step import RowPlanner, Step
from quire.kvcache import KVCache

# Tokens of a sequence in a step, where layers have windows: each windowed group holds the chunks of
# steps that are not collected, beside its window. Other sequences take what is left of the step.
_WINDOWED_CHUNK = 1024


class Scheduler:
    def __init__(self, config: EngineConfig, capacity: Capacity, stats: EngineStats) -> None:
        self.config = config
        self.cache = KVCache(
            capacity.num_blocks,
            capacity.block_size,
            prefix_reuse=config.prefix_reuse,
            windows=capacity.windows,
            num_states=capacity.num_states,
        )
        self.waiting = WaitingQueues()
        self.parked: set[Sequence] = set()  # their readers do not keep up
        self.running: list[Sequence] = []  # by rank
        self.max_batch_size = config.batch_size(capacity)
        self.max_step_tokens = min(config.max_step_tokens, capacity.max_step_tokens)
        self.batch_limit = self.max_batch_size  # Backoff's, by set_limits(): lowered on failures
        self.token_limit = self.max_step_tokens  # likewise: lowered while memory is short
        self.wake_at: float | None = None  # when the batching delay ends
        self._model = StepTimeModel()
        self._pacer = Pacer(config, self._model)
        self._delay = BatchingDelay(config.batch_timeout_ms / 1000)
        self._shares = DeficitRoundRobin(config.key_weights, self.max_step_tokens)
        self._max_chunk = _WINDOWED_CHUNK if self.cache.has_windows else None
        self._budget = StepBudget(config, self._pacer, self._shares, self._max_chunk)
        self._planner = RowPlanner(self.cache, chunking=config.chunking)
        self._stats = stats
        self._next_step_id = 1
        self._last_collected = 0
        self._now = 0.0
        self._is_idle = True
        # Blocks that the running sequences still need, while sequences are admitted: a sum over
        # all of them for each that waits would be quadratic.
        self._num_reserved: int | None = None

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        self._shares.set_weights(weights)

    def set_limits(self, batch_limit: int, token_limit: int) -> None:
        """How large steps may be while batches fail or memory is short."""
        self.batch_limit = batch_limit
        self.token_limit = token_limit

    def request_arrived(self, now: float) -> None:
        """The request that was queued last arrived at this time."""
        self._delay.arrived(now, len(self.running) + len(self.waiting))

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Learn how long steps take; a step was collected."""
        self._last_collected = max(step.id, self._last_collected)
        self._model.observe(step.num_tokens, step.context, elapsed_s)

    def take_failed(self) -> list[tuple[Sequence, QuireError]]:
        """Sequences that failed while they were planned, since the last call."""
        return self._planner.take_failed()

    # ---- queues and the batch

    def enqueue(self, sequence: Sequence, reason: WaitReason, now: float) -> None:
        sequence.wait_for(reason, now)
        self.waiting.push(sequence.key, sequence)

    def join(self, sequence: Sequence) -> None:
        """Put a sequence among the running, with the slots of the batch it takes."""
        sequence.joined_batch()
        insort(self.running, sequence, key=lambda running: running.rank)
        self._shares.reserve_slots(sequence.key, sequence.num_slots)
        if self._num_reserved is not None:
            self._num_reserved += self._blocks_to_come(sequence)

    def _leave(self, sequence: Sequence) -> None:
        sequence.left_batch()
        self._num_reserved = None
        self.running.remove(sequence)
        self._shares.reserve_slots(sequence.key, -sequence.num_slots)

    def release_slots(self, sequence: Sequence) -> None:
        """Hand back the slots a sequence reserved for its siblings."""
        if sequence.is_running:
            self._shares.reserve_slots(sequence.key, 1 - sequence.num_slots)
        sequence.reserve_slots(1)

    def remove(self, sequence: Sequence, now: float, *, faulted: bool = False) -> None:
        """Take an ended sequence out of the batch or its queue, and free its blocks."""
        if sequence.is_running:
            self._leave(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.waiting.remove(sequence.key, sequence)
        sequence.wait_for(None, now)
        sequence.lost_blocks()
        if faulted:
            self.cache.free_faulted(sequence.block_table)
        else:
            self.cache.free(sequence.block_table)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence's blocks; it is computed again when it is next admitted."""
        self._leave(sequence)
        self.free_blocks(sequence)
        sequence.request.metrics.num_preemptions += 1
        self._stats.num_preemptions += 1
        sequence.request.move_to(Status.PREEMPTED, now)
        self.enqueue(sequence, WaitReason.PREEMPTED, now)

    def free_blocks(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back; what it computed counts no longer."""
        self.cache.free(sequence.block_table)
        sequence.lost_blocks()

    def roll_back(self, sequence: Sequence, start: int) -> None:
        """What was planned of a sequence from `start` on was not computed."""
        sequence.rolled_back(start)
        self.cache.drop_states(sequence.block_table, start)

    def park(self, sequence: Sequence, now: float) -> None:
        """Keep a sequence out of the batch and of its queue until unpark()."""
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
        self._is_idle = is_idle
        self.wake_at = None
        if is_idle and self._delays_batch():
            return None
        if self.waiting:
            self._admit_waiting()
        step = Step(self._next_step_id, planned_at=now)
        self._fill(step)
        if is_idle and not step.rows:
            self._force_progress(step)
        if not step.rows:
            return None
        if self.config.fairness:
            self._charge(step)
        self._next_step_id += 1
        return step

    def new_step_id(self) -> int:
        """An id for a step made of parts of another."""
        self._next_step_id += 1
        return self._next_step_id - 1

    def _delays_batch(self) -> bool:
        """Whether an idle engine waits for more requests to batch; until wake_at."""
        if self.running or not self.waiting:
            return False
        sequences = list(self.waiting)
        if sum(sequence.num_slots for sequence in sequences) >= self.batch_limit:
            return False
        oldest = min(sequence.request.metrics.arrived_at for sequence in sequences)
        self.wake_at = self._delay.wait_until(self._now, oldest, len(sequences))
        if self.wake_at is None:
            return False
        for sequence in sequences:
            sequence.wait_for(WaitReason.BATCHING_DELAY, self._now)
        return True

    def _fill(self, step: Step) -> None:
        """Give each ready sequence its tokens of the step, within the budget."""
        decodes, chunks = self._budget.split(self._ready(), self.token_limit)
        self._planner.plan_decodes(step, decodes, self._plan_decode)
        for sequence, num_tokens in chunks.items():
            if sequence.is_running:
                self._planner.plan_chunk(step, sequence, num_tokens)

    def _ready(self) -> Ready:
        """Running sequences that lack tokens, within the limits on the batch."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        num_cached = 0
        limit = min(self.batch_limit, self.token_limit)
        for sequence in self.running[:limit]:
            num_computed = sequence.num_computed
            length = len(sequence.tokens) + sequence.num_pending
            if sequence.grammar is not None and not sequence.grammar.is_ready:
                continue  # the step's other rows would wait for its mask
            if length == num_computed + 1:
                if length == sequence.max_length:
                    continue  # its last token is pending
                if sequence.num_pending and sequence.needs_last_token:
                    continue  # DRY's penalties depend on the pending token
                grammar = sequence.grammar
                if sequence.num_pending and grammar is not None and grammar.is_slow:
                    continue  # its mask would begin with the pending token, and hold the step
                decodes.append(sequence)
                num_cached += num_computed
            elif length > num_computed:
                prompts.append(sequence)
        for sequence in self.running[limit:]:
            sequence.wait_for(WaitReason.DEGRADED, self._now)
        return Ready(decodes, prompts, num_cached)

    def _plan_decode(self, step: Step, sequence: Sequence) -> None:
        """Where blocks run out, the last running sequence is pre-empted for them."""
        while not self._planner.plan_row(step, sequence, 1):
            victim = self.running[-1]
            if victim is sequence and self._gets_blocks_back(sequence):
                return
            self.preempt(victim, self._now)
            if victim is sequence:
                return

    def _gets_blocks_back(self, sequence: Sequence) -> bool:
        """Whether a step in flight may move the sequence's windows on, and so free blocks."""
        is_in_flight = not self._is_idle and sequence.last_step > self._last_collected
        return is_in_flight and self.cache.has_windows

    def _force_progress(self, step: Step) -> None:
        """Every running sequence lacks blocks: the first takes them from the last."""
        for sequence in list(self.running):
            num_tokens = sequence.num_remaining
            if not num_tokens:
                continue
            if self.config.chunking:
                num_tokens = min(num_tokens, self.token_limit)
            while num_tokens and not self._planner.plan_row(step, sequence, num_tokens):
                if self.running[-1] is sequence:
                    return
                self.preempt(self.running[-1], self._now)
            return

    def _charge(self, step: Step) -> None:
        """Charge each key for its tokens of the step, unless there is one key alone."""
        if self._shares.num_keys + len(self.waiting.keys) < 2:
            return
        served: dict[str, int] = {}
        for row in step.rows:
            key = row.sequence.key
            num_tokens = len(row.plan.tokens) + (row.plan.follows is not None)
            served[key] = served.get(key, 0) + num_tokens
        self._shares.charge(served, self.waiting.keys)

    # ---- admission to the batch

    def _admit_waiting(self) -> None:
        """Admit sequences, keys with most credit first, each key up to a step of prompt tokens.

        Where there is no room, they may pre-empt sequences of keys above their share. The
        background waits while anybody else does.
        """
        self._num_reserved = None
        backlog = self._backlog_by_key()
        open_keys = set(self.waiting.keys)
        while open_keys:
            key = min(open_keys, key=self._precedence)
            if is_background(key) and self.waiting.load(background=False).num_sequences:
                return
            head = self.waiting.queue(key)[0]
            if backlog.get(key, 0) >= self.token_limit:
                open_keys.discard(key)
                continue
            reason = self._reason_to_wait(head)
            if reason is None:
                self._admit(head)
                backlog[key] = backlog.get(key, 0) + head.num_remaining
                if not self.waiting.queue(key):
                    open_keys.discard(key)
            elif reason is WaitReason.PREEMPTED or not self._preempt_for(head):
                if head.wait_reason is not WaitReason.PREEMPTED:
                    head.wait_for(reason, self._now)
                open_keys.discard(key)

    def _backlog_by_key(self) -> dict[str, int]:
        """Prompt tokens of running sequences that no step has been planned for."""
        backlog: dict[str, int] = {}
        for sequence in self.running:
            if sequence.num_remaining > 1:
                key = sequence.key
                backlog[key] = backlog.get(key, 0) + sequence.num_remaining
        return backlog

    def _precedence(self, key: str) -> tuple[bool, float, tuple[float, int]]:
        return is_background(key), self._shares.precedence(key), self.waiting.queue(key)[0].rank

    def _reason_to_wait(self, sequence: Sequence) -> WaitReason | None:
        """Why a waiting sequence cannot join the batch now; None: it can."""
        if sequence.num_pending:
            return WaitReason.PREEMPTED  # its pending sample must be collected first
        if self.running:
            num_slots = self._shares.num_slots + sequence.num_slots
            if num_slots > self.batch_limit:
                is_full = self.batch_limit == self.max_batch_size
                return WaitReason.BATCH_FULL if is_full else WaitReason.DEGRADED
            if not self._pacer.admits(num_slots, partial(self._expected_context, sequence)):
                return WaitReason.PACING
        if self._num_reserved is None:
            self._num_reserved = sum(map(self._blocks_to_come, self.running))
        headroom = self.cache.pool.num_free - self._num_reserved
        # One that runs alone is given smaller chunks where blocks are few.
        chunk = self._largest_chunk if self.running else self.config.smallest_chunk
        if self.cache.admission_cost(sequence.block_table, sequence.tokens, chunk) > headroom:
            return WaitReason.NO_BLOCKS
        return None

    @property
    def _largest_chunk(self) -> int:
        """Tokens of a sequence that steps not yet collected may hold."""
        each = min(self.token_limit, self._max_chunk or self.token_limit)
        return max(self.config.smallest_chunk, each * (1 + self.config.plan_ahead))

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks a running sequence still needs for its known tokens; at least one of each group
        to grow into."""
        peak = self.cache.peak_blocks(len(sequence.tokens), self._largest_chunk)
        return max(len(self.cache.windows), peak - sequence.block_table.num_held)

    def _expected_context(self, newcomer: Sequence) -> int:
        """The batch's context when each completion is half way to its greatest length."""
        total = 0
        for sequence in (*self.running, newcomer):
            length = len(sequence.tokens)
            total += length + (sequence.max_length - length) // 2
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
            if not request.is_background:
                self._pacer.prompt_admitted(sequence.num_remaining)
        self.join(sequence)

    def _preempt_for(self, newcomer: Sequence) -> bool:
        """Pre-empt the last sequence of a key above its share, if there is one.

        One that got no token since it was admitted stays, so that each admission is progress; but
        for the background, which others need not wait for.
        """
        victim_key = self._shares.victim_key(newcomer.key, newcomer.num_slots)
        if victim_key is None:
            return False
        for sequence in reversed(self.running):
            gives_way = sequence.request.is_background and not newcomer.request.is_background
            if sequence.key == victim_key and (gives_way or not sequence.is_newly_admitted):
                self.preempt(sequence, self._now)
                return True
        return False
