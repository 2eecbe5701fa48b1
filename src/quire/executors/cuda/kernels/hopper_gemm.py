"""The GEMM of packed weights and tokens on Hopper's tensor cores (wgmma), in Gluon.

The weights are the M side of the instruction and are dequantised in registers; the tokens are its
N side. Every token tile from 8 to 256 wide runs the same instruction over the same columns in the
same order, so a token's sums do not depend on how many others there are. One warp loads weights,
one loads tokens, four or eight multiply.

Constants of a launch: TILING is a gemm.Tiling, FORMAT a planes.PlaneFormat.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quire.executors.cuda.kernels.activations import activated, gated
from quire.executors.cuda.kernels.dequantize import (
    WeightRing,
    dequantized_eighth,
    dequantized_quarter,
    half_words,
    load_block,
    powers,
    with_table,
)
from quire.executors.cuda.kernels.hopper import (
    allocate_barriers,
    allow_next_kernel,
    next_stage,
    wait_for_previous_kernel,
)

# How a launch follows the previous kernel. DEPENDENT: starts while that one ends, and waits for it
# before it reads tokens. CONCURRENT: reads the same tokens as that one, and ends after it.
SERIAL, DEPENDENT, CONCURRENT = 0, 1, 2
_SERIAL = gl.constexpr(SERIAL)
_DEPENDENT = gl.constexpr(DEPENDENT)
_CONCURRENT = gl.constexpr(CONCURRENT)

_BLOCK = gl.constexpr(256)  # columns whose planes lie together
_QUARTER = gl.constexpr(64)  # columns that are dequantised and multiplied at once


class PlaneDescriptors(NamedTuple):
    """TMA descriptors of a matrix's planes; a plane that its format lacks repeats another."""

    codes: Any
    high: Any
    scales: Any
    deltas: Any


class TokenRing(NamedTuple):
    """Stages of tokens in shared memory."""

    tokens: Any  # float16 [stages, tokens, columns]
    full: Any
    empty: Any


class RingPosition(NamedTuple):
    """Where the consumer is in both rings."""

    weight_stage: Any
    weight_phase: Any
    token_stage: Any
    token_phase: Any


class Tile(NamedTuple):
    """What a program computes: a tile of the output, over the steps of a split of the columns."""

    row: Any  # index of the tile of rows
    split: Any
    token: Any  # index of the tile of tokens
    first_step: Any  # a step is the columns of a stage of weights
    num_steps: Any


class Output(NamedTuple):
    """What the epilogue reads and writes."""

    out: Any
    bias: Any
    sum_factor: Any
    gated_factor: Any
    num_tokens: Any
    num_rows: Any
    row_stride: Any
    split_stride: Any


@gluon.constexpr_function
def step_columns(TILING, FORMAT):
    """Columns of a stage of weights."""
    return TILING.columns if FORMAT.is_float else 256


@gluon.constexpr_function
def _weight_stage_bytes(TILING, FORMAT):
    if FORMAT.is_float:
        return TILING.rows * TILING.columns * 2
    words = FORMAT.code_words + FORMAT.scale_words + FORMAT.high_words
    return TILING.rows * (4 * words + FORMAT.delta_bytes)


@gluon.constexpr_function
def _shares_empty(TILING, FORMAT):
    """Whether a stage of weights and one of tokens hold the same columns and are freed by one
    arrival: every arrival stops all multiplying warps."""
    has_same_columns = FORMAT.is_float or TILING.columns == 256
    return has_same_columns and TILING.token_stages == TILING.weight_stages


@gluon.jit
def _num_blocks_of(split, num_blocks, num_splits):
    return num_blocks // num_splits + gl.where(split < num_blocks % num_splits, 1, 0)


@gluon.jit
def staged_tokens(ring: TokenRing, stage, TILING: gl.constexpr):
    """A stage, [tokens, columns]: all of it, or its beginning where the ring has larger tiles."""
    tokens = ring.tokens.index(stage)
    if TILING.tokens == tokens.shape[0]:
        return tokens
    else:
        return tokens._reinterpret(gl.float16, [TILING.tokens, TILING.columns], tokens.layout)


# ---- load: the producer warps


