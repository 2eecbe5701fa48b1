"""Tensors: unpacking whole, by rows, and in pieces."""

import numpy as np
import pytest
from tests.fixture_files import fixture_file

from quire.loader import tensor as tensor_module
from quire.loader.gguf import GGUFFile
from quire.loader.tensor import Tensor
from quire.quant.formats import format_named


def test_rows_are_those_of_the_whole() -> None:
    with GGUFFile(fixture_file("tiny/Q4_K_M.gguf")) as file:
        for tensor in file.tensors.values():
            if len(tensor.shape) < 2:
                continue
            whole = tensor.to_float32()
            assert whole.shape == tensor.shape
            assert np.array_equal(tensor.rows_float32(3, 17), whole[3:17])
            assert tensor.rows_float32(5, 5).shape == (0, tensor.shape[1])
            assert np.array_equal(tensor.rows_float32(0, tensor.shape[0]), whole)


def test_decoding_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile(fixture_file("tiny/Q6_K.gguf")) as file:
        tensor = file.tensors["output.weight"]
        whole = tensor.to_float32()
        monkeypatch.setattr(tensor_module, "_WEIGHTS_AT_ONCE", 3 * 256)
        assert np.array_equal(tensor.to_float32(), whole)


def test_sizes_are_those_of_the_packed_weights() -> None:
    with GGUFFile(fixture_file("tiny/Q4_0.gguf")) as file:
        tensor = file.tensors["blk.0.ffn_down.weight"]
    assert tensor.shape == (256, 512)
    assert tensor.num_weights == 256 * 512
    assert tensor.nbytes == 256 * 512 // 32 * 18


def test_rows_of_an_array_of_three_axes_are_matrices() -> None:
    weights = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    tensor = Tensor("t", (2, 3, 4), format_named("F32", "t"), weights.view(np.uint8).ravel())
    assert np.array_equal(tensor.rows_float32(1, 2), weights[1:])


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 4), (2, 1)])
def test_rows_that_are_not_there_are_an_error(start: int, stop: int) -> None:
    tensor = Tensor("t", (3, 1), format_named("F32", "t"), np.zeros(12, dtype=np.uint8))
    with pytest.raises(IndexError, match="rows 0 to 3"):
        tensor.rows_float32(start, stop)


def test_a_vector_has_no_rows() -> None:
    tensor = Tensor("t", (3,), format_named("F32", "t"), np.zeros(12, dtype=np.uint8))
    with pytest.raises(IndexError, match="has no rows"):
        tensor.rows_float32(0, 1)


def test_infinite_scales_decode_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    block = np.zeros(18, dtype=np.uint8)
    block[:2] = np.array([np.inf], dtype="<f2").view(np.uint8)
    block[2:] = 0x88  # zeros: infinity times zero is not a number
    assert np.isnan(Tensor("t", (32,), format_named("Q4_0", "t"), block).to_float32()).all()
    assert not recwarn.list
