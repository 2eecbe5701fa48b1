"""Plain Triton kernels of a mixture of experts: the router's scores, the experts of each token,
tokens grouped by expert, and the grouped GEMM for GPUs other than Hopper. Triton's interpreter runs
them on a CPU.

A *pair* is a token and one of its experts: index token * USED + slot, slots in ascending order of
experts. The grouped GEMM takes rows of pairs sorted by expert, in tiles of one expert's rows. Which
tokens share a tile changes no sum.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.activations import activated, gated
from quire.executors.cuda.kernels.gemm import multiplied
from quire.executors.cuda.kernels.plain_dequantize import (
    Factors,
    PlanePointers,
    dequantized_half,
)

SOFTMAX, SIGMOID, SPARSE_MIXER = 0, 1, 2  # how scores are made of the router's sums
_SIGMOID = tl.constexpr(SIGMOID)
_SPARSE_MIXER = tl.constexpr(SPARSE_MIXER)
_NEAR = tl.constexpr(0.02)  # of a SparseMixer: what scores may be less, relative to their size
CHUNK = 64  # tokens whose experts are counted together
_CHUNK = tl.constexpr(CHUNK)
_CHUNKS_AT_ONCE = tl.constexpr(8)


class RouterPointers(NamedTuple):
    """The router's matrix as the sum of two float16 matrices, times 2**-exponent."""

    high: Any  # [experts, columns]
    low: Any
    bias: Any  # float32 [experts]
    choice_bias: Any  # float32 [experts]: added to the scores when experts are chosen
    factors: Any  # float32 [experts], of the weights; None: 1


class Pairs(NamedTuple):
    """Of each pair, or of each row of sorted pairs."""

    experts: Any  # int32 [pair]
    weights: Any  # float32 [pair]
    of_row: Any  # int32 [row]: its pair
    counts: Any  # int32 [chunk, expert]: how many tokens of a chunk use an expert


class Tiles(NamedTuple):
    """Rows of one expert that a program multiplies, int32 each."""

    expert: Any
    token: Any  # the first row of the tokens that are read
    row: Any  # the first row of sorted pairs
    count: Any  # of rows
    total: Any  # [1]: how many tiles there are
    ready: Any  # how many parts of a tile's gated rows are stored, where one launch has both GEMMs
    claimed: Any  # [1]: how many parts of that launch are taken


class RouterShape(NamedTuple):
    """Sizes known when a kernel is compiled."""

    num_experts: int
    num_used: int
    experts: int  # the next power of two
    used: int
    scoring: int
    normalises: bool
    has_bias: bool
    has_choice_bias: bool
    num_groups: int  # of experts, of which the best `num_used_groups` are chosen from
    num_used_groups: int
    num_group_best: int  # experts whose choice scores are summed for their group's
    weighs_input: bool  # the weights are of what experts take: of what they make they are 1


