"""The GEMM of ternary weights and int8 tokens on Hopper's tensor cores (wgmma s8), in Gluon.

The weights are the M side of the instruction and are decoded in registers; the tokens are its N
side. Sums of integers are exact. Where every block of 256 columns has a scale of its own, a block's
integer sum times its scale is added in order of the blocks, one fused multiply-add each, in every
tiling: a token's sums do not depend on how many others there are. One warp loads weights, one loads
tokens, four or eight multiply.

A word of weights holds sixteen two-bit two's complement numbers (see planes.py). A mask leaves four
of them as the upper bits of four bytes: an int8 operand that is 64 times the weight.

Constants of a launch: TILING is a gemm.TernaryTiling.
"""

# ruff: noqa: N803, N806, RET505

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.executors.cuda.kernels.dequantize import lane_layout
from quire.executors.cuda.kernels.hopper import (
    allocate_barriers,
    allow_next_kernel,
    next_stage,
    wait_for_previous_kernel,
)
from quire.executors.cuda.kernels.hopper_gemm import CONCURRENT, DEPENDENT, SERIAL

_SERIAL = gl.constexpr(SERIAL)
_DEPENDENT = gl.constexpr(DEPENDENT)
_CONCURRENT = gl.constexpr(CONCURRENT)

_BLOCK = gl.constexpr(256)  # columns of a stage
_WORDS = gl.constexpr(16)  # of a row's block
_SCALE_UP = gl.constexpr(6)  # operands are weights times 2**6


class Ring(NamedTuple):
    """Stages in shared memory, 256 columns each; one arrival frees weights and tokens."""

    words: Any  # int32 [stages, rows, 16]
    scales: Any  # float16 [stages, rows]
    tokens: Any  # int8 [stages, tokens, 256]
    weights_full: Any
    tokens_full: Any
    empty: Any


class Tile(NamedTuple):
    """What a program computes: a tile of the output, over the blocks of a split of the columns."""

    row: Any  # index of the tile of rows
    split: Any
    token: Any  # index of the tile of tokens
    first_block: Any
    num_blocks: Any


@gluon.constexpr_function
def _decode_asm():
    """Four words to sixteen registers of four int8."""
    lines = ["{", ".reg .b32 t;"]
    for word in range(4):
        for field in range(4):
            source = f"${16 + word}"
            if field:
                lines.append(f"shl.b32 t, {source}, {2 * field};")
                source = "t"
            lines.append(f"and.b32 ${4 * word + field}, {source}, 0xC0C0C0C0;")
    return "\n".join([*lines, "}"])


_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 4))


# ---- load: the producer warps


@gluon.jit
def _load_weights(
    word_desc,
    scale_desc,
    ring: Ring,
    tile: Tile,
    num_rows,
    BLOCK_SCALES: gl.constexpr,
    TILING: gl.constexpr,
):
    row = tile.row * TILING.rows
    padded_rows = (num_rows + 7) // 8 * 8
    BYTES: gl.constexpr = TILING.rows * (64 + (2 if BLOCK_SCALES else 0))
    stage = 0
    phase = 1
    for step in range(tile.num_blocks):
        block = tile.first_block + step
        mbarrier.wait(ring.empty.index(stage), phase)
        full = ring.weights_full.index(stage)
        mbarrier.expect(full, BYTES)
        tma.async_copy_global_to_shared(
            word_desc, [block * num_rows + row, 0], full, ring.words.index(stage)
        )
        if BLOCK_SCALES:
            tma.async_copy_global_to_shared(
                scale_desc, [block * padded_rows + row], full, ring.scales.index(stage)
            )
        stage, phase = next_stage(stage, phase, TILING.stages)


@gluon.jit
def _load_tokens(token_desc, ring: Ring, tile: Tile, TILING: gl.constexpr, LAUNCH: gl.constexpr):
    if LAUNCH == _DEPENDENT:
        wait_for_previous_kernel()
    if LAUNCH != _SERIAL:
        # Not before the tokens are there: a CONCURRENT kernel reads them without waiting.
        allow_next_kernel()
    stage = 0
    phase = 1
    for step in range(tile.num_blocks):
        mbarrier.wait(ring.empty.index(stage), phase)
        full = ring.tokens_full.index(stage)
        mbarrier.expect(full, TILING.tokens * _BLOCK)
        tma.async_copy_global_to_shared(
            token_desc,
            [tile.token * TILING.tokens, (tile.first_block + step) * _BLOCK],
            full,
            ring.tokens.index(stage),
        )
        stage, phase = next_stage(stage, phase, TILING.stages)


# ---- multiply: the consumer warps


