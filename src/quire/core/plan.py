"""What the engine asks of an executor in one step, and what comes back: plain data, both ways.

Rows are named tuples, not frozen dataclasses: a step of 256 sequences builds 256 of each, and a
named tuple costs a quarter as much to make. SequencePlan is the one definition of a row's fields.
Three places depend on it beyond Python's names, and all check it when they are imported: the fast
path of engine/step.py makes rows by position and executors/cuda/step_input.py reads them by column
(`check_fields`), native/bind_decoder.cpp finds the fields by name (`bind_plan_types`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from quire.core.lazy_event import LazyEvent
from quire.core.sampling import SamplingParams
from quire.core.windows import NO_WINDOWS, Windows

NO_BLOCK = -1  # in a block table: what was there is out of the window, and the row never reads it
NO_STATE = -1  # the state before any token: zeros, in no slot


class Want(IntEnum):
    """What a row is computed for."""

    NOTHING = 0  # only its keys and values: a chunk that ends inside the prompt
    SAMPLE = 1  # the next token
    LOGITS = 2  # the logits at every new position
    POOLED = 3  # the hidden state after the last new position


class Breakers(NamedTuple):
    """DRY's sequence breakers as tokens: those that hold a breaker, and by tokens that end with the
    beginning of one the tokens that complete it."""

    tokens: frozenset[int]
    tails: Mapping[int, tuple[tuple[int, ...], ...]]


NO_BREAKERS = Breakers(frozenset(), {})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence's tokens are chosen; the same object in every step of its life."""

    params: SamplingParams
    seed: int
    index: int  # of the sequence within its request
    end_token_ids: tuple[int, ...] = ()  # forbidden before params.min_tokens
    breakers: Breakers = NO_BREAKERS  # of params.dry_sequence_breakers


class History(NamedTuple):
    """The tokens that penalties look at; a pending sample (SequencePlan.follows) comes after."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def last(self, count: int) -> tuple[int, ...]:
        """The last tokens of prompt and completion together; -1: all of them."""
        if 0 <= count <= len(self.completion):
            return self.completion[len(self.completion) - count :]
        tokens = self.prompt + self.completion
        return tokens if count < 0 else tokens[max(0, len(tokens) - count) :]

    def needed_by(self, params: SamplingParams) -> "History":
        """Without the tokens that the parameters' samplers do not look at."""
        length = params.history_length
        needs_prompt = params.repetition_penalty != 1.0 or params.repeat_last_n is not None
        if not needs_prompt and "dry" not in params.order:
            return History((), self.completion)
        if length is None:
            return self
        num_prompt = max(0, length - len(self.completion))
        prompt = self.prompt[max(0, len(self.prompt) - num_prompt) :] if num_prompt else ()
        return History(prompt, self.completion[max(0, len(self.completion) - length) :])


class MaskRow(NamedTuple):
    """A mask among those that were computed with it."""

    bits: Any  # array [masks, words]: int32, the lowest bit first
    row: int


class PendingMask(Protocol):
    """A grammar mask that is computed while the step's layers are; needed when a row is sampled."""

    def result(self) -> bytes:
        """Wait for it. Never raises: a mask that cannot be computed allows nothing."""

    def row(self) -> MaskRow | None:
        """Wait for it, and say where it is instead of copying it; None: result() alone has it."""


class FollowingMasks:
    """The masks of a step's rows that follow samples: each depends on such a token, and is given
    once that is known, while the step is under way."""

    def __init__(self) -> None:
        self._given: dict[int, bytes | PendingMask | None] = {}  # by sequence
        self._is_settled = LazyEvent()

    def give(self, sequence_id: int, mask: bytes | PendingMask | None) -> None:
        """None: any token may come."""
        self._given[sequence_id] = mask

    def settle(self) -> None:
        """No more are given: nobody wants the other rows, and the step must not wait for them."""
        self._is_settled.set()

    def of(self, sequence_id: int) -> bytes | PendingMask | None:
        """What was given, once all are; a row that nobody wants is allowed nothing."""
        self._is_settled.wait()
        return self._given.get(sequence_id, b"")


