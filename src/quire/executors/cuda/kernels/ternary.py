"""Plain Triton kernels of BitNet models: activations to int8, and the GEMM of ternary weights for
GPUs other than Hopper. Triton's interpreter runs them on a CPU.

A token's activations are int8 codes with one scale, `units`: how many of them make 1. A GEMM leaves
sums of codes times ternary weights; whoever reads them divides by the token's units and multiplies
by the matrix's scale, in this order, as the reference executor does.
"""

# ruff: noqa: N803, RET505

from typing import Any, NamedTuple

import triton
import triton.language as tl

_LARGEST = tl.constexpr(127.0)
_SMALLEST_RANGE = tl.constexpr(1e-5)  # activations below it are not stretched further

# Where `norm_and_quantize` takes its vectors from.
VECTORS, SUMS, GATED = 0, 1, 2
_SUMS = tl.constexpr(SUMS)
_GATED = tl.constexpr(GATED)


class Source(NamedTuple):
    """What `norm_and_quantize` reads, besides the units.

    VECTORS: `vectors`. SUMS: `vectors`, to which a GEMM's `sums` times `scale` are added and kept.
    GATED: `sums` of gates, times `scale`, and of values, times `value_scale`.
    """

    vectors: Any  # float32 [token, width]
    sums: Any  # float32 [split, token, rows]
    split_stride: Any
    scale: Any
    value_scale: Any


class Target(NamedTuple):
    """What it writes."""

    codes: Any  # int8 [token, width]
    units: Any  # float32 [token]
    halves: Any  # float16 [token, width], where OUTPUT_HALVES
    finite: Any  # int32 [token], likewise


@triton.jit
def _added(sums, index, stride, inside, SPLITS: tl.constexpr):
    total = tl.load(sums + index, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + split * stride + index, mask=inside, other=0.0)
    return total


@triton.jit
def _activated(x, SQUARED_RELU: tl.constexpr):
    if SQUARED_RELU:
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def norm_and_quantize(
    source,
    weight,
    target,
    width,
    size,
    epsilon,
    SOURCE: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARED_RELU: tl.constexpr,
    NORM: tl.constexpr,
    OUTPUT_HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A vector of each token, RMS-normed where NORM, to codes and units; or to float16, for the
    head. One program a token. `size` is the number of columns without padding, which is zero."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    index = token * width + column
    if NORM:
        scales = tl.load(weight + column, mask=inside, other=0.0)
    if SOURCE == _SUMS:  # the state comes from the norm before, which has ended
        x = tl.load(source.vectors + index, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SOURCE == _SUMS:
        unit = tl.load(target.units + token)
        added = _added(source.sums, index, source.split_stride, inside, SPLITS)
        x += tl.div_rn(added, unit) * source.scale
        tl.store(source.vectors + index, x, mask=inside)
    elif SOURCE == _GATED:
        unit = tl.load(target.units + token)
        row = token * (2 * width) + column
        gates = _added(source.sums, row, source.split_stride, inside, SPLITS)
        values = _added(source.sums, row + width, source.split_stride, inside, SPLITS)
        gates = tl.div_rn(gates, unit) * source.scale
        values = tl.div_rn(values, unit) * source.value_scale
        x = _activated(gates, SQUARED_RELU) * values
    else:
        x = tl.load(source.vectors + index, mask=inside, other=0.0)
    normed = x
    if NORM:
        mean = tl.sum(x * x, axis=0) / size
        normed = x * (1.0 / tl.sqrt_rn(mean + epsilon)) * scales
    if OUTPUT_HALVES:
        normed = tl.minimum(tl.maximum(normed, -65504.0), 65504.0)
        tl.store(target.halves + index, normed.to(tl.float16), mask=inside)
        not_finite = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0)
        tl.store(target.finite + token, 1 - not_finite)
    else:
        # What is not finite makes the units zero, and every sum divided by them not finite.
        sizes = tl.where(tl.abs(normed) < float("inf"), tl.abs(normed), float("inf"))
        largest = tl.maximum(tl.max(sizes, axis=0), _SMALLEST_RANGE)
        unit = tl.div_rn(tl.full([], _LARGEST, tl.float32), largest)
        sizes = tl.abs(normed * unit)
        whole = tl.floor(sizes)
        whole += tl.where(sizes - whole >= 0.5, 1.0, 0.0)  # half away from zero
        codes = tl.minimum(tl.where(normed < 0.0, -whole, whole), _LARGEST)
        tl.store(target.codes + index, codes.to(tl.int8), mask=inside)
        tl.store(target.units + token, unit)


@triton.jit
def gemm(
    tokens,
    out,
    words,
    scales,
    num_tokens,
    num_rows,
    num_blocks,
    token_stride,
    row_stride,
    split_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
):
    """out[split, token, row], as in kernels/hopper_ternary.py."""
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    count = num_blocks // num_splits + tl.where(split < num_blocks % num_splits, 1, 0)
    first = split * (num_blocks // num_splits) + tl.minimum(split, num_blocks % num_splits)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, num_rows - 1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, 256)
    # Column 64 q + 16 j + 4 t + i is in word 4 t + q, at bit 8 i + 6 - 2 j.
    word = column // 4 % 4 * 4 + column // 64
    shift = 24 - 8 * (column % 4) + 2 * (column // 16 % 4)
    if BLOCK_SCALES:
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        sums = tl.zeros([ROWS, TOKENS], tl.int32)
    for block in range(first, first + count):
        index = (block * num_rows + known[:, None]).to(tl.int64) * 16 + word[None, :]
        weights = ((tl.load(words + index) << shift[None, :]) >> 30).to(tl.int8)
        index = token[None, :].to(tl.int64) * token_stride + block * 256 + column[:, None]
        x = tl.load(tokens + index, mask=(token < num_tokens)[None, :], other=0)
        if BLOCK_SCALES:
            padded_rows = (num_rows + 7) // 8 * 8
            scale = tl.load(scales + (block * padded_rows + known).to(tl.int64)).to(tl.float32)
            products = tl.dot(weights, x, out_dtype=tl.int32).to(tl.float32)
            sums = tl.fma(tl.broadcast_to(scale[:, None], [ROWS, TOKENS]), products, sums)
        else:
            sums = tl.dot(weights, x, sums, out_dtype=tl.int32)
    mask = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    index = (
        split.to(tl.int64) * split_stride + token[None, :].to(tl.int64) * row_stride + row[:, None]
    )
    tl.store(out + index, sums.to(tl.float32), mask=mask)
