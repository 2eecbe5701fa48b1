"""The application: routes, what they take and answer, and errors in OpenAI's shape."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from quire.core.version import own_version
from quire.engine.stats import Snapshot
from quire.server.access import check_routes
from quire.server.administration import add_administration
from quire.server.audit import record_call, settings_digest
from quire.server.calls import SCOPE_KEY, Call
from quire.server.docs_page import docs_page
from quire.server.embeddings import embed
from quire.server.errors import ApiError
from quire.server.gate import ClientGoneError, Gate
from quire.server.generation import complete_chat, complete_text
from quire.server.logs import log
from quire.server.metrics import CONTENT_TYPE, exposition
from quire.server.quotas import Saver
from quire.server.replies import (
    Alive,
    ChatCompletion,
    DetokenizedText,
    EmbeddingList,
    ErrorReply,
    ModelCard,
    ModelList,
    OwnStatsReply,
    Readiness,
    StatsReply,
    TextCompletion,
    TokenList,
)
from quire.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Strict,
    TokenizeRequest,
)
from quire.server.service import Service
from quire.server.stats import stats_for
from quire.server.texts import detokenize, tokenize
from quire.server.tracing import Tracing, open_tracing

_ANYWHERE = {
    401: "no valid key, or one that has expired",
    403: "Host or Origin not allowed, or the key has not the scope",
}
_POSTED = {
    400: "a field is wrong or not supported; `param` names it",
    404: "no such model",
    408: "the body or the answer did not come in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full or the key's limit reached; see Retry-After",
    500: "this request failed alone",
    503: "loading, shutting down, or the executor does not answer",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    told = _ANYWHERE | _POSTED
    return {
        status: {"model": ErrorReply, "description": told[status]}
        for status in (*_ANYWHERE, *statuses)
    }


_SCHEMAS = "#/components/schemas/"
_BODIES = (ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)


def _takes(schema: type[Strict]) -> dict[str, Any]:
    """A body in the description; bodies.py reads it, so that FastAPI does not on the event loop."""
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI) -> None:
    """Add what `_takes` refers to."""
    describe_rest = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            bodies = [(schema, "validation") for schema in _BODIES]
            _, found = models_json_schema(bodies, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
            describe_rest()["components"]["schemas"].update(found["$defs"])
        return describe_rest()

    app.openapi = describe  # type: ignore[method-assign]


_STREAMS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "an event: a chunk in OpenAI's shape, or [DONE]",
            "properties": {"data": {"type": "string"}},
        }
    }
}


def create_app(service: Service) -> Gate:
    """The whole server as an ASGI application; its lifespan loads the model and lets it go."""
    settings = service.settings
    tracing = (
        None
        if settings.otlp_endpoint is None
        else open_tracing(settings.otlp_endpoint, service.name)
    )
    rejected: Counter[str] = Counter()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        saver = Saver(service.quotas)
        service.record("start", version=own_version(), settings=settings_digest(settings))
        yield
        await asyncio.to_thread(saver.close)
        service.pool.close()
        if service.audit is not None:
            await asyncio.to_thread(service.audit.close, state=service.state.value)
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="quire",
        version=own_version(),
        description="OpenAI's API over a live batch.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_texts(app, service)
    _add_models(app, service)
    _add_operations(app, service, rejected)
    add_administration(app, service)
    _describe_bodies(app)
    check_routes(route.path for route in app.routes if isinstance(route, Route))
    return Gate(
        app,
        settings,
        service.access,
        service.limits,
        service.connections,
        _on_done(service, tracing, rejected),
    )


def _on_done(
    service: Service, tracing: Tracing | None, rejected: Counter[str]
) -> Callable[[Call], None]:
    def done(call: Call) -> None:
        if call.admission is not None:
            call.admission.settle(call.outputs)
        if call.status is not None and call.status >= 400:
            rejected[str(call.status)] += 1
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
        path = f"{request.scope['path']:.100}"
        messages = {
            404: f"there is nothing at {path}; see /docs",
            405: f"{request.method} is not for {path}; see /docs",
        }
        message = messages.get(error.status_code, str(error.detail))
        headers = tuple((error.headers or {}).items())  # which methods are
        return _reply(request, ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, _: ClientGoneError) -> Response:
        request.scope[SCOPE_KEY].error = "client_gone"
        return Response(status_code=499)  # which nobody will read

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:  # uvicorn logs it
        return _reply(request, ApiError(500, "this should not have happened", code="internal"))


def _reply(request: Request, error: ApiError) -> Response:
    call: Call = request.scope[SCOPE_KEY]
    call.error = error.code or error.message
    return Response(
        error.body,
        status_code=error.status,
        headers=dict(error.headers),
        media_type="application/json",
    )


# ---- routes


def _add_generation(app: FastAPI, service: Service) -> None:
    errors = _errors(*_POSTED)

    @app.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        response_model=ChatCompletion,
        responses={**errors, 200: {"content": _STREAMS}},
        openapi_extra=_takes(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        return await complete_chat(service, request)

    @app.post(
        "/v1/completions",
        summary="Continue texts",
        response_model=TextCompletion,
        responses={**errors, 200: {"content": _STREAMS}},
        openapi_extra=_takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        return await complete_text(service, request)

    @app.post(
        "/v1/embeddings",
        summary="The model's state after the last token of each input, at length 1",
        response_model=EmbeddingList,
        responses=errors,
        openapi_extra=_takes(EmbeddingRequest),
    )
    async def embeddings(request: Request) -> Response:
        return await embed(service, request)


def _add_texts(app: FastAPI, service: Service) -> None:
    errors = _errors(*_POSTED)

    @app.post(
        "/tokenize",
        summary="The tokens of a text or conversation",
        response_model=TokenList,
        responses=errors,
        openapi_extra=_takes(TokenizeRequest),
    )
    async def tokenize_(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post(
        "/detokenize",
        summary="The text of tokens",
        response_model=DetokenizedText,
        responses=errors,
        openapi_extra=_takes(DetokenizeRequest),
    )
    async def detokenize_(request: Request) -> Response:
        return await detokenize(service, request)


def _add_models(app: FastAPI, service: Service) -> None:
    def cards() -> list[ModelCard]:
        longest = service.llm.max_context
        created = int(service.loaded_at)
        names = service.settings.model_names
        return [ModelCard(id=name, created=created, max_model_len=longest) for name in names]

    @app.get("/v1/models", summary="The names of the model", responses=_errors(503))
    async def models() -> ModelList:
        return ModelList(data=cards())

    @app.get("/v1/models/{name:path}", summary="One of them", responses=_errors(404, 503))
    async def model(name: str) -> ModelCard:
        service.check_model(name)
        return next(card for card in cards() if card.id == name)


def _add_operations(app: FastAPI, service: Service, rejected: Counter[str]) -> None:
    def snapshot() -> Snapshot:
        loaded = service.loaded
        return service.llm.stats if loaded is None else loaded.stats

    @app.get("/health", summary="Whether the process lives", responses=_errors())
    async def health() -> Alive:
        return Alive()

    @app.get(
        "/ready",
        summary="Whether requests are taken",
        responses={**_errors(), 503: {"model": Readiness, "description": "not now"}},
    )
    async def ready() -> Response:
        reply = Readiness(status=service.state.value)
        return JSONResponse(reply.model_dump(), 200 if service.is_ready else 503)

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=PlainTextResponse,
        responses=_errors(503),
    )
    async def metrics() -> Response:
        text = exposition(service, snapshot(), rejected)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get(
        "/v1/stats",
        summary="The key's own figures; with the scope `stats`, those of all",
        responses=_errors(503),
    )
    async def stats(request: Request) -> StatsReply | OwnStatsReply:
        return stats_for(service, snapshot(), request.scope[SCOPE_KEY].key)

    @app.get("/docs", summary="This page", response_class=HTMLResponse, responses=_errors())
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))
