"""Plain Triton: planes decoded without haste. The embedding's rows, and the product where there is
no Hopper GPU; Triton's interpreter runs it on a CPU."""

# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM109

import triton
import triton.language as tl

# What the kernels call the formats.
FLOAT = 16
FORMAT_CODES = {"Q4_0": 40, "Q4_1": 41, "Q4_K": 44, "Q5_K": 55, "Q6_K": 66, "Q8_0": 80}

_Q4_1, _Q4_K, _Q5_K, _Q6_K, _Q8_0 = (
    tl.constexpr(FORMAT_CODES[name]) for name in ("Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
)
_FLOAT = tl.constexpr(FLOAT)
_ONE = tl.constexpr(2.0**-24)  # an integer 1 in a float16's lowest bit


@triton.jit
def _rounded(x):
    """To the nearest float16, as the tensor cores' operand has it."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _from_half_bits(bits):
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scale_and_offset(
    scales, deltas, place, delta, half, lane, steps, up, down, FORMAT: tl.constexpr
):
    """Of each weight, [rows, columns] each: the scale times 2**24, the offset as it is added."""
    if (FORMAT == _Q4_K) or (FORMAT == _Q5_K):
        word = scales + place * 4
        pair = tl.load(word)
        record = (tl.load(word + 1) >> (lane * 8)) & 255
        record |= ((tl.load(word + 2) >> (lane * 8)) & 255) << 8
        record |= ((tl.load(word + 3) >> (lane * 8)) & 255) << 16
        record = record >> (half * 12)
        scale = _rounded(_from_half_bits(pair) * up * (record & 63).to(tl.float32))
        offset = -_rounded(_from_half_bits(pair >> 16) * down * ((record >> 6) & 63).to(tl.float32))
    elif FORMAT == _Q4_1:
        word = tl.load(scales + place * 8 + lane * 2 + half)
        scale = _from_half_bits(word)
        offset = _from_half_bits(word >> 16)
    elif FORMAT == _Q6_K:
        word = tl.load(scales + place * 4 + lane)
        group = ((word >> (8 * (half * 2 + steps))) << 24) >> 24
        scale = _rounded(tl.load(deltas + delta).to(tl.float32) * up * group.to(tl.float32))
        offset = scale * (-32.0 * _ONE)
    else:
        word = tl.load(scales + place * 4 + lane)
        scale = _from_half_bits(word >> (16 * half))
        ZERO: tl.constexpr = 128.0 if FORMAT == _Q8_0 else 8.0
        offset = scale * (-ZERO * _ONE)
    return scale, offset


@triton.jit
def two_bits_place(pair):
    """Where planes.py keeps the upper two bits of a quarter's pair 0-7: even pairs at 4, 6, 12, 14,
    odd ones at 8, 10, 0, 2."""
    return (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16


@triton.jit
def one_bit_place(pair, steps):
    """Where the upper bit is: even pairs from bit 4 on, odd ones from bit 8 on, the second half of
    the steps eight bits further on."""
    return (4 + 4 * (pair % 2) + pair // 2 + 8 * steps) % 16


@triton.jit
def _quants(quants, high, place, half, lane, steps, pair, one, FORMAT: tl.constexpr):
    if FORMAT == _Q8_0:
        word = tl.load(quants + place * 64 + lane * 16 + half * 8 + steps * 4 + pair // 2)
        quant = (word >> (16 * (pair % 2) + 8 * one)) & 255
    else:
        word = tl.load(quants + place * 32 + lane * 8 + half * 4 + steps * 2 + pair // 4)
        quant = (word >> (4 * (pair % 4) + 16 * one)) & 15
        if FORMAT == _Q6_K:
            word = tl.load(high + place * 16 + lane * 4 + half * 2 + steps)
            quant |= ((word >> (two_bits_place(pair) + 16 * one)) & 3) << 4
        elif FORMAT == _Q5_K:
            word = tl.load(high + place * 8 + lane * 2 + half)
            quant |= ((word >> (one_bit_place(pair, steps) + 16 * one)) & 1) << 4
    return quant.to(tl.float32)


@triton.jit
def decoded_block(
    quants, high, scales, deltas, rows, block, num_rows, num_blocks, up, down, FORMAT: tl.constexpr
):
    """Weights [rows, 256] of one block of columns, divided by 2**exponent, in operand order.

    `rows` must be in the matrix; `up` is 2**(24 - exponent), `down` 2**-exponent.
    """
    column = tl.arange(0, 256)[None, :]
    if FORMAT == _FLOAT:
        place = rows[:, None].to(tl.int64) * (num_blocks * 256) + block * 256 + column
        weights = tl.load(quants + place).to(tl.float32)
    else:
        half = column // 128
        step = column % 128 // 16
        lane = column // 2 % 4
        one = column % 2
        steps = step // 4
        pair = step % 4 * 2 + column // 8 % 2
        place = (block * num_rows + rows[:, None]).to(tl.int64)
        delta = (block * ((num_rows + 7) // 8 * 8) + rows[:, None]).to(tl.int64)
        scale, offset = _scale_and_offset(
            scales, deltas, place, delta, half, lane, steps, up, down, FORMAT
        )
        quant = _quants(quants, high, place, half, lane, steps, pair, one, FORMAT)
        weights = _rounded(quant * _ONE * scale + offset)
    return weights


@triton.jit
def embed(
    tokens,
    sources,
    samples,
    out,
    quants,
    high,
    scales,
    deltas,
    num_rows,
    num_blocks,
    up,
    down,
    factor,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each token's row of the embedding. A source of 0 or more is a place in `samples`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0)
    source = tl.load(sources + at)
    token = tl.load(tokens + at)
    token = tl.where(source >= 0, tl.load(samples + tl.maximum(source, 0)), token)
    rows = token + tl.zeros([1], tl.int32)
    block = tl.program_id(1)
    weights = decoded_block(
        quants, high, scales, deltas, rows, block, num_rows, num_blocks, up, down, FORMAT
    )
    width = num_blocks * 256
    place = at.to(tl.int64) * width + block * 256 + tl.arange(0, 256)[None, :]
    tl.store(out + place, weights * factor)


@triton.jit
def product(
    tokens,
    out,
    quants,
    high,
    scales,
    deltas,
    bias,
    up,
    down,
    factor,
    num_tokens,
    num_rows,
    num_blocks,
    token_stride,
    row_stride,
    part_stride,
    BO: tl.constexpr,
    NT: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out[part, token, row]; EXACT multiplies in float32, which interpreters get right."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    count = num_blocks // parts + tl.where(part < num_blocks % parts, 1, 0)
    first = part * (num_blocks // parts) + tl.minimum(part, num_blocks % parts)
    row = tile * BO + tl.arange(0, BO)
    known = tl.minimum(row, num_rows - 1)
    token = tl.program_id(2) * NT + tl.arange(0, NT)
    column = tl.arange(0, 256)
    sums = tl.zeros([BO, NT], tl.float32)
    for block in range(first, first + count):
        weights = decoded_block(
            quants, high, scales, deltas, known, block, num_rows, num_blocks, up, down, FORMAT
        )
        place = token[None, :].to(tl.int64) * token_stride + block * 256 + column[:, None]
        x = tl.load(tokens + place, mask=(token < num_tokens)[None, :], other=0.0)
        if EXACT:
            sums = tl.dot(weights, x.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(weights.to(tl.float16), x, sums)
    sums *= factor
    if BIAS:
        value = tl.load(bias + known)
        sums += tl.where(part == 0, value, 0.0)[:, None]
    mask = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    place = (
        part.to(tl.int64) * part_stride + token[None, :].to(tl.int64) * row_stride + row[:, None]
    )
    tl.store(out + place, sums, mask=mask)


@triton.jit
def gate(
    sums, out, width, sum_stride, out_stride, shrink, IN_TURNS: tl.constexpr, BLOCK: tl.constexpr
):
    """silu(gate) * value: in turns of eight, or all gates before all values."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if IN_TURNS:
        row = token * sum_stride + at // 8 * 16 + at % 8
        distance = 8
    else:
        row = token * sum_stride + at
        distance = width
    gates = tl.load(sums + row, mask=at < width, other=0.0)
    values = tl.load(sums + row + distance, mask=at < width, other=0.0)
    gated = gates / (1.0 + tl.exp(-gates)) * values
    gated = tl.minimum(tl.maximum(gated * shrink, -65504.0), 65504.0)
    tl.store(out + token * out_stride + at, gated.to(tl.float16), mask=at < width)
