"""exp, log and a sum that come out the same everywhere: plain IEEE arithmetic in a fixed order.

The exponentials of numpy and of C differ from version to version in the last bit, and numpy's sum
has an order of its own. A sampler that must give the same token and the same log-probability on
every executor cannot use them: native/elementary.h holds the same steps in C++, bit for bit. No
step may be fused or reordered in one place alone.
"""

import math

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

LOWEST_EXPONENT = -708.0  # below it exp is 0, so that no result is subnormal
NUM_LANES = 16
LEAST_BASE = 2.0**-1000  # of a power: what is below is taken for 0

LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")  # 42 bits: its product with a power is exact
LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
TO_INTEGER = 1.5 * 2.0**52  # added, it leaves the nearest integer in the low bits
EXP_TAIL = tuple(  # (exp(r) - 1 - r) / r**2 on +-ln(2)/2, interpolated at Chebyshev's nodes
    float.fromhex(digits)
    for digits in (
        "0x1.0000000000001p-1",
        "0x1.5555555555556p-3",
        "0x1.5555555553d63p-5",
        "0x1.11111111109b3p-7",
        "0x1.6c16c1788bd90p-10",
        "0x1.a01a01a7c41d5p-13",
        "0x1.a019b90d2ae7ap-16",
        "0x1.71de0dae63bb3p-19",
        "0x1.289185613a3d6p-22",
        "0x1.af38a9b0ec855p-26",
    )
)
ROOT_OF_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LOG_TERMS = tuple(2.0 / odd for odd in range(3, 25, 2))  # of 2 atanh(s) = 2 s + s (2/3 s**2 + ...)


def exp(values: Doubles) -> Doubles:
    """e to each value, for values of at most 0; within one unit in the last place."""
    bounded = np.maximum(values, LOWEST_EXPONENT)
    shifted = bounded * LOG2_E
    shifted += TO_INTEGER
    power = shifted - TO_INTEGER
    rest = bounded - power * LN2_HIGH
    rest -= power * LN2_LOW
    result = np.full_like(rest, EXP_TAIL[-1])
    for coefficient in reversed(EXP_TAIL[:-1]):
        result *= rest
        result += coefficient
    result *= rest
    result *= rest
    result += rest
    result += 1.0
    result.view(np.uint64)[...] += shifted.view(np.uint64) << np.uint64(52)  # times 2**power
    result[values < LOWEST_EXPONENT] = 0.0
    return result


def log(value: float) -> float:
    """The natural logarithm of a finite number of at least 1."""
    mantissa, power = math.frexp(value)
    if mantissa < ROOT_OF_HALF:
        mantissa, power = mantissa * 2.0, power - 1
    fraction = mantissa - 1.0
    ratio = fraction / (2.0 + fraction)
    square = ratio * ratio
    series = LOG_TERMS[-1]
    for term in reversed(LOG_TERMS[:-1]):
        series = series * square + term
    near = fraction - ratio * (fraction - series * square)
    return power * LN2_HIGH + (power * LN2_LOW + near)


def lane_sum(values: Doubles) -> float:
    """The sum in a fixed order: lane i takes every 16th value from i on, then lanes are added by
    halves.

    numpy adds along the slow axis row after row; its pairwise order is for the fast axis alone.
    """
    rows = np.zeros((-(-len(values) // NUM_LANES), NUM_LANES))
    rows.reshape(-1)[: len(values)] = values
    lanes = np.add.reduce(rows, axis=0)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def halving_sum(values: Doubles) -> float:
    """The sum in another fixed order, which devices can follow too: the upper half, from the
    greatest power of two on, is added to the lower one until one number is left."""
    sums = values.copy()
    while len(sums) > 1:
        half = 1 << (len(sums) - 1).bit_length() - 1
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    return float(sums[0])


def power(base: float, exponent: float) -> float:
    """A number from 0 to 1 to a power of at least 0."""
    if exponent == 1.0:
        return base
    if base < LEAST_BASE:
        return 0.0 if exponent > 0.0 else 1.0
    return float(exp(np.array([-exponent * log(1.0 / base)]))[0])
