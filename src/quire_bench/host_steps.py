"""`quire bench steps`: the processor time of a step on the host, part by part, without a GPU.

The engine runs over the CUDA executor whose kernels are left out (cuda_host.py). Kinds of rows that
a step may have (greedy, sampled, with log-probabilities, held to a schema) are measured in turns.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ExecutorError
from quire.core.heap import settle_heap
from quire.core.request import Ended, Event
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.llm.assembly import read_text
from quire.llm.devices import Options
from quire.model.loading import load_model
from quire.structured import Grammars
from quire.structured.masks import MaskPool
from quire_bench.row_kinds import KINDS, document

_WARM_STEPS = 10
_POOL_THREADS = 2  # at least: two processors have no pool otherwise, and a GPU's host has more
_ENGINE = {"schedule": "_scheduler.schedule", "apply": "_lifecycle.apply"}
_EXECUTOR = {"submit": "submit", "sample": "_sample_rows", "collect": "collect"}


class KindFigures(NamedTuple):
    """Microseconds of processor time a step: of the engine's thread in all and by part, and of the
    other threads."""

    kind: str
    engine_us: float
    parts_us: dict[str, float]
    others_us: float


@dataclass(slots=True)
class _Parts:
    """Processor time by part; that of a part within another counts for the inner one alone."""

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[float] = field(default_factory=list)  # of each open part, its inner parts' time

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.thread_time()
            self._open.append(0.0)
            try:
                return call(*args, **named)
            finally:
                whole = time.thread_time() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._open.pop()
                if self._open:
                    self._open[-1] += whole

        return timed


class HostSteps:
    """Measures one kind of rows after the other, each with an engine of its own."""

    def __init__(self, model: str, num_rows: int, num_steps: int) -> None:
        from quire.executors.cuda import CudaConfig  # needs torch
        from quire_bench.cuda_host import ScriptedCudaExecutor

        self._num_rows = num_rows
        self._num_steps = num_steps
        text = read_text(model, Options(device="cpu"))
        if text.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer: rows would have no text")
        self._tokenizer, self._ends = text.tokenizer, text.end_token_ids
        script = text.tokenizer.encode(document(num_steps + 64), add_special=False)
        blocks = num_rows * ((num_steps + 64) // 16 + 8)
        config = CudaConfig(num_rows, max(64, 4 * num_rows), num_blocks=blocks, device="cpu")
        with load_model(text.path) as loaded:
            self._executor = ScriptedCudaExecutor(loaded, config, script)
        self._executor.warm_up()
        settle_heap()
        self._grammars = Grammars(text.tokenizer, text.spec.vocabulary_size, self._ends)

    def measure(self, kind: str) -> KindFigures:
        engine = self._new_engine()
        chosen = {**KINDS[kind].params, "max_tokens": self._num_steps + 64, "ignore_eos": True}
        for row in range(self._num_rows):
            params = SamplingParams.from_mapping(chosen)
            _prepared = self._grammars.prepare(params)  # until the engine has the request
            self._use_pool()
            engine.add_request([row % 100 + 5] * 8, params, stream=True)
        while engine.stats.num_steps < _WARM_STEPS or engine.snapshot().num_waiting:
            _checked(engine.step())
        figures = self._run(engine, kind)
        for request_id in list(engine._lifecycle.live):
            engine.cancel(request_id)
        while engine.has_work:
            engine.step()
        return figures

    def _new_engine(self) -> Engine:
        config = EngineConfig(
            max_batch_size=self._num_rows,
            max_step_tokens=max(64, 4 * self._num_rows),
            plan_ahead=True,
            max_queue_requests=4 * self._num_rows,
        )
        return Engine(
            self._executor,
            config,
            end_token_ids=self._ends,
            make_detokenizer=self._tokenizer.detokenizer,
            make_grammar=self._grammars.for_completion,
            start_masks=self._grammars.start_masks,
        )

    def _use_pool(self) -> None:
        threads = self._grammars._threads
        if threads.pool is None and self._grammars._vocabulary is not None:
            size = self._grammars._vocabulary.vocab_size
            threads.pool = MaskPool(size, self._grammars._end_token_ids, _POOL_THREADS)

    def _run(self, engine: Engine, kind: str) -> KindFigures:
        parts = _Parts()
        with _wrapped(engine, _ENGINE, parts), _wrapped(self._executor, _EXECUTOR, parts):
            device_s = self._executor.device_s
            thread_s, process_s = time.thread_time(), time.process_time()
            for _ in range(self._num_steps):
                _checked(engine.step())
            thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
            device_s = self._executor.device_s - device_s
        engine_us = 1e6 * (thread_s - device_s) / self._num_steps
        parts_us = {name: 1e6 * s / self._num_steps for name, s in parts.seconds.items()}
        parts_us["device"] = 1e6 * device_s / self._num_steps
        return KindFigures(
            kind, engine_us, parts_us, 1e6 * (process_s - thread_s) / self._num_steps
        )


def _checked(events: Iterable[Event]) -> None:
    for event in events:
        if isinstance(event, Ended):
            raise ExecutorError(f"a request ended: {event.output.error}")


@contextmanager
def _wrapped(owner: Any, names: Mapping[str, str], parts: _Parts) -> Iterator[None]:
    """Time these methods of an object, by dotted name, meanwhile."""
    found = []
    for part, name in names.items():
        *path, last = name.split(".")
        holder = reduce(getattr, path, owner)
        found.append((holder, last))
        setattr(holder, last, parts.wrap(part, getattr(holder, last)))
    try:
        yield
    finally:
        for holder, last in found:
            delattr(holder, last)


def measure_steps(
    model: str, num_rows: int, num_steps: int, kinds: Sequence[str], num_rounds: int
) -> list[KindFigures]:
    """The least of some rounds of each kind, in turns."""
    steps = HostSteps(model, num_rows, num_steps)
    rounds = [[steps.measure(kind) for kind in kinds] for _ in range(num_rounds)]
    return [
        min(of_kind, key=lambda figures: figures.engine_us) for of_kind in zip(*rounds, strict=True)
    ]
