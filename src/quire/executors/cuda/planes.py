"""Planes: a matrix's block weights laid out for the tensor cores, decoded nowhere but in registers.

A matrix [rows, columns] is cut into column blocks of 256. Within 128 columns the GEMM's operand
has another order than the file, so that one lane of a warp has all of its weights in one or two
groups and needs few scales:

    natural column  = lane * 32 + step * 4 + half * 2 + pair      lane 0-3, step 0-7
    operand column  = step * 16 + half * 8 + lane * 2 + pair

Activations are kept in operand order throughout; `to_operand_order` and `to_natural_order` convert
vectors. Of a block of a row a lane holds four *quarters* (the block's halves, the steps' halves) of
sixteen weights, in words of 32 bits, and each plane keeps a lane's words together:

    codes   4 bits, 8 a word: weight 2j + l of eight at bit 4j + 16l; words [lane, quarter, 2]
            8 bits (Q8_0), 4 a word: words [lane, quarter, 4]
            2 bits, 16 a word: weight 2j + l at bit 2j + 16l; words [lane, quarter]
            MXFP4's floats of 4 bits: see _float_words; IQ4's: see _value_words
            of grids: the lower eight bits of points' numbers, and what see the reorderers below
    high    Q6_K's upper two bits, 16 a word; Q5_K's upper bit, two quarters a word
    scales  of a lane's groups (see the format's reorderer below)
    deltas  a float16 for a whole block (Q2_K: two)

Formats with grids have a table of their points beside the planes, one for all matrices of a device.

Weights are kept divided by 2**exponent, chosen so that each scale times 2**24 is a float16: an
integer of up to eleven bits in a float16's low bits *is* that integer times 2**-24, so decoding is
one fused multiply-add. The sums are multiplied by 2**exponent again. Where codes are small, kernels
take them `code_shift` bits further up, so that small weights keep their bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.core.errors import UnsupportedModelError
from quire.quant import grids

Array = Any  # a torch.Tensor; the type checker does not see torch

BLOCK = 256  # columns
CODE_SHIFT = 24  # an integer n in a float16's low bits is n * 2**-24
LARGEST_POWER = 15  # float16 ends just below 2**16
GATED_DIVISOR = 16.0  # gated values reach beyond float16: they are kept divided by this
FLOAT_FORMATS = ("BF16", "F16")
_FLOAT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
TERNARY = "ternary"  # the one form of TQ1_0, TQ2_0 and I2_S: see ternary.py
_WEIGHTS_AT_ONCE = 1 << 25  # while reordering


class Scales(Enum):
    """How a format keeps the scales of a row's block of 256 columns. A group is 32 weights."""

    FLOAT16 = "a float16 a group"
    FLOAT16_MINIMUMS = "a float16 scale and a float16 minimum a group"
    PACKED = "a float16 pair a block, a 6-bit scale and a 6-bit minimum a group"
    INT8 = "a float16 a block, in `deltas`; an int8 for 16 weights"
    POWERS = "a power of two a group: the exponent of a float16, a byte"
    BLOCK = "a float16 a block, in `deltas`"
    NIBBLES = "a float16 pair a block, in `deltas`; a 4-bit scale and minimum for 16 weights"
    RECORDS = "a float16 a block and 12 bits a lane, in two words"
    AMONG_CODES = "a float16 a block, in `deltas`; those of groups are among other words' bits"
    HALVES = "a float16 a block, in `deltas`; 4 bits for 16 weights: a word for half a block"
    HALVES_AFTER_BITS = "the same after two words of upper bits of points' numbers"
    BEFORE_BITS = "a float16 a block, 4 bits a group; then upper bits of points' numbers"


_SCALE_WORDS = {
    Scales.FLOAT16_MINIMUMS: 8,
    Scales.POWERS: 2,
    Scales.RECORDS: 2,
    Scales.HALVES: 2,
    Scales.BLOCK: 0,
    Scales.AMONG_CODES: 0,
}
_DELTA_BYTES = {
    Scales.INT8: 2,
    Scales.BLOCK: 2,
    Scales.NIBBLES: 4,
    Scales.AMONG_CODES: 2,
    Scales.HALVES: 2,
    Scales.HALVES_AFTER_BITS: 2,
}


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How a format's planes look; kernels take it as a constant. A new format is a row of
    PLANE_FORMATS and of _SOURCES, and new cases in the kernels where it decodes otherwise."""

    code_bits: int  # in `codes`; 16: float16 weights, and no other plane
    high_bits: int = 0  # in `high`
    scales: Scales = Scales.FLOAT16
    zero_point: int = 0  # subtracted from the codes; 0 where a minimum is stored
    code_shift: int = 0  # codes are multiplied by two to the power of that, and scales divided
    grid: str = ""  # of quant/grids.py, where codes are numbers of its points
    has_values: bool = False  # codes are indices of IQ4_VALUES

    @property
    def is_float(self) -> bool:
        return self.code_bits == 16

    @property
    def bits(self) -> int:
        return self.code_bits + self.high_bits

    # Words of 32 bits a row and block.

    @property
    def code_words(self) -> int:
        return 8 * self.code_bits

    @property
    def high_words(self) -> int:
        """IQ1 has upper bits of points' numbers here."""
        return 4 if self.has_ternary_points else 8 * self.high_bits

    @property
    def scale_words(self) -> int:
        return _SCALE_WORDS.get(self.scales, 4)

    @property
    def delta_bytes(self) -> int:
        return _DELTA_BYTES.get(self.scales, 0)

    @property
    def table_words(self) -> int:
        """Of the table of its grid's points."""
        return _TABLE_WORDS.get(self.grid, 0)

    # How it is decoded.

    @property
    def has_deltas(self) -> bool:
        return self.delta_bytes > 0

    @property
    def has_byte_scales(self) -> bool:
        return self.scales is Scales.INT8

    @property
    def has_block_scales(self) -> bool:
        return self.scales is Scales.BLOCK

    @property
    def has_nibble_scales(self) -> bool:
        return self.scales is Scales.NIBBLES

    @property
    def has_records(self) -> bool:
        return self.scales is Scales.RECORDS

    @property
    def has_packed_scales(self) -> bool:
        return self.scales is Scales.PACKED

    @property
    def has_stored_minimums(self) -> bool:
        return self.scales is Scales.FLOAT16_MINIMUMS

    @property
    def has_powers(self) -> bool:
        """MXFP4: codes are floats of 4 bits."""
        return self.scales is Scales.POWERS

    @property
    def has_ternary_points(self) -> bool:
        """IQ1: eight weights of -1, 0 and 1 are a point."""
        return self.grid == "IQ1"

    @property
    def has_signed_points(self) -> bool:
        """IQ2 and IQ3: eight or four weights are a point, and have signs of their own."""
        return self.grid != "" and not self.has_ternary_points

    @property
    def has_even_signs(self) -> bool:
        """Of eight signs one is left out: the number of minuses is even."""
        return self.grid in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")


# Words of 32 bits: eight weights of 4 bits, or four weights of 8 bits, a word.
_TABLE_WORDS = {
    "IQ1": 2048,
    "IQ2_XXS": 2 * 256,
    "IQ2_XS": 2 * 512,
    "IQ2_S": 2 * 1024,
    "IQ3_XXS": 256,
    "IQ3_S": 512,
}
PLANE_FORMATS = {
    "Q4_0": PlaneFormat(4, zero_point=8),
    "Q4_1": PlaneFormat(4, scales=Scales.FLOAT16_MINIMUMS),
    "Q5_0": PlaneFormat(4, 1, zero_point=16),
    "Q5_1": PlaneFormat(4, 1, Scales.FLOAT16_MINIMUMS),
    "Q8_0": PlaneFormat(8, zero_point=128),
    "Q2_K": PlaneFormat(2, scales=Scales.NIBBLES, code_shift=6),
    "Q3_K": PlaneFormat(2, 1, Scales.INT8, zero_point=4, code_shift=6),
    "Q4_K": PlaneFormat(4, scales=Scales.PACKED),
    "Q5_K": PlaneFormat(4, 1, Scales.PACKED),
    "Q6_K": PlaneFormat(4, 2, Scales.INT8, zero_point=32),
    "IQ1_S": PlaneFormat(1, scales=Scales.AMONG_CODES, code_shift=2, grid="IQ1"),
    "IQ1_M": PlaneFormat(1, scales=Scales.RECORDS, code_shift=2, grid="IQ1"),
    "IQ2_XXS": PlaneFormat(2, scales=Scales.AMONG_CODES, code_shift=3, grid="IQ2_XXS"),
    "IQ2_XS": PlaneFormat(2, scales=Scales.HALVES, code_shift=3, grid="IQ2_XS"),
    "IQ2_S": PlaneFormat(2, scales=Scales.HALVES_AFTER_BITS, code_shift=3, grid="IQ2_S"),
    "IQ3_XXS": PlaneFormat(2, 1, scales=Scales.AMONG_CODES, code_shift=2, grid="IQ3_XXS"),
    "IQ3_S": PlaneFormat(2, 1, scales=Scales.BEFORE_BITS, grid="IQ3_S"),
    "IQ4_NL": PlaneFormat(4, zero_point=128, has_values=True),
    "IQ4_XS": PlaneFormat(4, scales=Scales.RECORDS, zero_point=128, has_values=True),
    "MXFP4": PlaneFormat(4, scales=Scales.POWERS),
    "TQ1_0": PlaneFormat(2, scales=Scales.BLOCK, zero_point=1, code_shift=6),
    "TQ2_0": PlaneFormat(2, scales=Scales.BLOCK, zero_point=1, code_shift=6),
}
_FLOAT = PlaneFormat(16)
DELTA_ROWS = 8  # rows that a block's deltas are padded to a multiple of
SUPPORTED = (*PLANE_FORMATS, *FLOAT_FORMATS)


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A matrix in planes; a float matrix has its weights in `codes`, as float16, and no more."""

    format: str
    num_rows: int
    num_blocks: int  # of 256 columns, the last one padded with zeros
    codes: Array  # int32 [blocks * rows, words]; float formats: float16 [rows, blocks * 256]
    exponent: int = 0
    high: Array | None = None  # int32 [blocks * rows, words]
    scales: Array | None = None  # int32 [blocks * rows, words]; two words: rows as of deltas
    deltas: Array | None = None  # float16 or int32 [blocks * rows up to a multiple of 8]
    grid: Array | None = None  # int32: the table of its format's points, which matrices share

    @property
    def num_bytes(self) -> int:
        arrays = (self.codes, self.high, self.scales, self.deltas)
        return sum(array.numel() * array.element_size() for array in arrays if array is not None)

    @property
    def is_float(self) -> bool:
        return self.format in FLOAT_FORMATS

    @property
    def is_ternary(self) -> bool:
        return self.format == TERNARY

    @property
    def layout(self) -> PlaneFormat:
        """Not of ternary planes, which have kernels of their own."""
        return _FLOAT if self.is_float else PLANE_FORMATS[self.format]

    @property
    def num_columns(self) -> int:
        """With the padding."""
        return self.num_blocks * BLOCK


def check_supported(format_name: str, tensor: str) -> None:
    """Refuse a format that has no planes yet, by name."""
    if format_name not in SUPPORTED:
        raise UnsupportedModelError(
            f"tensor {tensor} has format {format_name}, which the CUDA executor does not run yet; "
            f"it runs {', '.join(SUPPORTED)}, and I2_S of BitNet models: "
            "use device='cpu', or a file of another mix"
        )


def block_bytes(format_name: str) -> tuple[int, int]:
    """Bytes of 256 weights in planes, and in a file. Other formats are kept as they are."""
    if format_name not in PLANE_FORMATS:
        return 1, 1
    form, source = PLANE_FORMATS[format_name], _SOURCES[format_name]
    words = form.code_words + form.high_words + form.scale_words
    return 4 * words + form.delta_bytes, source.block_bytes * (BLOCK // source.block_weights)


def padded(num_columns: int) -> int:
    return -(-num_columns // BLOCK) * BLOCK


def operand_order(num_columns: int) -> Array:
    """Natural column of each operand column, over a whole number of 128s."""
    lanes = torch.arange(128).view(4, 8, 2, 2).permute(1, 2, 0, 3).reshape(1, 128)
    starts = torch.arange(0, num_columns, 128).view(-1, 1)
    return (starts + lanes).reshape(-1)


def to_operand_order(x: Array) -> Array:
    """The last axis, a multiple of 128, as a GEMM takes it."""
    return x[..., operand_order(x.shape[-1]).to(x.device)]


def to_natural_order(x: Array) -> Array:
    natural = torch.empty_like(x)
    natural[..., operand_order(x.shape[-1]).to(x.device)] = x
    return natural


# ---- reordering


@dataclass(slots=True)
class _Pieces:
    """Pieces of each plane, [blocks, rows, words] each."""

    codes: list[Array] = field(default_factory=list)
    high: list[Array] = field(default_factory=list)
    scales: list[Array] = field(default_factory=list)
    deltas: list[Array] = field(default_factory=list)


def reorder(
    format_name: str, raw: Array, num_rows: int, num_columns: int, exponent: int | None = None
) -> Planes:
    """Planes of a matrix whose bytes `raw` (uint8) lie as in the file, on raw's device.
    `exponent`: that of a stack which the matrix is a part of."""
    if exponent is None:
        exponent = exponent_of(format_name, [raw])
    if format_name in FLOAT_FORMATS:
        return _reorder_floats(format_name, raw, num_rows, num_columns, exponent)
    blocks = _padded_blocks(format_name, raw, num_rows, num_columns)
    num_blocks = padded(num_columns) // BLOCK
    pieces = _Pieces()
    step = max(1, _WEIGHTS_AT_ONCE // (num_blocks * BLOCK))
    for start in range(0, num_rows, step):
        _SOURCES[format_name].reorder(blocks[start : start + step], exponent, pieces)
    return Planes(
        format=format_name,
        num_rows=num_rows,
        num_blocks=num_blocks,
        exponent=exponent,
        codes=_joined(pieces.codes),
        high=_joined(pieces.high),
        scales=_joined(pieces.scales, is_padded=PLANE_FORMATS[format_name].scale_words == 2),
        deltas=joined_deltas(pieces.deltas),
        grid=grid_table(PLANE_FORMATS[format_name].grid, str(raw.device)),
    )


def reorder_stack(format_name: str, raws: Sequence[Array], rows: Array, num_columns: int) -> Planes:
    """Planes of a stack of matrices, each below the one before it. `raws` are the bytes of one or
    more stacks, [matrices, rows, bytes]; `rows` are indices into a matrix's rows of all of them, of
    which those past the last are rows of zeros. Needs memory for a few matrices beside the planes.
    """
    exponent = exponent_of(format_name, raws)
    num_matrices, num_rows = len(raws[0]), len(rows)
    whole: Planes | None = None
    step = max(1, _WEIGHTS_AT_ONCE // (num_rows * padded(num_columns)))
    for start in range(0, num_matrices, step):
        some = [raw[start : start + step] for raw in raws]
        chosen = torch.cat([*some, torch.zeros_like(some[0][:, :1])], dim=1)[:, rows]
        count = len(chosen) * num_rows
        piece = reorder(format_name, chosen.reshape(-1), count, num_columns, exponent)
        if whole is None:
            whole = _room_for(piece, num_matrices * num_rows)
        _put(piece, whole, start * num_rows)
    assert whole is not None
    return whole


def _room_for(piece: Planes, num_rows: int) -> Planes:
    """Planes like these of so many rows, not yet written."""
    rows = num_rows if piece.is_float else num_rows * piece.num_blocks

    def room(array: Array | None) -> Array | None:
        if array is None:
            return None
        return torch.empty((rows, *array.shape[1:]), dtype=array.dtype, device=array.device)

    return replace(
        piece,
        num_rows=num_rows,
        codes=room(piece.codes),
        high=room(piece.high),
        scales=room(piece.scales),
        deltas=room(piece.deltas),
    )


def _put(piece: Planes, whole: Planes, first_row: int) -> None:
    """Copy rows to their place in each plane; both have a multiple of DELTA_ROWS rows."""
    blocks = 1 if piece.is_float else piece.num_blocks
    for name in ("codes", "high", "scales", "deltas"):
        source, target = getattr(piece, name), getattr(whole, name)
        if source is not None:
            rows = source.view(blocks, piece.num_rows, *source.shape[1:])
            placed = target.view(blocks, whole.num_rows, *source.shape[1:])
            placed[:, first_row : first_row + piece.num_rows] = rows


def _joined(pieces: list[Array], *, is_padded: bool = False) -> Array | None:
    """Pieces along the rows, as [blocks * rows, words]; where a row's words are fewer than 16
    bytes, each block's begin at a multiple of them, as with deltas."""
    if not pieces:
        return None
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    if is_padded:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -whole.shape[1] % DELTA_ROWS))
    return whole.reshape(-1, *whole.shape[2:]).contiguous()


