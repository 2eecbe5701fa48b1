"""Plain Triton kernels over planes: the embedding's rows, the GEMM for GPUs other than Hopper,
and gating as a kernel of its own. Triton's interpreter runs them on a CPU.

FORMAT is a planes.PlaneFormat; ROWS and TOKENS are a program's tile of the output.
"""

# ruff: noqa: N803

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.activations import activated, gated, xielu
from quire.executors.cuda.kernels.plain_dequantize import dequantized_half


class LearnedPositions(NamedTuple):
    """Vectors that are added to tokens' by position."""

    positions: Any  # of tokens
    vectors: Any  # float32 [position, width], in operand order


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
    learned,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDED: tl.constexpr = True,
):
    """Each token's row of the embedding. A source of 0 or more is an index into `samples`, where
    the token is. `learned` is LearnedPositions, or None. ROUNDED: to float16, as a GEMM has its
    weights."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0)
    source = tl.load(sources + at)
    token = tl.load(tokens + at)
    token = tl.where(source >= 0, tl.load(samples + tl.maximum(source, 0)), token)
    rows = token + tl.zeros([1], tl.int32)
    width = num_blocks * 256
    for half in range(2):
        part = tl.program_id(1) * 2 + half
        weights = dequantized_half(
            planes, factors, rows, part, num_rows, num_blocks, FORMAT, ROUNDED
        )
        column = part * 128 + tl.arange(0, 128)[None, :]
        made = weights.to(tl.float32) * factors.sums
        if learned is not None:
            position = tl.load(learned.positions + at).to(tl.int64)
            made += tl.load(learned.vectors + position * width + column)
        tl.store(out + at.to(tl.int64) * width + column, made)


@triton.jit
def multiplied(weights, x, sums, EXACT: tl.constexpr):
    """sums + weights times x; EXACT: in float32, for the interpreter."""
    if EXACT:
        sums = tl.dot(weights.to(tl.float32), x.to(tl.float32), sums, input_precision="ieee")
    else:
        sums = tl.dot(weights, x, sums)
    return sums


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
    column = tl.arange(0, 128)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for part in range(2 * first, 2 * (first + count)):
        weights = dequantized_half(planes, factors, known, part, num_rows, num_blocks, FORMAT)
        index = token[None, :].to(tl.int64) * token_stride + part * 128 + column[:, None]
        x = tl.load(tokens + index, mask=(token < num_tokens)[None, :], other=0.0)
        sums = multiplied(weights, x, sums, EXACT)
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
    numbers,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """activation(gate) * up * factor. INTERLEAVED: eight gates, then their eight ups, and so on;
    otherwise all gates come before all ups. Where not GATED, activation(up) * factor. `numbers` are
    XieluNumbers, or None."""
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
    elif ACTIVATION == "xielu":
        product = xielu(gates, numbers)
    else:
        product = activated(gates, ACTIVATION)
    product = tl.minimum(tl.maximum(product * factor, -65504.0), 65504.0)
    tl.store(out + token * out_stride + at, product.to(tl.float16), mask=at < width)
