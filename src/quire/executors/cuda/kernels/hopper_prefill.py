"""Paged attention of large steps on Hopper, in Gluon: the bits of kernels/hopper_attention.py.

There keys and values are the M side of wgmma, here queries and softmax weights are: 64 rows (tokens
times the heads of a group) in each of two warp groups. While a tile's scores become weights, the
values of the tile before it are multiplied. Two warps load keys and values.

A row has the same bits in both kernels. An element of wgmma's result is the same sum of products in
the same order, whichever operand is the M side and whether it comes from registers or from shared
memory; tiles, splits and the order in which they are merged are the same, and so is
`softmax_weights`; `_pair_sums` and `_position_sums` add in the order of the other kernel's sums.

Constants of a launch: SHAPE is an attention.AttentionShape, of ROWS rows.
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

from quire.executors.cuda.kernels.attention import appended, operand_column, with_sink
from quire.executors.cuda.kernels.hopper import (
    allocate_barriers,
    allow_next_kernel,
    next_stage,
    wait_for_previous_kernel,
)
from quire.executors.cuda.kernels.hopper_attention import (
    COLUMNS,
    TILE,
    CacheRing,
    Program,
    capped,
    merged,
    softmax_weights,
    zero_stale_rows,
)

ROWS = 128  # of a program
WARPS = 4  # of a warp group that multiplies
REGISTERS = 168  # of a thread at the start; then those that multiply take some of those that load

_MULTIPLIER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)
_STAGES = gl.constexpr(3)  # tiles of keys, and of values, in flight
_TILE, _COLUMNS = gl.constexpr(TILE), gl.constexpr(COLUMNS)
_ROWS = gl.constexpr(ROWS // 2)  # of a warp group


class Rows(NamedTuple):
    """What the warp groups read and write."""

    queries: Any  # bfloat16 [tokens, heads, head_dim]
    query_tiles: Any  # the same in shared memory
    out: Any  # float16 or float32 [tokens, heads * head_dim], in operand order
    out_stride: Any


def _rescaling(count: int) -> str:
    """`count` numbers times their factors, skipped where no thread of a warp has a factor but 1.
    Numbers of two rows alternate in pairs: the first and the third have the factors of both."""
    return "\n".join(
        (
            "{",
            ".reg .pred is_needed;",
            f"setp.neu.f32 is_needed, ${2 * count}, 0f3F800000;",
            f"@!is_needed setp.neu.f32 is_needed, ${2 * count + 2}, 0f3F800000;",
            "@!is_needed bra DONE;",
            *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)),
            "DONE:",
            "}",
        )
    )


def _rescaling_constraints(count: int) -> str:
    """Results, the numbers in the same registers, factors."""
    return ",".join(("=f",) * count + tuple(map(str, range(count))) + ("f",) * count)


# By how many numbers a thread has: of sums, and of heads of 64 and of 128.
_ASM_RESCALE_16 = gl.constexpr(_rescaling(16))
_ASM_RESCALE_32 = gl.constexpr(_rescaling(32))
_ASM_RESCALE_64 = gl.constexpr(_rescaling(64))
_CONSTRAINTS_16 = gl.constexpr(_rescaling_constraints(16))
_CONSTRAINTS_32 = gl.constexpr(_rescaling_constraints(32))
_CONSTRAINTS_64 = gl.constexpr(_rescaling_constraints(64))


class Seen(NamedTuple):
    """What the rows of a warp group see: of each its position, and the window before it."""

    position: Any
    first: Any  # of the positions
    last: Any
    window: Any


class Loads(NamedTuple):
    """What of the cache is loaded for a program."""

    table: Any
    num_old: Any  # positions of earlier steps
    begin: Any  # the first position that a row sees


# ---- load: a warp for keys, one for values


@gluon.jit
def _load_block_ids(table, start, begin, end, SHAPE: gl.constexpr):
    """Of the blocks of one tile. Those past the end, or wholly before `begin`, are block 0: what it
    holds is masked."""
    made = ()
    for index in gl.static_range(_TILE // SHAPE.block_size):
        position = start + index * SHAPE.block_size
        is_there = (position < end) & (position + SHAPE.block_size > begin)
        block = gl.load(table + position // SHAPE.block_size, mask=is_there, other=0)
        made = appended(made, block)
    return made


@gluon.jit
def _load_cache(
    desc,
    tiles,
    full,
    empty,
    program: Program,
    loads: Loads,
    SHAPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of keys, or of values, into the ring. Positions below `num_old` are of earlier steps;
    later ones were written by the previous kernel, which must have ended."""
    table, num_old, begin = loads
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    if PDL:
        allow_next_kernel()
    end = program.first_position + program.count
    stage = 0
    phase = 1
    has_waited = 0
    blocks = _load_block_ids(table, program.first_tile * _TILE, begin, end, SHAPE)
    for tile in range(program.first_tile, program.last_tile):
        start = tile * _TILE
        next_blocks = _load_block_ids(table, start + _TILE, begin, end, SHAPE)
        if PDL and (start + _TILE > num_old) & (has_waited == 0):
            wait_for_previous_kernel()
            has_waited = 1
        mbarrier.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        mbarrier.expect(barrier, _TILE * SHAPE.head_dim * 2)
        for index in gl.static_range(_TILE // BLOCK_SIZE):
            row = (blocks[index] * SHAPE.block_heads + program.kv_head) * BLOCK_SIZE
            for column_tile in gl.static_range(COLUMN_TILES):
                target = tiles.index(stage * COLUMN_TILES + column_tile)
                tma.async_copy_global_to_shared(
                    desc,
                    [row, column_tile * _COLUMNS],
                    barrier,
                    target.slice(index * BLOCK_SIZE, BLOCK_SIZE, 0),
                )
        stage, phase = next_stage(stage, phase, _STAGES)
        blocks = next_blocks


# ---- compute: two warp groups


@gluon.jit
def _load_queries(rows: Rows, program: Program, WHO: gl.constexpr, SHAPE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS_EACH: gl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    GROUP: gl.constexpr = SHAPE.group
    r = WHO * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    is_row = (r // GROUP < program.count) & (r % GROUP < HEADS_EACH)
    token = (program.first_row + r // GROUP).to(gl.int64)
    row = token * SHAPE.num_heads + program.kv_head * HEADS_EACH + r % GROUP
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    for column_tile in gl.static_range(COLUMN_TILES):
        q = gl.load(
            rows.queries + row[:, None] * SHAPE.head_dim + column_tile * _COLUMNS + column[None, :],
            mask=is_row[:, None],
            other=0.0,
        )
        rows.query_tiles.index(WHO * COLUMN_TILES + column_tile).store(q)
    fence_async_shared()


@gluon.jit
def _whole(tiles, index, SHAPE: gl.constexpr):
    """A stage's tiles of columns as one, [TILE, head_dim]."""
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    first = tiles.index(index * COLUMN_TILES)
    return first._reinterpret(first.dtype, [_TILE, SHAPE.head_dim], first.layout)


@gluon.jit
def _pair_sums(p):
    """[rows, TILE] summed over bit 3 of positions: [rows, 4, 8]."""
    return gl.sum(p.reshape([_ROWS, _TILE // 16, 2, 8]), axis=2)


@gluon.jit
def _position_sums(x, ROW: gl.constexpr):
    """What `_pair_sums` left, summed as kernels/hopper_attention.py sums: positions that
    differ in bits 2, 1 and 0 (lanes there), then 5 and 4 (warps there)."""
    x = x.reshape([_ROWS, 2, 2, 2, 2, 2])
    for _ in gl.static_range(3):
        x = gl.sum(x, axis=3)
    x = gl.sum(gl.sum(x, axis=1), axis=1)
    return gl.convert_layout(x, ROW)


@gluon.jit
def _rescaled(x, factor, COUNT: gl.constexpr):
    """x * factor, where a thread has COUNT numbers. The factor is nearly always 1, and a product
    with 1 is the number itself: warps without another factor do not multiply."""
    NARROW: gl.constexpr = _ASM_RESCALE_32 if COUNT == 32 else _ASM_RESCALE_16
    ASM: gl.constexpr = _ASM_RESCALE_64 if COUNT == 64 else NARROW
    FEW: gl.constexpr = _CONSTRAINTS_32 if COUNT == 32 else _CONSTRAINTS_16
    CONSTRAINTS: gl.constexpr = _CONSTRAINTS_64 if COUNT == 64 else FEW
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [x, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def _softmax(
    s,
    split_max,
    sums,
    start,
    seen: Seen,
    scale,
    soft_cap,
    MMA: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """A tile's weights, the factor of what was before, the maximum and the sums with it."""
    s = capped(s, scale, soft_cap)
    is_partial = start + _TILE - 1 > seen.first
    if WINDOWED:
        is_partial = is_partial | (start <= seen.last - seen.window)
    if is_partial:
        n = start + gl.arange(0, _TILE, layout=gl.SliceLayout(0, MMA))[None, :]
        is_seen = n <= seen.position[:, None]
        if WINDOWED:
            is_seen = is_seen & (n > seen.position[:, None] - seen.window)
        s = gl.where(is_seen, s, float("-inf"))
    p, rescale, new_max = softmax_weights(s, split_max, scale, soft_cap, 1)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout))
    factor = gl.convert_layout(rescale, SUM_ROW)[:, None][:, :, None]
    return p, rescale, new_max, _rescaled(sums, factor, 16) + _pair_sums(p)


@gluon.jit
def _zero_stale(tiles, stage, start, begin, end, SHAPE: gl.constexpr):
    """Both warp groups do so, with the same zeros."""
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    for column_tile in gl.static_range(COLUMN_TILES):
        zero_stale_rows(tiles.index(stage * COLUMN_TILES + column_tile), start, begin, end)
    fence_async_shared()


@gluon.jit
def _combined(acc, a, other, b, ROW: gl.constexpr):
    """acc * a + other * b, by row."""
    return acc * gl.convert_layout(a, ROW)[:, None] + other * gl.convert_layout(b, ROW)[:, None]


@gluon.jit
def _store(
    row_max,
    row_sum,
    acc,
    program: Program,
    rows: Rows,
    sinks,
    WHO: gl.constexpr,
    MMA: gl.constexpr,
    SHAPE: gl.constexpr,
):
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    HEADS_EACH: gl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    row_max = gl.convert_layout(row_max, ROW)
    row_sum = gl.convert_layout(row_sum, ROW)
    r = WHO * _ROWS + gl.arange(0, _ROWS, layout=ROW)
    token = r // SHAPE.group
    head = program.kv_head * HEADS_EACH + r % SHAPE.group
    is_row = (token < program.count) & (r % SHAPE.group < HEADS_EACH)
    d = gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(0, MMA))
    if sinks is not None:
        sink = gl.load(sinks + head, mask=is_row, other=0.0)
        row_sum, factor = with_sink(row_max, row_sum, sink)
        acc = acc * factor[:, None]
    row = (program.first_row + token).to(gl.int64)[:, None] * rows.out_stride
    column = operand_column(head[:, None] * SHAPE.head_dim + d[None, :])
    result = (acc / row_sum[:, None]).to(rows.out.dtype.element_ty)
    mask = is_row[:, None] & (d < SHAPE.head_dim)[None, :]
    gl.store(rows.out + row + column, result, mask=mask)


@gluon.jit
def _compute(
    rows: Rows,
    ring: CacheRing,
    program: Program,
    begin,
    scale,
    window,
    sinks,
    soft_cap,
    WHO: gl.constexpr,
    SHAPE: gl.constexpr,
    WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Online softmax of a warp group's rows. In each turn of the loop a tile's keys are multiplied,
    then the values of the tile before it, which takes as long as the tile's softmax may."""
    TILES_PER_SPLIT: gl.constexpr = SHAPE.split_size // _TILE
    DIMS: gl.constexpr = SHAPE.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _TILE, 16]
    )
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIMS, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    HALF: gl.constexpr = ring.key_tiles.dtype
    first_position = program.first_position + WHO * _ROWS // SHAPE.group
    last_position = first_position + _ROWS // SHAPE.group - 1
    end = program.first_position + program.count
    if PDL:
        wait_for_previous_kernel()
    _load_queries(rows, program, WHO, SHAPE)
    q = _whole(rows.query_tiles, WHO, SHAPE)
    position = first_position + gl.arange(0, _ROWS, layout=ROW) // SHAPE.group
    lowest = gl.full([_ROWS], float("-inf"), gl.float32, layout=ROW)
    no_scores = gl.zeros([_ROWS, _TILE], gl.float32, layout=SCORES)
    zeros = gl.zeros([_ROWS, DIMS], gl.float32, layout=MMA)
    row_max = lowest
    row_sum = gl.zeros([_ROWS], gl.float32, layout=ROW)
    no_sums = _pair_sums(no_scores)
    acc = zeros
    split_acc = zeros
    stage = 0
    phase = 0
    mbarrier.wait(ring.key_full.index(0), 0)
    keys = _whole(ring.key_tiles, 0, SHAPE).permute((1, 0))
    s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(ring.key_empty.index(0))
    start = program.first_tile * _TILE
    seen = Seen(position, first_position, last_position, window)
    p, rescale, split_max, split_sums = _softmax(
        s, lowest, no_sums, start, seen, scale, soft_cap, SCORES, WINDOWED
    )
    weights = gl.convert_layout(p.to(HALF), WEIGHTS)
    if WINDOWED and start < begin:
        mbarrier.wait(ring.value_full.index(0), 0)
        _zero_stale(ring.value_tiles, 0, start, begin, end, SHAPE)
    ended_max = lowest
    ended_sum = row_sum
    for tile in range(program.first_tile + 1, program.last_tile):
        old_stage = stage
        old_phase = phase
        stage, phase = next_stage(stage, phase, _STAGES)
        mbarrier.wait(ring.key_full.index(stage), phase)
        keys = _whole(ring.key_tiles, stage, SHAPE).permute((1, 0))
        s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        mbarrier.wait(ring.value_full.index(old_stage), old_phase)
        values = _whole(ring.value_tiles, old_stage, SHAPE)
        split_acc = warpgroup_mma(weights, values, split_acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(ring.key_empty.index(stage))
        is_new = tile % TILES_PER_SPLIT == 0
        if is_new:
            ended_max = split_max
            ended_sum = _position_sums(split_sums, ROW)
            split_max = lowest
            split_sums = no_sums
        start = tile * _TILE
        p, rescale, split_max, split_sums = _softmax(
            s, split_max, split_sums, start, seen, scale, soft_cap, SCORES, WINDOWED
        )
        new_weights = gl.convert_layout(p.to(HALF), WEIGHTS)
        split_acc, weights = warpgroup_mma_wait(0, deps=[split_acc, weights])
        mbarrier.arrive(ring.value_empty.index(old_stage))
        weights = new_weights
        if is_new:
            row_max, row_sum, a, b = merged(row_max, row_sum, ended_max, ended_sum)
            acc = _combined(acc, a, split_acc, b, ACC_ROW)
            split_acc = zeros
        split_acc = _rescaled(split_acc, gl.convert_layout(rescale, ACC_ROW)[:, None], DIMS // 2)
    mbarrier.wait(ring.value_full.index(stage), phase)
    if start + _TILE > end:
        _zero_stale(ring.value_tiles, stage, start, begin, end, SHAPE)
    split_acc = warpgroup_mma(weights, _whole(ring.value_tiles, stage, SHAPE), split_acc)
    row_max, row_sum, a, b = merged(row_max, row_sum, split_max, _position_sums(split_sums, ROW))
    acc = _combined(acc, a, split_acc, b, ACC_ROW)
    _store(row_max, row_sum, acc, program, rows, sinks, WHO, MMA, SHAPE)


# ---- the kernel


@gluon.jit
def attend(
    queries,
    key_desc,
    value_desc,
    tables,
    tiles,
    out,
    scale,
    window,
    out_stride,
    sinks,
    soft_cap,
    SHAPE: gl.constexpr,
    WINDOWED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program: up to rows / group tokens of one sequence, one kv head, its query heads.

    Heads of 64 or 128. Arguments are those of kernels/hopper_attention.py. The last tiles, which
    see most of a prompt, come first.
    """
    kv_head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    count = gl.load(tiles.counts + tile)
    first_row = gl.load(tiles.rows + tile)
    first_position = gl.load(tiles.positions + tile)
    num_old = gl.load(tiles.starts + tile)
    table = tables + gl.load(tiles.tables + tile)
    if count == 0:
        return
    begin = gl.maximum(first_position + 1 - window, 0)
    first_tile = begin // _TILE
    last_tile = gl.cdiv(first_position + count, _TILE)
    LAYOUT: gl.constexpr = key_desc.layout
    COLUMN_TILES: gl.constexpr = SHAPE.head_dim // _COLUMNS
    STAGED: gl.constexpr = [_STAGES * COLUMN_TILES, _TILE, _COLUMNS]
    HALF: gl.constexpr = key_desc.dtype
    keys = gl.allocate_shared_memory(HALF, STAGED, LAYOUT)
    values = gl.allocate_shared_memory(HALF, STAGED, LAYOUT)
    query_tiles = gl.allocate_shared_memory(HALF, [2 * COLUMN_TILES, _ROWS, _COLUMNS], LAYOUT)
    ring = CacheRing(
        keys,
        values,
        allocate_barriers(_STAGES),
        allocate_barriers(_STAGES),
        allocate_barriers(_STAGES),
        allocate_barriers(_STAGES),
    )
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ring.key_full.index(stage), count=1)
        mbarrier.init(ring.key_empty.index(stage), count=2)
        mbarrier.init(ring.value_full.index(stage), count=1)
        mbarrier.init(ring.value_empty.index(stage), count=2)
    fence_async_shared()
    program = Program(
        tile, gl.num_programs(1), kv_head, first_row, count, first_position, first_tile, last_tile
    )
    rows = Rows(queries, query_tiles, out, out_stride)
    loads = Loads(table, num_old, begin)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    rows,
                    ring,
                    program,
                    begin,
                    scale,
                    window,
                    sinks,
                    soft_cap,
                    0,
                    SHAPE,
                    WINDOWED,
                    PDL,
                ),
            ),
            (
                _compute,
                (
                    rows,
                    ring,
                    program,
                    begin,
                    scale,
                    window,
                    sinks,
                    soft_cap,
                    1,
                    SHAPE,
                    WINDOWED,
                    PDL,
                ),
            ),
            (
                _load_cache,
                (key_desc, keys, ring.key_full, ring.key_empty, program, loads, SHAPE, PDL),
            ),
            (
                _load_cache,
                (value_desc, values, ring.value_full, ring.value_empty, program, loads, SHAPE, PDL),
            ),
        ],
        [4, 1, 1],
        [_MULTIPLIER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )
