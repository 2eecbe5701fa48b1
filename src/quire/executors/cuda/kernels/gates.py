"""Gates on what attention leaves, and on what the heads of a state leave."""

# ruff: noqa: N803

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.attention import operand_column


class Sums(NamedTuple):
    """What a GEMM leaves: float32 [split, token, row]; its splits are added in order."""

    array: Any
    split_stride: Any
    row_stride: Any  # of a token


@triton.jit
def begin(PDL: tl.constexpr):
    """Allow the next kernel to start, then wait for the previous one to end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def summed(sums, token, row, mask, SPLITS: tl.constexpr):
    """A token's rows of Sums; 0 where they are masked."""
    address = sums.array + token * sums.row_stride + row
    total = tl.load(address, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(address + split * sums.split_stride, mask=mask, other=0.0)
    return total


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_attention(
    heads,
    sums,
    first,
    size,
    stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """heads[token] *= sigmoid of rows `first` to `first + size` of the sums, in place; `heads` are
    `stride` long and in operand order. One program: a token and BLOCK columns."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = sigmoid(summed(sums, token, first + column, inside, SPLITS))
    address = heads + token * stride + operand_column(column)
    gated = tl.load(address, mask=inside, other=0.0).to(tl.float32) * gate
    tl.store(address, gated.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def _unit_mean(x, inside, size, epsilon):
    """Rows of which the mean square is one."""
    mean = tl.sum(tl.where(inside, x * x, 0.0), axis=1) / size
    return x * (1.0 / tl.sqrt(mean + epsilon))[:, None]


@triton.jit
def gate_heads(
    heads,
    sums,
    weights,
    out,
    first,
    heads_stride,
    out_stride,
    epsilon,
    SPAN: tl.constexpr,
    NUM_SPANS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a state's heads leave, times silu of rows `first` on of the sums, in operand order. Each
    span of SPAN numbers is normed: by `weights` [SPAN] before the gate with NORM_FIRST, else after
    it by `weights` [spans, SPAN]; without weights it is not. One program: a token and SPANS spans.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    inside = (span < NUM_SPANS) & (place < SPAN)
    column = span * SPAN + place
    x = tl.load(heads + token * heads_stride + column, mask=inside, other=0.0)
    gate = summed(sums, token, first + column, inside, SPLITS)
    gate = gate * sigmoid(gate)
    if weights is None:
        x = x * gate
    elif NORM_FIRST:
        weight = tl.load(weights + place, mask=place < SPAN, other=0.0)
        x = _unit_mean(x, inside, SPAN, epsilon) * weight * gate
    else:
        weight = tl.load(weights + column, mask=inside, other=0.0)
        x = _unit_mean(x * gate, inside, SPAN, epsilon) * weight
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    address = out + token * out_stride + operand_column(column)
    tl.store(address, x.to(out.dtype.element_ty), mask=inside)
