"""Planes: a matrix's block weights laid out for the tensor cores, decoded nowhere but in registers.

A matrix [rows, columns] is cut into column blocks of 256. Within 128 columns the GEMM's operand
has another order than the file, so that one lane of a warp has all of its weights in one or two
groups and needs few scales:

    natural column  = lane * 32 + step * 4 + half * 2 + pair      lane 0-3, step 0-7
    operand column  = step * 16 + half * 8 + lane * 2 + pair

Activations are kept in operand order throughout; `to_operand_order` and `to_natural_order` convert
vectors. Of a block of a row a lane holds four *quarters* (the block's halves, the steps' halves) of
sixteen weights, in words of 32 bits, and each plane keeps a lane's words together:

    codes  4 bits, 8 a word: weight 2j + l of eight at bit 4j + 16l; words [lane, quarter, 2]
            8 bits (Q8_0), 4 a word: words [lane, quarter, 4]
    high    Q6_K's upper two bits, 16 a word; Q5_K's upper bit, two quarters a word
            MXFP4's floats of 4 bits: see _float_words
    scales  of a lane's groups (see the format's reorderer below)
    deltas  Q6_K's float16 for a whole block

Weights are kept divided by 2**exponent, chosen so that each scale times 2**24 is a float16: an
integer of up to ten bits in a float16's low bits *is* that integer times 2**-24, so decoding is one
fused multiply-add. The sums are multiplied by 2**exponent again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from quire.core.errors import UnsupportedModelError

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


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How a format's planes look; kernels take it as a constant. A new format is a row of
    PLANE_FORMATS and of _SOURCES, and new cases in the kernels where it decodes otherwise."""

    code_bits: int  # in `codes`; 16: float16 weights, and no other plane
    high_bits: int = 0  # in `high`
    scales: Scales = Scales.FLOAT16
    zero_point: int = 0  # subtracted from the codes; 0 where a minimum is stored

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
        return 8 * self.high_bits

    @property
    def scale_words(self) -> int:
        return {Scales.FLOAT16_MINIMUMS: 8, Scales.POWERS: 2}.get(self.scales, 4)

    @property
    def has_deltas(self) -> bool:
        return self.scales is Scales.INT8

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


PLANE_FORMATS = {
    "Q4_0": PlaneFormat(4, zero_point=8),
    "Q4_1": PlaneFormat(4, scales=Scales.FLOAT16_MINIMUMS),
    "Q8_0": PlaneFormat(8, zero_point=128),
    "Q4_K": PlaneFormat(4, scales=Scales.PACKED),
    "Q5_K": PlaneFormat(4, 1, Scales.PACKED),
    "Q6_K": PlaneFormat(4, 2, Scales.INT8, zero_point=32),
    "MXFP4": PlaneFormat(4, scales=Scales.POWERS),
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
    scales: Array | None = None  # int32 [blocks * rows, words]; MXFP4: rows up to a multiple of 8
    deltas: Array | None = None  # float16 [blocks * rows up to a multiple of 8]

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
            f"it runs {', '.join(SUPPORTED)}, and TQ1_0, TQ2_0 and I2_S of BitNet models: "
            "use device='cpu', or a file of another mix"
        )


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
        scales=_joined(pieces.scales, is_padded=PLANE_FORMATS[format_name].has_powers),
        deltas=joined_deltas(pieces.deltas),
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
    """At least the largest absolute scale of a group."""
    match PLANE_FORMATS[format_name].scales:
        case Scales.PACKED:
            sizes = _half(blocks, 0).float() * 63
        case Scales.INT8:
            sizes = _half(blocks, 208).float() * 128
        case _:
            sizes = _half(blocks, 0).float()
    return _largest(sizes)


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


def _high_words(high: Array, bits: int) -> Array:
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
        if bits == 2:
            at = (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16
        else:
            at = 4 + 4 * (pair % 2) + pair // 2
        words |= fields[..., index] << at + 16 * one
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
    """Scale and minimum of 32 weights in one word: [blocks, rows, lane, half]."""
    pieces.codes.append(_in_words(_nibbles(blocks[..., 4:], 16).flatten(-2), 4))
    scales = _half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - exponent)
    minimums = _half(blocks, 2).float() * 2.0**-exponent
    words = _half_bits(scales) | _half_bits(minimums) << 16
    rows, count, _ = words.shape
    pieces.scales.append(words.view(rows, count, 2, 4).permute(1, 0, 3, 2).reshape(count, rows, 8))


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
    # 16 groups of 16: (half, lane, steps' half) -> (lane, half, steps' half), 4 bytes a lane
    rows, count, _ = blocks.shape
    groups = blocks[..., 192:208].reshape(rows, count, 2, 4, 2).permute(1, 0, 3, 2, 4).contiguous()
    pieces.scales.append(groups.view(count, rows, 16).view(torch.int32))
    pieces.deltas.append(_half(blocks, 208).transpose(0, 1))


def _reorder_mxfp4(blocks: Array, exponent: int, pieces: _Pieces) -> None:
    """A group's scale as the exponent of a float16, the largest 30; 2**-30 of that is zero. Words
    [blocks, rows, half], a byte for each lane."""
    pieces.codes.append(_float_words(_nibbles(blocks[..., 1:], 16).flatten(-2)))
    powers = blocks[..., 0].to(torch.int32) - (_POWER_ONE + 1 + exponent - _LARGEST_POWER_FIELD)
    fields = powers.clamp(0, _LARGEST_POWER_FIELD).to(torch.uint8).contiguous()
    pieces.scales.append(fields.view(torch.int32).transpose(0, 1))


class _Source(NamedTuple):
    """How a format's blocks lie in a file, and what turns them into pieces of planes."""

    block_weights: int
    block_bytes: int
    reorder: Callable[[Array, int, _Pieces], None]


_SOURCES = {
    "Q4_0": _Source(32, 18, _reorder_q4_0),
    "Q4_1": _Source(32, 20, _reorder_q4_1),
    "Q8_0": _Source(32, 34, _reorder_q8_0),
    "Q4_K": _Source(256, 144, _reorder_q4_k),
    "Q5_K": _Source(256, 176, _reorder_q5_k),
    "Q6_K": _Source(256, 210, _reorder_q6_k),
    "MXFP4": _Source(32, 17, _reorder_mxfp4),
}
