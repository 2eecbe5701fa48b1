"""Ternary codes, packed and unpacked."""

import gguf
import numpy as np
import pytest

from quire.core.errors import ModelFileError
from quire.quant import ternary
from quire.quant.formats import decode_i2_s
from quire.quant.ternary import Codes


def random_codes(rows: int, columns: int, seed: int = 1) -> Codes:
    return np.random.default_rng(seed).integers(0, 3, (rows, columns), dtype=np.uint8)


def test_i2s_bytes_hold_their_codes_as_bitnet_cpp_documents() -> None:
    packed = ternary.pack_i2s(np.arange(128, dtype=np.uint8)[None] % 3)
    for index in range(128):
        assert packed[index % 32] >> (6 - 2 * (index // 32)) & 3 == index % 3


def test_arm_builds_pack_blocks_of_half_the_size() -> None:
    packed = ternary.pack_i2s(np.arange(128, dtype=np.uint8)[None] % 3, ternary.ARM_BLOCK)
    for index in range(128):
        block, place = divmod(index, 64)
        at = 16 * block + place % 16
        assert packed[at] >> (6 - 2 * (place // 16)) & 3 == index % 3


@pytest.mark.parametrize("block", [ternary.X86_BLOCK, ternary.ARM_BLOCK])
def test_i2s_is_unpacked_as_it_was_packed(block: int) -> None:
    codes = random_codes(3, 256)
    assert np.array_equal(ternary.unpack_i2s(ternary.pack_i2s(codes, block), 256, block), codes)


def test_i2s_blocks_decode_to_their_codes() -> None:
    codes = random_codes(2, 256)
    weights = decode_i2_s(ternary.pack_i2s(codes).reshape(-1, 32))
    assert np.array_equal(weights.reshape(2, 256), codes.astype(np.float32) - 1)


def test_a_tail_is_the_scale_and_nothing() -> None:
    tail = ternary.i2s_tail(np.float32(0.25))
    assert tail[:4].view("<f4")[0] == 0.25
    assert len(tail) == 32
    assert not tail[4:].any()


@pytest.mark.parametrize("at", [0, 31, 95])
def test_the_fourth_code_is_refused(at: int) -> None:
    packed = ternary.pack_i2s(random_codes(3, 128))
    ternary.check_codes(packed, "blk.0.attn_q.weight")
    for shift in (0, 2, 4, 6):
        broken = packed.copy()
        broken[at] |= 3 << shift
        with pytest.raises(ModelFileError, match=r"attn_q\.weight holds the ternary code 3"):
            ternary.check_codes(broken, "blk.0.attn_q.weight")


def test_rows_of_four_are_a_quarter_of_the_matrix_apart() -> None:
    codes = random_codes(8, 5)
    packed = sum(codes[2 * i : 2 * i + 2] << (2 * i) for i in range(4))
    for part in range(4):
        rows = ternary.unpack_rows_of_four(np.asarray(packed, np.uint8), part)
        assert np.array_equal(rows, codes[2 * part : 2 * part + 2])


def test_floats_become_the_nearest_of_three() -> None:
    weights = np.array([[0.9, -0.9, 0.2, -0.2], [0.6, -0.6, 0.1, 0.1]], np.float32)
    mean = ternary.mean_size([weights[:1], weights[1:]], weights.size)
    assert mean == pytest.approx(0.45)
    assert ternary.rounded(weights, mean).tolist() == [[2, 0, 1, 1], [2, 0, 1, 1]]


def test_halves_are_rounded_to_even_and_zeros_stay_finite() -> None:
    weights = np.array([[1.0, 1.0, 0.5, 1.5]], np.float32)
    mean = ternary.mean_size([weights], 4)
    assert mean == 1.0
    assert ternary.rounded(weights, mean).tolist() == [[2, 2, 1, 2]]
    zeros = np.zeros((2, 4), np.float32)
    assert ternary.mean_size([zeros], 8) == np.float32(1e-5)
    assert (ternary.rounded(zeros, np.float32(1e-5)) == 1).all()


# ---- llama.cpp's blocks


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_blocks_are_packed_as_the_reference_quantiser_packs_them(name: str) -> None:
    codes = random_codes(64, 256)
    codes[7] = 1  # a block of zeros, which gets a scale of zero
    scale = np.float32(0.3125)
    kind = gguf.GGMLQuantizationType[name]
    expected = gguf.quants.quantize((codes.astype(np.float32) - 1) * scale, kind)
    packed = ternary.pack_tq(codes, ternary.half_scales(codes, scale), name)
    assert np.array_equal(packed, expected)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_blocks_are_unpacked_as_they_were_packed_whatever_their_scales(name: str) -> None:
    codes = random_codes(64, 256)
    scales = np.random.default_rng(2).integers(0, 256, (64, 2), dtype=np.uint8)  # NaN among them
    found, kept = ternary.unpack_tq(ternary.pack_tq(codes, scales, name), name)
    assert np.array_equal(found, codes)
    assert np.array_equal(kept, scales)


def test_every_byte_of_five_digits_gives_them_back() -> None:
    digits = np.stack(np.unravel_index(np.arange(243), (3,) * 5)).astype(np.uint8)
    codes = np.ones((243, 256), np.uint8)
    codes[:, [0, 32, 64, 96, 128]] = digits.T
    scales = np.zeros((243, 2), np.uint8)
    found, _ = ternary.unpack_tq(ternary.pack_tq(codes, scales, "TQ1_0"), "TQ1_0")
    assert np.array_equal(found, codes)
