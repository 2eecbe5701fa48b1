"""Planes to weights in plain Triton: for the embedding, and for GPUs other than Hopper. Triton's
interpreter runs it on a CPU.

Half a block, 128 columns, is decoded at once, in *units* of eight weights: of a row 16 units, which
are [lane, half of the steps, word]. Words of planes are loaded once a unit and stay in registers.
FORMAT is a planes.PlaneFormat.
"""

# ruff: noqa: N803, N806, RET505

from typing import Any, NamedTuple

import triton
import triton.language as tl

_ONE = tl.constexpr(2.0**-24)  # an integer 1 in a float16's lowest bit
_E4M3_ONE = tl.constexpr(
    2.0**32
)  # 1 as E4M3, its bits in a float16's upper ones, times this: 1/_ONE
# IQ4_VALUES plus 128, a byte each.
_LOW_VALUES = tl.constexpr(0x766A5D4F3F2D1801)
_HIGH_VALUES = tl.constexpr(0xF1D9C5B5A6998D81 - (1 << 64))
# plane_sources.THIRD_BITS: of a unit's pairs 0-3, and four pairs further on.
_THIRD_BITS = tl.constexpr((15, 9, 11, 8))
_LATER_THIRD_BITS = tl.constexpr((10, 12, 14, 13))


class PlanePointers(NamedTuple):
    """A matrix's planes; one that its format lacks repeats `codes`."""

    codes: Any
    high: Any
    scales: Any
    deltas: Any
    grid: Any


class Factors(NamedTuple):
    """Powers of two that undo how planes are scaled (see planes.py)."""

    scales: Any  # 2**(24 - exponent - code_shift), times each scale
    minimums: Any  # 2**-exponent, times each minimum
    sums: Any  # 2**exponent, times each sum


class Units(NamedTuple):
    """Where units of some rows are: [rows, 16] each, or what broadcasts to it."""

    index: Any  # of the row's words of a block
    half_index: Any  # the same where halves of blocks lie apart
    delta: Any  # the same in planes whose rows are padded
    half: Any  # of the block
    lane: Any
    steps: Any  # half of the steps
    word: Any


class UnitWords(NamedTuple):
    """What a unit's weights are decoded from."""

    first: Any  # of weights 0-3, or of all
    second: Any  # of weights 4-7
    more: Any  # upper bits or signs


@triton.jit
def _rounded(x, ROUNDED: tl.constexpr):
    """To the nearest float16, as the tensor cores' operand has it; where not ROUNDED, as it is."""
    if ROUNDED:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _from_half_bits(bits):
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


# ---- words


@triton.jit
def _with_even_signs(words):
    """Signs with those that follow from the others (plane_sources.EVEN_SIGNS)."""
    kept = words & 0x55FFFFFF
    folded = kept ^ (kept >> 16)
    folded = folded ^ (folded >> 8)
    folded = folded ^ (folded >> 1)
    return kept | ((folded & 0x55) << 25)


@triton.jit
def _signed_point_words(planes: PlanePointers, at: Units, FORMAT: tl.constexpr):
    """IQ2 and IQ3: words of points, and the signs of 32 weights."""
    GRID: tl.constexpr = FORMAT.grid
    place = at.index * 16 + at.lane * 4 + at.half * 2
    point = at.steps * 2 + at.word  # eight weights of 32
    if FORMAT.high_words == 0:  # IQ2: a point is a unit
        signs = tl.load(planes.codes + place + 1)
        number = (tl.load(planes.codes + place) >> (8 * point)) & 255
        if GRID == "IQ2_XS":
            number |= ((signs >> (25 + 2 * point)) & 1) << 8
        elif GRID == "IQ2_S":
            upper = tl.load(planes.scales + at.index * 4 + at.half) >> (8 * at.lane)
            number |= ((upper >> (2 * point)) & 3) << 8
        first = tl.load(planes.grid + number * 2)
        second = tl.load(planes.grid + number * 2 + 1)
    else:
        signs = tl.load(planes.high + at.index * 8 + at.lane * 2 + at.half)
        numbers = tl.load(planes.codes + place + at.steps) >> (16 * at.word)
        low = numbers & 255
        high = (numbers >> 8) & 255
        if GRID == "IQ3_S":
            upper = tl.load(planes.scales + at.index * 4 + 2 + at.half) >> (8 * at.lane)
            upper = upper >> (2 * point)
            low |= (upper & 1) << 8
            high |= ((upper >> 1) & 1) << 8
        first = tl.load(planes.grid + low)
        second = tl.load(planes.grid + high)
    if FORMAT.has_even_signs:
        signs = _with_even_signs(signs)
    return UnitWords(first, second, signs)


