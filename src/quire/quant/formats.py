"""Block formats: what a tensor's bytes mean, by name and by GGUF's type number, and one reference
decoder for each: raw blocks in, float32 weights out.

A decoder takes blocks as bytes [blocks, block_bytes] and gives their weights [blocks, block_size].
The order of the float operations is part of the format: each result is rounded exactly as the
reference implementation rounds it, so that every executor has one right answer to be held to.

Names in the code: `scale` and `minimum` are float32, `codes` the small integers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.errors import UnsupportedModelError
from quire.quant import grids
from quire.quant.unpacking import Blocks as Blocks  # for those who use formats
from quire.quant.unpacking import Floats as Floats
from quire.quant.unpacking import grouped, half, planes, repeated, single

# The sixteen values of the IQ4 formats: finer near zero, where most weights are.
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


# The sixteen values of MXFP4, a float of 4 bits (E2M1), doubled; the code of -0 is that of 0.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _trits(packed: Blocks, run: int, digits: int) -> Blocks:
    """Unpack base-3 digits, first digit first. A byte b stands for the fraction b / 256: times
    three, its whole part is the next digit; dropping the digits before is what uint8 overflow does.
    """
    blocks, width = packed.shape
    powers = 3 ** np.arange(digits, dtype=np.uint8)
    runs = packed.reshape(blocks, width // run, 1, run)
    fractions = (runs * powers[:, None]).astype(np.uint16)
    return (fractions * 3 >> 8).astype(np.uint8).reshape(blocks, width * digits)


def decode_f32(blocks: Blocks) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def decode_f16(blocks: Blocks) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def decode_bf16(blocks: Blocks) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def decode_q8_0(blocks: Blocks) -> Floats:
    return half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def decode_q4_0(blocks: Blocks) -> Floats:
    codes = planes(blocks[:, 2:], bits=4, run=16).astype(np.float32)
    return half(blocks, 0) * (codes - 8)


def decode_q4_1(blocks: Blocks) -> Floats:
    codes = planes(blocks[:, 4:], bits=4, run=16).astype(np.float32)
    return half(blocks, 0) * codes + half(blocks, 2)


def decode_q5_0(blocks: Blocks) -> Floats:
    high = planes(blocks[:, 2:6], bits=1, run=1)
    low = planes(blocks[:, 6:], bits=4, run=16)
    return half(blocks, 0) * ((low | high << 4).astype(np.float32) - 16)


def decode_q5_1(blocks: Blocks) -> Floats:
    high = planes(blocks[:, 4:8], bits=1, run=1)
    low = planes(blocks[:, 8:], bits=4, run=16)
    return half(blocks, 0) * (low | high << 4).astype(np.float32) + half(blocks, 2)


def decode_q2_k(blocks: Blocks) -> Floats:
    """Sixteen groups of 16, each with a 4-bit scale and a 4-bit minimum."""
    scale = half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minimum = half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    codes = planes(blocks[:, 16:80], bits=2, run=32)
    return grouped(scale, codes) - repeated(minimum, 256)


def decode_q3_k(blocks: Blocks) -> Floats:
    """Sixteen groups of 16; 6-bit scales around 32; a clear high bit takes 4 off the quant."""
    scale_bits = planes(blocks[:, 96:104], bits=4, run=8)
    scale_bits |= planes(blocks[:, 104:108], bits=2, run=4) << 4
    scale = half(blocks, 108) * (scale_bits.astype(np.float32) - 32)
    low = planes(blocks[:, 32:96], bits=2, run=32)
    high = planes(blocks[:, :32], bits=1, run=32)
    return grouped(scale, (low | high << 2).astype(np.float32) - 4)


def _scales_and_minimums(blocks: Blocks) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K, times their float16s.

    Twelve bytes from byte 4 on: the low six bits of the first four are scales 0-3, of the next four
    minimums 0-3; the last four hold the low nibbles of scales 4-7 and, above them, of minimums 4-7,
    whose upper two bits are the top bits of the first eight bytes.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([first & 63, (low & 15) | (first >> 6) << 4])
    minimums = np.hstack([second & 63, (low >> 4) | (second >> 6) << 4])
    return (
        half(blocks, 0) * scales.astype(np.float32),
        half(blocks, 2) * minimums.astype(np.float32),
    )


def decode_q4_k(blocks: Blocks) -> Floats:
    """Eight groups of 32, each with a 6-bit scale and a 6-bit minimum."""
    scale, minimum = _scales_and_minimums(blocks)
    codes = planes(blocks[:, 16:], bits=4, run=32)
    return grouped(scale, codes) - repeated(minimum, 256)


def decode_q5_k(blocks: Blocks) -> Floats:
    """Q4_K with a fifth bit for each weight."""
    scale, minimum = _scales_and_minimums(blocks)
    high = planes(blocks[:, 16:48], bits=1, run=32)
    low = planes(blocks[:, 48:], bits=4, run=32)
    return grouped(scale, low | high << 4) - repeated(minimum, 256)


def decode_q6_k(blocks: Blocks) -> Floats:
    """Sixteen groups of 16 with signed 8-bit scales."""
    low = planes(blocks[:, :128], bits=4, run=64)
    high = planes(blocks[:, 128:192], bits=2, run=32)
    scale = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return grouped(scale, (low | high << 4).astype(np.float32) - 32)


def decode_iq4_nl(blocks: Blocks) -> Floats:
    return half(blocks, 0) * IQ4_VALUES[planes(blocks[:, 2:], bits=4, run=16)]


def decode_iq4_xs(blocks: Blocks) -> Floats:
    """Eight groups of 32; 6-bit scales around 32, their upper two bits apart."""
    scale_bits = planes(blocks[:, 4:8], bits=4, run=1)
    scale_bits |= planes(blocks[:, 2:4], bits=2, run=1) << 4
    scale = half(blocks, 0) * (scale_bits.astype(np.float32) - 32)
    return grouped(scale, IQ4_VALUES[planes(blocks[:, 8:], bits=4, run=16)])


def decode_mxfp4(blocks: Blocks) -> Floats:
    """One scale for 32 weights, a power of two (E8M0): 2 ** (byte - 127), halved as the values are
    doubled. It is finite for every byte; products may overflow."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * MXFP4_VALUES[planes(blocks[:, 1:], bits=4, run=16)]


