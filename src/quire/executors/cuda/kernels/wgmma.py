"""The product of packed weights and tokens on Hopper's tensor cores (wgmma), in Gluon.

The weights stand on the instruction's M side and are decoded in registers; the tokens stand on its
N side. Every token tile from 8 to 256 wide runs the same instruction over the same columns in the
same order, so a token's sums do not depend on how many others there are. One warp brings weights,
one brings tokens, four or eight multiply.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806, RET505, SIM109

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.executors.cuda.kernels.chaining import (
    let_later_kernels_start,
    wait_for_earlier_kernels,
)
from quire.executors.cuda.kernels.decoding import (
    decoded,
    lane_layout,
    quant_words,
    scales_and_offsets,
)
from quire.executors.cuda.kernels.plain import FLOAT, FORMAT_CODES

_Q4_1, _Q4_K, _Q5_K, _Q6_K, _Q8_0 = (
    gl.constexpr(FORMAT_CODES[name]) for name in ("Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
)
_FLOAT = gl.constexpr(FLOAT)

# What the kernel does with its sums.
STORE, GATED = 0, 1
_GATED = gl.constexpr(GATED)

# How it follows the kernel before it. CHAINED: starts while that one ends, and waits for it before
# it reads tokens. BESIDE: reads the same tokens as that one, and ends after it.
ALONE, CHAINED, BESIDE = 0, 1, 2
_ALONE, _CHAINED, _BESIDE = gl.constexpr(ALONE), gl.constexpr(CHAINED), gl.constexpr(BESIDE)


def descriptor(array, shape, swizzle):
    """How the copy engine fetches tiles of that shape."""
    layout = gl.NVMMASharedLayout(swizzle, array.element_size() * 8, len(shape))
    return TensorDescriptor.from_tensor(array, shape, layout)


@gluon.jit
def _bring_weights(
    quant_desc,
    high_desc,
    scale_desc,
    delta_desc,
    quants,
    high,
    scales,
    deltas,
    full,
    empty,
    first_block,
    count,
    row,
    num_rows,
    STEP: gl.constexpr,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
):
    slot = 0
    phase = 1
    for step in range(count):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, BYTES)
        if FORMAT == _FLOAT:
            tma.async_copy_global_to_shared(
                quant_desc, [row, (first_block + step) * STEP], bar, quants.index(slot)
            )
        else:
            place = (first_block + step) * num_rows + row
            tma.async_copy_global_to_shared(quant_desc, [place, 0], bar, quants.index(slot))
            tma.async_copy_global_to_shared(scale_desc, [place, 0], bar, scales.index(slot))
            if (FORMAT == _Q5_K) or (FORMAT == _Q6_K):
                tma.async_copy_global_to_shared(high_desc, [place, 0], bar, high.index(slot))
            if FORMAT == _Q6_K:
                delta = (first_block + step) * ((num_rows + 7) // 8 * 8) + row
                tma.async_copy_global_to_shared(delta_desc, [delta], bar, deltas.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _bring_tokens(
    token_desc,
    tokens,
    full,
    empty,
    first_column,
    count,
    first_token,
    XK: gl.constexpr,
    BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL == _CHAINED:
        wait_for_earlier_kernels()
    if PDL != _ALONE:
        # Not before the tokens are there: a kernel BESIDE this one reads them without waiting.
        let_later_kernels_start()
    slot = 0
    phase = 1
    for step in range(count):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(
            token_desc, [first_token, first_column + step * XK], bar, tokens.index(slot)
        )
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _finish(
    sums,
    out,
    bias,
    factor,
    shrink,
    tile,
    part,
    token_tile,
    num_tokens,
    num_rows,
    row_stride,
    part_stride,
    BO: gl.constexpr,
    NT: gl.constexpr,
    W: gl.constexpr,
    MMA: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Undo the exponent, add the bias once, and write what the next kernel reads."""
    sums = sums * factor
    rows = gl.arange(0, BO, layout=gl.SliceLayout(1, MMA))
    if BIAS:
        value = gl.load(bias + tile * BO + rows, mask=tile * BO + rows < num_rows, other=0.0)
        sums = sums + gl.where(part == 0, value, value * 0.0).expand_dims(1)
    if EPILOGUE == _GATED:
        # Of 16 rows eight are gates and eight what they gate: a thread holds both.
        gates, values = gl.split(sums.reshape([BO // 16, 2, 8, NT]).permute((0, 2, 3, 1)))
        gated = gates / (1.0 + gl.exp(-gates)) * values
        gated = gl.minimum(gl.maximum(gated.reshape([BO // 2, NT]) * shrink, -65504.0), 65504.0).to(
            gl.float16
        )
        HALF: gl.constexpr = BO // 2
        STORED: gl.constexpr = gl.BlockedLayout(
            [8, 1], [HALF // 8, 32 // (HALF // 8)], [1, W], [0, 1]
        )
        gated = gl.convert_layout(gated, STORED)
        row = tile * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
        token = token_tile * NT + gl.arange(0, NT, layout=gl.SliceLayout(0, STORED))
        mask = (token < num_tokens)[None, :] & (row < num_rows // 2)[:, None]
        gl.store(out + token[None, :].to(gl.int64) * row_stride + row[:, None], gated, mask=mask)
    else:
        row = tile * BO + rows
        token = token_tile * NT + gl.arange(0, NT, layout=gl.SliceLayout(0, MMA))
        mask = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
        place = out + part.to(gl.int64) * part_stride
        gl.store(place + token[None, :].to(gl.int64) * row_stride + row[:, None], sums, mask=mask)


@gluon.jit
def _quarter(tokens, slot, place: gl.constexpr, XK: gl.constexpr):
    """64 of a block's columns of tokens, as the product takes them."""
    if XK == 64:
        return tokens.index(place).permute((1, 0))
    else:
        return tokens.index(slot).slice(place * 64, 64, 1).permute((1, 0))


@gluon.jit
def _multiply(
    tokens,
    quants,
    high,
    scales,
    deltas,
    token_full,
    token_empty,
    weight_full,
    weight_empty,
    out,
    bias,
    up,
    down,
    factor,
    shrink,
    tile,
    part,
    token_tile,
    num_tokens,
    num_rows,
    row_stride,
    part_stride,
    count,
    BO: gl.constexpr,
    NT: gl.constexpr,
    XK: gl.constexpr,
    XST: gl.constexpr,
    WST: gl.constexpr,
    W: gl.constexpr,
    FORMAT: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, NT, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    sums = warpgroup_mma_init(gl.zeros([BO, NT], gl.float32, layout=MMA))
    ws = 0
    wp = 0
    xs = 0
    xp = 0
    last_w = 0
    last_x = 3 if XK == 64 and FORMAT != _FLOAT else 0
    gl.assume(count > 0)
    if FORMAT == _FLOAT:
        for step in range(count):
            mbarrier.wait(weight_full.index(ws), wp)
            mbarrier.wait(token_full.index(xs), xp)
            sums = warpgroup_mma(
                quants.index(ws), tokens.index(xs).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            mbarrier.arrive(weight_empty.index(last_w), pred=step > 0)
            if not TOGETHER:
                mbarrier.arrive(token_empty.index(last_x), pred=step > 0)
            last_w = ws
            last_x = xs
            ws += 1
            if ws == WST:
                ws = 0
                wp ^= 1
            xs += 1
            if xs == XST:
                xs = 0
                xp ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
    else:
        gl.static_assert((XK == 256) or (XST == 4))
        QUARTER: gl.constexpr = lane_layout(BO, W, "quarter")
        for step in range(count):
            mbarrier.wait(weight_full.index(ws), wp)
            w00, w01, w10, w11, h00, h01, h10, h11 = quant_words(
                quants.index(ws), high.index(ws), QUARTER, FORMAT, BO, W
            )
            s00, m00, s01, m01, s10, m10, s11, m11 = scales_and_offsets(
                scales.index(ws), deltas.index(ws), up, down, QUARTER, FORMAT, BO, W
            )
            a0 = decoded(w00, h00, s00, m00, 0, FORMAT, OPERAND, BO)
            # A quarter is under way while the next is decoded. Tokens come in blocks of 256 columns
            # or a quarter at a time; either way a stage is given back once its products are done.
            mbarrier.wait(token_full.index(xs), xp)
            sums = warpgroup_mma(a0, _quarter(tokens, xs, 0, XK), sums, is_async=True)
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            if XK == 256:
                mbarrier.arrive(weight_empty.index(last_w), pred=step > 0)
            if not TOGETHER:
                mbarrier.arrive(token_empty.index(last_x), pred=step > 0)
            a1 = decoded(w01, h01, s01, m01, 1, FORMAT, OPERAND, BO)
            if XK == 64:
                mbarrier.wait(token_full.index(1), xp)
            sums = warpgroup_mma(a1, _quarter(tokens, xs, 1, XK), sums, is_async=True)
            sums, a0 = warpgroup_mma_wait(1, deps=[sums, a0])
            if XK == 64:
                mbarrier.arrive(token_empty.index(0))
            a2 = decoded(w10, h10, s10, m10, 0, FORMAT, OPERAND, BO)
            if XK == 64:
                mbarrier.wait(token_full.index(2), xp)
            sums = warpgroup_mma(a2, _quarter(tokens, xs, 2, XK), sums, is_async=True)
            sums, a1 = warpgroup_mma_wait(1, deps=[sums, a1])
            if XK == 64:
                mbarrier.arrive(token_empty.index(1))
            a3 = decoded(w11, h11, s11, m11, 1, FORMAT, OPERAND, BO)
            if XK == 64:
                mbarrier.arrive(weight_empty.index(ws))
                mbarrier.wait(token_full.index(3), xp)
            sums = warpgroup_mma(a3, _quarter(tokens, xs, 3, XK), sums, is_async=True)
            sums, a2 = warpgroup_mma_wait(1, deps=[sums, a2])
            sums = warpgroup_mma_init(sums)
            if XK == 64:
                mbarrier.arrive(token_empty.index(2))
                xp ^= 1
            else:
                last_w = ws
                last_x = xs
                xs += 1
                if xs == XST:
                    xs = 0
                    xp ^= 1
            ws += 1
            if ws == WST:
                ws = 0
                wp ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
    if PDL == _BESIDE:
        wait_for_earlier_kernels()
    _finish(
        sums,
        out,
        bias,
        factor,
        shrink,
        tile,
        part,
        token_tile,
        num_tokens,
        num_rows,
        row_stride,
        part_stride,
        BO,
        NT,
        W,
        MMA,
        EPILOGUE,
        BIAS,
    )


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks"])
def product(
    token_desc,
    quant_desc,
    high_desc,
    scale_desc,
    delta_desc,
    out,
    bias,
    up,
    down,
    factor,
    shrink,
    num_tokens,
    num_rows,
    num_blocks,
    row_stride,
    part_stride,
    BO: gl.constexpr,
    NT: gl.constexpr,
    XK: gl.constexpr,
    XST: gl.constexpr,
    WST: gl.constexpr,
    W: gl.constexpr,
    FORMAT: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[part, token, row] = sum over the part's columns of weights[row, :] * tokens[token, :].

    Blocks are 256 columns. Parts of the columns are summed apart and added by whoever reads them,
    in order.
    """
    # Tiles of tokens first: all that read the same weights run at once, and these are fetched once.
    token_tile = gl.program_id(0)
    tile = gl.program_id(1)
    part = gl.program_id(2)
    parts = gl.num_programs(2)
    count = num_blocks // parts + gl.where(part < num_blocks % parts, 1, 0)
    first = part * (num_blocks // parts) + gl.minimum(part, num_blocks % parts)
    STEP: gl.constexpr = XK if FORMAT == _FLOAT else 256
    count = count * (256 // STEP)
    first = first * (256 // STEP)
    tokens = gl.allocate_shared_memory(gl.float16, [XST, NT, XK], token_desc.layout)
    if FORMAT == _FLOAT:
        quants = gl.allocate_shared_memory(gl.float16, [WST, BO, XK], quant_desc.layout)
        high = quants
        scales = quants
        deltas = quants
        WEIGHT_BYTES: gl.constexpr = BO * XK * 2
    else:
        QW: gl.constexpr = 64 if FORMAT == _Q8_0 else 32
        SW: gl.constexpr = 8 if FORMAT == _Q4_1 else 4
        quants = gl.allocate_shared_memory(gl.int32, [WST, BO, QW], quant_desc.layout)
        scales = gl.allocate_shared_memory(gl.int32, [WST, BO, SW], scale_desc.layout)
        high = quants
        deltas = scales
        HW: gl.constexpr = 16 if FORMAT == _Q6_K else (8 if FORMAT == _Q5_K else 0)
        if HW > 0:
            high = gl.allocate_shared_memory(gl.int32, [WST, BO, HW], high_desc.layout)
        if FORMAT == _Q6_K:
            deltas = gl.allocate_shared_memory(gl.float16, [WST, BO], delta_desc.layout)
        DW: gl.constexpr = 2 if FORMAT == _Q6_K else 0
        WEIGHT_BYTES: gl.constexpr = BO * (4 * (QW + SW + HW) + DW)
    TOKEN_BYTES: gl.constexpr = NT * XK * 2
    weight_full = gl.allocate_shared_memory(gl.int64, [WST, 1], mbarrier.MBarrierLayout())
    weight_empty = gl.allocate_shared_memory(gl.int64, [WST, 1], mbarrier.MBarrierLayout())
    token_full = gl.allocate_shared_memory(gl.int64, [XST, 1], mbarrier.MBarrierLayout())
    # A stage of weights and its tokens are given back together where they can be: every such mark
    # stops all warps.
    TOGETHER: gl.constexpr = (XK == STEP) and (XST == WST)
    if TOGETHER:
        token_empty = weight_empty
    else:
        token_empty = gl.allocate_shared_memory(gl.int64, [XST, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(WST):
        mbarrier.init(weight_full.index(stage), count=1)
        mbarrier.init(weight_empty.index(stage), count=1)
    for stage in gl.static_range(XST):
        mbarrier.init(token_full.index(stage), count=1)
        if not TOGETHER:
            mbarrier.init(token_empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tokens,
                    quants,
                    high,
                    scales,
                    deltas,
                    token_full,
                    token_empty,
                    weight_full,
                    weight_empty,
                    out,
                    bias,
                    up,
                    down,
                    factor,
                    shrink,
                    tile,
                    part,
                    token_tile,
                    num_tokens,
                    num_rows,
                    row_stride,
                    part_stride,
                    count,
                    BO,
                    NT,
                    XK,
                    XST,
                    WST,
                    W,
                    FORMAT,
                    EPILOGUE,
                    BIAS,
                    PDL,
                    TOGETHER,
                ),
            ),
            (
                _bring_weights,
                (
                    quant_desc,
                    high_desc,
                    scale_desc,
                    delta_desc,
                    quants,
                    high,
                    scales,
                    deltas,
                    weight_full,
                    weight_empty,
                    first,
                    count,
                    tile * BO,
                    num_rows,
                    STEP,
                    WEIGHT_BYTES,
                    WST,
                    FORMAT,
                ),
            ),
            (
                _bring_tokens,
                (
                    token_desc,
                    tokens,
                    token_full,
                    token_empty,
                    first * STEP,
                    count * (STEP // XK),
                    token_tile * NT,
                    XK,
                    TOKEN_BYTES,
                    XST,
                    PDL,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )
