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
            8 bits (Q8_0, E4M3_128), 4 a word: words [lane, quarter, 4]
            2 bits, 16 a word: weight 2j + l at bit 2j + 16l; words [lane, quarter]
            MXFP4's floats: words [half of the block], then rows of [lane, half of the steps, 2]
            NVFP4's floats: the same words, [lane, quarter, 2]
            1 bit (Q1_0), 32 a word: words [lane, half of the block]
            IQ4's indices, numbers of grids' points: see plane_sources.py
    high    Q6_K's upper two bits, 16 a word; Q5_K's upper bit, two quarters a word
    scales  of a lane's groups (see the format's reorderer in plane_sources.py)
    deltas  a float16 for a whole block (Q2_K: two)

Formats with grids have a table of their points beside the planes, one for all matrices of a device.

Weights are kept divided by 2**exponent, chosen so that each scale times 2**24 is a float16: an
integer of up to eleven bits in a float16's low bits *is* that integer times 2**-24, so decoding is
one fused multiply-add. The sums are multiplied by 2**exponent again. Where codes are small, kernels
take them `code_shift` bits further up, so that small weights keep their bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from quire.core.errors import UnsupportedModelError
from quire.executors.cuda.plane_sources import CODE_SHIFT as CODE_SHIFT  # for those who use planes
from quire.executors.cuda.plane_sources import (
    E4M3_BITS,
    E4M3_EXPONENT,
    POWER_ONE,
    SOURCES,
    TWO_BITS_SHIFT,
    Pieces,
    grid_table,
    half,
    scattered_half,
    single,
)

Array = Any  # a torch.Tensor; the type checker does not see torch

BLOCK = 256  # columns
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
    SUMS = "two float16 for 128 weights, whose sum is the scale, in a word"
    E4M3 = "a float of a byte for 16 weights"
    E4M3_TIMES = "the same, times a float16 for 128 weights; of a block the pair, in `deltas`"
    PAIR = "a float16 for 128 weights; of a block the pair, in `deltas`"


_SCALE_WORDS = {
    Scales.FLOAT16_MINIMUMS: 8,
    Scales.POWERS: 2,
    Scales.RECORDS: 2,
    Scales.HALVES: 2,
    Scales.SUMS: 2,
    Scales.BLOCK: 0,
    Scales.PAIR: 0,
    Scales.AMONG_CODES: 0,
}
_DELTA_BYTES = {
    Scales.INT8: 2,
    Scales.BLOCK: 2,
    Scales.NIBBLES: 4,
    Scales.PAIR: 4,
    Scales.E4M3_TIMES: 4,
    Scales.AMONG_CODES: 2,
    Scales.HALVES: 2,
    Scales.HALVES_AFTER_BITS: 2,
}


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How a format's planes look; kernels take it as a constant. A new format is a row of
    PLANE_FORMATS and of SOURCES, and new cases in the kernels where it decodes otherwise."""

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
        """MXFP4's scales."""
        return self.scales is Scales.POWERS

    @property
    def has_e4m3_scales(self) -> bool:
        """NVFP4's."""
        return self.scales in (Scales.E4M3, Scales.E4M3_TIMES)

    @property
    def has_small_floats(self) -> bool:
        """Codes are floats of 4 bits (E2M1)."""
        return self.has_powers or self.has_e4m3_scales

    @property
    def has_signs(self) -> bool:
        """Q1_0: codes are signs."""
        return self.scales is Scales.PAIR

    @property
    def has_sums(self) -> bool:
        """E4M3_128: codes are floats of 8 bits; scales have more bits than a float16."""
        return self.scales is Scales.SUMS

    @property
    def by_halves(self) -> bool:
        """The codes of a block's halves lie apart: a row of them is that of half a block."""
        return self.has_powers

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
    "Q2_K": PlaneFormat(2, scales=Scales.NIBBLES, code_shift=TWO_BITS_SHIFT),
    "Q3_K": PlaneFormat(2, 1, Scales.INT8, zero_point=4, code_shift=TWO_BITS_SHIFT),
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
    "NVFP4": PlaneFormat(4, scales=Scales.E4M3),
    "NVFP4_128": PlaneFormat(4, scales=Scales.E4M3_TIMES),
    "Q1_0": PlaneFormat(1, scales=Scales.PAIR, code_shift=CODE_SHIFT),
    "Q2_0": PlaneFormat(2, zero_point=1, code_shift=TWO_BITS_SHIFT),
    "U4_128": PlaneFormat(4, 1, zero_point=16),
    "I8_128": PlaneFormat(8, zero_point=128),
    "E4M3_128": PlaneFormat(8, scales=Scales.SUMS),
    "TQ1_0": PlaneFormat(2, scales=Scales.BLOCK, zero_point=1, code_shift=TWO_BITS_SHIFT),
    "TQ2_0": PlaneFormat(2, scales=Scales.BLOCK, zero_point=1, code_shift=TWO_BITS_SHIFT),
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
    codes: Array  # int32 [blocks or halves * rows, words]; floats: float16 [rows, blocks * 256]
    exponent: int = 0
    high: Array | None = None  # int32 [blocks * rows, words]
    scales: Array | None = None  # int32 [blocks * rows, words]; two words: rows as of deltas
    deltas: Array | None = None  # float16 or int32 [blocks * rows up to a multiple of 8]
    grid: Array | None = None  # int32: the table of its format's points, which matrices share
    factor: float = 1.0  # NVFP4_128: the largest float32 of a block, which all are kept divided by

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
    form, source = PLANE_FORMATS[format_name], SOURCES[format_name]
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


