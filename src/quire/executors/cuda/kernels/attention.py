"""Paged attention: one function of a token's row, whether it comes in a prompt or alone.

Positions are cut at absolute multiples of SPLIT. Each part of a row is computed in tiles of TILE
positions, and parts are merged from the first to the last. Whether one program does all parts of a
row or each has a program of its own (`PARTS_APART`) changes nothing in the arithmetic, and neither
do the other rows of a program: what is masked for a row changes none of its bits.
"""

# ruff: noqa: N803, N806

import triton
import triton.language as tl

SPLIT = 512  # positions
TILE = 128
WARPS = 4
STAGES = 3


@triton.jit
def _merged(m0, l0, acc0, m1, l1, acc1):
    """Two parts' maxima, sums and weighted values as one; a part of nothing changes no bit."""
    m = tl.maximum(m0, m1)
    safe = tl.where(m == float("-inf"), 0.0, m)
    a = tl.exp2(m0 - safe)
    b = tl.exp2(m1 - safe)
    return m, l0 * a + l1 * b, acc0 * a[:, None] + acc1 * b[:, None]


@triton.jit
def _operand_place(column):
    """Where a product finds a column, within 128."""
    inner = column % 128
    return column - inner + inner % 32 // 4 * 16 + inner % 4 // 2 * 8 + inner // 32 * 2 + inner % 2


@triton.jit
def attend(
    queries,
    keys,
    values,
    tables,
    tile_rows,
    tile_counts,
    tile_positions,
    tile_tables,
    out,
    part_max,
    part_sum,
    part_mix,
    scale,
    window,
    out_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    PARTS_APART: tl.constexpr,
    LARGE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to ROWS / GROUP tokens of one sequence, one key head, its query heads.

    Tiles of tokens: first row, number of tokens (0: nothing to do), first position, and where their
    sequence's block table starts. LARGE: a layer has more keys than an int32 counts. `scale`
    includes log2(e). GROUP is a power of two.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(tile_counts + tile)
    if count == 0:
        return
    HEADS_EACH: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    first_row = tl.load(tile_rows + tile)
    first_position = tl.load(tile_positions + tile)
    table = tables + tl.load(tile_tables + tile)
    r = tl.arange(0, ROWS)
    token = r // GROUP
    head = kv_head * HEADS_EACH + r % GROUP
    is_row = (token < count) & (r % GROUP < HEADS_EACH)
    position = first_position + token
    d = tl.arange(0, DIMS)
    is_dim = d < HEAD_DIM
    row = (first_row + token).to(tl.int64) * NUM_HEADS + head
    q = tl.load(
        queries + row[:, None] * HEAD_DIM + d[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    end = first_position + count
    begin = tl.maximum(first_position + 1 - window, 0)
    if PARTS_APART:
        first_part = tl.program_id(2)
        last_part = tl.minimum(first_part + 1, tl.cdiv(end, SPLIT))
        if first_part >= tl.cdiv(end, SPLIT):
            return
    else:
        first_part = begin // SPLIT
        last_part = tl.cdiv(end, SPLIT)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for part in range(first_part, last_part):
        mp = tl.full([ROWS], float("-inf"), tl.float32)
        lp = tl.zeros([ROWS], tl.float32)
        ap = tl.zeros([ROWS, DIMS], tl.float32)
        stop = tl.minimum((part + 1) * SPLIT, end)
        for start in range(part * SPLIT, stop, TILE):
            n = start + tl.arange(0, TILE)
            is_there = n < end
            block = tl.load(table + n // BLOCK_SIZE, mask=is_there, other=0)
            if LARGE:
                block = block.to(tl.int64)
            cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * HEAD_DIM
            both = is_there[:, None] & is_dim[None, :]
            k = tl.load(keys + cell[:, None] + d[None, :], mask=both, other=0.0)
            if EXACT:
                s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
            else:
                s = tl.dot(q, tl.trans(k))
            seen = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
            s = tl.where(seen, s * scale, float("-inf"))
            mn = tl.maximum(mp, tl.max(s, axis=1))
            safe = tl.where(mn == float("-inf"), 0.0, mn)
            p = tl.exp2(s - safe[:, None])
            a = tl.exp2(mp - safe)
            lp = lp * a + tl.sum(p, axis=1)
            ap = ap * a[:, None]
            v = tl.load(values + cell[:, None] + d[None, :], mask=both, other=0.0)
            if EXACT:
                ap += tl.dot(
                    p.to(tl.bfloat16).to(tl.float32), v.to(tl.float32), input_precision="ieee"
                )
            else:
                ap = tl.dot(p.to(tl.bfloat16), v, ap)
            mp = mn
        m, total, acc = _merged(m, total, acc, mp, lp, ap)
    if PARTS_APART:
        place = (
            tl.program_id(2).to(tl.int64) * tl.num_programs(0) * NUM_HEADS + tile * NUM_HEADS + head
        )
        kept = is_row & (token == 0)
        tl.store(part_max + place, m, mask=kept)
        tl.store(part_sum + place, total, mask=kept)
        tl.store(
            part_mix + place[:, None] * HEAD_DIM + d[None, :],
            acc,
            mask=kept[:, None] & is_dim[None, :],
        )
    else:
        mixed = acc / total[:, None]
        place = _operand_place(head[:, None] * HEAD_DIM + d[None, :])
        at = (first_row + token).to(tl.int64)[:, None] * out_stride + place
        tl.store(out + at, mixed.to(tl.float16), mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def merge_parts(
    tile_rows,
    tile_counts,
    tile_positions,
    out,
    part_max,
    part_sum,
    part_mix,
    window,
    out_stride,
    num_tiles,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `attend` left in parts, for tiles of one token: merged from the first to the last."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if tl.load(tile_counts + tile) == 0:
        return
    position = tl.load(tile_positions + tile)
    row = tl.load(tile_rows + tile)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    d = tl.arange(0, DIMS)
    mask = is_head[:, None] & (d < HEAD_DIM)[None, :]
    m = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIMS], tl.float32)
    for part in range(tl.maximum(position + 1 - window, 0) // SPLIT, position // SPLIT + 1):
        place = (part * num_tiles + tile).to(tl.int64) * NUM_HEADS + head
        m1 = tl.load(part_max + place, mask=is_head, other=float("-inf"))
        l1 = tl.load(part_sum + place, mask=is_head, other=0.0)
        acc1 = tl.load(part_mix + place[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        m, total, acc = _merged(m, total, acc, m1, l1, acc1)
    mixed = acc / total[:, None]
    at = row.to(tl.int64) * out_stride + _operand_place(head[:, None] * HEAD_DIM + d[None, :])
    tl.store(out + at, mixed.to(tl.float16), mask=mask)
