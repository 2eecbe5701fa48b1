"""Paged attention: one function of a token's row, whether it comes in a prompt or alone.

The context is split at absolute multiples of SPLIT_SIZE positions. Each split of a row is computed
in tiles of TILE positions, and splits are merged from the first to the last. Whether one program
does all splits of a row or each split has its own program (SPLIT_PROGRAMS) changes nothing in the
arithmetic, and neither do the other rows of a program: what is masked for a row changes none of its
bits.

Queries and softmax weights are multiplied in the type of the cache, beside a cache of codes
(kernels/kv_codes.py) in bfloat16: keys' scales multiply scores, values' scales the weights. Beside
queries in float32 both are sums of two such numbers, so that nothing but the cache is rounded.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.kv_codes import decoded

SPLIT_SIZE = 512  # positions
TILE = 128  # positions
WIDE_TILE = 32  # of heads for which so many keys and values are too large
WARPS = 4
MANY_WARPS = 8  # beside a cache of codes, which take registers to decode, and for wide heads
STAGES = 3


class TokenTiles(NamedTuple):
    """Of each tile of tokens of one sequence, int32."""

    rows: Any  # its first row
    counts: Any  # tokens; 0: nothing to do
    positions: Any  # of its first token
    tables: Any  # where the sequence's block table starts
    starts: Any  # the first position that this step computes of the sequence


class SplitBuffers(NamedTuple):
    """What SPLIT_PROGRAMS leave for `merge_splits`: float32, [split, tile, head] each."""

    maxima: Any
    sums: Any
    outputs: Any  # [split, tile, head, head_dim], not divided by the sums


class AttentionShape(NamedTuple):
    """Sizes of a launch, known when a kernel is compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: int  # of a program: tokens times `group`
    group: int  # query heads of a kv head, up to a power of two
    split_size: int
    tile: int
    block_heads: int  # kv heads of that size that a block of the cache has room for
    # Latent attention: keys have so many numbers more, behind those that are values too. All heads
    # share one key, and a program has some of the heads as if it were theirs alone.
    rope_dims: int
    out_dim: int  # columns of a head in `out`


@triton.jit
def _merged(max0, sum0, acc0, max1, sum1, acc1):
    """Two splits' maxima, sums and weighted values as one; an empty split changes no bit."""
    largest = tl.maximum(max0, max1)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    a = tl.exp2(max0 - safe)
    b = tl.exp2(max1 - safe)
    return largest, sum0 * a + sum1 * b, acc0 * a[:, None] + acc1 * b[:, None]


@triton.jit
def with_sink(row_max, row_sum, sink):
    """Maximum and sum with the head's sink, a score without a value; what the weighted values are
    multiplied by."""
    largest = tl.maximum(row_max, sink)
    factor = tl.exp2(row_max - largest)
    return row_sum * factor + tl.exp2(sink - largest), factor


@triton.jit
def scaled_scores(s, scale, soft_cap):
    """Scores for exp2. With a soft cap, cap * tanh(score / cap), where `scale` and `soft_cap` come
    as LayerAttention gives them."""
    s = s * scale
    if soft_cap is not None:
        s = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(s))
    return s


@triton.jit
def _rounding_error(x, half):
    return (x - half.to(tl.float32)).to(half.dtype)


@triton.jit
def _dot(a, b, acc, PAIRED: tl.constexpr, EXACT: tl.constexpr):
    """acc + a * b, where `a` is rounded to the type of `b`, and with PAIRED so is its error."""
    half = a.to(b.dtype)
    if EXACT:
        whole = half.to(tl.float32)
        if PAIRED:
            whole += _rounding_error(a, half).to(tl.float32)
        acc += tl.dot(whole, b.to(tl.float32), input_precision="ieee")
    else:
        if PAIRED:
            acc = tl.dot(_rounding_error(a, half), b, acc)
        acc = tl.dot(half, b, acc)
    return acc


@triton.jit
def operand_column(column):
    """A column's index in operand order (see planes.py)."""
    inner = column % 128
    return column - inner + inner % 32 // 4 * 16 + inner % 4 // 2 * 8 + inner // 32 * 2 + inner % 2


