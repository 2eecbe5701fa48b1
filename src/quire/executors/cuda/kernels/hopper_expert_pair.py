"""Both grouped GEMMs of a mixture of experts in one launch on Hopper's tensor cores, in Gluon: the
last tiles of the first run beside those of the second.

Tiles are those of kernels/hopper_experts.py: an expert's rows times rows of pairs. An *item* is one
of them; those of the gated GEMM have the first numbers. Programs claim items in ascending order. A
tile of the second GEMM waits until all gated rows that it reads are stored: their items are claimed
by then, by programs that wait for nothing. So it does not matter how many programs run at once.

A program's loader of weights claims, and tells the other warps what: a ring of two claims.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.executors.cuda.kernels.dequantize import WeightRing
from quire.executors.cuda.kernels.experts import Pairs, Tiles
from quire.executors.cuda.kernels.hopper import (
    allocate_barriers,
    allow_next_kernel,
    next_stage,
    wait_for_previous_kernel,
)
from quire.executors.cuda.kernels.hopper_experts import (
    ExpertOutput,
    Work,
    has_size,
    load_tile_tokens,
    sized,
    store_tile,
    tile_of,
    tile_sums,
    uniform,
)
from quire.executors.cuda.kernels.hopper_gemm import (
    PlaneDescriptors,
    RingPosition,
    TokenRing,
    allocate_rings,
    load_weight_steps,
    step_columns,
)

_CLAIMS = gl.constexpr(2)
_READERS = gl.constexpr(3)  # of a claim
_MOST_POLLS = 1 << 24  # some ten seconds: a wait that does not end is an error, not a hang


class Half(NamedTuple):
    """One of both GEMMs, as it is launched."""

    out: Any
    bias: Any
    sum_factor: Any
    made_rows: Any  # of an expert
    rows_per_expert: Any
    used_rows: Any
    num_rows: Any  # of all experts
    stride: Any  # of a row of pairs; of a slot


class PairWork(NamedTuple):
    """What a launch computes."""

    gated: Work
    down: Work
    num_gated: Any  # items
    num_items: Any


class Claims(NamedTuple):
    """Items that the loader of weights has claimed."""

    items: Any  # int32 [claims, 1]
    full: Any
    empty: Any
    stored: Any  # what a claimed item of the gated GEMM makes is stored


# ---- claims


@gluon.jit
def _allocate_claims():
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    items = gl.allocate_shared_memory(gl.int32, [_CLAIMS, 1], LAYOUT)
    full = allocate_barriers(_CLAIMS)
    empty = allocate_barriers(_CLAIMS)
    stored = allocate_barriers(_CLAIMS)
    for claim in gl.static_range(_CLAIMS):
        mbarrier.init(full.index(claim), count=1)
        mbarrier.init(empty.index(claim), count=_READERS)
        mbarrier.init(stored.index(claim), count=1)
    fence_async_shared()
    return Claims(items, full, empty, stored)


@gluon.jit
def _claimed(counter):
    """The next item, in the first lane; `uniform` waits for it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=&r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _tell(claims: Claims, claim, phase, item):
    """To the other warps, once they have read what was there. By one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(claims.empty.index(claim), phase ^ 1)
    claims.items.index(claim).store(gl.full([1], item, gl.int32, layout=LAYOUT))
    mbarrier.arrive(claims.full.index(claim))


@gluon.jit
def _read(claims: Claims, claim, phase, WARPS: gl.constexpr):
    """The next item of this program. Numbers beyond the last item are its end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(claims.full.index(claim), phase)
    return uniform(gl.max(claims.items.index(claim).load(LAYOUT), axis=0))


@gluon.jit
def _told(claims: Claims, claim, phase, WARPS: gl.constexpr):
    """The same, to make room for another claim at once."""
    item = _read(claims, claim, phase, WARPS)
    mbarrier.arrive(claims.empty.index(claim))
    return item


@gluon.jit
def _pair_tile(work: PairWork, item, ROWS: gl.constexpr):
    """Whether an item is of the gated GEMM, and its tile."""
    is_gated = item < work.num_gated
    own = Work(
        work.gated.tiles,
        gl.where(is_gated, work.gated.num_row_tiles, work.down.num_row_tiles),
        gl.where(is_gated, work.gated.rows_per_expert, work.down.rows_per_expert),
        gl.where(is_gated, work.gated.used_rows, work.down.used_rows),
        gl.where(is_gated, work.gated.num_blocks, work.down.num_blocks),
    )
    return is_gated, tile_of(own, gl.where(is_gated, item, item - work.num_gated), ROWS)


