"""The IQ1, IQ2 and IQ3 formats: eight or four weights at once are a point of a grid.

A grid is a set of points whose coordinates take three or eight values; a point's number is its
place in the order of the points read as numbers, the first coordinate the lowest digit. So a grid
is kept as one bit for each number that three to the eighth, or eight to the fourth, allow:
grids.bin holds the bits of all grids, one after the other in the order of `_GRIDS`, each in whole
bytes, the lowest bit first. The native kernels are built from the same file.

Weights of IQ2 and IQ3 have signs of their own, a bit each. Where an entry has seven bits for eight
signs, the eighth makes the number of minuses even.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.quant.unpacking import Blocks, Floats, grouped, half, planes

_FILE = Path(__file__).with_name("grids.bin")


@dataclass(frozen=True, slots=True)
class _Grid:
    values: tuple[int, ...]  # of coordinates
    dimensions: int

    @property
    def num_bytes(self) -> int:
        num_bits: int = len(self.values) ** self.dimensions
        return (num_bits + 7) // 8


_GRIDS = {
    "IQ2_XXS": _Grid((8, 25, 43), 8),
    "IQ2_XS": _Grid((8, 25, 43), 8),
    "IQ2_S": _Grid((8, 25, 43), 8),
    "IQ1": _Grid((-1, 0, 1), 8),
    "IQ3_XXS": _Grid((4, 12, 20, 28, 36, 44, 52, 62), 4),
    "IQ3_S": _Grid((1, 3, 5, 7, 9, 11, 13, 15), 4),
}


@cache
def points(name: str) -> Floats:
    """A grid's points [points, dimensions]."""
    names = list(_GRIDS)
    start = sum(_GRIDS[before].num_bytes for before in names[: names.index(name)])
    grid = _GRIDS[name]
    stored = np.fromfile(_FILE, np.uint8, grid.num_bytes, offset=start)
    numbers = np.flatnonzero(np.unpackbits(stored, bitorder="little"))
    base = len(grid.values)
    digits = numbers[:, None] // base ** np.arange(grid.dimensions) % base
    made: Floats = np.array(grid.values, np.float32)[digits]
    made.flags.writeable = False  # it is shared
    return made


def _taken(name: str, numbers: npt.NDArray[np.integer]) -> Floats:
    """The points of numbers [blocks, n], one behind the other: [blocks, n * dimensions]."""
    weights: Floats = points(name)[numbers].reshape(len(numbers), 256)
    return weights


def _signs(bits: Blocks) -> Floats:
    """A sign for each bit of [blocks, bytes]; a set bit is a minus."""
    return 1 - 2 * planes(bits, bits=1, run=1).astype(np.float32)


def _eight_signs(sevens: npt.NDArray[np.integer]) -> Floats:
    """The signs of numbers of seven bits [blocks, n]."""
    seven = sevens.astype(np.uint8)
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return _signs((seven | (parity & 1) << 7).astype(np.uint8))


def _fields(words: npt.NDArray[np.integer], shifts: tuple[int, ...], mask: int) -> Blocks:
    """Fields of words [blocks, n], those of a word side by side: [blocks, n * fields]."""
    fields = words[:, :, None] >> np.array(shifts, words.dtype) & mask
    return fields.astype(np.uint8).reshape(len(words), words.shape[1] * len(shifts))


def decode_iq2_xxs(blocks: Blocks) -> Floats:
    """Eight groups of 32: four numbers of points, then four times seven signs and a scale."""
    words = blocks[:, 2:].view("<u4").reshape(-1, 8, 2)
    numbers = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32)
    scale = half(blocks, 0) * (np.float32(0.5) + (words[:, :, 1] >> 28)) * np.float32(0.25)
    signs = _eight_signs(_fields(words[:, :, 1], (0, 7, 14, 21), 127))
    return grouped(scale.astype(np.float32), _taken("IQ2_XXS", numbers) * signs)


def decode_iq2_xs(blocks: Blocks) -> Floats:
    """32 words of a number of nine bits and seven signs; sixteen groups with 4-bit scales."""
    words = blocks[:, 2:66].view("<u2")
    weights = _taken("IQ2_XS", words & 511) * _eight_signs(words >> 9)
    return grouped(_half_and_more(blocks, 66, np.float32(0.25)), weights)


def decode_iq2_s(blocks: Blocks) -> Floats:
    """32 numbers of ten bits, their upper two apart; all signs; sixteen groups."""
    high = planes(blocks[:, 66:74], bits=2, run=1).astype(np.uint16)
    weights = _taken("IQ2_S", blocks[:, 2:34] | high << 8) * _signs(blocks[:, 34:66])
    return grouped(_half_and_more(blocks, 74, np.float32(0.25)), weights)


def _half_and_more(blocks: Blocks, at: int, factor: np.float32) -> Floats:
    """Scales of 4 bits, a half added: the sixteen of eight bytes."""
    scales = planes(blocks[:, at : at + 8], bits=4, run=1).astype(np.float32)
    return half(blocks, 0) * (np.float32(0.5) + scales) * factor


def decode_iq3_xxs(blocks: Blocks) -> Floats:
    """64 numbers; then for each group of 32 four times seven signs and a scale."""
    words = blocks[:, 66:].view("<u4")
    scale = half(blocks, 0) * (np.float32(0.5) + (words >> 28)) * np.float32(0.5)
    signs = _eight_signs(_fields(words, (0, 7, 14, 21), 127))
    return grouped(scale.astype(np.float32), _taken("IQ3_XXS", blocks[:, 2:66]) * signs)


def decode_iq3_s(blocks: Blocks) -> Floats:
    """64 numbers of nine bits, their upper one apart; all signs; eight groups, odd scales."""
    high = planes(blocks[:, 66:74], bits=1, run=1).astype(np.uint16)
    weights = _taken("IQ3_S", blocks[:, 2:66] | high << 8) * _signs(blocks[:, 74:106])
    scales = planes(blocks[:, 106:], bits=4, run=1).astype(np.float32)
    return grouped(half(blocks, 0) * (1 + 2 * scales), weights)


_SHIFT = np.float32(0.125)  # of all weights of a group, up or down


def decode_iq1_s(blocks: Blocks) -> Floats:
    """Eight groups of 32: four numbers of eleven bits, a 3-bit scale, and whether down or up."""
    words = blocks[:, 34:].view("<u2")
    high = _fields(words, (0, 3, 6, 9), 7).astype(np.uint16)
    taken = _taken("IQ1", blocks[:, 2:34] | high << 8)
    scale = half(blocks, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(words >> 15, -_SHIFT, _SHIFT)
    return grouped(scale, taken + np.repeat(shift, 32, axis=1))


def decode_iq1_m(blocks: Blocks) -> Floats:
    """32 points, each with a shift of its own; sixteen groups with 3-bit scales, above which a
    nibble each of four words makes the common scale."""
    words = blocks[:, 48:].view("<u2")
    bits = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    common = bits.view(np.float16).astype(np.float32)[:, None]
    scale = common * (2 * _fields(words, (0, 3, 6, 9), 7) + 1).astype(np.float32)
    nibbles = planes(blocks[:, 32:48], bits=4, run=1)
    taken = _taken("IQ1", blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8)
    shift = np.where(nibbles >> 3, -_SHIFT, _SHIFT)
    return grouped(scale, taken + np.repeat(shift, 8, axis=1))
