"""Chat and plain completions: from a checked body to an answer, whole or as a stream."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.core.request import Completion, RequestOutput
from quire.core.sampling import SamplingParams
from quire.core.version import own_version
from quire.engine.aio import Stream
from quire.llm import AsyncLLM
from quire.llm.prompts import Prepared
from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import ApiError, as_api_error
from quire.server.frames import ChatFrames, Frames, TextFrames
from quire.server.gate import ClientGoneError
from quire.server.metering import demand_of
from quire.server.replies import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    CompletionChoice,
    PromptDetails,
    TextCompletion,
    TraceReport,
    Usage,
)
from quire.server.schemas import Addressed, ChatRequest, CompletionRequest, Generation
from quire.server.scores import ScoreWriter
from quire.server.service import Service
from quire.server.streaming import StreamReply

T = TypeVar("T")
FINGERPRINT = f"quire-{own_version()}"
_USUAL_COMPLETION_TOKENS = 16  # OpenAI's for plain completions


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that generates: what to complete, and how."""

    body: Generation
    prompts: list[tuple[Prepared, SamplingParams]]
    call: Call
    llm: AsyncLLM
    answer_id: str
    created: int

    async def submit(self, service: Service, *, stream: bool) -> list[Stream]:
        call, body = self.call, self.body
        return await submit_all(service, self.llm, call, body, self.prompts, stream=stream)


async def complete_chat(service: Service, body: ChatRequest, request: Request) -> Response:
    call, llm = begin(service, body, request)
    _check_chat(body)
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    with_errors = Errors(service, body)
    prompt = await with_errors.of(llm.read_chat(messages))
    room = llm.max_context - len(prompt.tokens)
    more: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    params = with_errors.made(partial(body.sampling, room, **more))
    answer_id = f"chatcmpl-{call.id}"
    asked = Asked(body, [(prompt, params)], call, llm, answer_id, int(time.time()))
    if body.stream:
        return await _stream(service, asked, with_errors, ChatFrames)
    outputs = await _run(service, asked, with_errors, request)
    return json_reply(_chat_completion(service, asked, outputs))


async def complete_text(service: Service, body: CompletionRequest, request: Request) -> Response:
    call, llm = begin(service, body, request)
    _check_streaming(body)
    with_errors = Errors(service, body)
    more: dict[str, Any] = {} if body.logprobs is None else {"logprobs": body.logprobs}
    prompts = []
    for text in body.prompts:
        prompt = await with_errors.of(llm.read(text))
        room = min(_USUAL_COMPLETION_TOKENS, llm.max_context - len(prompt.tokens))
        usual = max(room, body.min_tokens or 0)
        prompts.append((prompt, with_errors.made(partial(body.sampling, usual, **more))))
    asked = Asked(body, prompts, call, llm, f"cmpl-{call.id}", int(time.time()))
    if body.stream:
        return await _stream(service, asked, with_errors, TextFrames)
    outputs = await _run(service, asked, with_errors, request)
    return json_reply(_text_completion(service, asked, outputs))


# ---- before and around


def begin(service: Service, body: Any, request: Request) -> tuple[Call, AsyncLLM]:
    """The call and the model that answers it; raises where it cannot be answered now."""
    call: Call = request.scope[SCOPE_KEY]
    call.user = getattr(body, "user", None)
    llm = service.llm
    service.check_model(body.model)
    return call, llm


