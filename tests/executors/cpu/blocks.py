"""Random and extreme weights in every block format, and what products of them ought to be."""

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from quire.executors.cpu.native import native

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

UNITS: list[str] = native.units()
FLOATS = ("F32", "F16", "BF16")
TERNARY = ("TQ1_0", "TQ2_0")
# Where the scales of a block stand: halves that must be sane numbers. The rest are codes.
SCALES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),  # in four parts
    "MXFP4": (),  # a power of two in the first byte
    "NVFP4": (),  # floats of a byte in the first four
    "Q1_0": (0,),
    "Q2_0": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# quire's own, of quantised checkpoints: weights and bytes of a block, where its float32s stand.
OWN: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "U4_128": (128, 72, (0, 4)),
    "I8_128": (128, 132, (0,)),
    "E4M3_128": (128, 132, (0,)),
    "NVFP4_128": (128, 76, (0,)),
}
# llama.cpp's, which the gguf package does not know yet: type, weights and bytes of a block.
NEWER: dict[str, tuple[int, int, int]] = {"Q2_0": (42, 64, 18)}
BLOCK_FORMATS = (*SCALES, *OWN)
FORMATS = (*FLOATS, *BLOCK_FORMATS)
# Activations that share a scale, with the sums of their codes: 32 of them, or 256.
GROUP = np.dtype(
    [
        ("codes", np.int8, 32),
        ("scale", np.float32),
        ("sum", np.float32),
        ("scaled_sum", np.float32),
        ("row_sum", np.float32),
        ("second_sum", np.float32),
        ("unused", np.float32, 3),
    ]
)
BLOCK = np.dtype(
    [
        ("codes", np.int8, 256),
        ("sums", np.int16, 8),
        ("half_sums", np.int16, 16),
        ("scale", np.float32),
        ("unused", np.float32, 3),
    ]
)


@dataclass(frozen=True)
class Matrix:
    """Weights as they lie in a file."""

    format: str
    num_rows: int
    in_size: int
    blocks: Bytes  # [rows, bytes]

    @property
    def exact(self) -> Floats:
        """The weights as the gguf package decodes them; quire's own as they are defined."""
        if self.format in OWN:
            return exact_own(self.format, self.blocks).reshape(self.num_rows, self.in_size)
        if self.format in ("Q1_0", "Q2_0"):
            exact = exact_small(self.format, self.blocks.reshape(-1, 18))
            return exact.reshape(self.num_rows, self.in_size)
        kind = gguf.GGMLQuantizationType[self.format]
        if self.format == "F16":
            return self.blocks.view(np.float16).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # of the largest scales, and of none
            return np.asarray(gguf.quants.dequantize(self.blocks, kind), dtype=np.float32)

    def packed(self) -> "native.PackedMatrix":
        return native.PackedMatrix(
            self.format, self.blocks.ravel(), num_rows=self.num_rows, in_size=self.in_size
        )


def exact_own(name: str, raw: Bytes) -> Floats:
    """Weights of quire's own formats, computed one by one."""
    blocks = raw.reshape(-1, OWN[name][1])
    floats = [blocks[:, at : at + 4].copy().view("<f4") for at in OWN[name][2]]
    codes = blocks[:, 4 * len(floats) :]
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "U4_128":  # each 16 bytes: 16 weights in low nibbles, then 16 in high ones
            runs = codes.reshape(-1, 4, 1, 16)
            nibbles = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 128)
            found = floats[0] * (nibbles.astype(np.float32) - floats[1])
        elif name == "I8_128":
            found = floats[0] * codes.view(np.int8).astype(np.float32)
        elif name == "NVFP4_128":  # as two blocks of NVFP4, whose scales come first
            parts = [codes[:, :8].reshape(-1, 2, 4), codes[:, 8:].reshape(-1, 2, 32)]
            nvfp4 = np.concatenate(parts, axis=2).reshape(-1, 36)
            values = gguf.quants.dequantize(nvfp4, gguf.GGMLQuantizationType.NVFP4)
            found = floats[0] * values.reshape(-1, 128)
        else:
            found = floats[0] * e4m3_values()[codes]
    return np.asarray(found, np.float32)


def exact_small(name: str, blocks: Bytes) -> Floats:
    """Weights of what the gguf package does not decode. Q1_0: the scale, or less it; Q2_0: -1, 0, 1
    and 2 times it."""
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    if name == "Q1_0":
        return np.where(bits.astype(bool), scales, -scales)
    with np.errstate(invalid="ignore"):  # of scales that are no numbers
        return (bits[:, 0::2] + 2.0 * bits[:, 1::2] - 1).astype(np.float32) * scales


def e4m3_values() -> Floats:
    """Of each byte: a sign, four bits of exponent, three of fraction; here none is a NaN."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction), 2.0**-6 * fraction)
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


def smallest_size(name: str) -> int:
    """An inner size near SmolLM2's 576 that this format's blocks fill."""
    return {256: 512, 128: 640}.get(block_size(name), 576)


def sizes(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    if name in OWN:
        return OWN[name][:2]
    if name in NEWER:
        return NEWER[name][1:]
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return int(size), int(num_bytes)


def block_size(name: str) -> int:
    return sizes(name)[0]


def random_matrix(name: str, num_rows: int, in_size: int, seed: int = 0) -> Matrix:
    """Any bytes are codes; scales are drawn so that weights are about 1."""
    generator = np.random.default_rng([seed, num_rows, in_size])
    if name in FLOATS:
        weights = generator.standard_normal((num_rows, in_size)).astype(np.float32)
        blocks = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
        return Matrix(name, num_rows, in_size, np.ascontiguousarray(blocks).view(np.uint8))
    size, num_bytes = sizes(name)
    shape = (num_rows, in_size // size, num_bytes)
    blocks = generator.integers(0, 256, shape).astype(np.uint8)
    if name == "TQ2_0":  # of its four codes the last means nothing
        codes = generator.integers(0, 3, (*shape[:2], 64, 4)) << np.array([0, 2, 4, 6])
        blocks[..., :64] = codes.sum(axis=-1)
    put_scales(name, blocks, generator.uniform(0.01, 0.05, shape[:2]))
    return Matrix(name, num_rows, in_size, blocks.reshape(num_rows, -1))


def extreme_matrix(name: str, num_rows: int, in_size: int, byte: int) -> Matrix:
    """Every code, and every scale beside the halves, made of one byte; the halves are 1."""
    size, num_bytes = sizes(name)
    blocks = np.full((num_rows, in_size // size, num_bytes), byte, np.uint8)
    put_scales(name, blocks, np.ones(blocks.shape[:2]))
    return Matrix(name, num_rows, in_size, blocks.reshape(num_rows, -1))


def hostile_matrix(name: str, num_rows: int, in_size: int) -> Matrix:
    """Any bytes at all: scales may be infinite, no numbers, or subnormal."""
    size, num_bytes = sizes(name)
    generator = np.random.default_rng(num_rows)
    blocks = generator.integers(0, 256, (num_rows, in_size // size * num_bytes), np.uint8)
    return Matrix(name, num_rows, in_size, blocks)


def put_scales(name: str, blocks: Bytes, scales: Doubles) -> None:
    if name in OWN:
        for offset in OWN[name][2]:
            blocks[..., offset : offset + 4] = scales.astype(np.float32)[..., None].view(np.uint8)
        return
    if name == "NVFP4":
        blocks[..., :4] = 0x20 + blocks[..., :4] % 24  # 2**-3 to 2**-1
    if name == "MXFP4":
        blocks[..., 0] = 128 + np.rint(np.log2(scales))
    if name == "IQ1_M":  # a nibble of the half each above the scales of four words
        bits = scales.astype(np.float16).view(np.uint16)[..., None] >> np.array([0, 4, 8, 12])
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | (bits & 15) << 4
    halves = scales.astype(np.float16)[..., None].view(np.uint8)
    for offset in SCALES[name]:
        blocks[..., offset : offset + 2] = halves


def activations(
    x: Floats,
    packed: "native.PackedMatrix",
    unit: str = "portable",
) -> npt.NDArray[np.generic]:
    """Columns [columns, in_size] as a product with this matrix takes them."""
    if packed.takes_floats:
        return x
    kind, quantise = (
        (BLOCK, native.quantise_blocks) if packed.takes_blocks else (GROUP, native.quantise_groups)
    )
    columns = np.zeros((len(x), x.shape[1] // kind["codes"].shape[0]), kind)
    for column, out in zip(x, columns, strict=True):
        quantise(unit, column, out.view(np.uint8))
    return columns


def as_seen(columns: npt.NDArray[Any]) -> Doubles:
    """What the activations are worth: codes times scales."""
    if columns.dtype == np.float32:
        return columns.astype(np.float64)
    values = columns["codes"].astype(np.float64) * columns["scale"][..., None]
    return np.asarray(values, dtype=np.float64).reshape(len(columns), -1)


def as_bytes(columns: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    if columns.dtype == np.float32:
        return columns
    return np.ascontiguousarray(columns).view(np.uint8)


def gemm(
    unit: str,
    packed: "native.PackedMatrix",
    columns: npt.NDArray[np.generic],
    num_rows: int,
    residuals: npt.NDArray[np.generic] | None = None,
    *,
    has_unit_scales: bool = False,
) -> Floats:
    out = np.full((len(columns), num_rows), np.nan, np.float32)
    packed.gemm(
        unit,
        as_bytes(columns),
        num_tokens=len(columns),
        out=out,
        residuals=None if residuals is None else as_bytes(residuals),
        has_unit_scales=has_unit_scales,
    )
    return out


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nmse(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    difference = found.astype(np.float64) - expected
    return float((difference**2).sum() / (expected.astype(np.float64) ** 2).sum())
