"""The grouped GEMM of a mixture of experts on Hopper's tensor cores, in Gluon.

A program computes tiles as kernels/hopper_gemm.py does, whose rows of weights are an expert's and
whose tokens are rows of pairs, sorted by expert (see kernels/experts.py); which ones, it reads from
a list of tiles. It takes every so many-th tile of the launch, and the loads of the next tile start
while the last one ends. A tile runs the instruction of the smallest size that its tokens fit: what
it computes of a token is the same in all of them.

Constants of a launch: TILING is a gemm.Tiling, of the largest tiles; NUM_SIZES counts the sizes of
tiles, each twice the one before; FORMAT is a planes.PlaneFormat.
"""

# ruff: noqa: N803, N806, RET505

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.executors.cuda.kernels.dequantize import WeightRing, with_table
from quire.executors.cuda.kernels.experts import Pairs, Tiles
from quire.executors.cuda.kernels.hopper import allow_next_kernel, wait_for_previous_kernel
from quire.executors.cuda.kernels.hopper_gemm import (
    DEPENDENT,
    SERIAL,
    GatedOutput,
    PlaneDescriptors,
    RingPosition,
    TokenRing,
    allocate_rings,
    begin_tokens,
    load_token_stages,
    load_weight_steps,
    step_columns,
    store_gated,
    summed,
    sums_layout,
)

_SERIAL = gl.constexpr(SERIAL)
_DEPENDENT = gl.constexpr(DEPENDENT)


@gluon.constexpr_function
def sized(TILING, NUM_SIZES, size):
    """The tiling of tiles of one size."""
    return TILING._replace(tokens=TILING.tokens >> NUM_SIZES - 1 - size)


