"""Mixtures of experts: routing, grouping and the grouped GEMMs, launched over buffers that never
move. A step's launches depend on its number of tokens alone, never on the routing."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton

from quire.executors.cuda.expert_weights import ExpertWeights, RouterWeights, Stack
from quire.executors.cuda.gemm import (
    MULTIPROCESSORS,
    Gemm,
    HopperGemm,
    Tiling,
    factors,
    launchable,
    plane_pointers,
    stage_row_bytes,
)
from quire.executors.cuda.kernels import experts as kernels
from quire.executors.cuda.planes import BLOCK, GATED_DIVISOR, Array, PlaneFormat
from quire.model.spec import Experts, Scoring

DIRECT_TOKENS = 8  # steps of so few tokens give each pair a tile of its own: nothing is grouped
_ROUTER_EXPERTS = 16
_ROUTER_TOKENS = 16
_ROUTER_MANY_TOKENS = 64  # of a program, in steps of many tokens
_ROUTER_PROGRAMS = 32  # of few tokens: the columns are split until there are so many
_GROUP_COLUMNS = 512
_SCORING = {
    Scoring.SOFTMAX: kernels.SOFTMAX,
    Scoring.SIGMOID: kernels.SIGMOID,
    Scoring.SPARSE_MIXER: kernels.SPARSE_MIXER,
}


class ExpertGemm(Protocol):
    """Grouped GEMMs over tiles of pairs."""

    def tile_tokens(self, part: Experts, num_tokens: int) -> int:
        """Rows of pairs in a tile."""

    def multiply(
        self, call: "_Call", weights: ExpertWeights, tokens: Array, gated: Array, sums: Array
    ) -> None:
        """Both GEMMs, with the gated rows of pairs between them."""

    def multiply_gated(self, call: "_Call", stack: Stack, tokens: Array, out: Array) -> None:
        """Rows of pairs, gated or activated, divided by GATED_DIVISOR: float16 [row, width]."""

    def multiply_weighed(self, call: "_Call", stack: Stack, tokens: Array, out: Array) -> None:
        """A pair's weight times what its expert makes of its row: float32 [slot, token, row]."""


class _Call:
    """What both GEMMs of a layer take."""

    def __init__(
        self,
        part: Experts,
        tiles: kernels.Tiles,
        pairs: kernels.Pairs,
        num_tokens: int,
        num_tiles: int,
        tile_tokens: int,
    ) -> None:
        self.part = part
        self.tiles = tiles
        self.pairs = pairs
        self.num_tokens = num_tokens
        self.num_tiles = num_tiles  # at most
        self.tile_tokens = tile_tokens


def is_direct(part: Experts, num_tokens: int) -> bool:
    """Whether each pair has a tile of its own. Rows that are weighed are copied in every step."""
    return num_tokens <= DIRECT_TOKENS and not part.router.weighs_input


