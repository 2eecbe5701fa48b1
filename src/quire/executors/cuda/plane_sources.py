"""The blocks of a file as pieces of planes: one reorderer for each block format (see planes.py).

Blocks come as bytes [rows, blocks of 256, bytes], those of 32 weights as [rows, blocks, 8, bytes].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.core.errors import UnsupportedModelError
from quire.quant import grids

Array = Any  # a torch.Tensor; the type checker does not see torch

CODE_SHIFT = 24  # an integer n in a float16's low bits is n * 2**-24
TWO_BITS_SHIFT = 6  # kernels take codes of 2 bits so much further up
# A scale in E4M3 times 2**7 times a float of 4 bits times 2**-14 is a float16, with all its bits.
E4M3_EXPONENT = 7
E4M3_BITS = 8  # a scale below 2**(15 - 8) times E4M3's largest number, 448, is a float16


@dataclass(slots=True)
class Pieces:
    """Pieces of each plane, [blocks, rows, words] each."""

    codes: list[Array] = field(default_factory=list)
    high: list[Array] = field(default_factory=list)
    scales: list[Array] = field(default_factory=list)
    deltas: list[Array] = field(default_factory=list)
    factor: float = 1.0  # see planes.Scaling


def half(blocks: Array, at: int) -> Array:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def single(blocks: Array, at: int) -> Array:
    return blocks[..., at : at + 4].contiguous().view(torch.float32).squeeze(-1)


def _half_bits(x: Array) -> Array:
    """float32 rounded to float16, its bits in an int32's lower half."""
    return x.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF


def _in_words(codes: Array, bits: int) -> Array:
    """Natural codes [rows, blocks, 256] as words [blocks, rows, words]: 4 or 8 bits each.

    Natural column = (half of the block, lane, half of the steps, sixteen).
    """
    rows, blocks, _ = codes.shape
    count = 32 // bits
    fields = codes.view(rows, blocks, 2, 4, 2, 16 // count, count)
    if bits == 4:  # weight 2j + l at bit 4j + 16l
        shifts = [4 * (i // 2) + 16 * (i % 2) for i in range(8)]
    else:
        shifts = [8 * i for i in range(4)]
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index, shift in enumerate(shifts):
        words |= fields[..., index].to(torch.int32) << shift
    # [rows, blocks, half, lane, steps, words] -> [blocks, rows, lane, half, steps, words]
    return words.permute(1, 0, 3, 2, 4, 5).reshape(blocks, rows, -1)


# Of each pair of weights of a word: the bit of a half word where a float's three lower bits begin,
# and that of its sign. Masks alone bring the first pair to where a float16 has them, a shift the
# second. Two shifts bring the other two pairs to where the first two are: one the signs, one the
# rest.
FLOAT_SHIFTS, SIGN_SHIFTS = (9, 1, 12, 4), (15, 7, 8, 0)
POWER_ONE = 127  # the byte of MXFP4's scale 1
_LARGEST_POWER_FIELD = 30  # of a float16's exponents


def _float_words(codes: Array) -> Array:
    """Codes of E2M1 [rows, blocks, 256] as words [rows, blocks, half, lane, half of the steps, 2].

    A code is sign, two bits of exponent, one of fraction. With the lower three at bits 9 to 11 and
    the sign at bit 15 it *is* a float16: its value times 2**-14.
    """
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 2, 8).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(8):
        pair, one = divmod(index, 2)
        words |= (fields[..., index] & 7) << FLOAT_SHIFTS[pair] + 16 * one
        words |= (fields[..., index] >> 3) << SIGN_SHIFTS[pair] + 16 * one
    return words


def _two_bit_words(codes: Array) -> Array:
    """Codes of 2 bits [rows, blocks, 256] as words [blocks, rows, 16], one a quarter."""
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 16).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(16):
        words |= fields[..., index] << index // 2 * 2 + index % 2 * 16
    return words.permute(1, 0, 3, 2, 4).reshape(blocks, rows, 16)


VALUE_NIBBLES = (0, 2, 1, 3)  # of four weights


def _value_words(codes: Array) -> Array:
    """IQ4's codes [rows, blocks, 256] as words [blocks, rows, 32], as `_in_words` does, but four
    weights in nibbles 0, 2, 1, 3 of a half word: their values are bytes in that order."""
    rows, blocks, _ = codes.shape
    fields = codes.view(rows, blocks, 2, 4, 2, 2, 8).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=codes.device)
    for index in range(8):
        words |= fields[..., index] << 4 * VALUE_NIBBLES[index % 4] + index // 4 * 16
    return words.permute(1, 0, 3, 2, 4, 5).reshape(blocks, rows, -1)


