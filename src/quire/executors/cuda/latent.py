"""Latent attention: queries against the vectors that the cache keeps, and values of what attention
leaves, launched as kernels/latent.py over buffers that never move."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton

from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.gemm import factors, head_tiling, plane_pointers
from quire.executors.cuda.kernels import latent as kernels
from quire.executors.cuda.kernels.latent import LatentShape, Rotation
from quire.executors.cuda.planes import Array, Planes, padded
from quire.executors.cuda.weights import LatentWeights, Linear
from quire.model.spec import Attention

_HEADS = 16  # of an attention program
Multiply = Callable[[Linear, Array, int], int]  # into sums; how many splits it leaves there


def latent_groups(num_heads: int) -> int:
    """Programs that the heads of latent attention are divided among."""
    counts = range(1, num_heads + 1)
    return next(n for n in counts if num_heads % n == 0 and num_heads // n <= _HEADS)


def latent_shape(part: Attention) -> LatentShape | None:
    latent = part.latent
    if latent is None:
        return None
    return LatentShape(
        num_heads=part.num_heads,
        plain_dims=part.head_dim - latent.rope_dims,
        rope_dims=latent.rope_dims,
        kv_rank=latent.kv_rank,
        query_rank=latent.query_rank or 0,
        is_interleaved=part.rope is not None and part.rope.interleaved,
        block_size=BLOCK_SIZE,
    )


class LatentInput(NamedTuple):
    """What a layer makes queries and the cache's vectors of."""

    linear: Linear  # makes queries, or what they are made of, and then what the cache keeps
    weights: LatentWeights
    rope: Rotation
    slots: Array
    cache: Array  # [block, 1, slot, key_dim]
    query_scales: Array | None
    epsilon: float


class _Buffers(NamedTuple):
    """float16, each head's numbers in whole blocks."""

    vectors: Array  # [token, query_rank]: what queries are made of
    plain: Array  # [token, head, plain_dims]: of queries, without rope
    mixed: Array  # [token, head, kv_rank]: what attention leaves


class LatentRunner:
    """Runs what latent attention has beside attention, in steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        shapes: Iterable[LatentShape],
        max_tokens: int,
        multiply: Multiply,
        sums: Array,
        queries: Array,
        launch_options: dict[str, bool],
        device: str,
    ) -> None:
        """`multiply` leaves its sums in `sums`; `queries` is memory for those of any layer."""
        self._max_tokens = max_tokens
        self._multiply = multiply
        self._sums = sums
        self._queries = queries
        self._options = launch_options
        self._exact = device == "cpu"

        def room(*sizes: int) -> Array:
            return torch.zeros((max_tokens, *sizes), dtype=torch.float16, device=device)

        self._buffers = {
            shape: _Buffers(
                room(padded(shape.query_rank)),
                room(shape.num_heads, padded(shape.plain_dims)),
                room(shape.num_heads, padded(shape.kv_rank)),
            )
            for shape in set(shapes)
        }

    def make_queries(
        self, shape: LatentShape, given: LatentInput, tokens: Array, count: int
    ) -> Array:
        """Store each token's vector and rotated key; its queries, [token, head, key_dim]."""
        splits = self._multiply(given.linear, tokens, count)
        self._store(shape, given, splits, count)
        linear, vectors = given.linear, self._buffers[shape].vectors
        if given.weights.query is not None:
            linear = given.weights.query
            splits = self._multiply(linear, vectors, count)
        queries = self._queries[: self._max_tokens * shape.num_heads * shape.key_dim]
        queries = queries.view(self._max_tokens, shape.num_heads, shape.key_dim)
        plain = self._buffers[shape].plain
        kernels.divide_queries[(count, shape.num_heads)](
            self._sums,
            given.rope,
            given.query_scales,
            plain,
            queries,
            self._max_tokens * linear.num_rows,
            linear.num_rows,
            SHAPE=shape,
            WIDTH=plain.shape[2],
            DIMS=triton.next_power_of_2(shape.plain_dims),
            SPLITS=splits,
            num_warps=1,
            **self._options,
        )
        positions, scales = given.rope.positions, given.query_scales
        self._multiply_heads(count, given.weights.keys, plain, queries, positions, scales)
        return queries

    def mixed(self, shape: LatentShape) -> Array:
        """Where attention leaves what each head makes of the cache's vectors: [token, columns]."""
        return self._buffers[shape].mixed.flatten(1)

    def make_values(
        self, shape: LatentShape, weights: LatentWeights, out: Array, count: int
    ) -> None:
        """out[token] = all heads' values of that, in operand order."""
        mixed = self._buffers[shape].mixed
        self._multiply_heads(count, weights.values, mixed, out, in_operand_order=True)

    def _store(self, shape: LatentShape, given: LatentInput, splits: int, count: int) -> None:
        linear, vectors = given.linear, self._buffers[shape].vectors
        kernels.store_latent[(count,)](
            self._sums,
            given.rope,
            given.slots,
            given.weights.key_norm,
            given.weights.query_norm,
            given.cache,
            vectors,
            self._max_tokens * linear.num_rows,
            linear.num_rows,
            vectors.stride(0),
            given.epsilon,
            SHAPE=shape,
            RANK=triton.next_power_of_2(shape.kv_rank),
            QUERY_RANK=triton.next_power_of_2(max(1, shape.query_rank)),
            SPLITS=splits,
            num_warps=4,
            **self._options,
        )

    def _multiply_heads(
        self,
        count: int,
        planes: Planes,
        tokens: Array,
        out: Array,
        positions: Array | None = None,
        query_scales: Array | None = None,
        *,
        in_operand_order: bool = False,
    ) -> None:
        """Each head's matrix times its part of `tokens` [token, head, columns]."""
        heads = tokens.shape[1]
        num_rows = planes.num_rows // heads
        tiling = head_tiling(count, exact=self._exact)
        grid = (-(-num_rows // tiling.rows), heads, -(-count // tiling.tokens))
        kernels.multiply_heads[grid](
            tokens,
            out,
            plane_pointers(planes),
            factors(planes),
            self._sums if positions is None else positions,
            query_scales,
            count,
            num_rows,
            planes.num_blocks,
            out.stride(0),
            num_rows if in_operand_order else out.stride(1),
            ROWS=tiling.rows,
            TOKENS=tiling.tokens,
            FORMAT=planes.layout,
            OPERAND_ORDER=in_operand_order,
            EXACT=self._exact,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **self._options,
        )