class Errors:
    """Turns quire's errors into answers that name the fields of this kind of body."""

    def __init__(self, service: Service, body: Any) -> None:
        self._service = service
        self._fields = type(body).model_fields

    async def of(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except QuireError as error:
            raise self.as_api_error(error) from error

    def made(self, make: Any) -> SamplingParams:
        try:
            params: SamplingParams = make()
            return params
        except QuireError as error:
            raise self.as_api_error(error) from error

    def as_api_error(self, error: BaseException) -> ApiError:
        assert isinstance(error, QuireError)
        return as_api_error(error, self._fields, is_draining=self._service.is_draining)


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    tokens = (body.max_tokens, body.max_completion_tokens)
    if None not in tokens and tokens[0] != tokens[1]:
        raise ApiError(
            400,
            f"max_tokens is {tokens[0]} and max_completion_tokens {tokens[1]}: give one of them",
            param="max_completion_tokens",
        )
    _check_streaming(body)


def _check_streaming(body: Generation) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


async def submit_all(
    service: Service,
    llm: AsyncLLM,
    call: Call,
    body: Addressed,
    prompts: Sequence[tuple[Prepared, SamplingParams]],
    *,
    stream: bool,
    pooling: bool = False,
) -> list[Stream]:
    """Queue every prompt that the key's quota admits, all in one turn of the loop; all or none."""
    call.admission = service.meter.admit(call.key, demand_of(prompts, pooling=pooling))
    options: dict[str, Any] = {"stream": stream, "pooling": pooling}
    options |= {"key": call.key_name, "priority": body.priority or 0, "timeout_s": body.timeout}
    given = await asyncio.gather(
        *(llm.submit(prompt.tokens, params, **options) for prompt, params in prompts),
        return_exceptions=True,
    )
    streams = [accepted for accepted in given if isinstance(accepted, Stream)]
    for failure in given:
        if isinstance(failure, BaseException):
            for accepted in streams:
                accepted.cancel()
            raise failure
    return streams


async def outputs_of(
    request: Request, call: Call, streams: Sequence[Stream]
) -> list[RequestOutput]:
    """Wait for the requests' ends while their client does; else end them."""
    working = asyncio.create_task(_all_ends(streams))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = not working.done()
        if is_gone:
            for stream in streams:
                stream.cancel()
        outputs = await working  # also of those that nobody waits for: they are paid for
        call.outputs += outputs
        if is_gone:
            raise ClientGoneError
        return outputs
    finally:
        leaving.cancel()
        working.cancel()
        for stream in streams:
            stream.cancel()


async def _all_ends(streams: Sequence[Stream]) -> list[RequestOutput]:
    """In a task of its own: gathered futures that are cancelled complain that nobody looked."""
    return await asyncio.gather(*(stream.output() for stream in streams))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- answers


async def _run(
    service: Service, asked: Asked, with_errors: Errors, request: Request
) -> list[RequestOutput]:
    """Every prompt to its end; the first error is the answer's."""
    streams = await with_errors.of(asked.submit(service, stream=False))
    outputs = await outputs_of(request, asked.call, streams)
    for output in outputs:
        if output.error is not None:
            raise with_errors.as_api_error(output.error)
    return outputs


async def _stream(
    service: Service, asked: Asked, with_errors: Errors, kind: type[Frames]
) -> Response:
    streams = await with_errors.of(asked.submit(service, stream=True))
    options = asked.body.stream_options
    frames = kind(
        asked.answer_id,
        asked.created,
        service.name,
        FINGERPRINT,
        ScoreWriter(asked.llm.tokenizer),
        with_usage=bool(options and options.include_usage),
        with_token_ids=bool(asked.body.return_token_ids),
    )

    def ending(outputs: Sequence[RequestOutput]) -> bytes:
        return frames.ending(usage_of(outputs), traces_of(asked.call, outputs) or ())

    return StreamReply(
        service,
        asked.call,
        streams,
        frames,
        choices_each=asked.body.n or 1,
        ending=ending,
        as_api_error=with_errors.as_api_error,
    )


def _chat_completion(
    service: Service, asked: Asked, outputs: Sequence[RequestOutput]
) -> ChatCompletion:
    scores = ScoreWriter(asked.llm.tokenizer)
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=completion.text),
            logprobs=None if completion.logprobs is None else scores.for_chat(completion.logprobs),
            finish_reason=_finish_word(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if asked.body.return_token_ids else None,
        )
        for index, completion in _numbered(outputs)
    ]
    return ChatCompletion(
        id=asked.answer_id,
        created=asked.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=choices,
        usage=usage_of(outputs),
        quire_trace=traces_of(asked.call, outputs),
    )


def _text_completion(
    service: Service, asked: Asked, outputs: Sequence[RequestOutput]
) -> TextCompletion:
    scores = ScoreWriter(asked.llm.tokenizer)
    choices = [
        CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=None if completion.logprobs is None else scores.for_text(completion.logprobs),
            finish_reason=_finish_word(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if asked.body.return_token_ids else None,
        )
        for index, completion in _numbered(outputs)
    ]
    return TextCompletion(
        id=asked.answer_id,
        created=asked.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=choices,
        usage=usage_of(outputs),
        quire_trace=traces_of(asked.call, outputs),
    )


def _numbered(outputs: Sequence[RequestOutput]) -> list[tuple[int, Completion]]:
    """All choices in order: those of the first prompt, then those of the next."""
    completions = [completion for output in outputs for completion in output.completions]
    return list(enumerate(completions))


def _finish_word(completion: Completion) -> Any:
    assert completion.finish_reason is not None
    return completion.finish_reason.value


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.completions)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )


def traces_of(call: Call, outputs: Sequence[RequestOutput]) -> list[TraceReport] | None:
    """Where the time of each prompt's request went, if the client wants to know."""
    return [trace_of(output) for output in outputs] if call.wants_trace else None


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
    )


def json_reply(reply: Any) -> Response:
    content = reply.model_dump_json(exclude=_absent(reply))
    return Response(content, media_type="application/json")


def _absent(reply: Any) -> Any:
    """Fields of ours that nobody asked for are left out; OpenAI's nulls stay."""
    hidden: dict[str, Any] = {}
    if getattr(reply, "quire_trace", 0) is None:
        hidden["quire_trace"] = True
    choices = getattr(reply, "choices", ())
    if choices and choices[0].token_ids is None:
        hidden["choices"] = {"__all__": {"token_ids"}}
    return hidden
