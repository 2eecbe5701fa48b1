"""GEMMs of weights and tokens: how a Linear is launched, as kernels/hopper_gemm.py or as
kernels/gemm.py."""

from typing import Any, NamedTuple, Protocol

from quire.executors.cuda.device import KERNELS_VARIABLE, runs_hopper_kernels, wants_plain_kernels
from quire.executors.cuda.kernels import gemm as portable
from quire.executors.cuda.kernels import ternary as portable_ternary
from quire.executors.cuda.kernels.activations import XieluNumbers
from quire.executors.cuda.kernels.plain_dequantize import Factors, PlanePointers
from quire.executors.cuda.planes import CODE_SHIFT, GATED_DIVISOR, Array, PlaneFormat, Planes
from quire.executors.cuda.weights import Linear, Segment

_GATE_BLOCK = 1024


class Gemm(Protocol):
    """Multiplies. `sums` [splits, tokens, rows] are float32; a gated GEMM's `out` is float16,
    divided by GATED_DIVISOR."""

    name: str
    fallback: str | None  # why these are not the fastest kernels; None where they are

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        """sums[split, token, row], with as many splits of the columns as `sums` has room for; the
        reader adds the splits in order."""

    def adds_splits(self, linear: Linear, num_tokens: int) -> bool:
        """Whether `multiply_added` is the faster way to the sum of all splits."""

    def multiply_added(self, linear: Linear, tokens: Array, out: Array, num_tokens: int) -> None:
        """out[token, row], with the bits that a reader of `multiply`'s splits gets."""

    def multiply_gated(
        self, linear: Linear, tokens: Array, sums: Array | None, out: Array, num_tokens: int
    ) -> None:
        """out[token, i] = activation(gate i) * up i; `sums` is scratch memory."""

    def needs_gate_sums(self, linear: Linear) -> bool:
        """Whether multiply_gated needs that scratch memory."""


