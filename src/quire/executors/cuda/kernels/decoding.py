"""Planes to the tensor cores' operand, in registers: which lane loads which words, what it makes of
them. Only Hopper's Gluon runs it; tests/executors/cuda/emulation.py does the same in torch."""

# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM109, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.executors.cuda.kernels.plain import FORMAT_CODES

_Q4_1, _Q4_K, _Q5_K, _Q6_K, _Q8_0 = (
    gl.constexpr(FORMAT_CODES[name]) for name in ("Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
)


def _decode_asm(high_bits, step_half=0):
    """Two words of eight 4-bit quants (and their upper bits) to sixteen float16 in eight registers.

    A quant in the low bits of a half register is a float16 times 2**-24; the scale makes up for
    it: one fused multiply-add a pair. Odd pairs are decoded where they lie, four bits further up,
    with a sixteenth of the scale. Operands: $0-$7 results, $8-$9 words, then $10-$11 upper bits
    if there are any, then scale and offset, each twice.
    """
    scale, offset = ("$10", "$12") if high_bits == 0 else ("$12", "$14")
    lines = ["{", ".reg .b32 t, u, w, h, s;", "mov.b32 t, 0x2C002C00;"]
    lines.append(f"mul.rn.f16x2 s, {scale}, t;")
    if high_bits:
        swapped = (high_bits == 1 and step_half) and "prmt.b32 h, $10, 0, 0x2301;"
        lines.append(swapped or "mov.b32 h, $10;")
    for word in range(2):
        if high_bits == 2 and word == 1:
            lines.append("prmt.b32 h, $10, 0, 0x2301;")
        for place in range(4):
            pair = word * 4 + place
            if place == 0:
                lines.append(f"mov.b32 w, ${8 + word};")
            elif place == 2:
                lines.append("shr.u32 w, w, 8;")
            odd = place % 2
            lines.append(f"and.b32 t, w, {'0x00F000F0' if odd else '0x000F000F'};")
            if high_bits and not odd:
                shift = place if high_bits == 2 else pair // 2
                lines.append(f"shr.u32 u, h, {shift};" if shift else "mov.b32 u, h;")
            if high_bits:
                mask = {(2, 0): 0x30, (2, 1): 0x300, (1, 0): 0x10, (1, 1): 0x100}[high_bits, odd]
                lines.append(f"lop3.b32 t, u, 0x{mask << 16 | mask:08X}, t, 0xEA;")
            lines.append(f"fma.rn.f16x2 ${pair}, t, {'s' if odd else scale}, {offset};")
    return "\n".join([*lines, "}"])


def _decode_bytes_asm():
    """Four words of four 8-bit quants to sixteen float16; $8-$9 the even words, $10-$11 the odd."""
    lines = ["{", ".reg .b32 t;"]
    for word in range(2):
        for place in range(4):
            source = f"${(8 if place < 2 else 10) + word}"
            selector = "0x4140" if place % 2 == 0 else "0x4342"
            lines.append(f"prmt.b32 t, {source}, 0, {selector};")
            lines.append(f"fma.rn.f16x2 ${word * 4 + place}, t, $12, $14;")
    return "\n".join([*lines, "}"])


def _times_asm(factor):
    return (
        "{ .reg .b32 f, z; "
        f"mov.b32 f, {factor}; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $1, f, z; }}"
    )


_ASM_NIBBLES = gl.constexpr(_decode_asm(0))
_ASM_FIVE_LOW = gl.constexpr(_decode_asm(1, 0))
_ASM_FIVE_HIGH = gl.constexpr(_decode_asm(1, 1))
_ASM_SIX = gl.constexpr(_decode_asm(2))
_ASM_BYTES = gl.constexpr(_decode_bytes_asm())
_WIRES = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))
_WIRES_MORE = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))

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
# Two float16 in a word, each twice.
_ASM_TWICE = gl.constexpr("prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;")
# minus the zero point (8, 128 or 32) times 2**-24: float16 below the normal ones, and 0 to add.
_ASM_MINUS_8 = gl.constexpr(_times_asm("0x80088008"))
_ASM_MINUS_128 = gl.constexpr(_times_asm("0x80808080"))
_ASM_MINUS_32 = gl.constexpr(_times_asm("0x80208020"))


