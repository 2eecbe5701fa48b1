"""What the CPU executor needs to know of a user's options and of this machine."""

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu import check_native_module, check_unit
from quire.executors.cpu.lowering import Threads, kv_bytes_per_token, weight_bytes, workspace_bytes
from quire.executors.protocol import Executor
from quire.llm.kv_memory import USUAL_BYTES, MemoryPlan
from quire.llm.machine import available_memory, resident_memory, usable_cores
from quire.model.loading import Model

USUAL_STEP_TOKENS = 256  # beyond it products gain little, and others wait longer for their tokens
CACHE_TYPES = ("auto", "f16", "int8")
UNIT_VARIABLE = "QUIRE_CPU_UNIT"  # of the environment: which kernels to run

_LARGEST_BATCH = 1 << 20


def num_threads(asked: int | None) -> int:
    """As many as asked for, or as this process may keep busy."""
    if asked is None:
        return max(1, math.floor(usable_cores()))
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= 1024:
        raise ConfigError(f"threads must be an integer from 1 to 1024, got {asked!r}")
    return asked


def chosen_unit() -> str:
    """The kernels that the environment asks for; "" for the best that run here."""
    name = os.environ.get(UNIT_VARIABLE, "")
    try:
        return check_unit(name) if name else ""
    except ConfigError as error:
        raise ConfigError(f"{UNIT_VARIABLE}: {error}") from error


def check_cpu_options(threads: int | None) -> None:
    """Say what is wrong before anything is loaded."""
    check_native_module()
    num_threads(threads)
    chosen_unit()


def cpu_memory(
    model: Model, cache_type: str, max_step_tokens: int, threads: int | None
) -> MemoryPlan:
    """What the model takes as the kernels keep it, weights to the byte, and what steps work in."""
    spec = model.spec
    per_token = kv_bytes_per_token(spec, cache_type == "int8")
    # Positions that the usual cache holds; rope tables are copied as they grow.
    positions = 2 * min(spec.context_length, USUAL_BYTES // per_token)
    workspace = workspace_bytes(
        spec, model.tensors, max_step_tokens, positions, num_threads(threads)
    )
    return MemoryPlan(weight_bytes(model.tensors), per_token, available_memory(), workspace)


class CpuForecast(NamedTuple):
    """Bytes that one request over the model's whole context takes on the CPU executor."""

    weights: int
    kv_per_token: int
    kv_per_token_int8: int
    kv: int
    workspace: int
    process: int | None  # Python and what it has loaded; None where the system does not say
    peak: int


def cpu_forecast(model: Model) -> CpuForecast:
    """Asked of a process that has loaded as much as one that runs the model."""
    spec = model.spec
    weights = weight_bytes(model.tensors)
    halves, in_bytes = (kv_bytes_per_token(spec, is_int8) for is_int8 in (False, True))
    context = -(-spec.context_length // BLOCK_SIZE) * BLOCK_SIZE
    num_rows = min(context, USUAL_STEP_TOKENS)
    workspace = workspace_bytes(spec, model.tensors, num_rows, context)
    process = resident_memory()
    # While a tensor is packed its bytes of the file are in memory too.
    as_read = max(tensor.nbytes for tensor in model.tensors.values())
    peak = (process or 0) + weights + max(as_read, halves * context + workspace)
    return CpuForecast(weights, halves, in_bytes, halves * context, workspace, process, peak)


def cpu_executor(
    model: Model,
    num_blocks: int,
    threads: int | None,
    cache_type: str,
    tell: Callable[[str], None] | None = None,
) -> Executor:
    from quire.executors.cpu.executor import CpuExecutor

    count = num_threads(threads)
    executor = CpuExecutor(
        model,
        num_blocks=num_blocks,
        threads=Threads(count, may_spin=count <= usable_cores()),
        kv_int8=cache_type == "int8",
        unit=chosen_unit(),
        max_batch_size=_LARGEST_BATCH,
        max_step_tokens=_LARGEST_BATCH,
        on_progress=tell,
    )
    if executor.fallback is not None:
        _warn_once(executor.fallback)
    return executor


@functools.cache
def _warn_once(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)
