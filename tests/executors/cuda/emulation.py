"""What the Gluon kernels do, step by step in torch, for machines without a GPU.

`decoded` follows kernels/dequantize.py instruction by instruction: which words a lane of a warp
loads, which bits it takes from them, how it makes scales and offsets, and where in the operand the
results go. `attended` follows a program of kernels/hopper_attention.py tile by tile.
"""

from typing import Any, NamedTuple

import torch

from quire.executors.cuda.planes import PLANE_FORMATS, Planes, to_natural_order
from quire.quant.formats import IQ4_VALUES

Array = Any


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


class _Pairs(NamedTuple):
    """A quarter's pairs as shifts and masks take them."""

    codes: Array  # [block rows, lane, pair 0-7, 2]
    places: Array  # [8, 1]: how many times its code each pair is


_ONCE = torch.ones(8, 1)
_SIXTEENTHS = torch.tensor([[1.0], [16.0]] * 4)


def _nibble_pairs(planes: Planes, words: Array, more: Any, steps: int) -> _Pairs:
    """Of two words of eight codes, and their upper bits."""
    high_bits = planes.layout.high_bits
    pairs = []
    for word in range(2):
        for place in range(4):
            odd = place % 2
            fields = _halves(words[..., word] >> 8 * (place // 2), 0xF0 if odd else 0x0F)
            if high_bits == 2:
                high = (_swapped(more) if word else more) >> 2 * (place // 2)
                fields = fields | _halves(high, 0x300 if odd else 0x30)
            elif high_bits == 1:
                high = (_swapped(more) if steps else more) >> word * 2 + place // 2
                fields = fields | _halves(high, 0x100 if odd else 0x10)
            pairs.append(fields)
    return _Pairs(torch.stack(pairs, -2), _SIXTEENTHS)


def _byte_pairs(words: Array) -> _Pairs:
    """Of four words of four codes."""
    pairs = []
    for word in range(4):
        for place in range(2):
            source = words[..., word] >> 16 * place
            pairs.append(torch.stack([source & 255, source >> 8 & 255], -1))
    return _Pairs(torch.stack(pairs, -2), _ONCE)


def _e4m3_pairs(words: Array) -> Array:
    """Of four words of four floats of 8 bits: [..., lane, pair 0-7, 2]."""
    codes = _byte_pairs(words).codes
    return _from_bits((codes & 0x80) << 8 | (codes & 0x7F) << 7) * 256


def _split_scales(planes: Planes, half: int) -> tuple[Array, Array]:
    """E4M3_128's scale of a quarter, in two parts: [block rows, 1]."""
    words = _row_words(planes)[:, half].reshape(-1, 1)
    return _from_bits(words), _from_bits(words >> 16)


def _two_bit_pairs(words: Array, more: Array | None, steps: int) -> _Pairs:
    """Of one word of sixteen codes: two pairs of each shifted word, at bits 6 and 8, and their
    upper bits at bits 8 and 10."""
    words = words[..., 0]
    shifted = [words, words << 4, words >> 4, _swapped(words)]
    order = [(3, 4), (1, 2), (5, 6), (7, 0)]
    pairs: list[Array] = [None] * 8
    places = torch.ones(8, 1)
    for word, (first, second), shift in zip(shifted, order, (0, 1, 4, 5), strict=True):
        pairs[first], pairs[second] = _halves(word, 0xC0), _halves(word, 0x300)
        places[second] = 4.0
        if more is not None:
            high = (_swapped(more) if steps else more) >> shift
            pairs[first] = pairs[first] | _halves(high, 0x100)
            pairs[second] = pairs[second] | _halves(high, 0x400)
    return _Pairs(torch.stack(pairs, -2), places)


def _value_pairs(words: Array) -> _Pairs:
    """IQ4: four nibbles of a half word select bytes of a table; two pairs of these four bytes."""
    table = torch.from_numpy(IQ4_VALUES).to(torch.int64) + 128
    pairs = []
    for word in range(2):
        for half in range(2):
            bytes_ = [table[words[..., word] >> 16 * half + 4 * i & 15] for i in range(4)]
            pairs += [torch.stack(bytes_[0::2], -1), torch.stack(bytes_[1::2], -1)]
    return _Pairs(torch.stack(pairs, -2), _ONCE)


def _scales(planes: Planes, half: int, steps: int) -> tuple[Array, Array]:
    """Scale (times 2**(24 - e)) and offset (times 2**-e) of a quarter, [block rows, lane]."""
    form = planes.layout
    words: Any = planes.scales
    up = 2.0 ** (24 - planes.exponent - form.code_shift)
    down = 2.0**-planes.exponent
    lanes = torch.arange(4) * 8
    deltas = _deltas(planes)
    if form.has_packed_scales:
        halves = words[:, :1].contiguous().view(torch.float16).to(torch.float64)
        record = sum((words[:, 1 + i : 2 + i] >> lanes & 255) << 8 * i for i in range(3))
        record = record >> 12 * half
        scale = _half(halves[:, :1] * up * (record & 63))
        return scale, -_half(halves[:, 1:] * down * (record >> 6 & 63))
    if form.has_stored_minimums:
        own = words.view(-1, 4, 2)[..., half]
        return _from_bits(own), _from_bits(own >> 16)
    if form.has_nibble_scales:
        byte = words >> 8 * (half * 2 + steps) & 255
        pair = [_from_bits(deltas), _from_bits(deltas >> 16)]
        return _half(pair[0] * up * (byte & 15)), -_half(pair[1] * down * (byte >> 4))
    if form.has_records:  # IQ4_XS
        record = _records(planes) >> 6 * half & 63
        scale = _half(_from_bits(_row_words(planes)[:, :1]) * up * (record - 32))
    elif form.has_byte_scales:
        groups = words.contiguous().view(torch.int8).view(-1, 4, 4)[..., half * 2 + steps]
        scale = _half(deltas.to(torch.float64) * up * groups)
    elif form.has_block_scales:
        scale = _half(deltas.to(torch.float64) * up).expand(-1, 4)
    else:
        scale = _from_bits(words >> 16 * half)
    return scale, scale * -form.zero_point * 2.0 ** (form.code_shift - 24)


def _deltas(planes: Planes) -> Any:
    """[block rows, 1], if there are any."""
    if planes.deltas is None:
        return None
    whole = planes.deltas.view(planes.num_blocks, -1)[:, : planes.num_rows]
    return whole.reshape(-1, 1)


def _row_words(planes: Planes) -> Array:
    """Of planes with two words a row: [block rows, 2]."""
    assert planes.scales is not None
    return planes.scales.view(planes.num_blocks, -1, 2)[:, : planes.num_rows].reshape(-1, 2)


def _records(planes: Planes) -> Array:
    """Twelve bits of each lane, [block rows, lane]."""
    words = _row_words(planes).to(torch.int64) & 0xFFFFFFFF
    return (words[:, :1] | words[:, 1:] << 32) >> 16 + 12 * torch.arange(4) & 0xFFF


def _float_pairs(words: Array) -> Array:
    """Pairs of a quarter of E2M1, [..., lane, pair 0-7, 2]: what masks and shifts make of words, as
    float16."""
    pairs = []
    for word in range(2):
        own = words[..., word]
        other = own >> 3 & 0x0E0E0E0E | own << 7 & -0x0E0E0E0F
        shifted = (own, own << 8, other, other << 8)
        pairs += [_halves(bits & -0x71FF7200, 0xFFFF) for bits in shifted]  # 0x8E008E00
    return _from_bits(torch.stack(pairs, -2))


def _powers(planes: Planes, half: int) -> Array:
    """MXFP4's scales of a quarter: bytes that are the exponents of float16, [block rows, lane]."""
    whole = _row_words(planes)[:, half]
    return _from_bits((whole.reshape(-1, 1) >> torch.arange(4) * 8 & 255) * 0x0400)


def _e4m3_scales(planes: Planes, half: int, steps: int) -> Array:
    """NVFP4's scales of a quarter, [block rows, lane]."""
    words: Any = planes.scales
    scale = _from_bits((words >> 8 * (2 * half + steps) & 0x7F) << 7) * 2.0**15
    if planes.deltas is None:
        return scale
    return _half(scale * _from_bits(_deltas(planes) >> 16 * half))


def _signed(planes: Planes, half: int, steps: int) -> Array:
    """Q1_0: a quarter's weights, [block rows, lane, pair 0-7, 2]."""
    words = planes.codes.view(-1, 4, 2)[..., half]
    shifted = [words << 15 - pair - 8 * steps for pair in range(8)]
    is_set = torch.stack([_halves(bits, 0x8000) for bits in shifted], -2) != 0
    up = 2.0 ** (24 - planes.exponent - planes.layout.code_shift)
    scale = _half(_from_bits(_deltas(planes) >> 16 * half) * up)[..., None, None]
    return torch.where(is_set, scale, -scale)


# ---- grids


def _odd_scale(planes: Planes, delta: Array, code: Array) -> Array:
    up = 2.0 ** (24 - planes.exponent - planes.layout.code_shift)
    return _half(delta.to(torch.float64) * up * (2 * code + 1))


def _with_even_signs(words: Array) -> tuple[Array, Array]:
    """Sign words with the signs that were left out; and the other bits, at 0, 2, 4 and 6."""
    kept = words & 0x55FFFFFF
    folded = kept ^ kept >> 16
    folded = folded ^ folded >> 8
    folded = folded ^ folded >> 1
    return kept | (folded & 0x55) << 25, words >> 25 & 0x55


def _together(bits: Array) -> Array:
    """Bits 0, 2, 4 and 6 as a number of four bits."""
    bits = (bits | bits >> 1) & 0x33
    return (bits | bits >> 2) & 15


def _signed_points(planes: Planes, half: int, steps: int) -> Array:
    """IQ2 and IQ3: a quarter's weights, [block rows, lane, pair 0-7, 2]."""
    form = planes.layout
    assert planes.grid is not None
    lanes = torch.arange(4) * 8
    is_eight = form.grid.startswith("IQ2")  # weights a point
    if is_eight:
        codes = planes.codes.view(-1, 4, 2, 2)[:, :, half]
        numbers = [codes[..., 0] >> 8 * (2 * steps + i) & 255 for i in range(2)]
        signs = codes[..., 1]
    else:
        assert planes.high is not None
        codes = planes.codes.view(-1, 4, 2, 2)[:, :, half, steps]
        numbers = [codes >> 8 * i & 255 for i in range(4)]
        signs = planes.high.view(-1, 4, 2)[:, :, half]
    others: Any = None
    if form.has_even_signs:
        signs, others = _with_even_signs(signs)
    deltas = _deltas(planes)
    if form.grid in ("IQ2_XXS", "IQ3_XXS"):
        scale = _odd_scale(planes, deltas, _together(others))
    elif form.grid in ("IQ2_XS", "IQ2_S"):
        words: Any = _row_words(planes) if form.grid == "IQ2_XS" else planes.scales
        byte = words[:, -2 + half][:, None] >> lanes
        scale = _odd_scale(planes, deltas, byte >> 4 * steps & 15)
        upper = words[:, half][:, None] >> lanes
        for i in range(2):
            at = 2 * (2 * steps + i)
            more = others >> at & 1 if form.grid == "IQ2_XS" else upper >> at & 3
            numbers[i] = numbers[i] | more << 8
    else:
        words = planes.scales
        nibble = words[:, 1:2] >> lanes + 4 * half & 15
        scale = _odd_scale(planes, _from_bits(words[:, :1]), nibble)
        upper = words[:, 2 + half][:, None] >> lanes
        numbers = [x | (upper >> 4 * steps + i & 1) << 8 for i, x in enumerate(numbers)]
    found = []
    for index, number in enumerate(numbers):
        count = 2 if is_eight else 1
        for part in range(count):
            word = planes.grid[number.long() * count + part]
            place = 4 * steps + index * count + part
            word = word | signs << 7 - place & -0x7F7F7F80  # 0x80808080
            for own in (word, _swapped(word)):
                bits = _halves(own, 0x803F)
                found.append(torch.where(bits >= 0x8000, -(bits & 0x3F), bits))
    value = torch.stack(found, -2).to(torch.float64) * 2.0**-24
    return _half(value * scale[..., None, None])


def _ternary_points(planes: Planes, half: int, steps: int) -> Array:
    """IQ1: the same."""
    assert planes.grid is not None and planes.high is not None
    numbers = planes.codes.view(-1, 4, 2)[:, :, half]
    upper = planes.high >> 16 * half & 0xFFFF
    is_small = planes.format == "IQ1_S"
    if is_small:
        scale = _odd_scale(planes, _deltas(planes), upper >> 12 & 7)
    else:
        record = _records(planes) >> 6 * half + 3 * steps & 7
        scale = _odd_scale(planes, _from_bits(_row_words(planes)[:, :1]), record)
    pairs, offsets = [], []
    for i in range(2):
        point = 2 * steps + i
        more = upper >> (3 if is_small else 4) * point & 7
        word = planes.grid[(numbers >> 8 * point & 255 | more << 8).long()]
        is_down = upper >> (15 if is_small else 4 * point + 3) & 1
        # minus one, and an eighth down or up, in codes times four
        offset = _half(scale * torch.where(is_down == 1, -4.5, -3.5) * 2.0**-24)
        for place in range(4):
            odd = place % 2
            pairs.append(_halves(word >> 8 * (place // 2), 0xF0 if odd else 0x0F))
            offsets.append(offset)
    codes = torch.stack(pairs, -2).to(torch.float64) * 2.0**-24
    each = _half(scale[..., None, None] / _SIXTEENTHS)
    return _half(codes * each + torch.stack(offsets, -1)[..., None])


# ---- whole matrices


def decoded(planes: Planes) -> Array:
    """The matrix as the GEMM sees it, in natural order: float64 [rows, columns]."""
    if planes.is_float:
        return to_natural_order(planes.codes.to(torch.float64)) * 2.0**planes.exponent
    block = torch.empty((planes.num_blocks * planes.num_rows, 256), dtype=torch.float64)
    for half in range(2):
        for steps in range(2):
            value = _dequantized(planes, half, steps)
            quarter = value.permute(0, 2, 1, 3).reshape(len(block), 64)  # pair, lane, 2
            start = half * 128 + steps * 64
            block[:, start : start + 64] = quarter
    whole = block.view(planes.num_blocks, planes.num_rows, 256).transpose(0, 1)
    natural = to_natural_order(whole.reshape(planes.num_rows, -1))
    return natural * 2.0**planes.exponent * planes.factor


def _dequantized(planes: Planes, half: int, steps: int) -> Array:
    """A quarter's weights, [block rows, lane, pair 0-7, 2]."""
    form = PLANE_FORMATS[planes.format]
    if form.has_signed_points:
        return _signed_points(planes, half, steps)
    if form.has_ternary_points:
        return _ternary_points(planes, half, steps)
    if form.has_powers:
        halves = planes.codes.view(planes.num_blocks, 2, planes.num_rows, 4, 2, 2)[:, half]
        words = halves.flatten(0, 1)[:, :, steps]
        return _half(_float_pairs(words) * _powers(planes, half)[..., None, None])
    if form.has_signs:
        return _signed(planes, half, steps)
    words = planes.codes.view(-1, 4, 2, 2, form.code_words // 16)[:, :, half, steps]
    if form.has_e4m3_scales:
        scale = _e4m3_scales(planes, half, steps)[..., None, None]
        return _half(_float_pairs(words) * scale)
    if form.has_sums:
        pairs = _e4m3_pairs(words)
        large, small = (part[..., None, None] for part in _split_scales(planes, half))
        return _half(pairs * large + _half(pairs * small))
    more = None
    if planes.high is not None:
        more = planes.high.view(-1, 4, 2, form.high_bits)[:, :, half]
        more = more[..., steps if form.high_bits == 2 else 0]
    if form.has_values:
        pairs = _value_pairs(words)
    elif form.code_bits == 8:
        pairs = _byte_pairs(words)
    elif form.code_bits == 2:
        pairs = _two_bit_pairs(words, more, steps)
    else:
        pairs = _nibble_pairs(planes, words, more, steps)
    scale, offset = _scales(planes, half, steps)
    each = _half(scale[..., None, None] / pairs.places)
    value = pairs.codes.to(torch.float64) * 2.0**-24 * each
    return _half(value + offset[..., None, None])


_SLACK = 8.0  # what a score may be above the number that weights are relative to


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
    """A softmax under way: what weights are relative to, their sum and weighted values, float32."""

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
        highest = scores.max(0).values
        largest = torch.where(highest > split.largest + _SLACK, highest, split.largest)
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
