"""GEMM of packed weights: right, without saturating, and the same bits however many columns."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.cpu.blocks import (
    BLOCK_FORMATS,
    FORMATS,
    GROUP,
    TERNARY,
    UNITS,
    Floats,
    Matrix,
    activations,
    as_seen,
    block_size,
    extreme_matrix,
    gemm,
    hostile_matrix,
    nmse,
    normal,
    put_scales,
    random_matrix,
    smallest_size,
)

from quire.executors.cpu.native import native

ODD_ROWS = 37
MOST_COLUMNS = 65
WITH_A_SMALL_SIGNAL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

from quire.executors.cpu.native import units

print(*units())
"""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_a_product_is_that_of_the_decoded_weights_and_the_bytes(
    name: str, unit: str, num_tokens: int
) -> None:
    size = smallest_size(name)
    matrix = random_matrix(name, ODD_ROWS, size, seed=num_tokens)
    packed = matrix.packed()
    columns = activations(normal(num_tokens, size), packed)
    expected = as_seen(columns) @ matrix.exact.astype(np.float64).T
    found = gemm(unit, packed, columns, ODD_ROWS)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_for_activations_cost_little(name: str) -> None:
    size = smallest_size(name)
    matrix, x = random_matrix(name, 64, size), normal(8, size, seed=3)
    packed = matrix.packed()
    found = gemm(UNITS[-1], packed, activations(x, packed), 64)
    assert nmse(found, x.astype(np.float64) @ matrix.exact.astype(np.float64).T) <= 1e-4


@pytest.mark.parametrize("name", TERNARY)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 37])
@pytest.mark.parametrize("size", [256, 1024, 3328])
def test_ternary_sums_are_exact(name: str, unit: str, num_tokens: int, size: int) -> None:
    matrix = with_scales_of_one(random_matrix(name, ODD_ROWS, size, seed=9))
    columns = per_token(normal(num_tokens, size), unit)
    expected = as_seen(columns) @ matrix.exact.astype(np.float64).T
    for has_unit_scales in (False, True):
        found = gemm(unit, matrix.packed(), columns, ODD_ROWS, has_unit_scales=has_unit_scales)
        np.testing.assert_array_equal(found, expected)


