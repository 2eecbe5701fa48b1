"""What this machine can do at best, by thread count: what achieved rates are held against.

Measured with numpy and its BLAS on threads of our own, so the process that measures must keep BLAS
to one thread: `measure_limits` starts one that does. What is measured is said plainly:

memory_read     the sum of squares of float32 buffers far larger than the caches, bytes read
memory_copy     one such buffer into another, bytes read and bytes written together
float32         products of square float32 matrices by BLAS, two operations a multiply-add
integer         integer multiplications and additions by the best kernel there is, which is named
                (`integer_kernel`)

Where torch sees a GPU, executors/cuda/device.py measures its rates.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.core.errors import ConfigError, ExecutorError
from quire.executors.cpu import has_native_module, units
from quire.executors.cpu.native import native
from quire.llm.devices import DEVICES
from quire_bench.machine_info import largest_cache_bytes, usable_threads

RATES = {
    "memory_read": "memory_read_bytes_per_second",
    "memory_copy": "memory_copy_bytes_per_second",
    "float32": "float32_operations_per_second",
    "integer": "integer_operations_per_second",
}
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
}
_LEAST_BUFFER = 512 << 20
_CACHES = 8  # a buffer is so many times the last cache
_LARGEST_BUFFER = 4 << 30
_PIECE_BYTES = 8 << 20  # read or copied between two looks at the clock
# int32: 512 KiB an array, two of them within most second caches; a call long enough that threads
# do not wait for the interpreter's lock
_CACHED_ELEMENTS = 1 << 17
_CACHED_ROUNDS = 4
_DOT_ROUNDS = 1 << 14  # some hundred microseconds

Work = Callable[[], float]  # does some, and says how much


class IntegerKernel(NamedTuple):
    """What integer arithmetic is measured with."""

    name: str  # for receipts and tables
    prepare: Callable[[], Work]  # for one thread


def integer_kernel() -> IntegerKernel:
    """The one place that chooses it: dot products of 4-bit codes and int8 in the native module's
    best unit. Without the module numpy counts, which has no integer dot product worth its name."""
    if not has_native_module():
        return IntegerKernel("numpy, elementwise int32 multiply and add", _counting)
    unit = units()[-1]
    return IntegerKernel(f"native {unit}, dot products of 4-bit codes", lambda: _dots(unit))


def _dots(unit: str) -> Work:
    def work() -> float:
        native.peak_dots(unit, _DOT_ROUNDS)
        return float(_DOT_ROUNDS * native.peak_round)

    return work


@dataclass(frozen=True, slots=True)
class LimitsPlan:
    """What to measure, and how long."""

    threads: tuple[int, ...]
    buffer_bytes: int  # of all threads together
    seconds: float  # a sample
    repeats: int
    matrix_size: int = 1024

    def __post_init__(self) -> None:
        if not self.threads or not all(1 <= count <= 4096 for count in self.threads):
            raise ConfigError(f"thread counts must be from 1 to 4096, got {list(self.threads)}")
        if self.buffer_bytes < 1 << 16:
            raise ConfigError(f"the buffer must have 64 KiB at least, got {self.buffer_bytes}")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds must be above 0 and at most 3600, got {self.seconds}")
        for name in ("repeats", "matrix_size"):
            if not 1 <= getattr(self, name) <= 1 << 14:
                raise ConfigError(f"{name} must be from 1 to 16384, got {getattr(self, name)}")

    @property
    def expected_s(self) -> float:
        """How long measuring takes, about."""
        return len(RATES) * len(self.threads) * self.seconds * (self.repeats + 1)


def usual_buffer_bytes() -> int:
    """Far more than the caches hold."""
    wanted = _CACHES * (largest_cache_bytes() or 0)
    return min(_LARGEST_BUFFER, max(_LEAST_BUFFER, wanted))


def usual_threads() -> tuple[int, ...]:
    """1, 2, 4 and so on, and as many as can run at once."""
    most = usable_threads()
    return tuple(sorted({1 << power for power in range(most.bit_length())} | {most}))


def measure_limits(plan: LimitsPlan) -> dict[str, list[float]]:
    """Samples by rate and thread count, such as float32_operations_per_second.threads_2."""
    command = [sys.executable, "-m", "quire_bench.machine_limits", json.dumps(asdict(plan))]
    done = subprocess.run(
        command,
        env={**os.environ, **_ONE_THREAD},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ExecutorError(f"measuring the limits failed: {lines[-1]}")
    samples: dict[str, list[float]] = json.loads(done.stdout)
    return samples


class GpuLimits(NamedTuple):
    """Samples by rate; none where there is no GPU to measure, and then `name` says why."""

    name: str
    samples: dict[str, list[float]]


def measure_gpu(plan: LimitsPlan) -> GpuLimits:
    reason = DEVICES["cuda"].why_unavailable()
    if reason is not None:
        return GpuLimits(f"not measured: {reason}", {})
    from quire.executors.cuda import device

    samples = device.measure(plan.seconds, plan.repeats)
    return GpuLimits(device.device_name(), {f"gpu.{rate}": samples[rate] for rate in samples})


def summarise(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The best sample of each rate by thread count, and the best of all; a limit is what can be
    reached, so whatever slowed the other samples does not count."""
    results: dict[str, dict[str, float]] = {name: {} for name in RATES.values()}
    on_gpu: dict[str, float] = {}
    for name, values in samples.items():
        if name.startswith("gpu."):
            on_gpu[name.removeprefix("gpu.")] = max(values)
            continue
        rate, _, threads = name.partition(".threads_")
        results[rate][threads] = max(values)
    for by_threads in results.values():
        by_threads["best"] = max(by_threads.values())
    return results | ({"gpu": on_gpu} if on_gpu else {})


