"""The native kernels that work on one row: right, and the same bits from every unit."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.cpu.blocks import BLOCK, GROUP

from quire.executors.cpu.native import native
from quire.executors.reference import apply_rope, layer_norm, quantised_by_token, rms_norm, xielu
from quire.model.spec import Activation

Floats = npt.NDArray[np.float32]

UNITS = native.units()
SIZES = [1, 15, 16, 17, 64, 100, 576, 1536]
GATES = [kind for kind in Activation if kind is not Activation.XIELU]


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised_in_groups(unit: str, x: Floats) -> npt.NDArray[np.void]:
    groups = np.zeros(len(x) // 32, GROUP)
    native.quantise_groups(unit, x, groups.view(np.uint8))
    return groups


def same_bits(results: list[Floats]) -> bool:
    return all(np.array_equal(results[0].view(np.uint32), r.view(np.uint32)) for r in results)


def test_a_unit_this_processor_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match='"riscv"'):
        native.add("riscv", normal(4), normal(4))


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_the_references_and_the_same_in_every_unit(size: int) -> None:
    x, weight = normal(size) * 3, normal(size, seed=1)
    results = [np.empty_like(x) for _ in UNITS]
    for unit, out in zip(UNITS, results, strict=True):
        native.rms_norm(unit, x, weight, 1e-5, out)
    np.testing.assert_allclose(results[0], rms_norm(x, weight, 1e-5), rtol=1e-6)
    assert same_bits(results)


def test_rms_norm_reads_and_writes_nothing_past_a_row_of_any_size() -> None:
    for unit in UNITS:
        for size in range(1, 40):
            x = np.full(64, np.nan, np.float32)
            x[:size] = normal(size)
            out = np.full(64, 7, np.float32)
            native.rms_norm(unit, x[:size], np.ones(size, np.float32), 1e-5, out[:size])
            assert np.isfinite(out).all() and (out[size:] == 7).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm_is_the_references_and_the_same_in_every_unit(
    size: int, has_weight: bool, has_bias: bool
) -> None:
    x = normal(size) * 3 + 2
    weight = normal(size, seed=1) if has_weight else None
    bias = normal(size, seed=2) if has_bias else None
    results = [np.empty_like(x) for _ in UNITS]
    for unit, out in zip(UNITS, results, strict=True):
        native.layer_norm(unit, x, weight, bias, 1e-5, out)
    exact = layer_norm(x, weight, bias, 1e-5)
    np.testing.assert_allclose(results[0], exact, rtol=2e-6, atol=2e-6)
    assert same_bits(results)


@pytest.mark.parametrize("unit", UNITS)
def test_groups_of_bytes_are_the_nearest_codes_of_a_scale_per_32(unit: str) -> None:
    x = normal(576) * np.repeat(np.float32(10.0) ** np.arange(-9, 9), 32).astype(np.float32)
    groups = quantised_in_groups(unit, x)
    in_groups = x.reshape(-1, 32)
    largest = np.abs(in_groups).max(axis=1, keepdims=True)
    codes = np.rint(in_groups * (np.float32(127) / largest)).astype(np.int8)
    assert np.array_equal(groups["codes"], codes)
    assert np.array_equal(groups["scale"], (largest / np.float32(127)).ravel())
    assert np.abs(codes).max(axis=1).tolist() == [127] * len(in_groups)


@pytest.mark.parametrize("unit", UNITS)
def test_ties_between_codes_go_to_the_even_one(unit: str) -> None:
    x = np.zeros(32, np.float32)
    x[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert quantised_in_groups(unit, x)["codes"][0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("unit", UNITS)
def test_sums_of_codes_are_exact(unit: str) -> None:
    groups = quantised_in_groups(unit, normal(576, seed=3) + 1)
    sums = groups["codes"].sum(axis=1, dtype=np.int64).astype(np.float32)
    assert np.array_equal(groups["sum"], sums)
    assert np.array_equal(groups["scaled_sum"], groups["scale"] * sums)
    second = groups["codes"][:, 16:].sum(axis=1, dtype=np.int64)
    assert np.array_equal(groups["second_sum"], second)
    assert not groups["unused"].any() and not groups["row_sum"].any()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 1e-38])
def test_a_group_of_zeros_or_of_too_small_numbers_has_codes_0(unit: str, tiny: float) -> None:
    groups = quantised_in_groups(unit, np.full(32, tiny, np.float32))
    assert not groups["codes"].any() and groups["scale"][0] <= 1e-38


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 5, 16, 31])
def test_what_is_not_finite_ends_as_a_scale_that_is_nan(unit: str, bad: float, where: int) -> None:
    x = normal(96)
    x[32 + where] = bad
    groups = quantised_in_groups(unit, x)
    assert np.isnan(groups["scale"]).tolist() == [False, True, False]
    assert np.isnan(groups["scaled_sum"][1]) and not groups["codes"][1].any()
    rows = np.zeros(3, GROUP)
    assert np.isnan(native.quantise_per_token(unit, x, rows.view(np.uint8)))
    assert not rows["codes"].any()


@pytest.mark.parametrize("unit", UNITS)
def test_blocks_of_bytes_are_the_nearest_codes_of_a_scale_per_256(unit: str) -> None:
    x = (normal(1024) + 1) * np.repeat(np.array([1e-36, 1, 1e30, 0], np.float32), 256)
    blocks = np.zeros(4, BLOCK)
    native.quantise_blocks(unit, x, blocks.view(np.uint8))
    in_blocks = x.reshape(4, 256)
    largest = np.abs(in_blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(in_blocks * (np.float32(127) / largest)[:, None])
    codes[3] = 0
    assert np.array_equal(blocks["codes"], codes)
    assert np.array_equal(blocks["scale"], largest / np.float32(127))
    assert np.array_equal(blocks["sums"], codes.reshape(4, 8, 32).sum(axis=2))
    assert np.array_equal(blocks["half_sums"], codes.reshape(4, 16, 16).sum(axis=2))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_has_a_scale_that_is_nan(unit: str, bad: float) -> None:
    x = normal(768)
    x[300] = bad
    blocks = np.zeros(3, BLOCK)
    native.quantise_blocks(unit, x, blocks.view(np.uint8))
    assert np.isnan(blocks["scale"]).tolist() == [False, True, False]
    assert not blocks["codes"][1].any()


@pytest.mark.parametrize("unit", UNITS)
def test_a_per_token_scale_serves_all_groups_and_sums_are_of_codes(unit: str) -> None:
    x = normal(1536, seed=5)
    groups = np.zeros(48, GROUP)
    scale = native.quantise_per_token(unit, x, groups.view(np.uint8))
    largest = np.abs(x).max()
    codes = half_away(x * (np.float32(127) / largest)).astype(np.int8).reshape(-1, 32)
    assert scale == largest / np.float32(127)
    assert np.array_equal(groups["codes"], codes)
    assert (groups["scale"] == 1).all()
    assert np.array_equal(groups["scaled_sum"], codes.sum(axis=1, dtype=np.int64))
    assert groups["row_sum"][0] == codes.sum(dtype=np.int64)


def half_away(x: Floats) -> Floats:
    """The nearest integers, of two the one further from zero."""
    return np.copysign(np.floor(np.abs(x).astype(np.float64) + 0.5), x).astype(np.float32)


@pytest.mark.parametrize("unit", UNITS)
def test_a_per_token_scale_rounds_as_the_reference_does(unit: str) -> None:
    halves = np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)
    ties = np.concatenate([halves, np.nextafter(halves, 0), np.nextafter(halves, halves * 2)])
    x = np.zeros(768, np.float32)
    x[: len(ties)] = ties
    x[-1] = 127  # what is multiplied by 1
    groups = np.zeros(24, GROUP)
    assert native.quantise_per_token(unit, x, groups.view(np.uint8)) == 1
    codes, per_unit = quantised_by_token(x)
    assert per_unit == 1
    assert np.array_equal(groups["codes"].ravel(), codes)
    assert np.array_equal(codes, half_away(x))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("largest", [0.0, 1e-38, 3e-7, 9.9e-6, 1e-5])
def test_small_activations_keep_to_the_smallest_scale_of_training(
    unit: str, largest: float
) -> None:
    x = normal(96)
    x *= np.float32(largest) / np.abs(x).max()
    groups = np.zeros(3, GROUP)
    scale = native.quantise_per_token(unit, x, groups.view(np.uint8))
    codes, per_unit = quantised_by_token(x)
    assert np.array_equal(groups["codes"].ravel(), codes)
    assert scale == pytest.approx(1 / per_unit, rel=1e-6)
    assert np.abs(codes).max() == round(largest / 1e-5 * 127)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", GATES)
def test_gates_are_the_references_and_the_same_in_every_unit(size: int, kind: Activation) -> None:
    gate, up = normal(size) * 5, normal(size, seed=1) * 4
    results = [np.empty_like(gate) for _ in UNITS]
    for unit, out in zip(UNITS, results, strict=True):
        native.gate(unit, kind, gate, up, out)
    np.testing.assert_allclose(results[0], exact_gate(kind, gate, up), rtol=1e-6, atol=2e-7)
    assert same_bits(results)


def exact_gate(kind: Activation, gate: Floats, up: Floats) -> npt.NDArray[np.float64]:
    x, values = gate.astype(np.float64), up.astype(np.float64)
    if kind is Activation.CLAMPED_SWIGLU:
        x, values = np.minimum(x, 7), np.clip(values, -7, 7)
        return np.asarray(x / (1 + np.exp(-1.702 * x)) * (values + 1))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    active = {
        Activation.SILU: x / (1 + np.exp(-x)),
        Activation.RELU2: np.square(np.maximum(x, 0)),
        Activation.GELU: x * [0.5 * math.erfc(-value / math.sqrt(2)) for value in x],
        Activation.GELU_TANH: x / (1 + np.exp(-2 * inner)),
    }
    return np.asarray(active[kind] * values)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", GATES)
def test_gates_keep_nan_and_survive_large_numbers(unit: str, kind: Activation) -> None:
    gate = np.array([np.nan, 200, -200, 1e4, -1e4], np.float32)
    out = np.empty_like(gate)
    native.gate(unit, kind, gate, np.ones_like(gate), out)
    assert np.isnan(out[0])
    clamped, squared = kind is Activation.CLAMPED_SWIGLU, kind is Activation.RELU2
    for index, large in ((1, 200.0), (3, 1e4)):
        expected = large * large if squared else 14.0 if clamped else large
        assert out[index] == pytest.approx(expected, rel=1e-4)
    assert abs(out[2]) < 1e-30 and abs(out[4]) < 1e-30


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epsilon", [-1e-6, -0.7, 0.4])
def test_xielu_is_the_references_and_the_same_in_every_unit(size: int, epsilon: float) -> None:
    x = normal(size) * 5
    x[: size // 4] /= 1000
    x[:1] = 0
    numbers = np.array([0.8, 1.3, 0.5, epsilon], np.float32)
    results = [np.empty_like(x) for _ in UNITS]
    for unit, out in zip(UNITS, results, strict=True):
        native.xielu(unit, x, numbers, out)
    expected = xielu(x.astype(np.float64), numbers.astype(np.float64))
    np.testing.assert_allclose(results[0], expected, rtol=1e-6, atol=2e-7)
    assert same_bits(results)


@pytest.mark.parametrize("unit", UNITS)
def test_xielu_keeps_nan_and_survives_large_numbers(unit: str) -> None:
    x = np.array([np.nan, 1e4, -1e4, -200], np.float32)
    out = np.empty_like(x)
    native.xielu(unit, x, np.array([0.8, 1.3, 0.5, -1e-6], np.float32), out)
    assert np.isnan(out[0])
    assert out[1:].tolist() == pytest.approx([8e7 + 5e3, 8e3 - 1.3, 160 - 1.3])
    with pytest.raises(ValueError, match="xielu has four numbers"):
        native.xielu(unit, x, x[:3], out)
    with pytest.raises(ValueError, match="xielu has numbers and no gate"):
        native.gate(unit, "xielu", x, x, out)


def test_a_gate_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no such word for a gate: relu"):
        native.gate(UNITS[0], "relu", normal(4), normal(4), normal(4))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_added_exactly(unit: str, size: int) -> None:
    x, y = normal(size), normal(size, seed=1)
    expected = x + y
    native.add(unit, x, y)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_caps_are_hyperbolic_tangents_down_to_the_smallest_numbers(cap: float) -> None:
    x = np.concatenate([normal(333) * 40, np.geomspace(1e-30, 1e3, 300).astype(np.float32)])
    x = np.concatenate([x, -x]).astype(np.float32)
    results = [x.copy() for _ in UNITS]
    for unit, out in zip(UNITS, results, strict=True):
        native.soft_cap(unit, out, cap)
    np.testing.assert_allclose(results[0], cap * np.tanh(x.astype(np.float64) / cap), rtol=5e-7)
    assert same_bits(results)


@pytest.mark.parametrize("unit", UNITS)
def test_a_cap_keeps_nan_and_holds_infinity(unit: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    native.soft_cap(unit, x, 30.0)
    assert np.isnan(x[0]) and x[1:].tolist() == [30.0, -30.0]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "dims"), [(64, 64), (80, 20), (128, 96), (6, 2), (96, 0)])
def test_rope_is_exactly_the_reference_s(
    unit: str, interleaved: bool, head_dim: int, dims: int
) -> None:
    heads, angles = normal(5, head_dim), normal(dims // 2, seed=1) * 100
    cosines, sines = np.cos(angles), np.sin(angles)
    expected = apply_rope(heads, cosines, sines, interleaved)
    native.rope(unit, heads.reshape(-1), head_dim, interleaved, cosines, sines)
    assert np.array_equal(heads, expected)
