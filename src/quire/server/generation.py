"""Chat and plain completions: from a body to an answer, whole or as a stream."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import RequestError
from quire.core.request import Completion, RequestOutput
from quire.core.version import own_version
from quire.engine.aio import Stream
from quire.llm import AsyncLLM
from quire.server.bodies import parse_body
from quire.server.calls import Call
from quire.server.errors import ApiError
from quire.server.replies import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    CompletionChoice,
    LogprobWriter,
    PromptDetails,
    TextCompletion,
    TraceReport,
    Usage,
)
from quire.server.schemas import (
    ChatRequest,
    CompletionRequest,
    Generation,
)
from quire.server.service import Service
from quire.server.streaming import ChatFrames, Frames, StreamReply, TextFrames
from quire.server.submission import (
    ErrorMapper,
    PreparedBody,
    Prompts,
    call_and_model,
    outputs_of,
    prepare_body,
    run_in_pool,
    submit_all,
)

T = TypeVar("T")
G = TypeVar("G", bound=Generation)
FINGERPRINT = f"quire-{own_version()}"
_MANY_LOGPROBS = 1000  # take some milliseconds to write: not on the event loop


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call that generates: what to complete, and how."""

    body: Generation
    prompts: Prompts
    call: Call
    llm: AsyncLLM
    answer_id: str
    created: int

    async def submit(self, service: Service, *, stream: bool) -> list[Stream]:
        call, body = self.call, self.body
        return await submit_all(service, self.llm, call, body, self.prompts, stream=stream)


async def complete_chat(service: Service, request: Request) -> Response:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, ChatRequest)
    prepare = partial(_prepare_chat, service, llm, call, errors)
    # Never on the event loop: a template may take long.
    body = await prepare_body(service, request, prepare, is_quick=False)
    body = await _with_grammars(service, request, llm, errors, body)
    generation = _generation_call(call, llm, body, "chatcmpl")
    if generation.body.stream:
        return await _stream(service, generation, errors, ChatFrames)
    outputs = await _run(service, generation, errors, request)
    return await _answer(
        service, request, outputs, partial(_chat_reply, service, generation, outputs)
    )


async def complete_text(service: Service, request: Request) -> Response:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, CompletionRequest)
    prepare = partial(_prepare_text, service, llm, errors)
    body = await prepare_body(service, request, prepare, is_quick=True)
    body = await _with_grammars(service, request, llm, errors, body)
    generation = _generation_call(call, llm, body, "cmpl")
    if generation.body.stream:
        return await _stream(service, generation, errors, TextFrames)
    outputs = await _run(service, generation, errors, request)
    return await _answer(
        service, request, outputs, partial(_text_reply, service, generation, outputs)
    )


def _generation_call(
    call: Call, llm: AsyncLLM, prepared: PreparedBody[G], kind: str
) -> GenerationCall:
    call.user = prepared.body.user
    answer_id = f"{kind}-{call.id}"
    return GenerationCall(prepared.body, prepared.prompts, call, llm, answer_id, int(time.time()))


# ---- reading, in the pool


def _prepare_chat(
    service: Service, llm: AsyncLLM, call: Call, errors: ErrorMapper, data: bytes
) -> PreparedBody[ChatRequest]:
    body = parse_body(data, ChatRequest, service.body_limits)
    service.check_model(body.model)
    _check_chat(body)
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    variables = body.chat_template_kwargs
    changes: dict[str, Any] = {"messages": [], "chat_template_kwargs": None}
    if body.max_completion_tokens is not None:
        changes["max_tokens"] = body.max_completion_tokens
    body = body.model_copy(update=changes)
    with errors:
        prompt = llm.prompts.read_chat(
            messages,
            chat_template_kwargs=variables,
            parse_control_tokens=service.parses_control_tokens(call.key),
        )
        room = llm.max_context - len(prompt.tokens)
        logprobs = body.top_logprobs or 0 if body.logprobs else None
        return PreparedBody(
            body, [(prompt.without_text(), body.sampling(room, logprobs, llm.sampling_defaults))]
        )


def _prepare_text(
    service: Service, llm: AsyncLLM, errors: ErrorMapper, data: bytes
) -> PreparedBody[CompletionRequest]:
    body = parse_body(data, CompletionRequest, service.body_limits)
    service.check_model(body.model)
    _check_streaming(body)
    prompts: Prompts = []
    with errors:
        for text in body.prompts:
            prompt = llm.prompts.read(text)
            room = llm.max_context - len(prompt.tokens)
            prompts.append(
                (prompt.without_text(), body.sampling(room, body.logprobs, llm.sampling_defaults))
            )
    return PreparedBody(body.model_copy(update={"prompt": ""}), prompts)


async def _with_grammars(
    service: Service,
    request: Request,
    llm: AsyncLLM,
    errors: ErrorMapper,
    prepared: PreparedBody[G],
) -> PreparedBody[G]:
    """The same with the grammar compiled that the answers must follow: some take long."""
    fields = prepared.body.constraint_fields
    if not fields:
        return prepared

    def compile_all() -> PreparedBody[G]:
        with errors:
            try:
                prompts = [
                    (prompt._replace(grammar=llm.prepare_grammar(params)), params)
                    for prompt, params in prepared.prompts
                ]
            except RequestError as error:
                raise RequestError(str(error), param=fields[0]) from None
        return prepared._replace(prompts=prompts)

    return await run_in_pool(service, request, compile_all)