class SequencePlan(NamedTuple):
    """One sequence's chunk of a step.

    The new tokens are `tokens`, then, where `follows` names a step, what that step samples for this
    sequence. They take the positions from `start` on; what they attend to lies in `block_table`,
    and for layers of other groups than the first in `other_tables`, one for each group. Entry i of
    a table is the block of positions i * block_size on.
    """

    sequence_id: int
    start: int
    tokens: tuple[int, ...]
    follows: int | None
    block_table: tuple[int, ...]
    want: Want
    sampling: Sampling | None = None  # for a sample, or for how to score prompt_targets
    completion_position: int = 0  # of the token to sample: 0 for the first after the prompt
    history: History | None = None  # only where sampling.params.needs_history
    # Grammar mask: bit t of the little-endian bit string allows t. Within a process it may also be
    # a PendingMask, or the step's FollowingMasks; see mask().
    allowed: Any = None
    prompt_targets: tuple[int, ...] = ()  # score these as the tokens after each new position
    other_tables: tuple[tuple[int, ...], ...] = ()  # of the groups after the first
    # Of a model whose layers keep states: the slot that holds the sequence's state after `start`
    # tokens (NO_STATE where start is 0), and the slot that the step writes the state after `end`
    # tokens to. They differ, and no other row writes them before the step is collected, so that it
    # can be run again.
    states: tuple[int, ...] = ()

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) + (self.follows is not None)

    @property
    def end(self) -> int:
        """One past the last new position."""
        return self.start + self.num_new_tokens

    @property
    def num_target_logprobs(self) -> int:
        """How many of the likeliest tokens come with each prompt target's log-probability."""
        return 0 if self.sampling is None else self.sampling.params.prompt_logprobs or 0

    @property
    def has_mask(self) -> bool:
        """Whether mask() returns at once."""
        return self.allowed is None or isinstance(self.allowed, bytes)

    def mask(self) -> bytes | None:
        """The grammar mask, waited for where it is not there yet."""
        given = self.given_mask()
        return given if given is None or isinstance(given, bytes) else given.result()

    def given_mask(self) -> bytes | PendingMask | None:
        """The same before it is computed; waited for where it depends on a token."""
        allowed: bytes | PendingMask | FollowingMasks | None = self.allowed
        return allowed.of(self.sequence_id) if isinstance(allowed, FollowingMasks) else allowed

    def resolved(self, sampled: int) -> "SequencePlan":
        """The same row once the sample it follows is known."""
        history = self.history
        if history is not None:
            history = history._replace(completion=(*history.completion, sampled))
        return self._replace(tokens=(*self.tokens, sampled), follows=None, history=history)


def check_fields(row_type: type[NamedTuple], names: tuple[str, ...]) -> None:
    """For a module that makes rows by position: raise a TypeError when it is imported unless the
    row's fields are these, in this order."""
    if row_type._fields != names:
        raise TypeError(
            f"rows are made by position as {', '.join(names)}, but the fields of "
            f"{row_type.__name__} are {', '.join(row_type._fields)}"
        )


class BlockCopy(NamedTuple):
    """Copy a whole block of keys and values before the step's rows are computed."""

    source: int
    target: int


class StepPlan(NamedTuple):
    """One step: block copies first, then every row, in one pass over the model."""

    step_id: int
    sequences: tuple[SequencePlan, ...]
    copies: tuple[BlockCopy, ...] = ()


class TokenLogprob(NamedTuple):
    """A token's log-probability, its rank (1 is the likeliest), and the likeliest beside it."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SequenceResult(NamedTuple):
    """What one row gave: what was wanted, or a fault of this sequence alone."""

    sequence_id: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits: Any = None  # array [new tokens, vocabulary] for Want.LOGITS
    pooled: Any = None  # array [hidden] for Want.POOLED
    fault: str | None = None


class StepResult(NamedTuple):
    """One collected step; its rows stand in the plan's order."""

    step_id: int
    started_at: float  # on the executor's clock
    elapsed_s: float
    sequences: tuple[SequenceResult, ...]
    padding_tokens: int = 0  # computed for nobody


class Capacity(NamedTuple):
    """What an executor can hold and do in a step."""

    num_blocks: int
    block_size: int
    max_context: int
    vocabulary_size: int
    max_batch_size: int
    max_step_tokens: int
    windows: Windows = NO_WINDOWS  # of each group of layers that share a block table
    num_states: int = 0  # slots for states; 0: the model keeps none


def allows(mask: bytes, token: int) -> bool:
    """Whether a grammar mask allows a token."""
    byte = token >> 3
    return byte < len(mask) and bool(mask[byte] >> (token & 7) & 1)
