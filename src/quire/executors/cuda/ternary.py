"""Ternary matrices on the device: TQ1_0, TQ2_0 and I2_S become one form of two bits a weight.

A weight is a two-bit two's complement number: -1, 0 or 1. A row's block of 256 columns, in operand
order (see planes.py), is sixteen words of 32 bits:

    operand column 64 q + 16 j + 4 t + i   in word 4 t + q, at bit 8 i + 6 - 2 j

so that a lane t of a warp loads its four words at once, and a shift and a mask leave four weights
in the upper bits of four bytes, as the matrix instruction takes them.

Where all blocks that are not zero share one scale, it belongs to the matrix, and the kernels sum
integers. Otherwise every block of a row has a scale (float16, in `Planes.deltas`).
"""

from dataclasses import dataclass

import torch

from quire.core.errors import ModelFileError
from quire.executors.cuda.planes import (
    BLOCK,
    TERNARY,
    Array,
    Planes,
    joined_deltas,
    operand_order,
    padded,
)
from quire.loader.tensor import Tensor

MAX_COLUMNS = 1 << 17  # sums of so many codes times weights are exact in float32
_WEIGHTS_AT_ONCE = 1 << 24  # while packing
_NOT_A_DIGIT = 3


@dataclass(frozen=True, slots=True, eq=False)
class TernaryMatrix:
    """A packed matrix, its rows as in the file."""

    words: Array  # int32 [rows, blocks, 16]
    scale: float  # of the whole matrix; 1 where blocks have their own
    block_scales: Array | None  # float16 [rows, blocks]


def pack(tensor: Tensor, device: str) -> TernaryMatrix:
    """Pack a tensor on the device, some rows at a time."""
    num_rows, columns = tensor.shape
    raw = torch.from_numpy(tensor.data).to(device)
    rows = raw[: raw.numel() - tensor.format.tail_bytes].view(num_rows, -1)
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    words, scales = [], []
    for start in range(0, num_rows, step):
        digits, own = _DECODERS[tensor.format.name](rows[start : start + step])
        if bool((digits == _NOT_A_DIGIT).any()):
            raise ModelFileError(f"tensor {tensor.name} holds a ternary code that stands for none")
        weights = digits.to(torch.int8) - 1
        if own is not None:
            signs = (own != 0).to(torch.int8) - 2 * (own < 0).to(torch.int8)
            weights *= signs.repeat_interleave(BLOCK, dim=1)
            scales.append(own.abs())
        words.append(_in_words(weights))
    whole = torch.cat(words)
    if not scales:
        return TernaryMatrix(whole, float(tensor.scale), None)
    return _with_scales(whole, torch.cat(scales))


def _with_scales(words: Array, scales: Array) -> TernaryMatrix:
    """One scale if the blocks that are not zero have one."""
    is_zero = ~words.any(dim=-1)
    distinct = torch.unique(scales[~is_zero])
    if len(distinct) > 1:
        return TernaryMatrix(words, 1.0, scales)
    return TernaryMatrix(words, float(distinct[0]) if len(distinct) else 0.0, None)


def _in_words(weights: Array) -> Array:
    """int8 [rows, columns] in natural order to words [rows, blocks, 16]."""
    rows, columns = weights.shape
    width = padded(columns)
    fields = torch.nn.functional.pad(weights, (0, width - columns))
    fields = fields[:, operand_order(width).to(weights.device)] & 3
    fields = fields.view(rows, width // BLOCK, 4, 4, 4, 4)  # q, j, t, i
    words = torch.zeros((rows, width // BLOCK, 4, 4), dtype=torch.int32, device=weights.device)
    for j in range(4):
        for i in range(4):
            words |= fields[:, :, :, j, :, i].to(torch.int32) << 8 * i + 6 - 2 * j
    return words.transpose(2, 3).reshape(rows, width // BLOCK, 16)  # [t, q]


# ---- the forms of files: rows of bytes to digits 0, 1, 2 [rows, columns], and scales of blocks


def _two_bits(packed: Array, shifts: list[int]) -> Array:
    """Runs of 32 bytes: all fields at the first shift, then all at the second, and so on."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (packed.reshape(*packed.shape[:-1], -1, 1, 32) >> by & 3).flatten(1)


def _half(blocks: Array, at: int) -> Array:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _i2_s(rows: Array) -> tuple[Array, None]:
    return _two_bits(rows, [6, 4, 2, 0]), None


def _tq2_0(rows: Array) -> tuple[Array, Array]:
    blocks = rows.view(len(rows), -1, 66)
    return _two_bits(blocks[..., :64], [0, 2, 4, 6]), _half(blocks, 64)


def _tq1_0(rows: Array) -> tuple[Array, Array]:
    blocks = rows.view(len(rows), -1, 54)
    digits = [
        _trits(blocks[..., :32], 5),
        _trits(blocks[..., 32:48], 5),
        _trits(blocks[..., 48:52], 4),
    ]
    return torch.cat(digits, dim=-1).flatten(1), _half(blocks, 52)


def _trits(packed: Array, count: int) -> Array:
    """A byte b stands for the fraction b / 256: times three, its whole part is the next digit."""
    fractions, digits = packed.to(torch.int32), []
    for _ in range(count):
        fractions = fractions * 3
        digits.append((fractions >> 8).to(torch.uint8))
        fractions = fractions & 255
    return torch.cat(digits, dim=-1)


_DECODERS = {"I2_S": _i2_s, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0}


# ---- planes


def in_order(matrix: TernaryMatrix, rows: Array) -> TernaryMatrix:
    """These rows of the matrix; the row behind its last is zeros."""
    rows = rows.to(matrix.words.device)
    scales = matrix.block_scales
    return TernaryMatrix(
        _with_zeros(matrix.words)[rows],
        matrix.scale,
        None if scales is None else _with_zeros(scales)[rows],
    )


def _with_zeros(rows: Array) -> Array:
    return torch.cat([rows, torch.zeros_like(rows[:1])])


def planes_of(matrices: list[TernaryMatrix]) -> Planes:
    """Matrices of one form, one below the other."""
    words = torch.cat([matrix.words for matrix in matrices])
    deltas = None
    if matrices[0].block_scales is not None:
        deltas = joined_deltas([torch.cat([matrix.block_scales for matrix in matrices]).T])
    num_rows, num_blocks, _ = words.shape
    codes = words.transpose(0, 1).reshape(num_blocks * num_rows, 16).contiguous()
    return Planes(TERNARY, num_rows, num_blocks, codes, deltas=deltas)
