"""Tokens of texts and texts of tokens, as the model's tokenizer has them."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from quire.llm import AsyncLLM
from quire.server.bodies import checked, prepared
from quire.server.calls import Call
from quire.server.errors import ApiError
from quire.server.generation import Errors, begin
from quire.server.replies import DetokenizedText, TokenList
from quire.server.schemas import DetokenizeRequest, TokenizeRequest
from quire.server.service import Service
from quire.tokenizer import Tokenizer


async def tokenize(service: Service, request: Request) -> Response:
    return await _answered(service, request, _tokenize)


async def detokenize(service: Service, request: Request) -> Response:
    return await _answered(service, request, _detokenize)


async def _answered(
    service: Service, request: Request, answer: Callable[[Service, Call, AsyncLLM, bytes], str]
) -> Response:
    """From the body to the answer in one go, in the pool."""
    call, llm = begin(service, request)
    content = await prepared(service, request, partial(answer, service, call, llm), is_quick=False)
    return Response(content, media_type="application/json")


def _tokenize(service: Service, call: Call, llm: AsyncLLM, data: bytes) -> str:
    body = checked(data, TokenizeRequest, service.body_limits)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    with Errors(service, TokenizeRequest):
        tokens = _tokens_of(llm, body, service.parses_control_tokens(call.key))
    return TokenList(
        tokens=tokens, count=len(tokens), max_model_len=llm.max_context
    ).model_dump_json()


def _tokens_of(llm: AsyncLLM, body: TokenizeRequest, parse_control_tokens: bool) -> list[int]:
    if body.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        chat = llm.prompts.read_chat(messages, parse_control_tokens=parse_control_tokens)
        return list(chat.tokens)
    assert body.prompt is not None
    return _tokenizer(llm).encode(
        body.prompt, add_special=body.add_special_tokens, limit=llm.max_context
    )


def _detokenize(service: Service, _: Call, llm: AsyncLLM, data: bytes) -> str:
    body = checked(data, DetokenizeRequest, service.body_limits)
    service.check_model(body.model)
    tokenizer = _tokenizer(llm)
    if len(body.tokens) > llm.max_context:  # a token may be long: the text could take gigabytes
        raise ApiError(
            400,
            f"tokens has {len(body.tokens)} entries, more than the limit of {llm.max_context}",
            param="tokens",
        )
    for place, token in enumerate(body.tokens):
        if token >= tokenizer.vocabulary_size:
            raise ApiError(
                400,
                f"tokens[{place}] is {token}; the vocabulary has 0 to "
                f"{tokenizer.vocabulary_size - 1}",
                param="tokens",
            )
    return DetokenizedText(
        prompt=tokenizer.decode(body.tokens, skip_special=False)
    ).model_dump_json()


def _tokenizer(llm: AsyncLLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: it takes token ids", code="no_tokenizer")
    return llm.tokenizer