# Where the upper bit of a quarter's pairs 0-7 lies beside codes of 2 bits. Kernels shift codes so
# that those of two pairs begin at bits 6 and 8, in this order: 3 and 4, 1 and 2, 5 and 6, 7 and 0.
THIRD_BITS = (15, 9, 11, 8, 10, 12, 14, 13)


def _high_shift(pair: int, bits: int, code_bits: int) -> int:
    """The bit of a half word at which the upper bits of a pair lie."""
    if code_bits == 2:
        return THIRD_BITS[pair]
    if bits == 2:
        return (4 + 4 * (pair % 2) + pair // 2 % 2 * 2 + pair // 4 * 8) % 16
    return 4 + 4 * (pair % 2) + pair // 2


def _high_words(high: Array, bits: int, code_bits: int = 4) -> Array:
    """The upper bits, [rows, blocks, 256], as words [blocks, rows, 8 * bits].

    Few shifts move them above their nibbles: those of even pairs of weights to bit 4 of a half
    word, those of odd pairs, which are decoded four bits further up, to bit 8. A swap of the half
    words' bytes moves the second half of them there.
    """
    rows, blocks, _ = high.shape
    fields = high.view(rows, blocks, 2, 4, 2, 16).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=high.device)
    for index in range(16):
        pair, one = divmod(index, 2)
        words |= fields[..., index] << _high_shift(pair, bits, code_bits) + 16 * one
    if bits == 1:  # the second half of the steps eight bits further on, around the half word
        second = words[..., 1]
        swapped = (second & 0x00FF00FF) << 8 | second >> 8 & 0x00FF00FF
        words = words[..., 0] | swapped
        return words.permute(1, 0, 3, 2).reshape(blocks, rows, 8)
    return words.permute(1, 0, 3, 2, 4).reshape(blocks, rows, 16)


def _nibbles(packed: Array, run: int) -> Array:
    """[..., bytes] -> [..., 2 * bytes]: low nibbles of a run of bytes, then their high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _group_scales(blocks: Array, exponent: int) -> Array:
    """Scales of 32 weights each, two (the halves of the block) a lane: [blocks, rows, 4]."""
    return _scale_words(half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - exponent))


def _scale_words(scales: Array) -> Array:  # [rows, blocks, 8]
    bits = _half_bits(scales).view(*scales.shape[:2], 2, 4)
    return (bits[..., 0, :] | bits[..., 1, :] << 16).transpose(0, 1)


def _reorder_q4_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 2:], 16).flatten(-2), 4))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q8_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_in_words((blocks[..., 2:] ^ 128).flatten(-2), 8))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q4_1(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 4:], 16).flatten(-2), 4))
    pieces.scales.append(_scales_and_minimums(blocks, exponent))


def _scales_and_minimums(blocks: Array, exponent: int) -> Array:
    """Scale and minimum of 32 weights in one word: [blocks, rows, 8]."""
    scales = half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - exponent)
    minimums = half(blocks, 2).float() * 2.0**-exponent
    return _by_lane((_half_bits(scales) | _half_bits(minimums) << 16)[..., None])


def _packed_scales(blocks: Array) -> Array:
    """Q4_K's and Q5_K's float16 pair, then for each lane 24 bits (scale, minimum, of both halves),
    byte by byte: word 1 + i holds the lanes' bytes i. [blocks, rows, 4]."""
    first, second, low = (blocks[..., at : at + 4].to(torch.int32) for at in (4, 8, 12))
    upper_scales, upper_minimums = (low & 15) | (first >> 6) << 4, (low >> 4) | (second >> 6) << 4
    records = (first & 63) | (second & 63) << 6 | upper_scales << 12 | upper_minimums << 18
    pair = blocks[..., :4].contiguous().view(torch.int32)
    planes = [pair]
    for byte in range(3):
        lanes = (records >> 8 * byte) & 255
        planes.append((lanes << torch.arange(0, 32, 8, device=lanes.device)).sum(-1, keepdim=True))
    return torch.cat(planes, dim=-1).to(torch.int32).transpose(0, 1)


