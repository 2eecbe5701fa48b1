"""Tensor: a named array of weights as it lies in its file, packed, and how to unpack it."""

import math
from dataclasses import dataclass

import numpy as np

from quire.loader.mapping import Bytes
from quire.quant.decoders import Floats
from quire.quant.formats import Format

# Decoding makes some temporary arrays of its size, so large tensors are decoded piece by piece.
_WEIGHTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Weights in their block format. `data` is a view of the mapped file: nothing is copied."""

    name: str
    shape: tuple[int, ...]  # rows first; the last axis is contiguous
    format: Format
    data: Bytes  # [nbytes]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    def to_float32(self) -> Floats:
        """All weights, unpacked into an array of the tensor's shape."""
        return _decode(self.format, self.data).reshape(self.shape)

    def rows_float32(self, start: int, stop: int) -> Floats:
        """Rows start to stop (along the first axis of two or more), unpacked."""
        if len(self.shape) < 2:
            raise IndexError(f"{self.name} of shape {self.shape} has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"{self.name} has rows 0 to {self.shape[0]}, not {start} to {stop}")
        row_bytes = self.nbytes // self.shape[0]
        rows = _decode(self.format, self.data[start * row_bytes : stop * row_bytes])
        return rows.reshape(stop - start, *self.shape[1:])


def packed_size(block_format: Format, num_weights: int) -> int:
    """The bytes that so many weights take; they must fill their blocks."""
    assert num_weights % block_format.block_size == 0
    return num_weights // block_format.block_size * block_format.block_bytes


def _decode(block_format: Format, data: Bytes) -> Floats:
    blocks = data.reshape(-1, block_format.block_bytes)
    weights = np.empty((len(blocks), block_format.block_size), dtype=np.float32)
    step = _WEIGHTS_AT_ONCE // block_format.block_size
    # A broken file may hold scales of infinity: what comes of them is for the executor to refuse.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            weights[start : start + step] = block_format.decode(blocks[start : start + step])
    return weights