@gluon.jit
def _decoded(words, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """A block of weights times 64, int8 [ROWS, 256] as wgmma takes it."""
    loaded = words.reshape([ROWS, 4, 4])
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15 = (
        gl.inline_asm_elementwise(
            _decode_asm(),
            _CONSTRAINTS,
            [loaded],
            dtype=(
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
                gl.int8,
            ),
            is_pure=True,
            pack=4,
        )
    )
    q0 = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    q1 = gl.join(gl.join(p4, p5), gl.join(p6, p7))
    q2 = gl.join(gl.join(p8, p9), gl.join(p10, p11))
    q3 = gl.join(gl.join(p12, p13), gl.join(p14, p15))
    x = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    x = x.permute((0, 6, 5, 4, 3, 1, 2)).reshape([ROWS, 256])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _block_scales(ring: Ring, stage, MMA: gl.constexpr, BLOCK_SCALES: gl.constexpr):
    """The rows' scales of a block, [ROWS, 1], divided by what operands are multiplied by."""
    if BLOCK_SCALES:
        scales = ring.scales.index(stage).load(gl.SliceLayout(1, MMA)).to(gl.float32)
        return (scales * (1.0 / (1 << _SCALE_UP))).expand_dims(1)
    else:
        return 0.0


@gluon.jit
def _multiplied(
    ring: Ring,
    num_blocks,
    MMA: gl.constexpr,
    TILING: gl.constexpr,
    BLOCK_SCALES: gl.constexpr,
):
    """The sums of integers as float32; or every block's times its scale, added in order.

    The next block's words are loaded while one is multiplied (after the last, those of a stage that
    is not used). They are decoded only when that has ended: wgmma reads its operand's registers
    until then, and the compiler does not know.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    WORDS: gl.constexpr = lane_layout(TILING.rows, TILING.warps, "quarters")
    ROWS: gl.constexpr = TILING.rows
    TOKENS: gl.constexpr = TILING.tokens
    sums = gl.zeros([ROWS, TOKENS], gl.float32, layout=MMA)
    integers = gl.zeros([ROWS, TOKENS], gl.int32, layout=MMA)
    stage = 0
    phase = 0
    mbarrier.wait(ring.weights_full.index(0), 0)
    words = ring.words.index(0).load(WORDS)
    scales = _block_scales(ring, 0, MMA, BLOCK_SCALES)
    for step in range(num_blocks):
        w = _decoded(words, OPERAND, ROWS)
        mbarrier.wait(ring.tokens_full.index(stage), phase)
        x = ring.tokens.index(stage).permute((1, 0))
        flight = warpgroup_mma(w, x, integers, use_acc=not BLOCK_SCALES, is_async=True)
        after, after_phase = next_stage(stage, phase, TILING.stages)
        mbarrier.wait(ring.weights_full.index(after), after_phase, pred=step + 1 < num_blocks)
        words = ring.words.index(after).load(WORDS)
        next_scales = _block_scales(ring, after, MMA, BLOCK_SCALES)
        block = warpgroup_mma_wait(0, deps=[flight])
        mbarrier.arrive(ring.empty.index(stage))
        if BLOCK_SCALES:
            sums = gl.fma(scales.broadcast_to([ROWS, TOKENS]), block.to(gl.float32), sums)
        else:
            integers = block
        scales = next_scales
        stage = after
        phase = after_phase
    if not BLOCK_SCALES:
        sums = (integers >> _SCALE_UP).to(gl.float32)
    return sums


@gluon.jit
def _multiply(
    ring: Ring,
    tile: Tile,
    out,
    num_tokens,
    num_rows,
    row_stride,
    split_stride,
    BLOCK_SCALES: gl.constexpr,
    TILING: gl.constexpr,
    LAUNCH: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[TILING.warps, 1],
        instr_shape=[16, min(TILING.tokens, 128), 32],
    )
    gl.assume(tile.num_blocks > 0)
    sums = _multiplied(ring, tile.num_blocks, MMA, TILING, BLOCK_SCALES)
    if LAUNCH == _CONCURRENT:
        wait_for_previous_kernel()
    row = tile.row * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, MMA))
    token = tile.token * TILING.tokens + gl.arange(0, TILING.tokens, layout=gl.SliceLayout(0, MMA))
    mask = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    split = out + tile.split.to(gl.int64) * split_stride
    address = split + token[None, :].to(gl.int64) * row_stride + row[:, None]
    gl.store(address, sums, mask=mask)


# ---- the kernel


@gluon.jit
def _allocate_ring(
    token_desc, word_desc, scale_desc, BLOCK_SCALES: gl.constexpr, TILING: gl.constexpr
):
    STAGES: gl.constexpr = TILING.stages
    tokens = gl.allocate_shared_memory(gl.int8, [STAGES, TILING.tokens, _BLOCK], token_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, TILING.rows, _WORDS], word_desc.layout)
    scales = words
    if BLOCK_SCALES:
        scales = gl.allocate_shared_memory(gl.float16, [STAGES, TILING.rows], scale_desc.layout)
    weights_full = allocate_barriers(STAGES)
    tokens_full = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(stage), count=1)
        mbarrier.init(tokens_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return Ring(words, scales, tokens, weights_full, tokens_full, empty)


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks"])
def gemm(
    token_desc,
    word_desc,
    scale_desc,
    out,
    num_tokens,
    num_rows,
    num_blocks,
    row_stride,
    split_stride,
    TILING: gl.constexpr,
    BLOCK_SCALES: gl.constexpr,
    LAUNCH: gl.constexpr,
):
    """out[split, token, row] = sum over the split's columns of weights[row, :] * tokens[token, :],
    in integers, or in units of the blocks' scales with BLOCK_SCALES."""
    split = gl.program_id(2)
    num_splits = gl.num_programs(2)
    count = num_blocks // num_splits + gl.where(split < num_blocks % num_splits, 1, 0)
    first = split * (num_blocks // num_splits) + gl.minimum(split, num_blocks % num_splits)
    # Token tiles vary fastest: programs that read the same weights run together.
    tile = Tile(gl.program_id(1), split, gl.program_id(0), first, count)
    ring = _allocate_ring(token_desc, word_desc, scale_desc, BLOCK_SCALES, TILING)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ring,
                    tile,
                    out,
                    num_tokens,
                    num_rows,
                    row_stride,
                    split_stride,
                    BLOCK_SCALES,
                    TILING,
                    LAUNCH,
                ),
            ),
            (_load_weights, (word_desc, scale_desc, ring, tile, num_rows, BLOCK_SCALES, TILING)),
            (_load_tokens, (token_desc, ring, tile, TILING, LAUNCH)),
        ],
        [1, 1],
        [24, 24],
    )