def _e4m3_sizes() -> Floats:
    """Of the 128 codes without a sign, the last of which is no number in E4M3 itself."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, codes & 7
    scaled = np.where(exponents == 0, fractions, (8 + fractions) << np.maximum(exponents, 1) - 1)
    sizes: Floats = (scaled * 2.0**-9).astype(np.float32)
    return sizes


E4M3_SIZES = _e4m3_sizes()
# NVFP4's scales: halved, as MXFP4_VALUES are doubled. 0x7F is 0, a sign is ignored.
_NVFP4_SCALES: Floats = np.tile(E4M3_SIZES / np.float32(2), 2)
_NVFP4_SCALES[0x7F] = 0.0


def _scaled_e2m1(scales: Blocks, packed: Blocks) -> Floats:
    """Floats of 4 bits, sixteen of which have a scale: NVFP4 without what else it may have."""
    return grouped(_NVFP4_SCALES[scales], MXFP4_VALUES[planes(packed, bits=4, run=8)])


def decode_nvfp4(blocks: Blocks) -> Floats:
    return _scaled_e2m1(blocks[:, :4], blocks[:, 4:])


def decode_q1_0(blocks: Blocks) -> Floats:
    signs = planes(blocks[:, 2:], bits=1, run=1).astype(np.float32)
    return half(blocks, 0) * (2 * signs - 1)


def decode_q2_0(blocks: Blocks) -> Floats:
    codes = planes(blocks[:, 2:], bits=2, run=1).astype(np.float32)
    return (codes - 1) * half(blocks, 0)


def decode_tq1_0(blocks: Blocks) -> Floats:
    """Five ternary digits a byte, in runs of 32 and 16 bytes; the last 16 weights four a byte."""
    first = _trits(blocks[:, :32], run=32, digits=5)
    second = _trits(blocks[:, 32:48], run=16, digits=5)
    rest = _trits(blocks[:, 48:52], run=4, digits=4)
    codes = np.hstack([first, second, rest]).astype(np.float32)
    return half(blocks, 52) * (codes - 1)


def decode_tq2_0(blocks: Blocks) -> Floats:
    codes = planes(blocks[:, :64], bits=2, run=32).astype(np.float32)
    return half(blocks, 64) * (codes - 1)


def decode_i2_s(blocks: Blocks) -> Floats:
    """In units of the tensor's scale, which lies behind its blocks. The first 32 weights are in the
    highest bits."""
    quarters = planes(blocks, bits=2, run=32).reshape(-1, 4, 32)[:, ::-1]
    return quarters.reshape(-1, 128).astype(np.float32) - 1


# ---- encoders, of the formats that embeddings are written in
#
# Weights [blocks, block_size] in, blocks out, as llama.cpp quantises without an importance matrix.


def encode_f32(weights: Floats) -> Blocks:
    return weights.astype("<f4").view(np.uint8)


def encode_f16(weights: Floats) -> Blocks:
    return weights.astype("<f2").view(np.uint8)


def encode_q8_0(weights: Floats) -> Blocks:
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    scaled = weights * _ratio(np.float32(1), scale)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.hstack([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)])


def _ratio(dividend: Floats | np.float32, divisor: Floats) -> Floats:
    """The quotients; zero where the divisor is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(divisor == 0, np.float32(0), dividend / divisor)


