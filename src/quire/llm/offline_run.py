"""OfflineRun: takes a list of prompts through the engine, feeding it as its queue drains."""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quire.core.errors import ExecutorError, OverloadedError, QuireError, RequestError
from quire.core.request import (
    Completion,
    Ended,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    Status,
)
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.llm.progress import ProgressBar
from quire.llm.prompts import Prepared

_BATCHES_LIVE = (
    2  # what runs, and as much waiting to take its place: a million prompts cost no more
)

Asked = TypeVar("Asked")  # a prompt or a conversation


class OfflineRun(Generic[Asked]):
    """One call of generate or chat. A prompt that cannot run fails alone."""

    def __init__(
        self,
        engine: Engine,
        asked: Sequence[Asked],
        params: Sequence[SamplingParams],
        prepare: Callable[[Asked], Prepared],
        *,
        num_reserved_blocks: int = 0,  # that requests cannot have
    ) -> None:
        self._engine = engine
        self._asked = asked
        self._params = params
        self._prepare = prepare
        self._num_blocks = engine.executor.capacity.num_blocks - num_reserved_blocks
        self._outputs: list[RequestOutput | None] = [None] * len(asked)
        self._num_done = 0
        self._started = time.monotonic()
        self._next = 0  # of the prompts, to be read
        self._held: Prepared | None = None  # read, but the queue was full
        self._live: dict[str, tuple[int, str | None]] = {}  # place and text, by request

    def run(self, bar: ProgressBar) -> list[RequestOutput]:
        engine = self._engine
        tokens_before = engine.stats.completion_tokens
        while self._next < len(self._asked) or engine.has_work:
            self._feed()
            for event in engine.step():
                if isinstance(event, Ended):
                    self._finish(event.output)
            engine.sleep_until_due()
            bar.update(self._num_done, self._told(engine.stats.completion_tokens - tokens_before))
        bar.finish(self._num_done, self._told(engine.stats.completion_tokens - tokens_before))
        return [output for output in self._outputs if output is not None]

    def _told(self, num_tokens: int) -> str:
        """How far it has come, for the bar."""
        rate = num_tokens / max(time.monotonic() - self._started, 1e-9)
        done = f"{self._num_done}/{len(self._asked)} requests"
        return f"{done}, {num_tokens} tokens, {rate:.1f} tokens/s"

    def _feed(self) -> None:
        """Queue prompts until enough are live."""
        most = _BATCHES_LIVE * self._engine.config.max_batch_size
        while self._next < len(self._asked) and len(self._live) < most:
            try:
                self._queue(self._next)
            except OverloadedError:
                return  # again after a step
            except ExecutorError:
                raise
            except QuireError as error:
                self._refuse(self._next, error)
            self._held = None
            self._next += 1

    def _queue(self, place: int) -> None:
        if self._held is None:
            self._held = self._prepare(self._asked[place])
        params = self._params[place]
        self._check_blocks(len(self._held.tokens) + params.max_tokens)
        request = self._engine.add_request(self._held.tokens, params)
        self._live[request.id] = (place, self._held.text)

    def _check_blocks(self, num_tokens: int) -> None:
        """Refuse what could never run beside the rows that forward_batch keeps."""
        capacity = self._engine.executor.capacity
        needed = -(-num_tokens // capacity.block_size)
        if self._num_blocks < needed <= capacity.num_blocks:
            raise RequestError(
                f"{num_tokens} tokens need {needed} blocks of the KV cache, and forward_batch's "
                f"rows leave {self._num_blocks} of {capacity.num_blocks}: call clear() first",
                param="max_tokens",
            )

    def _finish(self, output: RequestOutput) -> None:
        place, output.prompt = self._live.pop(output.request_id)
        self._outputs[place] = output
        self._num_done += 1

    def _refuse(self, place: int, error: QuireError) -> None:
        """The output of a request that never reached the engine."""
        now = self._engine.clock.now()
        asked = self._asked[place]
        self._outputs[place] = RequestOutput(
            request_id=f"refused-{place}",
            prompt_token_ids=() if self._held is None else tuple(self._held.tokens),
            completions=[Completion(0, finish_reason=FinishReason.ERROR)],
            metrics=RequestMetrics(now, finished_at=now),
            status=Status.FAILED,
            error=error,
            prompt=asked if isinstance(asked, str) else None,
        )
        self._num_done += 1
