"""Ollama's endpoints about the model, and its embeddings."""

import hashlib
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import RequestOutput
from quire.llm import OnlineModel
from quire.llm.assembly import MemoryNeed
from quire.llm.forward import NO_TOKENS, unit_vector
from quire.llm.prompts import Prepared
from quire.server.calls import Call
from quire.server.dialects.ollama_answer import OLLAMA_ERRORS, figures, keep_loaded
from quire.server.dialects.ollama_body import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaFields,
    ShowRequest,
    model_name,
)
from quire.server.errors import ApiError
from quire.server.model_service import ModelService
from quire.server.openapi import error_responses
from quire.server.replies import Version
from quire.server.schemas import CommonFields
from quire.server.service import Service
from quire.server.submission import (
    ErrorMapper,
    Prompts,
    call_and_model,
    outputs_of,
    prepare_body,
    run_in_pool,
    submit_all,
)

# ---- embeddings


class EmbedReply(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsReply(BaseModel):
    embedding: list[float]


async def embed_texts(service: ModelService, request: Request) -> Response:
    body, outputs = await _embedded(service, request, EmbedRequest)
    assert isinstance(body, EmbedRequest)

    def write() -> str:
        vectors = [_vector(output, body.dimensions) for output in outputs]
        counts = figures(outputs) if outputs else {"total_duration": 0, "prompt_eval_count": 0}
        return EmbedReply(
            model=service.name,
            embeddings=vectors,
            total_duration=counts["total_duration"],
            prompt_eval_count=counts["prompt_eval_count"],
        ).model_dump_json()

    content = await run_in_pool(service, request, write)
    return Response(content, media_type="application/json")


async def embed_prompt(service: ModelService, request: Request) -> Response:
    _, [output] = await _embedded(service, request, EmbeddingsRequest)
    reply = EmbeddingsReply(embedding=_vector(output, None))
    return Response(reply.model_dump_json(), media_type="application/json")


def _vector(output: RequestOutput, dimensions: int | None) -> list[float]:
    return [float(value) for value in unit_vector(output.pooled[:dimensions])]


async def _embedded(
    service: ModelService, request: Request, schema: type[EmbedRequest] | type[EmbeddingsRequest]
) -> tuple[OllamaFields, Sequence[RequestOutput]]:
    call, llm = call_and_model(service, request)
    errors = ErrorMapper(service, schema)
    prepare = partial(_prepare, service, call, llm, errors, schema)
    body, prompts = await prepare_body(service, request, prepare, is_quick=False)
    asked = CommonFields()
    submitting = submit_all(service, llm, call, asked, prompts, stream=False, pooling=True)
    outputs = await outputs_of(request, call, await errors.of(submitting))
    for output in outputs:
        if output.error is not None:
            raise errors.as_api_error(output.error)
    return body, outputs


def _prepare(
    service: ModelService,
    call: Call,
    llm: OnlineModel,
    errors: ErrorMapper,
    schema: type[EmbedRequest] | type[EmbeddingsRequest],
    data: bytes,
) -> tuple[OllamaFields, Prompts]:
    body = service.read_body(call, data, schema)
    service.check_model(model_name(body.model))
    keep_loaded(service, body)
    texts, cuts = [], True
    if isinstance(body, EmbedRequest):
        texts = [body.input] if isinstance(body.input, str) else body.input
        cuts = body.truncate is not False
        if body.dimensions is not None and body.dimensions > llm.embedding_size:
            message = f"dimensions is {body.dimensions}; the model has {llm.embedding_size}"
            raise ApiError(400, message, param="dimensions")
    else:
        texts = [body.prompt]
    with errors:
        return body, [(_tokens(llm, text, cuts=cuts), NO_TOKENS) for text in texts]


def _tokens(llm: OnlineModel, text: str, *, cuts: bool) -> Prepared:
    """With `cuts` the beginning of a text that does not fit."""
    if not cuts or not text:
        return llm.prompts.read(text).without_text()
    return Prepared(llm.prompts.tokenize(text)[: llm.max_context - 1])


# ---- the model


_FAR_AWAY = "2318-01-01T00:00:00Z"  # a time: clients count with it


class ModelDetails(BaseModel):
    parent_model: str = ""
    format: str = Field(description="gguf or safetensors; empty of a model made in memory")
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str = Field(description="a mix, or the format of most of its weights")


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str = Field(description="when it was loaded")
    size: int = Field(description="bytes of its weights in memory")
    digest: str = Field(description="of its name: weights are not hashed")
    details: ModelDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class RunningModel(OllamaModel):
    expires_at: str = Field(
        description="when it is unloaded; a far away time where the server keeps it"
    )
    size_vram: int
    context_length: int


class RunningModels(BaseModel):
    models: list[RunningModel]


class ShowReply(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def _cards(*models: ModelService) -> list[dict[str, Any]]:
    """One for each name of these models."""
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _loaded_at(model),
            "size": _weight_bytes(model),
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": _details(_facts_of(model)),
        }
        for model in models
        for name in model.model_names
    ]