def joined_deltas(pieces: list[Array]) -> Array | None:
    """The same for deltas, which have no words. Each block's begin at a multiple of 16 bytes:
    TMA raises an illegal instruction where a copy along the last axis does not."""
    if not pieces:
        return None
    whole = torch.cat(pieces, dim=1)
    missing = -whole.shape[1] % DELTA_ROWS
    return torch.nn.functional.pad(whole, (0, missing)).reshape(-1).contiguous()


def _reorder_floats(
    format_name: str, raw: Array, num_rows: int, num_columns: int, exponent: int
) -> Planes:
    """As float16 scaled by a power of two: bfloat16 weights keep every bit down to 2**-29 of the
    largest."""
    values = raw.view(_FLOAT_TYPES[format_name]).view(num_rows, num_columns)
    width = padded(num_columns)
    weights = torch.empty((num_rows, width), dtype=torch.float16, device=raw.device)
    step = max(1, _WEIGHTS_AT_ONCE // width)
    order = operand_order(width).to(raw.device)
    for start in range(0, num_rows, step):
        rows = values[start : start + step]
        piece = torch.zeros((len(rows), width), dtype=torch.float16, device=raw.device)
        piece[:, :num_columns] = (rows.float() * 2.0**-exponent).to(torch.float16)
        weights[start : start + step] = piece[:, order]
    return Planes(format_name, num_rows, width // BLOCK, weights, exponent)


def _padded_blocks(format_name: str, raw: Array, num_rows: int, num_columns: int) -> Array:
    """Bytes as [rows, blocks of 256, bytes], with blocks of zeros where the columns end early."""
    source = _SOURCES[format_name]
    size = source.block_bytes
    rows = raw.view(num_rows, -1, size)
    if source.block_weights == 32:
        missing = padded(num_columns) // 32 - rows.shape[1]
        if missing:
            zeros = torch.zeros((num_rows, missing, size), dtype=torch.uint8, device=raw.device)
            rows = torch.cat([rows, zeros], dim=1)
        rows = rows.reshape(num_rows, -1, 8, size)
    return rows


def _half(blocks: Array, at: int) -> Array:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def exponent_of(format_name: str, raws: Sequence[Array]) -> int:
    """The power of two that weights are kept divided by, for matrices that share it."""
    if format_name in FLOAT_FORMATS:
        kind = _FLOAT_TYPES[format_name]
        return _exponent(max(_largest(raw.view(kind)) for raw in raws), 0)
    size = _SOURCES[format_name].block_bytes
    if PLANE_FORMATS[format_name].has_powers:
        return max(int(raw.view(-1, size)[:, 0].max()) for raw in raws) - _POWER_ONE - 1
    largest = max(_largest_scale(format_name, raw.view(-1, size)) for raw in raws)
    return _exponent(largest, CODE_SHIFT)


def _largest_scale(format_name: str, blocks: Array) -> float:
    """At least the largest absolute scale of a group, for codes as kernels take them."""
    if format_name == "IQ1_M":
        deltas = _scattered_half(blocks)
    else:
        deltas = _half(blocks, _SOURCES[format_name].delta_at)
    largest = _largest(deltas.float()) * _SOURCES[format_name].largest_factor
    return math.ldexp(largest, -PLANE_FORMATS[format_name].code_shift)


def _largest(values: Array) -> float:
    """The largest absolute value; 1 where a broken file holds NaN or infinity."""
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else 1.0


def _exponent(largest: float, shift: int) -> int:
    """The power of two to divide by, so that the largest times 2**shift stays a float16."""
    return 0 if largest == 0.0 else math.frexp(largest)[1] + shift - LARGEST_POWER


def _half_bits(x: Array) -> Array:
    """float32 rounded to float16, its bits in an int32's lower half."""
    return x.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF


def _in_words(codes: Array, bits: int) -> Array:
    """Natural codes [rows, blocks, 256] as words [blocks, rows, words]: 4 or 8 bits each.

    Natural column = (half of the block, lane, half of the steps, sixteen).
    """
    rows, blocks, _ = codes.shape
    count = 32 // bits
    fields = codes.view(rows, blocks, 2, 4, 2, 16 // count, count)
    if bits == 4:  # weight 2j + l at bit 4j + 16l
        shifts = [4 * (i // 2) + 16 * (i % 2) for i in range(8)]
    else:
        shifts = [8 * i for i in range(4)]
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index, shift in enumerate(shifts):
        words |= fields[..., index].to(torch.int32) << shift
    # [rows, blocks, half, lane, steps, words] -> [blocks, rows, lane, half, steps, words]
    return words.permute(1, 0, 3, 2, 4, 5).reshape(blocks, rows, -1)


# Of each pair of weights of a word: the bit of a half word where a float's three lower bits begin,
# and that of its sign. Masks alone bring the first pair to where a float16 has them, a shift the
# second; the others' signs are shifted apart.
FLOAT_SHIFTS, SIGN_SHIFTS = (9, 1, 4, 12), (15, 7, 8, 0)
_POWER_ONE = 127  # the byte of MXFP4's scale 1
_LARGEST_POWER_FIELD = 30  # of a float16's exponents


def _float_words(codes: Array) -> Array:
    """MXFP4's codes [rows, blocks, 256] as words [blocks, rows, 32], as `_in_words` does.

    A code is sign, two bits of exponent, one of fraction. With the lower three at bits 9 to 11 and
    the sign at bit 15 it *is* a float16: its value times 2**-14.
    """
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 2, 8).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(8):
        pair, one = divmod(index, 2)
        words |= (fields[..., index] & 7) << FLOAT_SHIFTS[pair] + 16 * one
        words |= (fields[..., index] >> 3) << SIGN_SHIFTS[pair] + 16 * one
    return words.permute(1, 0, 3, 2, 4, 5).reshape(blocks, rows, -1)


def _two_bit_words(codes: Array) -> Array:
    """Codes of 2 bits [rows, blocks, 256] as words [blocks, rows, 16], one a quarter."""
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 16).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(16):
        words |= fields[..., index] << index // 2 * 2 + index % 2 * 16
    return words.permute(1, 0, 3, 2, 4).reshape(blocks, rows, 16)


VALUE_NIBBLES = (0, 2, 1, 3)  # of four weights


def _value_words(codes: Array) -> Array:
    """IQ4's codes [rows, blocks, 256] as words [blocks, rows, 32], as `_in_words` does, but four
    weights in nibbles 0, 2, 1, 3 of a half word: their values are bytes in that order."""
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 2, 8).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(8):
        words |= fields[..., index] << 4 * VALUE_NIBBLES[index % 4] + index // 4 * 16
    return words.permute(1, 0, 3, 2, 4, 5).reshape(blocks, rows, -1)


# Where the upper bit of a quarter's pairs 0-7 lies beside codes of 2 bits. Kernels shift codes so
# that those of two pairs begin at bits 6 and 8, in this order: 3 and 4, 1 and 2, 5 and 6, 7 and 0.
THIRD_BITS = (15, 9, 11, 8, 10, 12, 14, 13)


def _high_shift(pair: int, bits: int, code_bits: int) -> int:
    """The bit of a half word at which the upper bits of a pair lie."""
    if code_bits == 2:
        return THIRD_BITS[pair]
    if bits == 2:
        return (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16
    return 4 + 4 * (pair % 2) + pair // 2


def _high_words(high: Array, bits: int, code_bits: int = 4) -> Array:
    """The upper bits, [rows, blocks, 256], as words [blocks, rows, 8 * bits].

    Few shifts move them above their nibbles: those of even pairs of weights to bit 4 of a half
    word, those of odd pairs, which are decoded four bits further up, to bit 8. A swap of the half
    words' bytes moves the second half of them there.
    """
    rows, blocks, _ = high.shape
    fields = high.view(rows, blocks, 2, 4, 2, 16).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=high.device)
    for index in range(16):
        pair, one = divmod(index, 2)
        words |= fields[..., index] << _high_shift(pair, bits, code_bits) + 16 * one
    if bits == 1:  # the second half of the steps eight bits further on, around the half word
        second = words[..., 1]
        swapped = (second & 0x00FF00FF) << 8 | second >> 8 & 0x00FF00FF
        words = words[..., 0] | swapped
        return words.permute(1, 0, 3, 2).reshape(blocks, rows, 8)
    return words.permute(1, 0, 3, 2, 4).reshape(blocks, rows, 16)


def _nibbles(packed: Array, run: int) -> Array:
    """[..., bytes] -> [..., 2 * bytes]: low nibbles of a run of bytes, then their high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _group_scales(blocks: Array, exponent: int) -> Array:
    """Scales of 32 weights each, two (the halves of the block) a lane: [blocks, rows, 4]."""
    scales = _half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - exponent)  # [rows, blocks, 8]
    bits = _half_bits(scales).view(*scales.shape[:2], 2, 4)
    return (bits[..., 0, :] | bits[..., 1, :] << 16).transpose(0, 1)


def _reorder_q4_0(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 2:], 16).flatten(-2), 4))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q8_0(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_in_words((blocks[..., 2:] ^ 128).flatten(-2), 8))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q4_1(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 4:], 16).flatten(-2), 4))
    pieces.scales.append(_scales_and_minimums(blocks, exponent))


def _scales_and_minimums(blocks: Array, exponent: int) -> Array:
    """Scale and minimum of 32 weights in one word: [blocks, rows, 8]."""
    scales = _half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - exponent)
    minimums = _half(blocks, 2).float() * 2.0**-exponent
    return _by_lane((_half_bits(scales) | _half_bits(minimums) << 16)[..., None])


def _packed_scales(blocks: Array) -> Array:
    """Q4_K's and Q5_K's float16 pair, then for each lane 24 bits (scale, minimum, of both halves),
    byte by byte: word 1 + i holds the lanes' bytes i. [blocks, rows, 4]."""
    first, second, low = (blocks[..., at : at + 4].to(torch.int32) for at in (4, 8, 12))
    upper_scales, upper_minimums = (low & 15) | (first >> 6) << 4, (low >> 4) | (second >> 6) << 4
    records = (first & 63) | (second & 63) << 6 | upper_scales << 12 | upper_minimums << 18
    pair = blocks[..., :4].contiguous().view(torch.int32)
    planes = [pair]
    for byte in range(3):
        lanes = (records >> 8 * byte) & 255
        planes.append((lanes << torch.arange(0, 32, 8, device=lanes.device)).sum(-1, keepdim=True))
    return torch.cat(planes, dim=-1).to(torch.int32).transpose(0, 1)


def _reorder_q4_k(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent  # the kernel applies it
    pieces.codes.append(_in_words(_nibbles(blocks[..., 16:], 32), 4))
    pieces.scales.append(_packed_scales(blocks))


def _reorder_q5_k(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    high = (blocks[..., None, 16:48] >> shifts) & 1  # [rows, blocks, 8, 32]
    pieces.codes.append(_in_words(_nibbles(blocks[..., 48:], 32), 4))
    pieces.high.append(_high_words(high.flatten(-2), 1))
    pieces.scales.append(_packed_scales(blocks))


def _reorder_q6_k(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    packed = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((packed >> shifts) & 3).flatten(2)
    pieces.codes.append(_in_words(_nibbles(blocks[..., :128], 64), 4))
    pieces.high.append(_high_words(high, 2))
    pieces.scales.append(_quarter_bytes(blocks[..., 192:208]))
    pieces.deltas.append(_half(blocks, 208).transpose(0, 1))


def _quarter_bytes(groups: Array) -> Array:
    """A byte for 16 weights, [rows, blocks, 16], as words [blocks, rows, 4], a byte a quarter."""
    rows, count, _ = groups.shape
    lanes = groups.reshape(rows, count, 2, 4, 2).permute(1, 0, 3, 2, 4).contiguous()
    return lanes.view(count, rows, 16).view(torch.int32)


def _reorder_mxfp4(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """A group's scale as the exponent of a float16, the largest 30; 2**-30 of that is zero. Words
    [blocks, rows, half], a byte for each lane."""
    pieces.codes.append(_float_words(_nibbles(blocks[..., 1:], 16).flatten(-2)))
    powers = blocks[..., 0].to(torch.int32) - (_POWER_ONE + 1 + exponent - _LARGEST_POWER_FIELD)
    fields = powers.clamp(0, _LARGEST_POWER_FIELD).to(torch.uint8).contiguous()
    pieces.scales.append(fields.view(torch.int32).transpose(0, 1))


def _bits(packed: Array) -> Array:
    """[..., bytes] -> [..., 8 * bytes]: the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _runs(packed: Array, bits: int, run: int) -> Array:
    """[..., bytes] -> [..., bytes * 8 // bits]: of a run of bytes the lowest bits, then the next
    ones, and so on."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    return ((runs >> shifts) & (1 << bits) - 1).flatten(-3)


def _int32(blocks: Array, at: int, end: int) -> Array:
    return blocks[..., at:end].contiguous().view(torch.int32)


def _shorts(blocks: Array, at: int, end: int) -> Array:
    """As int32, without their signs."""
    return blocks[..., at:end].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _by_lane(groups: Array) -> Array:
    """Of the groups of a block, [rows, blocks, 8, words], those of a lane together: [blocks, rows,
    8 * words]."""
    rows, blocks, _, words = groups.shape
    lanes = groups.view(rows, blocks, 2, 4, words).permute(1, 0, 3, 2, 4)
    return lanes.reshape(blocks, rows, -1).contiguous()


def _lane_bytes(fields: Array) -> Array:
    """A byte of each group, [rows, blocks, 8], as words [rows, blocks, half], a byte a lane."""
    return fields.to(torch.uint8).contiguous().view(torch.int32)


def _record_words(halves: Array, records: Array) -> Array:
    """A float16's bits [rows, blocks] and 12 bits a lane [rows, blocks, 4] as two words, the lanes'
    from bit 16 on: [blocks, rows, 2]."""
    shifts = torch.arange(16, 64, 12, device=records.device)
    long = (records.to(torch.int64) << shifts).sum(-1) | halves.to(torch.int64)
    return long.view(torch.int32).view(*long.shape, 2).transpose(0, 1)


def _reorder_q5_0(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 6:], 16).flatten(-2), 4))
    pieces.high.append(_high_words(_bits(blocks[..., 2:6]).flatten(-2), 1))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q5_1(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 8:], 16).flatten(-2), 4))
    pieces.high.append(_high_words(_bits(blocks[..., 4:8]).flatten(-2), 1))
    pieces.scales.append(_scales_and_minimums(blocks, exponent))


def _reorder_q2_k(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., 16:80], 2, 32)))
    pieces.scales.append(_quarter_bytes(blocks[..., :16]))
    pieces.deltas.append(_int32(blocks, 80, 84).squeeze(-1).transpose(0, 1))