@dataclass(frozen=True, slots=True)
class Scaling:
    """What weights are kept divided by: 2**exponent, and a factor."""

    exponent: int
    factor: float = 1.0


def reorder(
    format_name: str, raw: Array, num_rows: int, num_columns: int, scaling: Scaling | None = None
) -> Planes:
    """Planes of a matrix whose bytes `raw` (uint8) lie as in the file, on raw's device.
    `scaling`: that of a stack which the matrix is a part of."""
    scaling = scaling or scaling_of(format_name, [raw])
    exponent = scaling.exponent
    if format_name in FLOAT_FORMATS:
        return _reorder_floats(format_name, raw, num_rows, num_columns, exponent)
    blocks = _padded_blocks(format_name, raw, num_rows, num_columns)
    num_blocks = padded(num_columns) // BLOCK
    pieces = Pieces(factor=scaling.factor)
    step = max(1, _WEIGHTS_AT_ONCE // (num_blocks * BLOCK))
    for start in range(0, num_rows, step):
        SOURCES[format_name].reorder(blocks[start : start + step], exponent, pieces)
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
        factor=scaling.factor,
    )


def reorder_stack(format_name: str, raws: Sequence[Array], rows: Array, num_columns: int) -> Planes:
    """Planes of a stack of matrices, each below the one before it. `raws` are the bytes of one or
    more stacks, [matrices, rows, bytes]; `rows` are indices into a matrix's rows of all of them, of
    which those past the last are rows of zeros. Needs memory for a few matrices beside the planes.
    """
    scaling = scaling_of(format_name, raws)
    num_matrices, num_rows = len(raws[0]), len(rows)
    whole: Planes | None = None
    step = max(1, _WEIGHTS_AT_ONCE // (num_rows * padded(num_columns)))
    for start in range(0, num_matrices, step):
        some = [raw[start : start + step] for raw in raws]
        chosen = torch.cat([*some, torch.zeros_like(some[0][:, :1])], dim=1)[:, rows]
        count = len(chosen) * num_rows
        piece = reorder(format_name, chosen.reshape(-1), count, num_columns, scaling)
        if whole is None:
            whole = _room_for(piece, num_matrices * num_rows)
        _put(piece, whole, start * num_rows)
    assert whole is not None
    return whole


def _room_for(piece: Planes, num_rows: int) -> Planes:
    """Planes like these of so many rows, not yet written."""

    def room(array: Array | None) -> Array | None:
        if array is None:
            return None
        rows = len(array) // piece.num_rows * num_rows
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
    for name in ("codes", "high", "scales", "deltas"):
        source, target = getattr(piece, name), getattr(whole, name)
        if source is not None:
            rows = source.view(-1, piece.num_rows, *source.shape[1:])
            placed = target.view(-1, whole.num_rows, *source.shape[1:])
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
    source = SOURCES[format_name]
    size = source.block_bytes
    rows = raw.view(num_rows, -1, size)
    in_block = BLOCK // source.block_weights
    if in_block > 1:
        missing = padded(num_columns) // source.block_weights - rows.shape[1]
        if missing:
            zeros = torch.zeros((num_rows, missing, size), dtype=torch.uint8, device=raw.device)
            rows = torch.cat([rows, zeros], dim=1)
        rows = rows.reshape(num_rows, -1, in_block, size)
    return rows


def scaling_of(format_name: str, raws: Sequence[Array]) -> Scaling:
    """Of matrices that share it."""
    if format_name == "NVFP4_128":
        size = SOURCES[format_name].block_bytes
        largest = max(_largest(single(raw.view(-1, size), 0)) for raw in raws)
        return Scaling(E4M3_EXPONENT, largest or 1.0)
    return Scaling(_exponent_of(format_name, raws))


def _exponent_of(format_name: str, raws: Sequence[Array]) -> int:
    if format_name in FLOAT_FORMATS:
        kind = _FLOAT_TYPES[format_name]
        return _exponent(max(_largest(raw.view(kind)) for raw in raws), 0)
    size = SOURCES[format_name].block_bytes
    if PLANE_FORMATS[format_name].has_e4m3_scales:
        return E4M3_EXPONENT
    if PLANE_FORMATS[format_name].has_powers:
        return max(int(raw.view(-1, size)[:, 0].max()) for raw in raws) - POWER_ONE - 1
    largest = max(_largest_scale(format_name, raw.view(-1, size)) for raw in raws)
    return _exponent(largest, E4M3_BITS if PLANE_FORMATS[format_name].has_sums else CODE_SHIFT)


def _largest_scale(format_name: str, blocks: Array) -> float:
    """At least the largest absolute scale of a group, for codes as kernels take them."""
    if format_name == "IQ1_M":
        deltas = scattered_half(blocks)
    elif SOURCES[format_name].has_singles:
        deltas = single(blocks, SOURCES[format_name].delta_at)
    else:
        deltas = half(blocks, SOURCES[format_name].delta_at)
    largest = _largest(deltas.float()) * SOURCES[format_name].largest_factor
    return math.ldexp(largest, -PLANE_FORMATS[format_name].code_shift)


def _largest(values: Array) -> float:
    """The largest absolute value; 1 where a broken file holds NaN or infinity."""
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else 1.0


def _exponent(largest: float, shift: int) -> int:
    """The power of two to divide by, so that the largest times 2**shift stays a float16."""
    return 0 if largest == 0.0 else math.frexp(largest)[1] + shift - LARGEST_POWER
