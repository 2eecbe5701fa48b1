"""Every decoder against the gguf package's, bit for bit."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.cpu.blocks import NEWER, OWN, exact_own, exact_small, random_matrix, sizes
from tests.fixture_files import TINY_BITNET_FILES, TINY_FILES, fixture_file

from quire.core.errors import UnsupportedModelError
from quire.quant.formats import (
    ENCODERS,
    FORMATS,
    Format,
    decode_q6_k,
    encode_q6_k,
    format_named,
    format_of_ggml_type,
)

# bitnet.cpp's own is not gguf's: tests/quant/test_ternary.py has it. Nor are quire's.
OWN_FORMATS = [known for known in FORMATS if known.ggml_type < 0]
GGUF_FORMATS = [known for known in FORMATS if known.name != "I2_S" and known not in OWN_FORMATS]
every_format = pytest.mark.parametrize("block_format", GGUF_FORMATS, ids=lambda known: known.name)

# Where each quantised format keeps its float16 scales and offsets.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ1_M": (),  # in parts: put_iq1_m_scales
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
    "MXFP4": (),  # its scale is a byte that may have any value
    "NVFP4": (),  # as are its scales
    "Q1_0": (0,),
    "Q2_0": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
QUANTISED_BY_GGUF = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)


def kind(block_format: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[block_format.name]


def put_iq1_m_scales(raw: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> None:
    """A nibble each above the group scales of four words."""
    nibbles = scales.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    raw[..., 49::2] = raw[..., 49::2] & 15 | (nibbles << 4).astype(np.uint8)


def decode(raw: npt.NDArray[np.uint8], block_format: Format) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # MXFP4's largest scales times its largest values
        return block_format.decode(raw)


def reference(raw: npt.NDArray[np.uint8], block_format: Format) -> npt.NDArray[np.float32]:
    if block_format.name in ("Q1_0", "Q2_0"):  # the package does not decode them
        return exact_small(block_format.name, raw)
    if block_format.name in ("F32", "F16"):  # the package takes these as arrays of floats
        return raw.view({"F32": "<f4", "F16": "<f2"}[block_format.name]).astype(np.float32)
    with np.errstate(over="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, kind(block_format)), dtype=np.float32)


def assert_bits_equal(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    assert np.array_equal(
        np.ascontiguousarray(ours).view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32)
    )


def random_blocks(block_format: Format, count: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random bytes, which every block may hold, but for scales that a model could have."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (count, block_format.block_bytes), dtype=np.uint8)
    if block_format.is_float:
        values = generator.standard_normal((count, 1)).astype(np.float32)
        packed = gguf.quants.quantize(values, kind(block_format))
        return np.ascontiguousarray(packed).view(np.uint8).reshape(count, block_format.block_bytes)
    for at in HALVES[block_format.name]:
        scale = (0.1 * generator.standard_normal((count, 1))).astype("<f2")
        raw[:, at : at + 2] = scale.view(np.uint8)
    if block_format.name == "IQ1_M":
        put_iq1_m_scales(raw, generator.standard_normal(count).astype(np.float16))
    return raw


@every_format
def test_the_table_agrees_with_gguf_on_numbers_and_sizes(block_format: Format) -> None:
    found = (block_format.ggml_type, block_format.block_size, block_format.block_bytes)
    if block_format.name in NEWER:
        assert found == NEWER[block_format.name]
        return
    number = kind(block_format)
    assert found == (number.value, *gguf.GGML_QUANT_SIZES[number])


@every_format
def test_random_blocks_decode_as_gguf_decodes_them(block_format: Format) -> None:
    raw = random_blocks(block_format, count=512, seed=block_format.ggml_type)
    decoded = decode(raw, block_format)
    assert decoded.shape == (512, block_format.block_size)
    assert_bits_equal(decoded, reference(raw, block_format))


@pytest.mark.parametrize("block_format", OWN_FORMATS, ids=lambda known: known.name)
def test_own_formats_decode_as_they_are_defined(block_format: Format) -> None:
    assert (block_format.block_size, block_format.block_bytes) == sizes(block_format.name)
    blocks = random_matrix(block_format.name, 6, 512).blocks.reshape(-1, block_format.block_bytes)
    assert_bits_equal(decode(blocks, block_format), exact_own(block_format.name, blocks))


def test_own_formats_are_no_types_of_gguf_files() -> None:
    assert {known.name for known in OWN_FORMATS} == set(OWN)
    with pytest.raises(UnsupportedModelError, match=r"I2_S\. Convert"):
        format_of_ggml_type(99, "test")


@pytest.mark.parametrize("name", HALVES)
def test_blocks_decode_alike_whichever_values_their_bytes_take(name: str) -> None:
    """Each byte of a block in turn takes all its 256 values; the others stay."""
    block_format = format_named(name, "test")
    start = random_blocks(block_format, count=1, seed=1)
    halves = [at + byte for at in HALVES[block_format.name] for byte in (0, 1)]
    for at in set(range(block_format.block_bytes)) - set(halves):
        raw = np.repeat(start, 256, axis=0)
        raw[:, at] = np.arange(256)
        assert_bits_equal(decode(raw, block_format), reference(raw, block_format))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_16_bit_floats_widen_exactly(name: str) -> None:
    block_format = format_named(name, "test")
    raw = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    decoded = block_format.decode(raw).ravel()
    theirs = reference(raw, block_format).ravel()
    assert np.array_equal(np.isnan(decoded), np.isnan(theirs))
    assert_bits_equal(decoded[~np.isnan(decoded)], theirs[~np.isnan(theirs)])


@pytest.mark.parametrize("name", QUANTISED_BY_GGUF)
def test_what_gguf_quantises_decodes_as_gguf_decodes_it(name: str) -> None:
    block_format = format_named(name, "test")
    weights = np.random.default_rng(3).standard_normal((16, 512)).astype(np.float32)
    weights[0] = 0.0  # an all-zero block has scale 0
    packed = gguf.quants.quantize(weights, kind(block_format))
    raw = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, block_format.block_bytes)
    decoded = block_format.decode(raw).reshape(weights.shape)
    assert_bits_equal(decoded, reference(raw, block_format).reshape(weights.shape))
    tolerance = {"TQ1_0": 4.0, "TQ2_0": 4.0, "MXFP4": 1.1}.get(name, 0.5)
    assert np.abs(decoded - weights).max() < tolerance


@pytest.mark.parametrize("name", TINY_FILES + TINY_BITNET_FILES)
def test_fixture_tensors_decode_as_gguf_decodes_them(name: str) -> None:
    for tensor in gguf.GGUFReader(fixture_file(name)).tensors:
        block_format = format_of_ggml_type(tensor.tensor_type.value, tensor.name)
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, block_format.block_bytes)
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert_bits_equal(block_format.decode(raw).ravel(), theirs.astype(np.float32).ravel())


def test_decoding_no_blocks_gives_no_weights() -> None:
    for block_format in FORMATS:
        empty = np.empty((0, block_format.block_bytes), dtype=np.uint8)
        assert block_format.decode(empty).shape == (0, block_format.block_size)


def test_formats_are_found_by_name_and_by_number() -> None:
    for block_format in FORMATS:
        assert format_named(block_format.name, "t") is block_format
        if block_format not in OWN_FORMATS:
            assert format_of_ggml_type(block_format.ggml_type, "t") is block_format


def test_an_unsupported_type_is_named_with_its_tensor_and_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.x'.*Q8_1 \(GGUF type 9\).*Q4_K"):
        format_of_ggml_type(9, "blk.0.x")
    with pytest.raises(UnsupportedModelError, match=r"unknown \(GGUF type 4711\)"):
        format_of_ggml_type(4711, "blk.0.x")
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.x' has type I64"):
        format_named("I64", "blk.0.x")


# ---- encoders


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_an_encoder_gives_the_bytes_of_the_reference_quantiser(name: str) -> None:
    block_format = format_named(name, "")
    weights = np.random.default_rng(4).normal(0, 0.1, (64, 256)).astype(np.float32)
    weights[3] = 0
    weights[5, :32] = [0.5, *[127.0] * 31]  # halves are rounded away from zero
    expected = gguf.quants.quantize(weights, kind(block_format)).view(np.uint8)
    found = ENCODERS[name](weights.reshape(-1, block_format.block_size))
    assert np.array_equal(found.ravel(), expected.ravel())


def test_q6_k_is_what_llama_cpp_makes_but_for_ties() -> None:
    """Its sums are added in another order, so that one of two scales that are as good as equal may
    be chosen; the error is the same."""
    same, ours, theirs = [], 0.0, 0.0
    floats, real = (
        {t.name: t for t in gguf.GGUFReader(fixture_file(f"tiny/{name}.gguf")).tensors}
        for name in ("F32", "Q6_K")
    )
    for name, tensor in real.items():
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q6_K:
            weights = np.array(floats[name].data, np.float32).reshape(-1, 256)
            expected = np.array(tensor.data).reshape(-1, 210)
            found = encode_q6_k(weights)
            same.append((found == expected).all(axis=1))
            ours += float(np.square(decode_q6_k(found) - weights).sum())
            theirs += float(np.square(decode_q6_k(expected) - weights).sum())
    assert np.concatenate(same).mean() > 0.95
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_block_of_zeros_and_one_of_a_single_weight_are_kept() -> None:
    weights = np.zeros((2, 256), np.float32)
    weights[1, 100] = -3.5
    for name in ("Q8_0", "Q6_K"):
        block_format = format_named(name, "")
        blocks = ENCODERS[name](weights.reshape(-1, block_format.block_size))
        found = block_format.decode(blocks).reshape(weights.shape)
        assert found == pytest.approx(weights, rel=1e-2)
        assert np.count_nonzero(found) == 1
