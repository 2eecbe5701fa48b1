"""Paged attention on Hopper, in Gluon: what kernels/attention.py computes, with TMA and wgmma.

Keys and values are the M side of wgmma and are read where TMA put them; the rows of a program
(tokens times the heads of a group) are its N side, so that 8 to 32 rows run the same instructions
and a row's bits depend on none of the others. One warp loads blocks of the cache, four compute.
Blocks of earlier steps are prefetched before the previous kernel has ended. The context is split
as in kernels/attention.py, in tiles of TILE positions.

Of a cache of codes (kernels/kv_codes.py) keys become float16 in registers, from which wgmma takes
its M side too, and are multiplied with queries in float16; values, whose M side are columns, become
bfloat16, for the range of weights times scales, in a tile of shared memory beside the ring. Every
byte of a value is decoded to a finite number: what nobody wrote needs no masking but its scale.

Constants of a launch: SHAPE is an attention.AttentionShape, STAGES the length of the ring.
"""

# ruff: noqa: N803, N806

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

from quire.executors.cuda.kernels.attention import operand_column, scaled_scores, with_sink
from quire.executors.cuda.kernels.hopper import (
    allocate_barriers,
    allow_next_kernel,
    next_stage,
    wait_for_previous_kernel,
)

TILE = 64  # positions: the M side of one instruction
COLUMNS = 64  # of a head, in one tile of shared memory: 128 bytes, swizzled
WARPS = 4

_FEW_TOKENS = 128


def num_stages(num_tokens: int, rows: int, *, is_8bit: bool) -> int:
    """Tiles of keys, and of values, in flight: more where there are few programs. Of codes, for as
    many programs as registers allow."""
    if is_8bit:
        return 2 if rows == 8 else 3
    return 3 if num_tokens <= _FEW_TOKENS else 2


def num_registers(rows: int, head_dim: int, *, paired: bool, is_8bit: bool = False) -> int:
    """Of a thread, at most: three programs a multiprocessor, or two; wide heads fill its shared
    memory with one. Of heads of 64, whose programs are short, five, unless queries are pairs."""
    if is_8bit:
        if head_dim > 128 or (paired and rows > 8):
            return 168
        return 64 if rows == 8 and not paired else 128  # 64: four programs a multiprocessor
    if head_dim == 64 and rows == 8 and not paired:
        return 48
    if head_dim > 128:
        return 80 if rows == 8 else 168
    return 128 if rows == 32 else 80


_TILE, _COLUMNS = gl.constexpr(TILE), gl.constexpr(COLUMNS)
_SLACK = gl.constexpr(8.0)  # powers of two that softmax weights may grow by before they are scaled

# Four codes as two pairs of float16. int8: 0x64 before a code makes 1024 more than it.
_ASM_INT8_KEYS = gl.constexpr(
    """
    {
    .reg .b32 code, low, high, zero;
    mov.b32 zero, 0x64806480;
    xor.b32 code, $2, 0x80808080;
    prmt.b32 low, code, 0x64646464, 0x4140;
    prmt.b32 high, code, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, low, zero;
    sub.rn.f16x2 $1, high, zero;
    }
    """
)
_ASM_E4M3_KEYS = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
# Four codes as two pairs of bfloat16. int8: 0x43 before a code's lower seven bits makes 128 more
# than these; 0x43 before its sign bit makes 128, or 256, which is subtracted. e4m3: exponent and
# mantissa go where bfloat16 has its own, whose exponents are 120 larger.
_ASM_INT8 = gl.constexpr(
    """
    {
    .reg .b32 low, high, a, b;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    and.b32 a, low, 0xff7fff7f;
    and.b32 b, low, 0xff80ff80;
    sub.rn.bf16x2 $0, a, b;
    and.b32 a, high, 0xff7fff7f;
    and.b32 b, high, 0xff80ff80;
    sub.rn.bf16x2 $1, a, b;
    }
    """
)
_ASM_E4M3 = gl.constexpr(
    """
    {
    .reg .b32 low, high, a, b, power;
    mov.b32 power, 0x7b807b80;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 a, low, 0x7f007f00;
    and.b32 b, low, 0x80008000;
    shr.b32 a, a, 4;
    or.b32 a, a, b;
    mul.rn.bf16x2 $0, a, power;
    and.b32 a, high, 0x7f007f00;
    and.b32 b, high, 0x80008000;
    shr.b32 a, a, 4;
    or.b32 a, a, b;
    mul.rn.bf16x2 $1, a, power;
    }
    """
)


