"""Products: how a Linear is launched, on Hopper's tensor cores or plainly."""

from typing import Any, NamedTuple, Protocol

import torch

from quire.executors.cuda.kernels import plain
from quire.executors.cuda.planes import FLOAT_FORMATS, FORMS, QUANT_SHIFT, Array, Planes
from quire.executors.cuda.weights import GATED_SHRINK, Linear, Segment

_GATE_BLOCK = 1024


class Products(Protocol):
    """Multiplies. `sums` [parts, tokens, rows] are float32; a gated product's `out` is float16,
    divided by GATED_SHRINK."""

    name: str

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        """sums[part, token, row], of which the parts are still to be added, in order. How many
        parts there are is how many `sums` has room for."""

    def multiply_gated(
        self, linear: Linear, tokens: Array, sums: Array | None, out: Array, num_tokens: int
    ) -> None:
        """out[token, i] = silu(gate i) * value i; `sums` is room for those in between."""

    def needs_gate_sums(self, linear: Linear) -> bool:
        """Whether multiply_gated wants that room."""


def gate_apart(linear: Linear, sums: Array, out: Array, num_tokens: int) -> None:
    """The gating as a kernel of its own."""
    width = linear.num_rows // 2
    plain.gate[(num_tokens, -(-width // _GATE_BLOCK))](
        sums,
        out,
        width,
        linear.num_rows,
        out.stride(0),
        1 / GATED_SHRINK,
        IN_TURNS=linear.is_gated,
        BLOCK=_GATE_BLOCK,
    )


class Powers(NamedTuple):
    """What a plane's scales and sums are multiplied by."""

    up: float  # scales
    down: float  # offsets
    factor: float  # sums


def powers(planes: Planes, shrunk: float = 1.0) -> Powers:
    """`shrunk`: what the tokens were divided by."""
    exponent = planes.exponent
    return Powers(2.0 ** (QUANT_SHIFT - exponent), 2.0**-exponent, 2.0**exponent * shrunk)


class PlainProducts:
    """Triton without haste, tiles of one size: for other GPUs and for the interpreter."""

    _ROWS = 64
    _TOKENS = 16

    def __init__(self, *, exact: bool) -> None:
        """`exact`: for the interpreter, which wants few large tiles and products in float32."""
        self._exact = exact
        if exact:
            self._ROWS, self._TOKENS = 256, 32
        self.name = "plain Triton products"

    def needs_gate_sums(self, linear: Linear) -> bool:
        del linear
        return True

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        for segment in linear.segments:
            self._multiply(segment, linear, tokens, sums, num_tokens)

    def multiply_gated(
        self, linear: Linear, tokens: Array, sums: Array | None, out: Array, num_tokens: int
    ) -> None:
        assert sums is not None
        self.multiply(linear, tokens, sums, num_tokens)
        gate_apart(linear, sums, out, num_tokens)

    def _multiply(
        self, segment: Segment, linear: Linear, tokens: Array, sums: Array, num_tokens: int
    ) -> None:
        planes = segment.planes
        quants = planes.quants
        grid = (
            -(-planes.num_rows // self._ROWS),
            sums.shape[0],
            -(-num_tokens // self._TOKENS),
        )
        plain.product[grid](
            tokens,
            sums[:, :, segment.first_row :],
            quants,
            quants if planes.high is None else planes.high,
            quants if planes.scales is None else planes.scales,
            quants if planes.deltas is None else planes.deltas,
            quants if segment.bias is None else segment.bias,
            *powers(planes, linear.tokens_shrunk),
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            tokens.stride(0),
            sums.stride(1),
            sums.stride(0),
            BO=self._ROWS,
            NT=self._TOKENS,
            FORMAT=plain.FLOAT if planes.is_float else plain.FORMAT_CODES[planes.format],
            BIAS=segment.bias is not None,
            EXACT=self._exact,
        )


class Tiling(NamedTuple):
    """How a product is cut: rows and tokens a program, columns of tokens a stage, stages, warps,
    and the registers a thread may have. None of it changes a sum."""

    rows: int
    tokens: int
    columns: int
    token_stages: int
    weight_stages: int
    warps: int
    registers: int


_MULTIPROCESSORS = 132
_WIDE = 16384  # rows from which on a matrix alone fills the GPU
_FULL = 96  # programs that a large tile must make to be worth it
_TOKEN_TILES = (8, 16, 32, 64, 128)


def tiling(format_name: str, num_rows: int, num_parts: int, num_tokens: int) -> Tiling:
    """The fastest of those measured on one H200 at the shapes of an 8B Llama."""
    wide = num_rows >= _WIDE
    width = next((size for size in _TOKEN_TILES if num_tokens <= size), 256)
    if format_name in FLOAT_FORMATS:
        return _float_tiling(wide, num_rows, num_parts, width, num_tokens)
    if width == 256:
        if _num_large_tiles(num_rows, num_parts, num_tokens) <= _FULL:
            return Tiling(64, 128, 64, 4, 3, 4, 128)
        return Tiling(128, 256, 64, 4, 2 if format_name == "Q8_0" else 3, 8, 168)
    small = {
        8: Tiling(64, 8, 256, 8, 8, 4, 80),
        16: Tiling(64, 16, 256, 6, 6, 4, 80),
        32: Tiling(64, 32, 256, 3, 3, 4, 80),
        64: Tiling(64, 64, 64, 4, 4, 4, 80),
        128: Tiling(64, 128, 64, 4, 3, 4, 128),
    }
    if format_name == "Q8_0":
        small[8], small[16] = Tiling(64, 8, 256, 4, 4, 4, 80), Tiling(64, 16, 256, 4, 4, 4, 80)
    has_four_bits = format_name in ("Q4_0", "Q4_1", "Q4_K")
    if wide and format_name != "Q8_0":
        small[8] = Tiling(128, 8, 256, 3, 3, 8, 80)
        small[16] = Tiling(128, 16, 256, 3, 3, 8, 80)
        small[64] = Tiling(128, 64, 64, 4, 3, *((8, 80) if has_four_bits else (4, 128)))
        if has_four_bits:
            small[32] = Tiling(128, 32, 256, 3, 3, 8, 80)
    elif format_name != "Q8_0":
        small[64] = Tiling(64, 64, 256, 2, 3, 4, 80)
        if not has_four_bits:
            small[8], small[16] = Tiling(64, 8, 256, 5, 5, 4, 80), Tiling(64, 16, 256, 5, 5, 4, 80)
    return small[width]


def _float_tiling(wide: bool, num_rows: int, num_parts: int, width: int, num_tokens: int) -> Tiling:
    if width == 256:
        if _num_large_tiles(num_rows, num_parts, num_tokens) <= _FULL - 32:
            return Tiling(128, 128, 64, 4, 4, 8, 128)
        return Tiling(128, 256, 64, 4, 4, 8, 168)
    has_few = -(-num_rows // 64) * num_parts <= _MULTIPROCESSORS
    return {
        8: Tiling(64, 8, 256, 4, 4, 4, 80) if has_few else Tiling(64, 8, 256, 3, 3, 4, 80),
        16: Tiling(64, 16, 128, 6, 6, 4, 80) if has_few else Tiling(64, 16, 128, 4, 4, 4, 80),
        32: Tiling(64, 32, 128, 4, 4, 4, 80),
        64: Tiling(128, 64, 64, 4, 4, 4, 128) if wide else Tiling(64, 64, 128, 4, 4, 4, 80),
        128: Tiling(128, 128, 64, 3, 3, 4, 128) if wide else Tiling(128, 128, 64, 4, 4, 8, 128),
    }[width]


def _num_large_tiles(num_rows: int, num_parts: int, num_tokens: int) -> int:
    return -(-num_rows // 128) * num_parts * -(-num_tokens // 256)


class HopperProducts:
    """Tensor-core products on GPUs of compute capability 9.0."""

    def __init__(self, *, dependent_launch: bool = True) -> None:
        from quire.executors.cuda.kernels import wgmma

        self._kernels: Any = wgmma
        self._dependent_launch = dependent_launch
        self.name = "wgmma products"

    def needs_gate_sums(self, linear: Linear) -> bool:
        return not linear.is_gated

    def _tiling(self, segment: Segment, linear: Linear, num_tokens: int) -> Tiling:
        return tiling(segment.planes.format, linear.num_rows, linear.num_parts, num_tokens)

    def multiply(self, linear: Linear, tokens: Array, sums: Array, num_tokens: int) -> None:
        for place, segment in enumerate(linear.segments):
            shape = self._tiling(segment, linear, num_tokens)
            self.launch(segment, linear, tokens, sums, num_tokens, shape, is_first=place == 0)

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
            gate_apart(linear, sums, out, num_tokens)

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
    ) -> None:
        """One segment's kernel; those after the first run beside it."""
        planes = segment.planes
        kernels = self._kernels
        parts = 1 if gated else out.shape[0]
        order = kernels.ALONE
        if self._dependent_launch:
            order = kernels.CHAINED if is_first else kernels.BESIDE
        out = out if gated else out[:, :, segment.first_row :]
        grid = (-(-num_tokens // shape.tokens), -(-planes.num_rows // shape.rows), parts)
        kernels.product[grid](
            self._token_descriptor(tokens[:num_tokens], shape),
            *self._weight_descriptors(planes, shape),
            out,
            planes.quants if segment.bias is None else segment.bias,
            *powers(planes, linear.tokens_shrunk),
            1 / GATED_SHRINK,
            num_tokens,
            planes.num_rows,
            planes.num_blocks,
            out.stride(-2),
            0 if gated else out.stride(0),
            BO=shape.rows,
            NT=shape.tokens,
            XK=shape.columns,
            XST=shape.token_stages,
            WST=shape.weight_stages,
            W=shape.warps,
            FORMAT=kernels.FLOAT if planes.is_float else kernels.FORMAT_CODES[planes.format],
            EPILOGUE=kernels.GATED if gated else kernels.STORE,
            BIAS=segment.bias is not None,
            PDL=order,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            launch_pdl=self._dependent_launch,
        )

    def _token_descriptor(self, tokens: Array, shape: Tiling) -> object:
        return self._kernels.descriptor(tokens, [shape.tokens, shape.columns], 128)

    def _weight_descriptors(self, planes: Planes, shape: Tiling) -> tuple[object, ...]:
        describe = self._kernels.descriptor
        if planes.is_float:
            quants = describe(planes.quants, [shape.rows, shape.columns], 128)
            return quants, quants, quants, quants
        form = FORMS[planes.format]
        quants = describe(planes.quants, [shape.rows, form.quant_words], 128)
        scales = describe(planes.scales, [shape.rows, form.scale_words], _swizzle(form.scale_words))
        high = deltas = quants
        if form.high_words:
            high = describe(planes.high, [shape.rows, form.high_words], _swizzle(form.high_words))
        if form.has_deltas:
            deltas = describe(planes.deltas, [shape.rows], 0)
        return quants, high, scales, deltas


def _swizzle(words: int) -> int:
    """The widest that a row of so many words allows."""
    return {4: 0, 8: 32, 16: 64}[words]


def products_for(device: str) -> Products:
    """The best products this device can run."""
    if device == "cpu":
        return PlainProducts(exact=True)
    major, _ = torch.cuda.get_device_capability(device)
    return HopperProducts() if major == 9 else PlainProducts(exact=False)
