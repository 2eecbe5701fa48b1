"""What the CUDA executor needs to know of a user's options, asked of the device itself."""

import ctypes
import gc
import importlib.util
import sys
from typing import Any

from quire.core.errors import ConfigError, UnsupportedModelError
from quire.executors.base import BLOCK_SIZE
from quire.executors.protocol import Executor
from quire.llm.kv_memory import MemoryPlan, parse_bytes
from quire.model.loading import Model, memory_estimate

# Buffers and graphs are made for so many at least: asking for more later costs nothing.
_USUAL_BATCH_SIZE = 256
USUAL_STEP_TOKENS = 2048
_KV_ELEMENT_BYTES = 2  # bfloat16
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def has_driver() -> bool:
    """Whether there may be a GPU at all."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def why_no_gpu() -> str | None:
    """Why this process has no GPU to run on, or None. torch, which takes seconds to import, is
    asked last."""
    if not has_driver():
        return "there is no NVIDIA driver"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from quire.executors.cuda import require_gpu

    try:
        require_gpu()
    except ConfigError:
        return "torch finds no NVIDIA GPU"
    return None


def why_not(model: Model) -> str | None:
    """Why a model cannot run on this machine's GPU, or None where it can."""
    reason = why_no_gpu()
    if reason is not None:
        return reason
    from quire.executors.cuda import check_fits

    try:
        check_fits(model)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return None


def cuda_executor(
    model: Model,
    max_batch_size: int,
    max_step_tokens: int,
    kv_memory: str | int | None,
    *,
    invariant: bool = True,
) -> tuple[Executor, MemoryPlan]:
    """The executor, warm, and the memory as it came to be."""
    executor_type, config_type = _executor_types()
    batch = max(max_batch_size, _USUAL_BATCH_SIZE)
    config = config_type(
        max_batch_size=batch,
        max_step_tokens=max(max_step_tokens, batch),
        kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
        invariant=invariant,
    )
    executor: Executor = executor_type(model, config)
    executor.warm_up()
    _spare_the_collector()
    estimate = memory_estimate(model, num_kv_tokens=0, kv_element_bytes=_KV_ELEMENT_BYTES)
    held = executor.memory_bytes
    memory = MemoryPlan(held["weights"], estimate.kv_per_token, sum(held.values()))
    assert memory.block_bytes == estimate.kv_per_token * BLOCK_SIZE
    return executor, memory


def _spare_the_collector() -> None:
    """torch and Triton leave about a million objects that stay. Walking them takes a tenth of a
    second, in the middle of some step, with the GPU idle: tell the collector that they stay."""
    gc.collect()
    gc.freeze()


def _executor_types() -> tuple[Any, Any]:
    """torch is looked for only when a GPU is asked for."""
    try:
        from quire.executors.cuda import CudaConfig, CudaExecutor, require_gpu
    except ImportError as error:
        raise ConfigError("device 'cuda' needs torch and triton: install quire[cuda]") from error
    require_gpu()
    return CudaExecutor, CudaConfig
