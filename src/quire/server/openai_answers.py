"""OpenAI's chat and plain completions: replies and the frames of streams.

Streams make a frame for nearly every token, so a frame is a few joined strings, not a model: what
every chunk of an answer shares is written once.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from quire.chat import (
    Answer,
    AnswerEvent,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallBegin,
)
from quire.core.plan import TokenLogprob
from quire.core.request import Piece, RequestOutput
from quire.core.version import own_version
from quire.server.calls import Call
from quire.server.dialect import (
    Choice,
    Dialect,
    GenerationCall,
    Translation,
    traces_of,
    usage_of,
)
from quire.server.echoes import echo_of, prompt_logprobs
from quire.server.errors import OPENAI_ERRORS, ApiError
from quire.server.model_service import ModelService
from quire.server.replies import (
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    CompletionChoice,
    FinishWord,
    LogprobWriter,
    TextCompletion,
    ToolCallReply,
)
from quire.server.schemas import ChatRequest, CompletionRequest
from quire.server.streaming import SSE_HEADERS, SSE_PING

FINGERPRINT = f"quire-{own_version()}"
DONE = b"data: [DONE]\n\n"

# ---- frames


class OpenAIFrames(ABC):
    """The chunks of one answer; subclasses write what differs between the two APIs."""

    kind: str
    headers = SSE_HEADERS
    ping = SSE_PING

    def __init__(self, service: ModelService, generation: GenerationCall) -> None:
        shared = {
            "id": generation.answer_id,
            "object": self.kind,
            "created": generation.created,
            "model": service.name,
            "system_fingerprint": FINGERPRINT,
        }
        options = generation.body.stream_options
        self._call = generation.call
        self._with_usage = generation.body.streams_usage
        self._with_token_ids = bool(generation.body.return_token_ids)
        self._head = "data: " + json.dumps(shared)[:-1] + ', "choices": ['
        self._with_counts = bool(options and options.continuous_usage_stats)
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._num_tokens = 0  # of completions, in chunks so far
        self._logprobs = _writer(generation)
        self._num_spelled: dict[int, int] = {}  # characters of each choice's tokens so far

    @property
    def _tail(self) -> str:
        """The end of a chunk."""
        if not self._with_counts:
            return '], "usage": null}\n\n' if self._with_usage else "]}\n\n"
        prompt, completion = self._num_prompt_tokens, self._num_tokens
        return (
            f'], "usage": {{"prompt_tokens": {prompt}, "completion_tokens": {completion}, '
            f'"total_tokens": {prompt + completion}}}}}\n\n'
        )

    def opening(self, _index: int) -> bytes:
        return b""

    @abstractmethod
    def _choice(
        self, index: int, events: Sequence[AnswerEvent], scores: Sequence[TokenLogprob]
    ) -> str:
        """A choice up to, and without, its finish reason."""

    def chunk(
        self,
        index: int,
        events: Sequence[AnswerEvent],
        pieces: Sequence[Piece],
        finish_reason: FinishWord | None,
    ) -> bytes:
        """One chunk of all these pieces of a choice; nothing where they say nothing yet."""
        scores = [score for piece in pieces for score in piece.logprobs]
        if self._with_counts:
            self._num_tokens += sum(len(piece.token_ids) for piece in pieces)
        if not events and finish_reason is None and not scores and not self._with_token_ids:
            return b""  # half a character, or the possible begin of a stop string or marker
        parts = [self._head, self._choice(index, events, scores)]
        if self._with_token_ids:
            token_ids = [token for piece in pieces for token in piece.token_ids]
            parts.append(f', "token_ids": {json.dumps(token_ids)}')
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        parts.append(f', "finish_reason": {reason}}}{self._tail}')
        return "".join(parts).encode()

    def ending(self, outputs: Sequence[RequestOutput], choices: Sequence[Choice]) -> bytes:
        """The chunk without choices: counts and traces, where they were asked for."""
        traces = traces_of(self._call, outputs)
        if not self._with_usage and not traces:
            return DONE
        parts = []
        if self._with_usage:
            parts.append(f'"usage": {usage_of(outputs, choices).model_dump_json()}')
        if traces:
            listed = ", ".join(trace.model_dump_json() for trace in traces)
            parts.append(f'"quire_trace": [{listed}]')
        return f"{self._head}], {', '.join(parts)}}}\n\n".encode() + DONE

    def error(self, error: ApiError) -> bytes:
        return OPENAI_ERRORS.frame(error)


class ChatFrames(OpenAIFrames):
    kind = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        choice = f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
        return f'{self._head}{choice}"logprobs": null, "finish_reason": null}}{self._tail}'.encode()

    def _choice(
        self, index: int, events: Sequence[AnswerEvent], scores: Sequence[TokenLogprob]
    ) -> str:
        logprobs = self._logprobs.for_chat(scores) if scores else "null"
        delta = "{" + ", ".join(_delta(events)) + "}"
        return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}'


class TextFrames(OpenAIFrames):
    kind = "text_completion"

    def __init__(self, service: ModelService, generation: GenerationCall) -> None:
        super().__init__(service, generation)
        self._generation = generation

    def opening(self, index: int) -> bytes:
        """The prompt, where it is echoed."""
        echo = _echoed_text(self._generation, index)
        if not echo:
            return b""
        choice = f'{{"index": {index}, "text": {json.dumps(echo)}, "logprobs": null'
        return f'{self._head}{choice}, "finish_reason": null}}{self._tail}'.encode()

    def _choice(
        self, index: int, events: Sequence[AnswerEvent], scores: Sequence[TokenLogprob]
    ) -> str:
        logprobs = "null"
        if scores:
            offset = self._num_spelled.get(index, 0)
            written = self._logprobs.for_text(scores, offset)
            self._num_spelled[index] = offset + written.num_characters
            logprobs = written.json
        return (
            f'{{"index": {index}, "text": {json.dumps(content_of(events))}, "logprobs": {logprobs}'
        )


def _delta(events: Sequence[AnswerEvent]) -> list[str]:
    """The fields of a delta; of a call, the first has its id and its name."""
    fields = []
    if text := content_of(events):
        fields.append(f'"content": {json.dumps(text)}')
    thought = "".join([event.text for event in events if isinstance(event, ReasoningDelta)])
    if thought:
        written = json.dumps(thought)
        fields.append(f'"reasoning_content": {written}, "reasoning": {written}')
    calls: dict[int, dict[str, object]] = {}
    for event in events:
        if isinstance(event, ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            head = {"index": event.index, "id": event.id, "type": "function"}
            calls[event.index] = {**head, "function": function}
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(
                event.index, {"index": event.index, "function": {"arguments": ""}}
            )
            function = cast(dict[str, str], call["function"])
            function["arguments"] += event.text
    if calls:
        fields.append(f'"tool_calls": {json.dumps(list(calls.values()))}')
    return fields


def content_of(events: Sequence[AnswerEvent]) -> str:
    return "".join([event.text for event in events if isinstance(event, ContentDelta)])


# ---- replies


def chat_reply(
    service: ModelService,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    writer = _writer(generation)
    written = []
    for each in choices:
        completion = each.completion
        choice = ChatChoice(
            index=each.index,
            message=_message(each.answer),
            logprobs=None,
            finish_reason=each.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if generation.body.return_token_ids else None,
        )
        logprobs = completion.logprobs
        scores = None if logprobs is None else writer.for_chat(logprobs)
        written.append(_with_logprobs(choice, scores))
    reply = ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=[],
        usage=usage_of(outputs, choices),
        quire_trace=traces_of(generation.call, outputs),
    )
    return _with_choices(reply, written, _prompt_parts(generation, outputs[0]))


def text_reply(
    service: ModelService,
    generation: GenerationCall,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Choice],
) -> bytes:
    written = []
    for each in choices:
        completion = each.completion
        output = outputs[each.index // (generation.body.n or 1)]
        choice = CompletionChoice(
            index=each.index,
            text=_echoed_text(generation, each.index) + completion.text,
            logprobs=None,
            finish_reason=each.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if generation.body.return_token_ids else None,
        )
        prompt = _prompt_parts(generation, output)
        written.append(_with_logprobs(choice, _text_scores(generation, each, output), prompt))
    reply = TextCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=[],
        usage=usage_of(outputs),
        quire_trace=traces_of(generation.call, outputs),
    )
    return _with_choices(reply, written)


def _writer(generation: GenerationCall) -> LogprobWriter:
    as_ids = bool(generation.body.return_tokens_as_token_ids)
    return LogprobWriter(generation.llm.tokenizer, as_ids=as_ids)


def _echoed_text(generation: GenerationCall, index: int) -> str:
    """What a choice begins with: its prompt where the body asks for it, which alone keeps it."""
    body = generation.body
    if not isinstance(body, CompletionRequest) or not body.echo:
        return ""
    return generation.prompts[index // (body.n or 1)][0].text or ""


def _text_scores(generation: GenerationCall, choice: Choice, output: RequestOutput) -> str | None:
    """CompletionLogprobs as JSON, those of an echoed prompt first."""
    scores = choice.completion.logprobs
    if scores is None:
        return None
    body = generation.body
    writer = _writer(generation)
    if not isinstance(body, CompletionRequest) or not body.echo:
        return writer.for_text(scores).json
    prompt, _ = generation.prompts[choice.index // (body.n or 1)]
    echo = echo_of(generation.llm.tokenizer, prompt, output)
    assert echo is not None, "echo with logprobs scores the prompt"
    return writer.for_text(
        [*echo.scores, *scores],
        len(prompt.text or ""),
        first=echo.first,
        prompt_offsets=echo.offsets,
    ).json


def _prompt_parts(generation: GenerationCall, output: RequestOutput) -> str:
    """Fields about the prompt, as JSON with a comma before each, where they were asked for."""
    parts = ""
    if generation.body.return_token_ids:
        parts += f',"prompt_token_ids":{json.dumps(output.prompt_token_ids)}'
    if generation.body.prompt_logprobs is not None:
        parts += f',"prompt_logprobs":{prompt_logprobs(generation.llm.tokenizer, output)}'
    return parts


_LATE = {"logprobs", "prompt_token_ids", "prompt_logprobs"}  # fields that are JSON already


def _message(answer: Answer) -> ChatMessage:
    calls = [
        ToolCallReply(id=id_, function=CalledFunction(name=name, arguments=arguments))
        for id_, name, arguments in answer.tool_calls
    ]
    return ChatMessage(
        content=answer.content,
        reasoning_content=answer.reasoning,
        reasoning=answer.reasoning,
        tool_calls=calls or None,
    )


def _with_logprobs(
    choice: ChatChoice | CompletionChoice, logprobs: str | None, more: str = ""
) -> str:
    """A choice as JSON, with its log-probabilities, which are JSON already."""
    absent: dict[str, Any] = dict.fromkeys(_LATE, True)
    if choice.token_ids is None:
        absent["token_ids"] = True
    if isinstance(choice, ChatChoice):
        optional = ("reasoning_content", "reasoning", "tool_calls")
        absent["message"] = {name for name in optional if getattr(choice.message, name) is None}
    return f'{choice.model_dump_json(exclude=absent)[:-1]},"logprobs":{logprobs or "null"}{more}}}'


def _with_choices(
    reply: ChatCompletion | TextCompletion, choices: Sequence[str], more: str = ""
) -> bytes:
    """The reply as JSON. Fields of ours are left out where they were not asked for; OpenAI's nulls
    stay."""
    absent = {"choices", "prompt_token_ids", "prompt_logprobs"}
    if reply.quire_trace is None:
        absent.add("quire_trace")
    head = reply.model_dump_json(exclude=absent)[:-1]
    return f'{head}{more},"choices":[{",".join(choices)}]}}'.encode()


# ---- the dialect


def _to_chat(_service: ModelService, _call: Call, body: ChatRequest) -> Translation[None]:
    return Translation(body, None)


CHAT = Dialect(
    schema=ChatRequest,
    id_prefix="chatcmpl-",
    to_chat=_to_chat,
    frames=ChatFrames,
    reply=chat_reply,
)
