"""What the CPU executor needs to know of a user's options and of this machine."""

import functools
import math
import os
import sys
from collections.abc import Callable

from quire.core.errors import ConfigError
from quire.executors.cpu import check_unit, native_module
from quire.executors.protocol import Executor
from quire.llm.kv_memory import MemoryPlan
from quire.llm.machine import available_memory, usable_cores
from quire.model.loading import Model

USUAL_STEP_TOKENS = 256  # beyond it products gain little, and others wait longer for their tokens
CACHE_TYPES = ("auto", "f16", "int8")
UNIT_VARIABLE = "QUIRE_CPU_UNIT"  # of the environment: which kernels to run

_LARGEST_BATCH = 1 << 20
_SCALE_BYTES = 4  # of int8 keys or values, for each token and head


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
    native_module()
    num_threads(threads)
    chosen_unit()


def cpu_memory(model: Model, cache_type: str) -> MemoryPlan:
    """What the model takes as the kernels keep it, to the byte."""
    packed_bytes = native_module().packed_bytes
    weights = sum(
        packed_bytes(tensor.format.name, *tensor.shape)
        if len(tensor.shape) == 2
        else 4 * tensor.num_weights
        for tensor in model.tensors.values()
    )
    spec = model.spec
    per_token = spec.num_kv_elements * (1 if cache_type == "int8" else 2)
    if cache_type == "int8":
        per_token += 2 * spec.num_layers * spec.num_kv_heads * _SCALE_BYTES
    return MemoryPlan(weights, per_token, available_memory())


def cpu_executor(
    model: Model,
    num_blocks: int,
    threads: int | None,
    cache_type: str,
    tell: Callable[[str], None] | None = None,
) -> Executor:
    from quire.executors.cpu.compiling import Threads
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
        tell=tell,
    )
    if executor.fallback is not None:
        _warn_once(executor.fallback)
    return executor


@functools.cache
def _warn_once(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)
