"""Conversations in any dialect, and plain completions: from a body to an answer, whole or as a
stream."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.chat import AnswerParser
from quire.core.errors import RequestError
from quire.core.request import RequestOutput
from quire.llm import OnlineModel
from quire.llm.chats import ChatOptions
from quire.llm.prompts import Prepared
from quire.server.calls import Call
from quire.server.dialect import Choice, Dialect, Frames, GenerationCall, choices_of
from quire.server.echoes import echoed
from quire.server.errors import ApiError
from quire.server.fields import Strict
from quire.server.model_service import ModelService
from quire.server.openai_answers import ChatFrames, TextFrames, text_reply
from quire.server.resuming import StreamIds, first_id, not_resumed, with_seeds
from quire.server.schemas import (
    ChatRequest,
    CompletionRequest,
    Generation,
)
from quire.server.streaming import StreamReply
from quire.server.submission import (
    ErrorMapper,
    PreparedBody,
    Prompts,
    call_and_model,
    outputs_of,
    prepare_body,
    run_in_pool,
)

B = TypeVar("B", bound=Strict)
G = TypeVar("G", bound=Generation)
K = TypeVar("K")
_MANY_LOGPROBS = 1000  # take some milliseconds to write: not on the event loop

MakeFrames = Callable[[ModelService, GenerationCall], Frames]
Reply = Callable[[ModelService, GenerationCall, Sequence[RequestOutput], Sequence[Choice]], bytes]


class _PreparedChat(NamedTuple):
    body: PreparedBody[ChatRequest]
    kept: Any  # Translation.kept


async def answer_conversation(
    service: ModelService, request: Request, dialect: Dialect[Any, Any]
) -> Response:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, dialect.schema, dialect.field_names)
    prepare = partial(_prepare_chat, service, llm, call, errors, dialect)
    # Never on the event loop: a template may take long.
    prepared = await prepare_body(service, request, prepare, is_quick=False)
    body = await _with_grammars(service, request, llm, errors, prepared.body)
    generation = _generation_call(call, llm, body, dialect.id_prefix, prepared.kept)
    if dialect.detach is not None:
        detached = await dialect.detach(service, generation)
        if detached is not None:
            return detached
    return await _answer(service, request, generation, errors, dialect.frames, dialect.reply)


async def count_prompt_tokens(
    service: ModelService, request: Request, dialect: Dialect[Any, Any]
) -> int:
    """The number of tokens of the prompt that `answer_conversation` would compute."""
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, dialect.schema, dialect.field_names)
    prepare = partial(_prepare_chat, service, llm, call, errors, dialect)
    prepared = await prepare_body(service, request, prepare, is_quick=False)
    return sum(len(prompt.tokens) for prompt, _ in prepared.body.prompts)


async def complete_text(service: ModelService, request: Request) -> Response:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, CompletionRequest)
    prepare = partial(_prepare_text, service, llm, call, errors)
    body = await prepare_body(service, request, prepare, is_quick=True)
    body = await _with_grammars(service, request, llm, errors, body)
    generation = _generation_call(call, llm, body, "cmpl-")
    return await _answer(service, request, generation, errors, TextFrames, text_reply)


async def answer_text(
    service: ModelService, request: Request, body: CompletionRequest, dialect: Dialect[Any, Any]
) -> Response:
    """Of a dialect whose body meant a prompt without a template; `to_chat` is not called."""
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, dialect.schema, dialect.field_names)
    prepare = partial(
        _prepared_text, service, llm, errors, body, fits_max_tokens=dialect.fits_max_tokens
    )
    prepared = await run_in_pool(service, request, prepare)
    prepared = await _with_grammars(service, request, llm, errors, prepared)
    generation = _generation_call(call, llm, prepared, dialect.id_prefix)
    return await _answer(service, request, generation, errors, dialect.frames, dialect.reply)


def _generation_call(
    call: Call, llm: OnlineModel, prepared: PreparedBody[G], prefix: str, kept: Any = None
) -> GenerationCall:
    call.user = prepared.body.user
    identity = call.identity
    answer_id = f"{prefix}{call.id if identity is None else identity.name}"
    created = int(time.time()) if identity is None else identity.created
    prompts = prepared.prompts
    if identity is not None:
        prompts = with_seeds(prompts, identity.seed)
    turn = prepared.prompts[0][0].turn
    parser = AnswerParser if turn is None else turn.new_parser
    return GenerationCall(prepared.body, prompts, call, llm, answer_id, created, kept, parser)


# ---- reading, in the pool


def _prepare_chat(
    service: ModelService,
    llm: OnlineModel,
    call: Call,
    errors: ErrorMapper,
    dialect: Dialect[B, K],
    data: bytes,
) -> _PreparedChat:
    given = service.read_body(call, data, dialect.schema)
    with errors:
        body, kept = dialect.to_chat(service, call, given)
        service.check_model(body.model)
        _check_chat(body)
        prompt = read_conversation(service, llm, call, body)
        changes: dict[str, Any] = {"messages": [], "chat_template_kwargs": None, "tools": None}
        changes["documents"] = None
        if body.max_completion_tokens is not None:
            changes["max_tokens"] = body.max_completion_tokens
        room = llm.max_context - len(prompt.tokens)
        body = body.model_copy(update=changes)
        if dialect.fits_max_tokens:
            body = _fitted(body, room)
        logprobs = body.top_logprobs or 0 if body.logprobs else None
        params = body.sampling(room, logprobs, llm.sampling_defaults)
        assert prompt.turn is not None
        params = prompt.turn.params(params)
        return _PreparedChat(PreparedBody(body, [(prompt.without_text(), params)]), kept)


def _fitted(body: G, room: int) -> G:
    """With as many tokens at most as the context has room for; a prompt that leaves none is refused
    later."""
    if body.max_tokens is None or body.max_tokens <= room or room < 1:
        return body
    return body.model_copy(update={"max_tokens": room})


def _variables(llm: OnlineModel, body: ChatRequest) -> dict[str, Any] | None:
    """The template's variables, documents among them; a template that does not know of documents
    would lose them."""
    if body.documents is None:
        return body.chat_template_kwargs
    if "documents" not in llm.prompts.template.source:
        message = "the model's chat template writes no documents: put them into a message"
        raise RequestError(message, param="documents")
    return {**(body.chat_template_kwargs or {}), "documents": body.documents}


def _last(llm: OnlineModel, body: Generation) -> int | None:
    """How many tokens at the end of the prompt are used; None: all."""
    if body.truncate_prompt_tokens == -1:
        return max(1, llm.max_context - (1 if body.max_tokens is None else body.max_tokens))
    return body.truncate_prompt_tokens


def read_conversation(
    service: ModelService, llm: OnlineModel, call: Call, body: ChatRequest
) -> Prepared:
    """The prompt of a conversation, with its tools; not for the event loop."""
    messages = [
        message.model_dump(exclude_none=True, exclude={"cache_control"})
        for message in body.messages
    ]
    tools = [
        tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in body.tools or ()
    ]
    options = ChatOptions(
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        thinking_token_budget=body.thinking_token_budget,
        chat_template_kwargs=_variables(llm, body),
        is_structured=bool(body.constraint_fields),
    )
    return llm.prompts.read_chat(
        messages,
        options,
        parse_control_tokens=service.parses_control_tokens(call.key),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        last=_last(llm, body),
    )


def _prepare_text(
    service: ModelService, llm: OnlineModel, call: Call, errors: ErrorMapper, data: bytes
) -> PreparedBody[CompletionRequest]:
    body = service.read_body(call, data, CompletionRequest)
    return _prepared_text(service, llm, errors, body)


def _prepared_text(
    service: ModelService,
    llm: OnlineModel,
    errors: ErrorMapper,
    body: CompletionRequest,
    *,
    fits_max_tokens: bool = False,
) -> PreparedBody[CompletionRequest]:
    service.check_model(body.model)
    _check_text(body)
    prompts: Prompts = []
    add_special = body.add_special_tokens is not False
    with errors:
        for text in body.prompts:
            asked = {"prompt": text, "suffix": body.suffix} if body.suffix else text
            prompt = llm.prompts.read(asked, add_special=add_special, last=_last(llm, body))
            room = llm.max_context - len(prompt.tokens)
            kept = echoed(llm.tokenizer, prompt) if body.echo else prompt.without_text()
            fitted = _fitted(body, room) if fits_max_tokens else body
            params = fitted.sampling(room, body.logprobs, llm.sampling_defaults)
            prompts.append((kept, prompt.with_ends(params)))
    return PreparedBody(body.model_copy(update={"prompt": "", "suffix": None}), prompts)


async def _with_grammars(
    service: ModelService,
    request: Request,
    llm: OnlineModel,
    errors: ErrorMapper,
    prepared: PreparedBody[G],
) -> PreparedBody[G]:
    """The same with the grammar compiled that the answers must follow: some take long."""
    if not any(params.needs_mask for _, params in prepared.prompts):
        return prepared
    field = next(iter(prepared.body.constraint_fields), "tools")

    def compile_all() -> PreparedBody[G]:
        with errors:
            try:
                prompts = [
                    (prompt._replace(grammar=llm.prepare_grammar(params)), params)
                    for prompt, params in prepared.prompts
                ]
            except RequestError as error:
                own = error.param if error.param != "structured" else field
                raise RequestError(str(error), param=own) from None
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
    _check_generation(body)
    if body.max_tokens == 0 and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens is 0 and prompt_logprobs not given", param="max_tokens")


def _check_text(body: CompletionRequest) -> None:
    _check_generation(body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        message = "max_tokens is 0, and neither echo nor prompt_logprobs asks for the prompt"
        raise ApiError(400, message, param="max_tokens")
    if body.echo and body.logprobs is not None and body.stream:
        message = "echo with logprobs is not streamed: leave one of the three out"
        raise ApiError(400, message, param="echo")
    if body.echo and body.suffix:
        message = "echo has no place for what follows: leave echo or suffix out"
        raise ApiError(400, message, param="echo")
    if body.suffix and body.add_special_tokens is not None:
        message = "the parts of a text are marked by the model's own tokens: leave it out"
        raise ApiError(400, f"add_special_tokens: {message}", param="add_special_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of must be n ({body.n or 1}): use n and choose yourself"
        raise ApiError(400, message, param="best_of")


def _check_generation(body: Generation) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs is not streamed: leave stream out"
        raise ApiError(400, message, param="prompt_logprobs")
    if body.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    if body.spaces_between_special_tokens and body.skip_special_tokens is False:
        message = "spaces_between_special_tokens: quire writes none between control tokens"
        raise ApiError(400, message, param="spaces_between_special_tokens")


# ---- answers


async def _answer(
    service: ModelService,
    request: Request,
    generation: GenerationCall,
    errors: ErrorMapper,
    make_frames: MakeFrames,
    reply: Reply,
) -> Response:
    is_stream = bool(generation.body.stream)
    ids = None
    if generation.call.wants_ids:
        can_resume = is_stream and make_frames in _RESUMED
        generation, ids = _with_ids(generation, can_resume=can_resume)
    streams = await errors.of(generation.submit(service, stream=is_stream))
    if is_stream:
        frames = make_frames(service, generation)
        return StreamReply(service, generation, streams, frames, errors.as_api_error, ids)
    outputs = await outputs_of(request, generation.call, streams)
    for output in outputs:
        if output.error is not None:
            raise errors.as_api_error(output.error)

    def write() -> bytes:
        return reply(service, generation, outputs, choices_of(generation, outputs))

    # In the pool where it has many log-probabilities.
    is_long = _num_logprobs(outputs) > _MANY_LOGPROBS
    content = await run_in_pool(service, request, write) if is_long else write()
    await generation.call.write_all()
    return Response(content, media_type="application/json")


_RESUMED: tuple[MakeFrames, ...] = (ChatFrames, TextFrames)  # one event at a time


def _with_ids(
    generation: GenerationCall, *, can_resume: bool
) -> tuple[GenerationCall, StreamIds | None]:
    """The same with all that the ids of its events say: seeds, and its own id and time."""
    call = generation.call
    if not can_resume:
        if call.last_event_id is None:
            return generation, None
        raise not_resumed(call.path)
    num_choices = len(generation.prompts) * (generation.body.n or 1)
    first = first_id(
        call.last_event_id,
        call.body_digest,
        generation.answer_id,
        generation.created,
        num_choices,
        None if call.identity is None else call.identity.seed,
    )
    found = replace(
        generation,
        prompts=with_seeds(generation.prompts, first.seed),
        answer_id=first.answer,
        created=first.created,
    )
    return found, StreamIds(first)


def _num_logprobs(outputs: Sequence[RequestOutput]) -> int:
    scored = [output.prompt_logprobs for output in outputs]
    scored += [completion.logprobs for output in outputs for completion in output.completions]
    return sum((1 + len(scores[0].top)) * len(scores) for scores in scored if scores)
