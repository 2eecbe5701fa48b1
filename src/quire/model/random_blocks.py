"""random_blocks: random weights straight in a block format, so that a model is made in seconds.

Every byte of a block is random; then its float16 scales are set so that the weights have about the
size asked for and a mean near zero. Nothing is quantised. What comes out is noise of a trained
model's shape and size: it takes as long to compute with, and stays finite.
"""

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from quire.loader.reading import Bytes
from quire.loader.tensor import packed_size
from quire.quant.formats import Format

# By format: where a block keeps its float16 scales, and how large each is beside the first. Offsets
# take the quants' mean off: 7.5 of 0 to 15. Quants of the other formats are centred as they are.
_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1.0},
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
    "TQ1_0": {52: 1.0},
    "TQ2_0": {64: 1.0},
}
# By float format: its integer type, and the bits of its fraction and its exponent.
_FLOATS = {"F32": ("<u4", 23, 8), "F16": ("<u2", 10, 5), "BF16": ("<u2", 7, 8)}
_MEAN_SIZE = math.sqrt(7 / 3)  # root mean square of what is even from 1 to 2
_SAMPLE_BLOCKS = 256


def random_blocks(
    block_format: Format, num_weights: int, size: float, rng: np.random.Generator
) -> Bytes:
    """So many weights of about that size (root mean square), packed."""
    data = _random_bytes(packed_size(block_format, num_weights), rng)
    if block_format.is_float:
        _set_exponents(data, block_format, size)
        return data
    blocks = data.reshape(-1, block_format.block_bytes)
    _keep_to_the_format(blocks, block_format)
    scale = size / _size_at_scale_one(block_format)
    for at, factor in _SCALES[block_format.name].items():
        halves = blocks[:, at : at + 2].view("<u2")
        bits = np.float16(scale * factor).view(np.uint16)
        halves &= _jitter(int(bits) & 0x7FFF)
        halves += bits
    return data


def _jitter(bits: int) -> int:
    """The bits of a float16 that may stay random: it grows by an eighth at most, as integers grow
    where it is subnormal."""
    return 0x7F if bits >= 1 << 10 else (1 << max(0, bits.bit_length() - 4)) - 1


def _random_bytes(count: int, rng: np.random.Generator) -> Bytes:
    words: npt.NDArray[np.uint64] = rng.bit_generator.random_raw(-(-count // 8))  # the fastest
    return words.view(np.uint8)[:count]


def _set_exponents(data: Bytes, block_format: Format, size: float) -> None:
    """Keep the random signs and fractions; numbers of one exponent are even in one octave."""
    kind, fraction_bits, exponent_bits = _FLOATS[block_format.name]
    exponent = round(math.log2(size / _MEAN_SIZE)) + (1 << (exponent_bits - 1)) - 1
    words = data.view(kind)
    words &= ~np.array(((1 << exponent_bits) - 1) << fraction_bits, dtype=kind)
    words |= np.array(max(1, exponent) << fraction_bits, dtype=kind)


def _keep_to_the_format(blocks: Bytes, block_format: Format) -> None:
    """Undo what no quantiser writes."""
    if block_format.name == "TQ2_0":  # the field 3 stands for no ternary digit: make it 1, a zero
        packed = blocks[:, :64]
        packed &= ~((packed & (packed >> 1) & 0x55) << 1)
    elif block_format.name == "Q6_K":  # full-range group scales would need a subnormal float16
        groups = blocks[:, 192:208]
        groups &= 15
        groups += 8


@cache
def _size_at_scale_one(block_format: Format) -> float:
    """The root mean square of random weights whose scale is one."""
    rng = np.random.default_rng(0)
    data = _random_bytes(_SAMPLE_BLOCKS * block_format.block_bytes, rng)
    blocks = data.reshape(-1, block_format.block_bytes)
    _keep_to_the_format(blocks, block_format)
    for at, factor in _SCALES[block_format.name].items():
        blocks[:, at : at + 2].view("<f2")[:] = factor
    weights = block_format.decode(blocks).astype(np.float64)
    return float(np.sqrt(np.mean(weights**2)))
