"""Rope frequencies, against their definitions written out one number at a time."""

import math

import numpy as np
import pytest

from quire.core.errors import ModelFileError
from quire.model.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
)


def frequencies(scaling: RopeScaling | None, dims: int = 8, base: float = 10000.0) -> list[float]:
    found: list[float] = Rope(base, dims, False, scaling).frequencies().tolist()
    return found


def test_plain_frequencies_fall_as_powers_of_the_base() -> None:
    assert frequencies(None) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-12)


def test_linear_scaling_divides_all() -> None:
    assert frequencies(LinearScaling(4.0)) == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_divisors_divide_each() -> None:
    found = frequencies(DivisorScaling((1.0, 2.0, 4.0, 8.0)))
    assert found == pytest.approx([1.0, 0.05, 0.0025, 0.000125])


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    # Within 2048 positions the four pairs make 326, 32.6, 3.26 and 0.326 turns.
    scaling = Llama3Scaling(
        8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=2048
    )
    kept = (2048 * 0.01 / (2 * math.pi) - 1.0) / 3.0
    blended = (1 - kept) * 0.01 / 8 + kept * 0.01
    assert frequencies(scaling) == pytest.approx([1.0, 0.1, blended, 0.001 / 8])


def test_llama3_may_have_nothing_between() -> None:
    found = frequencies(Llama3Scaling(16.0, 1.0, 1.0, 2048))  # as Llama 4 Scout has it
    assert found == pytest.approx([1.0, 0.1, 0.01, 0.001 / 16])


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_blends_between() -> None:
    dims, base, context, factor = 32, 10000.0, 4096, 4.0
    low = math.floor(dims * math.log(context / (32 * 2 * math.pi)) / (2 * math.log(base)))
    high = math.ceil(dims * math.log(context / (1 * 2 * math.pi)) / (2 * math.log(base)))
    assert 0 < low < high < dims // 2 - 1
    expected = []
    for pair in range(dims // 2):
        plain = base ** (-2 * pair / dims)
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        expected.append(plain / factor * stretched + plain * (1 - stretched))
    assert frequencies(YarnScaling(factor, context), dims) == pytest.approx(expected, rel=1e-12)


def test_yarn_lengthens_the_rotated_vectors() -> None:
    yarn = YarnScaling(4.0, 4096)
    rope = Rope(10000.0, 8, interleaved=False, scaling=yarn)
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    given = YarnScaling(4.0, 4096, attention_factor=1.5)
    assert Rope(10000.0, 8, interleaved=False, scaling=given).magnitude == 1.5
    assert Rope(10000.0, 8, interleaved=False).magnitude == 1.0


@pytest.mark.parametrize("base", [1.0, 0.0, -5.0, math.nan, math.inf, 1e13])
def test_a_base_that_cannot_be_is_refused(base: float) -> None:
    with pytest.raises(ModelFileError, match="rope base must be above 1"):
        Rope(base, 8, interleaved=False)


@pytest.mark.parametrize("dims", [0, -2, 7])
def test_dimensions_come_in_pairs(dims: int) -> None:
    with pytest.raises(ModelFileError, match="rope dimensions must be even"):
        Rope(10000.0, dims, interleaved=False)


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_factors_that_cannot_be_are_refused(factor: float) -> None:
    with pytest.raises(ModelFileError, match="rope scaling factor must be a number of at least 1"):
        LinearScaling(factor)
    with pytest.raises(ModelFileError, match="rope scaling factor must be a number of at least 1"):
        YarnScaling(factor, 16)
    with pytest.raises(ModelFileError, match="rope scaling factor must be a number of at least 1"):
        Llama3Scaling(factor, 1.0, 4.0, 16)


@pytest.mark.parametrize("beta", [0.5, 1e7, 1e308, math.inf, math.nan])
def test_a_beta_that_no_logarithm_can_be_taken_of_is_refused(beta: float) -> None:
    with pytest.raises(ModelFileError, match="rope beta_fast must be"):
        YarnScaling(4.0, 16, beta_fast=beta)


def test_llama3_factors_must_be_in_order() -> None:
    with pytest.raises(ModelFileError, match="high_freq_factor must be at least low_freq_factor"):
        Llama3Scaling(8.0, 4.0, 3.9, 16)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf])
def test_a_divisor_that_cannot_be_is_refused_by_its_place(divisor: float) -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight\[1\] must be a number above 0"):
        DivisorScaling((1.0, divisor))


def test_divisors_must_be_one_for_each_pair() -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight has 3 numbers, expected 4"):
        Rope(10000.0, 8, interleaved=False, scaling=DivisorScaling((1.0, 1.0, 1.0)))


def test_frequencies_stay_finite_whatever_scaling_is_accepted() -> None:
    scalings = (
        *(YarnScaling(1.0, 1), YarnScaling(1e30, 1 << 31), YarnScaling(4.0, 1, 1e6, 1e-6)),
        *(LinearScaling(1e30), LinearScaling(1e308), Llama3Scaling(1e308, 1.0, 1e308, 1 << 31)),
    )
    for scaling in scalings:
        for dims in (2, 4, 256):
            found = Rope(1.0000001, dims, interleaved=False, scaling=scaling).frequencies()
            assert np.isfinite(found).all()


@pytest.mark.parametrize("factor", [-1.0, 1e7, 1e300, math.inf, math.nan])
def test_a_magnitude_that_single_precision_does_not_hold_is_refused(factor: float) -> None:
    with pytest.raises(ModelFileError, match=r"rope attention_factor .* at most 1e\+06, got"):
        YarnScaling(4.0, 64, attention_factor=factor)
