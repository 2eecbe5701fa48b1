"""Our exp, log and sum: near the true values, exact where it matters, and in the order they say."""

import math
from decimal import Context, Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executors.elementary import LOWEST_EXPONENT, NUM_LANES, exp, lane_sum, log

PRECISE = Context(prec=50)


def units_off(value: float, true: Decimal) -> float:
    return float(abs(Decimal(value) - true) / Decimal(math.ulp(value)))


def exp_of(value: float) -> float:
    return float(exp(np.array([value]))[0])


@given(st.floats(LOWEST_EXPONENT, 0.0))
@settings(max_examples=500)
def test_exp_is_within_a_unit_in_the_last_place(value: float) -> None:
    assert units_off(exp_of(value), PRECISE.exp(Decimal(value))) <= 1.0


@given(st.floats(1.0, 2.0) | st.floats(1.0, 1e12))
@settings(max_examples=500)
def test_log_is_within_two_units_in_the_last_place(value: float) -> None:
    result = log(value)
    assert result == 0.0 if value == 1.0 else units_off(result, PRECISE.ln(Decimal(value))) <= 2.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 1.0), (-0.0, 1.0), (-math.inf, 0.0), (-1e300, 0.0), (LOWEST_EXPONENT - 1e-9, 0.0)],
)
def test_exp_at_its_ends(value: float, expected: float) -> None:
    assert exp_of(value) == expected


def test_exp_leaves_its_argument_and_does_not_warn() -> None:
    values = np.array([-1.0, -math.inf, 0.0])
    with np.errstate(all="raise"):
        exp(values)
    assert values.tolist() == [-1.0, -math.inf, 0.0]


def plain_sum(values: list[float]) -> float:
    lanes = [0.0] * NUM_LANES
    for index, value in enumerate(values):
        lanes[index % NUM_LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=200))
def test_the_sum_is_of_sixteen_lanes_and_then_of_halves(values: list[float]) -> None:
    assert lane_sum(np.array(values)) == plain_sum(values)


def test_the_sum_of_a_vocabulary_is_in_that_order_too() -> None:
    values = np.random.default_rng(1).random(49153)
    assert lane_sum(values) == plain_sum(values.tolist())
