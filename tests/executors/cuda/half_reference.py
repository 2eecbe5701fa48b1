"""The reference executor with the KV cache that BitNet models have on a GPU: in float16.

Nothing else is rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from quire.executors import reference

Floats = npt.NDArray[np.float32]


def in_half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


@contextmanager
def cache_in_halves() -> Iterator[None]:
    """While it is open, reference executors keep keys and values so."""
    write = reference.KVBlocks.write

    def write_halves(
        self: reference.KVBlocks, layer: int, slot: int, key: Floats, value: Floats
    ) -> None:
        write(self, layer, slot, in_half(key), in_half(value))

    with patch.object(reference.KVBlocks, "write", write_halves):
        yield
