"""Planes to the tensor cores' operand, in registers: which lane loads which words, and how it
decodes them. In Gluon, for Hopper; tests/executors/cuda/emulation.py does the same in torch.

A block of 256 columns is decoded in quarters of 64. ROWS is a tile's rows, WARPS the warps that
hold them, FORMAT a planes.PlaneFormat.
"""

# ruff: noqa: N803, N806, RET505

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class WeightRing(NamedTuple):
    """Stages of weights in shared memory: 256 columns each, or TILING.columns of float weights."""

    codes: Any  # [stages, rows, words]; float weights: float16 [stages, rows, columns]
    high: Any
    scales: Any
    deltas: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def _nibbles_asm(high_bits: int, odd_quarter: bool) -> str:
    """Two words of eight 4-bit codes (and their upper bits) to sixteen float16 in eight registers.

    A code n in the low bits of a half register is the float16 n * 2**-24; the scale carries the
    2**24, so a pair takes one fused multiply-add. Odd pairs are decoded where they lie, four bits
    further up, with a sixteenth of the scale. Operands: $0-$7 results, $8-$9 words, then $10-$11
    upper bits if there are any, then scale and offset, each twice.
    """
    scale, offset = ("$10", "$12") if high_bits == 0 else ("$12", "$14")
    lines = ["{", ".reg .b32 t, u, w, h, s;", "mov.b32 t, 0x2C002C00;"]
    lines.append(f"mul.rn.f16x2 s, {scale}, t;")
    if high_bits:
        is_swapped = high_bits == 1 and odd_quarter
        lines.append("prmt.b32 h, $10, 0, 0x2301;" if is_swapped else "mov.b32 h, $10;")
    for word in range(2):
        if high_bits == 2 and word == 1:
            lines.append("prmt.b32 h, $10, 0, 0x2301;")
        for index in range(4):
            pair = word * 4 + index
            if index == 0:
                lines.append(f"mov.b32 w, ${8 + word};")
            elif index == 2:
                lines.append("shr.u32 w, w, 8;")
            odd = index % 2
            lines.append(f"and.b32 t, w, {'0x00F000F0' if odd else '0x000F000F'};")
            if high_bits and not odd:
                shift = index if high_bits == 2 else pair // 2
                lines.append(f"shr.u32 u, h, {shift};" if shift else "mov.b32 u, h;")
            if high_bits:
                mask = {(2, 0): 0x30, (2, 1): 0x300, (1, 0): 0x10, (1, 1): 0x100}[high_bits, odd]
                lines.append(f"lop3.b32 t, u, 0x{mask << 16 | mask:08X}, t, 0xEA;")
            lines.append(f"fma.rn.f16x2 ${pair}, t, {'s' if odd else scale}, {offset};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _bytes_asm() -> str:
    """Four words of four 8-bit codes to sixteen float16; $8-$9 the even words, $10-$11 the odd."""
    lines = ["{", ".reg .b32 t;"]
    for word in range(2):
        for index in range(4):
            source = f"${(8 if index < 2 else 10) + word}"
            selector = "0x4140" if index % 2 == 0 else "0x4342"
            lines.append(f"prmt.b32 t, {source}, 0, {selector};")
            lines.append(f"fma.rn.f16x2 ${word * 4 + index}, t, $12, $14;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _floats_asm() -> str:
    """Two words of eight floats of 4 bits (MXFP4) to sixteen float16: masks and shifts make each a
    float16 that is 2**-14 of it (see planes.FLOAT_SHIFTS). $8-$9 the words, $10 the scale twice."""
    lines = ["{", ".reg .b32 t, u, v;"]
    for word in range(2):
        source = f"${8 + word}"
        lines.append(f"and.b32 t, {source}, 0x8E008E00;")
        lines.append(f"mul.rn.f16x2 ${word * 4}, t, $10;")
        lines.append(f"shl.b32 u, {source}, 8;")
        lines.append("and.b32 t, u, 0x8E008E00;")
        lines.append(f"mul.rn.f16x2 ${word * 4 + 1}, t, $10;")
        for index, move, sign in ((2, "shl.b32 u, {}, 5;", 7), (3, "shr.u32 u, {}, 3;", 15)):
            lines.append(move.format(source))
            lines.append(f"shl.b32 v, {source}, {sign};")
            lines.append("and.b32 t, u, 0x0E000E00;")
            lines.append("lop3.b32 t, v, 0x80008000, t, 0xEA;")
            lines.append(f"mul.rn.f16x2 ${word * 4 + index}, t, $10;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _decode_asm(FORMAT, QUARTER):
    if FORMAT.has_powers:
        return _floats_asm()
    if FORMAT.code_bits == 8:
        return _bytes_asm()
    return _nibbles_asm(FORMAT.high_bits, QUARTER % 2 == 1)


@gluon.constexpr_function
def _decode_constraints(FORMAT):
    has_more = FORMAT.code_bits == 8 or FORMAT.high_bits > 0
    inputs = 4 if FORMAT.has_powers else 8 if has_more else 6
    return ",".join(["=r"] * 8 + ["r"] * inputs)


@gluon.constexpr_function
def _zero_point_asm(FORMAT):
    """A scale times minus the zero point times 2**-24, a subnormal float16."""
    factor = f"0x{0x80008000 | FORMAT.zero_point << 16 | FORMAT.zero_point:08X}"
    return (
        "{ .reg .b32 f, z; "
        f"mov.b32 f, {factor}; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $1, f, z; }}"
    )


# A lane's 24 bits out of three words of four lanes' bytes, and the float16 pair, to scale and
# negated offset of both halves of the block, each twice. $10: 2**(24 - e), $11: 2**-e.
_ASM_PACKED_SCALES = gl.constexpr("""
{
.reg .b32 v, x0, x1, x2, x3;
.reg .b16 h0, h1;
.reg .f32 d, e, f0, f1, f2, f3;
prmt.b32 v, $5, $6, $8;
prmt.b32 v, v, $7, $9;
mov.b32 {h0, h1}, $4;
cvt.f32.f16 d, h0;
cvt.f32.f16 e, h1;
mul.f32 d, d, $10;
mul.f32 e, e, $11;
neg.f32 e, e;
and.b32 x0, v, 63;
bfe.u32 x1, v, 6, 6;
bfe.u32 x2, v, 12, 6;
bfe.u32 x3, v, 18, 6;
cvt.rn.f32.u32 f0, x0;
cvt.rn.f32.u32 f1, x1;
cvt.rn.f32.u32 f2, x2;
cvt.rn.f32.u32 f3, x3;
mul.f32 f0, f0, d;
mul.f32 f1, f1, e;
mul.f32 f2, f2, d;
mul.f32 f3, f3, e;
cvt.rn.f16x2.f32 $0, f0, f0;
cvt.rn.f16x2.f32 $1, f1, f1;
cvt.rn.f16x2.f32 $2, f2, f2;
cvt.rn.f16x2.f32 $3, f3, f3;
}
""")

# Four signed bytes and a float16 to four scales, each twice. $6: 2**(24 - e).
_ASM_BYTE_SCALES = gl.constexpr("""
{
.reg .b16 h;
.reg .b32 x0, x1, x2, x3, w;
.reg .f32 d, f0, f1, f2, f3;
cvt.u16.u32 h, $5;
cvt.f32.f16 d, h;
mul.f32 d, d, $6;
bfe.s32 x0, $4, 0, 8;
bfe.s32 x1, $4, 8, 8;
bfe.s32 x2, $4, 16, 8;
bfe.s32 x3, $4, 24, 8;
cvt.rn.f32.s32 f0, x0;
cvt.rn.f32.s32 f1, x1;
cvt.rn.f32.s32 f2, x2;
cvt.rn.f32.s32 f3, x3;
mul.f32 f0, f0, d;
mul.f32 f1, f1, d;
mul.f32 f2, f2, d;
mul.f32 f3, f3, d;
cvt.rn.f16x2.f32 $0, f0, f0;
cvt.rn.f16x2.f32 $1, f1, f1;
cvt.rn.f16x2.f32 $2, f2, f2;
cvt.rn.f16x2.f32 $3, f3, f3;
}
""")
# Of two words the byte at bit $4, as the exponent of a float16, twice.
_ASM_POWERS = gl.constexpr("""
{
.reg .b32 t, u;
bfe.u32 t, $2, $4, 8;
bfe.u32 u, $3, $4, 8;
mul.lo.u32 $0, t, 0x04000400;
mul.lo.u32 $1, u, 0x04000400;
}
""")
# Two float16 in a word, each twice.
_ASM_TWICE = gl.constexpr("prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;")


@gluon.constexpr_function
def lane_layout(ROWS, WARPS, kind):
    """Which thread holds what, so that the GEMM's operand needs no exchange between threads.

    A warp holds 16 rows at a time: its lanes differ by row (three bits) and by lane of the format
    (two bits).
    """
    words = {
        "nibbles": ([[1], [2], [4]], [[8], [16]], [32]),  # [lane, quarter, 2]
        "bytes": ([[1], [2], [4], [8]], [[16], [32]], [64]),  # [lane, quarter, 4]
        "quarter": ([[0, 1]], [[1, 0], [2, 0]], [4, 2]),  # [lane, 2]
        "halves": ([[1]], [[2], [4]], [8]),  # [lane, half]
        "quarters": ([[1], [2]], [[4], [8]], [16]),  # [lane, quarter]
        "lanes": ([], [[1], [2]], [4]),  # [lane]
        "replicated": ([[1], [2]], [[0], [0]], [4]),  # every lane holds the four words
    }
    registers, lanes, shape = words[kind]
    zeros = [0] * len(shape)
    registers = [[0, *index] for index in registers] + [[8, *zeros]]
    row = 16 * WARPS
    while row < ROWS:
        registers.append([row, *zeros])
        row *= 2
    lanes = [[0, *index] for index in lanes] + [[1, *zeros], [2, *zeros], [4, *zeros]]
    warps = []
    row = 16
    while row < 16 * WARPS:
        warps.append([row, *zeros])
        row *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, *shape])


@gluon.constexpr_function
def _power_layout(ROWS, WARPS):
    """Two words a row, one row after the other: every lane of a row holds both."""
    registers, row = [[1], [16]], 16 * WARPS
    while row < ROWS:
        registers.append([2 * row])
        row *= 2
    warps = []
    row = 16
    while row < 16 * WARPS:
        warps.append([2 * row])
        row *= 2
    lanes = [[0], [0], [2], [4], [8]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [2 * ROWS])


# ---- load: words and scales of a block


@gluon.jit
def _in_layout(tensors, LAYOUT: gl.constexpr):
    """Four tensors in a layout that leaves every element where it is."""
    t0, t1, t2, t3 = tensors
    t0 = gl.convert_layout(t0, LAYOUT, assert_trivial=True)
    t1 = gl.convert_layout(t1, LAYOUT, assert_trivial=True)
    t2 = gl.convert_layout(t2, LAYOUT, assert_trivial=True)
    t3 = gl.convert_layout(t3, LAYOUT, assert_trivial=True)
    return t0, t1, t2, t3


@gluon.jit
def _split_quarters(words, WORDS: gl.constexpr):
    """[ROWS, lane, half, half of the steps, 2] to the four quarters [ROWS, lane, 2]."""
    first, second = gl.split(words.permute((0, 1, 2, 4, 3)))
    q0, q2 = gl.split(first.permute((0, 1, 3, 2)))
    q1, q3 = gl.split(second.permute((0, 1, 3, 2)))
    return _in_layout((q0, q1, q2, q3), WORDS)


@gluon.jit
def _code_words(
    codes,
    high,
    WORDS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Of the four quarters the words, and what goes with each: odd words or upper bits."""
    LANE: gl.constexpr = gl.SliceLayout(2, WORDS)
    if FORMAT.code_bits == 8:
        both = codes.load(lane_layout(ROWS, WARPS, "bytes")).reshape([ROWS, 4, 2, 2, 2, 2])
        even, odd = gl.split(both)
        return _split_quarters(even, WORDS), _split_quarters(odd, WORDS)
    else:
        loaded = codes.load(lane_layout(ROWS, WARPS, "nibbles")).reshape([ROWS, 4, 2, 2, 2])
        words = _split_quarters(loaded, WORDS)
        if FORMAT.high_bits == 2:
            upper = high.load(lane_layout(ROWS, WARPS, "quarters")).reshape([ROWS, 4, 2, 2])
            first, second = gl.split(upper)
            h0, h2 = gl.split(first)
            h1, h3 = gl.split(second)
            return words, _in_layout((h0, h1, h2, h3), LANE)
        elif FORMAT.high_bits == 1:
            first, second = gl.split(
                high.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
            )
            first = gl.convert_layout(first, LANE, assert_trivial=True)
            second = gl.convert_layout(second, LANE, assert_trivial=True)
            return words, (first, first, second, second)
        else:
            return words, words


@gluon.jit
def _zero_point_offset(scale, FORMAT: gl.constexpr):
    """The offset of formats that have a zero point: minus it, times the scale."""
    return gl.inline_asm_elementwise(
        _zero_point_asm(FORMAT), "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _duplicated(words):
    return gl.inline_asm_elementwise(
        _ASM_TWICE, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _packed_scales(scales, factors, LANE: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of Q4_K and Q5_K: scale and offset of both halves of the block."""
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE))
    select0 = (lane | ((lane + 4) << 4)).expand_dims(0)
    select1 = (0x7010 & 0xF0FF | ((lane + 4) << 8)).expand_dims(0)
    words = scales.load(lane_layout(ROWS, WARPS, "replicated")).reshape([ROWS, 2, 2])
    even, odd = gl.split(words)
    t0, t2 = gl.split(even)
    t1, t3 = gl.split(odd)
    t0, t1, t2, t3 = _in_layout((t0, t1, t2, t3), ROW)
    return gl.inline_asm_elementwise(
        _ASM_PACKED_SCALES,
        "=r,=r,=r,=r,r,r,r,r,r,r,f,f",
        [
            t0.expand_dims(1),
            t1.expand_dims(1),
            t2.expand_dims(1),
            t3.expand_dims(1),
            select0,
            select1,
            factors.scales,
            factors.minimums,
        ],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _powers(scales, LANE: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of MXFP4: the scales of both halves of the block."""
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE)) * 8
    words = scales.load(_power_layout(ROWS, WARPS)).reshape([ROWS, 2])
    first, second = gl.split(words)
    first = gl.convert_layout(first, ROW, assert_trivial=True)
    second = gl.convert_layout(second, ROW, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _ASM_POWERS,
        "=r,=r,r,r,r",
        [first.expand_dims(1), second.expand_dims(1), shift.expand_dims(0)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scales_and_offsets(
    scales,
    deltas,
    factors,
    WORDS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Scales of the four quarters, and their offsets, [ROWS, lane] each: float16 twice a word."""
    LANE: gl.constexpr = gl.SliceLayout(2, WORDS)
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    if FORMAT.has_packed_scales:
        s0, m0, s1, m1 = _packed_scales(scales, factors, LANE, ROWS, WARPS)
        return (s0, s0, s1, s1), (m0, m0, m1, m1)
    elif FORMAT.has_powers:
        s0, s1 = _powers(scales, LANE, ROWS, WARPS)
        return (s0, s0, s1, s1), (s0, s0, s1, s1)  # there are no offsets
    elif FORMAT.has_stored_minimums:
        first, second = gl.split(
            scales.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
        )
        s0, m0 = _duplicated(gl.convert_layout(first, LANE, assert_trivial=True))
        s1, m1 = _duplicated(gl.convert_layout(second, LANE, assert_trivial=True))
        return (s0, s0, s1, s1), (m0, m0, m1, m1)
    else:
        words = scales.load(lane_layout(ROWS, WARPS, "lanes"))
        words = gl.convert_layout(words, LANE, assert_trivial=True)
        if FORMAT.has_deltas:
            delta = deltas.load(ROW).expand_dims(1).to(gl.int16, bitcast=True).to(gl.int32)
            s0, s1, s2, s3 = gl.inline_asm_elementwise(
                _ASM_BYTE_SCALES,
                "=r,=r,=r,=r,r,r,f",
                [words, delta, factors.scales],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
            m0 = _zero_point_offset(s0, FORMAT)
            m1 = _zero_point_offset(s1, FORMAT)
            m2 = _zero_point_offset(s2, FORMAT)
            m3 = _zero_point_offset(s3, FORMAT)
            return (s0, s1, s2, s3), (m0, m1, m2, m3)
        else:
            s0, s1 = _duplicated(words)
            m0 = _zero_point_offset(s0, FORMAT)
            m1 = _zero_point_offset(s1, FORMAT)
            return (s0, s0, s1, s1), (m0, m0, m1, m1)


@gluon.jit
def load_block(
    ring: WeightRing,
    stage,
    factors,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A block of ROWS rows from shared memory, for `dequantized_quarter`: words, odd words or upper
    bits, scales, offsets, each a tuple of four quarters. `factors` are gemm.Factors."""
    WORDS: gl.constexpr = lane_layout(ROWS, WARPS, "quarter")
    words, more = _code_words(
        ring.codes.index(stage), ring.high.index(stage), WORDS, FORMAT, ROWS, WARPS
    )
    scales, offsets = _scales_and_offsets(
        ring.scales.index(stage), ring.deltas.index(stage), factors, WORDS, FORMAT, ROWS, WARPS
    )
    return words, more, scales, offsets


# ---- decode: a quarter to the operand


@gluon.jit
def _in_operand(pairs, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """Eight tensors [ROWS, lane, pair] side by side: [ROWS, 64] as wgmma takes it."""
    p0, p1, p2, p3, p4, p5, p6, p7 = pairs
    x = gl.join(
        gl.join(gl.join(p0, p1), gl.join(p2, p3)), gl.join(gl.join(p4, p5), gl.join(p6, p7))
    )
    x = x.permute((0, 5, 4, 3, 1, 2)).reshape([ROWS, 64])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def dequantized_quarter(
    block,
    QUARTER: gl.constexpr,
    FORMAT: gl.constexpr,
    OPERAND: gl.constexpr,
    ROWS: gl.constexpr,
):
    """One quarter of what `load_block` loaded, float16 [ROWS, 64]."""
    words = block[0][QUARTER]
    more = block[1][QUARTER]
    scales = gl.expand_dims(block[2][QUARTER], 2).broadcast_to([ROWS, 4, 2])
    offsets = gl.expand_dims(block[3][QUARTER], 2).broadcast_to([ROWS, 4, 2])
    if FORMAT.has_powers:
        inputs = [words, scales]
    elif FORMAT.code_bits == 8:
        inputs = [words, more, scales, offsets]
    elif FORMAT.high_bits > 0:
        inputs = [words, gl.expand_dims(more, 2).broadcast_to([ROWS, 4, 2]), scales, offsets]
    else:
        inputs = [words, scales, offsets]
    pairs = gl.inline_asm_elementwise(
        _decode_asm(FORMAT, QUARTER),
        _decode_constraints(FORMAT),
        inputs,
        dtype=(
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
        ),
        is_pure=True,
        pack=2,
    )
    return _in_operand(pairs, OPERAND, ROWS)