def _reorder_q4_k(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent  # the kernel applies it
    pieces.codes.append(_in_words(_nibbles(blocks[..., 16:], 32), 4))
    pieces.scales.append(_packed_scales(blocks))


def _reorder_q5_k(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    high = (blocks[..., None, 16:48] >> shifts) & 1  # [rows, blocks, 8, 32]
    pieces.codes.append(_in_words(_nibbles(blocks[..., 48:], 32), 4))
    pieces.high.append(_high_words(high.flatten(-2), 1))
    pieces.scales.append(_packed_scales(blocks))


def _reorder_q6_k(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    packed = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((packed >> shifts) & 3).flatten(2)
    pieces.codes.append(_in_words(_nibbles(blocks[..., :128], 64), 4))
    pieces.high.append(_high_words(high, 2))
    pieces.scales.append(_quarter_bytes(blocks[..., 192:208]))
    pieces.deltas.append(half(blocks, 208).transpose(0, 1))


def _quarter_bytes(groups: Array) -> Array:
    """A byte for 16 weights, [rows, blocks, 16], as words [blocks, rows, 4], a byte a quarter."""
    rows, count, _ = groups.shape
    lanes = groups.reshape(rows, count, 2, 4, 2).permute(1, 0, 3, 2, 4).contiguous()
    return lanes.view(count, rows, 16).view(torch.int32)


def _reorder_mxfp4(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """A group's scale as the exponent of a float16, the largest 30; 2**-30 of that is zero. Words
    [blocks, rows, half], a byte for each lane."""
    words = _float_words(_nibbles(blocks[..., 1:], 16).flatten(-2))
    pieces.codes.append(words.permute(1, 2, 0, 3, 4, 5).reshape(-1, len(blocks), 16))
    powers = blocks[..., 0].to(torch.int32) - (POWER_ONE + 1 + exponent - _LARGEST_POWER_FIELD)
    fields = powers.clamp(0, _LARGEST_POWER_FIELD).to(torch.uint8).contiguous()
    pieces.scales.append(fields.view(torch.int32).transpose(0, 1))


def _reorder_nvfp4(blocks: Array, exponent: int, pieces: Pieces) -> None:
    _add_nvfp4(blocks[..., :4], blocks[..., 4:], pieces)
    del exponent


def _reorder_nvfp4_128(blocks: Array, exponent: int, pieces: Pieces) -> None:
    _add_nvfp4(blocks[..., 4:12], blocks[..., 12:], pieces)
    pieces.deltas.append(_half_pairs(single(blocks, 0) / pieces.factor))
    del exponent


def _add_nvfp4(scales: Array, packed: Array, pieces: Pieces) -> None:
    """Scales lose their signs, which mean nothing, and 0x7F, which is 0."""
    words = _float_words(_nibbles(packed, 8).flatten(-2))
    pieces.codes.append(words.permute(1, 0, 3, 2, 4, 5).reshape(words.shape[1], -1, 32))
    sizes = torch.where(scales == 0x7F, 0, scales & 0x7F).to(torch.uint8)
    pieces.scales.append(_quarter_bytes(sizes.flatten(-2)))


def _half_pairs(values: Array) -> Array:
    """Two numbers of a block, [rows, blocks, 2], as float16 in a word: [blocks, rows]."""
    bits = _half_bits(values)
    return (bits[..., 0] | bits[..., 1] << 16).transpose(0, 1)


def _reorder_q1_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """A set bit is a weight above 0. In a half of a word: eight pairs of each half of the steps."""
    del exponent
    rows, count, _, _ = blocks.shape
    fields = _bits(blocks[..., 2:]).reshape(rows, count, 2, 4, 2, 16).to(torch.int32)
    words = torch.zeros(fields.shape[:4], dtype=torch.int32, device=blocks.device)
    for steps in range(2):
        for index in range(16):
            words |= fields[..., steps, index] << index // 2 + 8 * steps + 16 * (index % 2)
    pieces.codes.append(words.permute(1, 0, 3, 2).reshape(count, rows, 8))
    pieces.deltas.append(_half_pairs(half(blocks, 0).float()))


def _reorder_q2_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Its scales, of 64 weights, are repeated: 8 bytes a block more than in the file."""
    pieces.codes.append(_two_bit_words(_runs(blocks[..., 2:], 2, 1).flatten(-2)))
    scales = half(blocks, 0).float() * 2.0 ** (CODE_SHIFT - TWO_BITS_SHIFT - exponent)
    pieces.scales.append(_scale_words(scales.repeat_interleave(2, dim=-1)))


def _bits(packed: Array) -> Array:
    """[..., bytes] -> [..., 8 * bytes]: the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _runs(packed: Array, bits: int, run: int) -> Array:
    """[..., bytes] -> [..., bytes * 8 // bits]: of a run of bytes the lowest bits, then the next
    ones, and so on."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    return ((runs >> shifts) & (1 << bits) - 1).flatten(-3)


def _int32(blocks: Array, at: int, end: int) -> Array:
    return blocks[..., at:end].contiguous().view(torch.int32)


def _shorts(blocks: Array, at: int, end: int) -> Array:
    """As int32, without their signs."""
    return blocks[..., at:end].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _by_lane(groups: Array) -> Array:
    """Of the groups of a block, [rows, blocks, 8, words], those of a lane together: [blocks, rows,
    8 * words]."""
    rows, blocks, _, words = groups.shape
    lanes = groups.view(rows, blocks, 2, 4, words).permute(1, 0, 3, 2, 4)
    return lanes.reshape(blocks, rows, -1).contiguous()


def _lane_bytes(fields: Array) -> Array:
    """A byte of each group, [rows, blocks, 8], as words [rows, blocks, half], a byte a lane."""
    return fields.to(torch.uint8).contiguous().view(torch.int32)


def _record_words(halves: Array, records: Array) -> Array:
    """A float16's bits [rows, blocks] and 12 bits a lane [rows, blocks, 4] as two words, the lanes'
    from bit 16 on: [blocks, rows, 2]."""
    shifts = torch.arange(16, 64, 12, device=records.device)
    long = (records.to(torch.int64) << shifts).sum(-1) | halves.to(torch.int64)
    return long.view(torch.int32).view(*long.shape, 2).transpose(0, 1)


def _reorder_q5_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 6:], 16).flatten(-2), 4))
    pieces.high.append(_high_words(_bits(blocks[..., 2:6]).flatten(-2), 1))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_q5_1(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_in_words(_nibbles(blocks[..., 8:], 16).flatten(-2), 4))
    pieces.high.append(_high_words(_bits(blocks[..., 4:8]).flatten(-2), 1))
    pieces.scales.append(_scales_and_minimums(blocks, exponent))


def _reorder_u4_128(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """As Q5_0: codes less their zero point, around 16."""
    zeros = single(blocks, 4).to(torch.uint8)
    codes = (_nibbles(blocks[..., 8:], 16) + (16 - zeros)[..., None]).flatten(-2)
    pieces.codes.append(_in_words(codes & 15, 4))
    pieces.high.append(_high_words(codes >> 4, 1))
    pieces.scales.append(_single_scales(blocks, exponent))


def _reorder_i8_128(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """As Q8_0."""
    pieces.codes.append(_in_words((blocks[..., 4:] ^ 128).flatten(-2), 8))
    pieces.scales.append(_single_scales(blocks, exponent))


def _single_scales(blocks: Array, exponent: int) -> Array:
    """As `_group_scales`, of float32s for 128 weights each. Bfloat16's numbers have no more bits
    than a float16 and, divided, lie in its range; others would be rounded."""
    scales = single(blocks, 0) * 2.0 ** (CODE_SHIFT - exponent)
    if (scales.to(torch.float16).float() != scales).any():
        raise UnsupportedModelError(
            "a quantised linear has scales of more bits than a float16, or far from each other, "
            "which the CUDA executor does not run: use device='cpu'"
        )
    return _scale_words(scales.repeat_interleave(4, dim=-1))


def _reorder_e4m3_128(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """A float32 scale as two float16, the larger in the lower half of a word: some 22 bits of it.
    Words [blocks, rows, half]."""
    scales = single(blocks, 0) * 2.0**-exponent
    rest = scales - scales.to(torch.float16).float()
    pieces.codes.append(_in_words(blocks[..., 4:].flatten(-2), 8))
    pieces.scales.append((_half_bits(scales) | _half_bits(rest) << 16).transpose(0, 1))


def _reorder_q2_k(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., 16:80], 2, 32)))
    pieces.scales.append(_quarter_bytes(blocks[..., :16]))
    pieces.deltas.append(_int32(blocks, 80, 84).squeeze(-1).transpose(0, 1))


def _reorder_q3_k(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Its scales of 6 bits become int8, as Q6_K's: 4 bytes a block more than in the file."""
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., 32:96], 2, 32)))
    pieces.high.append(_high_words(_runs(blocks[..., :32], 1, 32), 1, code_bits=2))
    scales = _runs(blocks[..., 96:104], 4, 8) | _runs(blocks[..., 104:108], 2, 4) << 4
    pieces.scales.append(_quarter_bytes(scales - 32))  # wraps around, as int8 does
    pieces.deltas.append(half(blocks, 108).transpose(0, 1))


