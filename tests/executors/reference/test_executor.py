"""What only the reference executor does: float32 arrays, and stopping between layers."""

import threading
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from tests.executors.reference.plans import opened, row, run
from tests.fixture_files import fixture_file

from quire.core.errors import ConfigError, StepCancelledError, StepTimeoutError
from quire.core.plan import StepPlan
from quire.executors import reference
from quire.executors.reference import Floats, KVPrecision, ReferenceExecutor
from quire.model.loading import load_model

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TABLE = (2, 0)


@pytest.fixture(scope="module")
def executor() -> Iterator[ReferenceExecutor]:
    with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8) as found:
        yield found


def test_memory_held_is_what_the_arrays_take(executor: ReferenceExecutor) -> None:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        num_weights = sum(tensor.num_weights for tensor in model.tensors.values())
    assert executor.memory_bytes["weights"] == 4 * num_weights
    assert executor.memory_bytes["kv"] == 2 * 2 * 8 * 16 * 2 * 64 * 4


def test_a_cancelled_step_stops_between_layers_and_the_next_one_runs() -> None:
    with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8) as executor:
        is_running, go_on = threading.Event(), threading.Event()
        layer = executor._decoder._layers[0]
        feed_forward = layer._feed_forward
        assert feed_forward is not None

        def held_up(normed: Floats, state: Floats) -> Floats:
            is_running.set()
            assert go_on.wait(60)
            return feed_forward(normed, state)

        layer._feed_forward = held_up
        second_layer_was_left_out = executor._blocks.keys[1].copy()
        ticket = executor.submit(StepPlan(0, (row(PROMPT, TABLE),)))
        assert is_running.wait(60)
        with pytest.raises(StepTimeoutError, match="step 0 took over"):
            executor.collect(ticket, timeout_s=0.01)
        executor.cancel(ticket)
        go_on.set()
        with pytest.raises(StepCancelledError):
            executor.collect(ticket, timeout_s=60)
        assert (executor._blocks.keys[1] == second_layer_was_left_out).all()
        assert run(executor, row(PROMPT, TABLE), step_id=1)[0].fault is None


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_keys_and_values_of_a_cache_in_halves_are_rounded(precision: KVPrecision) -> None:
    kept = {}
    each: KVPrecision
    for each in ("float32", precision):
        with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8, kv_precision=each) as executor:
            run(executor, row(PROMPT, TABLE))
            kept[each] = executor._blocks.keys[0][2].copy(), executor._blocks.values[0][2].copy()
    for exact, found in zip(kept["float32"], kept[precision], strict=True):
        assert np.array_equal(found, as_halves(exact, precision))
        assert not np.array_equal(found, exact)


def as_bytes(x: Floats, precision: str) -> Floats:
    largest = np.abs(x).max(axis=-1, keepdims=True)
    if precision == "int8":
        rounded: Floats = np.rint(x * (np.float32(127) / largest)) * (largest / np.float32(127))
        return rounded
    codes = [code for code in range(256) if code % 128 != 127]  # but NaN
    numbers = np.array([_e4m3(code) for code in codes], np.float32)
    scaled = (x * (np.float32(448) / largest))[..., None]
    nearest = np.abs(scaled.astype(np.float64) - numbers).argmin(axis=-1)
    chosen: Floats = numbers[nearest] * (largest / np.float32(448))
    return chosen


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_keys_and_values_of_a_cache_in_bytes_have_a_scale_for_each_head(
    precision: KVPrecision,
) -> None:
    kept = {}
    each: KVPrecision
    for each in ("float32", precision):
        with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8, kv_precision=each) as executor:
            run(executor, row(PROMPT, TABLE))
            blocks = executor._blocks
            kept[each] = [
                array[0][2, : len(PROMPT)].copy() for array in (blocks.keys, blocks.values)
            ]
    for exact, found in zip(kept["float32"], kept[precision], strict=True):
        assert np.array_equal(found, as_bytes(exact, precision))
        assert not np.array_equal(found, exact)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_vector_that_is_not_finite_is_nan_as_bytes_and_one_of_zeros_is_zeros(
    precision: KVPrecision,
) -> None:
    numbers = np.ones((5, 4), np.float32)
    numbers[0, 1], numbers[1, 2], numbers[2], numbers[3] = np.nan, -np.inf, 0.0, 1e-40
    with np.errstate(all="ignore"):
        found = reference._ROUNDING[precision](numbers)
    assert np.isnan(found[:2]).all()
    assert (found[2:4] == 0).all()
    assert np.array_equal(found[4], numbers[4])


def as_halves(x: Floats, precision: str) -> Floats:
    if precision == "float16":
        return x.astype(np.float16).astype(np.float32)
    halves = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    return gguf.quants.dequantize(halves, gguf.GGMLQuantizationType.BF16).reshape(x.shape)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    name = "block_size" if num_blocks else "num_blocks"
    with (
        load_model(fixture_file("tiny/Q4_0.gguf")) as model,
        pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"),
    ):
        ReferenceExecutor(model, num_blocks=num_blocks, block_size=block_size)
