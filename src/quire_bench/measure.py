"""Runs requests through a model and times them: whole runs, single steps, single tokens.

A step that computes any prompt token is a prompt step, any other a decode step; a step's time is
from the end of the one before it (or from its start, if the executor was idle) to its own end. So
prompt tokens a second are those of prompt steps by their time, completion tokens a second those of
decode steps by theirs, and neither is blurred by the other.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict

import numpy as np

from quire.core.errors import ExecutorError
from quire.core.plan import Capacity, StepPlan, StepResult
from quire.core.request import Ended, Piece
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.base import Executor, Ticket
from quire.llm.assembly import Assembly


class StepTime(NamedTuple):
    """One step: how long it took, and what it computed."""

    seconds: float
    num_sequences: int
    prompt_tokens: int
    decode_tokens: int


class StepRecorder:
    """An executor that notes what passes through it on the way to another."""

    def __init__(self, executor: Executor, prompt_length: int) -> None:
        self._executor = executor
        self._prompt_length = prompt_length
        self._submitted: dict[int, tuple[StepPlan, float]] = {}
        self._ended_at = float("-inf")
        self.steps: list[StepTime] = []

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def kernels(self) -> Sequence[str]:
        return self._executor.kernels

    @property
    def fallback(self) -> str | None:
        return self._executor.fallback

    @property
    def is_warm(self) -> bool:
        return self._executor.is_warm

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return self._executor.memory_bytes

    def warm_up(self) -> None:
        self._executor.warm_up()

    def submit(self, plan: StepPlan) -> Ticket:
        self._submitted[plan.step_id] = (plan, time.perf_counter())
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket, timeout_s: float | None = None) -> StepResult:
        result = self._executor.collect(ticket, timeout_s)
        now = time.perf_counter()
        plan, submitted_at = self._submitted.pop(result.step_id)
        self.steps.append(self._timed(plan, now - max(submitted_at, self._ended_at)))
        self._ended_at = now
        return result

    def _timed(self, plan: StepPlan, seconds: float) -> StepTime:
        sizes = [(row.start < self._prompt_length, row.end - row.start) for row in plan.sequences]
        prompt = sum(size for is_prompt, size in sizes if is_prompt)
        decode = sum(size for is_prompt, size in sizes if not is_prompt)
        return StepTime(seconds, len(plan.sequences), prompt, decode)

    def cancel(self, ticket: Ticket) -> None:
        self._executor.cancel(ticket)

    def close(self) -> None:
        self._executor.close()


class Load(NamedTuple):
    """Requests of one size; `concurrency`: how many are with the engine at a time (None: all)."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    concurrency: int | None = None