@gluon.jit
def has_size(count, TILING: gl.constexpr, NUM_SIZES: gl.constexpr, SIZE: gl.constexpr):
    """Whether this is the smallest size with room for so many tokens."""
    most = TILING.tokens >> NUM_SIZES - 1 - SIZE
    if SIZE == 0:
        return count <= most
    else:
        return (count > most // 2) & (count <= most)


class Work(NamedTuple):
    """What a launch computes: its tiles times the tiles of an expert's rows."""

    tiles: Any
    num_row_tiles: Any
    rows_per_expert: Any
    used_rows: Any
    num_blocks: Any


class ExpertTile(NamedTuple):
    """A part of it that a program computes at once."""

    index: Any  # of its tokens in the list of tiles
    row_tile: Any
    expert_row: Any  # the expert's first row of weights
    count: Any  # of rows of pairs
    num_blocks: Any


class ExpertOutput(NamedTuple):
    """What the epilogue reads and writes."""

    out: Any
    bias: Any
    sum_factor: Any
    gated_factor: Any
    pairs: Any
    stride: Any  # of a row of pairs; of a slot


@gluon.jit
def uniform(x):
    """A loaded value, which is the same in all lanes: so that the assembler knows, too."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def tile_of(work: Work, item, ROWS: gl.constexpr):
    index = item // work.num_row_tiles
    row_tile = item % work.num_row_tiles
    expert_row = uniform(gl.load(work.tiles.expert + index)) * work.rows_per_expert
    # Rows of padding are zeros, and so is their sum over any columns: one block of them will do.
    num_blocks = gl.where(row_tile * ROWS < work.used_rows, work.num_blocks, 1)
    count = uniform(gl.load(work.tiles.count + index))
    return ExpertTile(index, row_tile, expert_row, count, num_blocks)


@gluon.jit
def _load_weights(
    planes: PlaneDescriptors,
    ring: WeightRing,
    work: Work,
    num_items,
    num_rows,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    STEPS: gl.constexpr = 256 // step_columns(TILING, FORMAT)
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = tile_of(work, item, TILING.rows)
        row = tile.expert_row + tile.row_tile * TILING.rows
        stage, phase = load_weight_steps(
            planes, ring, stage, phase, 0, tile.num_blocks * STEPS, row, num_rows, TILING, FORMAT
        )


@gluon.jit
def load_tile_tokens(
    token_descs,
    ring: TokenRing,
    stage,
    phase,
    tile: ExpertTile,
    first,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
):
    """`first`: the tile's first row of tokens. From this stage of the ring on; returns the next one
    and its phase."""
    num_stages = tile.num_blocks * (256 // TILING.columns)
    for size in gl.static_range(NUM_SIZES):
        if has_size(tile.count, TILING, NUM_SIZES, size):
            stage, phase = load_token_stages(
                token_descs[size],
                ring,
                stage,
                phase,
                0,
                num_stages,
                first,
                sized(TILING, NUM_SIZES, size),
            )
    return stage, phase


@gluon.jit
def _load_tokens(
    token_descs,
    ring: TokenRing,
    work: Work,
    num_items,
    firsts,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
    LAUNCH: gl.constexpr,
):
    """`firsts`: of each tile its first row of tokens."""
    begin_tokens(LAUNCH)
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = tile_of(work, item, TILING.rows)
        first = gl.load(firsts + tile.index)
        stage, phase = load_tile_tokens(
            token_descs, ring, stage, phase, tile, first, TILING, NUM_SIZES
        )


@gluon.jit
def _store_weighed(
    sums,
    first_lane: gl.constexpr,
    tile: ExpertTile,
    work: Work,
    output: ExpertOutput,
    TILING: gl.constexpr,
    USED: gl.constexpr,
):
    """Times the pair's weight, to its slot and token: of the tile's tokens from `first_lane` on. In
    halves where registers are few, which the tokens' addresses take."""
    MMA: gl.constexpr = sums_layout(TILING)
    if TILING.parts == 8 and TILING.tokens > 16:
        HALF: gl.constexpr = sized(TILING, 2, 0)
        HALF_MMA: gl.constexpr = sums_layout(HALF)
        both = sums.reshape([TILING.rows, 2, HALF.tokens]).permute((0, 2, 1))
        first, second = gl.split(both)
        first = gl.convert_layout(first, HALF_MMA, assert_trivial=True)
        second = gl.convert_layout(second, HALF_MMA, assert_trivial=True)
        _store_weighed(first, first_lane, tile, work, output, HALF, USED)
        _store_weighed(second, first_lane + HALF.tokens, tile, work, output, HALF, USED)
    else:
        lane = first_lane + gl.arange(0, TILING.tokens, layout=gl.SliceLayout(0, MMA))
        row = tile.row_tile * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, MMA))
        is_row = lane < tile.count
        first = gl.load(work.tiles.row + tile.index)
        pair = gl.load(output.pairs.of_row + first + lane, mask=is_row, other=0)
        sums = sums * gl.load(output.pairs.weights + pair, mask=is_row, other=0.0).expand_dims(0)
        to = (pair % USED).to(gl.int64) * output.stride
        to += (pair // USED).to(gl.int64) * work.rows_per_expert
        mask = is_row[None, :] & (row < work.rows_per_expert)[:, None]
        gl.store(output.out + to[None, :] + row[:, None], sums, mask=mask)


@gluon.jit
def tile_sums(
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    factors,
    tile: ExpertTile,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
):
    """A tile's sums, and the position after it."""
    num_steps = tile.num_blocks * (256 // step_columns(TILING, FORMAT))
    return summed(weights, tokens, at, factors, num_steps, TILING, FORMAT, True, ENDS_IN_HALF)


@gluon.jit
def store_tile(
    sums,
    tile: ExpertTile,
    work: Work,
    output: ExpertOutput,
    TILING: gl.constexpr,
    GATED: gl.constexpr,
    HAS_GATES: gl.constexpr,
    BIAS: gl.constexpr,
    OPTION: gl.constexpr,
):
    """OPTION: the activation where GATED, else how many experts a token uses."""
    MMA: gl.constexpr = sums_layout(TILING)
    sums = sums * output.sum_factor
    if BIAS:
        row = tile.row_tile * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, MMA))
        mask = row < work.rows_per_expert
        value = gl.load(output.bias + tile.expert_row + row, mask=mask, other=0.0)
        sums = sums + value.expand_dims(1)
    if GATED:
        first = gl.load(work.tiles.row + tile.index)
        to = GatedOutput(
            output.out,
            output.gated_factor,
            tile.row_tile,
            work.rows_per_expert,
            first,
            first + tile.count,
            output.stride,
        )
        store_gated(sums, to, TILING, OPTION, HAS_GATES)
    else:
        _store_weighed(sums, 0, tile, work, output, TILING, OPTION)


