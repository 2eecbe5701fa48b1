"""Packing: every weight of every format comes back as the gguf package decodes it."""

import numpy as np
import pytest
from tests.executors.cpu.blocks import (
    BLOCK_FORMATS,
    FORMATS,
    Matrix,
    block_size,
    extreme_matrix,
    hostile_matrix,
    random_matrix,
)

from quire.executors.cpu.native import native


def unpacked(matrix: Matrix) -> np.ndarray:
    out = np.full((matrix.num_rows, matrix.in_size), np.nan, np.float32)
    matrix.packed().unpack(out)
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_weights_come_back_as_the_gguf_package_decodes_them(name: str, num_rows: int) -> None:
    matrix = random_matrix(name, num_rows, 2 * max(block_size(name), 96), seed=4)
    exact = matrix.exact
    assert np.abs(exact).max() > 0
    np.testing.assert_allclose(unpacked(matrix), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_codes_and_scales_at_their_limits_come_back_exactly(name: str, byte: int) -> None:
    matrix = extreme_matrix(name, 3, 512, byte)
    np.testing.assert_array_equal(unpacked(matrix), matrix.exact)


@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if name != "TQ2_0"])
def test_blocks_of_any_bytes_come_back_with_what_is_no_number(name: str) -> None:
    matrix = hostile_matrix(name, 400, 512)
    assert np.isfinite(matrix.exact).all() == (name == "NVFP4")  # whose scales all are numbers
    np.testing.assert_array_equal(unpacked(matrix), matrix.exact)


def test_every_scale_of_mxfp4_comes_back_exactly() -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    matrix = Matrix("MXFP4", 256, 32, blocks)
    assert np.isinf(matrix.exact[255]).any()
    np.testing.assert_array_equal(unpacked(matrix), matrix.exact)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_take_little_more_than_the_file(name: str) -> None:
    matrix = random_matrix(name, 64, 1024)
    grown = matrix.packed().num_bytes / matrix.blocks.nbytes
    # TQ1_0 grows to TQ2_0's size; of eight signs these files keep seven.
    limits = {"TQ1_0": 66 / 54, "IQ2_XXS": 1.07, "IQ2_XS": 1.06}
    assert grown <= limits.get(name, 1.05)
    assert native.packed_bytes(name, 64, 1024) == matrix.packed().num_bytes


def test_blocks_that_do_not_make_the_rows_are_refused() -> None:
    blocks = random_matrix("Q4_K", 2, 512).blocks.ravel()
    with pytest.raises(ValueError, match="a row does not hold whole blocks"):
        native.PackedMatrix("Q4_K", blocks, num_rows=2, in_size=511)
    for rows, size in ((2, 768), (1, 512)):
        with pytest.raises(ValueError, match="the blocks do not make these rows"):
            native.PackedMatrix("Q4_K", blocks, num_rows=rows, in_size=size)
    for rows, size in ((0, 512), (-2, 512), (2, 0), (2, -512), (2**62, 512), (2, 2**62)):
        with pytest.raises(ValueError, match="must be from 1 to"):
            native.PackedMatrix("Q4_K", blocks, num_rows=rows, in_size=size)
        with pytest.raises(ValueError, match="must be from 1 to"):
            native.packed_bytes("Q4_K", rows, size)
    with pytest.raises(ValueError, match="no kernel for the format Q9_9"):
        native.PackedMatrix("Q9_9", blocks, num_rows=2, in_size=512)
