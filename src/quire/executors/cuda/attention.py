"""Attention: how a layer's is launched, as kernels/hopper_attention.py or as kernels/attention.py.

Each is one function of a token's row. The model and the GPU decide which of them runs, never the
batch; large steps run kernels/hopper_prefill.py, which has hopper_attention.py's bits, or, where it
is made for the model and compiles, kernels/prefill.cu with the same bits.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton

from quire.executors.cuda.compiling import compiles_together
from quire.executors.cuda.cuda_source import Compiler, CudaError, CudaKernel, Nvrtc, TensorMap
from quire.executors.cuda.device import runs_hopper_kernels
from quire.executors.cuda.kernels import attention
from quire.executors.cuda.kernels.attention import AttentionShape, SplitBuffers, TokenTiles
from quire.executors.cuda.planes import Array, padded

SPLIT_SIZE: int = attention.SPLIT_SIZE
_NO_WINDOW = 1 << 30
_MIN_DIMS = 16  # that the matrix instruction multiplies
_MERGE_HEADS = 4  # of a token, in one program of merge_splits
_MERGE_AT_ONCE = 16  # splits that are loaded together
_QUERY_ROWS = 16  # of a program: tokens times the heads of a group
_SMALL_STEP = 256  # tokens; larger steps hold prompts, whose tokens share keys
_SMALL_STEP_ROWS = 8
_MAX_PREFILL_DIM = 128  # heads that kernels/hopper_prefill.py takes
_WIDE_DIM = 256  # heads beyond it have smaller tiles
_LARGE_STEP_ROWS = {64: 32, 128: 32, 256: 16}  # by head_dim: those that the Hopper kernel takes


class Heads(Protocol):
    """What attention needs to know of a model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInput:
    """What attention reads and writes in every layer."""

    queries: Array  # [tokens, heads, head_dim], as the cache or in float32 (kernels/attention.py)
    tables: Array  # block tables, one after the other
    tiles: TokenTiles
    out: Array  # [tokens, heads * head_dim], float16 or float32, in operand order
    tile_tokens: int = 0  # of a tile; 0: as many as the attention's `tokens_per_tile`


class LayerAttention(NamedTuple):
    """What differs from layer to layer beside keys and values."""

    scale: float  # of scores
    window: int | None = None
    soft_cap: float = 0.0  # on scores; 0: none
    sinks: Array | None = None  # float32 [heads], times log2(e)
    slopes: Array | None = None  # ALiBi's, float32 [heads], times log2(e)
    is_chunked: bool = False  # the window is the size of chunks

    @property
    def exp2_scale(self) -> float:
        """Of scores, for exp2 in place of exp; with a soft cap, of what its tanh is made of."""
        return self.scale * math.log2(math.e) / (0.5 * self.soft_cap or 1.0)

    @property
    def exp2_soft_cap(self) -> float | None:
        return self.soft_cap * math.log2(math.e) or None

    @property
    def num_seen(self) -> int:
        """The window, or more than any context."""
        return self.window or _NO_WINDOW


class LayerCache(NamedTuple):
    keys: Array  # [block, kv head, slot, head_dim]; a block may have room for more heads
    values: Array
    scales: Array | None = None  # of keys and values of one byte (kernels/kv_codes.py)


class Attention(Protocol):
    @property
    def fallback(self) -> str | None:
        """Why a slower kernel than usual runs; known once all are compiled."""

    def tokens_per_tile(self, num_tokens: int, num_splits: int) -> int:
        """Tokens of one sequence that a program takes in steps of that shape."""

    def attend(
        self, inputs: AttentionInput, cache: LayerCache, layer: LayerAttention, num_splits: int
    ) -> None:
        """One layer's. `num_splits`: splits of the context with a program of their own; 0: one
        program computes all splits."""