@gluon.constexpr_function
def lane_layout(BO, W, kind):
    """Which thread holds what, so that a product's operand needs no exchange.

    A warp has 16 rows at a time: lanes differ by row (three bits) and by lane of the format (two).
    """
    words = {
        "quants": ([[1], [2], [4]], [[8], [16]], [32]),  # [lane, quarter, 2]
        "bytes": ([[1], [2], [4], [8]], [[16], [32]], [64]),  # [lane, quarter, 4]
        "quarter": ([[0, 1]], [[1, 0], [2, 0]], [4, 2]),  # [lane, 2]
        "pairs": ([[1]], [[2], [4]], [8]),  # [lane, half]
        "fours": ([[1], [2]], [[4], [8]], [16]),  # [lane, quarter]
        "lanes": ([], [[1], [2]], [4]),  # [lane]
        "all": ([[1], [2]], [[0], [0]], [4]),  # every lane holds the four words
    }
    registers, lanes, shape = words[kind]
    zeros = [0] * len(shape)
    registers = [[0, *place] for place in registers] + [[8, *zeros]]
    row = 16 * W
    while row < BO:
        registers.append([row, *zeros])
        row *= 2
    lanes = [[0, *place] for place in lanes] + [[1, *zeros], [2, *zeros], [4, *zeros]]
    warps = []
    row = 16
    while row < 16 * W:
        warps.append([row, *zeros])
        row *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BO, *shape])


