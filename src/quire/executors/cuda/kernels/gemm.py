"""Plain Triton kernels over planes: the embedding's rows, the GEMM for GPUs other than Hopper,
and gating as a kernel of its own. Triton's interpreter runs them on a CPU.

FORMAT is a planes.PlaneFormat; ROWS and TOKENS are a program's tile of the output.
"""

# ruff: noqa: N803

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.activations import activated, gated

_ONE = tl.constexpr(2.0**-24)  # an integer 1 in a float16's lowest bit


class PlanePointers(NamedTuple):
    """A matrix's planes; one that its format lacks repeats `codes`."""

    codes: Any
    high: Any
    scales: Any
    deltas: Any


class Factors(NamedTuple):
    """Powers of two that undo how planes are scaled (see planes.py)."""

    scales: Any  # 2**(24 - exponent), times each scale
    minimums: Any  # 2**-exponent, times each minimum
    sums: Any  # 2**exponent, times each sum


@triton.jit
def _rounded(x, ROUNDED: tl.constexpr):
    """To the nearest float16, as the tensor cores' operand has it; where not ROUNDED, as it is."""
    if ROUNDED:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _from_half_bits(bits):
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scale_and_offset(
    planes: PlanePointers,
    factors: Factors,
    index,
    delta,
    half,
    lane,
    steps,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Of each weight, [rows, columns] each: the scale times 2**24, the offset as it is added."""
    if FORMAT.has_packed_scales:
        word = planes.scales + index * 4
        pair = tl.load(word)
        record = (tl.load(word + 1) >> (lane * 8)) & 255
        record |= ((tl.load(word + 2) >> (lane * 8)) & 255) << 8
        record |= ((tl.load(word + 3) >> (lane * 8)) & 255) << 16
        record = record >> (half * 12)
        block_scale = _from_half_bits(pair) * factors.scales
        scale = _rounded(block_scale * (record & 63).to(tl.float32), ROUNDED)
        block_minimum = _from_half_bits(pair >> 16) * factors.minimums
        offset = -_rounded(block_minimum * ((record >> 6) & 63).to(tl.float32), ROUNDED)
    elif FORMAT.has_stored_minimums:
        word = tl.load(planes.scales + index * 8 + lane * 2 + half)
        scale = _from_half_bits(word)
        offset = _from_half_bits(word >> 16)
    elif FORMAT.has_powers:
        field = (tl.load(planes.scales + delta * 2 + half) >> (lane * 8)) & 255
        scale = _from_half_bits(field << 10)
        offset = 0.0
    elif FORMAT.has_deltas:
        word = tl.load(planes.scales + index * 4 + lane)
        group = ((word >> (8 * (half * 2 + steps))) << 24) >> 24
        block_scale = tl.load(planes.deltas + delta).to(tl.float32) * factors.scales
        scale = _rounded(block_scale * group.to(tl.float32), ROUNDED)
        offset = scale * (-FORMAT.zero_point * _ONE)
    else:
        word = tl.load(planes.scales + index * 4 + lane)
        scale = _from_half_bits(word >> (16 * half))
        offset = scale * (-FORMAT.zero_point * _ONE)
    return scale, offset


@triton.jit
def two_bits_shift(pair):
    """The bit at which planes.py keeps the upper two bits of a quarter's pair 0-7: even pairs at 4,
    6, 12, 14, odd ones at 8, 10, 0, 2."""
    return (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16


@triton.jit
def one_bit_shift(pair, steps):
    """The same for one upper bit: even pairs from bit 4 on, odd ones from bit 8 on, the second half
    of the steps eight bits further on."""
    return (4 + 4 * (pair % 2) + pair // 2 + 8 * steps) % 16


@triton.jit
def _small_float(bits, place):
    """MXFP4's value times 2**10, of the pair at this place of a word (see planes.FLOAT_SHIFTS)."""
    upper = place // 2 % 2  # places 2 and 3
    lower = place % 2
    code = (bits >> tl.where(upper == 1, 4 + 8 * lower, 9 - 8 * lower)) & 7
    sign = (bits >> tl.where(upper == 1, 8 - 8 * lower, 15 - 8 * lower)) & 1
    doubled = tl.where(code < 2, code, (2 + code % 2) << (tl.maximum(code // 2, 1) - 1))
    return tl.where(sign == 1, -doubled, doubled).to(tl.float32) * 512.0


@triton.jit
def _codes(planes: PlanePointers, index, half, lane, steps, pair, one, FORMAT: tl.constexpr):
    if FORMAT.code_bits == 8:
        word = tl.load(planes.codes + index * 64 + lane * 16 + half * 8 + steps * 4 + pair // 2)
        code = (word >> (16 * (pair % 2) + 8 * one)) & 255
    else:
        word = tl.load(planes.codes + index * 32 + lane * 8 + half * 4 + steps * 2 + pair // 4)
        if FORMAT.has_powers:
            return _small_float(word >> (16 * one), pair % 4)
        code = (word >> (4 * (pair % 4) + 16 * one)) & 15
        if FORMAT.high_bits == 2:
            word = tl.load(planes.high + index * 16 + lane * 4 + half * 2 + steps)
            code |= ((word >> (two_bits_shift(pair) + 16 * one)) & 3) << 4
        elif FORMAT.high_bits == 1:
            word = tl.load(planes.high + index * 8 + lane * 2 + half)
            code |= ((word >> (one_bit_shift(pair, steps) + 16 * one)) & 1) << 4
    return code.to(tl.float32)


@triton.jit
def dequantized_block(
    planes: PlanePointers,
    factors: Factors,
    rows,
    block,
    num_rows,
    num_blocks,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr = True,
):
    """Weights [rows, 256] of one block of columns, divided by 2**exponent, in operand order. `rows`
    must be in the matrix."""
    column = tl.arange(0, 256)[None, :]
    if FORMAT.is_float:
        index = rows[:, None].to(tl.int64) * (num_blocks * 256) + block * 256 + column
        weights = tl.load(planes.codes + index).to(tl.float32)
    else:
        half = column // 128
        step = column % 128 // 16
        lane = column // 2 % 4
        one = column % 2
        steps = step // 4
        pair = step % 4 * 2 + column // 8 % 2
        index = (block * num_rows + rows[:, None]).to(tl.int64)
        delta = (block * ((num_rows + 7) // 8 * 8) + rows[:, None]).to(tl.int64)
        scale, offset = _scale_and_offset(
            planes, factors, index, delta, half, lane, steps, FORMAT, ROUNDED
        )
        code = _codes(planes, index, half, lane, steps, pair, one, FORMAT)
        weights = _rounded(code * _ONE * scale + offset, ROUNDED)
    return weights


@triton.jit
def embed(
    tokens,
    sources,
    samples,
    out,
    planes,
    num_rows,
    num_blocks,
    factors,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDED: tl.constexpr = True,
):
    """Each token's row of the embedding. A source of 0 or more is an index into `samples`, where
    the token is. ROUNDED: to float16, as a GEMM has its weights."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0)
    source = tl.load(sources + at)
    token = tl.load(tokens + at)
    token = tl.where(source >= 0, tl.load(samples + tl.maximum(source, 0)), token)
    rows = token + tl.zeros([1], tl.int32)
    block = tl.program_id(1)
    weights = dequantized_block(planes, factors, rows, block, num_rows, num_blocks, FORMAT, ROUNDED)
    width = num_blocks * 256
    index = at.to(tl.int64) * width + block * 256 + tl.arange(0, 256)[None, :]
    tl.store(out + index, weights * factors.sums)


@triton.jit
def gemm(
    tokens,
    out,
    planes,
    bias,
    factors,
    num_tokens,
    num_rows,
    num_blocks,
    token_stride,
    row_stride,
    split_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out[split, token, row], as in kernels/hopper_gemm.py. EXACT multiplies in float32, for
    Triton's interpreter."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    count = num_blocks // num_splits + tl.where(split < num_blocks % num_splits, 1, 0)
    first = split * (num_blocks // num_splits) + tl.minimum(split, num_blocks % num_splits)
    row = tile * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, num_rows - 1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, 256)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(first, first + count):
        weights = dequantized_block(planes, factors, known, block, num_rows, num_blocks, FORMAT)
        index = token[None, :].to(tl.int64) * token_stride + block * 256 + column[:, None]
        x = tl.load(tokens + index, mask=(token < num_tokens)[None, :], other=0.0)
        if EXACT:
            sums = tl.dot(weights, x.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(weights.to(tl.float16), x, sums)
    sums *= factors.sums
    if BIAS:
        value = tl.load(bias + known)
        sums += tl.where(split == 0, value, 0.0)[:, None]
    mask = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    index = (
        split.to(tl.int64) * split_stride + token[None, :].to(tl.int64) * row_stride + row[:, None]
    )
    tl.store(out + index, sums, mask=mask)


@triton.jit
def gate(
    sums,
    out,
    width,
    sum_stride,
    out_stride,
    factor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """activation(gate) * up * factor. INTERLEAVED: eight gates, then their eight ups, and so on;
    otherwise all gates come before all ups. Where not GATED, activation(up) * factor."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if INTERLEAVED:
        row = token * sum_stride + at // 8 * 16 + at % 8
        distance = 8
    else:
        row = token * sum_stride + at
        distance = width
    gates = tl.load(sums + row, mask=at < width, other=0.0)
    if GATED:
        ups = tl.load(sums + row + distance, mask=at < width, other=0.0)
        product = gated(gates, ups, ACTIVATION)
    else:
        product = activated(gates, ACTIVATION)
    product = tl.minimum(tl.maximum(product * factor, -65504.0), 65504.0)
    tl.store(out + token * out_stride + at, product.to(tl.float16), mask=at < width)
