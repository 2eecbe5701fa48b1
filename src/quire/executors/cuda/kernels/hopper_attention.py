"""Paged attention on Hopper, in Gluon: what kernels/attention.py computes, fed by the copy engine.

Keys and values stand on the M side of wgmma and are read where the copy engine put them; the rows
of a program (tokens times the heads of a group) stand on its N side, so that 8 to 32 rows run the
same instructions and a row's bits depend on none of the others. One warp brings blocks of the
cache, four compute. Blocks of earlier steps are on their way before the kernel before this one has
ended. Positions are cut as there: tiles of TILE, parts of SPLIT, merged from the first to the last.
"""

# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.executors.cuda.kernels.hopper import (
    allow_next_kernel,
    descriptor,
    wait_for_previous_kernel,
)

__all__ = ["COLUMNS", "REGISTERS", "TILE", "WARPS", "attend", "descriptor", "slots"]

TILE = 64  # positions: the M side of one instruction
COLUMNS = 64  # of a head, in one tile of shared memory: 128 bytes, swizzled
WARPS = 4
REGISTERS = {8: 80, 16: 80, 32: 128}  # a thread, by rows: three programs a multiprocessor, or two

_FEW_TOKENS = 128


def slots(num_tokens):
    """Tiles of keys, and of values, under way: more where few programs must do."""
    return 3 if num_tokens <= _FEW_TOKENS else 2


_TILE, _COLUMNS = gl.constexpr(TILE), gl.constexpr(COLUMNS)