@triton.jit
def _upper_bits(planes: PlanePointers, at: Units):
    """IQ1: the upper bits of a group's four numbers, 16 bits."""
    return tl.load(planes.high + at.index * 4 + at.lane) >> (16 * at.half)


@triton.jit
def _unit_words(planes: PlanePointers, at: Units, FORMAT: tl.constexpr):
    if FORMAT.has_signed_points:
        return _signed_point_words(planes, at, FORMAT)
    elif FORMAT.has_ternary_points:
        point = at.steps * 2 + at.word
        number = tl.load(planes.codes + at.index * 8 + at.lane * 2 + at.half) >> (8 * point)
        UPPER: tl.constexpr = 4 if FORMAT.has_records else 3  # bits a point
        upper = (_upper_bits(planes, at) >> (UPPER * point)) & 7
        word = tl.load(planes.grid + ((number & 255) | (upper << 8)))
        return UnitWords(word, word, word)
    elif FORMAT.code_bits == 8:
        place = at.index * 64 + at.lane * 16 + at.half * 8 + at.steps * 4 + at.word * 2
        first = tl.load(planes.codes + place)
        return UnitWords(first, tl.load(planes.codes + place + 1), first)
    elif FORMAT.has_signs:
        word = tl.load(planes.codes + at.index * 8 + at.lane * 2 + at.half)
        return UnitWords(word, word, word)
    else:
        if FORMAT.by_halves:
            place = at.half_index * 16 + at.lane * 4 + at.steps * 2 + at.word
        elif FORMAT.code_bits == 4:
            place = at.index * 32 + at.lane * 8 + at.half * 4 + at.steps * 2 + at.word
        else:
            place = at.index * 16 + at.lane * 4 + at.half * 2 + at.steps
        codes = tl.load(planes.codes + place)
        more = codes
        if FORMAT.high_bits == 2:
            more = tl.load(planes.high + at.index * 16 + at.lane * 4 + at.half * 2 + at.steps)
        elif FORMAT.high_bits == 1:
            more = tl.load(planes.high + at.index * 8 + at.lane * 2 + at.half)
        return UnitWords(codes, codes, more)


# ---- scales


@triton.jit
def _records(planes: PlanePointers, at: Units):
    """A row's float16, and a lane's 12 bits."""
    first = tl.load(planes.scales + at.delta * 2)
    second = tl.load(planes.scales + at.delta * 2 + 1)
    both = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    record = (both >> (16 + 12 * at.lane)).to(tl.int32)
    return _from_half_bits(first), record


