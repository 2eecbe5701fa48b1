"""Endpoints that encode and do not generate: embeddings, /tokenize and /detokenize."""

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import RequestOutput
from quire.core.version import own_version
from quire.llm import OnlineModel
from quire.llm.chats import ChatOptions
from quire.llm.forward import NO_TOKENS, unit_vector
from quire.server.calls import Call
from quire.server.errors import ApiError
from quire.server.model_service import ModelService
from quire.server.replies import (
    DetokenizedText,
    EmbeddingList,
    EmbeddingUsage,
    GenerationSettings,
    ServerProperties,
    TokenizerInfo,
    TokenList,
)
from quire.server.schemas import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from quire.server.submission import (
    ErrorMapper,
    PreparedBody,
    call_and_model,
    outputs_of,
    prepare_body,
    run_in_pool,
    submit_all,
)
from quire.tokenizer import Tokenizer

# ---- embeddings


_MANY_NUMBERS = 4096  # take some milliseconds to write: not on the event loop


async def embed(service: ModelService, request: Request) -> Response:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, EmbeddingRequest)
    prepare = partial(_prepare, service, llm, call, errors)
    body, prompts = await prepare_body(service, request, prepare, is_quick=True)
    call.user = body.user
    submitting = submit_all(service, llm, call, body, prompts, stream=False, pooling=True)
    streams = await errors.of(submitting)
    outputs = await outputs_of(request, call, streams)
    for output in outputs:
        if output.error is not None:
            raise errors.as_api_error(output.error)
    write = partial(_written, service.name, outputs, body.encoding_format, body.dimensions)
    is_long = sum(np.size(output.pooled) for output in outputs) > _MANY_NUMBERS
    content = await run_in_pool(service, request, write) if is_long else write()
    return Response(content, media_type="application/json")


def _prepare(
    service: ModelService, llm: OnlineModel, call: Call, errors: ErrorMapper, data: bytes
) -> PreparedBody[EmbeddingRequest]:
    body = service.read_body(call, data, EmbeddingRequest)
    service.check_model(body.model)
    if body.dimensions is not None and body.dimensions > llm.embedding_size:
        message = f"dimensions is {body.dimensions}; the model has {llm.embedding_size}"
        raise ApiError(400, message, param="dimensions")
    with errors:
        prompts = [(llm.prompts.read(text).without_text(), NO_TOKENS) for text in body.prompts]
    return PreparedBody(body.model_copy(update={"input": ""}), prompts)


def _written(
    model: str, outputs: list[RequestOutput], encoding: str | None, dimensions: int | None
) -> bytes:
    """The answer as JSON, one vector at a time, so that no call holds the interpreter for long."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    head = EmbeddingList(data=[], model=model, usage=usage).model_dump_json(exclude={"data"})
    items = [
        f'{{"object":"embedding","index":{index},'
        f'"embedding":{json.dumps(_vector(output.pooled[:dimensions], encoding))}}}'
        for index, output in enumerate(outputs)
    ]
    return f'{head[:-1]},"data":[{",".join(items)}]}}'.encode()


def _vector(pooled: Any, encoding: str | None) -> list[float] | str:
    unit = unit_vector(pooled)
    if encoding == "base64":
        return base64.b64encode(unit.astype("<f4").tobytes()).decode()
    return [float(value) for value in unit]


# ---- /tokenize and /detokenize


async def tokenize(service: ModelService, request: Request) -> Response:
    return await _answered(service, request, _tokenize)


async def detokenize(service: ModelService, request: Request) -> Response:
    return await _answered(service, request, _detokenize)


async def _answered(
    service: ModelService,
    request: Request,
    answer: Callable[[ModelService, Call, OnlineModel, bytes], str],
) -> Response:
    """From the body to the answer in one job of the pool."""
    call, llm = call_and_model(service, request)
    content = await prepare_body(
        service, request, partial(answer, service, call, llm), is_quick=False
    )
    return Response(content, media_type="application/json")


def _tokenize(service: ModelService, call: Call, llm: OnlineModel, data: bytes) -> str:
    body = service.read_body(call, data, TokenizeRequest)
    service.check_model(body.model)
    _check_tokenize(body)
    with ErrorMapper(service, TokenizeRequest):
        tokens = _tokens_of(llm, body, service.parses_control_tokens(call.key))
    texts = None
    if body.return_token_strs:
        texts = [_tokenizer(llm).token_text(token) for token in tokens]
    return TokenList(
        tokens=tokens, count=len(tokens), max_model_len=llm.max_context, token_strs=texts
    ).model_dump_json()


_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _check_tokenize(body: TokenizeRequest) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        message = "add_special_tokens is for a text: the chat template writes them"
        raise ApiError(400, message, param="add_special_tokens")
    for name in _OF_CHATS:
        if body.prompt is not None and getattr(body, name):
            raise ApiError(400, f"{name} is for messages, and prompt is a text", param=name)


def _tokens_of(llm: OnlineModel, body: TokenizeRequest, parse_control_tokens: bool) -> list[int]:
    if body.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        chat = llm.prompts.read_chat(
            messages,
            ChatOptions(body.tools, chat_template_kwargs=body.chat_template_kwargs),
            parse_control_tokens=parse_control_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )
        return list(chat.tokens)
    assert body.prompt is not None
    add_special = body.add_special_tokens is not False
    return _tokenizer(llm).encode(body.prompt, add_special=add_special, limit=llm.max_context)


def _detokenize(service: ModelService, call: Call, llm: OnlineModel, data: bytes) -> str:
    body = service.read_body(call, data, DetokenizeRequest)
    service.check_model(body.model)
    tokenizer = _tokenizer(llm)
    if len(body.tokens) > llm.max_context:  # a token may be long: the text could take gigabytes
        raise ApiError(
            400,
            f"tokens has {len(body.tokens)} entries, more than the limit of {llm.max_context}",
            param="tokens",
        )
    for index, token in enumerate(body.tokens):
        if token >= tokenizer.vocabulary_size:
            raise ApiError(
                400,
                f"tokens[{index}] is {token}; the vocabulary has 0 to "
                f"{tokenizer.vocabulary_size - 1}",
                param="tokens",
            )
    return DetokenizedText(
        prompt=tokenizer.decode(body.tokens, skip_special=False)
    ).model_dump_json()


def _tokenizer(llm: OnlineModel) -> Tokenizer:
    if llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: it takes token ids", code="no_tokenizer")
    return llm.tokenizer


# ---- what there is to encode with


def tokenizer_info_of(llm: OnlineModel) -> TokenizerInfo:
    tokenizer = _tokenizer(llm)
    bos, eos, unknown, padding = (
        None if token is None else tokenizer.token_name(token)
        for token in (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.unknown_token_id,
            tokenizer.padding_token_id,
        )
    )
    return TokenizerInfo(
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        pad_token=padding,
        chat_template=tokenizer.chat_template,
        model_max_length=llm.max_context,
    )


def properties_of(llm: OnlineModel, name: str) -> ServerProperties:
    info = None if llm.tokenizer is None else tokenizer_info_of(llm)
    return ServerProperties(
        default_generation_settings=GenerationSettings(n_ctx=llm.max_context),
        total_slots=llm.max_batch_size,
        model_path=name,
        chat_template=(info and info.chat_template) or "",
        bos_token=(info and info.bos_token) or "",
        eos_token=(info and info.eos_token) or "",
        build_info=f"quire {own_version()}",
    )
