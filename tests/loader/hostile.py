"""What readers owe to any file: a typed error or a sound open, in memory the file accounts for."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile
from quire.loader.safetensors import SafetensorsFolder

Model = GGUFFile | SafetensorsFolder


@contextmanager
def tracing() -> Iterator[None]:
    """Follow allocations. Starting and stopping takes milliseconds: a loop is put inside of one."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextmanager
def memory_at_most(limit: int) -> Iterator[None]:
    """Fail if more than `limit` bytes are allocated at any moment inside."""
    with tracing():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            yield
        finally:
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= limit, f"{peak} bytes were allocated, {limit} are allowed"


def survives(open_model: Callable[[Path], Model], path: Path, limit: int) -> bool:
    """Open a doubtful file and use all of it; whether it opened. Any untyped error goes through."""
    try:
        with memory_at_most(limit), open_model(path) as model:
            use(model)
    except (ModelFileError, UnsupportedModelError) as error:
        assert str(error)
        return False
    return True


def use(model: Model) -> None:
    """Read all metadata, and a row and the ends of each tensor: they must be where it says."""
    if isinstance(model, GGUFFile):
        for key in model.metadata:
            try:
                model.metadata[key]
            except ModelFileError as error:
                assert repr(key)[1:-1] in str(error)  # as errors write names
    for tensor in model.tensors.values():
        assert len(tensor.data[[0, -1]]) == 2
        if len(tensor.shape) > 1:
            tensor.rows_float32(0, 1)
