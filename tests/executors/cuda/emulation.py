"""What the Gluon kernels do, step by step in torch, for machines without a GPU.

`decoded` follows kernels/dequantize.py instruction by instruction: which words a lane of a warp
loads, which bits it takes from them, how it makes scales and offsets, and where in the operand the
results go. `attended` follows a program of kernels/hopper_attention.py tile by tile.
"""

from typing import Any, NamedTuple

import torch

from quire.executors.cuda.planes import PLANE_FORMATS, Planes, to_natural_order

Array = Any

_SIXTEENTHS = torch.tensor([[1.0], [16.0]] * 4)


def _half(x: Array) -> Array:
    return x.to(torch.float32).to(torch.float16).to(torch.float64)


def _from_bits(bits: Array) -> Array:
    return (bits & 0xFFFF).to(torch.int16).view(torch.float16).to(torch.float64)


def _swapped(words: Array) -> Array:
    """The bytes of each half word the other way around."""
    return (words & 0x00FF00FF) << 8 | words >> 8 & 0x00FF00FF


def _halves(words: Array, mask: int) -> Array:
    """What a mask leaves of the lower and of the upper half word."""
    return torch.stack([words & mask, words >> 16 & mask], -1)


def _fields(planes: Planes, words: Array, more: Array | None, steps: int) -> Array:
    """A quarter's pairs: [..., lane, pair 0-7, 2] codes, as shifts and masks take them; odd pairs
    of all but Q8_0 are sixteen times as large."""
    pairs = []
    for word in range(2):
        for place in range(4):
            if planes.format == "Q8_0":
                source = words[..., word * 2 + place // 2] >> 16 * (place % 2)
                pairs.append(torch.stack([source & 255, source >> 8 & 255], -1))
                continue
            odd = place % 2
            fields = _halves(words[..., word] >> 8 * (place // 2), 0xF0 if odd else 0x0F)
            if planes.format == "Q6_K":
                assert more is not None
                high = (_swapped(more) if word else more) >> 2 * (place // 2)
                fields = fields | _halves(high, 0x300 if odd else 0x30)
            elif planes.format == "Q5_K":
                assert more is not None
                high = (_swapped(more) if steps else more) >> word * 2 + place // 2
                fields = fields | _halves(high, 0x100 if odd else 0x10)
            pairs.append(fields)
    return torch.stack(pairs, -2)


def _scales(planes: Planes, half: int, steps: int) -> tuple[Array, Array]:
    """Scale (times 2**(24 - e)) and offset (times 2**-e) of a quarter, [block rows, lane]."""
    words, form = planes.scales, PLANE_FORMATS[planes.format]
    assert words is not None
    up, down = 2.0 ** (24 - planes.exponent), 2.0**-planes.exponent
    if planes.format in ("Q4_K", "Q5_K"):
        halves = words[:, :1].contiguous().view(torch.float16).to(torch.float64)
        lanes = torch.arange(4) * 8
        record = sum((words[:, 1 + i : 2 + i] >> lanes & 255) << 8 * i for i in range(3))
        record = record >> 12 * half
        scale = _half(halves[:, :1] * up * (record & 63))
        return scale, -_half(halves[:, 1:] * down * (record >> 6 & 63))
    if planes.format == "Q4_1":
        own = words.view(-1, 4, 2)[..., half]
        return _from_bits(own), _from_bits(own >> 16)
    if planes.format == "Q6_K":
        assert planes.deltas is not None
        groups = words.contiguous().view(torch.int8).view(-1, 4, 4)[..., half * 2 + steps]
        deltas = planes.deltas.view(planes.num_blocks, -1)[:, : planes.num_rows].flatten()
        scale = _half(deltas.to(torch.float64)[:, None] * up * groups)
    else:
        scale = _from_bits(words >> 16 * half)
    return scale, scale * -form.zero_point * 2.0**-24


def _float_pairs(words: Array) -> Array:
    """MXFP4's pairs of a quarter, [..., lane, pair 0-7, 2]: what masks and shifts make of words, as
    float16."""
    pairs = []
    for word in range(2):
        own = words[..., word]
        shifted = (own << 5, own << 7), (own >> 3, own << 15)
        made = [own & -0x71FF7200, own << 8 & -0x71FF7200]  # 0x8E008E00
        made += [low & 0x0E000E00 | sign & -0x7FFF8000 for low, sign in shifted]
        pairs += [_halves(bits, 0xFFFF) for bits in made]
    return _from_bits(torch.stack(pairs, -2))


def _powers(planes: Planes, half: int) -> Array:
    """MXFP4's scales of a quarter: bytes that are the exponents of float16, [block rows, lane]."""
    assert planes.scales is not None
    whole = planes.scales.view(planes.num_blocks, -1, 2)[:, : planes.num_rows, half]
    return _from_bits((whole.reshape(-1, 1) >> torch.arange(4) * 8 & 255) * 0x0400)


def decoded(planes: Planes) -> Array:
    """The matrix as the GEMM sees it, in natural order: float64 [rows, columns]."""
    if planes.is_float:
        return to_natural_order(planes.codes.to(torch.float64)) * 2.0**planes.exponent
    form = PLANE_FORMATS[planes.format]
    count = form.code_words // 16
    words = planes.codes.view(-1, 4, 2, 2, count)  # lane, half, steps, words
    block = torch.empty((len(words), 256), dtype=torch.float64)
    for half in range(2):
        for steps in range(2):
            more = None
            if planes.format == "Q6_K":
                assert planes.high is not None
                more = planes.high.view(-1, 4, 2, 2)[:, :, half, steps]
            elif planes.format == "Q5_K":
                assert planes.high is not None
                more = planes.high.view(-1, 4, 2)[:, :, half]
            if form.has_powers:
                value = _float_pairs(words[:, :, half, steps])
                value = _half(value * _powers(planes, half)[..., None, None])
            else:
                value = _dequantized(planes, words[:, :, half, steps], more, half, steps)
            quarter = value.permute(0, 2, 1, 3).reshape(len(words), 64)  # pair, lane, 2
            start = half * 128 + steps * 64
            block[:, start : start + 64] = quarter
    whole = block.view(planes.num_blocks, planes.num_rows, 256).transpose(0, 1)
    return to_natural_order(whole.reshape(planes.num_rows, -1)) * 2.0**planes.exponent


def _dequantized(planes: Planes, words: Array, more: Array | None, half: int, steps: int) -> Array:
    """A quarter's weights, [block rows, lane, pair 0-7, 2]."""
    codes = _fields(planes, words, more, steps)
    scale, offset = _scales(planes, half, steps)
    places = torch.ones(8, 1) if planes.format == "Q8_0" else _SIXTEENTHS
    each = _half(scale[..., None, None] / places)
    value = codes.to(torch.float64) * 2.0**-24 * each
    return _half(value + offset[..., None, None])


class Cut(NamedTuple):
    """Positions a tile and a split."""

    tile: int
    split: int


def attended(
    queries: Array, keys: Array, values: Array, first: int, scale: float, window: int, cut: Cut
) -> Array:
    """Rows [tokens, heads, dim] at positions from `first` on, over one kv head's keys and values
    [positions, dim], of which those behind the last row are stale: [tokens, heads, dim]."""
    tokens, heads, dims = queries.shape
    end = first + tokens
    rows = queries.reshape(-1, dims).to(torch.float64)
    position = torch.arange(first, end).repeat_interleave(heads)
    merged = _Running(len(rows), dims)
    begin = max(first + 1 - window, 0) // cut.split * cut.split
    for start in range(begin, end, cut.split):
        merged.merge(_split(rows, keys, values, position, start, end, scale, window, cut))
    return (merged.acc / merged.total[:, None]).to(torch.float16).view(tokens, heads, dims)


class _Running:
    """A softmax under way: largest score, sum and weighted values so far, float32."""

    def __init__(self, rows: int, dims: int) -> None:
        self.largest = torch.full((rows,), float("-inf"))
        self.total = torch.zeros(rows)
        self.acc = torch.zeros(rows, dims)

    def merge(self, other: "_Running") -> None:
        largest = torch.maximum(self.largest, other.largest)
        safe = torch.where(largest == float("-inf"), 0.0, largest)
        own, others = torch.exp2(self.largest - safe), torch.exp2(other.largest - safe)
        self.total = self.total * own + other.total * others
        self.acc = self.acc * own[:, None] + other.acc * others[:, None]
        self.largest = largest


def _split(
    rows: Array,
    keys: Array,
    values: Array,
    position: Array,
    start: int,
    end: int,
    scale: float,
    window: int,
    cut: Cut,
) -> _Running:
    """One split of the context. Sums stay apart by place in the tile until the split's end."""
    split = _Running(len(rows), rows.shape[1])
    sums = torch.zeros(cut.tile, len(rows))
    for at in range(start, min(start + cut.split, end), cut.tile):
        n = torch.arange(at, at + cut.tile)[:, None]
        brought = _tile(keys, at, cut.tile)
        scores = (brought[:, None] * rows).sum(-1).to(torch.float32) * scale
        seen = (n <= position) & (n > position - window)
        scores = torch.where(seen, scores, float("-inf"))
        largest = torch.maximum(split.largest, scores.max(0).values)
        safe = torch.where(largest == float("-inf"), 0.0, largest)
        weights = torch.exp2(scores - safe)
        shrink = torch.exp2(split.largest - safe)
        sums = sums * shrink + weights
        clean = torch.where(n < end, _tile(values, at, cut.tile), 0.0)
        rounded = weights.to(torch.bfloat16).to(torch.float64)
        added = (rounded[:, :, None] * clean[:, None]).sum(0)
        split.acc = (split.acc * shrink[:, None] + added).to(torch.float32)
        split.largest = largest
    split.total = sums.sum(0)
    return split


def _tile(kept: Array, start: int, size: int) -> Array:
    """So many positions; what the copy engine left out holds anything."""
    tile = torch.full((size, kept.shape[1]), float("nan"), dtype=torch.float64)
    there = kept[start : start + size]
    tile[: len(there)] = there.to(torch.float64)
    return tile


def decoded_ternary(planes: Planes) -> Array:
    """What kernels/hopper_ternary.py multiplies, divided by 64, in natural order: [rows, columns].

    Lane t of a warp has words 4 t to 4 t + 3 of a row's block; field j of word q is four bytes, of
    which it keeps the upper two bits: operand columns 64 q + 16 j + 4 t to + 3.
    """
    words = planes.codes.view(planes.num_blocks, planes.num_rows, 4, 4)  # t, q
    block = torch.empty((planes.num_blocks, planes.num_rows, 256), dtype=torch.int32)
    for lane in range(4):
        for word in range(4):
            for field in range(4):
                kept = (words[:, :, lane, word] << 2 * field) & -0x3F3F3F40  # 0xC0C0C0C0
                start = 64 * word + 16 * field + 4 * lane
                for byte in range(4):
                    signed = kept << 24 - 8 * byte >> 24
                    block[:, :, start + byte] = signed >> 6
    return to_natural_order(block.transpose(0, 1).reshape(planes.num_rows, -1))
