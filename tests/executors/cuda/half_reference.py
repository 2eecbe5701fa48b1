"""The reference executor with the numbers in half precision that the CUDA executor has: keys,
values, queries and softmax weights in bfloat16. A context of at most one tile (64 positions)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from quire.executors import reference

Floats = npt.NDArray[np.float32]
Rounding = Callable[[Floats], Floats]


def truncated(x: Floats) -> Floats:
    """As Triton's interpreter makes bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def nearest(x: Floats) -> Floats:
    """As a GPU does: the even one of two that are as near."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return truncated((bits + 0x7FFF + (bits >> 16 & 1)).view(np.float32))


@contextmanager
def in_halves(rounded: Rounding) -> Iterator[None]:
    """While it is open, reference executors compute so."""
    write = reference.KVBlocks.write

    def write_halves(
        self: reference.KVBlocks, layer: int, slot: int, key: Floats, value: Floats
    ) -> None:
        write(self, layer, slot, rounded(key), rounded(value))

    def attend(self: Any, row: reference.Row, query: Floats, blocks: reference.KVBlocks) -> Floats:
        part = self._part
        keys, values = blocks.read(self._kv_layer, row.seen(part))
        grouped = rounded(query).reshape(part.num_kv_heads, -1, part.head_dim)
        scale = np.float32(part.head_dim**-0.5 * np.log2(np.e))
        scores = np.matmul(grouped, keys.transpose(1, 2, 0)) * scale
        weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        sums = weights.sum(axis=-1, keepdims=True)
        output = (np.matmul(rounded(weights), values.transpose(1, 0, 2)) / sums).ravel()
        projected: Floats = self._output(self._output_norm(output))
        return projected

    with (
        patch.object(reference.KVBlocks, "write", write_halves),
        patch.object(reference._Attention, "attend", attend),
    ):
        yield