@gluon.jit
def _multiply(
    weights: WeightRing,
    tokens: TokenRing,
    grid,
    factors,
    work: Work,
    num_items,
    output: ExpertOutput,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
    FORMAT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
    GATED: gl.constexpr,
    HAS_GATES: gl.constexpr,
    BIAS: gl.constexpr,
    OPTION: gl.constexpr,
):
    at = RingPosition(0, 0, 0, 0)
    weights = with_table(weights, grid, FORMAT, TILING.warps)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = tile_of(work, item, TILING.rows)
        for size in gl.static_range(NUM_SIZES):
            if has_size(tile.count, TILING, NUM_SIZES, size):
                SIZED: gl.constexpr = sized(TILING, NUM_SIZES, size)
                sums, at = tile_sums(
                    weights, tokens, at, factors, tile, SIZED, FORMAT, ENDS_IN_HALF
                )
                store_tile(sums, tile, work, output, SIZED, GATED, HAS_GATES, BIAS, OPTION)


@gluon.jit(do_not_specialize=["num_blocks"])
def expert_gemm(
    token_desc,
    token_desc_1,
    token_desc_2,
    code_desc,
    high_desc,
    scale_desc,
    delta_desc,
    grid,
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
    NUM_SIZES: gl.constexpr,
    FORMAT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
    GATED: gl.constexpr,
    HAS_GATES: gl.constexpr,
    BIAS: gl.constexpr,
    OPTION: gl.constexpr,
    PDL: gl.constexpr,
):
    """GATED: out[row of pairs, i] = gated(gate i, value i) * gated_factor, of the token's row; of
    experts without gates activated(value i) * gated_factor.
    Otherwise out[slot, token, i] = the pair's weight times row i. `factors` are gemm.Factors. There
    is a descriptor of tokens for each size; further ones are not read.

    The list of tiles comes from the kernel before the gated GEMM: that one waits for it, and the
    other finds it there when it starts, and loads weights at once.
    """
    if GATED and PDL:
        wait_for_previous_kernel()
        allow_next_kernel()
    LAUNCH: gl.constexpr = _SERIAL if GATED or not PDL else _DEPENDENT
    num_row_tiles = (rows_per_expert + TILING.rows - 1) // TILING.rows
    work = Work(tiles, num_row_tiles, rows_per_expert, used_rows, num_blocks)
    num_items = uniform(gl.load(tiles.total)) * num_row_tiles
    planes = PlaneDescriptors(code_desc, high_desc, scale_desc, delta_desc)
    token_descs = (token_desc, token_desc_1, token_desc_2)
    largest_desc = token_descs[NUM_SIZES - 1]
    weights, tokens = allocate_rings(largest_desc, planes, TILING, FORMAT)
    output = ExpertOutput(out, bias, factors.sums, gated_factor, pairs, stride)
    firsts = tiles.token if GATED else tiles.row
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    weights,
                    tokens,
                    grid,
                    factors,
                    work,
                    num_items,
                    output,
                    TILING,
                    NUM_SIZES,
                    FORMAT,
                    ENDS_IN_HALF,
                    GATED,
                    HAS_GATES,
                    BIAS,
                    OPTION,
                ),
            ),
            (
                _load_weights,
                (planes, weights, work, num_items, num_rows, TILING, FORMAT),
            ),
            (
                _load_tokens,
                (token_descs, tokens, work, num_items, firsts, TILING, NUM_SIZES, LAUNCH),
            ),
        ],
        [1, 1],
        [24, 24],
    )