# ---- checks


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


# ---- answers


async def _run(
    service: Service, generation: GenerationCall, errors: ErrorMapper, request: Request
) -> list[RequestOutput]:
    """All outputs; the first error is raised."""
    streams = await errors.of(generation.submit(service, stream=False))
    outputs = await outputs_of(request, generation.call, streams)
    for output in outputs:
        if output.error is not None:
            raise errors.as_api_error(output.error)
    return outputs


async def _stream(
    service: Service, generation: GenerationCall, errors: ErrorMapper, kind: type[Frames]
) -> Response:
    streams = await errors.of(generation.submit(service, stream=True))
    options = generation.body.stream_options
    frames = kind(
        generation.answer_id,
        generation.created,
        service.name,
        FINGERPRINT,
        LogprobWriter(generation.llm.tokenizer),
        with_usage=bool(options and options.include_usage),
        with_token_ids=bool(generation.body.return_token_ids),
    )

    def ending(outputs: Sequence[RequestOutput]) -> bytes:
        return frames.ending(usage_of(outputs), traces_of(generation.call, outputs) or ())

    return StreamReply(
        service,
        generation.call,
        streams,
        frames,
        choices_each=generation.body.n or 1,
        ending=ending,
        as_api_error=errors.as_api_error,
    )


async def _answer(
    service: Service,
    request: Request,
    outputs: Sequence[RequestOutput],
    write: Callable[[], bytes],
) -> Response:
    """Written in the pool where it has many log-probabilities."""
    num_logprobs = sum(
        (1 + len(completion.logprobs[0].top)) * len(completion.logprobs)
        for output in outputs
        for completion in output.completions
        if completion.logprobs
    )
    is_long = num_logprobs > _MANY_LOGPROBS
    content = await run_in_pool(service, request, write) if is_long else write()
    return Response(content, media_type="application/json")


def _chat_reply(
    service: Service, generation: GenerationCall, outputs: Sequence[RequestOutput]
) -> bytes:
    writer = LogprobWriter(generation.llm.tokenizer)
    choices = []
    for index, completion in _all_completions(outputs):
        choice = ChatChoice(
            index=index,
            message=ChatMessage(content=completion.text),
            logprobs=None,
            finish_reason=_finish_reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if generation.body.return_token_ids else None,
        )
        logprobs = completion.logprobs
        written = None if logprobs is None else writer.for_chat(logprobs)
        choices.append(_with_logprobs(choice, written))
    reply = ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=[],
        usage=usage_of(outputs),
        quire_trace=traces_of(generation.call, outputs),
    )
    return _with_choices(reply, choices)


def _text_reply(
    service: Service, generation: GenerationCall, outputs: Sequence[RequestOutput]
) -> bytes:
    writer = LogprobWriter(generation.llm.tokenizer)
    choices = []
    for index, completion in _all_completions(outputs):
        choice = CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=None,
            finish_reason=_finish_reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if generation.body.return_token_ids else None,
        )
        logprobs = completion.logprobs
        written = None if logprobs is None else writer.for_text(logprobs).json
        choices.append(_with_logprobs(choice, written))
    reply = TextCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=service.name,
        system_fingerprint=FINGERPRINT,
        choices=[],
        usage=usage_of(outputs),
        quire_trace=traces_of(generation.call, outputs),
    )
    return _with_choices(reply, choices)


def _with_logprobs(choice: ChatChoice | CompletionChoice, logprobs: str | None) -> str:
    """A choice as JSON, with its log-probabilities, which are JSON already."""
    absent = {"logprobs"} if choice.token_ids is not None else {"logprobs", "token_ids"}
    return f'{choice.model_dump_json(exclude=absent)[:-1]},"logprobs":{logprobs or "null"}}}'


def _with_choices(reply: ChatCompletion | TextCompletion, choices: Sequence[str]) -> bytes:
    """The reply as JSON. Fields of ours are left out where they were not asked for; OpenAI's nulls
    stay."""
    absent = {"choices"} if reply.quire_trace is not None else {"choices", "quire_trace"}
    head = reply.model_dump_json(exclude=absent)[:-1]
    return f'{head},"choices":[{",".join(choices)}]}}'.encode()


def _all_completions(outputs: Sequence[RequestOutput]) -> list[tuple[int, Completion]]:
    """All choices in order: those of the first prompt, then those of the next."""
    completions = [completion for output in outputs for completion in output.completions]
    return list(enumerate(completions))


def _finish_reason(completion: Completion) -> Any:
    assert completion.finish_reason is not None
    return completion.finish_reason.value


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(c.num_tokens for output in outputs for c in output.completions)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )


def traces_of(call: Call, outputs: Sequence[RequestOutput]) -> list[TraceReport] | None:
    """Timings of each prompt's request, if the client asked for them."""
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
        first_step=metrics.first_step,
        last_step=metrics.last_step,
        failed_steps=metrics.failed_steps,
    )
