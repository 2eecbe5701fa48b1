"""The reference sampler's exponential on the device, bit for bit.

The steps are those of executors/elementary.py, each an operation of its own, so that none is fused
with another.
"""

import torch

from quire.executors import elementary
from quire.executors.cuda.planes import Array


def exp(values: Array) -> Array:
    """e to each value, float64, for values of at most 0."""
    bounded = values.clamp(min=elementary.LOWEST_EXPONENT)
    shifted = bounded * elementary.LOG2_E
    shifted += elementary.TO_INTEGER
    power = shifted - elementary.TO_INTEGER
    rest = bounded - power * elementary.LN2_HIGH
    rest -= power * elementary.LN2_LOW
    result = torch.full_like(rest, elementary.EXP_TAIL[-1])
    for coefficient in reversed(elementary.EXP_TAIL[:-1]):
        result *= rest
        result += coefficient
    result *= rest
    result *= rest
    result += rest
    result += 1.0
    scaled = (result.view(torch.int64) + (shifted.view(torch.int64) << 52)).view(torch.float64)
    return torch.where(values < elementary.LOWEST_EXPONENT, 0.0, scaled)
