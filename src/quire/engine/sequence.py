"""Sequence: one line of tokens of a live request, and how far it has been computed.

    tokens          prompt ................ completion ....
    known           ├──────────────────────────────────────┤   len(tokens)
    computed        ├───────────────────────────┤              planned or done
    pending                                                ├┤  sampled by steps not collected yet

A sequence can be planned while its computed tokens are fewer than known + pending.
"""

from dataclasses import dataclass, field
from typing import Any

from quire.core.plan import Sampling, TokenLogprob, Want
from quire.core.request import Completion, Request, WaitReason
from quire.engine.output import Grammar, Transcript
from quire.kvcache import SequenceBlocks


@dataclass(slots=True)
class LiveRequest:
    """A request the engine is working on, with its sequences."""

    request: Request
    wants_pieces: bool
    sequences: list["Sequence"] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    pooled: Any = None  # the state it was made for, where it wants one instead of tokens
    is_paused: bool = False

    @property
    def num_open(self) -> int:
        return sum(not sequence.is_done for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. `rank` orders it among all: lower is more important."""

    id: int
    live: LiveRequest
    sampling: Sampling
    completion: Completion
    tokens: list[int]
    hold: SequenceBlocks
    rank: tuple[float, int]
    key: str  # whose line it stands in: its request's, or one for all without fairness
    transcript: Transcript | None = None
    grammar: Grammar | None = None
    goal: Want = Want.SAMPLE  # what its last known token is computed for
    stop_token_ids: frozenset[int] = frozenset()
    prompt_length: int = 0
    max_length: int = 0  # tokens it may come to
    num_slots: int = 1  # places in the batch it takes or reserves for its siblings
    num_computed: int = 0
    num_pending: int = 0
    num_writable: int = 0  # positions its blocks hold that it may write without asking the cache
    last_step: int = 0  # the step that samples its pending token
    last_token_at: float = 0.0  # 0: it has none yet
    num_steps: int = 0  # it had a row in
    epoch: int = 0  # moves when its blocks are taken away
    is_done: bool = False
    is_running: bool = False
    is_fresh: bool = False  # admitted and not rewarded with a token yet
    is_special: bool = False  # its rows carry more than tokens: history, a mask, prompt scores
    wait_reason: WaitReason | None = None
    wait_since: float = 0.0

    @property
    def request(self) -> Request:
        return self.live.request

    @property
    def num_remaining(self) -> int:
        """Tokens, known or pending, that no step has been planned for."""
        return len(self.tokens) + self.num_pending - self.num_computed

    def wait_for(self, reason: WaitReason | None, now: float) -> None:
        """Book the time waited so far under its reason, and go on waiting for another."""
        if self.wait_reason is reason:
            return
        if self.wait_reason is not None:
            waited = self.live.request.metrics.waited_for
            waited[self.wait_reason] = waited.get(self.wait_reason, 0.0) + now - self.wait_since
        self.wait_reason = reason
        self.wait_since = now
