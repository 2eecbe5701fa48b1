"""Attention: how a layer's attention is launched, on Hopper's tensor cores or plainly.

Both kernels are one function of a token's row; which of them runs is the model's and the GPU's
affair, and never the batch's.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from quire.executors.cuda.kernels import attention
from quire.executors.cuda.planes import Array

SPLIT = attention.SPLIT
_NO_WINDOW = 1 << 30
_LEAST_DIMS = 16  # that the matrix instruction multiplies
_HEADS_AT_ONCE = 8  # of a token, while its parts are merged
_QUERY_ROWS = 16  # of a program: tokens times the heads of a group
_SMALL_STEP = 256  # tokens; larger steps hold prompts, whose tokens share keys
_SMALL_STEP_ROWS = 8
_LARGE_STEP_ROWS = 32


class Heads(Protocol):
    """What attention needs to know of a model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenTiles:
    """Of each tile of tokens, int32: its first row, their count, first position, where their
    sequence's block table starts, and the first position that the step computes of it."""

    rows: Array
    counts: Array
    positions: Array
    tables: Array
    starts: Array


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention reads and writes in every layer."""

    queries: Array  # [tokens, heads, head_dim], bfloat16
    tables: Array  # block tables, one after the other
    tiles: TokenTiles
    out: Array  # [tokens, heads * head_dim], float16 in operand order


class Layer(NamedTuple):
    """What differs from layer to layer."""

    keys: Array  # [block, kv head, slot, head_dim]
    values: Array
    window: int | None


class Attention(Protocol):
    def tokens_a_tile(self, num_tokens: int, num_parts: int) -> int:
        """Tokens of one sequence that a program takes in steps of that shape."""

    def attend(self, given: Attended, layer: Layer, num_parts: int) -> None:
        """One layer's. `num_parts`: parts of the context with a program of their own, or 0."""


