"""What the tensor-core kernel does with planes, step by step in torch, for machines without a GPU.

It follows kernels/wgmma.py instruction by instruction: which words a lane of a warp loads, which
bits it takes from them, how it makes scales and offsets, and where in the operand the results go.
"""

from typing import Any

import torch

from quire.executors.cuda.planes import FORMS, Planes, to_natural_order

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
    """A quarter's pairs: [..., lane, pair 0-7, 2] quants, as shifts and masks take them; odd pairs
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
    words, form = planes.scales, FORMS[planes.format]
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
        scale = _half(planes.deltas.to(torch.float64)[:, None] * up * groups)
    else:
        scale = _from_bits(words >> 16 * half)
    return scale, scale * -form.zero_point * 2.0**-24


def decoded(planes: Planes) -> Array:
    """The matrix as the product sees it, in natural order: float64 [rows, columns]."""
    if planes.is_float:
        return to_natural_order(planes.quants.to(torch.float64)) * 2.0**planes.exponent
    form = FORMS[planes.format]
    count = form.quant_words // 16
    words = planes.quants.view(-1, 4, 2, 2, count)  # lane, half, steps, words
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
            quants = _fields(planes, words[:, :, half, steps], more, steps)  # [., lane, pair, 2]
            scale, offset = _scales(planes, half, steps)
            places = torch.ones(8, 1) if planes.format == "Q8_0" else _SIXTEENTHS
            each = _half(scale[..., None, None] / places)
            value = quants.to(torch.float64) * 2.0**-24 * each
            value = _half(value + offset[..., None, None])
            quarter = value.permute(0, 2, 1, 3).reshape(len(words), 64)  # pair, lane, 2
            start = half * 128 + steps * 64
            block[:, start : start + 64] = quarter
    whole = block.view(planes.num_blocks, planes.num_rows, 256).transpose(0, 1)
    return to_natural_order(whole.reshape(planes.num_rows, -1)) * 2.0**planes.exponent
