"""Opens CPU executors for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.model.loading import load_model


@contextmanager
def opened(
    path: Path | str, num_blocks: int = 16, threads: int = 1, **options: Any
) -> Iterator[CpuExecutor]:
    with load_model(path) as model:
        executor = CpuExecutor(
            model, num_blocks=num_blocks, threads=Threads(threads, may_spin=False), **options
        )
        try:
            yield executor
        finally:
            executor.close()


def stored(executor: CpuExecutor, table: tuple[int, ...], num_layers: int) -> bytes:
    """The bytes of all keys and values in some blocks."""
    return b"".join(
        executor.cache_block(layer, block) for layer in range(num_layers) for block in table
    )