def _reorder_q3_k(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """Its scales of 6 bits become int8, as Q6_K's: 4 bytes a block more than in the file."""
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., 32:96], 2, 32)))
    pieces.high.append(_high_words(_runs(blocks[..., :32], 1, 32), 1, code_bits=2))
    scales = _runs(blocks[..., 96:104], 4, 8) | _runs(blocks[..., 104:108], 2, 4) << 4
    pieces.scales.append(_quarter_bytes(scales - 32))  # wraps around, as int8 does
    pieces.deltas.append(_half(blocks, 108).transpose(0, 1))


def _reorder_iq4_nl(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    pieces.codes.append(_value_words(_nibbles(blocks[..., 2:], 16).flatten(-2)))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_iq4_xs(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    pieces.codes.append(_value_words(_nibbles(blocks[..., 8:], 16)))
    scales = _runs(blocks[..., 4:8], 4, 1) | _runs(blocks[..., 2:4], 2, 1) << 4
    of_halves = scales.view(*scales.shape[:2], 2, 4).to(torch.int32)
    records = of_halves[..., 0, :] | of_halves[..., 1, :] << 6
    pieces.scales.append(_record_words(_shorts(blocks, 0, 2).squeeze(-1), records))


def _reorder_tq1_0(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """Five digits of base three a byte become 2 bits each: kernels have no time for digits."""
    del exponent
    digits = [_digits(blocks[..., :32], 32, 5), _digits(blocks[..., 32:48], 16, 5)]
    digits.append(_digits(blocks[..., 48:52], 4, 4))
    pieces.codes.append(_two_bit_words(torch.cat(digits, dim=-1)))
    pieces.deltas.append(_half(blocks, 52).transpose(0, 1))


def _digits(packed: Array, run: int, count: int) -> Array:
    """As quant/formats.py unpacks them."""
    powers = torch.tensor([3**digit for digit in range(count)], device=packed.device)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run).to(torch.int32)
    fractions = runs * powers.to(torch.int32).view(-1, 1) & 255
    return (fractions * 3 >> 8).flatten(-3)


def _reorder_tq2_0(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., :64], 2, 32)))
    pieces.deltas.append(_half(blocks, 64).transpose(0, 1))


