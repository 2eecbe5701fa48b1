"""Embeddings: the model's hidden state after the last token of each input, scaled to length 1.

The state is taken after the final norm. It is what a model made for writing has to offer: fit to
compare texts roughly, and no match for a model trained to embed.
"""

import base64
import json
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.llm import AsyncLLM
from quire.server.bodies import checked, in_pool, prepared
from quire.server.generation import Errors, Ready, begin, outputs_of, submit_all
from quire.server.replies import EmbeddingList, EmbeddingUsage
from quire.server.schemas import EmbeddingRequest
from quire.server.service import Service

_NO_TOKENS = SamplingParams(max_tokens=1)  # of which none is computed
_MANY_NUMBERS = 4096  # some milliseconds of writing


async def embed(service: Service, request: Request) -> Response:
    call, llm = begin(service, request)
    with_errors = Errors(service, EmbeddingRequest)
    prepare = partial(_prepare, service, llm, with_errors)
    body, prompts = await prepared(service, request, prepare, is_quick=True)
    call.user = body.user
    submitting = submit_all(service, llm, call, body, prompts, stream=False, pooling=True)
    streams = await with_errors.of(submitting)
    outputs = await outputs_of(request, call, streams)
    for output in outputs:
        if output.error is not None:
            raise with_errors.as_api_error(output.error)
    write = partial(_written, service.name, outputs, body.encoding_format)
    is_long = sum(np.size(output.pooled) for output in outputs) > _MANY_NUMBERS
    content = await in_pool(service, request, write) if is_long else write()
    return Response(content, media_type="application/json")


def _prepare(service: Service, llm: AsyncLLM, with_errors: Errors, data: bytes) -> Ready:
    body = checked(data, EmbeddingRequest, service.body_limits)
    service.check_model(body.model)
    with with_errors:
        prompts = [(llm.prompts.read(text).without_text(), _NO_TOKENS) for text in body.prompts]
    return Ready(body.model_copy(update={"input": ""}), prompts)


def _written(model: str, outputs: list[RequestOutput], encoding: str | None) -> bytes:
    """The answer as JSON, one vector at a time; see scores.py."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    head = EmbeddingList(data=[], model=model, usage=usage).model_dump_json(exclude={"data"})
    items = [
        f'{{"object":"embedding","index":{index},'
        f'"embedding":{json.dumps(_vector(output.pooled, encoding))}}}'
        for index, output in enumerate(outputs)
    ]
    return f'{head[:-1]},"data":[{",".join(items)}]}}'.encode()


def _vector(pooled: Any, encoding: str | None) -> list[float] | str:
    state = np.asarray(pooled, np.float64)
    length = float(np.linalg.norm(state))
    unit = (state / length if length > 0 else state).astype(np.float32)
    if encoding == "base64":
        return base64.b64encode(unit.astype("<f4").tobytes()).decode()
    return [float(value) for value in unit]
