"""Kernels compiled side by side, before the first is launched."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime import JITFunction
from triton.runtime._async_compile import AsyncCompileMode, active_mode

_MOST_THREADS = 16


@contextmanager
def compiled_together() -> Iterator[None]:
    """Launches within compile their kernels, or read them from Triton's cache, on threads of their
    own; nothing is launched. When it ends, all are compiled.

    Triton compiles where a kernel is launched first, one after another; most of the work is done
    without the GIL, or by ptxas. There is no public way to bind a launch without launching.
    """
    run = JITFunction.run
    own = threading.get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_own = threading.get_ident() == own  # another executor of this process goes on launching
        return run(self, *args, grid=grid, warmup=warmup or is_own, **kwargs)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(threads, "quire-compile") as pool, AsyncCompileMode(pool):
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = run
    finally:
        active_mode.set(None)  # Triton leaves it set where a kernel does not compile


def compiles_together(key: str, compile_kernel: Callable[[], object]) -> bool:
    """Whether this thread's launches only compile; if so, `compile_kernel` runs beside the others,
    once for a key."""
    mode = active_mode.get()
    if mode is not None:
        mode.submit(key, compile_kernel, lambda _: None)
    return mode is not None