# ---- grids
#
# A word of a table holds four weights of IQ2 and IQ3, a byte each in the order of GRID_BYTES, or
# eight of IQ1, as in `_in_words`. The signs of 32 weights are a word: that of byte b of the k-th
# word is bit k of byte b ^ 1. So one shift brings the signs of a word's bytes to their highest
# bits, each where a float16 has it once the other byte of its half word is masked or swapped away.
GRID_BYTES = (0, 2, 1, 3)  # of four weights
EVEN_SIGNS = (25, 27, 29, 31)  # bits of signs that follow from the others; other bits lie there


@cache
def grid_table(name: str, device: str) -> Array | None:
    """The points of a grid as words on a device."""
    if not name:
        return None
    points = torch.from_numpy(grids.points(name).astype(np.int32))
    if name == "IQ1":  # codes times 4, see PlaneFormat.code_shift
        shifts = torch.tensor([4 * (i // 2) + 16 * (i % 2) for i in range(8)])
        words = (points.long() + 1 << shifts + 2).sum(-1)
    else:
        shifts = 8 * torch.tensor(GRID_BYTES)
        words = (points.view(-1, 4).long() << shifts).sum(-1)
    return words.to(torch.int32).to(device)


def _sign_words(signs: Array) -> Array:
    """A bit for each weight, [rows, blocks, 256], as words [rows, blocks, 8]."""
    fields = signs.reshape(*signs.shape[:2], 8, 8, 4).to(torch.int32)
    words = torch.zeros(fields.shape[:3], dtype=torch.int32, device=signs.device)
    for place in range(8):
        for weight in range(4):
            words |= fields[..., place, weight] << place + 8 * (GRID_BYTES[weight] ^ 1)
    return words


def _even_sign_words(sevens: Array, others: Array) -> Array:
    """Seven signs for eight weights, [rows, blocks, 32], and four other bits of each group,
    [rows, blocks, 8], as words [rows, blocks, 8]."""
    bits = _bits(sevens.to(torch.uint8)).unflatten(-1, (32, 8))
    bits[..., 7] = bits.sum(-1) & 1  # the highest of eight bits was zero
    words = _sign_words(bits.flatten(-2))
    for index, at in enumerate(EVEN_SIGNS):
        words &= ~(1 << at) if at < 31 else 0x7FFFFFFF
        words |= (others >> index & 1).to(torch.int32) << at
    return words


def _fields(words: Array, shifts: Sequence[int], mask: int) -> Array:
    """Fields of words [rows, blocks, n], those of a word side by side."""
    each = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    return (words[..., None] >> each & mask).flatten(-2)


def _reorder_iq2_xxs(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """The scales of groups are the four other bits of sign words."""
    del exponent
    words = _int32(blocks, 2, 66).unflatten(-1, (8, 2))
    sevens = _fields(words[..., 1], (0, 7, 14, 21), 127)
    signs = _even_sign_words(sevens, words[..., 1] >> 28 & 15)
    pieces.codes.append(_by_lane(torch.stack([words[..., 0], signs], -1)))
    pieces.deltas.append(_half(blocks, 0).transpose(0, 1))


def _reorder_iq2_xs(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """The numbers' upper bits are the four other bits of sign words."""
    del exponent
    words = _shorts(blocks, 2, 66)
    low = (words & 255).to(torch.uint8).contiguous().view(torch.int32)
    upper = words.unflatten(-1, (8, 4)) >> 8 & 1
    others = (upper << torch.arange(4, device=words.device)).sum(-1)
    signs = _even_sign_words(words >> 9, others)
    pieces.codes.append(_by_lane(torch.stack([low, signs], -1)))
    pieces.scales.append(_lane_bytes(blocks[..., 66:74]).transpose(0, 1))
    pieces.deltas.append(_half(blocks, 0).transpose(0, 1))


def _reorder_iq2_s(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    del exponent
    signs = _sign_words(_bits(blocks[..., 34:66]))
    pieces.codes.append(_by_lane(torch.stack([_int32(blocks, 2, 34), signs], -1)))
    bits = [_lane_bytes(blocks[..., at : at + 8]) for at in (66, 74)]
    pieces.scales.append(torch.cat(bits, -1).transpose(0, 1))
    pieces.deltas.append(_half(blocks, 0).transpose(0, 1))


def _reorder_iq3_xxs(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """The scales of groups are the four other bits of sign words."""
    del exponent
    words = _int32(blocks, 66, 98)
    sevens = _fields(words, (0, 7, 14, 21), 127)
    pieces.codes.append(_by_lane(_int32(blocks, 2, 66).unflatten(-1, (8, 2))))
    pieces.high.append(_by_lane(_even_sign_words(sevens, words >> 28 & 15)[..., None]))
    pieces.deltas.append(_half(blocks, 0).transpose(0, 1))


def _reorder_iq3_s(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """Words of scales: the float16; the lanes' bytes of two scales; the numbers' upper bits of each
    half, the lanes' bytes. 2 bytes a block more than in the file."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 2, 66).unflatten(-1, (8, 2))))
    pieces.high.append(_by_lane(_sign_words(_bits(blocks[..., 74:106]))[..., None]))
    nibbles = _runs(blocks[..., 106:110], 4, 1).unflatten(-1, (2, 4))
    scales = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).contiguous().view(torch.int32)
    words = [_shorts(blocks, 0, 2), scales, _lane_bytes(blocks[..., 66:74])]
    pieces.scales.append(torch.cat(words, -1).transpose(0, 1))


def _reorder_iq1_s(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """Upper bits are as in the file: three bits of each of four numbers, then three of the scale
    and the direction of the shift; those of a lane's two groups are a word."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 2, 34)[..., None]))
    pieces.high.append(_lane_pairs(_shorts(blocks, 34, 50)))
    pieces.deltas.append(_half(blocks, 0).transpose(0, 1))


def _reorder_iq1_m(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """Upper bits are as in the file: a nibble for each number, of which the fourth bit is the
    direction of the shift. A lane's record is its four scales of 3 bits."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 0, 32)[..., None]))
    pieces.high.append(_lane_pairs(_shorts(blocks, 32, 48)))
    words = _shorts(blocks, 48, 56)
    scales = _fields(words, (0, 3, 6, 9), 7).view(*words.shape[:2], 2, 4, 2)
    shifts = torch.tensor([[[0, 3]], [[6, 9]]], device=words.device)
    records = (scales << shifts).sum((2, 4))
    halves = _scattered_half(blocks).view(torch.int16).to(torch.int32) & 0xFFFF
    pieces.scales.append(_record_words(halves, records))


def _lane_pairs(shorts: Array) -> Array:
    """16 bits of each group, [rows, blocks, 8]: those of a lane in one word, [blocks, rows, 4]."""
    halves = shorts.unflatten(-1, (2, 4))
    return (halves[..., 0, :] | halves[..., 1, :] << 16).transpose(0, 1).contiguous()


def _scattered_half(blocks: Array) -> Array:
    """IQ1_M's float16: a nibble each of four words."""
    words = _shorts(blocks, 48, 56)
    shifts = torch.arange(0, 16, 4, device=words.device)
    return (words >> 12 << shifts).sum(-1).to(torch.int16).view(torch.float16)


class _Source(NamedTuple):
    """How a format's blocks lie in a file, and what turns them into pieces of planes."""

    block_weights: int
    block_bytes: int
    reorder: Callable[[Array, int, _Pieces], None]
    delta_at: int = 0  # the byte where a block's float16 scale begins
    largest_factor: int = 1  # of that scale, in the scale of a group


_SOURCES = {
    "Q4_0": _Source(32, 18, _reorder_q4_0),
    "Q4_1": _Source(32, 20, _reorder_q4_1),
    "Q5_0": _Source(32, 22, _reorder_q5_0),
    "Q5_1": _Source(32, 24, _reorder_q5_1),
    "Q8_0": _Source(32, 34, _reorder_q8_0),
    "Q2_K": _Source(256, 84, _reorder_q2_k, 80, 15),
    "Q3_K": _Source(256, 110, _reorder_q3_k, 108, 32),
    "Q4_K": _Source(256, 144, _reorder_q4_k, 0, 63),
    "Q5_K": _Source(256, 176, _reorder_q5_k, 0, 63),
    "Q6_K": _Source(256, 210, _reorder_q6_k, 208, 128),
    "IQ1_S": _Source(256, 50, _reorder_iq1_s, 0, 15),
    "IQ1_M": _Source(256, 56, _reorder_iq1_m, 0, 15),
    "IQ2_XXS": _Source(256, 66, _reorder_iq2_xxs, 0, 31),
    "IQ2_XS": _Source(256, 74, _reorder_iq2_xs, 0, 31),
    "IQ2_S": _Source(256, 82, _reorder_iq2_s, 0, 31),
    "IQ3_XXS": _Source(256, 98, _reorder_iq3_xxs, 0, 31),
    "IQ3_S": _Source(256, 110, _reorder_iq3_s, 0, 31),
    "IQ4_NL": _Source(32, 18, _reorder_iq4_nl),
    "IQ4_XS": _Source(256, 136, _reorder_iq4_xs, 0, 32),
    "MXFP4": _Source(32, 17, _reorder_mxfp4),
    "TQ1_0": _Source(256, 54, _reorder_tq1_0, 52),
    "TQ2_0": _Source(256, 66, _reorder_tq2_0, 64),
}