@triton.jit
def _grid_scale(planes: PlanePointers, at: Units, FORMAT: tl.constexpr):
    """The block's scale, and the small odd number that it is multiplied by; of IQ1 also whether its
    weights are shifted down."""
    GRID: tl.constexpr = FORMAT.grid
    is_down = 0
    if FORMAT.has_records:  # IQ1_M
        delta, record = _records(planes, at)
        code = (record >> (6 * at.half + 3 * at.steps)) & 7
        is_down = (_upper_bits(planes, at) >> (8 * at.steps + 4 * at.word + 3)) & 1
    elif GRID == "IQ3_S":
        delta = _from_half_bits(tl.load(planes.scales + at.index * 4))
        code = (tl.load(planes.scales + at.index * 4 + 1) >> (8 * at.lane + 4 * at.half)) & 15
    else:
        delta = tl.load(planes.deltas + at.delta).to(tl.float32)
        if GRID == "IQ1":
            upper = _upper_bits(planes, at)
            code = (upper >> 12) & 7
            is_down = (upper >> 15) & 1
        elif GRID == "IQ2_XS":
            byte = tl.load(planes.scales + at.delta * 2 + at.half) >> (8 * at.lane)
            code = (byte >> (4 * at.steps)) & 15
        elif GRID == "IQ2_S":
            byte = tl.load(planes.scales + at.index * 4 + 2 + at.half) >> (8 * at.lane)
            code = (byte >> (4 * at.steps)) & 15
        else:
            if FORMAT.high_words == 0:
                word = tl.load(planes.codes + at.index * 16 + at.lane * 4 + at.half * 2 + 1)
            else:
                word = tl.load(planes.high + at.index * 8 + at.lane * 2 + at.half)
            code = (word >> 25) & 0x55
            code = (code | (code >> 1)) & 0x33
            code = (code | (code >> 2)) & 15
    return delta, (2 * code + 1).to(tl.float32), is_down