@triton.jit
def _attend_split(
    q,
    q_rope,
    keys,
    values,
    scales,
    table,
    kv_head,
    position,
    start,
    stop,
    begin,
    end,
    scale,
    window,
    soft_cap,
    slope,
    DIMS: tl.constexpr,
    ROPE: tl.constexpr,
    SHAPE: tl.constexpr,
    LARGE: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Online softmax over the positions of one split: maxima, sums and weighted values."""
    ROWS: tl.constexpr = SHAPE.rows
    PAIRED: tl.constexpr = q.dtype == tl.float32
    TILE_SIZE: tl.constexpr = SHAPE.tile
    d = tl.arange(0, DIMS)
    is_dim = d < SHAPE.head_dim
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(start, stop, SHAPE.tile):
        n = first + tl.arange(0, SHAPE.tile)
        is_there = (n < end) & (n >= begin)  # blocks before the window may be another sequence's
        block = tl.load(table + n // SHAPE.block_size, mask=is_there, other=0)
        if LARGE:
            block = block.to(tl.int64)
        slot = (block * SHAPE.block_heads + kv_head) * SHAPE.block_size + n % SHAPE.block_size
        index = slot * (SHAPE.head_dim + SHAPE.rope_dims)
        mask = is_there[:, None] & is_dim[None, :]
        k = tl.load(keys + index[:, None] + d[None, :], mask=mask, other=0)
        if scales is not None:
            k = decoded(k)
            place = 2 * slot - n % SHAPE.block_size
            key_scale = tl.load(scales + place, mask=is_there, other=0.0)
            value_scale = tl.load(scales + place + SHAPE.block_size, mask=is_there, other=0.0)
        s = _dot(q, tl.trans(k), tl.zeros([ROWS, TILE_SIZE], tl.float32), PAIRED, EXACT)
        if SHAPE.rope_dims > 0:
            r = tl.arange(0, ROPE)[None, :]
            is_rope = is_there[:, None] & (r < SHAPE.rope_dims)
            rotated = keys + index[:, None] + SHAPE.head_dim + r
            s = _dot(q_rope, tl.trans(tl.load(rotated, mask=is_rope, other=0)), s, PAIRED, EXACT)
        if CHUNKED:
            is_seen = n[None, :] >= (position // window * window)[:, None]
            is_seen = is_seen & (n[None, :] <= position[:, None])
        else:
            is_seen = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        if scales is not None:
            s = s * key_scale[None, :]
        s = scaled_scores(s, scale, soft_cap)
        if slope is not None:
            s += slope[:, None] * (n[None, :] - position[:, None]).to(tl.float32)
        s = tl.where(is_seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        safe = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - safe[:, None])
        rescale = tl.exp2(row_max - safe)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        if SHAPE.rope_dims > 0:
            v = k
        else:
            v = tl.load(values + index[:, None] + d[None, :], mask=mask, other=0)
        if scales is not None:
            v = decoded(v)
            p = tl.where(is_seen, p * value_scale[None, :], 0.0)
        acc = _dot(p, v, acc, PAIRED, EXACT)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def attend(
    queries,
    keys,
    values,
    scales,
    tables,
    tiles,
    out,
    splits,
    scale,
    window,
    out_stride,
    sinks,
    soft_cap,
    slopes,
    SHAPE: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT_PROGRAMS: tl.constexpr,
    LARGE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
    CHUNKED: tl.constexpr = False,
    PARTS: tl.constexpr = 1,
    ROPE: tl.constexpr = 0,
):
    """One program: up to rows / group tokens of one sequence, one kv head, its query heads.

    `tiles` are TokenTiles, `splits` SplitBuffers. DIMS: head_dim up to a power of two. LARGE: a
    layer has more keys than an int32 counts. EXACT: float32 operands, for Triton's interpreter.
    `scale` includes log2(e), and so do `sinks` [heads] and `slopes` [heads], which are multiplied
    by the position of a key less the query's and added to scores; without these, and without a
    `soft_cap`, they are None. `scales` are those of a cache of codes, or None. CHUNKED: `window` is
    the size of chunks. PARTS programs share a tile's tokens, rows / group each. ROPE:
    rope_dims up to a power of two.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = SHAPE.rows
    GROUP: tl.constexpr = SHAPE.group
    HEADS_EACH: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    tile = tl.program_id(0)
    if PARTS > 1:
        before = tile % PARTS * (ROWS // GROUP)
        tile = tile // PARTS
    kv_head = tl.program_id(1)
    count = tl.load(tiles.counts + tile)
    if PARTS > 1:
        count = tl.maximum(tl.minimum(count - before, ROWS // GROUP), 0)
    if count == 0:
        return
    first_row = tl.load(tiles.rows + tile)
    first_position = tl.load(tiles.positions + tile)
    if PARTS > 1:
        first_row += before
        first_position += before
    table = tables + tl.load(tiles.tables + tile)
    r = tl.arange(0, ROWS)
    token = r // GROUP
    head = kv_head * HEADS_EACH + r % GROUP
    is_row = (token < count) & (r % GROUP < HEADS_EACH)
    position = first_position + token
    d = tl.arange(0, DIMS)
    is_dim = d < SHAPE.head_dim
    row = (first_row + token).to(tl.int64) * SHAPE.num_heads + head
    address = queries + row[:, None] * (SHAPE.head_dim + SHAPE.rope_dims)
    q = tl.load(address + d[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    q_rope = q
    if SHAPE.rope_dims > 0:
        rotated = tl.arange(0, ROPE)[None, :]
        is_rope = is_row[:, None] & (rotated < SHAPE.rope_dims)
        q_rope = tl.load(address + SHAPE.head_dim + rotated, mask=is_rope, other=0.0)
        kv_head = 0
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)
    end = first_position + count
    if CHUNKED:
        begin = first_position // window * window
    else:
        begin = tl.maximum(first_position + 1 - window, 0)
    if SPLIT_PROGRAMS:
        first_split = tl.program_id(2)
        last_split = tl.minimum(first_split + 1, tl.cdiv(end, SHAPE.split_size))
        if (first_split >= last_split) | (last_split * SHAPE.split_size <= begin):
            return
    else:
        first_split = begin // SHAPE.split_size
        last_split = tl.cdiv(end, SHAPE.split_size)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for split in range(first_split, last_split):
        start = tl.maximum(split * SHAPE.split_size, begin // SHAPE.tile * SHAPE.tile)
        stop = tl.minimum((split + 1) * SHAPE.split_size, end)
        split_max, split_sum, split_acc = _attend_split(
            q,
            q_rope,
            keys,
            values,
            scales,
            table,
            kv_head,
            position,
            start,
            stop,
            begin,
            end,
            scale,
            window,
            soft_cap,
            slope,
            DIMS,
            ROPE,
            SHAPE,
            LARGE,
            EXACT,
            CHUNKED,
        )
        row_max, row_sum, acc = _merged(row_max, row_sum, acc, split_max, split_sum, split_acc)
    if SPLIT_PROGRAMS:
        split = tl.program_id(2).to(tl.int64)
        index = split * tl.num_programs(0) * SHAPE.num_heads + tile * SHAPE.num_heads + head
        is_kept = is_row & (token == 0)
        tl.store(splits.maxima + index, row_max, mask=is_kept)
        tl.store(splits.sums + index, row_sum, mask=is_kept)
        tl.store(
            splits.outputs + index[:, None] * SHAPE.head_dim + d[None, :],
            acc,
            mask=is_kept[:, None] & is_dim[None, :],
        )
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=0.0)
            row_sum, factor = with_sink(row_max, row_sum, sink)
            acc = acc * factor[:, None]
        output = acc / row_sum[:, None]
        column = operand_column(head[:, None] * SHAPE.out_dim + d[None, :])
        index = (first_row + token).to(tl.int64)[:, None] * out_stride + column
        tl.store(
            out + index, output.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :]
        )


@triton.jit
def appended(items, item):
    return items + (item,)  # noqa: RUF005


@triton.jit
def _load_splits(
    splits, first, last, num_tiles, tile, head, d, AT_ONCE: tl.constexpr, SHAPE: tl.constexpr
):
    """Maxima, sums and outputs of AT_ONCE splits; those from `last` on are empty."""
    is_dim = (d < SHAPE.head_dim)[None, :]
    made = ()
    for ahead in tl.static_range(AT_ONCE):
        split = first + ahead
        is_head = (head < SHAPE.num_heads) & (split < last)
        index = (split * num_tiles + tile).to(tl.int64) * SHAPE.num_heads + head
        split_max = tl.load(splits.maxima + index, mask=is_head, other=float("-inf"))
        split_sum = tl.load(splits.sums + index, mask=is_head, other=0.0)
        address = splits.outputs + index[:, None] * SHAPE.head_dim + d[None, :]
        split_acc = tl.load(address, mask=is_head[:, None] & is_dim, other=0.0)
        made = appended(made, (split_max, split_sum, split_acc))
    return made


@triton.jit
def merge_splits(
    tiles,
    out,
    splits,
    window,
    out_stride,
    num_tiles,
    sinks,
    SHAPE: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):
    """What SPLIT_PROGRAMS left, for tiles of one token: merged from the first split to the last.
    One program: a tile and HEADS heads. AT_ONCE splits are loaded before they are merged, so that
    their latencies overlap."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if tl.load(tiles.counts + tile) == 0:
        return
    position = tl.load(tiles.positions + tile)
    row = tl.load(tiles.rows + tile)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < SHAPE.num_heads
    d = tl.arange(0, DIMS)
    mask = is_head[:, None] & (d < SHAPE.head_dim)[None, :]
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIMS], tl.float32)
    if CHUNKED:
        first_split = position // window * window // SHAPE.split_size
    else:
        first_split = tl.maximum(position + 1 - window, 0) // SHAPE.split_size
    last_split = position // SHAPE.split_size + 1
    for first in range(first_split, last_split, AT_ONCE):
        loaded = _load_splits(splits, first, last_split, num_tiles, tile, head, d, AT_ONCE, SHAPE)
        for ahead in tl.static_range(AT_ONCE):
            split_max, split_sum, split_acc = loaded[ahead]
            row_max, row_sum, acc = _merged(row_max, row_sum, acc, split_max, split_sum, split_acc)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        row_sum, factor = with_sink(row_max, row_sum, sink)
        acc = acc * factor[:, None]
    output = acc / row_sum[:, None]
    first = row.to(tl.int64) * out_stride
    column = operand_column(head[:, None] * SHAPE.out_dim + d[None, :])
    tl.store(out + (first + column), output.to(out.dtype.element_ty), mask=mask)