@gluon.jit
def _bring_tile(desc, table, kept, full, slot, start, end, kv_head, HEADS, BLOCK, HALVES):
    """The blocks of one tile; those behind the end are nobody's and stay where they are."""
    bar = full.index(slot)
    for place in gl.static_range(_TILE // BLOCK):
        position = start + place * BLOCK
        is_there = position < end
        block = gl.load(table + position // BLOCK, mask=is_there, other=0)
        row = (block * HEADS + kv_head) * BLOCK
        mbarrier.expect(bar, BLOCK * HALVES * _COLUMNS * 2, pred=is_there)
        mbarrier.arrive(bar, count=1, pred=position >= end)
        for half in gl.static_range(HALVES):
            target = kept.index(slot * HALVES + half).slice(place * BLOCK, BLOCK, 0)
            tma.async_copy_global_to_shared(
                desc, [row, half * _COLUMNS], bar, target, pred=is_there
            )


@gluon.jit
def _bring(
    key_desc,
    value_desc,
    table,
    keys,
    values,
    key_full,
    key_empty,
    value_full,
    value_empty,
    first_tile,
    last_tile,
    old,
    end,
    kv_head,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    HALVES: gl.constexpr,
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        allow_next_kernel()
    slot = 0
    phase = 1
    waited = 0
    for tile in range(first_tile, last_tile):
        start = tile * _TILE
        # What this step's own tokens left there comes from the kernel before this one.
        if PDL and (start + _TILE > old) & (waited == 0):
            wait_for_previous_kernel()
            waited = 1
        mbarrier.wait(key_empty.index(slot), phase)
        _bring_tile(
            key_desc, table, keys, key_full, slot, start, end, kv_head, HEADS, BLOCK, HALVES
        )
        mbarrier.wait(value_empty.index(slot), phase)
        _bring_tile(
            value_desc, table, values, value_full, slot, start, end, kv_head, HEADS, BLOCK, HALVES
        )
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1


@gluon.jit
def _merged(m0, l0, m1, l1):
    """As kernels/attention.py merges: the maximum, the sum, and what each side is multiplied by."""
    m = gl.maximum(m0, m1)
    safe = gl.where(m == float("-inf"), 0.0, m)
    a = gl.exp2(m0 - safe)
    b = gl.exp2(m1 - safe)
    return m, l0 * a + l1 * b, a, b


@gluon.jit
def _operand_place(column):
    """Where a product finds a column, within 128."""
    inner = column % 128
    return column - inner + inner % 32 // 4 * 16 + inner % 4 // 2 * 8 + inner // 32 * 2 + inner % 2


@gluon.jit
def _clean(value, start, end):
    """Rows that nobody wrote, to zero: 0 times what is not a number is not a number."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = value.load(LAYOUT)
    position = start + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    value.store(gl.where((position < end)[:, None], x, 0.0))


@gluon.jit
def _compute(
    queries,
    keys,
    values,
    query_tile,
    weight_tile,
    key_full,
    key_empty,
    value_full,
    value_empty,
    out,
    part_max,
    part_sum,
    part_mix,
    scale,
    window,
    out_stride,
    tile,
    num_tiles,
    kv_head,
    first_row,
    count,
    first_position,
    first_tile,
    last_tile,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HALVES: gl.constexpr,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS_APART: gl.constexpr,
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS_EACH: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_DIM: gl.constexpr = HALVES * _COLUMNS
    end = first_position + count
    if PDL:
        wait_for_previous_kernel()
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    is_row = (r // GROUP < count) & (r % GROUP < HEADS_EACH)
    source = (first_row + r // GROUP).to(gl.int64) * NUM_HEADS + kv_head * HEADS_EACH + r % GROUP
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LOADED))
    for half in gl.static_range(HALVES):
        q = gl.load(
            queries + source[:, None] * HEAD_DIM + half * _COLUMNS + column[None, :],
            mask=is_row[:, None],
            other=0.0,
        )
        query_tile.index(half).store(q)
    fence_async_shared()

    r = gl.arange(0, ROWS, layout=ROW)
    token = r // GROUP
    position = first_position + token
    n = gl.arange(0, _TILE, layout=gl.SliceLayout(1, MMA))
    none = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    nothing = gl.zeros([_TILE, ROWS], gl.float32, layout=MMA)
    m = none
    total = gl.zeros([ROWS], gl.float32, layout=ROW)
    mix0 = nothing
    mix1 = nothing
    mp = none
    lp = nothing
    ap0 = nothing
    ap1 = nothing
    slot = 0
    phase = 0
    TILES: gl.constexpr = SPLIT // _TILE
    for at in range(first_tile, last_tile):
        start = at * _TILE
        mbarrier.wait(key_full.index(slot), phase)
        s = warpgroup_mma(
            keys.index(slot * HALVES),
            query_tile.index(0).permute((1, 0)),
            nothing,
            is_async=True,
        )
        if HALVES == 2:
            s = warpgroup_mma(
                keys.index(slot * HALVES + 1),
                query_tile.index(1).permute((1, 0)),
                s,
                is_async=True,
            )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(key_empty.index(slot))
        place = (start + n)[:, None]
        seen = (place <= position[None, :]) & (place > position[None, :] - window)
        s = gl.where(seen, s * scale, float("-inf"))
        mn = gl.maximum(mp, gl.max(s, axis=0))
        safe = gl.where(mn == float("-inf"), 0.0, mn)
        p = gl.exp2(s - safe[None, :])
        a = gl.exp2(mp - safe)
        mp = mn
        lp = lp * a[None, :] + p
        weight_tile.store(p.to(gl.bfloat16))
        mbarrier.wait(value_full.index(slot), phase)
        if start + _TILE > end:
            for half in gl.static_range(HALVES):
                _clean(values.index(slot * HALVES + half), start, end)
        fence_async_shared()
        ap0 = warpgroup_mma(
            values.index(slot * HALVES).permute((1, 0)),
            weight_tile,
            ap0 * a[None, :],
            is_async=True,
        )
        if HALVES == 2:
            ap1 = warpgroup_mma(
                values.index(slot * HALVES + 1).permute((1, 0)),
                weight_tile,
                ap1 * a[None, :],
                is_async=True,
            )
        ap0, ap1 = warpgroup_mma_wait(0, deps=[ap0, ap1])
        mbarrier.arrive(value_empty.index(slot))
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1
        if (at % TILES == TILES - 1) | (at == last_tile - 1):
            m, total, a, b = _merged(m, total, mp, gl.sum(lp, axis=0))
            mix0 = mix0 * a[None, :] + ap0 * b[None, :]
            mix1 = mix1 * a[None, :] + ap1 * b[None, :]
            mp = none
            lp = nothing
            ap0 = nothing
            ap1 = nothing
    head = kv_head * HEADS_EACH + r % GROUP
    is_row = (token < count) & (r % GROUP < HEADS_EACH)
    d = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, MMA))
    if PARTS_APART:
        kept = is_row & (token == 0)
        at = (gl.program_id(2).to(gl.int64) * num_tiles + tile) * NUM_HEADS + head
        gl.store(part_max + at, m, mask=kept)
        gl.store(part_sum + at, total, mask=kept)
        where = part_mix + at[None, :] * HEAD_DIM + d[:, None]
        both = kept[None, :] & (d < _COLUMNS)[:, None]
        gl.store(where, mix0, mask=both)
        if HALVES == 2:
            gl.store(where + _COLUMNS, mix1, mask=both)
    else:
        row = (first_row + token).to(gl.int64)[None, :] * out_stride
        both = is_row[None, :] & (d < _COLUMNS)[:, None]
        column = head[None, :] * HEAD_DIM + d[:, None]
        gl.store(
            out + row + _operand_place(column), (mix0 / total[None, :]).to(gl.float16), mask=both
        )
        if HALVES == 2:
            gl.store(
                out + row + _operand_place(column + _COLUMNS),
                (mix1 / total[None, :]).to(gl.float16),
                mask=both,
            )


@gluon.jit
def attend(
    queries,
    key_desc,
    value_desc,
    tables,
    tile_rows,
    tile_counts,
    tile_positions,
    tile_tables,
    tile_starts,
    out,
    part_max,
    part_sum,
    part_mix,
    scale,
    window,
    out_stride,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS_APART: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program: up to ROWS / GROUP tokens of one sequence, one key head, its query heads.

    Heads of HALVES * 64 numbers. `tile_starts`: the first position that this step computes, of the
    tile's sequence; the rest as in kernels/attention.py.
    """
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    count = gl.load(tile_counts + tile)
    first_row = gl.load(tile_rows + tile)
    first_position = gl.load(tile_positions + tile)
    old = gl.load(tile_starts + tile)
    table = tables + gl.load(tile_tables + tile)
    end = first_position + count
    begin = gl.maximum(first_position + 1 - window, 0)
    TILES: gl.constexpr = SPLIT // _TILE
    if PARTS_APART:
        first_tile = gl.program_id(2) * TILES
        last_tile = gl.minimum(first_tile + TILES, gl.cdiv(end, _TILE))
    else:
        first_tile = begin // SPLIT * TILES
        last_tile = gl.cdiv(end, _TILE)
    if (count == 0) | (first_tile >= last_tile):
        return
    K: gl.constexpr = key_desc.layout
    keys = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * HALVES, _TILE, _COLUMNS], K)
    values = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * HALVES, _TILE, _COLUMNS], K)
    query_tile = gl.allocate_shared_memory(gl.bfloat16, [HALVES, ROWS, _COLUMNS], K)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE, ROWS], gl.bfloat16)
    weight_tile = gl.allocate_shared_memory(gl.bfloat16, [_TILE, ROWS], WEIGHTS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    key_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    key_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    value_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(key_full.index(slot), count=_TILE // BLOCK_SIZE)
        mbarrier.init(key_empty.index(slot), count=1)
        mbarrier.init(value_full.index(slot), count=_TILE // BLOCK_SIZE)
        mbarrier.init(value_empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    queries,
                    keys,
                    values,
                    query_tile,
                    weight_tile,
                    key_full,
                    key_empty,
                    value_full,
                    value_empty,
                    out,
                    part_max,
                    part_sum,
                    part_mix,
                    scale,
                    window,
                    out_stride,
                    tile,
                    gl.num_programs(1),
                    kv_head,
                    first_row,
                    count,
                    first_position,
                    first_tile,
                    last_tile,
                    NUM_HEADS,
                    NUM_KV_HEADS,
                    HALVES,
                    ROWS,
                    GROUP,
                    SPLIT,
                    SLOTS,
                    PARTS_APART,
                    PDL,
                ),
            ),
            (
                _bring,
                (
                    key_desc,
                    value_desc,
                    table,
                    keys,
                    values,
                    key_full,
                    key_empty,
                    value_full,
                    value_empty,
                    first_tile,
                    last_tile,
                    old,
                    end,
                    kv_head,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    HALVES,
                    SLOTS,
                    PDL,
                ),
            ),
        ],
        [1],
        [24],
    )
