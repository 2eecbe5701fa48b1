"""GGUF files that are cut, mutated, or built to lie."""

import os
import random
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixture_files import fixture_file
from tests.loader import gguf_bytes as build
from tests.loader.hostile import memory_at_most, survives, tracing

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile

MUTATIONS = 10_000
HEADER_BYTES = 1856  # of tiny/Q4_0.gguf: where its tensors begin
EDGES = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of a sound file, to be spoilt."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(fixture_file("tiny/Q4_0.gguf"), path)
    return path


def test_a_file_cut_at_any_byte_of_its_header_is_refused(copy: Path) -> None:
    _assert_refused_at(copy, reversed(range(HEADER_BYTES)))


def test_a_file_cut_anywhere_else_is_refused(copy: Path) -> None:
    places = random.Random(1).sample(range(HEADER_BYTES, copy.stat().st_size), 1000)
    _assert_refused_at(copy, sorted(places, reverse=True))


def _assert_refused_at(copy: Path, lengths: Iterable[int]) -> None:
    with tracing():
        for length in lengths:
            os.truncate(copy, length)
            with pytest.raises(ModelFileError, match=r"truncated|empty"), memory_at_most(100_000):
                GGUFFile(copy)


def test_random_mutations_give_typed_errors_or_open(copy: Path) -> None:
    """Bytes, runs of bytes and whole numbers change, mostly in the header, where it hurts."""
    generator = random.Random(2)
    size = copy.stat().st_size
    opened = 0
    with tracing(), copy.open("r+b", buffering=0) as file:
        for _ in range(MUTATIONS):
            undo = [_mutate(file.fileno(), generator, size) for _ in range(generator.randint(1, 3))]
            opened += survives(GGUFFile, copy, 2 * size)
            for at, original in reversed(undo):
                os.pwrite(file.fileno(), original, at)
    assert copy.read_bytes() == fixture_file("tiny/Q4_0.gguf").read_bytes()
    assert MUTATIONS // 20 < opened < MUTATIONS * 19 // 20  # the test saw both outcomes


def _mutate(file: int, generator: random.Random, size: int) -> tuple[int, bytes]:
    """Change a place of the file; where, and what was there."""
    at = generator.randrange(HEADER_BYTES if generator.random() < 0.9 else size)
    new = generator.choice(
        (
            generator.randbytes(1),
            generator.randbytes(generator.randint(1, 16)),
            struct.pack("<Q", generator.choice(EDGES)),
            struct.pack("<I", generator.randrange(64)),
        )
    )[: size - at]
    original = os.pread(file, len(new), at)
    os.pwrite(file, new, at)
    return at, original


F32_BYTES = struct.pack("<8f", *range(8))
W = build.tensor_info("w", [8])

