"""Sequence: the prompt and one completion of a live request, how far it is computed, and the text
of its tokens up to a stop string (Transcript).

    tokens          prompt ................ completion ....
    known           ├──────────────────────────────────────┤   len(tokens)
    computed        ├───────────────────────────┤              planned or done
    pending                                                ├┤  sampled by steps not collected yet

A sequence can be planned while its computed tokens are fewer than known + pending.

Fields are assigned here alone: everybody else calls a method, which keeps the invariants
    0 <= num_pending
    num_computed <= len(tokens) + num_pending
    completion.token_ids == tokens[prompt_length:], until a stop token is left out of it
(tests/engine/test_state.py holds that).
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.core.plan import Breakers, FollowingMasks, PendingMask, Sampling, TokenLogprob, Want
from quire.core.request import Completion, FinishReason, Request, WaitReason
from quire.core.sampling import SamplingParams
from quire.kvcache import BlockTable

# ---- from tokens to text


class Detokenizer(Protocol):
    """Turns tokens into text one by one, never splitting a character."""

    def add(self, token: int) -> str: ...

    def flush(self) -> str:
        """What is left when no more tokens come."""


class Grammar(Protocol):
    """Holds a completion to a constraint; one for each sequence."""

    def allowed(self) -> bytes | PendingMask | None:
        """The mask of tokens that may come next (see SequencePlan.allowed); None: all may."""

    def accept(self, token: int) -> None: ...

    @property
    def is_ready(self) -> bool:
        """False while a step would have to wait long for the mask."""

    @property
    def is_slow(self) -> bool:
        """Whether its masks take long: then none is begun while a step is under way."""

    @property
    def failure(self) -> str | None:
        """Why a mask could not be computed."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""


class MakeDetokenizer(Protocol):
    def __call__(self, *, skip_special: bool, spelled: SequenceOf[int]) -> Detokenizer:
        """`skip_special`: control tokens are no part of the text, but for those in `spelled`."""


MakeGrammar = Callable[[SamplingParams], Grammar]
MakeBreakers = Callable[[tuple[str, ...]], Breakers]


