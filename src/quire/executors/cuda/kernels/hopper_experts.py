"""The grouped GEMM of a mixture of experts on Hopper's tensor cores, in Gluon.

A program is one of kernels/hopper_gemm.py whose rows of weights are an expert's and whose tokens
are rows of pairs, sorted by expert (see kernels/experts.py); which ones, it reads from a list of
tiles. Programs past the end of the list end at once.

Constants of a launch: TILING is a gemm.Tiling, FORMAT a planes.PlaneFormat.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.executors.cuda.kernels.activations import gated
from quire.executors.cuda.kernels.dequantize import WeightRing
from quire.executors.cuda.kernels.experts import Pairs, Tiles
from quire.executors.cuda.kernels.hopper import allow_next_kernel, wait_for_previous_kernel
from quire.executors.cuda.kernels.hopper_gemm import (
    DEPENDENT,
    SERIAL,
    PlaneDescriptors,
    TokenRing,
    allocate_rings,
    load_tokens,
    load_weights,
    step_columns,
    summed,
    sums_layout,
)

_SERIAL = gl.constexpr(SERIAL)
_DEPENDENT = gl.constexpr(DEPENDENT)


class ExpertTile(NamedTuple):
    """What a program computes."""

    row_tile: Any
    expert_row: Any  # the expert's first row of weights
    first: Any  # the first row of pairs
    count: Any  # of rows of pairs
    num_steps: Any  # a step is the columns of a stage of weights


class ExpertOutput(NamedTuple):
    """What the epilogue reads and writes."""

    out: Any
    bias: Any
    sum_factor: Any
    gated_factor: Any
    pairs: Any
    rows_per_expert: Any
    stride: Any  # of a row of pairs; of a slot


@gluon.jit
def _store_gated(
    sums, tile: ExpertTile, output: ExpertOutput, TILING: gl.constexpr, ACTIVATION: gl.constexpr
):
    """Of 16 rows eight are gates and eight are values, in one thread."""
    ROWS: gl.constexpr = TILING.rows
    TOKENS: gl.constexpr = TILING.tokens
    HALF: gl.constexpr = ROWS // 2
    STORED: gl.constexpr = gl.BlockedLayout(
        [8, 1], [HALF // 8, 32 // (HALF // 8)], [1, TILING.warps], [0, 1]
    )
    gates, ups = gl.split(sums.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    product = gated(gates, ups, ACTIVATION)
    product = product.reshape([HALF, TOKENS]) * output.gated_factor
    product = gl.minimum(gl.maximum(product, -65504.0), 65504.0).to(gl.float16)
    product = gl.convert_layout(product, STORED)
    row = tile.row_tile * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    lane = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORED))
    mask = (lane < tile.count)[None, :] & (row < output.rows_per_expert // 2)[:, None]
    index = (tile.first + lane)[None, :].to(gl.int64) * output.stride + row[:, None]
    gl.store(output.out + index, product, mask=mask)


@gluon.jit
def _store_weighed(
    sums, tile: ExpertTile, output: ExpertOutput, TILING: gl.constexpr, USED: gl.constexpr
):
    """Times the pair's weight, to its slot and token."""
    MMA: gl.constexpr = sums_layout(TILING)
    lane = gl.arange(0, TILING.tokens, layout=gl.SliceLayout(0, MMA))
    row = tile.row_tile * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, MMA))
    is_row = lane < tile.count
    pair = gl.load(output.pairs.of_row + tile.first + lane, mask=is_row, other=0)
    sums = sums * gl.load(output.pairs.weights + pair, mask=is_row, other=0.0).expand_dims(0)
    to = (pair % USED).to(gl.int64) * output.stride
    to += (pair // USED).to(gl.int64) * output.rows_per_expert
    mask = is_row[None, :] & (row < output.rows_per_expert)[:, None]
    gl.store(output.out + to[None, :] + row[:, None], sums, mask=mask)


@gluon.jit
def _multiply(
    weights: WeightRing,
    tokens: TokenRing,
    factors,
    tile: ExpertTile,
    output: ExpertOutput,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    OPTION: gl.constexpr,
):
    """OPTION: the activation where GATED, else how many experts a token uses."""
    MMA: gl.constexpr = sums_layout(TILING)
    sums = summed(weights, tokens, factors, tile.num_steps, TILING, FORMAT) * output.sum_factor
    if BIAS:
        row = tile.row_tile * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, MMA))
        mask = row < output.rows_per_expert
        value = gl.load(output.bias + tile.expert_row + row, mask=mask, other=0.0)
        sums = sums + value.expand_dims(1)
    if GATED:
        _store_gated(sums, tile, output, TILING, OPTION)
    else:
        _store_weighed(sums, tile, output, TILING, OPTION)


@gluon.jit(do_not_specialize=["num_blocks"])
def expert_gemm(
    token_desc,
    code_desc,
    high_desc,
    scale_desc,
    delta_desc,
    out,
    bias,
    factors,
    gated_factor,
    tiles: Tiles,
    pairs: Pairs,
    rows_per_expert,
    used_rows,
    num_rows,
    num_blocks,
    stride,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    OPTION: gl.constexpr,
    PDL: gl.constexpr,
):
    """GATED: out[row of pairs, i] = gated(gate i, value i) * gated_factor, of the token's row.
    Otherwise out[slot, token, i] = the pair's weight times row i. `factors` are gemm.Factors.

    The list of tiles comes from the kernel before the gated GEMM: that one waits for it, and the
    other finds it there when it starts, and loads weights at once.
    """
    if GATED and PDL:
        wait_for_previous_kernel()
        allow_next_kernel()
    index = gl.program_id(1)
    if index >= gl.load(tiles.total):
        return
    row_tile = gl.program_id(0)
    expert_row = gl.load(tiles.expert + index) * rows_per_expert
    first = gl.load(tiles.row + index)
    first_token = first
    if GATED:
        first_token = gl.load(tiles.token + index)
    STEP: gl.constexpr = step_columns(TILING, FORMAT)
    LAUNCH: gl.constexpr = _SERIAL if GATED or not PDL else _DEPENDENT
    # Rows of padding are zeros, and so is their sum over any columns: one block of them will do.
    blocks = gl.where(row_tile * TILING.rows < used_rows, num_blocks, 1)
    num_steps = blocks * (256 // STEP)
    planes = PlaneDescriptors(code_desc, high_desc, scale_desc, delta_desc)
    weights, tokens = allocate_rings(token_desc, planes, TILING, FORMAT)
    tile = ExpertTile(row_tile, expert_row, first, gl.load(tiles.count + index), num_steps)
    output = ExpertOutput(out, bias, factors.sums, gated_factor, pairs, rows_per_expert, stride)
    weight_row = expert_row + row_tile * TILING.rows
    num_stages = num_steps * (STEP // TILING.columns)
    gl.warp_specialize(
        [
            (
                _multiply,
                (weights, tokens, factors, tile, output, TILING, FORMAT, GATED, BIAS, OPTION),
            ),
            (
                load_weights,
                (planes, weights, 0, num_steps, weight_row, num_rows, TILING, FORMAT),
            ),
            (
                load_tokens,
                (token_desc, tokens, 0, num_stages, first_token, TILING, LAUNCH),
            ),
        ],
        [1, 1],
        [24, 24],
    )