def launch_gate(linear: Linear, sums: Array, out: Array, num_tokens: int) -> None:
    """The gating as a kernel of its own."""
    width = linear.num_rows // 2 if linear.has_gates else linear.num_rows
    portable.gate[(num_tokens, -(-width // _GATE_BLOCK))](
        sums,
        out,
        width,
        linear.num_rows,
        out.stride(0),
        1 / GATED_DIVISOR,
        XieluNumbers(*linear.xielu) if linear.xielu else None,
        ACTIVATION=linear.activation.value,
        GATED=linear.has_gates,
        INTERLEAVED=linear.is_gated,
        BLOCK=_GATE_BLOCK,
    )


def factors(planes: Planes, scale: float = 1.0) -> Factors:
    """`scale`: what the sums are multiplied by."""
    exponent = planes.exponent
    up = CODE_SHIFT - exponent - planes.layout.code_shift
    return Factors(2.0**up, 2.0**-exponent, 2.0**exponent * planes.factor * scale)


def plane_pointers(planes: Planes) -> PlanePointers:
    codes = planes.codes
    return PlanePointers(
        codes,
        codes if planes.high is None else planes.high,
        codes if planes.scales is None else planes.scales,
        codes if planes.deltas is None else planes.deltas,
        codes if planes.grid is None else planes.grid,
    )


class PlainTiling(NamedTuple):
    """How a GEMM of plain Triton is tiled, which changes no sum."""

    rows: int  # a program
    tokens: int  # a program
    warps: int
    stages: int  # of loads under way


# By the number of tokens: up to 16, up to 32, and more. They fit every GPU since Ampere: 99 KiB of
# shared memory a program, and no spilled registers.
PLAIN_TILINGS = (
    PlainTiling(64, 16, 4, 3),
    PlainTiling(64, 32, 4, 2),
    PlainTiling(128, 64, 8, 2),
)
_EXACT_TILING = PlainTiling(256, 32, 4, 1)  # the interpreter takes few large tiles


def plain_tiling(num_tokens: int) -> PlainTiling:
    sizes = (shape for shape in PLAIN_TILINGS if num_tokens <= shape.tokens)
    return next(sizes, PLAIN_TILINGS[-1])


def head_tiling(num_tokens: int, *, exact: bool) -> PlainTiling:
    """Of the GEMM that has a matrix for each head, which is plain Triton on every GPU."""
    return _EXACT_TILING if exact else plain_tiling(num_tokens)


class PortableGemm:
    """Plain Triton: for GPUs other than Hopper and for the interpreter."""

    def __init__(self, *, exact: bool) -> None:
        """`exact`: for the interpreter, with float32 operands."""
        self._exact = exact
        self.name = "portable Triton GEMM"
        why = "no Hopper GPU (compute capability 9.0)"
        if wants_plain_kernels():
            why = f"{KERNELS_VARIABLE} asks for plain kernels"
        self.fallback: str | None = f"{why}: {self.name}"

    def needs_gate_sums(self, linear: Linear) -> bool:
        del linear
        return True

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        for segment in linear.segments:
            self._multiply(segment, linear, tokens, sums, num_tokens)

    def adds_splits(self, linear: Linear, num_tokens: int) -> bool:
        del linear, num_tokens
        return False

    def multiply_added(self, linear: Linear, tokens: Array, out: Array, num_tokens: int) -> None:
        raise NotImplementedError

    def multiply_gated(
        self, linear: Linear, tokens: Array, sums: Array | None, out: Array, num_tokens: int
    ) -> None:
        assert sums is not None
        self.multiply(linear, tokens, sums, num_tokens)
        launch_gate(linear, sums, out, num_tokens)

    def _multiply(
        self, segment: Segment, linear: Linear, tokens: Array, sums: Array, num_tokens: int
    ) -> None:
        planes = segment.planes
        if planes.is_ternary:
            self._multiply_ternary(segment, tokens, sums, num_tokens)
            return
        shape = _EXACT_TILING if self._exact else plain_tiling(num_tokens)
        portable.gemm[_plain_grid(planes, shape, sums, num_tokens)](
            tokens,
            sums[:, :, segment.first_row :],
            plane_pointers(planes),
            planes.codes if segment.bias is None else segment.bias,
            factors(planes, linear.scale * segment.scale),
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            tokens.stride(0),
            sums.stride(1),
            sums.stride(0),
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            FORMAT=planes.layout,
            BIAS=segment.bias is not None,
            EXACT=self._exact,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def _multiply_ternary(
        self, segment: Segment, tokens: Array, sums: Array, num_tokens: int
    ) -> None:
        planes = segment.planes
        shape = _EXACT_TILING if self._exact else PLAIN_TILINGS[0]
        portable_ternary.gemm[_plain_grid(planes, shape, sums, num_tokens)](
            tokens,
            sums[:, :, segment.first_row :],
            planes.codes,
            planes.codes if planes.deltas is None else planes.deltas,
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            tokens.stride(0),
            sums.stride(1),
            sums.stride(0),
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            BLOCK_SCALES=planes.deltas is not None,
        )


def _plain_grid(
    planes: Planes, shape: PlainTiling, sums: Array, num_tokens: int
) -> tuple[int, int, int]:
    return -(-planes.num_rows // shape.rows), sums.shape[0], -(-num_tokens // shape.tokens)


class Tiling(NamedTuple):
    """How a GEMM is tiled; the kernel takes it as a constant. None of it changes a sum."""

    rows: int  # a program
    tokens: int  # a program
    columns: int  # of tokens, a stage
    token_stages: int
    weight_stages: int
    warps: int  # that multiply
    registers: int  # a thread, at most
    parts: int = 4  # of a block: each is multiplied while the next one is decoded


# The fastest tilings of those measured on one H200 at the shapes of an 8B Llama, by the number of
# tokens: up to 8, 16, 32, 64, 128. A wide matrix fills the GPU by itself.
_Tilings = tuple[Tiling, Tiling, Tiling, Tiling, Tiling]
_TOKEN_TILES = (8, 16, 32, 64, 128)
MULTIPROCESSORS = 132
_WIDE_ROWS = 16384
_FULL = 96  # programs that a large tile must make to be worth it
_FULL_FLOAT = 64

_4_BITS: _Tilings = (
    Tiling(64, 8, 256, 8, 8, 4, 80),
    Tiling(64, 16, 256, 6, 6, 4, 80),
    Tiling(64, 32, 256, 3, 3, 4, 80),
    Tiling(64, 64, 256, 2, 3, 4, 80),
    Tiling(64, 128, 64, 4, 3, 4, 128),
)
_4_BITS_WIDE: _Tilings = (
    Tiling(128, 8, 256, 3, 3, 8, 80),
    Tiling(128, 16, 256, 3, 3, 8, 80),
    Tiling(128, 32, 256, 3, 3, 8, 80),
    Tiling(128, 64, 64, 4, 3, 8, 80),
    Tiling(64, 128, 64, 4, 3, 4, 128),
)
# Formats of at most 3 bits: more stages in the same shared memory.
_FEW_BITS: _Tilings = (
    Tiling(64, 8, 256, 8, 8, 4, 80),
    Tiling(64, 16, 256, 6, 6, 4, 80),
    Tiling(64, 32, 256, 4, 4, 4, 80),
    Tiling(64, 64, 256, 2, 4, 4, 80),
    Tiling(64, 128, 64, 4, 4, 4, 128),
)
_FEW_BITS_WIDE: _Tilings = (
    Tiling(128, 8, 256, 5, 5, 8, 80),
    Tiling(128, 16, 256, 4, 4, 8, 80),
    Tiling(128, 32, 256, 3, 3, 8, 80),
    Tiling(128, 64, 64, 4, 4, 8, 80),
    Tiling(64, 128, 64, 4, 4, 4, 128),
)
_5_OR_6_BITS: _Tilings = (
    Tiling(64, 8, 256, 5, 5, 4, 80),
    Tiling(64, 16, 256, 5, 5, 4, 80),
    Tiling(64, 32, 256, 3, 3, 4, 80),
    Tiling(64, 64, 256, 2, 3, 4, 80),
    Tiling(64, 128, 64, 4, 3, 4, 128),
)
_5_OR_6_BITS_WIDE: _Tilings = (
    Tiling(128, 8, 256, 3, 3, 8, 80),
    Tiling(128, 16, 256, 3, 3, 8, 80),
    Tiling(64, 32, 256, 3, 3, 4, 80),
    Tiling(128, 64, 64, 4, 3, 4, 128),
    Tiling(64, 128, 64, 4, 3, 4, 128),
)
_8_BITS: _Tilings = (
    Tiling(64, 8, 256, 4, 4, 4, 80),
    Tiling(64, 16, 256, 4, 4, 4, 80),
    Tiling(64, 32, 256, 3, 3, 4, 80),
    Tiling(64, 64, 64, 4, 2, 4, 80),
    Tiling(64, 128, 64, 4, 2, 4, 128),
)
_8_BITS_WIDE: _Tilings = (
    *_8_BITS[:1],
    Tiling(128, 16, 256, 2, 2, 8, 80),
    Tiling(128, 32, 256, 2, 2, 8, 80),
    Tiling(128, 64, 64, 4, 2, 8, 80),
    *_8_BITS[4:],
)
_FLOAT: _Tilings = (
    Tiling(64, 8, 256, 3, 3, 4, 80),
    Tiling(64, 16, 128, 4, 4, 4, 80),
    Tiling(64, 32, 128, 4, 4, 4, 80),
    Tiling(64, 64, 128, 4, 4, 4, 80),
    Tiling(128, 128, 64, 4, 4, 8, 128),
)
_FLOAT_FEW_TILES: _Tilings = (  # at most one program a multiprocessor
    Tiling(64, 8, 256, 4, 4, 4, 80),
    Tiling(64, 16, 128, 6, 6, 4, 80),
    *_FLOAT[2:],
)
_FLOAT_WIDE: _Tilings = (
    *_FLOAT[:3],
    Tiling(128, 64, 64, 4, 4, 4, 128),
    Tiling(128, 128, 64, 3, 3, 4, 128),
)


def stage_row_bytes(layout: PlaneFormat, shape: Tiling) -> int:
    """Of a row of weights, in a stage of shared memory."""
    if layout.is_float:
        return 2 * shape.columns
    words = layout.code_words + layout.scale_words + layout.high_words
    return 4 * words + layout.delta_bytes


def tiling(layout: PlaneFormat, num_rows: int, num_splits: int, num_tokens: int) -> Tiling:
    """How to tile a GEMM of that many rows and tokens."""
    if num_tokens > _TOKEN_TILES[-1]:
        return _large_tiling(layout, num_rows, num_splits, num_tokens)
    index = next(at for at, size in enumerate(_TOKEN_TILES) if num_tokens <= size)
    is_wide = num_rows >= _WIDE_ROWS
    if layout.is_float:
        if is_wide:
            return _FLOAT_WIDE[index]
        has_few = -(-num_rows // 64) * num_splits <= MULTIPROCESSORS
        return (_FLOAT_FEW_TILES if has_few else _FLOAT)[index]
    if layout.bits == 8:
        return (_8_BITS_WIDE if is_wide else _8_BITS)[index]
    if layout.bits < 4:
        return (_FEW_BITS_WIDE if is_wide else _FEW_BITS)[index]
    if layout.bits == 4:
        return (_4_BITS_WIDE if is_wide else _4_BITS)[index]
    return (_5_OR_6_BITS_WIDE if is_wide else _5_OR_6_BITS)[index]


_WITHOUT_OPT_IN = 48 << 10  # bytes of shared memory
_BARRIER_BYTES = 4096  # at most, with what the epilogue exchanges


def launchable(layout: PlaneFormat, shape: Tiling) -> Tiling:
    """With stages enough that a table of points can lie beside them: what the kernel declares for
    it is unknown to Triton, which asks for more than 48 KiB only where its own memory takes more.
    """
    table = 4 * layout.table_words
    while table:
        tokens = shape.token_stages * shape.tokens * shape.columns * 2
        own = tokens + shape.weight_stages * shape.rows * stage_row_bytes(layout, shape)
        if own > _WITHOUT_OPT_IN or own + _BARRIER_BYTES + table <= _WITHOUT_OPT_IN:
            break
        more = 0 if shape.columns == 64 else 1  # tokens by quarters have a stage each
        shape = shape._replace(
            token_stages=shape.token_stages + more, weight_stages=shape.weight_stages + 1
        )
    return shape


def _large_tiling(layout: PlaneFormat, num_rows: int, num_splits: int, num_tokens: int) -> Tiling:
    """128 rows by 256 tokens, or smaller tiles where these would leave multiprocessors idle."""
    num_tiles = -(-num_rows // 128) * num_splits * -(-num_tokens // 256)
    if layout.is_float:
        if num_tiles <= _FULL_FLOAT:
            return Tiling(128, 128, 64, 4, 4, 8, 128)
        return Tiling(128, 256, 64, 4, 4, 8, 168)
    weight_stages = 2 if layout.bits == 8 else 3
    if num_tiles <= _FULL:
        return Tiling(64, 128, 64, 4, weight_stages, 4, 128)
    return Tiling(128, 256, 64, 4, weight_stages, 8, 168)


# Splits that are worth adding in the GEMM. It saves their reader bytes, and costs a wait for the
# last products of each split.
_MIN_ADDED_SPLITS = 4
_FULL_WAVE = 0.9  # of the multiprocessors


def _fills_waves(num_rows: int, num_tokens: int) -> bool:
    """Whether programs of the largest tiles, without splits, leave few multiprocessors idle: each
    takes one."""
    num_tiles = -(-num_rows // 128) * -(-num_tokens // 256)
    return num_tiles >= _FULL_WAVE * MULTIPROCESSORS * -(-num_tiles // MULTIPROCESSORS)


class TernaryTiling(NamedTuple):
    """The same for ternary weights; a stage holds 256 columns of weights and of tokens."""

    rows: int  # a program
    tokens: int  # a program
    stages: int
    warps: int  # that multiply
    registers: int  # a thread, at most


# By the number of tokens: up to 8, 16, 32, 64, and more.
TERNARY_TILINGS = (
    TernaryTiling(64, 8, 5, 4, 80),
    TernaryTiling(64, 16, 6, 4, 80),
    TernaryTiling(64, 32, 5, 4, 80),
    TernaryTiling(64, 64, 4, 4, 80),
    TernaryTiling(64, 128, 3, 4, 128),
)
TERNARY_LARGE = TernaryTiling(128, 256, 3, 8, 168)  # where sums are of integers


def ternary_tiling(planes: Planes, num_splits: int, num_tokens: int) -> TernaryTiling:
    if planes.deltas is None and num_tokens > _TOKEN_TILES[-1]:
        num_tiles = -(-planes.num_rows // 128) * num_splits * -(-num_tokens // 256)
        if num_tiles > _FULL:
            return TERNARY_LARGE
    sizes = (tiling for tiling in TERNARY_TILINGS if num_tokens <= tiling.tokens)
    return next(sizes, TERNARY_TILINGS[-1])


class HopperGemm:
    """Tensor-core GEMMs on GPUs of compute capability 9.0."""

    def __init__(self, *, dependent_launch: bool = True) -> None:
        from quire.executors.cuda.kernels import hopper, hopper_gemm, hopper_ternary

        self._kernels: Any = hopper_gemm
        self._ternary_kernels: Any = hopper_ternary
        self._descriptor = hopper.descriptor
        self._dependent_launch = dependent_launch
        self.name = "wgmma GEMM"
        self.fallback: str | None = None

    def needs_gate_sums(self, linear: Linear) -> bool:
        return not linear.is_gated

    def _tiling(self, segment: Segment, linear: Linear, num_tokens: int) -> Tiling:
        layout = segment.planes.layout
        shape = tiling(layout, linear.num_rows, linear.num_splits, num_tokens)
        return launchable(layout, shape)

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        for index, segment in enumerate(linear.segments):
            if segment.planes.is_ternary:
                self.launch_ternary(segment, tokens, sums, num_tokens, is_first=index == 0)
                continue
            shape = self._tiling(segment, linear, num_tokens)
            self.launch(segment, linear, tokens, sums, num_tokens, shape, is_first=index == 0)

    def adds_splits(self, linear: Linear, num_tokens: int) -> bool:
        return linear.num_splits >= _MIN_ADDED_SPLITS and all(
            not segment.planes.is_ternary and _fills_waves(segment.planes.num_rows, num_tokens)
            for segment in linear.segments
        )

    def multiply_added(self, linear: Linear, tokens: Array, out: Array, num_tokens: int) -> None:
        for index, segment in enumerate(linear.segments):
            layout = segment.planes.layout
            self.launch(
                segment,
                linear,
                tokens,
                out[None],
                num_tokens,
                launchable(layout, tiling(layout, linear.num_rows, 1, num_tokens)),
                is_first=index == 0,
                added_splits=linear.num_splits,
            )

    def multiply_gated(
        self, linear: Linear, tokens: Array, sums: Array | None, out: Array, num_tokens: int
    ) -> None:
        if linear.is_gated:
            [segment] = linear.segments
            shape = self._tiling(segment, linear, num_tokens)
            self.launch(segment, linear, tokens, out, num_tokens, shape, gated=True)
        else:
            assert sums is not None
            self.multiply(linear, tokens, sums, num_tokens)
            launch_gate(linear, sums, out, num_tokens)

    def launch(
        self,
        segment: Segment,
        linear: Linear,
        tokens: Array,
        out: Array,
        num_tokens: int,
        shape: Tiling,
        *,
        gated: bool = False,
        is_first: bool = True,
        added_splits: int = 0,
    ) -> None:
        """One segment's kernel; those after the first run concurrently with it. `added_splits`:
        `out` has room for one split, to which so many are added."""
        planes = segment.planes
        kernels = self._kernels
        num_splits = 1 if gated else out.shape[0]
        out = out if gated else out[:, :, segment.first_row :]
        grid = (-(-num_tokens // shape.tokens), -(-planes.num_rows // shape.rows), num_splits)
        kernels.gemm[grid](
            self._descriptor(tokens[:num_tokens], [shape.tokens, shape.columns], 128),
            *self.weight_descriptors(planes, shape),
            planes.codes if planes.grid is None else planes.grid,
            out,
            planes.codes if segment.bias is None else segment.bias,
            factors(planes, linear.scale * segment.scale),
            1 / GATED_DIVISOR,
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            out.stride(-2),
            0 if gated or added_splits else out.stride(0),
            TILING=shape,
            FORMAT=planes.layout,
            ACTIVATION=linear.activation.value if gated else None,
            BIAS=segment.bias is not None,
            LAUNCH=self._order(is_first),
            ADDED_SPLITS=added_splits,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            launch_pdl=self._dependent_launch,
        )

    def launch_ternary(
        self,
        segment: Segment,
        tokens: Array,
        sums: Array,
        num_tokens: int,
        shape: TernaryTiling | None = None,
        *,
        is_first: bool = True,
    ) -> None:
        planes = segment.planes
        num_splits = sums.shape[0]
        shape = shape or ternary_tiling(planes, num_splits, num_tokens)
        words = self._descriptor(planes.codes, [shape.rows, 16], 64)
        scales = words
        if planes.deltas is not None:
            scales = self._descriptor(planes.deltas, [shape.rows], 0)
        out = sums[:, :, segment.first_row :]
        grid = (-(-num_tokens // shape.tokens), -(-planes.num_rows // shape.rows), num_splits)
        self._ternary_kernels.gemm[grid](
            self._descriptor(tokens[:num_tokens], [shape.tokens, 256], 128),
            words,
            scales,
            out,
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            out.stride(-2),
            out.stride(0),
            TILING=shape,
            BLOCK_SCALES=planes.deltas is not None,
            LAUNCH=self._order(is_first),
            num_warps=shape.warps,
            maxnreg=shape.registers,
            launch_pdl=self._dependent_launch,
        )

    def _order(self, is_first: bool) -> int:
        kernels = self._kernels
        if not self._dependent_launch:
            return int(kernels.SERIAL)
        return int(kernels.DEPENDENT if is_first else kernels.CONCURRENT)

    def weight_descriptors(
        self, planes: Planes, shape: Tiling, *, ends_in_half: bool = False
    ) -> tuple[object, ...]:
        """`ends_in_half`: the second half of the last block is padding, which is not fetched."""
        layout = planes.layout
        if layout.is_float:
            codes = self._descriptor(planes.codes, [shape.rows, shape.columns], 128)
            return codes, codes, codes, codes
        words = layout.code_words
        if layout.by_halves:
            halves = planes.codes.view(-1, planes.num_rows, words // 2)
            halves = halves[: 2 * planes.num_blocks - ends_in_half]
            codes = self._descriptor(halves, [2, shape.rows, words // 2], 64)
        else:
            codes = self._descriptor(planes.codes, [shape.rows, words], _swizzle(words))
        scales = high = deltas = codes
        if layout.scale_words == 2:  # too few for rows of their own
            assert planes.scales is not None
            scales = self._descriptor(planes.scales.view(-1), [shape.rows * 2], 0)
        elif layout.scale_words:
            words = layout.scale_words
            scales = self._descriptor(planes.scales, [shape.rows, words], _swizzle(words))
        if layout.high_words:
            words = layout.high_words
            high = self._descriptor(planes.high, [shape.rows, words], _swizzle(words))
        if layout.has_deltas:
            deltas = self._descriptor(planes.deltas, [shape.rows], 0)
        return codes, high, scales, deltas


def _swizzle(words: int) -> int:
    """The widest that a row of so many words allows."""
    return {4: 0, 8: 32, 16: 64}.get(words, 128)


def gemm_for(device: str) -> Gemm:
    """The best GEMM kernels this device can run."""
    if device == "cpu":
        return PortableGemm(exact=True)
    return HopperGemm() if runs_hopper_kernels(device) else PortableGemm(exact=False)
