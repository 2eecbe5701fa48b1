"""Tensor: a named array of weights, packed as in its file, and how to unpack it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.core.errors import ModelFileError
from quire.loader.reading import Bytes, Region
from quire.quant.formats import Floats, Format
from quire.quant.ternary import check_codes

# Decoding makes some temporary arrays of its size, so large tensors are read and decoded piece by
# piece.
_WEIGHTS_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Weights in their block format: in memory, or a part of a file that is read when asked for."""

    name: str
    shape: tuple[int, ...]  # rows first; the last axis is contiguous
    format: Format
    source: Bytes | Region

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def data(self) -> Bytes:
        """All of its bytes [nbytes], read from the file each time: take them once."""
        return self.read(0, self.nbytes)

    @property
    def blocks(self) -> Bytes:
        """Its blocks' bytes [num_block_bytes], read each time."""
        return self._block_bytes(0, self.num_block_bytes)

    @property
    def num_block_bytes(self) -> int:
        return self.nbytes - self.format.tail_bytes

    @property
    def scale(self) -> float:
        """What all weights of its blocks are multiplied by; read from the file each time."""
        if not self.format.tail_bytes:
            return 1.0
        end = self.num_block_bytes
        scale = float(self.read(end, end + 4).view("<f4")[0])
        if not 0 <= scale < math.inf:  # the largest size of a weight
            raise ModelFileError(
                f"tensor {self.name} has the scale {scale}, expected a number of at least 0: the "
                "file is broken, or the tensor of another type than the file says"
            )
        return scale

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    def to_float32(self) -> Floats:
        """All weights, unpacked into an array of the tensor's shape."""
        return self._decoded(0, self.num_block_bytes).reshape(self.shape)

    def rows_float32(self, start: int, stop: int) -> Floats:
        """Rows start to stop (along the first axis of two or more), unpacked."""
        if len(self.shape) < 2:
            raise IndexError(f"{self.name} of shape {self.shape} has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"{self.name} has rows 0 to {self.shape[0]}, not {start} to {stop}")
        row_bytes = self.num_block_bytes // self.shape[0]
        rows = self._decoded(start * row_bytes, stop * row_bytes)
        return rows.reshape(stop - start, *self.shape[1:])

    def row_blocks(self, start: int, stop: int) -> Bytes:
        """The blocks of rows start to stop."""
        row_bytes = self.num_block_bytes // self.shape[0]
        return self._block_bytes(start * row_bytes, stop * row_bytes)

    def pieces(self) -> Iterator[Bytes]:
        """All of its bytes in order, a part at a time."""
        for start in range(0, self.nbytes, _BYTES_AT_ONCE):
            yield self.read(start, min(start + _BYTES_AT_ONCE, self.nbytes))

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes by their offsets in the tensor."""
        if isinstance(self.source, Region):
            return self.source.read(start, stop)
        return self.source[start:stop]

    def _block_bytes(self, start: int, stop: int) -> Bytes:
        content = self.read(start, stop)
        if self.format.name == "I2_S":
            check_codes(content, self.name)
        return content

    def _decoded(self, start: int, stop: int) -> Floats:
        """The weights of bytes `start` to `stop`, which begin and end with a block."""
        block_bytes, block_size = self.format.block_bytes, self.format.block_size
        num_blocks = (stop - start) // block_bytes
        weights = np.empty((num_blocks, block_size), dtype=np.float32)
        step = _WEIGHTS_AT_ONCE // block_size
        # A broken file may have infinite scales; executors refuse what they give.
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(0, num_blocks, step):
                last = min(first + step, num_blocks)
                piece = self._block_bytes(start + first * block_bytes, start + last * block_bytes)
                weights[first:last] = self.format.decode(piece.reshape(-1, block_bytes))
            if self.format.tail_bytes:
                weights *= np.float32(self.scale)
        return weights


def packed_size(block_format: Format, num_weights: int) -> int:
    """The bytes that so many weights take; they must fill their blocks."""
    assert num_weights % block_format.block_size == 0
    num_blocks = num_weights // block_format.block_size
    return num_blocks * block_format.block_bytes + block_format.tail_bytes