class CacheRing(NamedTuple):
    """Stages of keys and values in shared memory, a tile of positions each."""

    key_tiles: Any  # halves or codes [stages * head_dim / COLUMNS, TILE, COLUMNS]
    value_tiles: Any
    key_full: Any
    key_empty: Any
    value_full: Any
    value_empty: Any


class Program(NamedTuple):
    """What a program computes: tokens of one tile and one kv head, over a range of tiles."""

    tile: Any
    num_tiles: Any
    kv_head: Any
    first_row: Any
    count: Any
    first_position: Any
    first_tile: Any
    last_tile: Any


class Output(NamedTuple):
    out: Any  # float16 or float32 [tokens, heads * head_dim], in operand order
    splits: Any  # attention.SplitBuffers
    out_stride: Any


# ---- load: the producer warp


@gluon.jit
def _load_tile(
    desc, table, tiles, full, stage, start, begin, end, kv_head, COLUMN_TILES: gl.constexpr, SHAPE
):
    """The blocks of one tile; blocks past the end, or wholly before `begin` (None: there are none),
    are not loaded, and arrive at once."""
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    NUMBER_BYTES: gl.constexpr = desc.dtype.primitive_bitwidth // 8
    NUM_BYTES: gl.constexpr = BLOCK_SIZE * COLUMN_TILES * _COLUMNS * NUMBER_BYTES
    barrier = full.index(stage)
    for index in gl.static_range(_TILE // BLOCK_SIZE):
        position = start + index * BLOCK_SIZE
        is_there = position < end
        if begin is not None:
            is_there = is_there & (position + BLOCK_SIZE > begin)
        block = gl.load(table + position // BLOCK_SIZE, mask=is_there, other=0)
        row = (block * SHAPE.block_heads + kv_head) * BLOCK_SIZE
        mbarrier.expect(barrier, NUM_BYTES, pred=is_there)
        is_missing = position >= end
        if begin is not None:
            is_missing = is_missing | (position + BLOCK_SIZE <= begin)
        mbarrier.arrive(barrier, count=1, pred=is_missing)
        for column_tile in gl.static_range(COLUMN_TILES):
            target = tiles.index(stage * COLUMN_TILES + column_tile)
            tma.async_copy_global_to_shared(
                desc,
                [row, column_tile * _COLUMNS],
                barrier,
                target.slice(index * BLOCK_SIZE, BLOCK_SIZE, 0),
                pred=is_there,
            )


@gluon.jit
def _load_cache(
    key_desc,
    value_desc,
    table,
    ring: CacheRing,
    first_tile,
    last_tile,
    num_old,
    begin,
    end,
    kv_head,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of keys and values into the ring. Positions below `num_old` are of earlier steps; later
    ones were written by the previous kernel, which must have ended."""
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    if PDL:
        allow_next_kernel()
    stage = 0
    phase = 1
    has_waited = 0
    for tile in range(first_tile, last_tile):
        start = tile * _TILE
        if PDL and (start + _TILE > num_old) & (has_waited == 0):
            wait_for_previous_kernel()
            has_waited = 1
        mbarrier.wait(ring.key_empty.index(stage), phase)
        _load_tile(
            key_desc,
            table,
            ring.key_tiles,
            ring.key_full,
            stage,
            start,
            begin,
            end,
            kv_head,
            COLUMN_TILES,
            SHAPE,
        )
        mbarrier.wait(ring.value_empty.index(stage), phase)
        _load_tile(
            value_desc,
            table,
            ring.value_tiles,
            ring.value_full,
            stage,
            start,
            begin,
            end,
            kv_head,
            COLUMN_TILES,
            SHAPE,
        )
        stage, phase = next_stage(stage, phase, STAGES)


# ---- compute: the consumer warps


@gluon.jit
def _store_halves(x, tile, index: gl.constexpr, error_index: gl.constexpr, PAIRED: gl.constexpr):
    """`x` rounded to the tile's type, and with PAIRED the error of that."""
    half = x.to(tile.dtype)
    tile.index(index).store(half)
    if PAIRED:
        tile.index(error_index).store((x - half.to(gl.float32)).to(tile.dtype))


@gluon.jit
def _load_queries(
    queries,
    query_tile,
    program: Program,
    SHAPE: gl.constexpr,
    PAIRED: gl.constexpr,
    OF_CODES: gl.constexpr,
):
    """OF_CODES: columns in the order in which `_code_scores` has those of keys."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS_EACH: gl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    GROUP: gl.constexpr = SHAPE.group
    r = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, LAYOUT))
    is_row = (r // GROUP < program.count) & (r % GROUP < HEADS_EACH)
    token = (program.first_row + r // GROUP).to(gl.int64)
    row = token * SHAPE.num_heads + program.kv_head * HEADS_EACH + r % GROUP
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    if OF_CODES:
        inner = column % 16
        column = column - inner + inner % 8 // 2 * 4 + inner // 8 * 2 + inner % 2
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    for column_tile in gl.static_range(COLUMN_TILES):
        q = gl.load(
            queries + row[:, None] * SHAPE.head_dim + column_tile * _COLUMNS + column[None, :],
            mask=is_row[:, None],
            other=0.0,
        )
        _store_halves(q, query_tile, column_tile, COLUMN_TILES + column_tile, PAIRED)
    fence_async_shared()


@gluon.jit
def _scores(
    ring: CacheRing, query_tile, stage, zeros, COLUMN_TILES: gl.constexpr, PAIRED: gl.constexpr
):
    """Keys of a stage times queries, [TILE, rows]; frees the keys."""
    scores = zeros
    for part in gl.static_range(2 if PAIRED else 1):
        for column_tile in gl.static_range(COLUMN_TILES):
            scores = warpgroup_mma(
                ring.key_tiles.index(stage * COLUMN_TILES + column_tile),
                query_tile.index(part * COLUMN_TILES + column_tile).permute((1, 0)),
                scores,
                is_async=True,
            )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.key_empty.index(stage))
    return scores


@gluon.jit
def _decoded_keys(codes):
    """As float16, without scales."""
    ASM: gl.constexpr = _ASM_INT8_KEYS if codes.dtype == gl.int8 else _ASM_E4M3_KEYS
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
    )


@gluon.jit
def _decoded_values(codes):
    """As bfloat16, without scales."""
    ASM: gl.constexpr = _ASM_INT8 if codes.dtype == gl.int8 else _ASM_E4M3
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def _code_operand(codes, OPERAND: gl.constexpr):
    """Keys as an operand. A thread has four columns in a row, of which the operand's layout wants
    two and, eight columns on, two more: so columns are taken in another order, as of queries."""
    halves = _decoded_keys(codes).reshape([_TILE, 4, 4, 2, 2]).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(halves.reshape([_TILE, _COLUMNS]), OPERAND)


@gluon.jit
def _code_scores(
    ring: CacheRing,
    query_tile,
    stage,
    zeros,
    MMA: gl.constexpr,
    COLUMN_TILES: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """As `_scores`, of codes, without their scales. The keys are free once all are in registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[_TILE, _COLUMNS],
    )
    keys = ()
    for column_tile in gl.static_range(COLUMN_TILES):
        codes = ring.key_tiles.index(stage * COLUMN_TILES + column_tile).load(LAYOUT)
        keys = _appended(keys, _code_operand(codes, OPERAND))
    scores = zeros
    for part in gl.static_range(2 if PAIRED else 1):
        for column_tile in gl.static_range(COLUMN_TILES):
            queries = query_tile.index(part * COLUMN_TILES + column_tile).permute((1, 0))
            scores = warpgroup_mma(keys[column_tile], queries, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    gl.thread_barrier()
    fence_async_shared()
    mbarrier.arrive(ring.key_empty.index(stage))
    return scores


@gluon.jit
def _decode_values(ring: CacheRing, value_halves, stage, COLUMN_TILES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    for tile in gl.static_range(COLUMN_TILES):
        codes = ring.value_tiles.index(stage * COLUMN_TILES + tile).load(LAYOUT)
        value_halves.index(tile).store(_decoded_values(codes))


@gluon.jit
def _blocks_at(table, position, begin, end, SHAPE: gl.constexpr):
    """The blocks of these positions; 0 of those that are not there."""
    is_there = position < end
    if begin is not None:
        is_there = is_there & (position >= begin)
    return gl.load(table + position // SHAPE.block_size, mask=is_there, other=0)


@gluon.jit
def _scales_at(scales, blocks, position, begin, end, kv_head, SHAPE: gl.constexpr):
    """Of keys and of values at these positions."""
    is_there = position < end
    if begin is not None:
        is_there = is_there & (position >= begin)
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    of_head = (blocks * SHAPE.block_heads + kv_head) * (2 * BLOCK_SIZE)
    address = scales + of_head + position % BLOCK_SIZE
    keys = gl.load(address, mask=is_there, other=0.0)
    return keys, gl.load(address + BLOCK_SIZE, mask=is_there, other=0.0)


@gluon.jit
def zero_stale_rows(values, start, begin, end):
    """Positions past the end were never written, or by another sequence: 0 * NaN is NaN. Those
    before `begin` were not loaded."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = values.load(LAYOUT)
    position = start + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    is_there = position < end
    if begin is not None:
        is_there = is_there & (position >= begin)
    values.store(gl.where(is_there[:, None], x, 0.0))


@gluon.jit
def _appended(items, item):
    return items + (item,)  # noqa: RUF005


@gluon.jit
def _accumulate(
    ring: CacheRing,
    value_tiles,
    first,
    weight_tile,
    stage,
    accs,
    rescale,
    COLUMN_TILES: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """accs * rescale + values of a stage, the tiles from `first` on, times weights: [COLUMNS, rows]
    each; frees the stage's values."""
    made = ()
    for tile in gl.static_range(COLUMN_TILES):
        values = value_tiles.index(first + tile).permute((1, 0))
        acc = accs[tile] * rescale[None, :]
        acc = warpgroup_mma(values, weight_tile.index(0), acc, is_async=True)
        if PAIRED:
            acc = warpgroup_mma(values, weight_tile.index(1), acc, is_async=True)
        made = _appended(made, acc)
    made = _waited(made, COLUMN_TILES)
    mbarrier.arrive(ring.value_empty.index(stage))
    return made


@gluon.jit
def _waited(accs, COLUMN_TILES: gl.constexpr):
    if COLUMN_TILES == 1:
        acc = warpgroup_mma_wait(0, deps=[accs[0]])
        waited = (acc,)
    elif COLUMN_TILES == 2:
        waited = warpgroup_mma_wait(0, deps=[accs[0], accs[1]])
    else:
        waited = warpgroup_mma_wait(0, deps=[accs[0], accs[1], accs[2], accs[3]])
    return waited


@gluon.jit
def _pair_sums(p):
    """[TILE, rows] summed over bit 3 of positions, which a thread has both of: [4, 8, rows]."""
    return gl.sum(p.reshape([_TILE // 16, 2, 8, p.shape[1]]), axis=1)


@gluon.jit
def _combined(accs, a, others, b, COLUMN_TILES: gl.constexpr):
    """accs * a + others * b, by row."""
    made = ()
    for tile in gl.static_range(COLUMN_TILES):
        made = _appended(made, accs[tile] * a[None, :] + others[tile] * b[None, :])
    return made


@gluon.jit
def _repeated(x, COUNT: gl.constexpr):
    made = ()
    for _ in gl.static_range(COUNT):
        made = _appended(made, x)
    return made


@gluon.jit
def capped(s, scale, soft_cap):
    """Scores: with a soft cap scaled and capped, else as they are, for `softmax_weights`."""
    if soft_cap is not None:
        s = scaled_scores(s, scale, soft_cap)
    return s


@gluon.jit
def softmax_weights(s, split_max, scale, soft_cap, POSITIONS: gl.constexpr):
    """Of a tile of `capped` scores, whose axis POSITIONS is given: the weights, the factor of what
    was before, and the number that a row's weights are relative to: 2 ** (score - number). It is
    raised only where a score is more than _SLACK above it, so that the factor is nearly always 1;
    weights of up to 2 ** _SLACK have the same relative error, and their sums are in float32."""
    tile_max = gl.max(s, axis=POSITIONS)
    if soft_cap is None:
        tile_max = tile_max * scale
    new_max = gl.where(tile_max > split_max + _SLACK, tile_max, split_max)
    safe = gl.where(new_max == float("-inf"), 0.0, new_max)
    if soft_cap is None:
        exponent = gl.fma(s, scale, -gl.expand_dims(safe, POSITIONS))
    else:
        exponent = s - gl.expand_dims(safe, POSITIONS)
    return gl.exp2(exponent), gl.exp2(split_max - safe), new_max


@gluon.jit
def merged(max0, sum0, max1, sum1):
    """As kernels/attention.py merges: the maximum, the sum, and each side's factor."""
    largest = gl.maximum(max0, max1)
    safe = gl.where(largest == float("-inf"), 0.0, largest)
    a = gl.exp2(max0 - safe)
    b = gl.exp2(max1 - safe)
    return largest, sum0 * a + sum1 * b, a, b


@gluon.jit
def _store(
    row_max,
    row_sum,
    accs,
    program: Program,
    output: Output,
    sinks,
    MMA: gl.constexpr,
    SHAPE: gl.constexpr,
    SPLIT_PROGRAMS: gl.constexpr,
):
    HEADS_EACH: gl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    r = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, MMA))
    token = r // SHAPE.group
    head = program.kv_head * HEADS_EACH + r % SHAPE.group
    is_row = (token < program.count) & (r % SHAPE.group < HEADS_EACH)
    d = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, MMA))
    if SPLIT_PROGRAMS:
        is_kept = is_row & (token == 0)
        split = gl.program_id(2).to(gl.int64)
        index = (split * program.num_tiles + program.tile) * SHAPE.num_heads + head
        gl.store(output.splits.maxima + index, row_max, mask=is_kept)
        gl.store(output.splits.sums + index, row_sum, mask=is_kept)
        address = output.splits.outputs + index[None, :] * SHAPE.head_dim + d[:, None]
        mask = is_kept[None, :] & (d < _COLUMNS)[:, None]
        for tile in gl.static_range(COLUMN_TILES):
            gl.store(address + tile * _COLUMNS, accs[tile], mask=mask)
    else:
        if sinks is not None:
            sink = gl.load(sinks + head, mask=is_row, other=0.0)
            row_sum, factor = with_sink(row_max, row_sum, sink)
        row = (program.first_row + token).to(gl.int64)[None, :] * output.out_stride
        mask = is_row[None, :] & (d < _COLUMNS)[:, None]
        column = head[None, :] * SHAPE.head_dim + d[:, None]
        for tile in gl.static_range(COLUMN_TILES):
            acc = accs[tile]
            if sinks is not None:
                acc = acc * factor[None, :]
            address = output.out + row + operand_column(column + tile * _COLUMNS)
            gl.store(address, (acc / row_sum[None, :]).to(output.out.dtype.element_ty), mask=mask)


@gluon.jit
def _compute(
    queries,
    ring: CacheRing,
    query_tile,
    weight_tile,
    value_halves,
    scales,
    table,
    program: Program,
    output: Output,
    scale,
    window,
    sinks,
    soft_cap,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_PROGRAMS: gl.constexpr,
    WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Online softmax of a program's rows. Sums stay apart by place in the tile until a split ends;
    accumulators are [COLUMNS, rows], as many as a head has tiles of columns."""
    ROWS: gl.constexpr = SHAPE.rows
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    TILES_PER_SPLIT: gl.constexpr = SHAPE.split_size // _TILE
    end = program.first_position + program.count
    begin = program.first_position + 1 - window if WINDOWED else None
    if PDL:
        wait_for_previous_kernel()
    PAIRED: gl.constexpr = queries.dtype.element_ty == gl.float32
    _load_queries(queries, query_tile, program, SHAPE, PAIRED, scales is not None)

    position = program.first_position + gl.arange(0, ROWS, layout=ROW) // SHAPE.group
    n = gl.arange(0, _TILE, layout=gl.SliceLayout(1, MMA))
    lowest = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    zeros = gl.zeros([_TILE, ROWS], gl.float32, layout=MMA)
    row_max = lowest
    row_sum = gl.zeros([ROWS], gl.float32, layout=ROW)
    accs = _repeated(zeros, COLUMN_TILES)
    split_max = lowest
    no_sums = _pair_sums(zeros)
    SUM_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, no_sums.type.layout))
    split_sums = no_sums
    split_accs = _repeated(zeros, COLUMN_TILES)
    stage = 0
    phase = 0
    if scales is not None:  # scales are loaded a tile ahead, their blocks' numbers two
        head = program.kv_head
        at = program.first_tile * _TILE + n
        blocks = _blocks_at(table, at, begin, end, SHAPE)
        key_scale, value_scale = _scales_at(scales, blocks, at, begin, end, head, SHAPE)
        blocks = _blocks_at(table, at + _TILE, begin, end, SHAPE)
    for tile in range(program.first_tile, program.last_tile):
        start = tile * _TILE
        if scales is not None:
            at = start + _TILE + n
            next_scales = _scales_at(scales, blocks, at, begin, end, head, SHAPE)
            blocks = _blocks_at(table, at + _TILE, begin, end, SHAPE)
        mbarrier.wait(ring.key_full.index(stage), phase)
        if scales is not None:
            s = _code_scores(ring, query_tile, stage, zeros, MMA, COLUMN_TILES, PAIRED)
            s = s * key_scale[:, None]
        else:
            s = _scores(ring, query_tile, stage, zeros, COLUMN_TILES, PAIRED)
        key_position = (start + n)[:, None]
        is_seen = (key_position <= position[None, :]) & (key_position > position[None, :] - window)
        s = gl.where(is_seen, capped(s, scale, soft_cap), float("-inf"))
        p, rescale, split_max = softmax_weights(s, split_max, scale, soft_cap, 0)
        factor = gl.convert_layout(rescale, SUM_ROW)[None, :][None, :, :]
        split_sums = split_sums * factor + _pair_sums(p)
        if scales is not None:
            p = gl.where(is_seen, p * value_scale[:, None], 0.0)
            key_scale, value_scale = next_scales
        _store_halves(p, weight_tile, 0, 1, PAIRED)
        mbarrier.wait(ring.value_full.index(stage), phase)
        if scales is not None:
            _decode_values(ring, value_halves, stage, COLUMN_TILES)
            value_tiles = value_halves
            first = 0
        else:
            value_tiles = ring.value_tiles
            first = stage * COLUMN_TILES
            is_stale = start + _TILE > end
            if WINDOWED:
                is_stale = is_stale | (start < begin)
            if is_stale:
                for column_tile in gl.static_range(COLUMN_TILES):
                    zero_stale_rows(value_tiles.index(first + column_tile), start, begin, end)
        fence_async_shared()
        split_accs = _accumulate(
            ring, value_tiles, first, weight_tile, stage, split_accs, rescale, COLUMN_TILES, PAIRED
        )
        stage, phase = next_stage(stage, phase, STAGES)
        if (tile % TILES_PER_SPLIT == TILES_PER_SPLIT - 1) | (tile == program.last_tile - 1):
            split_sum = gl.convert_layout(gl.sum(gl.sum(split_sums, axis=1), axis=0), ROW)
            row_max, row_sum, a, b = merged(row_max, row_sum, split_max, split_sum)
            accs = _combined(accs, a, split_accs, b, COLUMN_TILES)
            split_max = lowest
            split_sums = no_sums
            split_accs = _repeated(zeros, COLUMN_TILES)
    _store(row_max, row_sum, accs, program, output, sinks, MMA, SHAPE, SPLIT_PROGRAMS)


# ---- the kernel


@gluon.jit
def _new_ring(keys, values, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    ring = CacheRing(
        keys,
        values,
        allocate_barriers(STAGES),
        allocate_barriers(STAGES),
        allocate_barriers(STAGES),
        allocate_barriers(STAGES),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.key_full.index(stage), count=_TILE // SHAPE.block_size)
        mbarrier.init(ring.key_empty.index(stage), count=1)
        mbarrier.init(ring.value_full.index(stage), count=_TILE // SHAPE.block_size)
        mbarrier.init(ring.value_empty.index(stage), count=1)
    fence_async_shared()
    return ring


@gluon.jit
def attend(
    queries,
    key_desc,
    value_desc,
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
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_PROGRAMS: gl.constexpr,
    WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program: up to rows / group tokens of one sequence, one kv head, its query heads.

    Heads of 64, 128 or 256. Arguments are those of kernels/attention.py; where not WINDOWED,
    `window` is longer than any context.
    """
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    count = gl.load(tiles.counts + tile)
    first_row = gl.load(tiles.rows + tile)
    first_position = gl.load(tiles.positions + tile)
    num_old = gl.load(tiles.starts + tile)
    table = tables + gl.load(tiles.tables + tile)
    end = first_position + count
    begin = gl.maximum(first_position + 1 - window, 0)
    TILES_PER_SPLIT: gl.constexpr = SHAPE.split_size // _TILE
    if SPLIT_PROGRAMS:
        first_tile = gl.program_id(2) * TILES_PER_SPLIT
        last_tile = gl.minimum(first_tile + TILES_PER_SPLIT, gl.cdiv(end, _TILE))
        if WINDOWED:
            first_tile = gl.maximum(first_tile, begin // _TILE)
    elif WINDOWED:
        first_tile = begin // _TILE
        last_tile = gl.cdiv(end, _TILE)
    else:
        first_tile = begin // SHAPE.split_size * TILES_PER_SPLIT
        last_tile = gl.cdiv(end, _TILE)
    if (count == 0) | (first_tile >= last_tile):
        return
    LAYOUT: gl.constexpr = key_desc.layout
    ROWS: gl.constexpr = SHAPE.rows
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    TILES: gl.constexpr = STAGES * COLUMN_TILES
    IS_8BIT: gl.constexpr = key_desc.dtype.primitive_bitwidth == 8
    HALF: gl.constexpr = gl.bfloat16 if IS_8BIT else key_desc.dtype
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = 2 if queries.dtype.element_ty == gl.float32 else 1
    keys = gl.allocate_shared_memory(key_desc.dtype, [TILES, _TILE, _COLUMNS], LAYOUT)
    values = gl.allocate_shared_memory(key_desc.dtype, [TILES, _TILE, _COLUMNS], LAYOUT)
    QUERY: gl.constexpr = gl.float16 if IS_8BIT else HALF
    query_tile = gl.allocate_shared_memory(QUERY, [PARTS * COLUMN_TILES, ROWS, _COLUMNS], HALVES)
    value_halves = query_tile
    if IS_8BIT:
        value_halves = gl.allocate_shared_memory(HALF, [COLUMN_TILES, _TILE, _COLUMNS], HALVES)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE, ROWS], HALF)
    weight_tile = gl.allocate_shared_memory(HALF, [PARTS, _TILE, ROWS], WEIGHTS)
    ring = _new_ring(keys, values, STAGES, SHAPE)
    program = Program(
        tile, gl.num_programs(1), kv_head, first_row, count, first_position, first_tile, last_tile
    )
    output = Output(out, splits, out_stride)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    queries,
                    ring,
                    query_tile,
                    weight_tile,
                    value_halves,
                    scales,
                    table if IS_8BIT else None,
                    program,
                    output,
                    scale,
                    window,
                    sinks,
                    soft_cap,
                    SHAPE,
                    STAGES,
                    SPLIT_PROGRAMS,
                    WINDOWED,
                    PDL,
                ),
            ),
            (
                _load_cache,
                (
                    key_desc,
                    value_desc,
                    table,
                    ring,
                    first_tile,
                    last_tile,
                    num_old,
                    begin if WINDOWED else None,
                    end,
                    kv_head,
                    SHAPE,
                    STAGES,
                    PDL,
                ),
            ),
        ],
        [1],
        [24 if COLUMN_TILES <= 2 else 40],
    )
