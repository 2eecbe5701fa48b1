"""/rerank and /score: how well documents answer a query, by models that were trained to say so."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import RequestOutput
from quire.engine.aio import Stream
from quire.llm import OnlineModel
from quire.llm.reranking import Reranker
from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import ApiError
from quire.server.fields import Refused, Strict, accepted, refused
from quire.server.model_service import ModelService
from quire.server.replies import EmbeddingUsage
from quire.server.schemas import MAX_PROMPTS, CommonFields
from quire.server.submission import (
    ErrorMapper,
    Prompts,
    call_and_model,
    outputs_of,
    prepare_body,
    submit_all,
)

# ---- bodies


class Document(Strict):
    text: str = Field(description="the document")


def _as_document(given: Any) -> Any:
    return {"text": given} if isinstance(given, str) else given


Documents = Annotated[
    list[Annotated[Document, BeforeValidator(_as_document)]],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
]
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
_LIMIT = Field(
    default=None, ge=1, description="of a longer document only so many tokens at its beginning"
)
_INSTRUCTION = Field(
    default=None,
    max_length=4096,
    description="what the query is for; left out: to find passages that answer a web search",
)


class RerankRequest(CommonFields):
    """Jina's and Cohere's."""

    query: str = Field(min_length=1, description="what is searched for")
    documents: Documents = Field(description='texts, or objects of {"text": ...}')
    top_n: int | None = Field(default=None, ge=1, description="only so many, the best ones")
    return_documents: bool | None = Field(
        default=None, description="with their texts; left out: yes, at /v2/rerank no"
    )
    max_tokens_per_doc: int | None = _LIMIT
    instruction: str | None = _INSTRUCTION
    truncate_prompt_tokens: Refused = refused("use max_tokens_per_doc: the query stays whole")
    max_chunks_per_doc: Refused = refused("use max_tokens_per_doc")
    rank_fields: Refused = refused("documents are texts")
    truncation: bool | None = accepted("a document that does not fit is an error")


class ScoreRequest(CommonFields):
    """vLLM's."""

    text_1: Texts = Field(description="a query, or as many as there are documents")
    text_2: Texts = Field(description="the document, or documents")
    max_tokens_per_doc: int | None = _LIMIT
    instruction: str | None = _INSTRUCTION
    encoding_format: Literal["float"] | None = accepted("scores are numbers")
    truncate_prompt_tokens: Refused = refused("use max_tokens_per_doc: the query stays whole")


# ---- replies


class RankedDocument(BaseModel):
    index: int = Field(description="of the document in the request")
    relevance_score: float = Field(description="the probability that it answers the query")
    document: Document | None = None  # left out unless asked for


class RerankReply(BaseModel):
    id: str
    model: str
    results: list[RankedDocument] = Field(description="the best first")
    usage: EmbeddingUsage


class PairScore(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


# ---- answers


class _Pairs(NamedTuple):
    """Queries with their documents, as prompts."""

    body: Any
    prompts: Prompts


async def rerank(service: ModelService, request: Request) -> Response:
    body, outputs, scores = await _scored(service, request, RerankRequest, _ranked_pairs)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    with_text = body.return_documents
    if with_text is None:
        with_text = request.scope["path"] != "/v2/rerank"
    reply = RerankReply(
        id=f"rerank-{_call(request).id}",
        model=service.name,
        results=[
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=body.documents[index] if with_text else None,
            )
            for index in best
        ],
        usage=_usage(outputs),
    )
    content = reply.model_dump_json(exclude_none=True)
    return Response(content, media_type="application/json")


async def score(service: ModelService, request: Request) -> Response:
    _, outputs, scores = await _scored(service, request, ScoreRequest, _scored_pairs)
    reply = ScoreReply(
        id=f"score-{_call(request).id}",
        created=int(time.time()),
        model=service.name,
        data=[PairScore(index=index, score=each) for index, each in enumerate(scores)],
        usage=_usage(outputs),
    )
    return Response(reply.model_dump_json(), media_type="application/json")


def _call(request: Request) -> Call:
    call: Call = request.scope[SCOPE_KEY]
    return call


def _usage(outputs: Sequence[RequestOutput]) -> EmbeddingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(prompt_tokens=count, total_tokens=count)


_FIELDS = {"prompt": "documents", "text": "documents", "max_tokens": "documents"}


async def _scored(
    service: ModelService,
    request: Request,
    schema: type[Any],
    pairs_of: Callable[[Any], list[tuple[str, str]]],
) -> tuple[Any, list[RequestOutput], list[float]]:
    """The body, the outputs of its pairs, and their scores."""
    call, llm = call_and_model(service, request)
    reranker = llm.reranker
    if reranker is None:
        raise ApiError(
            400,
            f"{service.name} is no reranker: serve a model such as Qwen3-Reranker, whose name says "
            'that it is one and whose vocabulary has "yes" and "no"',
            param="model",
            code="not_a_reranker",
        )
    errors = ErrorMapper(service, schema, _FIELDS)
    prepare = partial(_prepare, service, call, llm, reranker, errors, schema, pairs_of)
    body, prompts = await prepare_body(service, request, prepare, is_quick=False)
    call.user = body.user
    streams = await errors.of(submit_all(service, llm, call, body, prompts, stream=False))
    outputs = await _outputs(request, call, errors, streams)
    found = [list(output.logprobs or ()) for output in outputs]
    missing = {
        index: params
        for index, scores in enumerate(found)
        if (params := reranker.params_for_other(scores[0])) is not None
    }
    if missing:
        again = [(prompts[index][0], params) for index, params in missing.items()]
        streams = await errors.of(_submit_again(llm, call, body, again))
        others = await _outputs(request, call, errors, streams)
        for index, output in zip(missing, others, strict=True):
            found[index] += output.logprobs or ()
    return body, outputs, [reranker.relevance(scores) for scores in found]


async def _submit_again(
    llm: OnlineModel, call: Call, body: CommonFields, prompts: Prompts
) -> list[Stream]:
    """Prompts that the call's quota has admitted, and whose blocks are cached."""
    submit = partial(
        llm.submit,
        key=call.key_name,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        stream=False,
    )
    return list(await asyncio.gather(*(submit(prompt, params) for prompt, params in prompts)))


async def _outputs(
    request: Request, call: Call, errors: ErrorMapper, streams: Sequence[Stream]
) -> list[RequestOutput]:
    outputs = await outputs_of(request, call, streams)
    for output in outputs:
        if output.error is not None:
            raise errors.as_api_error(output.error)
    return outputs


def _prepare(
    service: ModelService,
    call: Call,
    llm: OnlineModel,
    reranker: Reranker,
    errors: ErrorMapper,
    schema: type[Any],
    pairs_of: Callable[[Any], list[tuple[str, str]]],
    data: bytes,
) -> _Pairs:
    body = service.read_body(call, data, schema)
    service.check_model(body.model)
    prompts: Prompts = []
    with errors:
        for query, document in pairs_of(body):
            prompt = reranker.prompt(
                query,
                document,
                instruction=body.instruction,
                max_document_tokens=body.max_tokens_per_doc,
                limit=llm.max_context - 1,
            )
            prompts.append((prompt, reranker.params))
    return _Pairs(body, prompts)


def _ranked_pairs(body: RerankRequest) -> list[tuple[str, str]]:
    return [(body.query, document.text) for document in body.documents]


def _scored_pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """One query goes with all documents."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ApiError(
            400,
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one for each, or one "
            "text_1 for all",
            param="text_1",
        )
    return list(zip(first, second, strict=True))