# ---- gated rows that are stored


@gluon.jit
def _signal(counter):
    """Count a part of a tile that this program has stored. By one warp."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "fence.proxy.async.global; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _await_asm():
    return (
        "{ .reg .pred p, q; .reg .b32 v, polls; mov.u32 polls, 0; again: "
        "ld.acquire.gpu.global.u32 v, [$1]; add.u32 polls, polls, 1; "
        f"setp.gt.u32 q, polls, {_MOST_POLLS}; @q trap; setp.lt.u32 p, v, $2; @p bra again; "
        "fence.proxy.async.global; mov.b32 $0, 0; }"
    )


@gluon.jit
def _await_signals(counter, count):
    """Before the copy engine reads what was stored before so many signals."""
    gl.inline_asm_elementwise(
        _await_asm(), "=r,l,r", [counter, count], dtype=gl.int32, is_pure=False, pack=1
    )


# ---- the program's warps


@gluon.jit
def _multiply(
    weights: WeightRing,
    tokens: TokenRing,
    claims: Claims,
    work: PairWork,
    gated: ExpertOutput,
    down: ExpertOutput,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
    FORMAT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    USED: gl.constexpr,
):
    zero = gl.program_id(0) * 0
    at = RingPosition(zero, zero, zero, zero)
    claim = zero
    phase = zero
    item = _told(claims, claim, phase, TILING.warps)
    while item < work.num_items:
        is_gated, tile = _pair_tile(work, item, TILING.rows)
        for size in gl.static_range(NUM_SIZES):
            if has_size(tile.count, TILING, NUM_SIZES, size):
                SIZED: gl.constexpr = sized(TILING, NUM_SIZES, size)
                sums, at = tile_sums(weights, tokens, at, 0, tile, SIZED, FORMAT, ENDS_IN_HALF)
                if is_gated:
                    store_tile(sums, tile, work.gated, gated, SIZED, True, True, BIAS, ACTIVATION)
                else:
                    store_tile(sums, tile, work.down, down, SIZED, False, True, BIAS, USED)
        mbarrier.arrive(claims.stored.index(claim))
        claim, phase = next_stage(claim, phase, _CLAIMS)
        item = _told(claims, claim, phase, TILING.warps)


@gluon.jit
def _load_weights(
    planes: PlaneDescriptors,
    down_planes: PlaneDescriptors,
    ring: WeightRing,
    claims: Claims,
    work: PairWork,
    num_rows,
    num_down_rows,
    counter,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    STEPS: gl.constexpr = 256 // step_columns(TILING, FORMAT)
    stage = gl.program_id(0) * 0
    phase = stage + 1
    claim = stage
    claim_phase = stage
    item = uniform(_claimed(counter))
    while item < work.num_items:
        next_item = _claimed(counter)
        _tell(claims, claim, claim_phase, item)
        is_gated, tile = _pair_tile(work, item, TILING.rows)
        row = tile.expert_row + tile.row_tile * TILING.rows
        num_steps = tile.num_blocks * STEPS
        if is_gated:
            stage, phase = load_weight_steps(
                planes, ring, stage, phase, 0, num_steps, row, num_rows, TILING, FORMAT
            )
        else:
            stage, phase = load_weight_steps(
                down_planes, ring, stage, phase, 0, num_steps, row, num_down_rows, TILING, FORMAT
            )
        claim, claim_phase = next_stage(claim, claim_phase, _CLAIMS)
        item = uniform(next_item)
    _tell(claims, claim, claim_phase, item)


@gluon.jit
def _load_tokens(
    token_descs,
    gated_descs,
    ring: TokenRing,
    claims: Claims,
    work: PairWork,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
):
    stage = gl.program_id(0) * 0
    phase = stage + 1
    claim = stage
    claim_phase = stage
    tiles = work.gated.tiles
    item = _told(claims, claim, claim_phase, 1)
    while item < work.num_items:
        is_gated, tile = _pair_tile(work, item, TILING.rows)
        if is_gated:
            first = gl.load(tiles.token + tile.index)
            stage, phase = load_tile_tokens(
                token_descs, ring, stage, phase, tile, first, TILING, NUM_SIZES
            )
        else:
            _await_signals(tiles.ready + tile.index, work.gated.num_row_tiles)
            first = gl.load(tiles.row + tile.index)
            stage, phase = load_tile_tokens(
                gated_descs, ring, stage, phase, tile, first, TILING, NUM_SIZES
            )
        claim, claim_phase = next_stage(claim, claim_phase, _CLAIMS)
        item = _told(claims, claim, claim_phase, 1)


@gluon.jit
def _signal_stored(claims: Claims, work: PairWork):
    """Apart from the warps that multiply, which would wait for their stores. Makes room for another
    claim once this one's item is stored: so these cannot be two items ahead."""
    claim = gl.program_id(0) * 0
    phase = claim
    item = _read(claims, claim, phase, 1)
    while item < work.num_items:
        mbarrier.wait(claims.stored.index(claim), phase)
        if item < work.num_gated:
            _signal(work.gated.tiles.ready + item // work.gated.num_row_tiles)
        mbarrier.arrive(claims.empty.index(claim))
        claim, phase = next_stage(claim, phase, _CLAIMS)
        item = _read(claims, claim, phase, 1)


@gluon.jit(do_not_specialize=["num_blocks", "num_down_blocks"])
def expert_pair(
    token_desc,
    token_desc_1,
    token_desc_2,
    gated_desc,
    gated_desc_1,
    gated_desc_2,
    code_desc,
    scale_desc,
    down_code_desc,
    down_scale_desc,
    gated: Half,
    down: Half,
    gated_factor,
    tiles: Tiles,
    pairs: Pairs,
    num_blocks,
    num_down_blocks,
    TILING: gl.constexpr,
    NUM_SIZES: gl.constexpr,
    FORMAT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    USED: gl.constexpr,
    PDL: gl.constexpr,
):
    """What `hopper_experts.expert_gemm` makes, gated and then not. The gated rows of pairs, which
    the second GEMM reads, are `gated.out`. The kernel before clears the counters of `tiles`."""
    if PDL:
        wait_for_previous_kernel()
        allow_next_kernel()
    total = uniform(gl.load(tiles.total))
    row_tiles = (gated.made_rows + TILING.rows - 1) // TILING.rows
    down_row_tiles = (down.made_rows + TILING.rows - 1) // TILING.rows
    work = PairWork(
        Work(tiles, row_tiles, gated.rows_per_expert, gated.used_rows, num_blocks),
        Work(tiles, down_row_tiles, down.rows_per_expert, down.used_rows, num_down_blocks),
        total * row_tiles,
        total * (row_tiles + down_row_tiles),
    )
    gated_out = ExpertOutput(
        gated.out, gated.bias, gated.sum_factor, gated_factor, pairs, gated.stride
    )
    down_out = ExpertOutput(down.out, down.bias, down.sum_factor, gated_factor, pairs, down.stride)
    planes = PlaneDescriptors(code_desc, code_desc, scale_desc, code_desc)
    down_planes = PlaneDescriptors(down_code_desc, down_code_desc, down_scale_desc, down_code_desc)
    token_descs = (token_desc, token_desc_1, token_desc_2)
    gated_descs = (gated_desc, gated_desc_1, gated_desc_2)
    weights, tokens = allocate_rings(token_descs[NUM_SIZES - 1], planes, TILING, FORMAT)
    claims = _allocate_claims()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    weights,
                    tokens,
                    claims,
                    work,
                    gated_out,
                    down_out,
                    TILING,
                    NUM_SIZES,
                    FORMAT,
                    ENDS_IN_HALF,
                    BIAS,
                    ACTIVATION,
                    USED,
                ),
            ),
            (
                _load_weights,
                (
                    planes,
                    down_planes,
                    weights,
                    claims,
                    work,
                    gated.num_rows,
                    down.num_rows,
                    tiles.claimed,
                    TILING,
                    FORMAT,
                ),
            ),
            (
                _load_tokens,
                (token_descs, gated_descs, tokens, claims, work, TILING, NUM_SIZES),
            ),
            (_signal_stored, (claims, work)),
        ],
        [1, 1, 1],
        [32, 32, 32],
    )
