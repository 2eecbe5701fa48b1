"""From codes, scales and zero points, as quantised checkpoints have them, to blocks."""

import numpy as np
import numpy.typing as npt

from quire.quant.formats import Blocks, Floats, Format

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)  # the low nibble of each byte
_HALVES = {8: np.uint32, 16: np.uint64}  # of so many bytes


def by_halves(codes: Blocks) -> Blocks:
    """From neighbours in a byte to weights i and i + n in byte i: [blocks, n] each, n 8 or 16."""
    kind = np.dtype(_HALVES[codes.shape[1]])
    low = _LOW.astype(kind)
    first, second = codes.view(kind).T  # many bytes at once: models have billions
    even = (first & low | (second & low) << 4).view(np.uint8)
    odd = (first >> 4 & low | second & ~low).view(np.uint8)
    pairs = even | odd.astype("<u2") << 8
    made: Blocks = pairs.view(np.uint8).reshape(codes.shape)
    return made


_SCALED_E2M1 = np.dtype([("scale", "<f4"), ("scales", "V8"), ("codes", "V64")])
_MXFP4 = np.dtype([("scale", "u1"), ("codes", "V16")])
_SCALED_BYTES = np.dtype([("scale", "<f4"), ("codes", "V128")])
_TYPES = {
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "V16")]),
    "Q5_0": np.dtype([("scale", "<f2"), ("high", "V4"), ("codes", "V16")]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "V32")]),
    "U4_128": np.dtype([("scale", "<f4"), ("zero", "<f4"), ("codes", "V64")]),
    "I8_128": _SCALED_BYTES,
}


def pack_scaled(codes: Blocks, scales: Floats) -> Blocks:
    """Blocks of a float32 and 128 bytes, of scales [rows, blocks] and as many times 128 codes."""
    made = np.empty(scales.shape, _SCALED_BYTES)
    made["scale"] = scales
    made["codes"] = codes.view("V128").reshape(scales.shape)
    return _bytes_of(made)


def pack_nvfp4_128(scales: Blocks, codes: Blocks, factors: Floats) -> Blocks:
    """Blocks of NVFP4_128. Of rows: their scales [rows, columns / 16], their codes [rows, columns /
    2] in NVFP4's order, and the float32 of each [rows]."""
    made = np.empty((len(codes), codes.shape[1] // 64), _SCALED_E2M1)
    made["scale"] = factors[:, None]
    made["scales"] = np.ascontiguousarray(scales).view("V8")
    made["codes"] = np.ascontiguousarray(codes).view("V64")
    return _bytes_of(made)


def pack_mxfp4(scales: Blocks, codes: Blocks) -> Blocks:
    """Blocks of MXFP4. `codes`: [rows, bytes], two neighbours a byte."""
    made = np.empty(scales.shape, _MXFP4)
    made["scale"] = scales
    made["codes"] = by_halves(codes.reshape(-1, 16)).view("V16").reshape(scales.shape)
    return _bytes_of(made)


def pack_codes(
    kind: Format, codes: Blocks, scales: Floats, zeros: npt.NDArray[np.int16], group: int
) -> Blocks:
    """Blocks of weights (code - zero) * scale. `codes`: unsigned, [rows, bytes], of four bits two
    neighbours a byte; `scales` and `zeros`: [rows, groups] of so many columns each. Q4_0, Q8_0 and
    I8_128 have one zero point, half of the codes' range."""
    in_size = codes.shape[1] * (1 if kind.name in ("Q8_0", "I8_128") else 2)
    at = np.arange(0, in_size, kind.block_size) // group
    made = np.empty((len(codes), len(at)), _TYPES[kind.name])
    made["scale"] = scales[:, at]
    if kind.name == "U4_128":
        made["zero"] = zeros[:, at]
    if kind.name == "Q5_0":
        codes, high = _around_16(codes, zeros, group)
        made["high"] = high.view("V4").reshape(made.shape)
    if codes.shape[1] == in_size:
        packed = codes ^ np.uint8(0x80)  # signed
    else:
        packed = by_halves(np.ascontiguousarray(codes).reshape(-1, 16))
    made["codes"] = packed.reshape(-1).view(made.dtype["codes"]).reshape(made.shape)
    return _bytes_of(made)


def _around_16(codes: Blocks, zeros: npt.NDArray[np.int16], group: int) -> tuple[Blocks, Blocks]:
    """Codes of five bits, of which 16 is zero: the low four, packed as before, and the fifth."""
    at = np.arange(0, 2 * codes.shape[1], 2) // group
    offsets = (16 - zeros).astype(np.uint8)[:, at]
    low, four = np.uint8(15), np.uint8(4)
    even, odd = (codes & low) + offsets, (codes >> four) + offsets
    high = np.stack([even >> four, odd >> four], axis=2).reshape(len(codes), -1)
    return even & low | (odd & low) << four, np.packbits(high, axis=1, bitorder="little")


def _bytes_of(blocks: npt.NDArray[np.void]) -> Blocks:
    found: Blocks = blocks.view(np.uint8).reshape(-1)
    return found
