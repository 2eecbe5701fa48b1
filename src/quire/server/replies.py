"""What the server answers, in OpenAI's shapes; streams are written by streaming.py instead.

Log-probabilities are written as JSON one token at a time: an answer can have a hundred thousand of
them, and one call that writes them all would hold the interpreter for as long.
"""

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field

from quire.core.plan import TokenLogprob
from quire.tokenizer import Tokenizer

FinishWord = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TraceReport(BaseModel):
    """Where a request's time went, in seconds; asked for by the header `x-quire-trace: 1`."""

    queued_s: float | None = Field(description="until its first chunk was planned")
    waited_for_s: dict[str, float] = Field(description="while it was not running, by reason")
    first_token_s: float | None
    total_s: float | None
    prompt_tokens: int
    cached_tokens: int = Field(description="prompt tokens found computed")
    chunks: int = Field(description="its prompt was computed in")
    steps: int = Field(description="rows of steps it had, its sequences together")
    preemptions: int
    first_step: int | None = Field(description="the id of the first step with a row of it")
    last_step: int | None
    failed_steps: list[int] = Field(description="ids of steps that failed with a row of it")


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenScore(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenScore]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON")


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where there are calls alone")
    refusal: None = None
    reasoning_content: str | None = None  # these three are left out where there are none
    reasoning: str | None = Field(default=None, description="reasoning_content, as vLLM names it")
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    token_ids: list[int] | None = None  # left out unless asked for


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None  # left out unless asked for, as is the next
    prompt_logprobs: "PromptLogprobs | None" = None
    quire_trace: list[TraceReport] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for an echoed prompt's first")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    token_ids: list[int] | None = None  # left out unless asked for, as are the next two
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    quire_trace: list[TraceReport] | None = None


