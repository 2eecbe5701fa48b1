"""Embeddings: the model's hidden state after the last token of each input, scaled to length 1.

The state is taken after the final norm. It is what a model made for writing has to offer: fit to
compare texts roughly, and no match for a model trained to embed.
"""

import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.core.sampling import SamplingParams
from quire.server.generation import Errors, begin, json_reply, outputs_of, submit_all
from quire.server.replies import EmbeddingItem, EmbeddingList, EmbeddingUsage
from quire.server.schemas import EmbeddingRequest
from quire.server.service import Service

_NO_TOKENS = SamplingParams(max_tokens=1)  # of which none is computed


async def embed(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    call, llm = begin(service, body, request)
    with_errors = Errors(service, body)
    prompts = [(await with_errors.of(llm.read(text)), _NO_TOKENS) for text in body.prompts]
    submitting = submit_all(service, llm, call, body, prompts, stream=False, pooling=True)
    streams = await with_errors.of(submitting)
    outputs = await outputs_of(request, call, streams)
    items = []
    for index, output in enumerate(outputs):
        if output.error is not None:
            raise with_errors.as_api_error(output.error)
        vector = _written(output.pooled, body.encoding_format)
        items.append(EmbeddingItem(index=index, embedding=vector))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return json_reply(
        EmbeddingList(
            data=items,
            model=service.name,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


def _written(pooled: Any, encoding: str | None) -> list[float] | str:
    state = np.asarray(pooled, np.float64)
    length = float(np.linalg.norm(state))
    unit = (state / length if length > 0 else state).astype(np.float32)
    if encoding == "base64":
        return base64.b64encode(unit.astype("<f4").tobytes()).decode()
    return [float(value) for value in unit]