@gluon.jit
def _in_operand(parts, OPERAND: gl.constexpr, BO: gl.constexpr):
    """Eight tensors [BO, lane, pair] side by side: [BO, 64] as the product takes it."""
    o0, o1, o2, o3, o4, o5, o6, o7 = parts
    x = gl.join(
        gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7))
    )
    x = x.permute((0, 5, 4, 3, 1, 2)).reshape([BO, 64])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def decoded(
    words,
    more,
    scale,
    offset,
    STEPS: gl.constexpr,
    FORMAT: gl.constexpr,
    OPERAND: gl.constexpr,
    BO: gl.constexpr,
):
    """A quarter: words [BO, lane, 2], upper bits or odd words, scale and offset [BO, lane]."""
    scales = gl.expand_dims(scale, 2).broadcast_to([BO, 4, 2])
    offsets = gl.expand_dims(offset, 2).broadcast_to([BO, 4, 2])
    if FORMAT == _Q8_0:
        inputs = [words, more, scales, offsets]
        ASM: gl.constexpr = _ASM_BYTES
        WIRES: gl.constexpr = _WIRES_MORE
    elif FORMAT == _Q6_K:
        inputs = [words, gl.expand_dims(more, 2).broadcast_to([BO, 4, 2]), scales, offsets]
        ASM: gl.constexpr = _ASM_SIX
        WIRES: gl.constexpr = _WIRES_MORE
    elif FORMAT == _Q5_K:
        inputs = [words, gl.expand_dims(more, 2).broadcast_to([BO, 4, 2]), scales, offsets]
        ASM: gl.constexpr = _ASM_FIVE_HIGH if STEPS else _ASM_FIVE_LOW
        WIRES: gl.constexpr = _WIRES_MORE
    else:
        inputs = [words, scales, offsets]
        ASM: gl.constexpr = _ASM_NIBBLES
        WIRES: gl.constexpr = _WIRES
    parts = gl.inline_asm_elementwise(
        ASM,
        WIRES,
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
    return _in_operand(parts, OPERAND, BO)


@gluon.jit
def _quarters(words, QUARTER: gl.constexpr):
    """[BO, lane, half, steps, 2] to the four quarters [BO, lane, 2]."""
    first, second = gl.split(words.permute((0, 1, 2, 4, 3)))
    w00, w10 = gl.split(first.permute((0, 1, 3, 2)))
    w01, w11 = gl.split(second.permute((0, 1, 3, 2)))
    w00 = gl.convert_layout(w00, QUARTER, assert_trivial=True)
    w01 = gl.convert_layout(w01, QUARTER, assert_trivial=True)
    w10 = gl.convert_layout(w10, QUARTER, assert_trivial=True)
    w11 = gl.convert_layout(w11, QUARTER, assert_trivial=True)
    return w00, w01, w10, w11


@gluon.jit
def quant_words(
    quants, high, QUARTER: gl.constexpr, FORMAT: gl.constexpr, BO: gl.constexpr, W: gl.constexpr
):
    """The words of the four quarters, and what goes with each: odd words or upper bits."""
    LANE: gl.constexpr = gl.SliceLayout(2, QUARTER)
    if FORMAT == _Q8_0:
        both = quants.load(lane_layout(BO, W, "bytes")).reshape([BO, 4, 2, 2, 2, 2])
        even, odd = gl.split(both)
        w00, w01, w10, w11 = _quarters(even, QUARTER)
        h00, h01, h10, h11 = _quarters(odd, QUARTER)
    else:
        words = quants.load(lane_layout(BO, W, "quants")).reshape([BO, 4, 2, 2, 2])
        w00, w01, w10, w11 = _quarters(words, QUARTER)
        if FORMAT == _Q6_K:
            upper = high.load(lane_layout(BO, W, "fours")).reshape([BO, 4, 2, 2])
            first, second = gl.split(upper)
            h00, h10 = gl.split(first)
            h01, h11 = gl.split(second)
            h00 = gl.convert_layout(h00, LANE, assert_trivial=True)
            h01 = gl.convert_layout(h01, LANE, assert_trivial=True)
            h10 = gl.convert_layout(h10, LANE, assert_trivial=True)
            h11 = gl.convert_layout(h11, LANE, assert_trivial=True)
        elif FORMAT == _Q5_K:
            h00, h10 = gl.split(high.load(lane_layout(BO, W, "pairs")).reshape([BO, 4, 2]))
            h00 = gl.convert_layout(h00, LANE, assert_trivial=True)
            h10 = gl.convert_layout(h10, LANE, assert_trivial=True)
            h01 = h00
            h11 = h10
        else:
            h00 = w00
            h01 = w01
            h10 = w10
            h11 = w11
    return w00, w01, w10, w11, h00, h01, h10, h11


@gluon.jit
def _minus(scale, FORMAT: gl.constexpr):
    """The offset of formats that have a zero point: minus it, times the scale."""
    if FORMAT == _Q8_0:
        ASM: gl.constexpr = _ASM_MINUS_128
    elif FORMAT == _Q6_K:
        ASM: gl.constexpr = _ASM_MINUS_32
    else:
        ASM: gl.constexpr = _ASM_MINUS_8
    return gl.inline_asm_elementwise(ASM, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _twice(words):
    return gl.inline_asm_elementwise(
        _ASM_TWICE, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def scales_and_offsets(
    scales,
    deltas,
    up,
    down,
    QUARTER: gl.constexpr,
    FORMAT: gl.constexpr,
    BO: gl.constexpr,
    W: gl.constexpr,
):
    """Scale and offset, [BO, lane] each, of the four quarters."""
    LANE: gl.constexpr = gl.SliceLayout(2, QUARTER)
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    if (FORMAT == _Q4_K) or (FORMAT == _Q5_K):
        lane = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE))
        select0 = (lane | ((lane + 4) << 4)).expand_dims(0)
        select1 = (0x7010 & 0xF0FF | ((lane + 4) << 8)).expand_dims(0)
        words = scales.load(lane_layout(BO, W, "all")).reshape([BO, 2, 2])
        even, odd = gl.split(words)
        t0, t2 = gl.split(even)
        t1, t3 = gl.split(odd)
        t0 = gl.convert_layout(t0, ROW, assert_trivial=True).expand_dims(1)
        t1 = gl.convert_layout(t1, ROW, assert_trivial=True).expand_dims(1)
        t2 = gl.convert_layout(t2, ROW, assert_trivial=True).expand_dims(1)
        t3 = gl.convert_layout(t3, ROW, assert_trivial=True).expand_dims(1)
        s0, m0, s1, m1 = gl.inline_asm_elementwise(
            _ASM_PACKED_SCALES,
            "=r,=r,=r,=r,r,r,r,r,r,r,f,f",
            [t0, t1, t2, t3, select0, select1, up, down],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        return s0, m0, s0, m0, s1, m1, s1, m1
    elif FORMAT == _Q4_1:
        first, second = gl.split(scales.load(lane_layout(BO, W, "pairs")).reshape([BO, 4, 2]))
        s0, m0 = _twice(gl.convert_layout(first, LANE, assert_trivial=True))
        s1, m1 = _twice(gl.convert_layout(second, LANE, assert_trivial=True))
        return s0, m0, s0, m0, s1, m1, s1, m1
    elif FORMAT == _Q6_K:
        words = gl.convert_layout(
            scales.load(lane_layout(BO, W, "lanes")), LANE, assert_trivial=True
        )
        delta = deltas.load(ROW).expand_dims(1).to(gl.int16, bitcast=True).to(gl.int32)
        s00, s01, s10, s11 = gl.inline_asm_elementwise(
            _ASM_BYTE_SCALES,
            "=r,=r,=r,=r,r,r,f",
            [words, delta, up],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        return (
            s00,
            _minus(s00, FORMAT),
            s01,
            _minus(s01, FORMAT),
            s10,
            _minus(s10, FORMAT),
            s11,
            _minus(s11, FORMAT),
        )
    else:
        words = gl.convert_layout(
            scales.load(lane_layout(BO, W, "lanes")), LANE, assert_trivial=True
        )
        s0, s1 = _twice(words)
        m0 = _minus(s0, FORMAT)
        m1 = _minus(s1, FORMAT)
        return s0, m0, s0, m0, s1, m1, s1, m1