@dataclass(slots=True)
class Run:
    """What one load took."""

    load: Load
    seconds: float = 0.0
    busy_s: float = 0.0  # of these, with a step under way
    steps: list[StepTime] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # by request
    inter_token_s: list[float] = field(default_factory=list)  # between tokens of a request

    @property
    def total_rate(self) -> float:
        """Prompt and completion tokens a second, from the first arrival to the last token."""
        per_request = self.load.prompt_tokens + self.load.new_tokens
        return self.load.num_requests * per_request / self.seconds

    @property
    def output_rate(self) -> float:
        """Completion tokens a second over the whole run, prompts included in the time."""
        return self.load.num_requests * self.load.new_tokens / self.seconds

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens a second, while there were any to compute."""
        return _rate((step.prompt_tokens, step.seconds) for step in self.prompt_steps)

    @property
    def completion_rate(self) -> float | None:
        """Completion tokens a second in decode steps; None where there were none."""
        return _rate((step.decode_tokens, step.seconds) for step in self.decode_steps)

    @property
    def prompt_steps(self) -> list[StepTime]:
        return [step for step in self.steps if step.prompt_tokens]

    @property
    def decode_steps(self) -> list[StepTime]:
        return [step for step in self.steps if not step.prompt_tokens]

    @property
    def batch_histogram(self) -> dict[str, int]:
        """How many steps had so many sequences."""
        counts = Counter(step.num_sequences for step in self.steps)
        return {str(size): counts[size] for size in sorted(counts)}


def _rate(counted: Iterator[tuple[int, float]]) -> float | None:
    pairs = list(counted)
    seconds = sum(seconds for _, seconds in pairs)
    return sum(count for count, _ in pairs) / seconds if seconds > 0 else None


def random_prompts(load: Load, vocabulary_size: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing, so that none profits from another's keys and values."""
    rng = np.random.default_rng(seed)
    size = (load.num_requests, load.prompt_tokens)
    prompts: list[list[int]] = rng.integers(0, vocabulary_size, size).tolist()
    return prompts


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def run_load(
    assembly: Assembly,
    load: Load,
    seed: int,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> Run:
    """Take a load through a new engine over the loaded model; an ExecutorError if any fails.
    `params`: of every request, or of one after the other."""
    recorder = StepRecorder(assembly.executor, load.prompt_tokens)
    engine = replace(assembly, executor=recorder).new_engine()
    prompts = random_prompts(load, assembly.spec.vocabulary_size, seed)
    run = Run(load)
    _drive(engine, prompts, run, params)
    run.steps = recorder.steps
    run.busy_s = sum(step.seconds for step in run.steps)
    return run


def run_phases(assembly: Assembly, load: Load, seed: int) -> Run:
    """The same in two phases, so that every decode step has the whole batch.

    In a plain run the first sequences may be at their end before the last prompt is read. So the
    prompts come first, with a token each; then the same prompts again, whose keys and values are in
    the cache by now, and all completions begin together. Prompt steps are those of the first phase,
    decode steps those of the second with the whole batch; each request's first token is computed
    twice.
    """
    recorder = StepRecorder(assembly.executor, load.prompt_tokens)
    engine = replace(assembly, executor=recorder).new_engine()
    prompts = random_prompts(load, assembly.spec.vocabulary_size, seed)
    reading, writing = Run(load._replace(new_tokens=1)), Run(load)
    _drive(engine, prompts, reading)
    num_steps = len(recorder.steps)
    _drive(engine, prompts, writing)
    whole = [
        step
        for step in recorder.steps[num_steps:]
        if step.num_sequences == step.decode_tokens == load.num_requests
    ]
    return Run(
        load,
        seconds=reading.seconds + writing.seconds,
        busy_s=sum(step.seconds for step in recorder.steps),
        steps=recorder.steps[:num_steps] + whole,
        first_token_s=reading.first_token_s,
        inter_token_s=writing.inter_token_s,
    )


def _drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    run: Run,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> None:
    load = run.load
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    sized = [replace(own, max_tokens=load.new_tokens) for own in each]
    waiting = list(reversed(list(zip(prompts, sized, strict=True))))
    last_at: dict[str, float] = {}  # when a live request arrived, or its last token came
    begun: set[str] = set()  # of which tokens have come
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and len(last_at) < (load.concurrency or load.num_requests):
            request = engine.add_request(*waiting.pop(), stream=True)
            last_at[request.id] = time.perf_counter()
        for event in engine.step():
            now = time.perf_counter()
            if isinstance(event, Piece) and event.token_ids:
                times = run.inter_token_s if event.request_id in begun else run.first_token_s
                times.append(now - last_at[event.request_id])
                last_at[event.request_id] = now
                begun.add(event.request_id)
            elif isinstance(event, Ended):
                _check(event, load)
                del last_at[event.request_id]
        engine.sleep_until_due()
    run.seconds = time.perf_counter() - started


def _check(event: Ended, load: Load) -> None:
    """A request that failed or fell short would make figures of nothing."""
    output = event.output
    if output.error is not None:
        raise ExecutorError(f"a measured request failed: {output.error}") from output.error
    if len(output.token_ids) != load.new_tokens:
        raise ExecutorError(
            f"a measured request gave {len(output.token_ids)} tokens, not {load.new_tokens}"
        )


class Percentiles(TypedDict):
    p50: float
    p95: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """By linear interpolation; None of nothing."""
    if not values:
        return None
    found = np.percentile(np.asarray(values, np.float64), (50, 95, 99))
    p50, p95, p99 = map(float, found)
    return {"p50": p50, "p95": p95, "p99": p99}


class Spread(TypedDict):
    low: float
    median: float
    high: float
    relative: float  # from the least to the most, as a share of the median


def spread(values: Sequence[float]) -> Spread | None:
    """The least, the median and the most; None of nothing."""
    if not values:
        return None
    low, middle, high = (float(f(values)) for f in (min, np.median, max))
    share = (high - low) / middle if middle else 0.0
    return {"low": low, "median": middle, "high": high, "relative": share}
