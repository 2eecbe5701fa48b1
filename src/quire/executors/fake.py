"""FakeExecutor: a model made of hashes, for tests of everything above an executor.

It keeps tokens in block slots and derives each next token by hashing what it reads through the
block table, so that a block given to two sequences, freed too early or copied too late changes the
output. Its states are running hashes of the tokens: a wrong slot changes the output as well. Time
is virtual, and faults can be put in: rows that yield NaN, steps that raise, hang or run out of
memory.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log

from quire.core.clock import VirtualClock
from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    RowFaultError,
    StepCancelledError,
    StepTimeoutError,
)
from quire.core.plan import (
    NO_STATE,
    Capacity,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    Want,
    allows,
)
from quire.core.sampling import draw_bits
from quire.core.windows import NO_WINDOWS, Windows
from quire.executors.base import (
    BLOCK_SIZE,
    NO_SAMPLING,
    NO_TOKEN_ALLOWED,
    ExecutorBase,
    StepSamples,
    TokenStore,
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Virtual seconds of a step: a + b·tokens + c·context, context counted once a row."""

    a: float = 0.010
    b: float = 0.0001
    c: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        tokens = sum(row.num_new_tokens for row in plan.sequences)
        context = sum(row.end for row in plan.sequences)
        return self.a + self.b * tokens + self.c * context


def _never(_row: SequencePlan) -> bool:
    return False


@dataclass(slots=True)
class Faults:
    """What goes wrong: each is asked about every row (by its plan) of every step."""

    nan: Callable[[SequencePlan], bool] = _never
    raises: Callable[[SequencePlan], bool] = _never
    no_memory: Callable[[SequencePlan], bool] = _never
    hangs: Callable[[SequencePlan], bool] = _never
    heeds_cancel: bool = True
    no_memory_above: int | None = None  # tokens a step


@dataclass(slots=True)
class _Running:
    """A submitted step. `done_at` None: it hangs."""

    plan: StepPlan
    started_at: float
    done_at: float | None
    is_cancelled: bool = False


