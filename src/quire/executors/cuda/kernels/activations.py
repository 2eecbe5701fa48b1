"""What a feed-forward applies to its gates: for the epilogues of every GEMM, Triton's and Gluon's.

ACTIVATION is the value of a spec.Activation.
"""

# ruff: noqa: N803

from typing import Any, NamedTuple

import triton
import triton.language as tl

_TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_CLAMP = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(u) is 2 / (1 + exp(-2 u))
        y = x / (1.0 + tl.exp((x + x * x * x * _CUBIC) * -_TWICE_ROOT))
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    else:
        tl.static_assert(ACTIVATION == "gelu")
        y = 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    return y


class XieluNumbers(NamedTuple):
    """A layer's, as spec.Activation.XIELU has them."""

    alpha: Any
    other_alpha: Any
    beta: Any
    epsilon: Any


@triton.jit
def xielu(x, numbers):
    """What exp(x) - 1 loses near 0 is less than the float16 that the result becomes has there."""
    below = tl.exp(tl.minimum(x, numbers.epsilon)) - 1.0 - x
    return tl.where(x > 0.0, numbers.alpha * x * x, numbers.other_alpha * below) + numbers.beta * x


@triton.jit
def gated(gates, ups, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gates = tl.minimum(gates, _CLAMP)
        ups = tl.minimum(tl.maximum(ups, -_CLAMP), _CLAMP)
        product = gates / (1.0 + tl.exp(gates * -_SLOPE)) * (ups + 1.0)
    else:
        product = activated(gates, ACTIVATION) * ups
    return product