@triton.jit
def _scale_and_offset(
    planes: PlanePointers,
    factors: Factors,
    at: Units,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Of each unit: the scale times 2**(24 - code_shift), the offset as it is added."""
    if FORMAT.has_packed_scales:
        word = planes.scales + at.index * 4
        pair = tl.load(word)
        record = (tl.load(word + 1) >> (at.lane * 8)) & 255
        record |= ((tl.load(word + 2) >> (at.lane * 8)) & 255) << 8
        record |= ((tl.load(word + 3) >> (at.lane * 8)) & 255) << 16
        record = record >> (at.half * 12)
        block_scale = _from_half_bits(pair) * factors.scales
        scale = _rounded(block_scale * (record & 63).to(tl.float32), ROUNDED)
        block_minimum = _from_half_bits(pair >> 16) * factors.minimums
        offset = -_rounded(block_minimum * ((record >> 6) & 63).to(tl.float32), ROUNDED)
    elif FORMAT.has_nibble_scales:
        byte = tl.load(planes.scales + at.index * 4 + at.lane) >> (8 * (at.half * 2 + at.steps))
        pair = tl.load(planes.deltas + at.delta)
        block_scale = _from_half_bits(pair) * factors.scales
        scale = _rounded(block_scale * (byte & 15).to(tl.float32), ROUNDED)
        block_minimum = _from_half_bits(pair >> 16) * factors.minimums
        offset = -_rounded(block_minimum * ((byte >> 4) & 15).to(tl.float32), ROUNDED)
    elif FORMAT.has_stored_minimums:
        word = tl.load(planes.scales + at.index * 8 + at.lane * 2 + at.half)
        scale = _from_half_bits(word)
        offset = _from_half_bits(word >> 16)
    elif FORMAT.has_powers:
        field = (tl.load(planes.scales + at.delta * 2 + at.half) >> (at.lane * 8)) & 255
        scale = _from_half_bits(field << 10)
        offset = scale * 0.0
    elif FORMAT.has_e4m3_scales:
        byte = tl.load(planes.scales + at.index * 4 + at.lane) >> (8 * (at.half * 2 + at.steps))
        scale = _from_half_bits((byte & 0x7F) << 7) * 2.0**15
        if FORMAT.has_deltas:
            pair = tl.load(planes.deltas + at.delta)
            scale = _rounded(scale * _from_half_bits(pair >> (16 * at.half)), ROUNDED)
        offset = scale * 0.0
    elif FORMAT.has_signs:
        pair = tl.load(planes.deltas + at.delta)
        scale = _rounded(_from_half_bits(pair >> (16 * at.half)) * factors.scales, ROUNDED)
        offset = scale * 0.0
    elif FORMAT.has_sums:
        word = tl.load(planes.scales + at.delta * 2 + at.half)
        scale = _from_half_bits(word) + _from_half_bits(word >> 16)
        offset = scale * 0.0
    elif FORMAT.grid != "":
        delta, odd, is_down = _grid_scale(planes, at, FORMAT)
        scale = _rounded(delta * factors.scales * odd, ROUNDED)
        if FORMAT.has_ternary_points:  # minus one, and an eighth down or up, of codes times four
            offset = _rounded(scale * (_ONE * tl.where(is_down == 1, -4.5, -3.5)), ROUNDED)
        else:
            offset = scale * 0.0
    else:
        if FORMAT.has_byte_scales:
            word = tl.load(planes.scales + at.index * 4 + at.lane)
            group = ((word >> (8 * (at.half * 2 + at.steps))) << 24) >> 24
            block_scale = tl.load(planes.deltas + at.delta).to(tl.float32) * factors.scales
            scale = _rounded(block_scale * group.to(tl.float32), ROUNDED)
        elif FORMAT.has_block_scales:
            scale = tl.load(planes.deltas + at.delta).to(tl.float32) * factors.scales
            scale = _rounded(scale, ROUNDED)
        elif FORMAT.has_records:  # IQ4_XS
            delta, record = _records(planes, at)
            group = ((record >> (6 * at.half)) & 63) - 32
            scale = _rounded(delta * factors.scales * group.to(tl.float32), ROUNDED)
        else:
            word = tl.load(planes.scales + at.index * 4 + at.lane)
            scale = _from_half_bits(word >> (16 * at.half))
        offset = scale * (-(FORMAT.zero_point << FORMAT.code_shift) * _ONE)
    return scale, offset


# ---- codes


@triton.jit
def two_bits_shift(pair):
    """The bit at which planes keep the upper two bits of a quarter's pair 0-7: even pairs at 4,
    6, 12, 14, odd ones at 8, 10, 0, 2."""
    return (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16


@triton.jit
def one_bit_shift(pair, steps):
    """The same for one upper bit: even pairs from bit 4 on, odd ones from bit 8 on, the second half
    of the steps eight bits further on."""
    return (4 + 4 * (pair % 2) + pair // 2 + 8 * steps) % 16


@triton.jit
def _small_float(bits, place):
    """E2M1's value times 2**10, of the pair at this place (plane_sources.FLOAT_SHIFTS)."""
    upper = place // 2 % 2  # places 2 and 3
    lower = place % 2
    code = (bits >> (9 + 3 * upper - 8 * lower)) & 7
    sign = (bits >> (15 - 7 * upper - 8 * lower)) & 1
    doubled = tl.where(code < 2, code, (2 + code % 2) << (tl.maximum(code // 2, 1) - 1))
    return tl.where(sign == 1, -doubled, doubled).to(tl.float32) * 512.0


@triton.jit
def _code(words: UnitWords, at: Units, FORMAT: tl.constexpr, WEIGHT: tl.constexpr):
    """A unit's weight 0-7, as a float32 of its code."""
    PAIR: tl.constexpr = WEIGHT // 2
    ONE: tl.constexpr = WEIGHT % 2
    SWAPPED: tl.constexpr = WEIGHT % 4 % 2 * 2 + WEIGHT % 4 // 2  # plane_sources.GRID_BYTES
    word = words.first if WEIGHT < 4 else words.second
    if FORMAT.has_signed_points:
        size = (word >> (8 * SWAPPED)) & 63
        place = at.steps * 4 + at.word * 2 + WEIGHT // 4
        sign = (words.more >> (8 * (SWAPPED ^ 1) + place)) & 1
        return tl.where(sign == 1, -size, size).to(tl.float32)
    elif FORMAT.has_small_floats:
        return _small_float(word >> (16 * ONE), PAIR)
    elif FORMAT.has_signs:
        bit = (word >> (PAIR + 4 * at.word + 8 * at.steps + 16 * ONE)) & 1
        return (2 * bit - 1).to(tl.float32)
    elif FORMAT.has_sums:
        bits = word >> (8 * (WEIGHT % 4))
        return _from_half_bits((bits & 0x80) << 8 | (bits & 0x7F) << 7) * _E4M3_ONE
    elif FORMAT.code_bits == 8:
        return ((word >> (8 * (WEIGHT % 4))) & 255).to(tl.float32)
    elif FORMAT.has_values:
        code = (word >> (4 * SWAPPED + 16 * (WEIGHT // 4))) & 15
        table = tl.where(code < 8, _LOW_VALUES, _HIGH_VALUES)
        return ((table >> (code % 8 * 8).to(tl.int64)) & 255).to(tl.float32)
    elif FORMAT.code_bits == 2:
        code = (word >> (8 * at.word + 2 * PAIR + 16 * ONE)) & 3
        if FORMAT.high_bits == 1:
            shift = tl.where(at.word == 1, _LATER_THIRD_BITS[PAIR], _THIRD_BITS[PAIR])
            shift = (shift + 8 * at.steps) % 16
            code |= ((words.more >> (shift + 16 * ONE)) & 1) << 2
        return code.to(tl.float32)
    else:
        code = (word >> (4 * PAIR + 16 * ONE)) & 15
        if FORMAT.high_bits == 2:
            shift = two_bits_shift(at.word * 4 + PAIR)
            code |= ((words.more >> (shift + 16 * ONE)) & 3) << 4
        elif FORMAT.high_bits == 1:
            shift = one_bit_shift(at.word * 4 + PAIR, at.steps)
            code |= ((words.more >> (shift + 16 * ONE)) & 1) << 4
        return code.to(tl.float32)


@triton.jit
def _decoded(
    words: UnitWords,
    at: Units,
    scale,
    offset,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    # Ternary points' codes are times four as they are.
    SHIFT: tl.constexpr = 0 if FORMAT.grid != "" else FORMAT.code_shift
    code = _code(words, at, FORMAT, WEIGHT)
    weight = code * (_ONE * 2**SHIFT) * scale + offset
    return weight.to(tl.float16) if ROUNDED else weight


@triton.jit
def dequantized_half(
    planes: PlanePointers,
    factors: Factors,
    rows,
    part,
    num_rows,
    num_blocks,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr = True,
):
    """Weights [rows, 128] of half a block of columns, divided by 2**exponent, in operand order.
    ROUNDED: float16, as a GEMM takes them; otherwise float32. `rows` must be in the matrix; the
    part is twice the block, plus one for its second half."""
    ROWS: tl.constexpr = rows.shape[0]
    if FORMAT.is_float:
        column = part * 128 + tl.arange(0, 128)[None, :]
        index = rows[:, None].to(tl.int64) * (num_blocks * 256) + column
        weights = tl.load(planes.codes + index)
        if not ROUNDED:
            weights = weights.to(tl.float32)
        return weights
    else:
        unit = tl.arange(0, 16)[None, :]
        block = part // 2
        index = (block * num_rows + rows[:, None]).to(tl.int64)
        half_index = (part * num_rows + rows[:, None]).to(tl.int64)
        delta = (block * ((num_rows + 7) // 8 * 8) + rows[:, None]).to(tl.int64)
        at = Units(index, half_index, delta, part % 2, unit // 4, unit // 2 % 2, unit % 2)
        words = _unit_words(planes, at, FORMAT)
        scale, offset = _scale_and_offset(planes, factors, at, FORMAT, ROUNDED)
        w0 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 0)
        w1 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 1)
        w2 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 2)
        w3 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 3)
        w4 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 4)
        w5 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 5)
        w6 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 6)
        w7 = _decoded(words, at, scale, offset, FORMAT, ROUNDED, 7)
        # [rows, unit, one, pair % 2, pair // 2]
        even = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        both = tl.join(even, tl.join(tl.join(w4, w5), tl.join(w6, w7)))
        # [rows, lane, steps, word, one, pair % 2, pair // 2]
        both = tl.reshape(both, [ROWS, 4, 2, 2, 2, 2, 2])
        weights = tl.reshape(tl.permute(both, (0, 2, 3, 6, 5, 1, 4)), [ROWS, 128])
        # Added so that Triton 3.6 does not move the permutation into shared memory: for compute
        # capability 10.0 it then finds no layout.
        return weights + 0.0