@dataclass
class FakeExecutor(ExecutorBase):
    """Deterministic, instant, and in the way of a real one: see the module's first lines."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    num_blocks: int = 256
    block_size: int = BLOCK_SIZE
    max_context: int = 4096
    vocabulary_size: int = 1000
    max_batch_size: int = 1024
    max_step_tokens: int = 65536
    cost: StepCost = field(default_factory=StepCost)
    faults: Faults = field(default_factory=Faults)
    plans: list[StepPlan] = field(default_factory=list)  # every plan, where keep_plans is set
    keep_plans: bool = False
    windows: Windows = NO_WINDOWS  # what its layers see
    has_groups: bool = True  # False: one block table for all, whatever they see
    num_states: int = 0  # slots for states
    keeps_states: bool = False  # also without slots: then they are hashed from all tokens

    def __post_init__(self) -> None:
        capacity = Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_context=self.max_context,
            vocabulary_size=self.vocabulary_size,
            max_batch_size=self.max_batch_size,
            max_step_tokens=self.max_step_tokens,
            windows=self.windows if self.has_groups else NO_WINDOWS,
            num_states=self.num_states,
        )
        super().__init__(capacity, is_warm=False, clock=self.clock)
        self._store = TokenStore(self.num_blocks, self.block_size)
        self._free_at = 0.0
        self._samples = StepSamples()
        self._states: dict[int, bytes] = {}  # by slot

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"kv": self._store.num_bytes}

    def submit(self, plan: StepPlan) -> _Running:
        if self.keep_plans:
            self.plans.append(plan)
        started_at = max(self.clock.now(), self._free_at)
        if any(self.faults.hangs(row) for row in plan.sequences):
            return _Running(plan, started_at, None)
        self._free_at = started_at + self.cost.seconds(plan)
        return _Running(plan, started_at, self._free_at)

    def cancel(self, ticket: _Running) -> None:
        ticket.is_cancelled = True
        if self.faults.heeds_cancel and ticket.done_at == self._free_at:  # the last one submitted
            self._free_at = max(ticket.started_at, self.clock.now())

    def collect(self, ticket: _Running, timeout_s: float | None = None) -> StepResult:
        if ticket.is_cancelled and self.faults.heeds_cancel:
            raise StepCancelledError(f"step {ticket.plan.step_id} was cancelled")
        if ticket.done_at is None:
            if timeout_s is None:
                raise AssertionError("the step hangs and nobody set a timeout")
            self.clock.sleep(timeout_s)
            raise StepTimeoutError(f"step {ticket.plan.step_id} took over {timeout_s} s")
        self.clock.advance_to(ticket.done_at)
        self._raise_faults(ticket.plan)
        self._check_slots(ticket.plan)
        for copy in ticket.plan.copies:
            self._store.copy(copy.source, copy.target)
        rows = tuple(self._row(row) for row in ticket.plan.sequences)
        self._samples.remember(ticket.plan.step_id, rows)
        elapsed = ticket.done_at - ticket.started_at
        return StepResult(ticket.plan.step_id, ticket.started_at, elapsed, rows)

    def _raise_faults(self, plan: StepPlan) -> None:
        if any(self.faults.raises(row) for row in plan.sequences):
            raise ExecutorError(f"step {plan.step_id} raised")
        tokens = sum(row.num_new_tokens for row in plan.sequences)
        limit = self.faults.no_memory_above
        if any(self.faults.no_memory(row) for row in plan.sequences) or (
            limit is not None and tokens > limit
        ):
            raise ExecutorMemoryError(f"step {plan.step_id} of {tokens} tokens: out of memory")

    def _check_slots(self, plan: StepPlan) -> None:
        """Rows are computed in any order: none may write what another reads or writes."""
        targets = [row.states[1] for row in plan.sequences if row.states]
        sources = {row.states[0] for row in plan.sequences if row.states}
        if len(set(targets)) < len(targets) or sources & set(targets):
            raise ExecutorError(f"step {plan.step_id}: rows write states {targets} of others")
        unwritten = sources - self._states.keys() - {NO_STATE}
        if unwritten:
            raise ExecutorError(f"step {plan.step_id} reads states {unwritten}, never written")

    def _row(self, row: SequencePlan) -> SequenceResult:
        try:
            row = self._samples.resolved(row)
            self._check_states(row)
        except RowFaultError as error:
            return SequenceResult(row.sequence_id, fault=str(error))
        self._store.write(row.block_table, row.start, row.tokens)
        for group, table in enumerate(row.other_tables, 1):
            self._store.write(table, row.start, [self._marked(t, group) for t in row.tokens])
        if row.states:
            self._states[row.states[1]] = self._state_after(row, row.end)
        scores = self._prompt_scores(row)
        if self.faults.nan(row):
            return SequenceResult(row.sequence_id, fault="the logits are NaN")
        if row.want is Want.NOTHING:
            return SequenceResult(row.sequence_id, prompt_logprobs=scores)
        if row.want is not Want.SAMPLE:
            return SequenceResult(row.sequence_id, fault=f"{row.want.name} is not faked")
        digest = self._digest(row, row.end)
        token = self._choose(row, digest)
        if token is None:
            return SequenceResult(row.sequence_id, fault=NO_TOKEN_ALLOWED)
        assert row.sampling is not None
        logprob = None
        if row.sampling.params.logprobs is not None:
            logprob = self._score(digest, token, row.sampling.params.logprobs)
        return SequenceResult(row.sequence_id, token, logprob, scores)

    def _digest(self, row: SequencePlan, end: int) -> int:
        """A number that every token changes which the position before `end` sees, read through the
        block tables."""
        hasher = blake2b(digest_size=8)
        tables = (row.block_table, *row.other_tables)
        for group, window in enumerate(self.windows):
            first = 0 if window is None else window.first_seen(end - 1)
            own = group if self.has_groups else 0
            seen = self._store.read(tables[own], end, first)
            if own:
                seen = array("q", [self._marked(token, -own) for token in seen])
            hasher.update(seen.tobytes())
        hasher.update(self._state_after(row, end))
        return int.from_bytes(hasher.digest(), "little")

    def _state_after(self, row: SequencePlan, end: int) -> bytes:
        """The state before `end`: from the one that the row starts from and the tokens since, or
        without slots from all tokens."""
        if row.states:
            state = self._states.get(row.states[0], b"")
            tokens = row.tokens[: end - row.start]
        elif self.keeps_states:
            state, tokens = b"", tuple(self._store.read(row.block_table, end))
        else:
            return b""
        for token in tokens:
            state = blake2b(state + token.to_bytes(8, "little"), digest_size=8).digest()
        return state

    def _marked(self, token: int, group: int) -> int:
        """A token as a group keeps it, so that no other group's block passes for its own."""
        return token + group * self.vocabulary_size

    def _choose(self, row: SequencePlan, digest: int) -> int | None:
        sampling = row.sampling
        assert sampling is not None, NO_SAMPLING
        if not sampling.params.is_greedy:
            digest ^= draw_bits(sampling.seed, sampling.index, row.completion_position)
        if row.history is not None:
            digest ^= hash(row.history)
        banned: Iterable[int] = ()
        if row.completion_position < sampling.params.min_tokens:
            banned = sampling.end_token_ids
        mask = row.mask()
        for attempt in range(self.vocabulary_size):
            token = (digest + attempt) % self.vocabulary_size
            if token not in banned and (mask is None or allows(mask, token)):
                return token
        return None

    def _score(self, digest: int, token: int, num_top: int) -> TokenLogprob:
        """Made-up log-probabilities, a function of the context alone."""
        chance = (digest % 997 + 1) / 998
        top = tuple(((token + i) % self.vocabulary_size, log(chance) - i) for i in range(num_top))
        return TokenLogprob(token, log(chance), 1, top)

    def _prompt_scores(self, row: SequencePlan) -> tuple[TokenLogprob, ...]:
        if not row.prompt_targets:
            return ()
        return tuple(
            self._score(self._digest(row, row.start + 1 + i), target, row.num_target_logprobs)
            for i, target in enumerate(row.prompt_targets)
        )