class _Parts:
    """Room for the parts of the context where they have programs of their own."""

    def __init__(self, spec: Heads, num_tokens: int, num_parts: int, device: str) -> None:
        self._spec = spec
        count = num_tokens * num_parts * spec.num_heads
        self.arrays = tuple(
            torch.zeros(shape, dtype=torch.float32, device=device)
            for shape in ((count,), (count,), (count, spec.head_dim))
        )

    def merge(self, given: Attended, num_tiles: int, window: int, chain: dict[str, bool]) -> None:
        spec = self._spec
        tiles = given.tiles
        attention.merge_parts[(num_tiles, -(-spec.num_heads // _HEADS_AT_ONCE))](
            tiles.rows,
            tiles.counts,
            tiles.positions,
            given.out,
            *self.arrays,
            window,
            given.out.stride(0),
            num_tiles,
            NUM_HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            DIMS=_power_of_two(spec.head_dim),
            HEADS=_HEADS_AT_ONCE,
            SPLIT=SPLIT,
            num_warps=4,
            enable_fp_fusion=False,
            **chain,
        )


class PlainAttention:
    """Triton, for any GPU and for the interpreter."""

    def __init__(
        self,
        spec: Heads,
        parts: _Parts,
        block_size: int,
        chain: dict[str, bool],
        *,
        exact: bool,
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._block_size = block_size
        self._chain = chain
        self._exact = exact
        self._group = _group(spec)
        self._rows = max(_QUERY_ROWS, self._group)

    def tokens_a_tile(self, num_tokens: int, num_parts: int) -> int:
        del num_tokens
        return 1 if num_parts else self._rows // self._group

    def attend(self, given: Attended, layer: Layer, num_parts: int) -> None:
        spec, tiles = self._spec, given.tiles
        num_tiles = len(tiles.rows)
        seen = layer.window or _NO_WINDOW
        attention.attend[(num_tiles, spec.num_kv_heads, max(1, num_parts))](
            given.queries,
            layer.keys,
            layer.values,
            given.tables,
            tiles.rows,
            tiles.counts,
            tiles.positions,
            tiles.tables,
            given.out,
            *self._parts.arrays,
            _scale(spec),
            seen,
            given.out.stride(0),
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            DIMS=max(_LEAST_DIMS, _power_of_two(spec.head_dim)),
            BLOCK_SIZE=self._block_size,
            ROWS=self._rows,
            GROUP=self._group,
            SPLIT=SPLIT,
            TILE=attention.TILE,
            PARTS_APART=num_parts > 0,
            LARGE=layer.keys.numel() >= 1 << 31,
            EXACT=self._exact,
            num_warps=attention.WARPS,
            num_stages=attention.STAGES,
            enable_fp_fusion=False,
            **self._chain,
        )
        if num_parts:
            self._parts.merge(given, num_tiles, seen, self._chain)


class HopperAttention:
    """The copy engine and wgmma, for heads of 64 or 128 numbers."""

    def __init__(
        self, spec: Heads, parts: _Parts, block_size: int, chain: dict[str, bool], max_rows: int
    ) -> None:
        from quire.executors.cuda.kernels import hopper_attention

        self._kernels: Any = hopper_attention
        self._spec = spec
        self._parts = parts
        self._block_size = block_size
        self._chain = chain
        self._max_rows = max_rows
        self._group = _group(spec)

    def _rows(self, num_tokens: int) -> int:
        wanted = _LARGE_STEP_ROWS if num_tokens > _SMALL_STEP else _SMALL_STEP_ROWS
        return max(wanted, self._group)

    def tokens_a_tile(self, num_tokens: int, num_parts: int) -> int:
        return 1 if num_parts else self._rows(num_tokens) // self._group

    def attend(self, given: Attended, layer: Layer, num_parts: int) -> None:
        spec, tiles, kernels = self._spec, given.tiles, self._kernels
        num_tokens = len(tiles.rows)
        rows = self._rows(num_tokens)
        # Every sequence has at most one tile that is not full.
        full = num_tokens // self.tokens_a_tile(num_tokens, num_parts)
        num_tiles = min(num_tokens, full + self._max_rows)
        seen = layer.window or _NO_WINDOW
        box = [self._block_size, kernels.COLUMNS]
        kernels.attend[(spec.num_kv_heads, num_tiles, max(1, num_parts))](
            given.queries,
            kernels.descriptor(layer.keys.view(-1, spec.head_dim), box, 128),
            kernels.descriptor(layer.values.view(-1, spec.head_dim), box, 128),
            given.tables,
            tiles.rows,
            tiles.counts,
            tiles.positions,
            tiles.tables,
            tiles.starts,
            given.out,
            *self._parts.arrays,
            _scale(spec),
            seen,
            given.out.stride(0),
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            HALVES=spec.head_dim // kernels.COLUMNS,
            BLOCK_SIZE=self._block_size,
            ROWS=rows,
            GROUP=self._group,
            SPLIT=SPLIT,
            SLOTS=kernels.slots(num_tokens),
            PARTS_APART=num_parts > 0,
            num_warps=kernels.WARPS,
            maxnreg=kernels.REGISTERS[rows],
            enable_fp_fusion=False,
            **self._chain,
        )
        if num_parts:
            self._parts.merge(given, num_tiles, seen, self._chain)


def attention_for(
    spec: Heads,
    *,
    parts_apart_tokens: int,
    max_parts: int,
    max_rows: int,
    block_size: int,
    chain: dict[str, bool],
    device: str,
) -> Attention:
    """The best this device can run for heads of that size."""
    parts = _Parts(spec, parts_apart_tokens, max_parts, device)
    is_hopper = device != "cpu" and torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and spec.head_dim in (64, 128) and _group(spec) <= _LARGE_STEP_ROWS:
        return HopperAttention(spec, parts, block_size, chain, max_rows)
    return PlainAttention(spec, parts, block_size, chain, exact=device == "cpu")


def _group(spec: Heads) -> int:
    """Query heads a key head, up to a power of two."""
    return _power_of_two(spec.num_heads // spec.num_kv_heads)


def _scale(spec: Heads) -> float:
    """Of scores, with what turns powers of e into powers of two."""
    return float(spec.head_dim**-0.5 * math.log2(math.e))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
