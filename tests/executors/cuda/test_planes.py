"""Planes hold the weights of the file: reordered, within float16's rounding, and not larger."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.executors.cuda.emulation import decoded  # noqa: E402

from quire.core.errors import UnsupportedModelError  # noqa: E402
from quire.executors.cuda.planes import (  # noqa: E402
    PLANE_FORMATS,
    block_bytes,
    check_supported,
    reorder,
    to_natural_order,
    to_operand_order,
)
from quire.model.dummy import random_blocks  # noqa: E402
from quire.quant.formats import format_named  # noqa: E402

FORMATS = (*PLANE_FORMATS, "BF16", "F16")


def made(format_name: str, rows: int, columns: int, size: float = 0.02) -> tuple[Any, Any]:
    block_format = format_named(format_name, "test")
    raw = random_blocks(block_format, rows * columns, size, np.random.default_rng(7))
    exact = block_format.decode(raw.reshape(-1, block_format.block_bytes))
    return torch.from_numpy(raw), torch.from_numpy(exact.reshape(rows, columns)).to(torch.float64)


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_kernel_decodes_what_the_reference_decodes(format_name: str) -> None:
    raw, exact = made(format_name, 24, 512)
    found = decoded(reorder(format_name, raw, 24, 512))
    error = (found - exact).norm() / exact.norm()
    assert error < 6e-4


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 15, 33])
def test_matrices_of_any_number_of_rows_decode_alike(format_name: str, rows: int) -> None:
    raw, exact = made(format_name, rows, 512)
    found = decoded(reorder(format_name, raw, rows, 512))
    assert (found - exact).norm() / exact.norm() < 6e-4


@pytest.mark.parametrize("rows", [1, 8, 15, 129])
def test_a_blocks_deltas_begin_at_a_multiple_of_16_bytes(rows: int) -> None:
    """The copy engine starts nowhere else along a tensor's last axis."""
    raw, _ = made("Q6_K", rows, 512)
    deltas = reorder("Q6_K", raw, rows, 512).deltas
    assert deltas is not None
    stride = deltas.numel() // 2
    assert stride % 8 == 0 and rows <= stride < rows + 8
    blocks = raw.view(rows, 2, 210)
    for block in range(2):
        wanted = blocks[:, block, 208:].contiguous().view(torch.float16).flatten()
        assert torch.equal(deltas[block * stride : block * stride + rows], wanted)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("size", [1e-4, 30.0])
def test_weights_of_any_size_decode_alike(format_name: str, size: float) -> None:
    raw, exact = made(format_name, 8, 256, size)
    found = decoded(reorder(format_name, raw, 8, 256))
    assert (found - exact).norm() <= 6e-4 * exact.norm()  # NVFP4 has none of the smallest


@pytest.mark.parametrize(
    ("format_name", "columns"),
    [
        *((name, 160) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")),
        *(("BF16", 160), ("U4_128", 128), ("I8_128", 128), ("E4M3_128", 128)),
        *(("NVFP4", 192), ("NVFP4_128", 128), ("Q1_0", 128), ("Q2_0", 64)),
    ],
)
def test_columns_that_do_not_fill_a_block_are_followed_by_zeros(
    format_name: str, columns: int
) -> None:
    raw, exact = made(format_name, 8, columns)
    found = decoded(reorder(format_name, raw, 8, columns))
    assert found.shape == (8, 256)
    assert not found[:, columns:].any()
    assert (found[:, :columns] - exact).norm() / exact.norm() < 6e-4


EXPANDED = {"Q3_K": 114 / 110, "IQ3_S": 112 / 110, "TQ1_0": 66 / 54}  # words of 32 bits
EXPANDED |= {"Q2_0": 80 / 72}  # a float16 for 32 weights
EXPANDED |= {"NVFP4_128": 148 / 152}  # two float16 for two float32
EXPANDED |= {"U4_128": 176 / 144, "I8_128": 272 / 264}  # as Q5_0 and Q8_0


@pytest.mark.parametrize("format_name", PLANE_FORMATS)
def test_planes_take_no_more_memory_than_the_file(format_name: str) -> None:
    raw, _ = made(format_name, 16, 512)
    wanted = raw.numel() * EXPANDED.get(format_name, 1)
    found = reorder(format_name, raw, 16, 512).num_bytes
    assert found == pytest.approx(wanted, rel=1e-12)
    taken, kept = block_bytes(format_name)
    assert found * kept == raw.numel() * taken  # what memory is planned with


def test_mxfp4_is_decoded_without_rounding() -> None:
    """Every code with every scale down to 2**-20 of the largest; 2**-30 of it and less is zero."""
    scales = np.array([[127 - place * 4] for place in range(8)], np.uint8)
    codes = np.arange(16, dtype=np.uint8) * 17
    raw = np.concatenate([scales, np.tile(codes, (8, 1))], axis=1)
    exact = format_named("MXFP4", "test").decode(raw).reshape(1, 256)
    found = decoded(reorder("MXFP4", torch.from_numpy(raw.reshape(-1)), 1, 256))
    assert torch.equal(found[:, :192], torch.from_numpy(exact[:, :192]).to(torch.float64))
    raw[-1, 0] = 127 - 31
    assert not decoded(reorder("MXFP4", torch.from_numpy(raw.reshape(-1)), 1, 256))[:, 224:].any()


def nvfp4_of_all_scales() -> tuple[Any, Any]:
    """Every scale beside every code: bytes [128, 2 * 4 + 2 * 32] and weights [64, 256]."""
    scales = np.arange(256, dtype=np.uint8).repeat(2).reshape(128, 4)
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (128, 2))
    raw = np.concatenate([scales, codes], axis=1)
    exact = format_named("NVFP4", "test").decode(raw)
    return raw, torch.from_numpy(exact.reshape(32, 256)).to(torch.float64)


