"""Executor: the contract between the engine and whatever computes its steps; and ExecutorBase: what
all executors share, such as capacity, checks of plans and past samples."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from quire.core.clock import Clock, RealClock
from quire.core.errors import ConfigError, ExecutorError, RowFaultError
from quire.core.plan import (
    NO_STATE,
    Capacity,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    Want,
)
from quire.core.windows import NO_WINDOWS, Windows, longest_context

BLOCK_SIZE = 16  # tokens of a KV-cache block; the native and the CUDA kernels have no other
STEPS_REMEMBERED = 8  # steps whose samples later rows may follow

# Faults of rows; native/sampler.cpp and native/step.cpp have the same texts.
NO_SAMPLING = "a sample is wanted, but the row has no sampling parameters"
HIDDEN_NOT_FINITE = "the hidden state is not finite"
LOGITS_NOT_FINITE = "the logits are not finite"
LOGITS_INFINITE = "the penalties make the logits infinite"
NO_TOKEN_ALLOWED = "the mask allows no token"

_UNWRITTEN = -1
_SMALLEST_CHUNK = 1  # tokens that a sequence must be able to compute at once

Ticket = Any  # an executor's own handle on a submitted step


class Executor(Protocol):
    """Computes plans in two phases, so that the engine can plan a step while one runs.

    Steps take effect in the order they were submitted, block copies before rows. Submitting any
    part of a plan again gives the same results: a row writes only positions from its `start` on,
    and always the same bytes; the slot of the state that it writes is not the one that it reads. A
    row's result depends on that row alone.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def kernels(self) -> Sequence[str]:
        """Names of the kernels that run, for receipts; empty where there are none to name."""

    @property
    def fallback(self) -> str | None:
        """Why slower kernels than usual run; None where the usual ones do."""

    @property
    def is_warm(self) -> bool: ...

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Memory in use, by kind: weights, kv, workspace."""

    def warm_up(self) -> None:
        """Compile, capture and touch what the first step would otherwise wait for."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step; `SequencePlan.follows` may name a step not collected yet."""

    def collect(self, ticket: Ticket, timeout_s: float | None = None) -> StepResult:
        """Wait for a step. A fault of one sequence is in its row of the result; what raises
        (ExecutorError) concerns the whole step. StepTimeoutError: not done yet, may be asked again.
        """

    def cancel(self, ticket: Ticket) -> None:
        """Raise the step's cancel flag, from any thread; collect then raises StepCancelledError."""

    def close(self) -> None: ...


class ModelSizes(Protocol):
    """What is needed of a ModelSpec, whose module imports numpy: the engine does without."""

    @property
    def context_length(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...


def context_in(windows: Windows, num_blocks: int, limit: int, block_size: int = BLOCK_SIZE) -> int:
    """The longest context, up to a limit, that a sequence can come to in so many blocks."""
    return longest_context(windows, block_size, num_blocks, limit, chunk=_SMALLEST_CHUNK)


def model_capacity(
    spec: ModelSizes,
    num_blocks: int,
    max_batch_size: int,
    max_step_tokens: int,
    block_size: int = BLOCK_SIZE,
    windows: Windows = NO_WINDOWS,
    num_states: int = 0,
) -> Capacity:
    """The capacity of an executor that runs this model with so many blocks.

    `windows`: of the groups into which it divides the layers; without any, one table is for all.
    `num_states`: slots for states, of a model whose layers keep any.
    """
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=context_in(windows, num_blocks, spec.context_length, block_size),
        vocabulary_size=spec.vocabulary_size,
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        windows=windows,
        num_states=num_states,
    )


