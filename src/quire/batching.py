"""BatchProcessor: the same engine over a forward function that the user brings."""

import asyncio
import inspect
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, Unpack

import numpy as np
from numpy.typing import NDArray

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ExecutorError, RequestError
from quire.core.plan import Capacity
from quire.core.request import RequestOptions, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.aio import AsyncEngine
from quire.engine.engine import Engine
from quire.engine.stats import Snapshot
from quire.executors.base import BLOCK_SIZE
from quire.executors.callable import CallableExecutor, Forward

_ANY_VOCABULARY = 2**31 - 1
_ENGINE = EngineConfig()  # its defaults
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class BatchProcessor:
    """Dynamic batching for any `forward(tokens [B, T], mask [B, T]) -> logits [B, V]`.

    Requests that arrive together run together: `forward`, a plain or an async function, gets their
    tokens padded on the left with `pad_token`, a mask that is true on the real ones, and returns
    the logits after each row's last token. It is called from one thread at a time (an async one on
    the caller's event loop). A batch that fails is run again in halves until the culprit stands
    alone.

    `slo_itl_ms`: batches stay so small that a request gets its tokens no further apart;
    `max_queue_requests`, `max_queue_tokens`: beyond them requests get an OverloadedError, which
    says when to come back.
    """

    def __init__(
        self,
        forward: Forward,
        max_batch_size: int = 8,
        batch_timeout_ms: float = 20.0,
        *,
        pad_token: int = 0,
        vocabulary_size: int | None = None,
        max_context: int = 4096,
        end_token_ids: Iterable[int] = (),
        step_timeout_s: float | None = 120.0,
        slo_itl_ms: float | None = None,
        max_queue_requests: int = _ENGINE.max_queue_requests,
        max_queue_tokens: int = _ENGINE.max_queue_tokens,
    ) -> None:
        if not callable(forward):
            raise ConfigError(f"forward must be a function of (tokens, mask), got {forward!r}")
        _check_integer("pad_token", pad_token, at_least=0)
        capacity = _capacity(max_batch_size, max_context, vocabulary_size)
        config = EngineConfig(
            max_batch_size=max_batch_size,
            max_step_tokens=capacity.max_step_tokens,
            batch_timeout_ms=batch_timeout_ms,
            step_timeout_s=step_timeout_s,
            slo_itl_ms=slo_itl_ms,
            max_queue_requests=max_queue_requests,
            max_queue_tokens=max_queue_tokens,
            prefix_reuse=False,  # the function sees whole sequences: nothing is saved
            plan_ahead=False,  # nor should it see rows that turn out not to be needed
        )
        self._forward = forward
        self._loop: asyncio.AbstractEventLoop | None = None
        executor = CallableExecutor(
            self._call,
            capacity,
            pad_token=pad_token,
            checks_vocabulary=vocabulary_size is not None,
        )
        self._engine = AsyncEngine(Engine(executor, config, end_token_ids=end_token_ids))

    async def process_request(
        self,
        tokens: Iterable[int],
        step: SupportsIndex = 0,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> int:
        """The one token that follows: greedy, or as the params say.

        `step`: so many of the tokens, at their end, were generated before, so that the token is the
        one that generate() with the same params gives at that step of its completion.
        """
        tokens = _checked_tokens(tokens)
        options["num_generated"] = _checked_step(step, len(tokens))
        params = _one_more_token(params or _GREEDY, options["num_generated"])
        return (await self.generate(tokens, params, **options))[-1]

    async def generate(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[int]:
        """The completion's tokens; options as for Engine.add_request (key, priority, timeout_s).

        Without `max_tokens` it goes on to an end token, which is left out, or to `max_context`.
        """
        output = await self.complete(prompt, params, **options)
        if output.error is not None:
            raise output.error
        return output.token_ids

    async def complete(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """All that is known of the finished request: completions, log-probabilities, metrics."""
        if params is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs needs logits at every prompt position; forward gives the last",
                param="prompt_logprobs",
            )
        self._loop = asyncio.get_running_loop()
        return await self._engine.generate(prompt, params, **options)

    def _call(self, tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        """On the executor's thread; an async forward runs on its callers' event loop."""
        returned = self._forward(tokens, mask)
        if not inspect.isawaitable(returned):
            return returned
        if self._loop is None or self._loop.is_closed():
            raise ExecutorError("the event loop of the async forward function is closed")
        return asyncio.run_coroutine_threadsafe(_awaited(returned), self._loop).result()

    def snapshot(self) -> Snapshot:
        """What runs, what waits and why, with the counters since the start."""
        return self._engine.engine.snapshot()

    async def close(self) -> None:
        await self._engine.close()

    async def __aenter__(self) -> "BatchProcessor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _awaited(returned: Any) -> Any:
    return await returned


def _capacity(max_batch_size: int, max_context: int, vocabulary_size: int | None) -> Capacity:
    """Blocks for a whole batch of the longest sequences, all of which may be new in one step."""
    _check_integer("max_batch_size", max_batch_size, at_least=1)
    _check_integer("max_context", max_context, at_least=2)  # a prompt and a completion
    if vocabulary_size is not None:
        _check_integer("vocabulary_size", vocabulary_size, at_least=1)
    return Capacity(
        num_blocks=max_batch_size * -(-max_context // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_context=max_context,
        vocabulary_size=vocabulary_size or _ANY_VOCABULARY,
        max_batch_size=max_batch_size,
        max_step_tokens=max_batch_size * max_context,
    )


def _check_integer(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def _checked_tokens(tokens: object) -> Sequence[int]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise RequestError(f"tokens must be a list of token ids, got {tokens!r}", param="tokens")
    found = tuple(tokens)
    if not found:
        raise RequestError("tokens is empty; it needs at least one token", param="tokens")
    return found


def _checked_step(step: SupportsIndex, num_tokens: int) -> int:
    """The step as an int; other types of integers (numpy's) are converted."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise RequestError(f"step must be an integer, got {step!r}", param="step")
    number = operator.index(step)
    if not 0 <= number < num_tokens:
        raise RequestError(
            f"step is {number}, of {num_tokens} tokens; it counts the generated ones at their end, "
            f"so it is from 0 to {num_tokens - 1}: at least one token is the prompt's",
            param="step",
        )
    return number


def _one_more_token(params: SamplingParams, step: int) -> SamplingParams:
    """The same for a completion that ends one token after `step`."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {params!r}", param="params")
    min_tokens = min(params.min_tokens, step + 1)
    return replace(params, max_tokens=step + 1, min_tokens=min_tokens, include_stop_token=True)