LIES = {
    "another magic": (build.Parts(magic=b"GGML"), r"not a GGUF file: it begins with b'GGML'"),
    "too many fields": (build.Parts(num_fields=2**63), r"metadata says it has 9223372036854775808"),
    "too many tensors": (build.Parts(num_tensors=2**64 - 1), r"list of tensors says it has"),
    "fields past the end": (build.Parts(num_fields=1), r"metadata says it has 1 items"),
    "a key of no bytes": (build.Parts([build.unsigned("", 1)]), r"key of metadata field 0 must"),
    "a key too long": (
        build.Parts([build.unsigned("k" * 1025, 1)]),
        r"key of metadata field 0 must have 1 to 1024 bytes, got 1025",
    ),
    "a key that is not UTF-8": (
        build.Parts([build.pair(b"k\xff", build.U8, b"\0")]),
        r"key of metadata field 0 is not valid UTF-8: b'k\\xff'",
    ),
    "a key twice": (
        build.Parts([build.unsigned("k", 1), build.unsigned("k", 1)]),
        r"metadata field 'k' appears twice",
    ),
    "an unknown value type": (
        build.Parts([build.pair("k", 13, bytes(8))]),
        r"'k' has value type 13, which GGUF does not know",
    ),
    "an unknown element type": (
        build.Parts([build.pair("k", build.ARRAY, build.array(99, [bytes(8)]))]),
        r"'k' has value type 99",
    ),
    "a boolean of 2": (
        build.Parts([build.pair("k", build.BOOL, b"\2")]),
        r"'k' must be true or false",
    ),
    "a boolean of 2 in an array": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.BOOL, [b"\0", b"\2"]))]),
        r"'k' must be true or false",
    ),
    "a string past the end": (
        build.Parts([build.pair("k", build.STRING, struct.pack("<Q", 2**62))]),
        r"'k' takes 4611686018427387904 bytes at byte 45",
    ),
    "an array of numbers past the end": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.U64, [], 2**61))]),
        r"'k' takes 18446744073709551616 bytes",
    ),
    "an array of strings past the end": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.STRING, [], 2**61))]),
        r"'k' says it has 2305843009213693952 items",
    ),
    "a string in an array past the end": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.STRING, [b"\xff" * 8]))]),
        r"'k' takes \d+ bytes",
    ),
    "a string in an array past what an address can be, and one after it": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.STRING, [b"\xff" * 8] * 2))]),
        r"'k' takes \d+ bytes",
    ),
    "an array of arrays past the end": (
        build.Parts([build.pair("k", build.ARRAY, build.array(build.ARRAY, [], 2**61))]),
        r"'k' says it has 2305843009213693952 items",
    ),
    "arrays nested too deep": (
        build.Parts([build.pair("k", build.ARRAY, struct.pack("<IQ", build.ARRAY, 1) * 1000)]),
        r"'k' nests arrays more than 4 deep",
    ),
    "an alignment of 0": (
        build.Parts([build.unsigned("general.alignment", 0)]),
        r"general.alignment must be an integer of at least 1, got 0",
    ),
    "an odd alignment": (
        build.Parts([build.unsigned("general.alignment", 48)]),
        r"general.alignment must be a power of two, got 48",
    ),
    "an alignment in words": (
        build.Parts([build.pair("general.alignment", build.STRING, build.string("32"))]),
        r"general.alignment must be an integer of at least 1, got '32'",
    ),
    "an alignment beyond the file": (
        build.Parts([build.unsigned("general.alignment", 2**31)], [W], F32_BYTES),
        r"'w' ends at byte 2147483680",
    ),
    "a tensor twice": (build.Parts((), [W, W], F32_BYTES), r"'w' appears twice"),
    "a name too long": (
        build.Parts((), [build.tensor_info("w" * 65, [8])], F32_BYTES),
        r"name of tensor 0 must have 1 to 64 bytes, got 65",
    ),
    "a name that is not UTF-8": (
        build.Parts((), [build.tensor_info(b"\xc3", [8])], F32_BYTES),
        r"name of tensor 0 is not valid UTF-8",
    ),
    "no axes": (build.Parts((), [build.tensor_info("w", [])]), r"'w' must have 1 to 4 axes, got 0"),
    "five axes": (
        build.Parts((), [build.tensor_info("w", [1] * 5)], F32_BYTES),
        r"'w' must have 1 to 4 axes, got 5",
    ),
    "an empty tensor": (
        build.Parts((), [build.tensor_info("w", [4, 0])], F32_BYTES),
        r"'w' of shape \(0, 4\) takes 0 bytes",
    ),
    "a size that overflows 64 bits": (
        build.Parts((), [build.tensor_info("w", [2**32, 2**32, 2**32, 2**32])], F32_BYTES),
        r"'w' of shape .* takes 1361129467683753853853498429727072845824 bytes",
    ),
    "a size that overflows to something small": (
        build.Parts((), [build.tensor_info("w", [2**62 + 2])], F32_BYTES),
        r"'w' of shape .* takes 18446744073709551624 bytes",
    ),
    "rows that do not fill blocks": (
        build.Parts((), [build.tensor_info("w", [8, 4], ggml_type=2)], bytes(64)),
        r"'w' has rows of 8 weights, which do not fill Q4_0's blocks of 32",
    ),
    "a misaligned tensor": (
        build.Parts((), [build.tensor_info("w", [8], offset=4)], bytes(64)),
        r"'w' is at offset 4, no multiple of the alignment 32",
    ),
    "overlapping tensors": (
        build.Parts(
            (), [build.tensor_info("v", [9]), build.tensor_info("w", [8], offset=32)], bytes(64)
        ),
        r"'w' overlaps the tensor before it",
    ),
    "tensors in one place": (
        build.Parts((), [W, build.tensor_info("v", [8])], F32_BYTES),
        r"'v' overlaps the tensor before it",
    ),
    "an offset past the end": (
        build.Parts((), [build.tensor_info("w", [8], offset=2**64 - 32)], F32_BYTES),
        r"'w' ends at byte \d+, but the file has",
    ),
    "a tensor that ends past the end": (
        build.Parts((), [W], F32_BYTES[:-1]),
        r"'w' ends at byte 96, but the file has 95",
    ),
    "too many parts": (
        build.Parts([build.unsigned("split.count", 513)]),
        r"split.count must be an integer from 0 to 512, got 513",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name(tmp_path: Path, lie: str) -> None:
    parts, message = LIES[lie]
    path = tmp_path / "model.gguf"
    path.write_bytes(parts.build())
    with pytest.raises(ModelFileError, match=message), memory_at_most(100_000):
        GGUFFile(path)


def test_an_unknown_tensor_type_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build.Parts((), [build.tensor_info("w", [8], ggml_type=15)]).build())
    with pytest.raises(UnsupportedModelError, match=r"'w' has type Q8_K \(GGUF type 15\).*TQ2_0"):
        GGUFFile(path)