@triton.jit
def _begin_dependent(PDL: tl.constexpr):
    """As in kernels/layers.py."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# ---- routing


@triton.jit
def score_experts(
    tokens,
    router: RouterPointers,
    sums,
    counts,
    num_tokens,
    num_blocks,
    num_chunks,
    token_stride,
    split_stride,
    factor,
    SHAPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums[split, token, expert] = the router's matrix times the token, in float32 but for the
    tokens, which are float16. Clears the counts, which `choose_experts` adds to.

    One program: a tile of experts, a split of the columns, a tile of tokens.
    """
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    count = num_blocks // num_splits + tl.where(split < num_blocks % num_splits, 1, 0)
    first = split * (num_blocks // num_splits) + tl.minimum(split, num_blocks % num_splits)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, 128)
    known = tl.minimum(expert, SHAPE.num_experts - 1)[:, None] * (num_blocks * 256)
    _begin_dependent(PDL)
    _clear_counts(counts, num_chunks * SHAPE.num_experts)
    high_sums = tl.zeros([EXPERTS, TOKENS], tl.float32)
    low_sums = tl.zeros([EXPERTS, TOKENS], tl.float32)
    for start in range(first * 256, (first + count) * 256, 128):
        index = known + start + column[None, :]
        high = tl.load(router.high + index)
        low = tl.load(router.low + index)
        at = token[None, :].to(tl.int64) * token_stride + start + column[:, None]
        x = tl.load(tokens + at, mask=(token < num_tokens)[None, :], other=0.0)
        if EXACT:
            x = x.to(tl.float32)
            high_sums = tl.dot(high.to(tl.float32), x, high_sums, input_precision="ieee")
            low_sums = tl.dot(low.to(tl.float32), x, low_sums, input_precision="ieee")
        else:
            high_sums = tl.dot(high, x, high_sums)
            low_sums = tl.dot(low, x, low_sums)
    total = (high_sums + low_sums) * factor
    mask = (token < num_tokens)[None, :] & (expert < SHAPE.num_experts)[:, None]
    at = split.to(tl.int64) * split_stride
    at += token[None, :].to(tl.int64) * SHAPE.num_experts + expert[:, None]
    tl.store(sums + at, total, mask=mask)


@triton.jit
def _clear_counts(counts, size):
    """Each program its part."""
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    program += tl.num_programs(0) * tl.num_programs(1) * tl.program_id(2)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    for start in range(program * 128, size, programs * 128):
        index = start + tl.arange(0, 128)
        tl.store(counts + index, tl.zeros([128], tl.int32), mask=index < size)


@triton.jit
def _best(choice, expert, inside, SHAPE: tl.constexpr):
    """Which experts are the best; of equals the first. There are always as many as slots: what is
    not a number comes last, by index."""
    NUM_USED: tl.constexpr = SHAPE.num_used
    # As integers in the same order, which a warp compares in one instruction; -0 becomes 0.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(choice == choice, keys, -0x7FFFFFFF)
    keys = tl.where(inside, keys, -0x80000000)
    is_used = expert < 0
    for _ in tl.static_range(NUM_USED):
        best = tl.max(keys, axis=0)
        first = tl.min(tl.where(keys == best, expert, SHAPE.experts), axis=0)
        is_used = is_used | (expert == first)
        keys = tl.where(expert == first, -0x80000000, keys)
    return is_used


@triton.jit
def _in_best_groups(choice, expert, inside, SHAPE: tl.constexpr):
    """Minus infinity for experts that are not in one of the best groups; of equals the first."""
    GROUP: tl.constexpr = SHAPE.num_experts // SHAPE.num_groups
    NUM_GROUPS: tl.constexpr = SHAPE.num_groups
    NUM_BEST: tl.constexpr = SHAPE.num_group_best
    NUM_USED_GROUPS: tl.constexpr = SHAPE.num_used_groups
    quality = tl.full([SHAPE.experts], float("-inf"), tl.float32)  # of each expert's group
    for group in tl.static_range(NUM_GROUPS):
        is_own = inside & (expert // GROUP == group)
        left = tl.where(is_own, choice, float("-inf"))
        total = tl.max(left, axis=0)
        for _ in tl.static_range(1, NUM_BEST):
            first = tl.min(tl.where(left == tl.max(left, axis=0), expert, SHAPE.experts), axis=0)
            left = tl.where(expert == first, float("-inf"), left)
            total += tl.max(left, axis=0)
        quality = tl.where(is_own, total, quality)
    is_kept = expert < 0
    for _ in tl.static_range(NUM_USED_GROUPS):
        left = tl.where(is_kept | ~inside, float("-inf"), quality)
        first = tl.min(tl.where(left == tl.max(left, axis=0), expert, SHAPE.experts), axis=0)
        is_kept = is_kept | (expert // GROUP == first // GROUP)
    return tl.where(is_kept, choice, float("-inf"))


@triton.jit
def _share_among_near(scores, highest):
    """Of the highest score in a softmax over those near it."""
    is_near = (highest - scores) / tl.maximum(tl.abs(scores), highest) <= _NEAR
    is_near = (is_near | (scores == highest)) & (tl.abs(scores) < float("inf"))
    return 1.0 / tl.sum(tl.where(is_near, tl.exp(scores - highest), 0.0), axis=0)


@triton.jit
def _sparse_shares(logits, expert, SHAPE: tl.constexpr):
    """A SparseMixer's weights: of the best expert, and of the others the best one's among these."""
    highest = tl.max(logits, axis=0)
    first = tl.min(tl.where(logits == highest, expert, SHAPE.experts), axis=0)
    others = tl.where(expert == first, float("-inf"), logits)
    second = tl.max(others, axis=0)
    share = _share_among_near(logits, highest)
    return tl.where(expert == first, share, _share_among_near(others, second))


@triton.jit
def choose_experts(
    sums,
    router: RouterPointers,
    pairs: Pairs,
    tiles: Tiles,
    split_stride,
    scale,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's experts in ascending order, and their weights. Of experts that are equally good the
    first is chosen. One program a token.

    DIRECT: every pair becomes a tile of its own, and nothing is grouped.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, SHAPE.experts)
    inside = expert < SHAPE.num_experts
    _begin_dependent(PDL)
    at = sums + token.to(tl.int64) * SHAPE.num_experts + expert
    logits = tl.load(at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logits += tl.load(at + split * split_stride, mask=inside, other=0.0)
    if SHAPE.has_bias:
        logits += tl.load(router.bias + expert, mask=inside, other=0.0)
    if SHAPE.scoring == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SHAPE.scoring == _SPARSE_MIXER:
        logits = tl.where(inside, logits, float("-inf"))
        scores = _sparse_shares(logits, expert, SHAPE)
    else:
        logits = tl.where(inside, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores
    if SHAPE.scoring == _SPARSE_MIXER:
        choice = logits
    if SHAPE.has_choice_bias:
        choice += tl.load(router.choice_bias + expert, mask=inside, other=0.0)
    if SHAPE.num_groups > 1:
        choice = _in_best_groups(choice, expert, inside, SHAPE)
    is_used = _best(choice, expert, inside, SHAPE)
    slot = tl.cumsum(is_used.to(tl.int32), axis=0) - 1
    weights = scores
    if SHAPE.normalises:
        weights /= tl.sum(tl.where(is_used, scores, 0.0), axis=0)
    if router.factors is not None:
        weights *= tl.load(router.factors + expert, mask=inside, other=0.0)
    pair = token * SHAPE.num_used + slot
    tl.store(pairs.experts + pair, expert, mask=is_used)
    tl.store(pairs.weights + pair, weights * scale, mask=is_used)
    if DIRECT:
        tl.store(pairs.of_row + pair, pair, mask=is_used)
        tl.store(tiles.expert + pair, expert, mask=is_used)
        tl.store(tiles.token + pair, token + tl.zeros_like(pair), mask=is_used)
        tl.store(tiles.row + pair, pair, mask=is_used)
        tl.store(tiles.count + pair, tl.zeros_like(pair) + 1, mask=is_used)
        tl.store(tiles.total, tl.num_programs(0) * SHAPE.num_used)
    else:
        at = pairs.counts + token // _CHUNK * SHAPE.num_experts + expert
        tl.atomic_add(at, 1, mask=is_used, sem="relaxed")


# ---- grouping


@triton.jit
def _counted(counts, chunk, num_chunks, SHAPE: tl.constexpr):
    """Of each expert: rows in all chunks, and in those before `chunk`."""
    EXPERTS: tl.constexpr = SHAPE.experts
    expert = tl.arange(0, EXPERTS)[None, :]
    totals = tl.zeros([_CHUNKS_AT_ONCE, EXPERTS], tl.int32)
    before = tl.zeros([_CHUNKS_AT_ONCE, EXPERTS], tl.int32)
    for start in range(0, num_chunks, _CHUNKS_AT_ONCE):
        at = start + tl.arange(0, _CHUNKS_AT_ONCE)[:, None]
        mask = (at < num_chunks) & (expert < SHAPE.num_experts)
        found = tl.load(counts + at * SHAPE.num_experts + expert, mask=mask, other=0)
        totals += found
        before += tl.where(at < chunk, found, 0)
    return tl.sum(totals, axis=0), tl.sum(before, axis=0)


@triton.jit
def _list_tiles(tiles: Tiles, totals, starts, TOKENS: tl.constexpr, SHAPE: tl.constexpr):
    """Each expert's rows in tiles of TOKENS."""
    expert = tl.arange(0, SHAPE.experts)
    needed = (totals + TOKENS - 1) // TOKENS
    first = tl.cumsum(needed, axis=0) - needed
    for index in range(tl.max(needed, axis=0)):
        mask = index < needed
        row = starts + index * TOKENS
        tl.store(tiles.expert + first + index, expert, mask=mask)
        tl.store(tiles.token + first + index, row, mask=mask)
        tl.store(tiles.row + first + index, row, mask=mask)
        left = tl.minimum(totals - index * TOKENS, TOKENS)
        tl.store(tiles.count + first + index, left, mask=mask)
        tl.store(tiles.ready + first + index, tl.zeros_like(left), mask=mask)
    tl.store(tiles.claimed, 0)
    tl.store(tiles.total, tl.sum(needed, axis=0))


@triton.jit
def group_tokens(
    tokens,
    grouped,
    pairs: Pairs,
    tiles: Tiles,
    num_tokens,
    num_chunks,
    width,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort pairs by expert, then by token, and copy each pair's token to its row of `grouped`.

    One program a token, and one more that lists the tiles, of TOKENS rows at most. Where weights
    are of what experts take, the copies are multiplied by them.
    """
    USED: tl.constexpr = SHAPE.used
    NUM_USED: tl.constexpr = SHAPE.num_used
    token = tl.program_id(0)
    expert = tl.arange(0, SHAPE.experts)
    slot = tl.arange(0, USED)
    _begin_dependent(PDL)
    chunk = token // _CHUNK
    totals, before = _counted(pairs.counts, chunk, num_chunks, SHAPE)
    starts = tl.cumsum(totals, axis=0) - totals
    if token == num_tokens:
        _list_tiles(tiles, totals, starts, TOKENS, SHAPE)
    else:
        pair = token * SHAPE.num_used + slot
        is_slot = slot < SHAPE.num_used
        own = tl.load(pairs.experts + pair, mask=is_slot, other=-1)
        first = (starts + before)[None, :]
        row = tl.sum(tl.where(own[:, None] == expert[None, :], first, 0), axis=1)
        # Earlier tokens of the chunk, one slot after the other: an expert is in one slot at most.
        earlier = chunk * _CHUNK + tl.arange(0, _CHUNK)
        alike = tl.zeros([USED, _CHUNK], tl.int32)
        for other_slot in tl.static_range(NUM_USED):
            at = pairs.experts + earlier * SHAPE.num_used + other_slot
            other = tl.load(at, mask=earlier < token, other=-2)
            alike += (own[:, None] == other[None, :]).to(tl.int32)
        row += tl.sum(alike, axis=1)
        tl.store(pairs.of_row + row, pair, mask=is_slot)
        if SHAPE.weighs_input:
            weight = tl.load(pairs.weights + pair, mask=is_slot, other=0.0)
            tl.debug_barrier()
            tl.store(pairs.weights + pair, tl.zeros_like(weight) + 1.0, mask=is_slot)
        column = tl.arange(0, COLUMNS)
        for start in range(0, width, COLUMNS):
            inside = start + column < width
            x = tl.load(tokens + token.to(tl.int64) * width + start + column, mask=inside)
            to = row[:, None].to(tl.int64) * width + (start + column)[None, :]
            copies = tl.broadcast_to(x[None, :], [USED, COLUMNS])
            if SHAPE.weighs_input:
                copies = (copies.to(tl.float32) * weight[:, None]).to(tl.float16)
            tl.store(grouped + to, copies, mask=is_slot[:, None] & inside[None, :])


# ---- the grouped GEMM


@triton.jit
def _expert_sums(
    tokens,
    planes: PlanePointers,
    bias,
    factors: Factors,
    row,
    expert_row,
    token,
    is_token,
    num_rows,
    num_blocks,
    token_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One expert's rows times these tokens, [ROWS, TOKENS]."""
    column = tl.arange(0, 128)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for part in range(2 * num_blocks):
        weights = dequantized_half(
            planes, factors, expert_row + row, part, num_rows, num_blocks, FORMAT
        )
        index = token[None, :].to(tl.int64) * token_stride + part * 128 + column[:, None]
        x = tl.load(tokens + index, mask=is_token[None, :], other=0.0)
        sums = multiplied(weights, x, sums, EXACT)
    sums *= factors.sums
    if BIAS:
        sums += tl.load(bias + expert_row + row)[:, None]
    return sums


@triton.jit
def multiply_gated(
    tokens,
    out,
    planes: PlanePointers,
    bias,
    factors: Factors,
    tiles: Tiles,
    gated_factor,
    rows_per_expert,
    num_experts,
    num_blocks,
    token_stride,
    out_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_GATES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out[row, i] = gated(gate i, value i) * gated_factor, or without gates activated(value i) *
    gated_factor, for the rows of each tile: a pair's row of `tokens` times its expert. One program:
    a tile, ROWS rows of weights."""
    tile = tl.program_id(1)
    if tile < tl.load(tiles.total):
        expert_row = tl.load(tiles.expert + tile) * rows_per_expert
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        known = tl.minimum(row, rows_per_expert - 1)
        lane = tl.arange(0, TOKENS)
        is_token = lane < tl.load(tiles.count + tile)
        token = tl.load(tiles.token + tile) + lane
        sums = _expert_sums(
            tokens,
            planes,
            bias,
            factors,
            known,
            expert_row,
            token,
            is_token,
            num_experts * rows_per_expert,
            num_blocks,
            token_stride,
            ROWS,
            TOKENS,
            FORMAT,
            BIAS,
            EXACT,
        )
        MADE: tl.constexpr = ROWS // 2 if HAS_GATES else ROWS
        if HAS_GATES:  # eight, then their eight values, and so on
            both = tl.permute(tl.reshape(sums, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1))
            gates, ups = tl.split(both)
            product = tl.reshape(gated(gates, ups, ACTIVATION), [MADE, TOKENS]) * gated_factor
        else:
            product = activated(sums, ACTIVATION) * gated_factor
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0).to(tl.float16)
        at = tl.program_id(0) * MADE + tl.arange(0, MADE)
        to = (tl.load(tiles.row + tile) + lane)[None, :].to(tl.int64) * out_stride + at[:, None]
        num_made = rows_per_expert // (ROWS // MADE)
        tl.store(out + to, product, mask=is_token[None, :] & (at < num_made)[:, None])


@triton.jit
def multiply_weighed(
    tokens,
    out,
    planes: PlanePointers,
    bias,
    factors: Factors,
    tiles: Tiles,
    pairs: Pairs,
    rows_per_expert,
    num_experts,
    num_blocks,
    token_stride,
    slot_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out[slot, token, i] = a pair's weight times its expert's row i. The norm that reads `out`
    adds a token's slots in order."""
    tile = tl.program_id(1)
    if tile < tl.load(tiles.total):
        expert_row = tl.load(tiles.expert + tile) * rows_per_expert
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        known = tl.minimum(row, rows_per_expert - 1)
        lane = tl.arange(0, TOKENS)
        is_token = lane < tl.load(tiles.count + tile)
        source = tl.load(tiles.row + tile) + lane
        sums = _expert_sums(
            tokens,
            planes,
            bias,
            factors,
            known,
            expert_row,
            source,
            is_token,
            num_experts * rows_per_expert,
            num_blocks,
            token_stride,
            ROWS,
            TOKENS,
            FORMAT,
            BIAS,
            EXACT,
        )
        pair = tl.load(pairs.of_row + source, mask=is_token, other=0)
        sums *= tl.load(pairs.weights + pair, mask=is_token, other=0.0)[None, :]
        to = (pair % USED).to(tl.int64) * slot_stride
        to += (pair // USED).to(tl.int64) * rows_per_expert
        mask = is_token[None, :] & (row < rows_per_expert)[:, None]
        tl.store(out + to[None, :] + row[:, None], sums, mask=mask)
