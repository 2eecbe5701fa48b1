"""Latent attention's kernels beside attention itself: the vector of a token that the cache keeps,
queries by head, and the GEMM that has a matrix for each head. Plain Triton, on any GPU.

A head's query is turned into one against the cached vectors by the head's key matrix, and what
attention leaves, a mean of such vectors, into values by its value matrix.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.attention import operand_column
from quire.executors.cuda.kernels.gemm import multiplied
from quire.executors.cuda.kernels.layers import _begin_dependent, _cached, _normed, _sum_of
from quire.executors.cuda.kernels.plain_dequantize import dequantized_half


class LatentShape(NamedTuple):
    """Sizes known when a kernel is compiled."""

    num_heads: int
    plain_dims: int  # of a head, without rope
    rope_dims: int
    kv_rank: int
    query_rank: int  # 0: queries are made of hidden states directly
    is_interleaved: bool
    block_size: int

    @property
    def head_dim(self) -> int:
        return self.plain_dims + self.rope_dims

    @property
    def key_dim(self) -> int:
        """Of a key in the cache, and of a query against it."""
        return self.kv_rank + self.rope_dims

    @property
    def num_queries(self) -> int:
        """Columns that come before the vector and its rotated key."""
        return self.query_rank or self.num_heads * self.head_dim


class Rotation(NamedTuple):
    """Rope of the tokens: tables by position [positions, rope dims / 2]."""

    positions: Any
    cosines: Any
    sines: Any


@triton.jit
def _rotated(at, split_stride, rope, token, SHAPE: tl.constexpr, SPLITS: tl.constexpr):
    """The pairs from `at` on, rotated: first numbers, second numbers and where these are."""
    HALF: tl.constexpr = SHAPE.rope_dims // 2
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    inside = pair < HALF
    if SHAPE.is_interleaved:
        first = pair * 2
        second = first + 1
    else:
        first = pair
        second = pair + HALF
    angle = tl.load(rope.positions + token).to(tl.int64) * HALF + pair
    cosine = tl.load(rope.cosines + angle, mask=inside, other=1.0)
    sine = tl.load(rope.sines + angle, mask=inside, other=0.0)
    x = _sum_of(at + first, split_stride, inside, 0, SPLITS)
    y = _sum_of(at + second, split_stride, inside, 0, SPLITS)
    return x * cosine - y * sine, x * sine + y * cosine, first, second, inside


@triton.jit
def store_latent(
    sums,
    rope: Rotation,
    slots,
    key_norm,
    query_norm,
    cache,
    queries,
    split_stride,
    row_stride,
    query_stride,
    epsilon,
    SHAPE: tl.constexpr,
    RANK: tl.constexpr,
    QUERY_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm a token's vector and rotate its key: to the cache, unless its slot is -1. Norm what its
    queries are made of, where that is a vector: to `queries`, float16 in operand order.

    sums [split, token, num_queries + key_dim]; RANK and QUERY_RANK: ranks up to a power of two.
    One program a token.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, RANK)
    inside = column < SHAPE.kv_rank
    key_weights = tl.load(key_norm + column, mask=inside, other=0.0)
    slot = tl.load(slots + token)
    _begin_dependent(PDL)
    row = sums + token * row_stride
    made = row + SHAPE.num_queries
    x = _sum_of(made + column, split_stride, inside, 0, SPLITS)
    x = _normed(x, key_weights, None, column, SHAPE.kv_rank, epsilon, "rms")
    first, second, first_at, second_at, is_pair = _rotated(
        made + SHAPE.kv_rank, split_stride, rope, token, SHAPE, SPLITS
    )
    KIND: tl.constexpr = cache.dtype.element_ty
    place = cache + slot.to(tl.int64) * SHAPE.key_dim
    is_kept = slot >= 0
    tl.store(place + column, _cached(x, KIND), mask=inside & is_kept)
    rotated = place + SHAPE.kv_rank
    tl.store(rotated + first_at, _cached(first, KIND), mask=is_pair & is_kept)
    tl.store(rotated + second_at, _cached(second, KIND), mask=is_pair & is_kept)
    if SHAPE.query_rank > 0:
        at = tl.arange(0, QUERY_RANK)
        is_query = at < SHAPE.query_rank
        query_weights = tl.load(query_norm + at, mask=is_query, other=0.0)
        y = _sum_of(row + at, split_stride, is_query, 0, SPLITS)
        y = _normed(y, query_weights, None, at, SHAPE.query_rank, epsilon, "rms")
        y = tl.minimum(tl.maximum(y, -65504.0), 65504.0).to(tl.float16)
        tl.store(queries + token * query_stride + operand_column(at), y, mask=is_query)


@triton.jit
def divide_queries(
    sums,
    rope: Rotation,
    query_scales,
    plain,
    queries,
    split_stride,
    row_stride,
    SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A head's numbers without rope to `plain` [token, head, WIDTH], float16 in operand order; the
    others, rotated and multiplied by the factor of their position (`query_scales`, or None), to the
    end of its query [token, head, key_dim]. One program: a token and a head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIMS)
    inside = column < SHAPE.plain_dims
    _begin_dependent(PDL)
    row = sums + token * row_stride + head * SHAPE.head_dim
    x = _sum_of(row + column, split_stride, inside, 0, SPLITS)
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    of_head = token * SHAPE.num_heads + head
    tl.store(plain + of_head * WIDTH + operand_column(column), x, mask=inside)
    first, second, first_at, second_at, is_pair = _rotated(
        row + SHAPE.plain_dims, split_stride, rope, token, SHAPE, SPLITS
    )
    if query_scales is not None:
        factor = tl.load(query_scales + tl.load(rope.positions + token))
        first = first * factor
        second = second * factor
    QUERY: tl.constexpr = queries.dtype.element_ty
    to = queries + of_head * SHAPE.key_dim + SHAPE.kv_rank
    tl.store(to + first_at, first.to(QUERY), mask=is_pair)
    tl.store(to + second_at, second.to(QUERY), mask=is_pair)


@triton.jit
def multiply_heads(
    tokens,
    out,
    planes,
    factors,
    positions,
    query_scales,
    num_tokens,
    num_rows,
    num_blocks,
    out_stride,
    out_head_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND_ORDER: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, head, row] = the head's matrix of `num_rows` rows times its numbers in `tokens`
    [token, head, num_blocks * 256], times the factor of the token's position where there are
    `query_scales`. OPERAND_ORDER: of all heads' rows together. One program: a head, ROWS rows,
    TOKENS tokens.
    """
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = head * num_rows + tl.minimum(row, num_rows - 1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[None, :]
    column = tl.arange(0, 128)
    _begin_dependent(PDL)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    place = (token.to(tl.int64) * num_heads + head) * (num_blocks * 256)
    for part in range(2 * num_blocks):
        weights = dequantized_half(
            planes, factors, known, part, num_heads * num_rows, num_blocks, FORMAT
        )
        at = place[None, :] + part * 128 + column[:, None]
        x = tl.load(tokens + at, mask=is_token, other=0.0)
        sums = multiplied(weights, x, sums, EXACT)
    sums *= factors.sums
    if query_scales is not None:
        position = tl.load(positions + token, mask=token < num_tokens, other=0)
        sums *= tl.load(query_scales + position)[None, :]
    KIND: tl.constexpr = out.dtype.element_ty
    if tl.float16 == KIND:
        sums = tl.minimum(tl.maximum(sums, -65504.0), 65504.0)
    to = head * out_head_stride + row
    if OPERAND_ORDER:
        to = operand_column(to)
    index = token[None, :].to(tl.int64) * out_stride + to[:, None]
    tl.store(out + index, sums.to(KIND), mask=is_token & (row < num_rows)[:, None])