def max_tiles(part: Experts, num_tokens: int, tile_tokens: int) -> int:
    """The most tiles that any routing of so many tokens makes."""
    num_pairs = num_tokens * part.num_used
    if is_direct(part, num_tokens):
        return num_pairs
    used = min(part.count, num_pairs)
    return min(num_pairs, (num_pairs + used * (tile_tokens - 1)) // tile_tokens)


class ExpertRunner:
    """Runs the experts of any layer of a model, in steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        parts: Sequence[Experts],
        width: int,
        max_tokens: int,
        gemm: Gemm,
        launch_options: dict[str, bool],
        device: str,
    ) -> None:
        """`width`: of a hidden state, with padding."""
        self._width = width
        self._gemm = _expert_gemm(gemm, device)
        self._options = launch_options
        self._exact = device == "cpu"
        self._device = device
        most_experts = max(part.count for part in parts)
        most_pairs = max(part.num_used for part in parts) * max_tokens
        most_tiles = max(
            max_tiles(part, count, self._gemm.tile_tokens(part, count))
            for part in parts
            for count in range(1, max_tokens + 1)
        )
        self._max_tokens = max_tokens
        integers = torch.int32
        chunks = -(-max_tokens // kernels.CHUNK)
        splits = max(_router_splits(part.count, width // 256) for part in parts)
        self._scores = self._zeros((splits, max_tokens, most_experts), torch.float32)
        self._pairs = kernels.Pairs(
            self._zeros((most_pairs,), integers),
            self._zeros((most_pairs,), torch.float32),
            self._zeros((most_pairs,), integers),
            self._zeros((chunks * most_experts,), integers),
        )
        expert, token, row, count, ready = self._zeros((5, most_tiles), integers)
        total, claimed = self._zeros((2, 1), integers)
        self._tiles = kernels.Tiles(expert, token, row, count, total, ready, claimed)
        self._grouped = self._zeros((most_pairs, width), torch.float16)
        most = max(-(-part.size // 256) * 256 for part in parts)
        self._gated = self._zeros((most_pairs * most,), torch.float16)

    def _zeros(self, shape: tuple[int, ...], kind: object) -> Array:
        return torch.zeros(shape, dtype=kind, device=self._device)

    def run(
        self,
        weights: ExpertWeights,
        tokens: Array,
        sums: Array,
        num_tokens: int,
        routed: Array | None = None,
    ) -> None:
        """From the normed hidden states `tokens` to `sums` [slot, token, row]: what each of a
        token's experts adds, in ascending order of experts. The router sees `tokens` or `routed`.
        """
        part = weights.part
        shape = router_shape(weights.part, weights.router)
        size = self._gemm.tile_tokens(part, num_tokens)
        tiles = max_tiles(part, num_tokens, size)
        call = _Call(part, self._tiles, self._pairs, num_tokens, tiles, size)
        self._route(weights, shape, tokens if routed is None else routed, num_tokens)
        if not is_direct(part, num_tokens):
            self._group(shape, tokens, call)
            tokens = self._grouped
        else:
            tokens = tokens[:num_tokens]
        num_pairs, columns = num_tokens * part.num_used, weights.down.planes.num_columns
        gated = self._gated[: num_pairs * columns].view(num_pairs, columns)
        self._gemm.multiply(call, weights, tokens[:num_pairs], gated, sums)

    def _route(
        self, weights: ExpertWeights, shape: kernels.RouterShape, tokens: Array, num_tokens: int
    ) -> None:
        router = weights.router
        pointers = kernels.RouterPointers(
            router.high,
            router.low,
            router.high if router.bias is None else router.bias,
            router.high if router.choice_bias is None else router.choice_bias,
            router.factors,
        )
        num_blocks = router.high.shape[1] // 256
        splits = _router_splits(shape.num_experts, num_blocks)
        size = _ROUTER_TOKENS if num_tokens <= 256 else _ROUTER_MANY_TOKENS
        experts = shape.experts if self._exact else _ROUTER_EXPERTS
        grid = (-(-shape.num_experts // experts), splits, -(-num_tokens // size))
        stride = self._max_tokens * shape.num_experts
        kernels.score_experts[grid](
            tokens,
            pointers,
            self._scores,
            self._pairs.counts,
            num_tokens,
            num_blocks,
            -(-num_tokens // kernels.CHUNK),
            tokens.stride(0),
            stride,
            2.0**router.exponent,
            SHAPE=shape,
            EXPERTS=max(16, experts),
            TOKENS=size,
            EXACT=self._exact,
            num_warps=2,
            **self._options,
        )
        kernels.choose_experts[(num_tokens,)](
            self._scores,
            pointers,
            self._pairs,
            self._tiles,
            stride,
            weights.part.router.scale,
            SHAPE=shape,
            SPLITS=splits,
            DIRECT=is_direct(weights.part, num_tokens),
            num_warps=1,
            **self._options,
        )

    def _group(self, shape: kernels.RouterShape, tokens: Array, call: _Call) -> None:
        kernels.group_tokens[(call.num_tokens + 1,)](
            tokens,
            self._grouped,
            self._pairs,
            self._tiles,
            call.num_tokens,
            -(-call.num_tokens // kernels.CHUNK),
            self._width,
            SHAPE=shape,
            TOKENS=call.tile_tokens,
            COLUMNS=_GROUP_COLUMNS,
            num_warps=4,
            **self._options,
        )


def _router_splits(num_experts: int, num_blocks: int) -> int:
    """Splits of the router's columns: by its shape and never by the batch."""
    return min(num_blocks, -(-_ROUTER_PROGRAMS // -(-num_experts // _ROUTER_EXPERTS)))


def router_shape(part: Experts, weights: RouterWeights) -> kernels.RouterShape:
    router = part.router
    return kernels.RouterShape(
        num_experts=part.count,
        num_used=part.num_used,
        experts=max(2, triton.next_power_of_2(part.count)),
        used=triton.next_power_of_2(part.num_used),
        scoring=_SCORING[router.scoring],
        normalises=router.normalises and router.scoring is not Scoring.SPARSE_MIXER,
        has_bias=weights.bias is not None,
        has_choice_bias=weights.choice_bias is not None,
        num_groups=router.num_groups,
        num_used_groups=router.num_used_groups,
        num_group_best=router.num_group_best,
        weighs_input=router.weighs_input,
    )


class PortableExperts:
    """Triton with tiles of one size: for GPUs other than Hopper and for the interpreter."""

    def __init__(self, *, exact: bool) -> None:
        """`exact`: for the interpreter, with few large tiles and float32 operands."""
        self._exact = exact
        self._rows, self._tokens = (256, 32) if exact else (64, 16)

    def tile_tokens(self, part: Experts, num_tokens: int) -> int:
        del part, num_tokens
        return self._tokens

    def multiply(
        self, call: _Call, weights: ExpertWeights, tokens: Array, gated: Array, sums: Array
    ) -> None:
        self.multiply_gated(call, weights.gate_up, tokens, gated)
        self.multiply_weighed(call, weights.down, gated, sums)

    def multiply_gated(self, call: _Call, stack: Stack, tokens: Array, out: Array) -> None:
        planes, part = stack.planes, call.part
        grid = (-(-stack.rows_per_expert // self._rows), call.num_tiles)
        kernels.multiply_gated[grid](
            tokens,
            out,
            plane_pointers(planes),
            planes.codes if stack.bias is None else stack.bias,
            factors(planes),
            call.tiles,
            1 / GATED_DIVISOR,
            stack.rows_per_expert,
            part.count,
            planes.num_blocks,
            tokens.stride(0),
            out.stride(0),
            ROWS=self._rows,
            TOKENS=self._tokens,
            FORMAT=planes.layout,
            BIAS=stack.bias is not None,
            ACTIVATION=part.activation.value,
            HAS_GATES=part.is_gated,
            EXACT=self._exact,
        )

    def multiply_weighed(self, call: _Call, stack: Stack, tokens: Array, out: Array) -> None:
        planes, part = stack.planes, call.part
        grid = (-(-stack.rows_per_expert // self._rows), call.num_tiles)
        kernels.multiply_weighed[grid](
            tokens,
            out,
            plane_pointers(planes),
            planes.codes if stack.bias is None else stack.bias,
            factors(planes, GATED_DIVISOR),
            call.tiles,
            call.pairs,
            stack.rows_per_expert,
            part.count,
            planes.num_blocks,
            tokens.stride(0),
            out.stride(0),
            ROWS=self._rows,
            TOKENS=self._tokens,
            USED=part.num_used,
            FORMAT=planes.layout,
            BIAS=stack.bias is not None,
            EXACT=self._exact,
        )


_TOKEN_TILES = (8, 16, 32, 64)
_LARGE_TILE, _LARGE_MEAN = 128, 256
_MAX_SIZES = 3  # of tiles, in a launch
_LARGEST_PAIR_TILE = 64  # tokens of the tiles of a launch of both GEMMs
_FEW_BLOCKS = 4  # of 256 columns
_MANY_PROGRAMS = 528  # of 64 rows: enough to fill 132 multiprocessors with half as many of 128
_REGISTERS, _SHARED_BYTES = 65_536, 232_448  # of a multiprocessor
_LOADING_WARPS = 4  # of a program, two of which do nothing
_OTHER_SHARED_BYTES = 6144  # of a program: barriers, and what the epilogue exchanges


def expert_tiling(
    layout: PlaneFormat, tile_tokens: int, num_programs: int, num_blocks: int
) -> Tiling:
    """How a grouped GEMM is tiled, which changes no sum. With 128 rows a program instead of 64,
    tokens are fetched half as often, where there are still enough programs."""
    if num_blocks <= _FEW_BLOCKS and tile_tokens == 32 and not layout.is_float:
        return Tiling(64, 32, 256, 2, 2, 4, 80)  # short: more programs at once
    rows = 128 if num_programs >= _MANY_PROGRAMS else 64
    wants_registers = layout.has_small_floats or layout.has_sums or layout.bits == 3
    if wants_registers and rows == 128 and tile_tokens <= 16:
        # Warps with two tiles each: one is decoded while the other's wgmma runs. Upper bits beside
        # codes of 2 bits, and E4M3, want more registers than eight warps have.
        stages = 4 if tile_tokens == 8 and layout.bits < 8 else 3
        parts = 8 if layout.by_halves and tile_tokens == 16 else 4
        return Tiling(rows, tile_tokens, 256, stages, stages, 4, 128, parts)
    warps = rows // 16
    if layout.is_float:
        columns, stages = {8: (256, 3), 128: (64, 4)}.get(tile_tokens, (128, 4 - rows // 128))
        registers = 128 if tile_tokens == 128 else 80
        return Tiling(rows, tile_tokens, columns, stages, stages, warps, registers)
    if tile_tokens >= 64 and not (layout.has_powers and tile_tokens == 64):
        most = 168 if rows == 128 and layout.has_e4m3_scales else 128
        return Tiling(rows, tile_tokens, 64, 4, 3, warps, 80 if tile_tokens == 64 else most)
    stages = 2 if tile_tokens == 64 else 3
    # A program of 128 rows fills the shared memory, so that registers cost nothing.
    registers = 128 if rows == 128 and 16 <= tile_tokens <= 32 and layout.bits == 8 else 80
    parts = 8 if layout.by_halves and warps == 8 else 4  # eighths take fewer registers
    return Tiling(rows, tile_tokens, 256, stages, stages, warps, registers, parts)


def token_sizes(layout: PlaneFormat, tile_tokens: int) -> tuple[int, ...]:
    """The sizes of tiles in a launch whose largest has so many tokens: a tile of few tokens need
    not run the instruction for many. Other formats than MXFP4 have no registers left for that."""
    if not layout.has_powers:
        return (tile_tokens,)
    count = {64: 3}.get(tile_tokens, 2)
    return tuple(size for size in (*_TOKEN_TILES, _LARGE_TILE) if size <= tile_tokens)[-count:]


def resident_programs(layout: PlaneFormat, shape: Tiling) -> int:
    """How many programs run at once: each goes on to other tiles until there are none."""
    by_registers = _REGISTERS // (32 * (shape.warps + _LOADING_WARPS) * shape.registers)
    tokens = shape.token_stages * shape.tokens * shape.columns * 2
    weights = shape.weight_stages * shape.rows * stage_row_bytes(layout, shape)
    table = 4 * layout.table_words
    by_memory = _SHARED_BYTES // (tokens + weights + table + _OTHER_SHARED_BYTES)
    return MULTIPROCESSORS * max(1, min(by_registers, by_memory))


class HopperExperts:
    """Tensor-core GEMMs on GPUs of compute capability 9.0."""

    def __init__(self, gemm: HopperGemm, *, dependent_launch: bool) -> None:
        from quire.executors.cuda.kernels import hopper, hopper_expert_pair, hopper_experts

        self._kernels: Any = hopper_experts
        self._pair_kernels: Any = hopper_expert_pair
        self._descriptor = hopper.descriptor
        self._gemm = gemm
        self._dependent_launch = dependent_launch

    def tile_tokens(self, part: Experts, num_tokens: int) -> int:
        """Room for about twice the mean of an expert's rows, so that few experts need a second
        tile; not more than 64 before the mean is 256."""
        if is_direct(part, num_tokens):
            return _TOKEN_TILES[0]
        mean = num_tokens * part.num_used / part.count
        if mean >= _LARGE_MEAN:
            return _LARGE_TILE
        return next((size for size in _TOKEN_TILES if size >= 2 * mean), _TOKEN_TILES[-1])

    def multiply(
        self, call: _Call, weights: ExpertWeights, tokens: Array, gated: Array, sums: Array
    ) -> None:
        gate_up, down = weights.gate_up, weights.down
        shape = self._tiling(call, gate_up)
        is_pair = (
            not is_direct(call.part, call.num_tokens)
            and call.part.is_gated
            and gate_up.planes.layout.has_powers
            and gate_up.planes.layout == down.planes.layout
            and gate_up.ends_in_half == down.ends_in_half
            and shape == self._tiling(call, down)
            and shape.tokens <= _LARGEST_PAIR_TILE
        )
        if is_pair:
            self._launch_pair(call, weights, shape, tokens, gated, sums)
        else:
            self.multiply_gated(call, gate_up, tokens, gated)
            self.multiply_weighed(call, down, gated, sums)

    def multiply_gated(self, call: _Call, stack: Stack, tokens: Array, out: Array) -> None:
        option = call.part.activation.value
        self._launch(call, stack, tokens, out, 1.0, option, gated=True)

    def multiply_weighed(self, call: _Call, stack: Stack, tokens: Array, out: Array) -> None:
        used = call.part.num_used
        self._launch(call, stack, tokens, out, GATED_DIVISOR, used, gated=False)

    def _tiling(self, call: _Call, stack: Stack) -> Tiling:
        planes = stack.planes
        num_programs = -(-stack.rows_per_expert // 64) * call.num_tiles
        shape = expert_tiling(planes.layout, call.tile_tokens, num_programs, planes.num_blocks)
        return launchable(planes.layout, shape)

    def _token_boxes(
        self, stack: Stack, tokens: Array, shape: Tiling, sizes: Sequence[int]
    ) -> list[Any]:
        """Descriptors of the tokens that a stack multiplies, one for each size of tiles."""
        if stack.planes.layout.by_halves and stack.ends_in_half:
            tokens = tokens[
                :, : stack.planes.num_columns - BLOCK // 2
            ]  # what lies after is padding
        boxes = [self._descriptor(tokens, [size, shape.columns], 128) for size in sizes]
        return boxes + boxes[:1] * (_MAX_SIZES - len(boxes))

    def _launch(
        self,
        call: _Call,
        stack: Stack,
        tokens: Array,
        out: Array,
        divisor: float,
        option: int | str,
        *,
        gated: bool,
    ) -> None:
        planes = stack.planes
        shape = self._tiling(call, stack)
        sizes = token_sizes(planes.layout, call.tile_tokens)
        num_items = -(-stack.rows_per_expert // shape.rows) * call.num_tiles
        self._kernels.expert_gemm[(min(num_items, resident_programs(planes.layout, shape)),)](
            *self._token_boxes(stack, tokens, shape, sizes),
            *self._gemm.weight_descriptors(planes, shape, ends_in_half=stack.ends_in_half),
            planes.codes if planes.grid is None else planes.grid,
            out,
            planes.codes if stack.bias is None else stack.bias,
            factors(planes, divisor),
            1 / GATED_DIVISOR,
            call.tiles,
            call.pairs,
            stack.rows_per_expert,
            stack.used_rows,
            planes.num_rows,
            planes.num_blocks,
            out.stride(0),
            TILING=shape,
            NUM_SIZES=len(sizes),
            FORMAT=planes.layout,
            ENDS_IN_HALF=planes.layout.by_halves and stack.ends_in_half,
            GATED=gated,
            HAS_GATES=call.part.is_gated,
            BIAS=stack.bias is not None,
            OPTION=option,
            PDL=self._dependent_launch,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            launch_pdl=self._dependent_launch,
        )

    def _launch_pair(
        self,
        call: _Call,
        weights: ExpertWeights,
        shape: Tiling,
        tokens: Array,
        gated: Array,
        sums: Array,
    ) -> None:
        gate_up, down = weights.gate_up, weights.down
        layout, ends_in_half = gate_up.planes.layout, gate_up.ends_in_half
        sizes = token_sizes(layout, call.tile_tokens)
        codes, _, scales, _ = self._gemm.weight_descriptors(
            gate_up.planes, shape, ends_in_half=ends_in_half
        )
        down_codes, _, down_scales, _ = self._gemm.weight_descriptors(
            down.planes, shape, ends_in_half=ends_in_half
        )
        read = down.planes.num_columns - BLOCK // 2 * ends_in_half  # columns of the gated rows
        gated_rows = min(gate_up.rows_per_expert, 2 * read)
        row_tiles = -(-gated_rows // shape.rows) + -(-down.rows_per_expert // shape.rows)
        num_programs = min(row_tiles * call.num_tiles, resident_programs(layout, shape))
        self._pair_kernels.expert_pair[(num_programs,)](
            *self._token_boxes(gate_up, tokens, shape, sizes),
            *self._token_boxes(down, gated, shape, sizes),
            codes,
            scales,
            down_codes,
            down_scales,
            self._half(gate_up, gated, gated_rows, 1.0),
            self._half(down, sums, down.rows_per_expert, GATED_DIVISOR),
            1 / GATED_DIVISOR,
            call.tiles,
            call.pairs,
            gate_up.planes.num_blocks,
            down.planes.num_blocks,
            TILING=shape,
            NUM_SIZES=len(sizes),
            FORMAT=layout,
            ENDS_IN_HALF=ends_in_half,
            BIAS=gate_up.bias is not None,
            ACTIVATION=call.part.activation.value,
            USED=call.part.num_used,
            PDL=self._dependent_launch,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            launch_pdl=self._dependent_launch,
        )

    def _half(self, stack: Stack, out: Array, made_rows: int, divisor: float) -> Any:
        """One of both GEMMs; `made_rows` of an expert are stored."""
        planes = stack.planes
        return self._pair_kernels.Half(
            out,
            planes.codes if stack.bias is None else stack.bias,
            factors(planes, divisor).sums,
            made_rows,
            stack.rows_per_expert,
            stack.used_rows,
            planes.num_rows,
            out.stride(0),
        )


def _expert_gemm(gemm: Gemm, device: str) -> ExpertGemm:
    """The grouped GEMMs that go with a GEMM."""
    if isinstance(gemm, HopperGemm):
        return HopperExperts(gemm, dependent_launch=True)
    return PortableExperts(exact=device == "cpu")
