"""Dialect: an API over conversations, as a translation to ChatRequest and one of answers back.

`answer_conversation` in generation.py does everything between. A dialect is given the events of an
answer (chat/answers.py), never the model's own markers of tool calls and reasoning.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from quire.chat import Answer, AnswerEvent, AnswerParser, CallIds
from quire.core.request import Completion, FinishReason, Piece, RequestOutput
from quire.engine.aio import Stream
from quire.llm import OnlineModel
from quire.server.calls import Call
from quire.server.errors import OPENAI_ERRORS, ApiError, ErrorShape
from quire.server.fields import Strict
from quire.server.model_service import ModelService
from quire.server.replies import CompletionDetails, FinishWord, PromptDetails, TraceReport, Usage
from quire.server.schemas import ChatRequest, Generation
from quire.server.submission import Prompts, submit_all
from quire.server.validation import validation_error

B = TypeVar("B", bound=Strict)
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call that generates: what to complete, and how. `kept` is what the dialect keeps of its own
    body (Translation.kept)."""

    body: Generation
    prompts: Prompts
    call: Call
    llm: OnlineModel
    answer_id: str
    created: int
    kept: Any = None
    make_parser: Callable[[], AnswerParser] = AnswerParser

    def new_parser(self, index: int) -> AnswerParser:
        """For a choice. Of an answer that may be computed again the ids of calls are the same."""
        parser = self.make_parser()
        if self.call.identity is not None:
            parser.call_ids = CallIds(f"{self.call.identity.name}/{index}")
        return parser

    async def submit(self, service: ModelService, *, stream: bool) -> list[Stream]:
        call, body = self.call, self.body
        return await submit_all(service, self.llm, call, body, self.prompts, stream=stream)

    @property
    def shows_reasoning(self) -> bool:
        return not isinstance(self.body, ChatRequest) or self.body.include_reasoning is not False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt, _ in self.prompts)


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion with what it says. Choices count through all prompts of a call."""

    index: int
    completion: Completion
    answer: Answer
    finish_reason: FinishWord
    num_reasoning_tokens: int = 0


class Frames(Protocol):
    """Writes one answer as a stream."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Of the response: its content type and others."""

    @property
    def ping(self) -> bytes:
        """Sent when nothing else was for a while; b"": nothing is."""

    def opening(self, index: int) -> bytes:
        """What comes before a choice's first events."""

    def chunk(
        self,
        index: int,
        events: Sequence[AnswerEvent],
        pieces: Sequence[Piece],
        finish_reason: FinishWord | None,
    ) -> bytes:
        """What came for a choice at once, often one token: its events, and the pieces that they
        were made of (token ids, log-probabilities). The last call has the reason of the end."""

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        """After all choices: counts, and what ends the stream."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its status was sent."""


Detach = Callable[[ModelService, GenerationCall], Awaitable[Response | None]]


class Translation(NamedTuple, Generic[K]):
    """A body as the internal request. `kept` is for frames and reply; no large texts, please: the
    answer may take long."""

    chat: ChatRequest
    kept: K


def chat_request(fields: Mapping[str, object]) -> ChatRequest:
    """A ChatRequest of a translation; what it refuses is a 400, not a failure of the server."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None


@dataclass(frozen=True)
class Dialect(Generic[B, K]):
    """`to_chat` and `reply` run in the work pool or are quick; `to_chat` raises ApiError or
    RequestError about a field of `schema`. `field_names` maps fields of ChatRequest to those of
    `schema` that they come from, for errors about them. `detach` answers a call that is computed
    later, or returns None. `fits_max_tokens`: more tokens than the context has room for are as many
    as it has; else they are refused."""

    schema: type[B]
    id_prefix: str  # of the answer's id
    to_chat: Callable[[ModelService, Call, B], Translation[K]]
    frames: Callable[[ModelService, GenerationCall], Frames]
    reply: Callable[
        [ModelService, GenerationCall, Sequence[RequestOutput], Sequence[Choice]], bytes
    ]
    errors: ErrorShape = OPENAI_ERRORS
    field_names: Mapping[str, str] = field(default_factory=dict)
    detach: Detach | None = None
    fits_max_tokens: bool = False


# ---- what replies and frames are made of


def finish_word(reason: FinishReason | None, answer: Answer) -> FinishWord:
    """Why a choice ended: calls that the model finished by itself are a reason of their own."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as the APIs that want an object have them; a call that the length cut off
    has no whole ones. Halves of surrogate pairs, which no reply can hold, become U+FFFD."""
    try:
        found = json.loads(text)
        if "\\u" in text:
            plain = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
            found = json.loads(plain.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def choices_of(generation: GenerationCall, outputs: Sequence[RequestOutput]) -> list[Choice]:
    """All choices in order: those of the first prompt, then those of the next."""
    found: list[Choice] = []
    for completion in (each for output in outputs for each in output.completions):
        parser = generation.new_parser(len(found))
        parser.feed(completion.text)
        parser.end(is_cut=completion.finish_reason is FinishReason.LENGTH)
        num_thought = 0
        if parser.answer.reasoning is not None:
            num_thought = _num_reasoning_tokens(generation, completion)
        found.append(choice_of(generation, len(found), completion, parser.answer, num_thought))
    return found


def choice_of(
    generation: GenerationCall,
    index: int,
    completion: Completion,
    answer: Answer,
    num_reasoning_tokens: int,
) -> Choice:
    if not generation.shows_reasoning:
        answer = answer._replace(reasoning=None)
    word = finish_word(completion.finish_reason, answer)
    return Choice(index, completion, answer, word, num_reasoning_tokens)


def _num_reasoning_tokens(generation: GenerationCall, completion: Completion) -> int:
    """Counted token by token, as a stream counts them."""
    tokenizer = generation.llm.tokenizer
    assert tokenizer is not None
    params = generation.prompts[0][1]
    detokenizer = tokenizer.detokenizer(
        skip_special=params.skip_special_tokens, spelled=params.spelled_token_ids
    )
    parser = generation.make_parser()
    for token in completion.token_ids:
        parser.feed(detokenizer.add(token), num_tokens=1)
    return parser.num_reasoning_tokens


def usage_of(outputs: Sequence[RequestOutput], choices: Sequence[Choice] = ()) -> Usage:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(c.num_tokens for output in outputs for c in output.completions)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices)
        ),
    )


def traces_of(call: Call, outputs: Sequence[RequestOutput]) -> list[TraceReport] | None:
    """Timings of each prompt's request, if the client asked for them."""
    return [trace_of(output) for output in outputs] if call.wants_trace else None


def traced(call: Call, outputs: Sequence[RequestOutput]) -> dict[str, list[dict[str, object]]]:
    """The field that an answer has for them, if the client asked."""
    traces = traces_of(call, outputs)
    return {} if traces is None else {"quire_trace": [trace.model_dump() for trace in traces]}


def trace_of(output: RequestOutput) -> TraceReport:
    metrics = output.metrics
    return TraceReport(
        queued_s=metrics.queued_s,
        waited_for_s={reason.value: seconds for reason, seconds in metrics.waited_for.items()},
        first_token_s=metrics.time_to_first_token_s,
        total_s=metrics.total_s,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=metrics.num_cached_tokens,
        chunks=metrics.num_chunks,
        steps=metrics.num_steps,
        preemptions=metrics.num_preemptions,
        first_step=metrics.first_step,
        last_step=metrics.last_step,
        failed_steps=metrics.failed_steps,
    )
