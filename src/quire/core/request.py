"""Request: what one caller asked for, where it stands, and what it got."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict

from quire.core.errors import QuireError
from quire.core.plan import TokenLogprob
from quire.core.sampling import SamplingOptions, SamplingParams


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_MAX_FAILED_STEPS = 16  # that a request's metrics name
_FINAL = frozenset({Status.FINISHED, Status.CANCELLED, Status.EXPIRED, Status.FAILED})


class FinishReason(StrEnum):
    """Why a completion came to its end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class WaitReason(StrEnum):
    """Why a request is not running right now."""

    QUEUED = "queued"  # behind others of its key or of other keys
    BATCHING_DELAY = "batching_delay"  # the engine waits for more arrivals to batch
    BATCH_FULL = "batch_full"
    NO_BLOCKS = "no_blocks"
    PACING = "pacing"  # joining would miss the inter-token target
    PREEMPTED = "preempted"
    UNREAD = "unread"  # its reader does not keep up
    DEGRADED = "degraded"  # batches kept failing; requests run a few at a time


class RequestOptions(TypedDict, total=False):
    """What a caller may say of any request beside its prompt and its SamplingParams."""

    request_id: str | None  # default: a new one
    key: str  # whose it is: fairness and prefix reuse
    priority: int  # lower is more urgent
    timeout_s: float | None
    pooling: bool  # compute the hidden state after the prompt, and no tokens
    num_generated: int  # the prompt ends with so many tokens of the completion, which goes on


class CallOptions(RequestOptions, SamplingOptions, total=False):
    """The same with the fields of SamplingParams, for calls that take these by name."""


class Transition(NamedTuple):
    status: Status
    at: float


@dataclass(slots=True)
class RequestMetrics:
    """What happened to one request, on the engine's clock (seconds)."""

    arrived_at: float
    started_at: float | None = None  # its first chunk was planned
    first_token_at: float | None = None
    finished_at: float | None = None
    num_chunks: int = 0
    num_steps: int = 0  # known at the end
    first_step: int | None = None  # the id of the first step that had a row of it ...
    last_step: int | None = None  # ... and of the last; known at the end
    failed_steps: list[int] = field(default_factory=list)  # that failed with a row of it in them
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    waited_for: dict[WaitReason, float] = field(default_factory=dict)  # seconds by reason

    def failed_in(self, step_id: int) -> None:
        """A step with a row of it failed; the latest are kept."""
        self.failed_steps = [*self.failed_steps[1 - _MAX_FAILED_STEPS :], step_id]
        if self.first_step is None:
            self.first_step = step_id

    @property
    def queued_s(self) -> float | None:
        return None if self.started_at is None else self.started_at - self.arrived_at

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def total_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.arrived_at


# From this priority on a request is in the background: it gets the slots, blocks and tokens of
# steps that others leave, and gives them back when others want them.
BACKGROUND = 1_000_000


@dataclass(slots=True)
class Request:
    """One request. `priority`: lower is more urgent, as in vLLM; `key`: whose it is."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    key: str
    priority: int
    deadline: float | None
    metrics: RequestMetrics
    # Completions as far as they had come, of a request that goes on: one, or all n of them.
    resumed: "tuple[Completion, ...]" = ()
    transitions: list[Transition] = field(default_factory=list)

    @property
    def status(self) -> Status:
        return self.transitions[-1].status

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND

    @property
    def num_resumed_tokens(self) -> int:
        """Completion tokens that were given, not sampled."""
        return sum(completion.num_tokens for completion in self.resumed)

    @property
    def num_tokens_asked(self) -> int:
        """Its prompt tokens and the completion tokens it asks for, if it says how many."""
        return len(self.prompt) + (self.params.max_tokens or 0) * self.params.n

    def move_to(self, status: Status, now: float) -> None:
        assert not self.transitions or not self.status.is_final, f"{self.id} ended twice"
        self.transitions.append(Transition(status, now))


@dataclass(slots=True)
class Completion:
    """One sequence's completion, as far as it has come."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it
    # It ended with a token that is in neither token_ids nor logprobs (see include_stop_token).
    is_stop_token_left_out: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, also one that token_ids leaves out: what usage counts."""
        return len(self.token_ids) + self.is_stop_token_left_out


@dataclass(slots=True)
class RequestOutput:
    """What a finished request got. The short names mean completion 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: list[Completion]
    metrics: RequestMetrics
    status: Status
    prompt_logprobs: list[TokenLogprob] | None = None
    pooled: Any = None  # array [hidden], where the request was for that
    error: QuireError | None = None
    prompt: str | None = None  # the text it came as, where it came as text

    @property
    def outputs(self) -> list[Completion]:
        """The completions, by the name that vLLM has for them."""
        return self.completions

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason


class Piece(NamedTuple):
    """An event: a live request's new tokens of one sequence, with the text they complete."""

    request_id: str
    completion_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # With a finish_reason, as in Completion.
    stop_reason: int | str | None = None
    is_stop_token_left_out: bool = False


class Ended(NamedTuple):
    """The event that ends a request; each request has exactly one."""

    request_id: str
    output: RequestOutput


Event = Piece | Ended