# ---- in the process that measures


def _measure(plan: LimitsPlan) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for kind, rate in RATES.items():
        for count in plan.threads:
            works = _works(kind, count, plan)
            _rate(works, plan.seconds / 4)  # touches the memory, wakes the cores
            samples[f"{rate}.threads_{count}"] = [
                _rate(works, plan.seconds) for _ in range(plan.repeats)
            ]
    return samples


def _works(kind: str, count: int, plan: LimitsPlan) -> list[Work]:
    each = plan.buffer_bytes // count
    match kind:
        case "memory_read":
            return [_reading(each) for _ in range(count)]
        case "memory_copy":
            return [_copying(each // 2) for _ in range(count)]
        case "float32":
            return [_multiplying(plan.matrix_size) for _ in range(count)]
        case _:
            return [integer_kernel().prepare() for _ in range(count)]


def _reading(num_bytes: int) -> Work:
    buffer = np.ones(num_bytes // 4, np.float32)
    pieces = _pieces(buffer)
    position = 0

    def work() -> float:
        nonlocal position
        piece = pieces[position % len(pieces)]
        position += 1
        np.dot(piece, piece)
        return float(piece.nbytes)

    return work


def _copying(num_bytes: int) -> Work:
    source = _pieces(np.ones(num_bytes // 4, np.float32))
    target = _pieces(np.zeros(num_bytes // 4, np.float32))
    position = 0

    def work() -> float:
        nonlocal position
        index = position % len(source)
        position += 1
        np.copyto(target[index], source[index])
        return 2.0 * float(source[index].nbytes)

    return work


def _pieces(buffer: "np.ndarray[Any, np.dtype[np.float32]]") -> list[Any]:
    return np.array_split(buffer, max(1, math.ceil(buffer.nbytes / _PIECE_BYTES)))


def _multiplying(size: int) -> Work:
    left = np.full((size, size), 0.5, np.float32)
    right = np.full((size, size), 0.25, np.float32)
    product = np.empty((size, size), np.float32)
    operations = 2.0 * float(size) ** 3

    def work() -> float:
        np.matmul(left, right, out=product)
        return operations

    return work


def _counting() -> Work:
    values = np.arange(_CACHED_ELEMENTS, dtype=np.int32)
    factors = np.full(_CACHED_ELEMENTS, 3, np.int32)

    def work() -> float:
        for _ in range(_CACHED_ROUNDS):
            np.multiply(values, factors, out=values)
            np.add(values, factors, out=values)
        return 2.0 * _CACHED_ELEMENTS * _CACHED_ROUNDS

    return work


def _rate(works: Sequence[Work], seconds: float) -> float:
    """All of them at once, each on a thread, for so long; their rates together."""
    barrier = threading.Barrier(len(works))
    rates = [0.0] * len(works)

    def loop(index: int) -> None:
        barrier.wait()
        started = time.perf_counter()
        done = 0.0
        while time.perf_counter() - started < seconds or not done:
            done += works[index]()
        rates[index] = done / (time.perf_counter() - started)

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def _main() -> None:
    given = json.loads(sys.argv[1])
    plan = LimitsPlan(**(given | {"threads": tuple(given["threads"])}))
    json.dump(_measure(plan), sys.stdout)


if __name__ == "__main__":
    _main()
