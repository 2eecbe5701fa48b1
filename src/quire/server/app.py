"""The application: routes, what they take and answer, and errors in the shape of their API."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from quire.core.errors import ConfigError
from quire.core.version import own_version
from quire.server.answers.idempotency import Idempotent
from quire.server.audit import record_call
from quire.server.calls import CLIENT_GONE, SCOPE_KEY, Call, Tracing, open_tracing
from quire.server.choosing import AnswerUnloaded, choose_model, load_model
from quire.server.dialect import Dialect
from quire.server.dialects.anthropic_answer import (
    ANTHROPIC_ERRORS,
    MESSAGES,
    MessageReply,
    TokensCount,
    count_tokens,
)
from quire.server.dialects.anthropic_body import CountTokensRequest
from quire.server.dialects.anthropic_models import (
    MessagesModel,
    MessagesModelList,
    asks_as_anthropic,
    messages_model,
    messages_models,
)
from quire.server.dialects.ollama_answer import (
    OLLAMA_ERRORS,
    GenerateReply,
    OllamaChatReply,
    answer_chat,
    answer_prompt,
    stop_chat,
    stop_generate,
)
from quire.server.dialects.ollama_body import (
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from quire.server.dialects.ollama_models import (
    EmbeddingsReply,
    EmbedReply,
    ShowReply,
    add_models,
    embed_prompt,
    embed_texts,
    show,
)
from quire.server.dialects.responses import (
    RESPONSES,
    InputTokens,
    count_input_tokens,
)
from quire.server.dialects.responses_answer import ResponseReply
from quire.server.dialects.responses_body import CountRequest
from quire.server.dialects.stored_responses import add_stored_responses, check_parameters
from quire.server.encoding import (
    detokenize,
    embed,
    properties_of,
    tokenize,
    tokenizer_info_of,
)
from quire.server.errors import OPENAI_ERRORS, ApiError, ErrorShape
from quire.server.fields import Strict
from quire.server.generation import answer_conversation, complete_text
from quire.server.jobs.api import BatchReply, CreateBatch, add_jobs, create_batch
from quire.server.jobs.lines import LineAnswerer
from quire.server.keys import ApiKey, check_routes
from quire.server.logs import log
from quire.server.metrics import (
    CONTENT_TYPE,
    StatsAsked,
    exposition,
    loading_figures,
    stats_for,
    stats_of_unloaded,
)
from quire.server.middleware import ClientGoneError, Middleware
from quire.server.model_service import ModelService
from quire.server.openai_answers import CHAT
from quire.server.openapi import (
    LINES_CONTENT,
    MODEL_PARAMETER,
    STATS_PARAMETERS,
    STREAM_CONTENT,
    Responses,
    describe_bodies,
    docs_page,
    error_responses,
    post_error_responses,
    request_body,
)
from quire.server.page import page_routes
from quire.server.paths import no_path
from quire.server.replies import (
    Alive,
    ChatCompletion,
    DetokenizedText,
    EmbeddingList,
    KeyCard,
    KeyList,
    ModelCard,
    ModelList,
    OwnStatsReply,
    Readiness,
    ReloadReply,
    ServerProperties,
    StatsReply,
    TextCompletion,
    TokenizerInfo,
    TokenList,
    Version,
)
from quire.server.reranking import (
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
    rerank,
    score,
)
from quire.server.schemas import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from quire.server.service import Service


class _Endpoint(NamedTuple):
    """A POST route: its schemas and its handler."""

    path: str
    name: str  # of the operation, in /openapi.json
    summary: str
    body: type[Strict]
    reply: type[BaseModel]
    answer: Callable[[ModelService, Request], Awaitable[Response]]
    can_stream: bool = False
    errors: ErrorShape = OPENAI_ERRORS
    is_for_model: bool = True  # else no model is loaded for it
    answer_unloaded: AnswerUnloaded | None = None


def _conversation(
    path: str, name: str, summary: str, reply: type[BaseModel], dialect: Dialect[Any, Any]
) -> _Endpoint:
    async def answer(service: ModelService, request: Request) -> Response:
        return await answer_conversation(service, request, dialect)

    return _Endpoint(path, name, summary, dialect.schema, reply, answer, True, dialect.errors)


_ENDPOINTS = (
    _conversation(
        "/v1/chat/completions", "chat_completions", "Answer a conversation", ChatCompletion, CHAT
    ),
    _conversation(
        "/v1/responses", "responses", "Answer a conversation of items", ResponseReply, RESPONSES
    ),
    _Endpoint(
        "/v1/responses/input_tokens",
        "count_input_tokens",
        "The number of tokens of a conversation of items",
        CountRequest,
        InputTokens,
        count_input_tokens,
    ),
    _conversation(
        "/v1/messages",
        "messages",
        "Answer a conversation, by Anthropic's API",
        MessageReply,
        MESSAGES,
    ),
    _Endpoint(
        "/v1/messages/count_tokens",
        "count_tokens",
        "The number of tokens of a conversation, by Anthropic's API",
        CountTokensRequest,
        TokensCount,
        count_tokens,
        errors=ANTHROPIC_ERRORS,
    ),
    _Endpoint(
        "/v1/completions",
        "completions",
        "Continue texts",
        CompletionRequest,
        TextCompletion,
        complete_text,
        can_stream=True,
    ),
    _Endpoint(
        "/v1/embeddings",
        "embeddings",
        "The model's state after the last token of each input, at length 1",
        EmbeddingRequest,
        EmbeddingList,
        embed,
    ),
    _Endpoint(
        "/v1/batches",
        "create_batch",
        "Answer the lines of an uploaded file, behind all other requests",
        CreateBatch,
        BatchReply,
        create_batch,
        is_for_model=False,
    ),
    _Endpoint(
        "/tokenize",
        "tokenize_",
        "The tokens of a text or conversation",
        TokenizeRequest,
        TokenList,
        tokenize,
    ),
    _Endpoint(
        "/detokenize",
        "detokenize_",
        "The text of tokens",
        DetokenizeRequest,
        DetokenizedText,
        detokenize,
    ),
    *(
        _Endpoint(
            path,
            path[1:].replace("/", "_"),
            "Order documents by how well they answer a query",
            RerankRequest,
            RerankReply,
            rerank,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        _Endpoint(
            path,
            path[1:].replace("/", "_"),
            "How well texts answer queries",
            ScoreRequest,
            ScoreReply,
            score,
        )
        for path in ("/score", "/v1/score")
    ),
    _Endpoint(
        "/api/chat",
        "ollama_chat",
        "Answer a conversation, by Ollama's API",
        OllamaChatRequest,
        OllamaChatReply,
        answer_chat,
        can_stream=True,
        errors=OLLAMA_ERRORS,
        answer_unloaded=stop_chat,
    ),
    _Endpoint(
        "/api/generate",
        "ollama_generate",
        "Answer a prompt, by Ollama's API",
        GenerateRequest,
        GenerateReply,
        answer_prompt,
        can_stream=True,
        errors=OLLAMA_ERRORS,
        answer_unloaded=stop_generate,
    ),
    _Endpoint(
        "/api/embed",
        "ollama_embed",
        "Vectors of texts, by Ollama's API",
        EmbedRequest,
        EmbedReply,
        embed_texts,
        errors=OLLAMA_ERRORS,
    ),
    _Endpoint(
        "/api/embeddings",
        "ollama_embeddings",
        "The vector of a text, by Ollama's older API",
        EmbeddingsRequest,
        EmbeddingsReply,
        embed_prompt,
        errors=OLLAMA_ERRORS,
    ),
    _Endpoint(
        "/api/show",
        "ollama_show",
        "What the model is, by Ollama's API",
        ShowRequest,
        ShowReply,
        show,
        errors=OLLAMA_ERRORS,
    ),
)

BODY_OF_PATH = {endpoint.path: endpoint.body for endpoint in _ENDPOINTS}
BODIES = tuple(dict.fromkeys(BODY_OF_PATH.values()))


# Of paths below these that are no endpoints: how errors are written there.
_ERROR_SHAPES: dict[str, ErrorShape] = {
    "/v1/messages": ANTHROPIC_ERRORS,
    "/api/": OLLAMA_ERRORS,
}


def error_shape(path: str) -> ErrorShape:
    """How the API that a path belongs to writes errors."""
    for endpoint in _ENDPOINTS:
        if endpoint.path == path:
            return endpoint.errors
    return next(
        (s for prefix, s in _ERROR_SHAPES.items() if path.startswith(prefix)), OPENAI_ERRORS
    )


def create_app(service: Service) -> Middleware:
    """The whole server as an ASGI application; its lifespan covers what saves and logs."""
    settings = service.settings
    endpoint = settings.otlp_endpoint
    tracing = None if endpoint is None else open_tracing(endpoint, service.name)
    routes = create_routes(service, tracing)
    service.jobs.answer_by(
        LineAnswerer(routes, _settle, lambda: service.is_stuck, lambda: service.num_losses)
    )
    service.background.answer_by(routes, _settle)
    return Middleware(
        Idempotent(routes, service, BODY_OF_PATH),
        settings,
        service.access,
        service.limits,
        service.connections,
        service.failed_keys,
        _on_done(service, tracing),
        error_shape,
    )


def create_routes(service: Service, tracing: Tracing | None = None) -> FastAPI:
    """What answers requests that were admitted."""
    app = FastAPI(
        title="quire",
        version=own_version(),
        description="OpenAI's API over a live batch.",
        lifespan=_lifespan(service, tracing),
        docs_url=None,
        redoc_url=None,
    )
    _add_error_handlers(app)
    _add_endpoints(app, service)
    add_stored_responses(app, service)
    add_jobs(app, service)
    add_models(app, service)
    _add_models(app, service)
    _add_properties(app, service)
    _add_operations(app, service)
    _add_stats(app, service)
    _add_administration(app, service)
    if service.settings.page:
        app.router.routes.extend(page_routes())
    describe_bodies(app, BODIES)
    check_routes(route.path for route in app.routes if isinstance(route, Route))
    return app


def _lifespan(
    service: Service, tracing: Tracing | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with service.shared.kept(service.settings, lambda: service.state.value):
            yield
            await service.jobs.close()
        service.pool.close()
        if tracing is not None:
            tracing.close()

    return lifespan


def _settle(call: Call) -> None:
    """A line of a job has ended."""
    if call.quota is not None:
        call.quota.settle(call.outputs)


def _on_done(service: Service, tracing: Tracing | None) -> Callable[[Call], None]:
    def done(call: Call) -> None:
        _settle(call)
        if call.status is not None and call.status >= 400:
            service.rejected[str(call.status)] += 1
        quiet = call.method == "GET" and (call.status or 0) < 400
        log("request", logging.DEBUG if quiet else logging.INFO, **call.summary())
        if service.audit is not None:
            record_call(service.audit, call, every_request=service.settings.audit_requests)
        if tracing is not None and call.outputs:
            tracing.record(call)

    return done


# ---- errors


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _reply(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        if error.status_code == 404:
            return _reply(request, no_path(path))
        message = str(error.detail)
        if error.status_code == 405:
            message = f"{request.method} is not for {path:.100}; see /docs"
        headers = tuple((error.headers or {}).items())  # Allow, of a 405
        return _reply(request, ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, _: ClientGoneError) -> Response:
        request.scope[SCOPE_KEY].error = CLIENT_GONE
        return Response(status_code=499)  # for the log: the client is gone

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:  # uvicorn logs it
        return _reply(request, ApiError(500, "this should not have happened", code="internal"))


def _reply(request: Request, error: ApiError) -> Response:
    call: Call = request.scope[SCOPE_KEY]
    call.note(error)
    return Response(
        call.error_shape.body(error),
        status_code=call.error_shape.status(error),
        headers=dict(error.headers),
        media_type="application/json",
    )


# ---- routes


def _add_endpoints(app: FastAPI, service: Service) -> None:
    for endpoint in _ENDPOINTS:
        responses = post_error_responses(400, 404, 500, shape=endpoint.errors)
        if endpoint.can_stream:
            content = LINES_CONTENT if endpoint.errors is OLLAMA_ERRORS else STREAM_CONTENT
            responses[200] = {"content": content}
        app.add_api_route(
            endpoint.path,
            _handler(service, endpoint),
            methods=["POST"],
            name=endpoint.name,
            summary=endpoint.summary,
            response_model=endpoint.reply,
            responses=responses,
            openapi_extra=request_body(endpoint.body),
        )


def _handler(service: Service, endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        if not endpoint.is_for_model:
            return await endpoint.answer(service.first, request)
        chosen = await choose_model(service, request, endpoint.body, endpoint.answer_unloaded)
        if isinstance(chosen, Response):
            return chosen
        with chosen.model.answering():
            return await endpoint.answer(*chosen)

    return handle


def _add_models(app: FastAPI, service: Service) -> None:
    def card(model: ModelService, name: str) -> ModelCard:
        if service.residency is None:
            _ = model.llm  # a 503 while it is loaded
        longest = model.max_context
        return ModelCard(id=name, created=int(model.loaded_at), max_model_len=longest)

    @app.get("/v1/models", summary="The names of the models", responses=error_responses(503))
    async def models(request: Request) -> ModelList | MessagesModelList:
        cards = [card(m, name) for m in service.models for name in m.model_names]
        return messages_models(cards) if asks_as_anthropic(request) else ModelList(data=cards)

    @app.get("/v1/models/{name:path}", summary="One of them", responses=error_responses(404, 503))
    async def model(name: str, request: Request) -> ModelCard | MessagesModel:
        found = card(service.model_of(name), name)
        return messages_model(found) if asks_as_anthropic(request) else found


_NOT_READY: Responses = {503: {"model": Readiness, "description": "not now"}}


def _add_properties(app: FastAPI, service: Service) -> None:
    """What clients of other servers ask before they send a request."""

    @app.get("/version", summary="The server's version", responses=error_responses())
    async def version() -> Version:
        return Version(version=own_version())

    @app.get(
        "/ping",
        summary="200 where requests are taken, else 503",
        responses={**error_responses(), **_NOT_READY},
    )
    async def ping() -> Response:
        return _readiness(service)

    @app.post("/ping", summary="The same", responses={**post_error_responses(400), **_NOT_READY})
    async def ping_by_post() -> Response:
        return await ping()

    @app.get(
        "/tokenizer_info",
        summary="The tokenizer, as vLLM's",
        responses=error_responses(400, 404, 503),
        openapi_extra={"parameters": [MODEL_PARAMETER]},
    )
    async def tokenizer_info(request: Request) -> TokenizerInfo:
        check_parameters(request, "model")
        model = service.model_of(request.query_params.get("model"))
        await load_model(request, model)
        return tokenizer_info_of(model.llm)

    @app.get(
        "/props",
        summary="The model, as llama.cpp's",
        responses=error_responses(400, 404, 503),
        openapi_extra={"parameters": [MODEL_PARAMETER]},
    )
    async def props(request: Request) -> ServerProperties:
        check_parameters(request, "model")
        model = service.model_of(request.query_params.get("model"))
        await load_model(request, model)
        return properties_of(model.llm, model.name)


def _readiness(service: Service) -> Response:
    reply = Readiness(status=service.status, loading=loading_figures(service.first))
    return JSONResponse(reply.model_dump(exclude_none=True), 200 if service.is_ready else 503)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get(
        "/health",
        summary="Whether the process lives",
        responses=error_responses(),
        response_model_exclude_none=True,
    )
    async def health() -> Alive:
        return Alive(loading=loading_figures(service.first))

    @app.get(
        "/ready",
        summary="Whether requests are taken",
        responses={**error_responses(), 503: {"model": Readiness, "description": "not now"}},
    )
    async def ready() -> Response:
        return _readiness(service)

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=PlainTextResponse,
        responses=error_responses(503),
    )
    async def metrics() -> Response:
        if service.residency is None and service.loaded is None:
            _ = service.llm  # a 503
        found = {model.name: await model.snapshot() for model in service.models}
        snapshots = {name: figures for name, figures in found.items() if figures is not None}
        text = exposition(service, snapshots, await service.figures())
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/docs", summary="This page", response_class=HTMLResponse, responses=error_responses())
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


def _add_stats(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/stats",
        summary="The key's own figures; with the scope `stats`, those of all",
        responses=error_responses(400, 404, 503),
        response_model=StatsReply | OwnStatsReply,
        openapi_extra={"parameters": list(STATS_PARAMETERS)},
    )
    async def stats(request: Request) -> Response:
        key = request.scope[SCOPE_KEY].key
        asked = StatsAsked.of(request.query_params)
        model = _model_with_figures(service, asked.model)
        llm = model.loaded if service.residency is not None else model.loaded or model.llm
        snapshot = await model.snapshot()
        if llm is None or snapshot is None:
            return _json(stats_of_unloaded(model, await service.figures(), key), {"latest"})
        if not asked.num_steps:
            return _json(stats_for(model, llm, snapshot, await service.figures(), key), {"latest"})
        steps = await llm.latest_steps(asked.num_steps, asked.after)
        figures = await service.figures()
        # A hundred steps of a large batch take milliseconds to write.
        return await asyncio.to_thread(
            lambda: _json(stats_for(model, llm, snapshot, figures, key, steps))
        )


def _model_with_figures(service: Service, name: str | None) -> ModelService:
    """The model that is named; else of those that are loaded the one that was used last."""
    if name is None and service.residency is not None:
        return max(service.residency.loaded, key=lambda m: m.used_at, default=service.first)
    return service.model_of(name)


def _json(reply: BaseModel, left_out: set[str] | None = None) -> Response:
    return Response(reply.model_dump_json(exclude=left_out), media_type="application/json")


def _add_administration(app: FastAPI, service: Service) -> None:
    """The keys in force, and reading them again, for keys with the scope `admin`."""

    @app.get(
        "/admin/keys", summary="The keys in force, without secrets", responses=error_responses()
    )
    async def keys() -> KeyList:
        return KeyList(data=[_card(key) for key in service.access.ring])

    @app.post(
        "/admin/reload",
        summary="Read the file of keys again, as SIGHUP does",
        responses=post_error_responses(409),
    )
    async def reload() -> ReloadReply:
        if not service.access.ring.can_be_read_again:
            raise ApiError(409, "the keys come from no file (--api-keys)", code="no_key_file")
        try:
            changes = await service.reload_keys()
        except ConfigError as error:
            raise ApiError(409, str(error), code="keys_unusable") from error
        return ReloadReply(added=changes.added, removed=changes.removed, changed=changes.changed)


def _card(key: ApiKey) -> KeyCard:
    expires = None if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    return KeyCard(
        name=key.name,
        scopes=sorted(scope.value for scope in key.scopes),
        expires=expires,
        weight=key.weight,
        requests_per_minute=key.requests_per_minute,
        max_concurrent=key.max_concurrent,
        tokens_per_minute=key.tokens_per_minute,
        tokens_per_day=key.tokens_per_day,
    )