def _reorder_iq4_nl(blocks: Array, exponent: int, pieces: Pieces) -> None:
    pieces.codes.append(_value_words(_nibbles(blocks[..., 2:], 16).flatten(-2)))
    pieces.scales.append(_group_scales(blocks, exponent))


def _reorder_iq4_xs(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    pieces.codes.append(_value_words(_nibbles(blocks[..., 8:], 16)))
    scales = _runs(blocks[..., 4:8], 4, 1) | _runs(blocks[..., 2:4], 2, 1) << 4
    of_halves = scales.view(*scales.shape[:2], 2, 4).to(torch.int32)
    records = of_halves[..., 0, :] | of_halves[..., 1, :] << 6
    pieces.scales.append(_record_words(_shorts(blocks, 0, 2).squeeze(-1), records))


def _reorder_tq1_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Five digits of base three a byte become 2 bits each: kernels have no time for digits."""
    del exponent
    digits = [_digits(blocks[..., :32], 32, 5), _digits(blocks[..., 32:48], 16, 5)]
    digits.append(_digits(blocks[..., 48:52], 4, 4))
    pieces.codes.append(_two_bit_words(torch.cat(digits, dim=-1)))
    pieces.deltas.append(half(blocks, 52).transpose(0, 1))


def _digits(packed: Array, run: int, count: int) -> Array:
    """As quant/formats.py unpacks them."""
    powers = torch.tensor([3**digit for digit in range(count)], device=packed.device)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run).to(torch.int32)
    fractions = runs * powers.to(torch.int32).view(-1, 1) & 255
    return (fractions * 3 >> 8).flatten(-3)


def _reorder_tq2_0(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    pieces.codes.append(_two_bit_words(_runs(blocks[..., :64], 2, 32)))
    pieces.deltas.append(half(blocks, 64).transpose(0, 1))


# ---- grids
#
# A word of a table holds four weights of IQ2 and IQ3, a byte each in the order of GRID_BYTES, or
# eight of IQ1, as in `_in_words`. The signs of 32 weights are a word: that of byte b of the k-th
# word is bit k of byte b ^ 1. So one shift brings the signs of a word's bytes to their highest
# bits, each where a float16 has it once the other byte of its half word is masked or swapped away.
GRID_BYTES = (0, 2, 1, 3)  # of four weights
EVEN_SIGNS = (25, 27, 29, 31)  # bits of signs that follow from the others; other bits lie there


@cache
def grid_table(name: str, device: str) -> Array | None:
    """The points of a grid as words on a device."""
    if not name:
        return None
    points = torch.from_numpy(grids.points(name).astype(np.int32))
    if name == "IQ1":  # codes times 4, see PlaneFormat.code_shift
        shifts = torch.tensor([4 * (i // 2) + 16 * (i % 2) for i in range(8)])
        words = (points.long() + 1 << shifts + 2).sum(-1)
    else:
        shifts = 8 * torch.tensor(GRID_BYTES)
        words = (points.view(-1, 4).long() << shifts).sum(-1)
    return words.to(torch.int32).to(device)


def _sign_words(signs: Array) -> Array:
    """A bit for each weight, [rows, blocks, 256], as words [rows, blocks, 8]."""
    fields = signs.reshape(*signs.shape[:2], 8, 8, 4).to(torch.int32)
    words = torch.zeros(fields.shape[:3], dtype=torch.int32, device=signs.device)
    for place in range(8):
        for weight in range(4):
            words |= fields[..., place, weight] << place + 8 * (GRID_BYTES[weight] ^ 1)
    return words


def _even_sign_words(sevens: Array, others: Array) -> Array:
    """Seven signs for eight weights, [rows, blocks, 32], and four other bits of each group,
    [rows, blocks, 8], as words [rows, blocks, 8]."""
    bits = _bits(sevens.to(torch.uint8)).unflatten(-1, (32, 8))
    bits[..., 7] = bits.sum(-1) & 1  # the highest of eight bits was zero
    words = _sign_words(bits.flatten(-2))
    for index, at in enumerate(EVEN_SIGNS):
        words &= ~(1 << at) if at < 31 else 0x7FFFFFFF
        words |= (others >> index & 1).to(torch.int32) << at
    return words


def _fields(words: Array, shifts: Sequence[int], mask: int) -> Array:
    """Fields of words [rows, blocks, n], those of a word side by side."""
    each = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    return (words[..., None] >> each & mask).flatten(-2)


def _reorder_iq2_xxs(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """The scales of groups are the four other bits of sign words."""
    del exponent
    words = _int32(blocks, 2, 66).unflatten(-1, (8, 2))
    sevens = _fields(words[..., 1], (0, 7, 14, 21), 127)
    signs = _even_sign_words(sevens, words[..., 1] >> 28 & 15)
    pieces.codes.append(_by_lane(torch.stack([words[..., 0], signs], -1)))
    pieces.deltas.append(half(blocks, 0).transpose(0, 1))


def _reorder_iq2_xs(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """The numbers' upper bits are the four other bits of sign words."""
    del exponent
    words = _shorts(blocks, 2, 66)
    low = (words & 255).to(torch.uint8).contiguous().view(torch.int32)
    upper = words.unflatten(-1, (8, 4)) >> 8 & 1
    others = (upper << torch.arange(4, device=words.device)).sum(-1)
    signs = _even_sign_words(words >> 9, others)
    pieces.codes.append(_by_lane(torch.stack([low, signs], -1)))
    pieces.scales.append(_lane_bytes(blocks[..., 66:74]).transpose(0, 1))
    pieces.deltas.append(half(blocks, 0).transpose(0, 1))


def _reorder_iq2_s(blocks: Array, exponent: int, pieces: Pieces) -> None:
    del exponent
    signs = _sign_words(_bits(blocks[..., 34:66]))
    pieces.codes.append(_by_lane(torch.stack([_int32(blocks, 2, 34), signs], -1)))
    bits = [_lane_bytes(blocks[..., at : at + 8]) for at in (66, 74)]
    pieces.scales.append(torch.cat(bits, -1).transpose(0, 1))
    pieces.deltas.append(half(blocks, 0).transpose(0, 1))


def _reorder_iq3_xxs(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """The scales of groups are the four other bits of sign words."""
    del exponent
    words = _int32(blocks, 66, 98)
    sevens = _fields(words, (0, 7, 14, 21), 127)
    pieces.codes.append(_by_lane(_int32(blocks, 2, 66).unflatten(-1, (8, 2))))
    pieces.high.append(_by_lane(_even_sign_words(sevens, words >> 28 & 15)[..., None]))
    pieces.deltas.append(half(blocks, 0).transpose(0, 1))


def _reorder_iq3_s(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Words of scales: the float16; the lanes' bytes of two scales; the numbers' upper bits of each
    half, the lanes' bytes. 2 bytes a block more than in the file."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 2, 66).unflatten(-1, (8, 2))))
    pieces.high.append(_by_lane(_sign_words(_bits(blocks[..., 74:106]))[..., None]))
    nibbles = _runs(blocks[..., 106:110], 4, 1).unflatten(-1, (2, 4))
    scales = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).contiguous().view(torch.int32)
    words = [_shorts(blocks, 0, 2), scales, _lane_bytes(blocks[..., 66:74])]
    pieces.scales.append(torch.cat(words, -1).transpose(0, 1))


def _reorder_iq1_s(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Upper bits are as in the file: three bits of each of four numbers, then three of the scale
    and the direction of the shift; those of a lane's two groups are a word."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 2, 34)[..., None]))
    pieces.high.append(_lane_pairs(_shorts(blocks, 34, 50)))
    pieces.deltas.append(half(blocks, 0).transpose(0, 1))


def _reorder_iq1_m(blocks: Array, exponent: int, pieces: Pieces) -> None:
    """Upper bits are as in the file: a nibble for each number, of which the fourth bit is the
    direction of the shift. A lane's record is its four scales of 3 bits."""
    del exponent
    pieces.codes.append(_by_lane(_int32(blocks, 0, 32)[..., None]))
    pieces.high.append(_lane_pairs(_shorts(blocks, 32, 48)))
    words = _shorts(blocks, 48, 56)
    scales = _fields(words, (0, 3, 6, 9), 7).view(*words.shape[:2], 2, 4, 2)
    shifts = torch.tensor([[[0, 3]], [[6, 9]]], device=words.device)
    records = (scales << shifts).sum((2, 4))
    halves = scattered_half(blocks).view(torch.int16).to(torch.int32) & 0xFFFF
    pieces.scales.append(_record_words(halves, records))


def _lane_pairs(shorts: Array) -> Array:
    """16 bits of each group, [rows, blocks, 8]: those of a lane in one word, [blocks, rows, 4]."""
    halves = shorts.unflatten(-1, (2, 4))
    return (halves[..., 0, :] | halves[..., 1, :] << 16).transpose(0, 1).contiguous()


def scattered_half(blocks: Array) -> Array:
    """IQ1_M's float16: a nibble each of four words."""
    words = _shorts(blocks, 48, 56)
    shifts = torch.arange(0, 16, 4, device=words.device)
    return (words >> 12 << shifts).sum(-1).to(torch.int16).view(torch.float16)


class Source(NamedTuple):
    """How a format's blocks lie in a file, and what turns them into pieces of planes."""

    block_weights: int
    block_bytes: int
    reorder: Callable[[Array, int, Pieces], None]
    delta_at: int = 0  # the byte where a block's float16 scale begins
    largest_factor: int = 1  # of that scale, in the scale of a group
    has_singles: bool = False  # that scale is a float32


SOURCES = {
    "Q4_0": Source(32, 18, _reorder_q4_0),
    "Q4_1": Source(32, 20, _reorder_q4_1),
    "Q5_0": Source(32, 22, _reorder_q5_0),
    "Q5_1": Source(32, 24, _reorder_q5_1),
    "Q8_0": Source(32, 34, _reorder_q8_0),
    "Q2_K": Source(256, 84, _reorder_q2_k, 80, 15),
    "Q3_K": Source(256, 110, _reorder_q3_k, 108, 32),
    "Q4_K": Source(256, 144, _reorder_q4_k, 0, 63),
    "Q5_K": Source(256, 176, _reorder_q5_k, 0, 63),
    "Q6_K": Source(256, 210, _reorder_q6_k, 208, 128),
    "IQ1_S": Source(256, 50, _reorder_iq1_s, 0, 15),
    "IQ1_M": Source(256, 56, _reorder_iq1_m, 0, 15),
    "IQ2_XXS": Source(256, 66, _reorder_iq2_xxs, 0, 31),
    "IQ2_XS": Source(256, 74, _reorder_iq2_xs, 0, 31),
    "IQ2_S": Source(256, 82, _reorder_iq2_s, 0, 31),
    "IQ3_XXS": Source(256, 98, _reorder_iq3_xxs, 0, 31),
    "IQ3_S": Source(256, 110, _reorder_iq3_s, 0, 31),
    "IQ4_NL": Source(32, 18, _reorder_iq4_nl),
    "IQ4_XS": Source(256, 136, _reorder_iq4_xs, 0, 32),
    "MXFP4": Source(32, 17, _reorder_mxfp4),
    "NVFP4": Source(64, 36, _reorder_nvfp4),
    "NVFP4_128": Source(128, 76, _reorder_nvfp4_128, has_singles=True),
    "Q1_0": Source(128, 18, _reorder_q1_0),
    "Q2_0": Source(64, 18, _reorder_q2_0),
    "U4_128": Source(128, 72, _reorder_u4_128, has_singles=True),
    "I8_128": Source(128, 132, _reorder_i8_128, has_singles=True),
    "E4M3_128": Source(128, 132, _reorder_e4m3_128, has_singles=True),
    "TQ1_0": Source(256, 54, _reorder_tq1_0, 52),
    "TQ2_0": Source(256, 66, _reorder_tq2_0, 64),
}