def split_buffers(
    kinds: Iterable[Heads], num_tokens: int, num_splits: int, device: str
) -> SplitBuffers:
    """For splits of so many tokens, with heads of any of these kinds."""
    most = num_tokens * num_splits
    heads = max((spec.num_heads for spec in kinds), default=0)
    columns = max((spec.num_heads * spec.head_dim for spec in kinds), default=0)
    sizes = (most * heads, most * heads, most * columns)
    return SplitBuffers(
        *(torch.zeros((size,), dtype=torch.float32, device=device) for size in sizes)
    )


class _Splits:
    """Splits of the context that have programs of their own."""

    def __init__(self, buffers: SplitBuffers) -> None:
        self.buffers = buffers

    def merge(
        self,
        inputs: AttentionInput,
        num_tiles: int,
        num_splits: int,
        layer: LayerAttention,
        shape: AttentionShape,
        launch_options: dict[str, bool],
    ) -> None:
        attention.merge_splits[(num_tiles, -(-shape.num_heads // _MERGE_HEADS))](
            inputs.tiles,
            inputs.out,
            self.buffers,
            layer.num_seen,
            inputs.out.stride(0),
            num_tiles,
            layer.sinks,
            SHAPE=shape,
            DIMS=triton.next_power_of_2(shape.head_dim),
            HEADS=_MERGE_HEADS,
            AT_ONCE=min(_MERGE_AT_ONCE, int(triton.next_power_of_2(num_splits))),
            CHUNKED=layer.is_chunked,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options,
        )


class PlainAttention:
    """Triton, for any GPU and for the interpreter."""

    fallback: str | None = None

    def __init__(
        self,
        spec: Heads,
        splits: _Splits,
        block_size: int,
        launch_options: dict[str, bool],
        *,
        exact: bool,
        latent_rope_dims: int = 0,
    ) -> None:
        """`latent_rope_dims`: of latent attention, whose kv heads are the groups of heads that a
        program takes; its values are the first `head_dim` numbers of its one key."""
        self._spec = spec
        self._splits = splits
        self._launch_options = launch_options
        self._exact = exact
        tile = attention.TILE if spec.head_dim <= _WIDE_DIM else attention.WIDE_TILE
        self._shape = _shape(spec, block_size, max(_QUERY_ROWS, _group(spec)), tile)
        if latent_rope_dims:
            self._shape = self._shape._replace(
                rope_dims=latent_rope_dims, out_dim=padded(spec.head_dim)
            )
        self._rope = max(_MIN_DIMS, triton.next_power_of_2(latent_rope_dims))

    def tokens_per_tile(self, num_tokens: int, num_splits: int) -> int:
        del num_tokens
        return 1 if num_splits else self._shape.rows // self._shape.group

    def attend(
        self, inputs: AttentionInput, cache: LayerCache, layer: LayerAttention, num_splits: int
    ) -> None:
        spec = self._spec
        num_tiles = len(inputs.tiles.rows)
        shape = self._shape._replace(block_heads=cache.keys.shape[1])
        own = self.tokens_per_tile(num_tiles, num_splits)
        parts = max(1, inputs.tile_tokens // own)
        has_many = cache.scales is not None or spec.head_dim > _WIDE_DIM
        attention.attend[(num_tiles * parts, spec.num_kv_heads, max(1, num_splits))](
            inputs.queries,
            cache.keys,
            cache.values,
            cache.scales,
            inputs.tables,
            inputs.tiles,
            inputs.out,
            self._splits.buffers,
            layer.exp2_scale,
            layer.num_seen,
            inputs.out.stride(0),
            layer.sinks,
            layer.exp2_soft_cap,
            layer.slopes,
            SHAPE=shape,
            DIMS=max(_MIN_DIMS, triton.next_power_of_2(spec.head_dim)),
            SPLIT_PROGRAMS=num_splits > 0,
            LARGE=cache.keys.numel() >= 1 << 31,
            EXACT=self._exact,
            CHUNKED=layer.is_chunked,
            PARTS=parts,
            ROPE=self._rope,
            num_warps=attention.MANY_WARPS if has_many else attention.WARPS,
            num_stages=attention.STAGES,
            enable_fp_fusion=False,
            **self._launch_options,
        )
        if num_splits:
            self._splits.merge(inputs, num_tiles, num_splits, layer, shape, self._launch_options)


class _PrefillArguments(ctypes.Structure):
    """Arguments of kernels/prefill.cu."""

    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("tile_rows", ctypes.c_void_p),
        ("tile_counts", ctypes.c_void_p),
        ("tile_positions", ctypes.c_void_p),
        ("tile_tables", ctypes.c_void_p),
        ("tile_starts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("out_stride", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
    )


class CudaPrefill:
    """kernels/prefill.cu in place of kernels/hopper_prefill.py, where it can be compiled and
    loaded."""

    FILE = "prefill.cu"
    HEAD_DIM = 128
    BLOCK_SIZE = 16
    THREADS = 384
    SHARED_BYTES = 229_504
    GROUPS = (4, 8)  # heads a KV head, up to a power of two: those whose bits were compared
    _COLUMNS = 64  # of a tile in shared memory

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.fallback: str | None = None
        self._kernel: CudaKernel | None = None
        try:
            compiler = compiler or Nvrtc()
        except CudaError as error:
            self._give_up(error)
            return
        self._kernel = CudaKernel(self.FILE, "attend", self.THREADS, self.SHARED_BYTES, compiler)

    def takes(self, inputs: AttentionInput, cache: LayerCache, layer: LayerAttention) -> bool:
        """Whether the kernel computes such a layer."""
        _, _, block_size, head_dim = cache.keys.shape
        is_plain = layer.window is None and layer.sinks is None and not layer.soft_cap
        return (
            is_plain
            and self._group(inputs, cache) in self.GROUPS
            and (head_dim, block_size) == (self.HEAD_DIM, self.BLOCK_SIZE)
            and inputs.queries.dtype is torch.bfloat16
            and cache.keys.dtype is torch.bfloat16
            and inputs.out.dtype is torch.float16
        )

    def attend(
        self,
        inputs: AttentionInput,
        cache: LayerCache,
        layer: LayerAttention,
        num_tiles: int,
        *,
        is_dependent: bool,
    ) -> bool:
        """Launch the kernel, or have it compiled where kernels are compiled together. False: it
        does not run here, and nothing was launched."""
        kernel = self._kernel
        if kernel is None:
            return False
        if compiles_together(self.FILE, self._compile):
            return True
        try:
            kernel.load()
        except CudaError as error:
            self._give_up(error)
            return False
        _, num_heads, _ = inputs.queries.shape
        num_kv_heads = cache.keys.shape[1]
        box = (self.BLOCK_SIZE, self._COLUMNS)
        arguments = _PrefillArguments(
            inputs.queries.data_ptr(),
            inputs.tables.data_ptr(),
            *(array.data_ptr() for array in inputs.tiles),
            inputs.out.data_ptr(),
            layer.exp2_scale,
            inputs.out.stride(0),
            num_heads,
            num_kv_heads,
            self._group(inputs, cache),
        )
        maps = (TensorMap(x.view(-1, self.HEAD_DIM), box) for x in (cache.keys, cache.values))
        grid = (num_kv_heads, num_tiles, 1)
        kernel.launch(grid, (*maps, arguments), is_dependent=is_dependent)
        return True

    def _group(self, inputs: AttentionInput, cache: LayerCache) -> int:
        found: int = triton.next_power_of_2(inputs.queries.shape[1] // cache.keys.shape[1])
        return found

    def _compile(self) -> None:
        assert self._kernel is not None
        try:
            self._kernel.compile()
        except CudaError as error:
            self._give_up(error)

    def _give_up(self, error: CudaError) -> None:
        """The Gluon kernel has the same bits."""
        self._kernel = None
        why = str(error).partition("\n")[0]
        self.fallback = f"{why}: attention of prompts runs in Gluon, slower"


class HopperAttention:
    """TMA and wgmma, for heads of 64, 128 or 256."""

    def __init__(
        self,
        spec: Heads,
        splits: _Splits,
        block_size: int,
        launch_options: dict[str, bool],
        max_sequences: int,
        *,
        has_prefill: bool = False,
        cuda_prefill: CudaPrefill | None = None,
    ) -> None:
        from quire.executors.cuda.kernels import hopper, hopper_attention, hopper_prefill

        self._kernels: Any = hopper_attention
        self._prefill: Any = hopper_prefill
        self._descriptor = hopper.descriptor
        self._spec = spec
        self._splits = splits
        self._block_size = block_size
        self._launch_options = launch_options
        self._max_sequences = max_sequences
        self._group = _group(spec)
        self._has_prefill = has_prefill and spec.head_dim <= _MAX_PREFILL_DIM
        self._cuda_prefill = cuda_prefill

    @property
    def fallback(self) -> str | None:
        return None if self._cuda_prefill is None else self._cuda_prefill.fallback

    def _rows(self, num_tokens: int) -> int:
        if self._has_prefill and num_tokens > _SMALL_STEP:
            return int(self._prefill.ROWS)
        most = _LARGE_STEP_ROWS[self._spec.head_dim]
        return max(most if num_tokens > _SMALL_STEP else _SMALL_STEP_ROWS, self._group)

    def tokens_per_tile(self, num_tokens: int, num_splits: int) -> int:
        return 1 if num_splits else self._rows(num_tokens) // self._group

    def attend(
        self, inputs: AttentionInput, cache: LayerCache, layer: LayerAttention, num_splits: int
    ) -> None:
        is_plain = layer.slopes is not None or layer.is_chunked
        assert not is_plain, "attention_for takes the plain kernel"
        spec = self._spec
        num_tokens = len(inputs.tiles.rows)
        shape = _shape(spec, self._block_size, self._rows(num_tokens), self._kernels.TILE)
        shape = shape._replace(block_heads=cache.keys.shape[1])
        # Every sequence has at most one tile that is not full.
        tile_tokens = inputs.tile_tokens or self.tokens_per_tile(num_tokens, num_splits)
        num_full = num_tokens // tile_tokens
        num_tiles = min(num_tokens, num_full + self._max_sequences)
        is_prefill = shape.rows == self._prefill.ROWS
        if is_prefill and self._attend_in_cuda(inputs, cache, layer, num_tiles):
            return
        box = [self._block_size, self._kernels.COLUMNS]
        swizzle = self._kernels.COLUMNS * cache.keys.element_size()
        keys = self._descriptor(cache.keys.view(-1, spec.head_dim), box, swizzle)
        values = self._descriptor(cache.values.view(-1, spec.head_dim), box, swizzle)
        rows = (inputs.tables, inputs.tiles, inputs.out)
        stride = inputs.out.stride(0)
        last = (layer.exp2_scale, layer.num_seen, stride, layer.sinks, layer.exp2_soft_cap)
        options: dict[str, Any] = {"SHAPE": shape, "WINDOWED": layer.window is not None}
        options |= {"enable_fp_fusion": False} | self._launch_options
        if is_prefill:
            options |= {"num_warps": self._prefill.WARPS, "maxnreg": self._prefill.REGISTERS}
            launch = self._prefill.attend[(spec.num_kv_heads, num_tiles)]
            launch(inputs.queries, keys, values, *rows, *last, **options)
            return
        is_8bit = cache.scales is not None
        self._kernels.attend[(spec.num_kv_heads, num_tiles, max(1, num_splits))](
            *(inputs.queries, keys, values, cache.scales, *rows, self._splits.buffers, *last),
            STAGES=self._kernels.num_stages(num_tokens, shape.rows, is_8bit=is_8bit),
            SPLIT_PROGRAMS=num_splits > 0,
            num_warps=self._kernels.WARPS,
            maxnreg=self._kernels.num_registers(
                shape.rows,
                spec.head_dim,
                paired=inputs.queries.dtype is torch.float32,
                is_8bit=is_8bit,
            ),
            **options,
        )
        if num_splits:
            self._splits.merge(inputs, num_tiles, num_splits, layer, shape, self._launch_options)

    def _attend_in_cuda(
        self, inputs: AttentionInput, cache: LayerCache, layer: LayerAttention, num_tiles: int
    ) -> bool:
        kernel = self._cuda_prefill
        has_room = (
            cache.keys.shape[1] > self._spec.num_kv_heads
        )  # for heads that are not the layer's
        if kernel is None or has_room or not kernel.takes(inputs, cache, layer):
            return False
        is_dependent = self._launch_options.get("launch_pdl", False)
        return kernel.attend(inputs, cache, layer, num_tiles, is_dependent=is_dependent)


def attention_for(
    spec: Heads,
    *,
    max_split_tokens: int,
    max_splits: int,
    max_sequences: int,
    block_size: int,
    launch_options: dict[str, bool],
    device: str,
    query_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    is_plain: bool = False,
    latent_rope_dims: int = 0,
    buffers: SplitBuffers | None = None,
) -> Attention:
    """The best this device can run for heads of that size. Steps of up to `max_split_tokens` may
    give splits of the context programs of their own, with `buffers` that all kinds of heads share.
    `is_plain`: layers have what the plain kernel alone computes. `latent_rope_dims`: as
    PlainAttention's."""
    if buffers is None:
        buffers = split_buffers([spec], max_split_tokens, max_splits, device)
    splits = _Splits(buffers)
    is_hopper = runs_hopper_kernels(device) and not is_plain
    # Queries in float32 are multiplied as two halves, for which heads of 256 have no registers.
    has_registers = query_dtype is not torch.float32 or spec.head_dim < 256
    if is_hopper and has_registers and _group(spec) <= _LARGE_STEP_ROWS.get(spec.head_dim, 0):
        has_prefill = query_dtype is not torch.float32 and kv_dtype.itemsize == 2
        is_cuda = has_prefill and spec.head_dim == CudaPrefill.HEAD_DIM
        is_cuda = is_cuda and _group(spec) in CudaPrefill.GROUPS
        return HopperAttention(
            spec,
            splits,
            block_size,
            launch_options,
            max_sequences,
            has_prefill=has_prefill,
            cuda_prefill=CudaPrefill() if is_cuda else None,
        )
    return PlainAttention(
        spec,
        splits,
        block_size,
        launch_options,
        exact=device == "cpu",
        latent_rope_dims=latent_rope_dims,
    )


def common_tile(kinds: Sequence[Attention], num_tokens: int, num_splits: int) -> int:
    """Tokens of a tile that all of these take. On Hopper a program takes a whole tile; several of
    the plain kernel's may share one."""
    sizes = {x: x.tokens_per_tile(num_tokens, num_splits) for x in kinds}
    on_hopper = [size for x, size in sizes.items() if isinstance(x, HopperAttention)]
    return min(on_hopper) if on_hopper else max(sizes.values(), default=1)


def _shape(spec: Heads, block_size: int, rows: int, tile: int) -> AttentionShape:
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        rows=rows,
        group=_group(spec),
        split_size=SPLIT_SIZE,
        tile=tile,
        block_heads=spec.num_kv_heads,
        rope_dims=0,
        out_dim=spec.head_dim,
    )


def _group(spec: Heads) -> int:
    """Query heads a kv head, up to a power of two."""
    return int(triton.next_power_of_2(spec.num_heads // spec.num_kv_heads))