def test_nvfp4_is_decoded_without_rounding() -> None:
    raw, exact = nvfp4_of_all_scales()
    found = decoded(reorder("NVFP4", torch.from_numpy(raw.reshape(-1)), 32, 256))
    assert torch.equal(found, exact)
    assert float(exact.abs().max()) == 480 * 6 and exact[0, 1] == 0


@pytest.mark.parametrize("ratio", [1.0, 2.0**-5, 0.3])
def test_nvfp4_times_a_float32_is_rounded_where_they_differ(ratio: float) -> None:
    """Blocks of the largest float32 have no error but its own; others that of three float16."""
    raw, exact = nvfp4_of_all_scales()
    pairs = raw.reshape(64, 2, 36)
    factors = np.full((64, 1), 0.0123, "<f4")
    factors[1::2] *= ratio
    parts = [
        factors.view(np.uint8),
        *(pairs[..., at].reshape(64, -1) for at in (slice(4), slice(4, 36))),
    ]
    whole = torch.from_numpy(np.concatenate(parts, axis=1).reshape(-1))
    found = decoded(reorder("NVFP4_128", whole, 32, 256)).view(64, 128)
    wanted = exact.view(64, 128) * torch.from_numpy(factors.astype(np.float64))
    assert torch.allclose(found[0::2], wanted[0::2], rtol=1e-12, atol=0)
    error = 3 * 2**-11 if ratio == 0.3 else 1e-12
    assert torch.allclose(found[1::2], wanted[1::2], rtol=error, atol=0.0123 * 2**-18)


def test_q1_0_is_decoded_without_rounding() -> None:
    raw, exact = made("Q1_0", 24, 512)
    assert torch.equal(decoded(reorder("Q1_0", raw, 24, 512)), exact)


def test_e4m3_with_any_float32_scale_is_rounded_once() -> None:
    """Scales of all bits, the smallest a 4096th of the largest; every code but those of NaN."""
    generator = np.random.default_rng(5)
    scales = 2.0 ** generator.uniform(-12, 0, (64, 1)) * 0.01
    codes = np.tile(np.arange(128, dtype=np.uint8), (64, 1))
    codes[1::2] |= 0x80
    codes[codes & 0x7F == 0x7F] = 0
    raw = np.concatenate([scales.astype("<f4").view(np.uint8), codes], axis=1)
    exact = format_named("E4M3_128", "test").decode(raw).reshape(8, 1024).astype(np.float64)
    planes = reorder("E4M3_128", torch.from_numpy(raw.reshape(-1)), 8, 1024)
    scaled = exact * 2.0**-planes.exponent
    assert np.abs(scaled).max() > 2**14
    wanted = scaled.astype(np.float16).astype(np.float64)
    found = decoded(planes).numpy() * 2.0**-planes.exponent
    assert (found == wanted).mean() > 0.995  # the others lie between two float16
    assert (np.abs(found - scaled) <= np.abs(scaled) * 2**-10.99 + 2**-25).all()


@pytest.mark.parametrize("format_name", ["U4_128", "I8_128"])
def test_scales_of_more_bits_than_a_float16_are_refused(format_name: str) -> None:
    raw, _ = made(format_name, 4, 384)
    blocks = raw.view(12, -1)
    reorder(format_name, raw, 4, 384)
    blocks[5, :4] = torch.tensor([1 / 3]).view(torch.uint8)
    with pytest.raises(UnsupportedModelError, match="scales of more bits than a float16"):
        reorder(format_name, raw, 4, 384)


def test_operand_order_and_back_is_where_it_began() -> None:
    x = torch.arange(512)
    assert torch.equal(to_natural_order(to_operand_order(x)), x)
    assert to_operand_order(x)[:4].tolist() == [0, 1, 32, 33]  # lanes 0 and 1 of the first step


def test_formats_without_planes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight has format I2_S"):
        check_supported("I2_S", "blk.0.ffn_up.weight")