def encode_q6_k(weights: Floats) -> Blocks:
    """The groups' scales are searched for, then rounded to multiples of the block's."""
    groups = weights.reshape(-1, 16, 16)
    scales = _group_scales(groups)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    inverse = _ratio(np.float32(-128), largest)
    half = _ratio(np.float32(1), inverse).astype("<f2")
    small = np.minimum(127, np.rint(inverse * scales)).astype(np.int8)
    divisor = half.astype(np.float32) * small.astype(np.float32)
    codes = np.clip(np.rint(_ratio(groups, divisor[:, :, None])), -32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lows = low[:, :, :2] | low[:, :, 2:] << 4
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [lows.reshape(-1, 128), highs.reshape(-1, 64), small.view(np.uint8)]
    return np.hstack([*parts, half.view(np.uint8)])


def _group_scales(groups: Floats) -> Floats:
    """For each group the scale of 6-bit codes whose error, weighted by the squares of the weights,
    is the least of nineteen candidates: [blocks, groups]."""
    at = np.abs(groups).argmax(axis=2)[:, :, None]
    peak = np.take_along_axis(groups, at, axis=2)
    cubes = groups * groups * groups
    best = np.zeros(groups.shape[:2], np.float32)
    chosen = np.zeros_like(best)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse = _ratio(np.float32(-32) - np.float32(0.1) * np.float32(step), peak)
        codes = np.clip(np.rint(groups * inverse), -32, 31)
        along = (cubes * codes).sum(axis=2)
        size = (groups * groups * codes * codes).sum(axis=2)
        better = along * along > best * size
        scale = _ratio(along, size)
        best = np.where(better, scale * along, best)
        chosen = np.where(better, scale, chosen)
    return chosen


ENCODERS: Mapping[str, Callable[[Floats], Blocks]] = {
    "F32": encode_f32,
    "F16": encode_f16,
    "Q8_0": encode_q8_0,
    "Q6_K": encode_q6_k,
}


# ---- what checkpoints of Hugging Face quantise and GGUF has no blocks for: scales are float32


def decode_u4_128(blocks: Blocks) -> Floats:
    codes = planes(blocks[:, 8:], bits=4, run=16).astype(np.float32)
    return single(blocks, 0) * (codes - single(blocks, 4))


def decode_i8_128(blocks: Blocks) -> Floats:
    return single(blocks, 0) * blocks[:, 4:].view(np.int8).astype(np.float32)


def decode_e4m3_128(blocks: Blocks) -> Floats:
    """A float of a byte has a sign, four bits of exponent and three of fraction: the upper bits of
    a half that is a 256th of it. The two codes of NaN do not occur: readers refuse them."""
    codes = blocks[:, 4:].astype(np.uint16)
    halves = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view(np.float16)
    return single(blocks, 0) * (halves.astype(np.float32) * np.float32(256))


def decode_nvfp4_128(blocks: Blocks) -> Floats:
    """NVFP4 with what its tensor's weights are multiplied by besides."""
    return single(blocks, 0) * _scaled_e2m1(blocks[:, 4:12], blocks[:, 12:])


# ---- the table


@dataclass(frozen=True, slots=True)
class Format:
    """How `block_size` weights are packed into `block_bytes` bytes."""

    name: str
    ggml_type: int  # the number GGUF files give it; -1: they have none
    block_size: int  # weights
    block_bytes: int
    decode: Callable[
        [Blocks], Floats
    ]  # uint8 [blocks, block_bytes] -> float32 [blocks, block_size]
    # Behind all blocks of a tensor: a float32 that every weight is multiplied by, and padding.
    tail_bytes: int = 0

    @property
    def is_ternary(self) -> bool:
        """Whether weights are -1, 0 and 1 times a scale."""
        return self.name in ("TQ1_0", "TQ2_0", "I2_S")

    @property
    def is_float(self) -> bool:
        """Whether weights stand alone, unquantised."""
        return self.block_size == 1

    @property
    def is_raw(self) -> bool:
        """Whether these are numbers whose meaning other tensors give: no weights as they stand."""
        return self.name in RAW_FORMATS


FORMATS = (
    Format("F32", 0, 1, 4, decode_f32),
    Format("F16", 1, 1, 2, decode_f16),
    Format("BF16", 30, 1, 2, decode_bf16),
    Format("Q8_0", 8, 32, 34, decode_q8_0),
    Format("Q4_0", 2, 32, 18, decode_q4_0),
    Format("Q4_1", 3, 32, 20, decode_q4_1),
    Format("Q5_0", 6, 32, 22, decode_q5_0),
    Format("Q5_1", 7, 32, 24, decode_q5_1),
    Format("Q2_K", 10, 256, 84, decode_q2_k),
    Format("Q3_K", 11, 256, 110, decode_q3_k),
    Format("Q4_K", 12, 256, 144, decode_q4_k),
    Format("Q5_K", 13, 256, 176, decode_q5_k),
    Format("Q6_K", 14, 256, 210, decode_q6_k),
    Format("IQ1_S", 19, 256, 50, grids.decode_iq1_s),
    Format("IQ1_M", 29, 256, 56, grids.decode_iq1_m),
    Format("IQ2_XXS", 16, 256, 66, grids.decode_iq2_xxs),
    Format("IQ2_XS", 17, 256, 74, grids.decode_iq2_xs),
    Format("IQ2_S", 22, 256, 82, grids.decode_iq2_s),
    Format("IQ3_XXS", 18, 256, 98, grids.decode_iq3_xxs),
    Format("IQ3_S", 21, 256, 110, grids.decode_iq3_s),
    Format("IQ4_NL", 20, 32, 18, decode_iq4_nl),
    Format("IQ4_XS", 23, 256, 136, decode_iq4_xs),
    Format("MXFP4", 39, 32, 17, decode_mxfp4),
    Format("NVFP4", 40, 64, 36, decode_nvfp4),
    Format("Q1_0", 41, 128, 18, decode_q1_0),
    Format("Q2_0", 42, 64, 18, decode_q2_0),
    Format("TQ1_0", 34, 256, 54, decode_tq1_0),
    Format("TQ2_0", 35, 256, 66, decode_tq2_0),
    Format("I2_S", 36, 128, 32, decode_i2_s, tail_bytes=32),
    Format("U4_128", -1, 128, 72, decode_u4_128),
    Format("I8_128", -1, 128, 132, decode_i8_128),
    Format("E4M3_128", -1, 128, 132, decode_e4m3_128),
    Format("NVFP4_128", -1, 128, 76, decode_nvfp4_128),
)


def _as_numbers(kind: str) -> Callable[[Blocks], Floats]:
    return lambda blocks: blocks.view(kind).astype(np.float32)


# Types of safetensors that weights are packed into, or are told of by.
RAW_FORMATS = {
    "U8": Format("U8", -1, 1, 1, _as_numbers("u1")),
    "I8": Format("I8", -1, 1, 1, _as_numbers("i1")),
    "I32": Format("I32", -1, 1, 4, _as_numbers("<i4")),
    "I64": Format("I64", -1, 1, 8, _as_numbers("<i8")),
    "F8_E4M3": Format("F8_E4M3", -1, 1, 1, _as_numbers("u1")),
}
RAW = RAW_FORMATS["U8"]

_BY_NAME = {known.name: known for known in FORMATS}
_BY_GGML_TYPE = {known.ggml_type: known for known in FORMATS if known.ggml_type >= 0}

# Types that sound files may hold and we do not run, so that errors can call them by name.
_OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}


def format_named(name: str, tensor: str) -> Format:
    """The format of that name; `tensor` is whose it is, for the error."""
    if name not in _BY_NAME:
        raise _unsupported(tensor, name)
    return _BY_NAME[name]


def format_of_ggml_type(ggml_type: int, tensor: str) -> Format:
    """The format of that GGUF type number; `tensor` is whose it is, for the error."""
    if ggml_type not in _BY_GGML_TYPE:
        known_as = _OTHER_NAMES.get(ggml_type, "unknown")
        raise _unsupported(tensor, f"{known_as} (GGUF type {ggml_type})")
    return _BY_GGML_TYPE[ggml_type]


def _unsupported(tensor: str, described: str) -> UnsupportedModelError:
    supported = ", ".join(known.name for known in _BY_GGML_TYPE.values())
    return UnsupportedModelError(
        f"tensor {tensor!r} has type {described}, which quire does not run; supported: "
        f"{supported}. Convert the model to one of these"
    )
