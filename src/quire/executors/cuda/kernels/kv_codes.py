"""Keys and values of one byte: codes with one scale for each token and kv head.

int8 codes are integers from -127 to 127. uint8 codes are the bits of a float8 e4m3, -448 to 448;
its two NaN are never written. The scale is the largest magnitude over the largest code: NaN where a
number is not finite, so that the rows that attend to it fail. A token's codes and scales are a
function of its own key and value alone.

Scales are float32 [block, kv head, 2, slot]: of keys, then of values.
"""

# ruff: noqa: N803, N806

import triton
import triton.language as tl

_INT8_MAX = tl.constexpr(127.0)
_E4M3_MAX = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-35)  # below it the scale's inverse would not be finite
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer, the nearest


@triton.jit
def quantized(x, y, CODE: tl.constexpr):
    """Codes of the two halves of each row, and the scale: [rows, columns] twice, [rows, 1]."""
    MAX: tl.constexpr = _INT8_MAX if tl.int8 == CODE else _E4M3_MAX
    size_x = tl.abs(x)
    size_y = tl.abs(y)
    is_finite = (size_x < float("inf")) & (size_y < float("inf"))
    is_row_finite = tl.min(is_finite.to(tl.int32), axis=1)[:, None] == 1
    largest = tl.max(tl.where(is_finite, tl.maximum(size_x, size_y), 0.0), axis=1)[:, None]
    is_coded = is_row_finite & (largest >= _SMALLEST)
    inverse = tl.div_rn(MAX, tl.where(is_coded, largest, 1.0))
    codes_x = _code(tl.where(is_coded, x, 0.0) * inverse, CODE)
    codes_y = _code(tl.where(is_coded, y, 0.0) * inverse, CODE)
    scale = tl.div_rn(largest, MAX)
    return codes_x, codes_y, tl.where(is_row_finite, scale, float("nan"))


@triton.jit
def _code(x, CODE: tl.constexpr):
    """The nearest code, of two the even one."""
    if tl.int8 == CODE:
        code = ((x + _ROUNDER) - _ROUNDER).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = size + 0x7FFFF + ((size >> 20) & 1)
        normal = tl.minimum((rounded >> 20) - (120 << 3), 126)
        subnormal = ((tl.abs(x) * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
        code = tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return code.to(CODE)


@triton.jit
def decoded(code):
    """As bfloat16, which has every code; without the scale."""
    if code.dtype == tl.int8:
        number = code.to(tl.float32)
    else:
        wide = code.to(tl.int32)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return number.to(tl.bfloat16)