@gluon.jit
def load_weight_steps(
    planes: PlaneDescriptors,
    ring: WeightRing,
    stage,
    phase,
    first_step,
    num_steps,
    row,
    num_rows,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """From this stage of the ring on; returns the next one and its phase."""
    STEP: gl.constexpr = step_columns(TILING, FORMAT)
    for step in range(num_steps):
        mbarrier.wait(ring.empty.index(stage), phase)
        full = ring.full.index(stage)
        mbarrier.expect(full, _weight_stage_bytes(TILING, FORMAT))
        if FORMAT.is_float:
            tma.async_copy_global_to_shared(
                planes.codes, [row, (first_step + step) * STEP], full, ring.codes.index(stage)
            )
        else:
            index = (first_step + step) * num_rows + row
            if FORMAT.by_halves:
                at = [(first_step + step) * 2, row, 0]
                tma.async_copy_global_to_shared(planes.codes, at, full, ring.codes.index(stage))
            else:
                at = [index, 0]
                tma.async_copy_global_to_shared(planes.codes, at, full, ring.codes.index(stage))
            if FORMAT.scale_words == 2:  # too few for rows of their own
                pair = (first_step + step) * ((num_rows + 7) // 8 * 8) + row
                tma.async_copy_global_to_shared(
                    planes.scales, [pair * 2], full, ring.scales.index(stage)
                )
            elif FORMAT.scale_words > 0:
                tma.async_copy_global_to_shared(
                    planes.scales, [index, 0], full, ring.scales.index(stage)
                )
            if FORMAT.high_words > 0:
                tma.async_copy_global_to_shared(
                    planes.high, [index, 0], full, ring.high.index(stage)
                )
            if FORMAT.has_deltas:
                delta = (first_step + step) * ((num_rows + 7) // 8 * 8) + row
                tma.async_copy_global_to_shared(
                    planes.deltas, [delta], full, ring.deltas.index(stage)
                )
        stage, phase = next_stage(stage, phase, TILING.weight_stages)
    return stage, phase


@gluon.jit
def _load_weights(
    planes: PlaneDescriptors,
    ring: WeightRing,
    first_step,
    num_steps,
    row,
    num_rows,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    stage = 0
    phase = 1
    load_weight_steps(
        planes, ring, stage, phase, first_step, num_steps, row, num_rows, TILING, FORMAT
    )


@gluon.jit
def begin_tokens(LAUNCH: gl.constexpr):
    """Before the first load of tokens."""
    if LAUNCH == _DEPENDENT:
        wait_for_previous_kernel()
    if LAUNCH != _SERIAL:
        # Not before the tokens are there: a CONCURRENT kernel reads them without waiting.
        allow_next_kernel()


@gluon.jit
def load_token_stages(
    token_desc,
    ring: TokenRing,
    stage,
    phase,
    first_column,
    num_stages,
    first_token,
    TILING: gl.constexpr,
):
    """From this stage of the ring on; returns the next one and its phase."""
    for step in range(num_stages):
        mbarrier.wait(ring.empty.index(stage), phase)
        full = ring.full.index(stage)
        mbarrier.expect(full, TILING.tokens * TILING.columns * 2)
        tma.async_copy_global_to_shared(
            token_desc,
            [first_token, first_column + step * TILING.columns],
            full,
            staged_tokens(ring, stage, TILING),
        )
        stage, phase = next_stage(stage, phase, TILING.token_stages)
    return stage, phase


@gluon.jit
def _load_tokens(
    token_desc,
    ring: TokenRing,
    first_column,
    num_stages,
    first_token,
    TILING: gl.constexpr,
    LAUNCH: gl.constexpr,
):
    begin_tokens(LAUNCH)
    stage = 0
    phase = 1
    load_token_stages(token_desc, ring, stage, phase, first_column, num_stages, first_token, TILING)


# ---- multiply: the consumer warps


@gluon.jit
def _multiply_float(
    sums,
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    num_steps,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    """wgmma reads float16 weights from shared memory."""
    SHARED_EMPTY: gl.constexpr = _shares_empty(TILING, FORMAT)
    weight_stage, weight_phase, token_stage, token_phase = at
    last_weight_stage = 0
    last_token_stage = 0
    for step in range(num_steps):
        mbarrier.wait(weights.full.index(weight_stage), weight_phase)
        mbarrier.wait(tokens.full.index(token_stage), token_phase)
        w = weights.codes.index(weight_stage)
        x = staged_tokens(tokens, token_stage, TILING).permute((1, 0))
        sums = warpgroup_mma(w, x, sums, is_async=True)
        # The wgmma before this one has ended: its stages are free.
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(weights.empty.index(last_weight_stage), pred=step > 0)
        if not SHARED_EMPTY:
            mbarrier.arrive(tokens.empty.index(last_token_stage), pred=step > 0)
        last_weight_stage = weight_stage
        last_token_stage = token_stage
        weight_stage, weight_phase = next_stage(weight_stage, weight_phase, TILING.weight_stages)
        token_stage, token_phase = next_stage(token_stage, token_phase, TILING.token_stages)
    sums = warpgroup_mma_wait(0, deps=[sums])
    if PERSISTENT:
        mbarrier.arrive(weights.empty.index(last_weight_stage))
        if not SHARED_EMPTY:
            mbarrier.arrive(tokens.empty.index(last_token_stage))
    return sums, RingPosition(weight_stage, weight_phase, token_stage, token_phase)


@gluon.jit
def _token_quarter(ring: TokenRing, stage, QUARTER: gl.constexpr, TILING: gl.constexpr):
    """A quarter of a block's columns of tokens, [64, tokens]: part of a stage, or a stage."""
    if TILING.columns == _QUARTER:
        return staged_tokens(ring, QUARTER, TILING).permute((1, 0))
    else:
        return staged_tokens(ring, stage, TILING).slice(QUARTER * 64, 64, 1).permute((1, 0))


@gluon.jit
def _multiply_half(
    sums,
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    last: RingPosition,
    is_later,
    factors,
    OPERAND: gl.constexpr,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """The first half of a block. Frees the stages of `last`, the block before it (`is_later`: there
    is one), and of its own all but what _multiply_quantized frees at the end."""
    BY_QUARTER: gl.constexpr = TILING.columns == _QUARTER
    mbarrier.wait(weights.full.index(at.weight_stage), at.weight_phase)
    block = load_block(weights, at.weight_stage, factors, FORMAT, TILING.rows, TILING.warps)
    w0 = dequantized_quarter(block, 0, FORMAT, OPERAND, TILING.rows)
    mbarrier.wait(tokens.full.index(at.token_stage), at.token_phase)
    x0 = _token_quarter(tokens, at.token_stage, 0, TILING)
    sums = warpgroup_mma(w0, x0, sums, is_async=True)
    sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
    if not BY_QUARTER:
        mbarrier.arrive(weights.empty.index(last.weight_stage), pred=is_later)
    if not _shares_empty(TILING, FORMAT):
        mbarrier.arrive(tokens.empty.index(last.token_stage), pred=is_later)
    w1 = dequantized_quarter(block, 1, FORMAT, OPERAND, TILING.rows)
    if BY_QUARTER:
        mbarrier.arrive(weights.empty.index(at.weight_stage))
        mbarrier.wait(tokens.full.index(1), at.token_phase)
    x1 = _token_quarter(tokens, at.token_stage, 1, TILING)
    sums = warpgroup_mma(w1, x1, sums, is_async=True)
    sums, w0, w1 = warpgroup_mma_wait(0, deps=[sums, w0, w1])
    if BY_QUARTER:  # the last two quarters came, too
        mbarrier.arrive(tokens.empty.index(0))
        mbarrier.arrive(tokens.empty.index(1))
        mbarrier.wait(tokens.full.index(2), at.token_phase)
        mbarrier.arrive(tokens.empty.index(2))
        mbarrier.wait(tokens.full.index(3), at.token_phase)
    return sums


@gluon.jit
def _multiply_eighths_of(
    sums,
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    last_stage,
    is_later,
    OPERAND: gl.constexpr,
    TILING: gl.constexpr,
    HALVES: gl.constexpr,
):
    """One or both halves of a block, which the stages of `at` hold. Frees those of the block before
    it (`is_later`: there is one)."""
    mbarrier.wait(weights.full.index(at.weight_stage), at.weight_phase)
    codes = weights.codes.index(at.weight_stage)
    scales = powers(weights.scales.index(at.weight_stage), TILING.rows, TILING.warps)
    before = scales[0]  # a type for the checker: there is none before the first eighth
    for eighth in gl.static_range(4 * HALVES):
        if eighth % 4 == 0:
            quarters = half_words(codes, eighth // 4, TILING.rows, TILING.warps)
        words = gl.split(quarters[eighth // 2 % 2])
        w = dequantized_eighth(words[eighth % 2], scales[eighth // 4], OPERAND, TILING.rows)
        if eighth == 0:
            mbarrier.wait(tokens.full.index(at.token_stage), at.token_phase)
        x = staged_tokens(tokens, at.token_stage, TILING).slice(eighth * 32, 32, 1)
        sums = warpgroup_mma(w, x.permute((1, 0)), sums, is_async=True)
        if eighth == 0:
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(weights.empty.index(last_stage), pred=is_later)
        else:
            sums, _ = warpgroup_mma_wait(1, deps=[sums, before])
        sums = warpgroup_mma_init(sums)
        before = w
    return sums


@gluon.jit
def _multiply_by_eighths(
    sums,
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    num_steps,
    MMA: gl.constexpr,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    PERSISTENT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
):
    """As _multiply_quantized, but 32 columns at once: in half as many registers."""
    gl.static_assert(_shares_empty(TILING, FORMAT))
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    weight_stage, weight_phase, token_stage, token_phase = at
    last_stage = 0
    num_whole = num_steps - 1 if ENDS_IN_HALF else num_steps
    for step in range(num_whole):
        here = RingPosition(weight_stage, weight_phase, token_stage, token_phase)
        sums = _multiply_eighths_of(
            sums, weights, tokens, here, last_stage, step > 0, OPERAND, TILING, 2
        )
        last_stage = weight_stage
        token_stage, token_phase = next_stage(token_stage, token_phase, TILING.token_stages)
        weight_stage, weight_phase = next_stage(weight_stage, weight_phase, TILING.weight_stages)
    if ENDS_IN_HALF:
        here = RingPosition(weight_stage, weight_phase, token_stage, token_phase)
        sums = _multiply_eighths_of(
            sums, weights, tokens, here, last_stage, num_whole > 0, OPERAND, TILING, 1
        )
        last_stage = weight_stage
        token_stage, token_phase = next_stage(token_stage, token_phase, TILING.token_stages)
        weight_stage, weight_phase = next_stage(weight_stage, weight_phase, TILING.weight_stages)
    sums = warpgroup_mma_wait(0, deps=[sums])
    if PERSISTENT:
        mbarrier.arrive(weights.empty.index(last_stage))
    return sums, RingPosition(weight_stage, weight_phase, token_stage, token_phase)


@gluon.jit
def _multiply_quantized(
    sums,
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    num_steps,
    factors,
    MMA: gl.constexpr,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    PERSISTENT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
):
    """A quarter of a block is multiplied while the next one is dequantised.

    A stage of tokens holds a block of 256 columns, or a quarter of one (`BY_QUARTER`); either way
    it is freed once its wgmma have ended. ENDS_IN_HALF: the second half of the last block is
    padding, and is not multiplied.
    """
    BY_QUARTER: gl.constexpr = TILING.columns == _QUARTER
    gl.static_assert((TILING.columns == _BLOCK) or (TILING.token_stages == 4))
    SHARED_EMPTY: gl.constexpr = _shares_empty(TILING, FORMAT)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    weight_stage, weight_phase, token_stage, token_phase = at
    last_weight_stage = 0
    last_token_stage = 3 if BY_QUARTER else 0
    num_whole = num_steps - 1 if ENDS_IN_HALF else num_steps
    for step in range(num_whole):
        mbarrier.wait(weights.full.index(weight_stage), weight_phase)
        block = load_block(weights, weight_stage, factors, FORMAT, TILING.rows, TILING.warps)
        w0 = dequantized_quarter(block, 0, FORMAT, OPERAND, TILING.rows)
        mbarrier.wait(tokens.full.index(token_stage), token_phase)
        x0 = _token_quarter(tokens, token_stage, 0, TILING)
        sums = warpgroup_mma(w0, x0, sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        if not BY_QUARTER:
            mbarrier.arrive(weights.empty.index(last_weight_stage), pred=step > 0)
        if not SHARED_EMPTY:
            mbarrier.arrive(tokens.empty.index(last_token_stage), pred=step > 0)

        w1 = dequantized_quarter(block, 1, FORMAT, OPERAND, TILING.rows)
        if BY_QUARTER:
            mbarrier.wait(tokens.full.index(1), token_phase)
        x1 = _token_quarter(tokens, token_stage, 1, TILING)
        sums = warpgroup_mma(w1, x1, sums, is_async=True)
        sums, w0 = warpgroup_mma_wait(1, deps=[sums, w0])
        if BY_QUARTER:
            mbarrier.arrive(tokens.empty.index(0))

        w2 = dequantized_quarter(block, 2, FORMAT, OPERAND, TILING.rows)
        if BY_QUARTER:
            mbarrier.wait(tokens.full.index(2), token_phase)
        x2 = _token_quarter(tokens, token_stage, 2, TILING)
        sums = warpgroup_mma(w2, x2, sums, is_async=True)
        sums, w1 = warpgroup_mma_wait(1, deps=[sums, w1])
        if BY_QUARTER:
            mbarrier.arrive(tokens.empty.index(1))

        w3 = dequantized_quarter(block, 3, FORMAT, OPERAND, TILING.rows)
        if BY_QUARTER:
            mbarrier.arrive(weights.empty.index(weight_stage))
            mbarrier.wait(tokens.full.index(3), token_phase)
        x3 = _token_quarter(tokens, token_stage, 3, TILING)
        sums = warpgroup_mma(w3, x3, sums, is_async=True)
        sums, w2 = warpgroup_mma_wait(1, deps=[sums, w2])
        sums = warpgroup_mma_init(sums)
        if BY_QUARTER:
            mbarrier.arrive(tokens.empty.index(2))
            token_phase ^= 1
        else:
            last_weight_stage = weight_stage
            last_token_stage = token_stage
            token_stage, token_phase = next_stage(token_stage, token_phase, TILING.token_stages)
        weight_stage, weight_phase = next_stage(weight_stage, weight_phase, TILING.weight_stages)
    if ENDS_IN_HALF:
        here = RingPosition(weight_stage, weight_phase, token_stage, token_phase)
        last = RingPosition(last_weight_stage, 0, last_token_stage, 0)
        sums = _multiply_half(
            sums, weights, tokens, here, last, num_whole > 0, factors, OPERAND, TILING, FORMAT
        )
        if BY_QUARTER:
            token_phase ^= 1
        else:
            last_weight_stage = weight_stage
            last_token_stage = token_stage
            token_stage, token_phase = next_stage(token_stage, token_phase, TILING.token_stages)
        weight_stage, weight_phase = next_stage(weight_stage, weight_phase, TILING.weight_stages)
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    if PERSISTENT:
        if not BY_QUARTER:
            mbarrier.arrive(weights.empty.index(last_weight_stage))
        if not SHARED_EMPTY:
            mbarrier.arrive(tokens.empty.index(last_token_stage))
    return sums, RingPosition(weight_stage, weight_phase, token_stage, token_phase)


# ---- epilogue


class GatedOutput(NamedTuple):
    """Where gated values go: out[token, row tile and row], for tokens from `first` to `end`."""

    out: Any
    factor: Any
    row_tile: Any
    num_rows: Any  # of gates and ups
    first: Any
    end: Any
    stride: Any


@gluon.jit
def store_gated(
    sums,
    output: GatedOutput,
    TILING: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_GATES: gl.constexpr,
):
    """activation(gate) * up: of 16 rows eight are gates and eight are ups, in one thread. Without
    gates activation(row), of eight and eight rows, so that neither exchanges more."""
    ROWS: gl.constexpr = TILING.rows
    TOKENS: gl.constexpr = TILING.tokens
    first, second = gl.split(sums.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    if HAS_GATES:
        _store_eights(gated(first, second, ACTIVATION), output, 8, 0, TILING)
    else:
        _store_eights(activated(first, ACTIVATION), output, 16, 0, TILING)
        _store_eights(activated(second, ACTIVATION), output, 16, 8, TILING)


@gluon.jit
def _store_eights(
    product, output: GatedOutput, STEP: gl.constexpr, FIRST: gl.constexpr, TILING: gl.constexpr
):
    """Eight of each STEP rows, from FIRST on."""
    ROWS: gl.constexpr = TILING.rows
    TOKENS: gl.constexpr = TILING.tokens
    HALF: gl.constexpr = ROWS // 2
    STORED: gl.constexpr = gl.BlockedLayout(
        [8, 1], [HALF // 8, 32 // (HALF // 8)], [1, TILING.warps], [0, 1]
    )
    product = product.reshape([HALF, TOKENS]) * output.factor
    product = gl.minimum(gl.maximum(product, -65504.0), 65504.0).to(gl.float16)
    product = gl.convert_layout(product, STORED)
    row = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    if STEP > 8:
        row = row // 8 * STEP + row % 8 + FIRST
    row = output.row_tile * (HALF * STEP // 8) + row
    token = output.first + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORED))
    mask = (token < output.end)[None, :] & (row < output.num_rows // (16 // STEP))[:, None]
    address = output.out + token[None, :].to(gl.int64) * output.stride + row[:, None]
    gl.store(address, product, mask=mask)


# $1[$2] = $3 where $4, else $1[$2] += $3; nothing where the index is negative. Memory adds as
# registers do, except that it makes subnormal sums 0.
_ASM_ADD = gl.constexpr(
    """
    {
    .reg .pred is_there, is_stored, is_added;
    .reg .b64 address;
    setp.ge.s32 is_there, $2, 0;
    mad.wide.s32 address, $2, 4, $1;
    setp.ne.and.s32 is_stored, $4, 0, is_there;
    setp.eq.and.s32 is_added, $4, 0, is_there;
    @is_stored st.global.f32 [address], $3;
    @is_added red.relaxed.gpu.global.add.f32 [address], $3;
    mov.b32 $0, 0;
    }
    """
)


@gluon.jit
def _add_tokens(sums, tile: Tile, FIRST: gl.constexpr, output: Output, TILING: gl.constexpr):
    """Store the sums of a tile's tokens from FIRST on, or add them where a split was stored before:
    by this thread, so that the order is certain. By few tokens at once: addresses of all would not
    fit the registers."""
    TOKENS: gl.constexpr = sums.shape[1]
    if TOKENS > 16:
        HALF: gl.constexpr = TOKENS // 2
        first, second = gl.split(sums.reshape([TILING.rows, 2, HALF]).permute((0, 2, 1)))
        _add_tokens(first, tile, FIRST, output, TILING)
        _add_tokens(second, tile, FIRST + HALF, output, TILING)
    else:
        LAYOUT: gl.constexpr = sums.type.layout
        row = tile.row * TILING.rows + gl.arange(0, TILING.rows, layout=gl.SliceLayout(1, LAYOUT))
        token = tile.token * TILING.tokens + FIRST
        token += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
        mask = (token < output.num_tokens)[None, :] & (row < output.num_rows)[:, None]
        index = token[None, :] * output.row_stride + row[:, None]
        is_first = (tile.split == 0).to(gl.int32)
        gl.inline_asm_elementwise(
            _ASM_ADD,
            "=r,l,r,f,r",
            [output.out.to(gl.int64), gl.where(mask, index, -1), sums, is_first],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _epilogue(
    sums,
    tile: Tile,
    output: Output,
    MMA: gl.constexpr,
    TILING: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    ADDS: gl.constexpr,
):
    """Undo the exponent, add the bias in the first split, and store what the next kernel reads.
    ADDS: add splits after the first to what is there."""
    ROWS: gl.constexpr = TILING.rows
    sums = sums * output.sum_factor
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if BIAS:
        value = gl.load(
            output.bias + tile.row * ROWS + rows,
            mask=tile.row * ROWS + rows < output.num_rows,
            other=0.0,
        )
        sums = sums + gl.where(tile.split == 0, value, value * 0.0).expand_dims(1)
    if ACTIVATION is not None:
        to = GatedOutput(
            output.out,
            output.gated_factor,
            tile.row,
            output.num_rows,
            tile.token * TILING.tokens,
            output.num_tokens,
            output.row_stride,
        )
        store_gated(sums, to, TILING, ACTIVATION, True)
    elif ADDS:
        _add_tokens(sums, tile, 0, output, TILING)
    else:
        row = tile.row * ROWS + rows
        token = tile.token * TILING.tokens + gl.arange(
            0, TILING.tokens, layout=gl.SliceLayout(0, MMA)
        )
        mask = (token < output.num_tokens)[None, :] & (row < output.num_rows)[:, None]
        split = output.out + tile.split.to(gl.int64) * output.split_stride
        address = split + token[None, :].to(gl.int64) * output.row_stride + row[:, None]
        gl.store(address, sums, mask=mask)


@gluon.constexpr_function
def sums_layout(TILING):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[TILING.warps, 1], instr_shape=[16, TILING.tokens, 16]
    )


@gluon.jit
def summed(
    weights: WeightRing,
    tokens: TokenRing,
    at: RingPosition,
    factors,
    num_steps,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    PERSISTENT: gl.constexpr,
    ENDS_IN_HALF: gl.constexpr,
):
    """What the rings bring, multiplied: float32 [rows, tokens], in `sums_layout`; and the position
    after it. PERSISTENT: the last stages are freed too, for the next tile. ENDS_IN_HALF: the second
    half of the last block need not be multiplied."""
    ROWS: gl.constexpr = TILING.rows
    TOKENS: gl.constexpr = TILING.tokens
    MMA: gl.constexpr = sums_layout(TILING)
    sums = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout=MMA))
    gl.assume(num_steps > 0)
    if FORMAT.is_float:
        return _multiply_float(sums, weights, tokens, at, num_steps, TILING, FORMAT, PERSISTENT)
    elif FORMAT.by_halves and TILING.parts == 8:
        return _multiply_by_eighths(
            sums, weights, tokens, at, num_steps, MMA, TILING, FORMAT, PERSISTENT, ENDS_IN_HALF
        )
    else:
        return _multiply_quantized(
            sums,
            weights,
            tokens,
            at,
            num_steps,
            factors,
            MMA,
            TILING,
            FORMAT,
            PERSISTENT,
            ENDS_IN_HALF,
        )


@gluon.jit
def _multiply(
    weights: WeightRing,
    tokens: TokenRing,
    grid,
    factors,
    tile: Tile,
    output: Output,
    num_blocks,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    LAUNCH: gl.constexpr,
    ADDED_SPLITS: gl.constexpr,
):
    MMA: gl.constexpr = sums_layout(TILING)
    STEPS: gl.constexpr = _BLOCK // step_columns(TILING, FORMAT)  # of a block
    stage = 0
    phase = 0
    at = RingPosition(stage, phase, stage, phase)
    weights = with_table(weights, grid, FORMAT, TILING.warps)
    if ADDED_SPLITS > 0:
        for split in range(ADDED_SPLITS):
            steps = _num_blocks_of(split, num_blocks, ADDED_SPLITS) * STEPS
            sums, at = summed(weights, tokens, at, factors, steps, TILING, FORMAT, True, False)
            # The stride is 0, which the compiler does not know: addresses that no split changed
            # would be kept in registers that there are not.
            none = split * output.split_stride
            of_split = Tile(tile.row + none, split, tile.token + none, 0, steps)
            if LAUNCH == _CONCURRENT:
                wait_for_previous_kernel()
            _epilogue(sums, of_split, output, MMA, TILING, None, BIAS, True)
    else:
        sums, _ = summed(weights, tokens, at, factors, tile.num_steps, TILING, FORMAT, False, False)
        if LAUNCH == _CONCURRENT:
            wait_for_previous_kernel()
        _epilogue(sums, tile, output, MMA, TILING, ACTIVATION, BIAS, False)


# ---- the kernel


@gluon.jit
def _allocate_planes(planes: PlaneDescriptors, TILING: gl.constexpr, FORMAT: gl.constexpr):
    """Stages of each plane in shared memory; a plane that the format lacks repeats another."""
    STAGES: gl.constexpr = TILING.weight_stages
    ROWS: gl.constexpr = TILING.rows
    if FORMAT.is_float:
        shape: gl.constexpr = [STAGES, ROWS, TILING.columns]
        codes = gl.allocate_shared_memory(gl.float16, shape, planes.codes.layout)
        high = codes
        scales = codes
        deltas = codes
    else:
        WORDS: gl.constexpr = FORMAT.code_words
        if FORMAT.by_halves:
            codes = gl.allocate_shared_memory(
                gl.int32, [STAGES, 2, ROWS, WORDS // 2], planes.codes.layout
            )
        else:
            codes = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], planes.codes.layout)
        scales = codes
        if FORMAT.scale_words == 2:
            scales = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS * 2], planes.scales.layout)
        elif FORMAT.scale_words > 0:
            scales = gl.allocate_shared_memory(
                gl.int32, [STAGES, ROWS, FORMAT.scale_words], planes.scales.layout
            )
        high = codes
        deltas = scales
        if FORMAT.high_words > 0:
            high = gl.allocate_shared_memory(
                gl.int32, [STAGES, ROWS, FORMAT.high_words], planes.high.layout
            )
        if FORMAT.has_deltas:
            KIND: gl.constexpr = gl.int32 if FORMAT.delta_bytes == 4 else gl.float16
            deltas = gl.allocate_shared_memory(KIND, [STAGES, ROWS], planes.deltas.layout)
    return codes, high, scales, deltas


@gluon.jit
def allocate_rings(
    token_desc, planes: PlaneDescriptors, TILING: gl.constexpr, FORMAT: gl.constexpr
):
    SHARED_EMPTY: gl.constexpr = _shares_empty(TILING, FORMAT)
    WEIGHT_STAGES: gl.constexpr = TILING.weight_stages
    TOKEN_STAGES: gl.constexpr = TILING.token_stages
    staged = gl.allocate_shared_memory(
        gl.float16, [TOKEN_STAGES, TILING.tokens, TILING.columns], token_desc.layout
    )
    codes, high, scales, deltas = _allocate_planes(planes, TILING, FORMAT)
    weight_full = allocate_barriers(WEIGHT_STAGES)
    weight_empty = allocate_barriers(WEIGHT_STAGES)
    token_full = allocate_barriers(TOKEN_STAGES)
    if SHARED_EMPTY:
        token_empty = weight_empty
    else:
        token_empty = allocate_barriers(TOKEN_STAGES)
    for stage in gl.static_range(WEIGHT_STAGES):
        mbarrier.init(weight_full.index(stage), count=1)
        mbarrier.init(weight_empty.index(stage), count=1)
    for stage in gl.static_range(TOKEN_STAGES):
        mbarrier.init(token_full.index(stage), count=1)
        if not SHARED_EMPTY:
            mbarrier.init(token_empty.index(stage), count=1)
    fence_async_shared()
    weights = WeightRing(codes, high, scales, deltas, weight_full, weight_empty, 0)
    return weights, TokenRing(staged, token_full, token_empty)


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks"])
def gemm(
    token_desc,
    code_desc,
    high_desc,
    scale_desc,
    delta_desc,
    grid,
    out,
    bias,
    factors,
    gated_factor,
    num_tokens,
    num_rows,
    num_blocks,
    row_stride,
    split_stride,
    TILING: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    LAUNCH: gl.constexpr,
    ADDED_SPLITS: gl.constexpr = 0,
):
    """out[split, token, row] = sum over the split's columns of weights[row, :] * tokens[token, :].

    Split-K: each split sums its own blocks of 256 columns, and the kernel that reads the sums adds
    the splits in order. ADDED_SPLITS: a program sums that many splits and adds them itself, in the
    same order, into out[token, row]; the grid has one, and `split_stride` is 0. With an ACTIVATION,
    out[token, i] = activation(gate i) * up i * gated_factor, without splits; None: sums are stored.
    `factors` are gemm.Factors, `grid` the table of a format's points. The descriptors cannot come
    in a tuple: Triton's launcher takes them as arguments only.
    """
    # Token tiles vary fastest: programs that read the same weights run together, and the weights
    # are fetched once.
    token_tile = gl.program_id(0)
    row_tile = gl.program_id(1)
    split = gl.program_id(2)
    num_splits = gl.num_programs(2)
    count = _num_blocks_of(split, num_blocks, num_splits)
    first = split * (num_blocks // num_splits) + gl.minimum(split, num_blocks % num_splits)
    STEP: gl.constexpr = step_columns(TILING, FORMAT)
    num_steps = count * (_BLOCK // STEP)
    first_step = first * (_BLOCK // STEP)
    planes = PlaneDescriptors(code_desc, high_desc, scale_desc, delta_desc)
    weights, tokens = allocate_rings(token_desc, planes, TILING, FORMAT)
    tile = Tile(row_tile, split, token_tile, first_step, num_steps)
    output = Output(
        out, bias, factors.sums, gated_factor, num_tokens, num_rows, row_stride, split_stride
    )
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    weights,
                    tokens,
                    grid,
                    factors,
                    tile,
                    output,
                    num_blocks,
                    TILING,
                    FORMAT,
                    ACTIVATION,
                    BIAS,
                    LAUNCH,
                    ADDED_SPLITS,
                ),
            ),
            (
                _load_weights,
                (
                    planes,
                    weights,
                    first_step,
                    num_steps,
                    row_tile * TILING.rows,
                    num_rows,
                    TILING,
                    FORMAT,
                ),
            ),
            (
                _load_tokens,
                (
                    token_desc,
                    tokens,
                    first_step * STEP,
                    num_steps * (STEP // TILING.columns),
                    token_tile * TILING.tokens,
                    TILING,
                    LAUNCH,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )
