"""The GPU itself: whether there is one, and the rates it reaches at best.

memory_read     the largest of a buffer far beyond the cache, bytes read
memory_copy     one such buffer into another, bytes read and bytes written together
float16         products of square random float16 matrices by the vendor's library, two operations
                a multiply-add
"""

import os
import time
from collections.abc import Callable

import torch

from quire.core.errors import ConfigError

KERNELS_VARIABLE = "QUIRE_CUDA_KERNELS"  # of the environment: "plain" for those of other GPUs

RATES = {
    "memory_read": "memory_read_bytes_per_second",
    "memory_copy": "memory_copy_bytes_per_second",
    "float16": "float16_operations_per_second",
}
_BUFFER_BYTES = 4 << 30
_MATRIX_SIZE = 8192
_AT_ONCE = 4  # calls between two readings of the clock

Work = Callable[[], float]  # starts some work and returns its amount


def require_gpu() -> None:
    """Raise a ConfigError that says what is missing and what to do instead."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch finds no NVIDIA GPU on this machine: use device='cpu', or "
            "look at `quire doctor`"
        )


def wants_plain_kernels() -> bool:
    """Whether the environment asks a Hopper GPU to run the kernels of other GPUs, for diagnosis."""
    asked = os.environ.get(KERNELS_VARIABLE, "")
    if asked not in ("", "plain"):
        raise ConfigError(
            f"{KERNELS_VARIABLE}: there are no kernels called {asked!r}: set it to 'plain' for the "
            "portable ones, or not at all for the fastest"
        )
    return asked == "plain"


def runs_hopper_kernels(device: str) -> bool:
    """Whether the kernels for compute capability 9.0 run on this device."""
    if device == "cpu" or wants_plain_kernels():
        return False
    return bool(torch.cuda.get_device_capability(device)[0] == 9)


def device_name() -> str:
    return str(torch.cuda.get_device_name())


def forget_peak_memory() -> None:
    """Begin anew to watch for the most memory that torch has of the GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """The most memory that torch had of the GPU, graphs included, since it was last forgotten."""
    return int(torch.cuda.max_memory_reserved())


def measure(seconds: float, repeats: int) -> dict[str, list[float]]:
    """Samples of each rate, a second: what achieved rates are compared with."""
    samples = {}
    for kind, rate in RATES.items():
        work = _WORKS[kind]()
        _rate(work, seconds / 4)  # compiles, allocates, wakes the clocks
        samples[rate] = [_rate(work, seconds) for _ in range(repeats)]
        del work
        torch.cuda.empty_cache()
    return samples


def _rate(work: Work, seconds: float) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    done = 0.0
    while time.perf_counter() - started < seconds or not done:
        done += sum(work() for _ in range(_AT_ONCE))
        torch.cuda.synchronize()
    return done / (time.perf_counter() - started)


def _buffer_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return min(_BUFFER_BYTES, int(free) // 4)


def _reading() -> Work:
    buffer = torch.randn(_buffer_bytes() // 4, device="cuda")

    def work() -> float:
        buffer.max()
        return float(buffer.numel() * 4)

    return work


def _copying() -> Work:
    source = torch.randn(_buffer_bytes() // 8, device="cuda")
    target = torch.empty_like(source)

    def work() -> float:
        target.copy_(source)
        return float(source.numel() * 8)

    return work


def _multiplying() -> Work:
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    product = torch.empty_like(left)

    def work() -> float:
        torch.mm(left, right, out=product)
        return 2.0 * float(_MATRIX_SIZE) ** 3

    return work


_WORKS: dict[str, Callable[[], Work]] = {
    "memory_read": _reading,
    "memory_copy": _copying,
    "float16": _multiplying,
}