class EmbeddingItem(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    pooling: Literal["last_token"] = "last_token"
    usage: EmbeddingUsage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["quire"] = "quire"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenList(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizedText(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class TokenizerInfo(BaseModel):
    """As vLLM's server tells it, for clients that tokenise by /tokenize and /detokenize."""

    tokenizer_class: Literal["quire"] = "quire"
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class GenerationSettings(BaseModel):
    n_ctx: int


class ServerProperties(BaseModel):
    """As llama.cpp's server tells it."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class LoadingFigures(BaseModel):
    """How far loading the model is."""

    phase: str
    percent: int  # of this phase


class Alive(BaseModel):
    status: Literal["ok"] = "ok"
    loading: LoadingFigures | None = None  # only while the model is loaded


class Readiness(BaseModel):
    status: str
    loading: LoadingFigures | None = None  # only while the model is loaded


class QuotaFigures(BaseModel):
    limit: int
    left: int
    resets_in_s: float  # until the whole quota is available


class KeyFigures(BaseModel):
    """One key's sequences right now, and its tokens since the server started."""

    num_running: int
    num_waiting: int
    prompt_tokens: int
    completion_tokens: int
    tokens_today: int  # since midnight UTC; running calls count with the most they can use
    tokens_per_minute: QuotaFigures | None = None
    tokens_per_day: QuotaFigures | None = None


class Lane(BaseModel):
    """A sequence that had rows in some of the steps."""

    request: str
    key: str
    prompt_tokens: int


class StepFigures(BaseModel):
    """A step that ran, by the rows it computed."""

    id: int
    at: float = Field(description="when it ended, in seconds of uptime_s")
    elapsed_s: float
    floor_s: float | None = Field(
        description="the time that reading weights and KV takes at --memory-bandwidth"
    )
    chunks: list[tuple[int, int, int]] = Field(
        description="rows of prompts: lane, position of the first token, number of tokens"
    )
    decodes: list[tuple[int, int]] = Field(description="rows of one token: lane, its position")


class LatestSteps(BaseModel):
    """The engine's latest steps; without the scope `stats`, the key's own rows in them. Steps are
    kept for 30 s after they were last asked for."""

    lanes: dict[int, Lane]
    steps: list[StepFigures]


class ModelFigures(BaseModel):
    """One of the server's models."""

    name: str
    status: str = Field(description="ready, loading, recovering, or unloaded until a request comes")
    predicted_bytes: int | None = Field(description="what it takes; known of models on demand")
    loading: LoadingFigures | None = None


class OwnStatsReply(BaseModel):
    """What every key may read, of one model."""

    status: str
    model: str
    models: list[ModelFigures] = Field(description="all that the server has")
    uptime_s: float
    key: str | None  # its name
    own: KeyFigures
    latest: LatestSteps | None = Field(None, description="with ?steps=N")


class AuditFigures(BaseModel):
    """The audit log's last line: with a copy, `quire audit --expect` finds a missing end."""

    seq: int
    hash: str
    num_dropped: int  # events that were not written


class HealthFigures(BaseModel):
    """Whether steps run whole; the limits are what they may hold now, lowered while they fail."""

    status: str = Field(description="ok, degraded, draining or stuck")
    cause: str | None = Field(description="why it is degraded or stuck")
    since_s: float | None = Field(description="for how long it is, in seconds")
    batch_limit: int
    max_batch_size: int
    step_token_limit: int
    max_step_tokens: int
    last_failed_step: int | None = Field(description="its id")
    steps_failed: dict[str, int] = Field(description="by the type of the error")
    steps_retried: int = Field(description="parts of failed steps that were run again")
    step_splits: int = Field(description="times that a failed step or a part was split in two")


class KVBlocks(BaseModel):
    """Blocks of the KV cache; the others are empty."""

    total: int
    used: int = Field(description="held by sequences")
    cached: int = Field(description="held by none, with a prefix that can be found")


class StatsReply(OwnStatsReply):
    """Gauges, and counters since the model was loaded."""

    health: HealthFigures
    device: str  # that runs the model
    device_reason: str  # why that one
    audit: AuditFigures | None = None
    keys: dict[str, KeyFigures]  # those in force that have used something
    num_running: int
    num_waiting: int
    waiting_by_reason: dict[str, int]
    queued_tokens: int
    kv_cache_usage: float
    kv_blocks: KVBlocks
    memory_bytes: dict[str, int]
    device_utilization: float
    num_steps: int
    prompt_tokens: int
    completion_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    mean_batch_size: float
    requests_ended: dict[str, int]
    faults_isolated: dict[str, int]


class KeyCard(BaseModel):
    """A key's settings; neither its secret nor its digest."""

    name: str
    scopes: list[str]
    expires: str | None
    weight: float
    requests_per_minute: float | None
    max_concurrent: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None


class KeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyCard]


class ReloadReply(BaseModel):
    """Names of keys."""

    added: list[str]
    removed: list[str]
    changed: list[str]


# ---- log-probabilities


_MIN_LOGPROB = -9999.0  # JSON has no infinity


class TextLogprobs(NamedTuple):
    """CompletionLogprobs as JSON, and how many characters their tokens have together."""

    json: str
    num_characters: int


class _WrittenText(NamedTuple):
    """A token's text."""

    json: str
    length: int  # of the text


class _Written(NamedTuple):
    """What was written of a tokenizer's tokens: the same in every stream."""

    texts: dict[int, _WrittenText]
    spellings: dict[int, str]  # see LogprobWriter._spelling()


_written: WeakKeyDictionary[Tokenizer, _Written] = WeakKeyDictionary()


class LogprobWriter:
    """Log-probabilities as JSON; without a tokenizer, or `as_ids`, tokens are written as
    token_id:N."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        if tokenizer is None or as_ids:
            self._known = _Written({}, {})
        else:
            self._known = _written.setdefault(tokenizer, _Written({}, {}))

    def for_chat(self, scores: Sequence[TokenLogprob]) -> str:
        """ChatLogprobs as JSON."""
        return f'{{"content":[{self.entries(scores)}],"refusal":null}}'

    def entries(self, scores: Sequence[TokenLogprob]) -> str:
        """TokenScores as JSON, without the list around them."""
        return ",".join([self._score(score) for score in scores])

    def for_text(
        self,
        scores: Sequence[TokenLogprob],
        offset: int = 0,
        *,
        first: int | None = None,
        prompt_offsets: Sequence[int] = (),
    ) -> TextLogprobs:
        """`offset`: characters of the completion before the first of these tokens. An echoed prompt
        begins with a token without a score, `first`, and has offsets of its own."""
        ids = [] if first is None else [first]
        texts = [self._written(token) for token in [*ids, *(score.token for score in scores)]]
        offsets = list(prompt_offsets)
        start = offset
        for text in texts[len(offsets) :]:
            offsets.append(offset)
            offset += text.length
        none = ["null"] * len(ids)
        logprobs = ",".join([*none, *(repr(finite(score.logprob)) for score in scores)])
        tops = ",".join([*none, *(self._top_by_text(score) for score in scores)])
        written = (
            f'{{"tokens":[{", ".join([text.json for text in texts])}],'
            f'"token_logprobs":[{logprobs}],"top_logprobs":[{tops}],"text_offset":{offsets}}}'
        )
        return TextLogprobs(written, offset - start)

    def _score(self, score: TokenLogprob) -> str:
        top = ",".join([f"{self._entry(token, logprob)}}}" for token, logprob in score.top])
        return f'{self._entry(score.token, score.logprob)},"top_logprobs":[{top}]}}'

    def _entry(self, token: int, logprob: float) -> str:
        """A TopLogprob as JSON, without its end."""
        return f'{self._spelling(token)},"logprob":{finite(logprob)!r}'

    def _spelling(self, token: int) -> str:
        found = self._known.spellings.get(token)
        if found is None:
            spelled = json.dumps(self._bytes(token))
            found = f'{{"token":{json.dumps(self._text(token))},"bytes":{spelled}'
            self._known.spellings[token] = found
        return found

    def _top_by_text(self, score: TokenLogprob) -> str:
        """By text; of tokens with the same text the likeliest counts, which comes first."""
        found: dict[str, float] = {}
        for token, logprob in score.top:
            found.setdefault(self._written(token).json, logprob)
        entries = [f"{text}: {finite(logprob)!r}" for text, logprob in found.items()]
        return f"{{{', '.join(entries)}}}"

    def _written(self, token: int) -> _WrittenText:
        found = self._known.texts.get(token)
        if found is None:
            text = self._text(token)
            found = self._known.texts[token] = _WrittenText(json.dumps(text), len(text))
        return found

    def _text(self, token: int) -> str:
        if self._tokenizer is None or self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def finite(logprob: float) -> float:
    return max(_MIN_LOGPROB, logprob)
