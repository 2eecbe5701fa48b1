"""Tokens of texts and texts of tokens, as the model's tokenizer has them."""

import asyncio

from starlette.requests import Request

from quire.llm import AsyncLLM
from quire.server.errors import ApiError
from quire.server.generation import Errors, begin
from quire.server.replies import DetokenizedText, TokenList
from quire.server.schemas import DetokenizeRequest, TokenizeRequest
from quire.server.service import Service
from quire.tokenizer import Tokenizer


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> TokenList:
    _, llm = begin(service, body, request)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    with_errors = Errors(service, body)
    if body.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        tokens = list((await with_errors.of(llm.read_chat(messages))).tokens)
    else:
        assert body.prompt is not None
        tokenizer = _tokenizer(llm)
        tokens = await with_errors.of(
            asyncio.to_thread(
                tokenizer.encode,
                body.prompt,
                add_special=body.add_special_tokens,
                limit=llm.max_context,
            )
        )
    return TokenList(tokens=tokens, count=len(tokens), max_model_len=llm.max_context)


async def detokenize(
    service: Service, body: DetokenizeRequest, request: Request
) -> DetokenizedText:
    _, llm = begin(service, body, request)
    tokenizer = _tokenizer(llm)
    for place, token in enumerate(body.tokens):
        if token >= tokenizer.vocabulary_size:
            raise ApiError(
                400,
                f"tokens[{place}] is {token}; the vocabulary has 0 to "
                f"{tokenizer.vocabulary_size - 1}",
                param="tokens",
            )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
    return DetokenizedText(prompt=text)


def _tokenizer(llm: AsyncLLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: it takes token ids", code="no_tokenizer")
    return llm.tokenizer