class ExecutorBase:
    """The part of the Executor protocol that does not depend on how steps are computed."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        kernels: Sequence[str] = (),
        fallback: str | None = None,
        is_warm: bool = True,  # False: warm_up() must be called before the first step
        clock: Clock | None = None,
    ) -> None:
        self.capacity = capacity
        self.kernels = list(kernels)
        self.fallback = fallback
        self.is_warm = is_warm
        self._clock = clock or RealClock()
        self._is_closed = False

    def warm_up(self) -> None:
        """Nothing to compile or capture, unless an executor says otherwise."""
        self.is_warm = True

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ExecutorError("the executor is closed")

    def _check_copies(self, plan: StepPlan) -> None:
        """Raise an ExecutorError where a copy is from or to a block that there is not."""
        num_blocks = self.capacity.num_blocks
        for copy in plan.copies:
            if not (0 <= copy.source < num_blocks and 0 <= copy.target < num_blocks):
                raise ExecutorError(
                    f"step {plan.step_id} copies block {copy.source} to {copy.target}, but there "
                    f"are {num_blocks} blocks"
                )

    def _check_row(self, row: SequencePlan, end: int) -> None:
        """Raise a RowFaultError where a row would leave vocabulary, context or blocks, or lacks how
        to sample; `end` is row.end. The native decoder makes the same checks; its messages may
        differ."""
        capacity = self.capacity
        if row.want is Want.SAMPLE and row.sampling is None:
            raise RowFaultError(NO_SAMPLING)
        for token in (*row.tokens, *row.prompt_targets):
            if not 0 <= token < capacity.vocabulary_size:
                raise RowFaultError(
                    f"token {token} is outside the vocabulary of {capacity.vocabulary_size}"
                )
        if end <= row.start or row.start < 0 or end > capacity.max_context:
            raise RowFaultError(
                f"positions {row.start} to {end} are not within the context of "
                f"{capacity.max_context}"
            )
        tables = (row.block_table, *row.other_tables)
        if len(tables) != len(capacity.windows):
            raise RowFaultError(
                f"the row has {len(tables)} block tables for {len(capacity.windows)} groups"
            )
        for table, window in zip(tables, capacity.windows, strict=True):
            first = 0 if window is None else window.first_seen(row.start)
            self._check_table(table, first, end)
        self._check_states(row)

    def _check_table(self, table: Sequence[int], first: int, end: int) -> None:
        """Whether a block table has the positions first..end."""
        num_blocks, size = self.capacity.num_blocks, self.capacity.block_size
        if len(table) * size < end:
            raise RowFaultError(f"{len(table)} blocks do not hold {end} positions")
        blocks = table[first // size : -(-end // size)]
        if min(blocks) < 0 or max(blocks) >= num_blocks:
            raise RowFaultError(f"the block table {blocks} leaves the {num_blocks} blocks")

    def _check_states(self, row: SequencePlan) -> None:
        """Whether a row has the state that it starts from, and another to write."""
        num_states = self.capacity.num_states
        if len(row.states) != (2 if num_states else 0):
            raise RowFaultError(
                f"the row has {len(row.states)} states; of {num_states} slots it should have "
                + ("one to read and one to write" if num_states else "none")
            )
        if not num_states:
            return
        source, target = row.states
        is_there = source == NO_STATE if row.start == 0 else 0 <= source < num_states
        if not is_there or not 0 <= target < num_states or source == target:
            raise RowFaultError(
                f"the row starts at {row.start} from state {source} and writes state {target}, of "
                f"{num_states} slots"
            )


class StepSamples:
    """What the last steps sampled, for rows that follow them."""

    def __init__(self) -> None:
        self._samples: OrderedDict[int, dict[int, int]] = OrderedDict()  # by step, by sequence

    def resolved(self, plan: SequencePlan) -> SequencePlan:
        """The row with the sample it follows; RowFaultError where there was none."""
        if plan.follows is None:
            return plan
        sampled = self._samples.get(plan.follows, {}).get(plan.sequence_id)
        if sampled is None:
            raise no_sample(plan.follows)
        return plan.resolved(sampled)

    def remember(self, step_id: int, results: Iterable[SequenceResult]) -> None:
        """Keep what was sampled; a part of a step that is run again adds to what it gave before."""
        samples = self._samples.setdefault(step_id, {})
        samples.update((r.sequence_id, r.token) for r in results if r.token is not None)
        while len(self._samples) > STEPS_REMEMBERED:
            self._samples.popitem(last=False)


def no_sample(step_id: int) -> RowFaultError:
    """The fault of a row that follows a step which has no token for it."""
    return RowFaultError(f"step {step_id} sampled no token for this sequence")


class TokenStore:
    """A KV cache that holds tokens, for executors without a model of their own: written and read
    through block tables only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots = array("q", [_UNWRITTEN]) * (num_blocks * block_size)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self._slots.itemsize

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        size = self.block_size
        for position, token in enumerate(tokens, start):
            self._slots[table[position // size] * size + position % size] = token

    def read(self, table: Sequence[int], end: int, start: int = 0) -> "array[int]":
        """The tokens at positions start..end."""
        size = self.block_size
        first = start // size
        found = array("q")
        for block in table[first : -(-end // size)]:
            found += self._slots[block * size : (block + 1) * size]
        return found[start - first * size : end - first * size]

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        self._slots[target * size : (target + 1) * size] = self._slots[
            source * size : (source + 1) * size
        ]