def with_scales_of_one(matrix: Matrix) -> Matrix:
    blocks = matrix.blocks.reshape(matrix.num_rows, matrix.in_size // 256, -1)
    put_scales(matrix.format, blocks, np.ones(blocks.shape[:2]))
    return matrix


def per_token(x: Floats, unit: str) -> npt.NDArray[np.generic]:
    columns = np.zeros((len(x), x.shape[1] // 32), GROUP)
    for column, out in zip(x, columns, strict=True):
        native.quantise_per_token(unit, column, out.view(np.uint8))
    return columns


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("byte", [0x00, 0xAA])  # codes -1 alone, and 1 alone
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_the_largest_ternary_sums_of_a_long_row_do_not_overflow(
    unit: str, byte: int, sign: int, num_tokens: int
) -> None:
    size = 131_072
    matrix = extreme_matrix("TQ2_0", 17, size, byte)
    columns = per_token(np.full((num_tokens, size), sign, np.float32), unit)
    found = gemm(unit, matrix.packed(), columns, 17, has_unit_scales=True)
    assert (found == (1 if byte else -1) * sign * 127 * size).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("unit", UNITS)
def test_the_largest_codes_do_not_saturate(name: str, unit: str) -> None:
    size = 512
    signs = np.ones((4, size), np.float32)  # as bytes: 127 and -127
    signs[1] = -1
    signs[2, ::2] = -1
    signs[3, : size // 2] = -1
    for byte in (0x00, 0x7F, 0x80, 0x88, 0xFF):
        matrix = extreme_matrix(name, ODD_ROWS, size, byte)
        packed = matrix.packed()
        columns = np.concatenate([activations(signs, packed)] * 17)  # enough of them for any tile
        found = gemm(unit, packed, columns, ODD_ROWS)
        exact = matrix.exact.astype(np.float64)
        expected = as_seen(columns) @ exact.T
        # What cancels out leaves the rounding of its parts.
        np.testing.assert_allclose(
            found, expected, rtol=1e-5, atol=1e-5 * np.abs(exact).sum(axis=1).max()
        )


@pytest.mark.parametrize("unit", UNITS)
def test_the_largest_scales_and_codes_of_q6_k_together_do_not_overflow(unit: str) -> None:
    """-32 times -128 all along, 133 million in a block: the most any format comes to."""
    matrix = extreme_matrix("Q6_K", ODD_ROWS, 512, 0)
    matrix.blocks.reshape(ODD_ROWS, 2, 210)[..., 192:208] = 0x80
    packed = matrix.packed()
    columns = activations(np.ones((17, 512), np.float32), packed)
    found = gemm(unit, packed, columns, ODD_ROWS)
    np.testing.assert_allclose(found, as_seen(columns) @ matrix.exact.astype(np.float64).T, 1e-6)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_of_any_bytes_give_the_same_in_every_unit(name: str) -> None:
    packed = hostile_matrix(name, 400, 512).packed()
    columns = activations(normal(17, 512), packed)
    expected = gemm("portable", packed, columns, 400)
    num_finite = np.isfinite(expected).all(axis=0).sum()
    assert num_finite > 0 and (num_finite == 400) == (name == "NVFP4")  # whose scales all are
    for unit in UNITS[1:]:
        np.testing.assert_array_equal(gemm(unit, packed, columns, 400), expected)


@pytest.mark.parametrize("unit", UNITS)
def test_every_scale_of_mxfp4_is_the_power_of_two_that_it_stands_for(unit: str) -> None:
    """From 2 ** -128, which is subnormal, to 2 ** 127: a row each."""
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = 1 | 2 << 4  # the values 0.5 and 1, doubled
    matrix = Matrix("MXFP4", 256, 32, blocks)
    columns = np.zeros((14, 1), GROUP)  # enough of them for a tile
    columns["codes"][:, :, 3], columns["sum"], columns["scale"] = 1, 1, 1
    found = gemm(unit, matrix.packed(), columns, 256)
    assert np.array_equal(found, np.broadcast_to(matrix.exact[:, 3], (14, 256)))
    assert found[0, 0] == 2.0**-128 and found[0, 255] == 2.0**127


@pytest.mark.parametrize("unit", UNITS)
def test_every_scale_of_nvfp4_is_the_float_that_it_stands_for(unit: str) -> None:
    """For each of the four sixteens of a block: a row each, in which the other scales are 0."""
    blocks = np.zeros((4, 256, 36), np.uint8)
    for at in range(4):
        blocks[at, :, at] = np.arange(256)
    blocks[..., 4:] = 1 | 2 << 4  # the values 0.5 and 1, doubled
    matrix = Matrix("NVFP4", 1024, 64, blocks.reshape(1024, 36))
    columns = np.zeros((14, 2), GROUP)  # enough of them for a tile
    columns["codes"][..., 3], columns["codes"][..., 31] = 1, 1
    columns["sum"], columns["second_sum"], columns["scale"] = 2, 1, 1
    found = gemm(unit, matrix.packed(), columns, 1024)
    expected = matrix.exact[:, [3, 31, 35, 63]].sum(axis=1)
    assert np.array_equal(found, np.broadcast_to(expected, (14, 1024)))
    assert found[0, 255] == found[0, 256 + 255] / 2 == 240.0 and found[0, 0x7F] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_columns_and_every_unit_give_the_same_bits(name: str) -> None:
    size = smallest_size(name)
    matrix = random_matrix(name, ODD_ROWS, size, seed=2)
    packed = matrix.packed()
    columns = activations(normal(MOST_COLUMNS, size, seed=8), packed)
    expected = gemm(UNITS[-1], packed, columns, ODD_ROWS)
    assert np.isfinite(expected).all()
    for unit in UNITS:
        for count in range(1, MOST_COLUMNS + 1):
            found = gemm(unit, packed, columns[:count], ODD_ROWS)
            assert found.tobytes() == expected[:count].tobytes(), (unit, count)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(
    ("size", "counts"),
    [(2304, (*range(5, 41), 64, 65, 127, 128, 129, 130)), (512, (255, 256, 257))],
)
def test_long_rows_and_many_columns_give_the_same_bits_in_every_unit(
    name: str, size: int, counts: tuple[int, ...]
) -> None:
    """Where AMX takes over: whole tiles and parts of them, in columns and in sub-blocks. Of short
    rows more columns are multiplied at once."""
    if size > 512 and block_size(name) == 32:
        size = 2080
    matrix = random_matrix(name, ODD_ROWS, size, seed=4)
    packed = matrix.packed()
    columns = activations(normal(max(counts), size, seed=5), packed)
    expected = gemm("portable", packed, columns, ODD_ROWS)
    assert np.isfinite(expected).all()
    for unit in UNITS[1:]:
        for count in counts:
            found = gemm(unit, packed, columns[:count], ODD_ROWS)
            assert found.tobytes() == expected[:count].tobytes(), (unit, count)


@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if name != "E4M3_128"])
@pytest.mark.parametrize("size", [256, 2304])
def test_residuals_are_multiplied_too_with_the_same_bits_in_every_unit(
    name: str, size: int
) -> None:
    if size > 256 and block_size(name) == 32:
        size = 2080  # a sub-block is left of the last slab
    matrix = random_matrix(name, ODD_ROWS, size, seed=4)
    packed = matrix.packed()
    columns = activations(normal(130, size, seed=5), packed)
    residuals = activations(0.01 * normal(130, size, seed=6), packed)
    expected = gemm("portable", packed, columns, ODD_ROWS, residuals)
    exact = (as_seen(columns) + as_seen(residuals)) @ matrix.exact.astype(np.float64).T
    assert np.linalg.norm(expected - exact) <= 1e-5 * np.linalg.norm(exact)
    for unit in UNITS:
        for count in (1, 3, 5, 8, 16, 33, 40, 130):
            found = gemm(unit, packed, columns[:count], ODD_ROWS, residuals[:count])
            assert found.tobytes() == expected[:count].tobytes(), (unit, count)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("unit", UNITS)
def test_threads_and_forked_children_multiply_with_the_same_bits(unit: str, name: str) -> None:
    """AMX's registers are granted to a process; its threads and children must have them too."""
    packed = random_matrix(name, ODD_ROWS, 2048).packed()
    columns = activations(normal(32, 2048), packed)
    expected = gemm(unit, packed, columns, ODD_ROWS).tobytes()
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(gemm, unit, packed, columns, ODD_ROWS) for _ in range(16)]
        assert all(call.result().tobytes() == expected for call in calls)
    child = os.fork()
    if child == 0:
        os._exit(gemm(unit, packed, columns, ODD_ROWS).tobytes() != expected)
    timer = threading.Timer(60.0, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert status == 0


@pytest.mark.skipif(UNITS[-1] != "amx-int8", reason="this processor has no AMX")
def test_where_the_system_grants_no_tiles_the_other_units_are_left() -> None:
    """Linux refuses a process whose stack for signals has no room for the tile registers."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_SMALL_SIGNAL_STACK],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == UNITS[:-1]


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_rows_gives_the_same_bits(name: str) -> None:
    size = smallest_size(name)
    matrix = random_matrix(name, 50, size, seed=6)
    packed = matrix.packed()
    columns = activations(normal(5, size, seed=1), packed)
    expected = gemm(UNITS[-1], packed, columns, 50)
    for num_rows in (1, 15, 16, 17, 33):
        first_rows = type(matrix)(name, num_rows, size, matrix.blocks[:num_rows])
        for unit in UNITS:
            found = gemm(unit, first_rows.packed(), columns, num_rows)
            assert found.tobytes() == expected[:, :num_rows].tobytes(), (unit, num_rows)