class NewText(NamedTuple):
    """Text that became certain, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None = None


class Transcript:
    """The text of one sequence; withholds an end that may begin a stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...], *, include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._withheld = ""
        # The text that a token adds, where no stop string can withhold or end it.
        self.plain_text = None if stop else detokenizer.add

    def add(self, token: int, *, may_stop: bool) -> NewText:
        return self._release(self._detokenizer.add(token), may_stop=may_stop)

    def add_all(self, tokens: Iterable[int], min_tokens: int) -> str:
        """The text of a completion's first tokens, which did not stop it."""
        return "".join(
            [
                self.add(token, may_stop=count >= min_tokens).text
                for count, token in enumerate(tokens, start=1)
            ]
        )

    def finish(self) -> NewText:
        """The sequence ended for another reason: the withheld text is released."""
        released = self._release(self._detokenizer.flush(), may_stop=True)
        if released.stopped_by is None:
            released = NewText(released.text + self._withheld)
        self._withheld = ""
        return released

    def _release(self, fresh: str, *, may_stop: bool) -> NewText:
        if not self._stop:
            return NewText(fresh)
        text = self._withheld + fresh
        if not may_stop:
            self._withheld = ""
            return NewText(text)
        found = min(((text.find(s), s) for s in self._stop if s in text), default=None)
        if found is not None:
            self._withheld = ""
            at, stop = found
            return NewText(text[: at + len(stop) if self._include_stop else at], stop)
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._withheld = text[len(text) - keep :]
        return NewText(text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


# ---- sequences


@dataclass(slots=True)
class LiveRequest:
    """A request the engine is working on, with its sequences."""

    request: Request
    wants_pieces: bool
    sequences: list["Sequence"] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    pooled: Any = None  # hidden state, of a request for that instead of tokens
    is_paused: bool = False

    @property
    def num_open(self) -> int:
        return sum(not sequence.is_done for sequence in self.sequences)

    def add_sequence(self, sequence: "Sequence") -> None:
        self.sequences.append(sequence)

    def add_prompt_logprobs(self, start: int, scores: SequenceOf[TokenLogprob]) -> None:
        """Add scores of the positions after `start`, less those that a chunk run again repeats."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(scores[len(self.prompt_logprobs) - start :])

    def set_pooled(self, state: Any) -> None:
        self.pooled = state

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. `rank` orders it among all: lower is more important."""

    id: int
    live: LiveRequest
    sampling: Sampling
    completion: Completion
    tokens: list[int]
    block_table: BlockTable
    rank: tuple[float, int]
    key: str  # of its queue: its request's, or one for all without fairness
    transcript: Transcript | None = None
    grammar: Grammar | None = None
    # Of the step that has a row of it which follows a pending sample.
    following_masks: FollowingMasks | None = None
    goal: Want = Want.SAMPLE  # what its last known token is computed for
    stop_token_ids: frozenset[int] = frozenset()
    prompt_length: int = 0
    max_length: int = 0  # tokens it may come to
    num_slots: int = 1  # of the batch: its own and those reserved for siblings
    num_computed: int = 0
    num_pending: int = 0
    # From num_computed up to here positions can be written without asking the cache for blocks.
    num_writable: int = 0
    last_step: int = 0  # the last with a row of it; it samples the token that is pending
    last_token_at: float = 0.0  # 0: it has none yet
    num_steps: int = 0  # that computed a row of it
    epoch: int = 0  # counts the times that it lost its blocks
    is_done: bool = False
    is_running: bool = False
    is_newly_admitted: bool = False  # no token since it was admitted
    has_row_extras: bool = False  # its rows carry history, a mask or prompt targets
    has_short_extras: bool = False  # of these a mask, a history or both, and nothing else
    needs_history: bool = False
    is_plain: bool = False  # no stop strings: see sampled_plainly()
    needs_last_token: bool = False  # a row is planned when the token before its sample is known
    wait_reason: WaitReason | None = None
    wait_since: float = 0.0

    @property
    def request(self) -> Request:
        return self.live.request

    @property
    def has_siblings_to_come(self) -> bool:
        """Whether others will start from its prompt, and compute the last token of it again."""
        return self.num_slots > 1

    @property
    def num_remaining(self) -> int:
        """Tokens, known or pending, that no step has been planned for."""
        return len(self.tokens) + self.num_pending - self.num_computed

    # ---- in the scheduler

    def joined_batch(self) -> None:
        """It is in the batch from now on."""
        self.is_running = True

    def left_batch(self) -> None:
        """It is in the batch no longer."""
        self.is_running = False

    def reserve_slots(self, count: int) -> None:
        """Take `count` slots of the batch: its own and those of siblings to come."""
        self.num_slots = count

    def admitted(self, num_cached: int) -> None:
        """It starts after a cached prefix; the last token is always computed, for its logits."""
        self.num_computed = min(num_cached, len(self.tokens) - 1)
        self.num_writable = 0
        self.is_newly_admitted = True

    def made_writable(self, num_positions: int) -> None:
        """Positions from num_computed up to so many are in blocks that it alone has."""
        self.num_writable = num_positions

    def planned(self, end: int, step_id: int, samples: bool) -> None:
        """A step computes its positions up to `end`, and samples the token after them."""
        self.num_computed = end
        self.last_step = step_id
        if samples:
            self.num_pending += 1

    def lost_blocks(self) -> None:
        """Its blocks are gone, and with them what was computed; rows in flight are outdated."""
        self.epoch += 1
        self.num_computed = self.num_writable = 0

    def wait_for(self, reason: WaitReason | None, now: float) -> None:
        """Record the time waited for the last reason, then wait for this one (None: not at all)."""
        if self.wait_reason is reason:
            return
        if self.wait_reason is not None:
            waited = self.live.request.metrics.waited_for
            waited[self.wait_reason] = waited.get(self.wait_reason, 0.0) + now - self.wait_since
        self.wait_reason = reason
        self.wait_since = now

    def mask_follows(self, masks: FollowingMasks) -> FollowingMasks:
        """The mask of its next row depends on a pending token: it is given to these."""
        self.following_masks = masks
        return masks

    # ---- with a step's result

    def completes_grammar(self, token: int) -> bool:
        """Whether nothing may follow the token; else the row that follows gets its mask."""
        assert self.grammar is not None
        if token not in self.stop_token_ids:
            self.grammar.accept(token)
        if self.grammar.is_complete:
            return True
        if self.following_masks is not None:
            self.following_masks.give(self.id, self.grammar.allowed())
            self.following_masks = None
        return False

    def retried(self, step_id: int) -> None:
        """Its row of a failed step is run again in this one."""
        self.last_step = step_id

    def sample_dropped(self) -> None:
        """A planned sample will not come."""
        self.num_pending -= 1

    def rolled_back(self, start: int) -> None:
        """Positions from `start` on were planned and not computed."""
        self.num_computed = min(self.num_computed, start)

    def row_computed(self) -> None:
        """A step computed a row of it that samples nothing."""
        self.num_steps += 1

    def sampled(self, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """A step computed a row of it: the pending token is known."""
        self.num_steps += 1
        self.num_pending -= 1
        self.is_newly_admitted = False
        self.last_token_at = now
        completion = self.completion
        completion.token_ids.append(token)
        self.tokens.append(token)
        if completion.logprobs is not None and logprob is not None:
            completion.logprobs.append(logprob)

    def sampled_plainly(self, token: int, logprob: TokenLogprob | None, now: float) -> str:
        """sampled() of a plain sequence and the token's text, in one call. Where it raises, nothing
        has changed."""
        text = ""
        if self.transcript is not None:
            assert self.transcript.plain_text is not None
            text = self.transcript.plain_text(token)
        self.num_steps += 1
        self.num_pending -= 1
        self.is_newly_admitted = False
        self.last_token_at = now
        completion = self.completion
        completion.token_ids.append(token)
        completion.text += text
        self.tokens.append(token)
        if logprob is not None and completion.logprobs is not None:
            completion.logprobs.append(logprob)
        return text

    def add_text(self, text: str) -> None:
        self.completion.text += text

    def stopped_by(self, stop: str) -> None:
        """It ends at a string."""
        self.completion.stop_reason = stop

    def stopped_by_token(self, token: int) -> None:
        """It ends at its last token, which the completion leaves out unless told otherwise."""
        completion = self.completion
        completion.stop_reason = token
        if self.sampling.params.include_stop_token:
            return
        completion.is_stop_token_left_out = True
        completion.token_ids.pop()
        if completion.logprobs:
            completion.logprobs.pop()

    def forked(self) -> None:
        """Its blocks are shared with siblings now: it copies before it writes."""
        self.num_writable = 0

    def start_from(self, block_table: BlockTable, num_computed: int) -> None:
        """A sibling begins where the prompt was computed, in blocks that it shares."""
        self.block_table = block_table
        self.num_computed = num_computed

    def ended(self, reason: FinishReason) -> None:
        self.is_done = True
        self.completion.finish_reason = reason