def test_many_tiny_fields_or_tensors_do_not_multiply_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    fields = [build.pair(f"{at:x}", build.U8, b"\0") for at in range(100_000)]
    path.write_bytes(build.Parts(fields).build())
    with pytest.raises(ModelFileError, match="100000 fields"), memory_at_most(100_000):
        GGUFFile(path)
    tensors = [build.tensor_info(f"{at:x}", [1], offset=32 * at) for at in range(20_000)]
    path.write_bytes(build.Parts((), tensors).build())
    with pytest.raises(ModelFileError, match="20000 tensors"), memory_at_most(100_000):
        GGUFFile(path)


def test_arrays_in_arrays_are_counted(tmp_path: Path) -> None:
    empty = struct.pack("<IQ", build.U8, 0)
    inner = [struct.pack("<IQ", build.ARRAY, 300) + empty * 300] * 300
    outer = build.array(build.ARRAY, inner)
    path = tmp_path / "model.gguf"
    path.write_bytes(build.Parts([build.pair("k", build.ARRAY, outer)]).build())
    with pytest.raises(ModelFileError, match="'k' holds more than 65536 arrays"):
        GGUFFile(path)


def test_a_sparse_giant_of_a_string_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    giant = build.string("k") + struct.pack("<IQ", build.STRING, 1 << 35)
    path.write_bytes(build.Parts([giant]).build())
    os.truncate(path, 1 << 36)
    with pytest.raises(ModelFileError, match="reads at most 268435456"), memory_at_most(200_000):
        GGUFFile(path)
    many = struct.pack("<IQ", build.STRING, 2) + struct.pack("<Q", 1 << 34)
    path.write_bytes(build.Parts([build.pair("k", build.ARRAY, many)]).build())
    os.truncate(path, 1 << 36)
    with pytest.raises(ModelFileError, match="reads at most 268435456"), memory_at_most(200_000):
        GGUFFile(path)


def test_a_header_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    """Strings and numbers that lie across the places at which more of the file is read."""
    texts = ["x" * (at * 7919 % 3001) for at in range(300)]
    strings = build.array(build.STRING, [build.string(text) for text in texts])
    numbers = build.array(build.U32, [struct.pack("<I", at) for at in range(70_000)])
    fields = [
        build.pair("texts", build.ARRAY, strings),
        build.pair("numbers", build.ARRAY, numbers),
        build.pair("text", build.STRING, build.string("y" * 900_000)),
        build.unsigned("last", 5),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(build.Parts(fields, [build.tensor_info("w", [1])], b"\0" * 4).build())
    with GGUFFile(path) as file:
        assert list(file.metadata.texts("texts")) == texts
        assert file.metadata.integers("numbers") == tuple(range(70_000))
        assert file.metadata.text("text") == "y" * 900_000
        assert file.metadata.integer("last") == 5


def _number(edges: tuple[int, ...], high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 40), st.sampled_from(edges), st.integers(0, high))


long = _number(EDGES, 2**64 - 1)
short = _number((2**31, 2**32 - 1), 2**32 - 1)
raw_strings = st.one_of(
    st.binary(max_size=12).map(build.string),
    st.builds(lambda length, raw: struct.pack("<Q", length) + raw, long, st.binary(max_size=12)),
)
arrays = st.recursive(
    st.builds(
        lambda kind, count, raw: struct.pack("<IQ", kind, count) + raw,
        st.integers(0, 13),
        long,
        st.binary(max_size=40),
    ),
    lambda inner: st.lists(inner, max_size=3).map(lambda inside: build.array(build.ARRAY, inside)),
    max_leaves=8,
)
fields = st.builds(
    lambda key, kind, value: key + struct.pack("<I", kind) + value,
    raw_strings,
    short,
    st.one_of(st.binary(max_size=16), raw_strings, arrays),
)
array_fields = arrays.map(lambda value: build.pair("k", build.ARRAY, value))
well_known = st.builds(
    lambda key, value: build.unsigned(key, value, build.U64),
    st.sampled_from(["general.alignment", "split.count", "split.no"]),
    long,
)
infos = st.builds(
    lambda name, axes, kind, offset: build.tensor_info(name, axes, kind, offset),
    st.sampled_from(["a", "b", "c"]),
    st.lists(long, max_size=5),
    st.integers(0, 40),
    long,
)
files = st.builds(
    build.Parts,
    st.lists(st.one_of(fields, array_fields, well_known), max_size=4),
    st.lists(infos, max_size=4),
    st.binary(max_size=256),
    version=st.sampled_from([2, 3]),
    num_fields=st.one_of(st.none(), long),
    num_tensors=st.one_of(st.none(), long),
)


@given(files)
@settings(max_examples=500, deadline=None)
def test_headers_of_any_shape_give_typed_errors_or_open(
    tmp_path_factory: pytest.TempPathFactory, parts: build.Parts
) -> None:
    path = tmp_path_factory.getbasetemp() / "model.gguf"
    path.write_bytes(parts.build())
    survives(GGUFFile, path, limit=100_000)