def _facts_of(model: ModelService) -> OnlineModel | MemoryNeed:
    """What is known of it: while one on demand is not loaded, what was predicted."""
    return model.llm if model.loaded is not None or model.need is None else model.need


def _weight_bytes(model: ModelService) -> int:
    return _facts_of(model).weight_bytes


def _running(model: ModelService) -> dict[str, Any]:
    residency = model.server.residency
    idle_s = math.inf if residency is None else residency.idle_s_of(model)
    left_s = idle_s if model.is_idle is False else idle_s - (time.monotonic() - model.used_at)
    return {
        "expires_at": _FAR_AWAY if idle_s == math.inf else _time(time.time() + left_s),
        "context_length": model.llm.max_context,
        "size_vram": model.llm.weight_bytes if model.llm.device == "cuda" else 0,
    }


def _loaded_at(service: ModelService) -> str:
    return _time(service.loaded_at)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _details(llm: OnlineModel | MemoryNeed) -> ModelDetails:
    return ModelDetails(
        format=llm.form.format,
        family=llm.family,
        families=[llm.family],
        parameter_size=_short(llm.num_parameters),
        quantization_level=llm.form.quantization,
    )


def _short(count: int) -> str:
    """135M, 8.03B."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            digits = max(0, 2 - int(math.log10(count / size)))
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


async def show(service: ModelService, request: Request) -> Response:
    call, llm = call_and_model(service, request)
    read = partial(service.read_body, call, schema=ShowRequest)
    body = await prepare_body(service, request, read, is_quick=True)
    service.check_model(model_name(body.model or body.name))
    tokenizer = llm.tokenizer
    template = (tokenizer and tokenizer.chat_template) or ""
    reply = ShowReply(
        modelfile=f"FROM {service.name}\n",
        parameters="\n".join(f"{name} {value}" for name, value in llm.sampling_defaults.items()),
        template=template,
        details=_details(llm),
        model_info={
            "general.architecture": llm.family,
            "general.parameter_count": llm.num_parameters,
            f"{llm.family}.context_length": llm.max_context,
            f"{llm.family}.embedding_length": llm.embedding_size,
        },
        capabilities=_capabilities(llm, template),
        modified_at=_loaded_at(service),
    )
    return Response(reply.model_dump_json(), media_type="application/json")


def _capabilities(llm: OnlineModel, template: str) -> list[str]:
    thinks = llm.prompts.can_chat and llm.prompts.reasoning_settings.has_reasoning
    tokenizer = llm.tokenizer
    found = {
        "completion": True,
        "tools": "tools" in template,
        "insert": tokenizer is not None and tokenizer.fill_in is not None,
        "thinking": thinks,
    }
    return [name for name, has_it in found.items() if has_it]


# Clients refuse older ones, Codex those without the Responses API.
OLLAMA_VERSION = "0.13.4"
_ERRORS = error_responses(503, shape=OLLAMA_ERRORS)


def add_models(app: FastAPI, service: Service) -> None:
    @app.get("/api/tags", summary="The model, as Ollama's", responses=_ERRORS)
    async def tags() -> OllamaModels:
        return OllamaModels(models=[OllamaModel(**each) for each in _cards(*service.models)])

    @app.get("/api/ps", summary="The same, as it is loaded", responses=_ERRORS)
    async def running() -> RunningModels:
        loaded = [m for m in service.models if m.loaded is not None or service.residency is None]
        cards = [{**card, **_running(m)} for m in loaded for card in _cards(m)]
        return RunningModels(models=[RunningModel(**card) for card in cards])

    @app.get("/api/version", summary="The version of Ollama whose API this is", responses=_ERRORS)
    async def version() -> Version:
        return Version(version=OLLAMA_VERSION)
