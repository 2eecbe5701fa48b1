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
    table: Any  # the address of the grid's points in shared memory


@gluon.constexpr_function
def _nibbles_asm(high_bits: int, odd_quarter: bool) -> str:
    """Two words of eight 4-bit codes (and their upper bits) to sixteen float16 in eight registers.

    A code n in the low bits of a half register is the float16 n * 2**-24; the scale carries the
    2**24, so a pair takes one fused multiply-add. Odd pairs are decoded where they lie, four bits
    further up, with a sixteenth of the scale. Operands: $0-$7 results, $8-$9 words, then $10-$11
    upper bits if there are any, then scale and offset, each twice.
    """
    scale, offset = ("$10", "$12") if high_bits == 0 else ("$12", "$14")
    lines = ["{", ".reg .b32 t, u, w, h, s;"]
    lines += _nibble_lines(("$8", "$9"), scale, (offset, offset), high_bits, odd_quarter)
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _nibble_lines(words, scale, offsets, high_bits: int, odd_quarter: bool):
    """The same, with the operands' names; $10 are upper bits. Registers t, u, w, h, s are used."""
    lines = ["mov.b32 t, 0x2C002C00;", f"mul.rn.f16x2 s, {scale}, t;"]
    if high_bits:
        is_swapped = high_bits == 1 and odd_quarter
        lines.append("prmt.b32 h, $10, 0, 0x2301;" if is_swapped else "mov.b32 h, $10;")
    for word in range(2):
        if high_bits == 2 and word == 1:
            lines.append("prmt.b32 h, $10, 0, 0x2301;")
        for index in range(4):
            pair = word * 4 + index
            if index == 0:
                lines.append(f"mov.b32 w, {words[word]};")
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
            lines.append(f"fma.rn.f16x2 ${pair}, t, {'s' if odd else scale}, {offsets[word]};")
    return lines


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
def _e4m3_asm() -> str:
    """Four words of four E4M3 floats to sixteen float16. A scale is the sum of two float16: the
    product with the smaller is added to that with the larger before the one rounding that counts.
    $8-$9 the even words, $10-$11 the odd, then the scale's larger part and its smaller, each
    twice."""
    lines = ["{", ".reg .b32 t, u;", ".reg .b16 a, b;"]
    for word in range(2):
        for index in range(4):
            if index % 2 == 0:
                lines.append(f"mov.b32 {{a, b}}, ${(8 if index < 2 else 10) + word};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 t, {'ab'[index % 2]};")
            lines.append("mul.rn.f16x2 u, t, $14;")
            lines.append(f"fma.rn.f16x2 ${word * 4 + index}, t, $12, u;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _floats_asm(num_words: int) -> str:
    """One or two words of eight floats of 4 bits (E2M1) to as many float16: masks and shifts make
    each a float16 that is 2**-14 of it (see plane_sources.FLOAT_SHIFTS). Operands: the results, the
    words, the scale twice."""
    lines = ["{", ".reg .b32 t, u, v;"]
    first_word, scale = 4 * num_words, f"${4 * num_words + 2}"
    for word in range(num_words):
        source = f"${first_word + word}"
        for half in range(2):
            if half:
                lines.append(f"shr.u32 u, {source}, 3;")
                lines.append(f"shl.b32 v, {source}, 7;")
                lines.append("lop3.b32 v, u, 0x0E0E0E0E, v, 0xE2;")  # u where the mask is 1
                source = "v"
            place = 4 * word + 2 * half
            lines.append(f"and.b32 t, {source}, 0x8E008E00;")
            lines.append(f"mul.rn.f16x2 ${place}, t, {scale};")
            lines.append(f"shl.b32 u, {source}, 8;")
            lines.append("and.b32 t, u, 0x8E008E00;")
            lines.append(f"mul.rn.f16x2 ${place + 1}, t, {scale};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _signs_asm(odd_quarter: bool) -> str:
    """Sixteen bits in the halves of a word to sixteen float16: each brings a sign to its place,
    where it turns that of the negated scale. Operands: $8 the word, $10 that, both twice."""
    lines = ["{", ".reg .b32 t;"]
    for pair in range(8):
        lines.append(f"shl.b32 t, $8, {15 - pair - (8 if odd_quarter else 0)};")
        lines.append(f"lop3.b32 ${pair}, t, 0x80008000, $10, 0x6A;")  # (t & mask) ^ scale
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _two_bits_asm(has_high: bool, odd_quarter: bool) -> str:
    """A word of sixteen 2-bit codes (and an upper bit of each) to sixteen float16. Of each shifted
    word two pairs are taken, at bits 6 and 8: codes times 64, and times 256 with a fourth of the
    scale; their upper bits are at bits 8 and 10. Operands: $8 the word, then $10 upper bits if
    there are any, then scale and offset, all of them twice."""
    scale, offset = ("$12", "$14") if has_high else ("$10", "$12")
    lines = ["{", ".reg .b32 t, u, w, h, s;", "mov.b32 t, 0x34003400;"]
    lines.append(f"mul.rn.f16x2 s, {scale}, t;")
    if has_high:
        lines.append("prmt.b32 h, $10, 0, 0x2301;" if odd_quarter else "mov.b32 h, $10;")
    moves = (
        "mov.b32 w, $8;",
        "shl.b32 w, $8, 4;",
        "shr.u32 w, $8, 4;",
        "prmt.b32 w, $8, 0, 0x2301;",
    )
    pairs = ((3, 4), (1, 2), (5, 6), (7, 0))
    for move, two, shift in zip(moves, pairs, (0, 1, 4, 5), strict=True):
        lines.append(move)
        if has_high:
            lines.append(f"shr.u32 u, h, {shift};" if shift else "mov.b32 u, h;")
        for pair, mask, high, factor in (
            (two[0], "0x00C000C0", "0x01000100", scale),
            (two[1], "0x03000300", "0x04000400", "s"),
        ):
            lines.append(f"and.b32 t, w, {mask};")
            if has_high:
                lines.append(f"lop3.b32 t, u, {high}, t, 0xEA;")
            lines.append(f"fma.rn.f16x2 ${pair}, t, {factor}, {offset};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _values_asm() -> str:
    """Two words of eight codes of IQ4 to sixteen float16. Four nibbles select bytes of both halves
    of the table, their highest bits which of these: the values plus 128, two pairs of which are
    one byte apart (plane_sources.VALUE_NIBBLES). $8-$9 the words, then scale and offset, each
    twice."""
    lines = ["{", ".reg .b32 t, a, m, lo, hi, r, t0, t1, t2, t3;"]
    lines += ["mov.b32 t0, 0x3F2D1801;", "mov.b32 t1, 0x766A5D4F;"]
    lines += ["mov.b32 t2, 0xA6998D81;", "mov.b32 t3, 0xF1D9C5B5;"]
    for word in range(2):
        lines.append(f"and.b32 a, ${8 + word}, 0x77777777;")
        lines.append(f"shr.u32 m, ${8 + word}, 1;")
        lines.append("lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;")
        for half in range(2):
            if half:
                lines += ["shr.u32 a, a, 16;", "shr.u32 m, m, 16;"]
            lines.append("prmt.b32 lo, t0, t1, a;")
            lines.append("prmt.b32 hi, t2, t3, a;")
            lines.append("prmt.b32 r, lo, hi, m;")
            pair = word * 4 + half * 2
            lines.append("and.b32 t, r, 0x00FF00FF;")
            lines.append(f"fma.rn.f16x2 ${pair}, t, $10, $12;")
            lines.append("prmt.b32 t, r, 0, 0x4341;")
            lines.append(f"fma.rn.f16x2 ${pair + 1}, t, $10, $12;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _number_lines(grid: str, point: int, quarter: int):
    """n: the number of a quarter's point, out of $8 numbers, $12 their upper bits."""
    steps = quarter % 2
    if grid in ("IQ2_XXS", "IQ2_XS", "IQ2_S"):
        place = 2 * steps + point
        lines = [f"bfe.u32 n, $8, {8 * place}, 8;"]
        if grid == "IQ2_XS":
            lines += [f"shr.u32 t, $12, {17 + 2 * place};", "lop3.b32 n, t, 0x100, n, 0xEA;"]
        elif grid == "IQ2_S":
            lines += [f"shl.b32 t, $12, {8 - 2 * place};", "lop3.b32 n, t, 0x300, n, 0xEA;"]
        return lines
    lines = [f"bfe.u32 n, $8, {8 * point}, 8;"]
    if grid == "IQ3_S":
        place = 4 * steps + point
        lines += [f"shl.b32 t, $12, {8 - place};", "lop3.b32 n, t, 0x100, n, 0xEA;"]
    return lines


@gluon.constexpr_function
def _signed_points_asm(grid: str, quarter: int) -> str:
    """Numbers of points to sixteen float16: of four points' bytes and four bytes of a sign each,
    byte permutations make two pairs (plane_sources.GRID_BYTES). Operands: $8 numbers, $10 signs,
    $12 upper bits, $14 the table, $16 the scale, all of them twice."""
    is_eight = grid in ("IQ2_XXS", "IQ2_XS", "IQ2_S")  # weights a point
    lines = ["{", ".reg .b32 n, t, u, x0, x1;"]
    pair = 0
    for point in range(2 if is_eight else 4):
        lines += _number_lines(grid, point, quarter)
        lines.append(f"mad.lo.u32 n, n, {8 if is_eight else 4}, $14;")
        if is_eight:
            lines.append("ld.shared.v2.b32 {x0, x1}, [n];")
        else:
            lines.append("ld.shared.b32 x0, [n];")
        for word in ("x0", "x1") if is_eight else ("x0",):
            place = 4 * (quarter % 2) + pair // 2  # of eight words
            lines.append(f"shl.b32 t, $10, {7 - place};")
            lines.append("and.b32 t, t, 0x80808080;")
            for index, selector in ((pair, "0x7250"), (pair + 1, "0x6341")):
                lines.append(f"prmt.b32 u, {word}, t, {selector};")
                lines.append(f"mul.rn.f16x2 ${index}, u, $16;")
            pair += 2
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _ternary_points_asm(has_records: bool, quarter: int) -> str:
    """Numbers of points to sixteen float16, by words of eight 4-bit codes. Operands: $8 numbers,
    $10 their upper bits, $12 the table, $14 the scale, all of them twice."""
    lines = ["{", ".reg .b32 t, u, w, h, s, n, w0, w1, o0, o1;"]
    lines += ["mov.b32 t, 0x38003800;", "mul.rn.f16x2 h, $14, t;"]
    shift, bits = 16 * (quarter // 2), 4 if has_records else 3
    for point in range(2):
        place = 2 * (quarter % 2) + point
        lines.append(f"bfe.u32 n, $8, {8 * place}, 8;")
        lines.append(f"bfe.u32 t, $10, {shift + bits * place}, 3;")
        lines.append("mad.lo.u32 n, t, 256, n;")
        lines.append("mad.lo.u32 n, n, 4, $12;")
        lines.append(f"ld.shared.b32 w{point}, [n];")
        # Codes are times four, a shift by an eighth is a half: -7 or -9 times 2**-24 * scale / 2.
        lines.append(f"bfe.u32 t, $10, {shift + (4 * place + 3 if has_records else 15)}, 1;")
        lines.append("mad.lo.u32 t, t, 0x00020002, 0x80078007;")
        lines += ["mov.b32 u, 0x80008000;", f"fma.rn.f16x2 o{point}, h, t, u;"]
    lines += _nibble_lines(("w0", "w1"), "$14", ("o0", "o1"), 0, False)
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _decode_asm(FORMAT, QUARTER):
    if FORMAT.has_small_floats:
        return _floats_asm(2)
    if FORMAT.has_signs:
        return _signs_asm(QUARTER % 2 == 1)
    if FORMAT.has_signed_points:
        return _signed_points_asm(FORMAT.grid, QUARTER)
    if FORMAT.has_ternary_points:
        return _ternary_points_asm(FORMAT.has_records, QUARTER)
    if FORMAT.has_values:
        return _values_asm()
    if FORMAT.code_bits == 8:
        return _e4m3_asm() if FORMAT.has_sums else _bytes_asm()
    if FORMAT.code_bits == 2:
        return _two_bits_asm(FORMAT.high_bits > 0, QUARTER % 2 == 1)
    return _nibbles_asm(FORMAT.high_bits, QUARTER % 2 == 1)


@gluon.constexpr_function
def _decode_constraints(NUM_INPUTS):
    """Each input twice."""
    return ",".join(["=r"] * 8 + ["r"] * (2 * NUM_INPUTS))


@gluon.constexpr_function
def _zero_point_asm(FORMAT):
    """A scale times minus the zero point times 2**-24, a subnormal float16."""
    zero_point = FORMAT.zero_point << FORMAT.code_shift
    factor = f"0x{0x80008000 | zero_point << 16 | zero_point:08X}"
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
# A small integer in the low bits of 0x4B000000 is that integer plus 2**23 as a float32: here that
# took less time than converting it.

# Of four bytes, a 4-bit scale and a 4-bit minimum each, and a float16 pair: four scales and four
# negated offsets, each twice. $10: 2**(24 - e - shift), $11: 2**-e.
_ASM_NIBBLE_SCALES = gl.constexpr(
    """
{
.reg .b16 h0, h1;
.reg .b32 x;
.reg .f32 d, e, f;
mov.b32 {h0, h1}, $9;
cvt.f32.f16 d, h0;
cvt.f32.f16 e, h1;
mul.f32 d, d, $10;
mul.f32 e, e, $11;
neg.f32 e, e;
"""
    + "".join(
        f"shr.u32 x, $8, {8 * at + 4 * part};\nlop3.b32 x, x, 15, 0x4B000000, 0xEA;\n"
        f"mov.b32 f, x;\nsub.f32 f, f, 0f4B000000;\nmul.f32 f, f, {'de'[part]};\n"
        f"cvt.rn.f16x2.f32 ${4 * part + at}, f, f;\n"
        for part in range(2)
        for at in range(4)
    )
    + "}"
)
# A float32 times a small integer (of which 32 is taken away; or twice that plus one), as float16
# twice.
_ASM_CENTRED_SCALE = gl.constexpr("""
{
.reg .b32 x;
.reg .f32 f;
add.u32 x, $1, 0x4B000000;
mov.b32 f, x;
sub.f32 f, f, 0f4B000020;
mul.f32 f, f, $2;
cvt.rn.f16x2.f32 $0, f, f;
}
""")
_ASM_ODD_SCALE = gl.constexpr("""
{
.reg .b32 x;
.reg .f32 f;
mad.lo.u32 x, $1, 2, 0x4B000001;
mov.b32 f, x;
sub.f32 f, f, 0f4B000000;
mul.f32 f, f, $2;
cvt.rn.f16x2.f32 $0, f, f;
}
""")
_ASM_SCALE = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
# The low word of two words shifted down.
_ASM_RECORD = gl.constexpr(
    "{ .reg .b64 v; mov.b64 v, {$1, $2}; shr.u64 v, v, $3; cvt.u32.u64 $0, v; }"
)
_ASM_LOW_HALF = gl.constexpr("{ .reg .b16 h, u; mov.b32 {h, u}, $1; cvt.f32.f16 $0, h; }")
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
# Four floats of a byte, E4M3 without a sign, times 2**7: each twice.
_ASM_E4M3_SCALES = gl.constexpr(
    "{ .reg .b32 t, u; mov.b32 u, 0x78007800;"
    + "".join(
        f" bfe.u32 t, $4, {8 * at}, 8; mul.lo.u32 t, t, 0x00800080; mul.rn.f16x2 ${at}, t, u;"
        for at in range(4)
    )
    + " }"
)
_ASM_TIMES = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
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
        "half nibbles": ([[1], [2]], [[4], [8]], [16]),  # of half a block: [lane, quarter, 2]
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
def _four(words, LANE: gl.constexpr):
    """[ROWS, lane, half, half of the steps] to the four quarters [ROWS, lane]."""
    first, second = gl.split(words)
    q0, q2 = gl.split(first)
    q1, q3 = gl.split(second)
    return _in_layout((q0, q1, q2, q3), LANE)


@gluon.jit
def _two(words, LANE: gl.constexpr):
    """[ROWS, lane, half] to those of each half, [ROWS, lane]."""
    first, second = gl.split(words)
    first = gl.convert_layout(first, LANE, assert_trivial=True)
    second = gl.convert_layout(second, LANE, assert_trivial=True)
    return first, second


@gluon.jit
def half_words(codes, HALF: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Where halves of a block lie apart, [half, row, word]: both quarters of one of them."""
    WORDS: gl.constexpr = lane_layout(ROWS, WARPS, "quarter")
    FLAT: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    rows = codes._reinterpret(gl.int32, [2 * ROWS, 16], FLAT).slice(HALF * ROWS, ROWS, 0)
    loaded = rows.load(lane_layout(ROWS, WARPS, "half nibbles")).reshape([ROWS, 4, 2, 2])
    first, second = gl.split(loaded.permute((0, 1, 3, 2)))
    first = gl.convert_layout(first, WORDS, assert_trivial=True)
    return first, gl.convert_layout(second, WORDS, assert_trivial=True)


@gluon.jit
def _code_words(
    codes,
    high,
    WORDS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Of the four quarters the words, and what goes with each: odd words, upper bits or signs."""
    LANE: gl.constexpr = gl.SliceLayout(2, WORDS)
    if FORMAT.by_halves:
        w0, w1 = half_words(codes, 0, ROWS, WARPS)
        w2, w3 = half_words(codes, 1, ROWS, WARPS)
        words = (w0, w1, w2, w3)
        return words, words
    elif FORMAT.code_bits == 8:
        both = codes.load(lane_layout(ROWS, WARPS, "bytes")).reshape([ROWS, 4, 2, 2, 2, 2])
        even, odd = gl.split(both)
        return _split_quarters(even, WORDS), _split_quarters(odd, WORDS)
    elif FORMAT.code_bits == 4:
        loaded = codes.load(lane_layout(ROWS, WARPS, "nibbles")).reshape([ROWS, 4, 2, 2, 2])
        words = _split_quarters(loaded, WORDS)
        if FORMAT.high_bits == 2:
            upper = high.load(lane_layout(ROWS, WARPS, "quarters")).reshape([ROWS, 4, 2, 2])
            return words, _four(upper, LANE)
        elif FORMAT.high_bits == 1:
            upper = high.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
            first, second = _two(upper, LANE)
            return words, (first, first, second, second)
        else:
            return words, words
    elif FORMAT.code_bits == 2:
        loaded = codes.load(lane_layout(ROWS, WARPS, "quarters")).reshape([ROWS, 4, 2, 2])
        if FORMAT.high_bits == 1:
            upper = high.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
            first, second = _two(upper, LANE)
            return _four(loaded, LANE), (first, first, second, second)
        elif FORMAT.has_signed_points:  # [lane, half, numbers and signs]
            n0, s0, n1, s1 = _four(loaded, LANE)
            return (n0, n0, n1, n1), (s0, s0, s1, s1)
        else:
            words = _four(loaded, LANE)
            return words, words
    else:
        loaded = codes.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
        first, second = _two(loaded, LANE)
        words = (first, first, second, second)
        if FORMAT.has_signs:
            return words, words
        else:
            upper = high.load(lane_layout(ROWS, WARPS, "lanes"))
            upper = gl.convert_layout(upper, LANE, assert_trivial=True)
            return words, (upper, upper, upper, upper)


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
def _replicated_words(scales, ROW: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """A row's four words, [ROWS] each, in every lane."""
    words = scales.load(lane_layout(ROWS, WARPS, "replicated")).reshape([ROWS, 2, 2])
    even, odd = gl.split(words)
    t0, t2 = gl.split(even)
    t1, t3 = gl.split(odd)
    return _in_layout((t0, t1, t2, t3), ROW)


@gluon.jit
def _row_words(scales, ROW: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Where a row has two words: these, [ROWS, 1], in every lane."""
    words = scales.load(_power_layout(ROWS, WARPS)).reshape([ROWS, 2])
    first, second = gl.split(words)
    first = gl.convert_layout(first, ROW, assert_trivial=True)
    second = gl.convert_layout(second, ROW, assert_trivial=True)
    return first.expand_dims(1), second.expand_dims(1)


@gluon.jit
def _packed_scales(scales, factors, LANE: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of Q4_K and Q5_K: scale and offset of both halves of the block."""
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE))
    select0 = (lane | ((lane + 4) << 4)).expand_dims(0)
    select1 = (0x7010 & 0xF0FF | ((lane + 4) << 8)).expand_dims(0)
    t0, t1, t2, t3 = _replicated_words(scales, ROW, ROWS, WARPS)
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
def powers(scales, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of MXFP4: the scales of both halves of the block, [ROWS, lane] each."""
    LANE: gl.constexpr = gl.SliceLayout(2, lane_layout(ROWS, WARPS, "quarter"))
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE)) * 8
    first, second = _row_words(scales, ROW, ROWS, WARPS)
    return gl.inline_asm_elementwise(
        _ASM_POWERS,
        "=r,=r,r,r,r",
        [first, second, shift.expand_dims(0)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _half_times(x, y):
    """Of float16 twice a word."""
    return gl.inline_asm_elementwise(
        _ASM_TIMES, "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _e4m3_scales(
    scales,
    deltas,
    LANE: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Of NVFP4: the scales of the four quarters, [ROWS, lane] each."""
    words = scales.load(lane_layout(ROWS, WARPS, "lanes"))
    words = gl.convert_layout(words, LANE, assert_trivial=True)
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _ASM_E4M3_SCALES,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    if FORMAT.has_deltas:
        pair = deltas.load(gl.SliceLayout(1, LANE)).expand_dims(1)
        first, second = _duplicated(pair.broadcast_to([ROWS, 4]))
        s0 = _half_times(s0, first)
        s1 = _half_times(s1, first)
        s2 = _half_times(s2, second)
        s3 = _half_times(s3, second)
    return s0, s1, s2, s3


@gluon.jit
def _negated_pair(deltas, factors, LANE: gl.constexpr, ROWS: gl.constexpr):
    """Of Q1_0: the scales of both halves of the block, negated, [ROWS, lane] each."""
    pair = deltas.load(gl.SliceLayout(1, LANE)).expand_dims(1)
    first = _low_half(pair) * -factors.scales
    second = _low_half(pair >> 16) * -factors.scales
    s0 = gl.inline_asm_elementwise(
        _ASM_SCALE, "=r,f", [first], dtype=gl.int32, is_pure=True, pack=1
    )
    s1 = gl.inline_asm_elementwise(
        _ASM_SCALE, "=r,f", [second], dtype=gl.int32, is_pure=True, pack=1
    )
    return s0.broadcast_to([ROWS, 4]), s1.broadcast_to([ROWS, 4])


@gluon.jit
def _times(ASM: gl.constexpr, integer, factor):
    """A float32 times a small integer, in the way of ASM: float16 twice a word."""
    return gl.inline_asm_elementwise(
        ASM, "=r,r,f", [integer, factor], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _low_half(words):
    """The float16 in the lower half, as float32."""
    return gl.inline_asm_elementwise(
        _ASM_LOW_HALF, "=f,r", [words], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _records(scales, LANE: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of formats with records: the float16 of a row, [ROWS, 1], and a lane's 12 bits (and more
    above them), [ROWS, lane]."""
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, LANE)) * 12 + 16
    first, second = _row_words(scales, ROW, ROWS, WARPS)
    record = gl.inline_asm_elementwise(
        _ASM_RECORD,
        "=r,r,r,r",
        [first, second, shift.expand_dims(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return _low_half(first), record


@gluon.jit
def _with_even_signs(words):
    """Signs with those that follow from the others (plane_sources.EVEN_SIGNS)."""
    kept = words & 0x55FFFFFF
    folded = kept ^ (kept << 16)  # to the highest byte: shifts up have more units than shifts down
    folded = folded ^ (folded << 8)
    return kept | ((folded ^ (folded << 1)) & -0x56000000)  # 0xAA000000


@gluon.jit
def _other_bits(words):
    """What lies where those signs would: four bits."""
    bits = (words >> 25) & 0x55
    bits = (bits | (bits >> 1)) & 0x33
    return (bits | (bits >> 2)) & 15


@gluon.jit
def _grid_block(
    scales,
    deltas,
    factors,
    more,
    WORDS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Of formats with grids, and of the four quarters: signs, or upper bits of IQ1; scales; upper
    bits of numbers."""
    LANE: gl.constexpr = gl.SliceLayout(2, WORDS)
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    GRID: gl.constexpr = FORMAT.grid
    shift = (gl.arange(0, 4, layout=gl.SliceLayout(0, LANE)) * 8).expand_dims(0)
    upper = more
    if FORMAT.has_records:  # IQ1_M
        delta, record = _records(scales, LANE, ROWS, WARPS)
        delta = delta * factors.scales
        s0 = _times(_ASM_ODD_SCALE, record & 7, delta)
        s1 = _times(_ASM_ODD_SCALE, (record >> 3) & 7, delta)
        s2 = _times(_ASM_ODD_SCALE, (record >> 6) & 7, delta)
        s3 = _times(_ASM_ODD_SCALE, (record >> 9) & 7, delta)
    elif GRID == "IQ3_S":
        first, nibbles, u0, u1 = _replicated_words(scales, ROW, ROWS, WARPS)
        delta = _low_half(first).expand_dims(1) * factors.scales
        byte = nibbles.expand_dims(1) >> shift
        s0 = _times(_ASM_ODD_SCALE, byte & 15, delta)
        s2 = _times(_ASM_ODD_SCALE, (byte >> 4) & 15, delta)
        s1 = s0
        s3 = s2
        u0 = u0.expand_dims(1) >> shift
        u1 = u1.expand_dims(1) >> shift
        upper = (u0, u0, u1, u1)
    else:
        delta = deltas.load(ROW).to(gl.float32).expand_dims(1) * factors.scales
        if GRID == "IQ2_XS" or GRID == "IQ2_S":
            if GRID == "IQ2_XS":
                b0, b1 = _row_words(scales, ROW, ROWS, WARPS)
            else:
                u0, u1, b0, b1 = _replicated_words(scales, ROW, ROWS, WARPS)
                u0 = u0.expand_dims(1) >> shift
                u1 = u1.expand_dims(1) >> shift
                upper = (u0, u0, u1, u1)
                b0 = b0.expand_dims(1)
                b1 = b1.expand_dims(1)
            b0 = b0 >> shift
            b1 = b1 >> shift
            s0 = _times(_ASM_ODD_SCALE, b0 & 15, delta)
            s1 = _times(_ASM_ODD_SCALE, (b0 >> 4) & 15, delta)
            s2 = _times(_ASM_ODD_SCALE, b1 & 15, delta)
            s3 = _times(_ASM_ODD_SCALE, (b1 >> 4) & 15, delta)
        else:
            if FORMAT.has_ternary_points:
                c0 = (more[0] >> 12) & 7
                c1 = (more[0] >> 28) & 7
            else:
                c0 = _other_bits(more[0])
                c1 = _other_bits(more[2])
            s0 = _times(_ASM_ODD_SCALE, c0, delta)
            s2 = _times(_ASM_ODD_SCALE, c1, delta)
            s1 = s0
            s3 = s2
    if FORMAT.has_even_signs:
        first = _with_even_signs(more[0])
        second = _with_even_signs(more[2])
        more = (first, first, second, second)
    return more, (s0, s1, s2, s3), upper


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
        s0, s1 = powers(scales, ROWS, WARPS)
        return (s0, s0, s1, s1), (s0, s0, s1, s1)  # there are no offsets
    elif FORMAT.has_e4m3_scales:
        found = _e4m3_scales(scales, deltas, LANE, FORMAT, ROWS, WARPS)
        return found, found  # as above
    elif FORMAT.has_signs:
        s0, s1 = _negated_pair(deltas, factors, LANE, ROWS)
        return (s0, s0, s1, s1), (s0, s0, s1, s1)  # as above
    elif FORMAT.has_sums:  # no offsets either: the scales' smaller parts
        first, second = _row_words(scales, ROW, ROWS, WARPS)
        s0, m0 = _duplicated(first.broadcast_to([ROWS, 4]))
        s1, m1 = _duplicated(second.broadcast_to([ROWS, 4]))
        return (s0, s0, s1, s1), (m0, m0, m1, m1)
    elif FORMAT.has_stored_minimums:
        words = scales.load(lane_layout(ROWS, WARPS, "halves")).reshape([ROWS, 4, 2])
        first, second = _two(words, LANE)
        s0, m0 = _duplicated(first)
        s1, m1 = _duplicated(second)
        return (s0, s0, s1, s1), (m0, m0, m1, m1)
    elif FORMAT.has_nibble_scales or FORMAT.has_byte_scales:
        return _byte_scales(scales, deltas, factors, LANE, FORMAT, ROWS, WARPS)
    elif FORMAT.has_block_scales:
        delta = deltas.load(ROW).to(gl.float32).expand_dims(1) * factors.scales
        delta = delta.broadcast_to([ROWS, 4])
        s0 = gl.inline_asm_elementwise(
            _ASM_SCALE, "=r,f", [delta], dtype=gl.int32, is_pure=True, pack=1
        )
        m0 = _zero_point_offset(s0, FORMAT)
        return (s0, s0, s0, s0), (m0, m0, m0, m0)
    else:
        if FORMAT.has_records:  # IQ4_XS
            delta, record = _records(scales, LANE, ROWS, WARPS)
            delta = delta * factors.scales
            s0 = _times(_ASM_CENTRED_SCALE, record & 63, delta)
            s1 = _times(_ASM_CENTRED_SCALE, (record >> 6) & 63, delta)
        else:
            words = scales.load(lane_layout(ROWS, WARPS, "lanes"))
            s0, s1 = _duplicated(gl.convert_layout(words, LANE, assert_trivial=True))
        m0 = _zero_point_offset(s0, FORMAT)
        m1 = _zero_point_offset(s1, FORMAT)
        return (s0, s0, s1, s1), (m0, m0, m1, m1)


@gluon.jit
def _byte_scales(
    scales,
    deltas,
    factors,
    LANE: gl.constexpr,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The same where a byte is for 16 weights: a scale, or a 4-bit scale and a 4-bit minimum."""
    ROW: gl.constexpr = gl.SliceLayout(1, LANE)
    words = scales.load(lane_layout(ROWS, WARPS, "lanes"))
    words = gl.convert_layout(words, LANE, assert_trivial=True)
    if FORMAT.has_nibble_scales:
        pair = deltas.load(ROW).expand_dims(1)
        s0, s1, s2, s3, m0, m1, m2, m3 = gl.inline_asm_elementwise(
            _ASM_NIBBLE_SCALES,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,f,f",
            [words, pair, factors.scales, factors.minimums],
            dtype=(
                gl.int32,
                gl.int32,
                gl.int32,
                gl.int32,
                gl.int32,
                gl.int32,
                gl.int32,
                gl.int32,
            ),
            is_pure=True,
            pack=1,
        )
    else:
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


@gluon.jit
def load_block(
    ring: WeightRing,
    stage,
    factors,
    FORMAT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A block of ROWS rows from shared memory, for `dequantized_quarter`: words, what goes with
    each (odd words, upper bits, signs), scales, offsets (of grids: upper bits of numbers), each a
    tuple of four quarters; and the table. `factors` are gemm.Factors."""
    WORDS: gl.constexpr = lane_layout(ROWS, WARPS, "quarter")
    words, more = _code_words(
        ring.codes.index(stage), ring.high.index(stage), WORDS, FORMAT, ROWS, WARPS
    )
    scales = ring.scales.index(stage)
    deltas = ring.deltas.index(stage)
    if FORMAT.grid != "":
        more, found, upper = _grid_block(scales, deltas, factors, more, WORDS, FORMAT, ROWS, WARPS)
        return words, more, found, upper, ring.table
    else:
        found, offsets = _scales_and_offsets(scales, deltas, factors, WORDS, FORMAT, ROWS, WARPS)
        return words, more, found, offsets, ring.table


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
    scales = _both(block[2][QUARTER], ROWS)
    if FORMAT.has_small_floats:
        inputs = [words, scales]
    elif FORMAT.has_signs:
        inputs = [_both(words, ROWS), scales]
    elif FORMAT.has_signed_points:
        upper = _both(block[3][QUARTER], ROWS)
        inputs = [_both(words, ROWS), _both(more, ROWS), upper, block[4], scales]
    elif FORMAT.has_ternary_points:
        inputs = [_both(words, ROWS), _both(more, ROWS), block[4], scales]
    else:
        offsets = _both(block[3][QUARTER], ROWS)
        if FORMAT.code_bits == 8:
            inputs = [words, more, scales, offsets]
        elif FORMAT.code_bits == 2:
            words = _both(words, ROWS)
            if FORMAT.high_bits > 0:
                inputs = [words, _both(more, ROWS), scales, offsets]
            else:
                inputs = [words, scales, offsets]
        elif FORMAT.high_bits > 0:
            inputs = [words, _both(more, ROWS), scales, offsets]
        else:
            inputs = [words, scales, offsets]
    pairs = gl.inline_asm_elementwise(
        _decode_asm(FORMAT, QUARTER),
        _decode_constraints(len(inputs)),
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


@gluon.jit
def dequantized_eighth(word, scale, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """Of MXFP4: one word of each lane, which comes twice to the assembler code, as [ROWS, 32]."""
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        _floats_asm(1),
        "=r,=r,=r,=r,r,r,r,r",
        [_both(word, ROWS), _both(scale, ROWS)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    x = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    x = x.permute((0, 4, 3, 1, 2)).reshape([ROWS, 32])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _both(x, ROWS: gl.constexpr):
    """[ROWS, lane] for both words of a quarter."""
    return gl.expand_dims(x, 2).broadcast_to([ROWS, 4, 2])


# ---- the table of a grid


@gluon.constexpr_function
def _table_asm(num_words):
    return f"{{ .shared .align 1024 .b8 table[{4 * num_words}]; mov.u32 $0, table; }}"


@gluon.jit
def with_table(ring: WeightRing, grid, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """The ring with the table of the grid's points in shared memory, where the format has one. All
    warps that decode call this.

    Gluon has no loads of single elements of shared memory, so the table is declared and read by
    assembler code. It lies before what Gluon allocates; multiples of 1024 bytes keep that aligned.
    """
    if FORMAT.table_words == 0:
        return ring
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        table = gl.inline_asm_elementwise(
            _table_asm(FORMAT.table_words), "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        at = gl.arange(0, FORMAT.table_words, layout=LAYOUT)
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,r,r",
            [table + at * 4, gl.load(grid + at)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        gl.thread_barrier()
        return WeightRing(
            ring.codes, ring.high, ring.scales, ring.deltas, ring.full, ring.empty, table
        )
