"""The reference executor with what a GPU rounds: the cache of BitNet models, to float16; of other
models queries, softmax weights and what matrices are multiplied with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
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


@contextmanager
def operands_in_halves() -> Iterator[None]:
    """While it is open, reference executors round queries and softmax weights to bfloat16 and the
    inputs of matrices to float16. Their caches are as asked for."""
    attend, attend_latents, softmax, product = (
        reference._Attention.attend,
        reference._LatentAttention.attend,
        reference.softmax,
        reference.Linear.__call__,
    )

    def attend_rounded(
        self: Any, row: reference.Row, query: Floats, blocks: reference.KVBlocks
    ) -> Floats:
        return attend(self, row, reference._to_bfloat16(query), blocks)

    def attend_latents_rounded(
        self: Any, row: reference.Row, query: Floats, blocks: reference.KVBlocks
    ) -> Floats:
        return attend_latents(self, row, reference._to_bfloat16(query), blocks)

    def softmax_rounded(scores: Floats, sinks: Floats | None = None) -> Floats:
        return reference._to_bfloat16(softmax(scores, sinks))

    def product_rounded(self: reference.Linear, x: Floats) -> Floats:
        return product(self, in_half(x))

    with (
        patch.object(reference._Attention, "attend", attend_rounded),
        patch.object(reference._LatentAttention, "attend", attend_latents_rounded),
        patch.object(reference, "softmax", softmax_rounded),
        patch.object(reference.Linear, "__call__", product_rounded),
    ):
        yield
