"""`quire bench host`: what serving streams costs the processor, measured without computing a model.

A server in a process of its own has a real model's tokenizer and an executor that takes a given
time for every step and computes nothing. This process is its clients. What is counted is the
processor time of all threads of the server but the executor's.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from ctypes import c_double, c_long
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from random import Random

from quire.core.errors import ExecutorError
from quire.core.plan import Capacity, SequencePlan, SequenceResult, StepPlan, TokenLogprob, Want
from quire.executors.base import model_capacity
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor
from quire.llm import AsyncLLM
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import Options
from quire_bench.http_client import parse_endpoint
from quire_bench.lengths import prompt_text
from quire_bench.load import Load, PlannedRequest, Target, closed_loop, run
from quire_bench.row_kinds import KINDS, document

_TEXT = "The engine asks the scheduler for a step, 12 rows of it; “naïve” batching waits. "
_START_S = 120.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class HostPlan:
    model: str
    num_clients: int
    num_requests: int  # of each client
    num_prompt_tokens: int
    num_new_tokens: int
    step_ms: float
    kind: str = "greedy"  # of rows: see row_kinds.py


@dataclass(frozen=True, slots=True)
class HostFigures:
    tokens_per_second: float
    num_steps: int
    rows_per_step: float
    step_ms: float  # of real time
    host_ms: float  # of processor time a step, in all threads
    host_ms_per_request: float  # the same time, by requests


@dataclass(slots=True)
class Counters:
    """What the server's executor tells the clients' process."""

    num_steps: "Synchronized[int]"
    executor_s: "Synchronized[float]"  # of its thread's processor time


class TimedExecutor(ThreadedExecutor):
    """Takes a given time a step; a row's token is a function of its sequence and position, and with
    a mask the next of the script."""

    def __init__(
        self,
        capacity: Capacity,
        tokens: list[int],
        script: list[int],
        seconds: float,
        counters: Counters,
    ) -> None:
        self._tokens = tokens
        self._script = script
        self._seconds = seconds
        self._counters = counters
        super().__init__(capacity, "quire-timed")

    @property
    def memory_bytes(self) -> dict[str, int]:
        return {}

    def _run(self, plan: StepPlan, _flag: CancelFlag) -> RowResults:
        until = time.perf_counter() + self._seconds
        results = tuple([self._result(row) for row in plan.sequences])
        time.sleep(max(0.0, until - time.perf_counter()))
        self._counters.num_steps.value += 1
        self._counters.executor_s.value = time.thread_time()
        return RowResults(results)

    def _result(self, row: SequencePlan) -> SequenceResult:
        if row.want is not Want.SAMPLE or row.sampling is None:
            return SequenceResult(row.sequence_id)
        position = row.completion_position
        token = self._tokens[(131 * row.sequence_id + position) % len(self._tokens)]
        if row.allowed is not None:
            row.mask()
            token = self._script[position % len(self._script)]
        num_top = row.sampling.params.logprobs
        if num_top is None:
            return SequenceResult(row.sequence_id, token)
        top = tuple([(token + rank, -1.0 - rank) for rank in range(num_top)])
        return SequenceResult(row.sequence_id, token, TokenLogprob(token, -1.0, 1, top))


def measure_host(plan: HostPlan, say: Callable[[str], None] = lambda _: None) -> HostFigures:
    context = multiprocessing.get_context("spawn")
    counters = Counters(context.Value(c_long, 0), context.Value(c_double, 0.0))
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=[plan, counters, there], daemon=True)
    server.start()
    try:
        there.close()
        say("the server starts")
        try:
            address = here.recv() if here.poll(_START_S) else None
        except EOFError:
            address = None
        if address is None or server.pid is None:
            raise ExecutorError("the server did not start: see what it printed")
        more = KINDS[plan.kind].body
        target = Target(parse_endpoint(address), ignore_eos=True, more=more)
        _load(target, plan, num_requests=1)  # warms it
        say("clients stream")
        before = _times(server.pid, counters)
        load = _load(target, plan, plan.num_requests)
        return _figures(load, before, _times(server.pid, counters))
    finally:
        if server.pid is not None and server.is_alive():
            os.kill(server.pid, signal.SIGTERM)
        server.join(_STOP_S)
        if server.is_alive():
            server.kill()


def _times(pid: int, counters: Counters) -> tuple[int, float]:
    """Steps so far, and the processor time of the server's threads but the executor's."""
    clock = (~pid << 3) | 2  # Linux's number of the processor time clock of a process
    return counters.num_steps.value, time.clock_gettime(clock) - counters.executor_s.value


def _load(target: Target, plan: HostPlan, num_requests: int) -> Load:
    rng = Random(1)
    requests = [
        PlannedRequest(prompt_text(rng, plan.num_prompt_tokens), plan.num_new_tokens)
        for _ in range(plan.num_clients * num_requests)
    ]
    load = run(closed_loop(target, iter(requests), plan.num_clients))
    for outcome in load.outcomes:
        if outcome.error is not None:
            raise ExecutorError(f"a request failed, {outcome.error}: {outcome.detail}")
    return load


def _figures(load: Load, before: tuple[int, float], after: tuple[int, float]) -> HostFigures:
    num_steps, host_s = after[0] - before[0], after[1] - before[1]
    num_tokens = sum(outcome.completion_tokens for outcome in load.outcomes)
    return HostFigures(
        num_tokens / load.seconds,
        num_steps,
        num_tokens / num_steps,
        1000 * load.seconds / num_steps,
        1000 * host_s / num_steps,
        1000 * host_s / len(load.outcomes),
    )


# ---- in the server's process


def _serve(plan: HostPlan, counters: Counters, ready: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the clients' process ends it

    def load(on_stuck: Callable[[], None]) -> AsyncLLM:
        return AsyncLLM.of(_assembly(plan, counters), on_stuck)

    server = import_module("quire.server")  # by name: no other benchmark needs a web framework
    keys = server.read_keys(None, {})
    settings = server.ServerSettings(
        host="127.0.0.1", port=0, model_names=("timed",), keys=keys, no_auth=True
    )
    server.serve(settings, load, ready.send)


def _assembly(plan: HostPlan, counters: Counters) -> Assembly:
    """The model's, with an executor that computes nothing."""
    options = Options(device="cpu", max_batch_size=1, engine={"plan_ahead": True})
    loaded = assemble(plan.model, options)
    if loaded.tokenizer is None:
        loaded.executor.close()
        raise ExecutorError(f"{plan.model} has no tokenizer: streams would have no text")
    loaded.executor.close()
    length = plan.num_prompt_tokens + plan.num_new_tokens
    blocks = plan.num_clients * (length // 8 + 2)
    capacity = model_capacity(loaded.spec, blocks, plan.num_clients, 8 * plan.num_clients)
    tokens = loaded.tokenizer.encode(_TEXT, add_special=False)
    script = loaded.tokenizer.encode(document(plan.num_new_tokens), add_special=False)
    executor = TimedExecutor(capacity, tokens, script, plan.step_ms / 1000, counters)
    options = replace(loaded.options, max_batch_size=plan.num_clients)
    return replace(loaded, executor=executor, options=options)
