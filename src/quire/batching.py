"""BatchProcessor: the same engine over a forward function that the user brings, and the executor
that calls the function.

The function keeps no state: it sees whole sequences, padded on the left to one length. The tokens
stand in block slots, so that the engine above need not know that this is no model.
"""

import asyncio
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, SupportsIndex, Unpack

import numpy as np
from numpy.typing import NDArray

from quire.core.clock import Clock
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ExecutorError, RequestError, RowFaultError
from quire.core.plan import Capacity, SequencePlan, SequenceResult, StepPlan, Want
from quire.core.request import RequestOptions, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.aio import AsyncEngine
from quire.engine.engine import Engine
from quire.engine.stats import Snapshot
from quire.executors.base import BLOCK_SIZE, TokenStore
from quire.executors.sampler import Logits, sample
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor

# forward(tokens [B, T], mask [B, T]) -> logits [B, V], those after each row's last token
Forward = Callable[[NDArray[np.int64], NDArray[np.bool_]], Any]

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


# ---- the executor


class CallableExecutor(ThreadedExecutor):
    """Steps run one after another on a thread of their own."""

    def __init__(
        self,
        forward: Forward,
        capacity: Capacity,
        *,
        pad_token: int = 0,
        checks_vocabulary: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._forward = forward
        self._pad_token = pad_token
        self._checks_vocabulary = checks_vocabulary
        self._store = TokenStore(capacity.num_blocks, capacity.block_size)
        super().__init__(capacity, "quire-forward", clock=clock)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"kv": self._store.num_bytes}

    def _step_errors(self, _step_id: int, /) -> AbstractContextManager[None]:
        """What the function raises reaches the engine as it is."""
        return nullcontext()

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        for copy in plan.copies:
            self._store.copy(copy.source, copy.target)
        rows = plan.sequences
        for row in rows:
            self._store.write(row.block_table, row.start, row.tokens)
        wanted = [row for row in rows if row.want is not Want.NOTHING]
        results = {row.sequence_id: SequenceResult(row.sequence_id) for row in rows}
        padding = 0
        if wanted:
            tokens, mask = self._padded(wanted)
            padding = int(mask.size - mask.sum())
            flag.check()
            logits = self._checked(self._forward(tokens, mask), len(wanted))
            for row, row_logits in zip(wanted, logits, strict=True):
                results[row.sequence_id] = _choose(row, row_logits)
        return RowResults(tuple(results.values()), padding)

    def _padded(self, rows: Sequence[SequencePlan]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows' whole sequences, aligned on the right; the mask is true on real tokens."""
        length = max(row.end for row in rows)
        tokens = np.full((len(rows), length), self._pad_token, np.int64)
        mask = np.zeros((len(rows), length), np.bool_)
        for index, row in enumerate(rows):
            tokens[index, length - row.end :] = self._store.read(row.block_table, row.end)
            mask[index, length - row.end :] = True
        return tokens, mask

    def _checked(self, returned: Any, num_rows: int) -> NDArray[np.float32]:
        logits = np.asarray(returned)
        vocabulary = str(self.capacity.vocabulary_size) if self._checks_vocabulary else "V"
        fits = logits.ndim == 2 and logits.shape[0] == num_rows and logits.shape[1] > 0
        if self._checks_vocabulary:
            fits = fits and logits.shape[1] == self.capacity.vocabulary_size
        if not fits:
            raise ExecutorError(
                f"forward returned logits of shape {logits.shape}, expected "
                f"({num_rows}, {vocabulary}): one row for each sequence, at its last token"
            )
        if not np.issubdtype(logits.dtype, np.number) or np.iscomplexobj(logits):
            raise ExecutorError(f"forward returned {logits.dtype}, expected real numbers")
        return logits.astype(np.float32)


def _choose(row: SequencePlan, logits: Logits) -> SequenceResult:
    if row.want is not Want.SAMPLE or row.prompt_targets or row.sampling is None:
        fault = "a forward function gives the logits after the last token, nothing else"
        return SequenceResult(row.sequence_id, fault=fault)
    try:
        choice = sample(logits, row.sampling, row.completion_position, row.history, row.mask())
    except RowFaultError as error:
        return SequenceResult(row.sequence_id, fault=str(error))
    return SequenceResult(row.sequence_id, choice.token, choice.logprob)
