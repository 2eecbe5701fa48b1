"""The GGUF reader on sound files: against the gguf package, and on what few files use."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixture_files import TINY_BITNET_FILES, TINY_FILES, fixture_file
from tests.loader import gguf_bytes as build
from tests.loader.hostile import memory_at_most

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile


def opened(folder: Path, parts: build.Parts) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(parts.build())
    return GGUFFile(path)


@pytest.mark.parametrize("name", TINY_FILES + TINY_BITNET_FILES)
def test_fixtures_read_as_the_gguf_package_reads_them(name: str) -> None:
    theirs = gguf.GGUFReader(fixture_file(name))
    with GGUFFile(fixture_file(name)) as ours:
        assert list(ours.metadata) == [key for key in theirs.fields if not key.startswith("GGUF.")]
        for key, value in ours.metadata.items():
            assert value == theirs.fields[key].contents()
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert mine.format.name == tensor.tensor_type.name
            assert mine.nbytes == tensor.n_bytes
            weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(mine.to_float32(), weights.reshape(mine.shape))
        assert ours.file_bytes == fixture_file(name).stat().st_size
        assert ours.parts == (fixture_file(name),)


def test_the_layout_of_version_2_is_read_too(tmp_path: Path) -> None:
    file = opened(tmp_path, build.Parts([build.unsigned("a.b", 7)], version=2))
    assert file.metadata.integer("a.b") == 7


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "version 1; quire reads 2 and 3"), (4, "version 4"), (3 << 24, "big endian")],
)
def test_other_versions_are_refused(tmp_path: Path, version: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path, build.Parts(version=version))


def test_every_type_of_number_is_read_alone_and_in_arrays(tmp_path: Path) -> None:
    extremes = {
        build.U8: (0, 255),
        build.I8: (-128, 127),
        build.U16: (0, 65535),
        build.I16: (-32768, 32767),
        build.U32: (0, 2**32 - 1),
        build.I32: (-(2**31), 2**31 - 1),
        build.F32: (-0.5, 3.0),
        build.BOOL: (False, True),
        build.U64: (0, 2**64 - 1),
        build.I64: (-(2**63), 2**63 - 1),
        build.F64: (-1e300, 1e-300),
    }
    fields = []
    for kind, values in extremes.items():
        packed = [build.number(kind, value) for value in values]
        fields.append(build.pair(f"array.{kind}", build.ARRAY, build.array(kind, packed)))
        fields += [build.pair(f"{at}.{kind}", kind, raw) for at, raw in enumerate(packed)]
    metadata = opened(tmp_path, build.Parts(fields)).metadata
    for kind, values in extremes.items():
        found = metadata[f"array.{kind}"]
        assert isinstance(found, np.ndarray)
        assert found.tolist() == list(values)
        assert not found.flags.writeable
        for at, value in enumerate(values):
            assert metadata[f"{at}.{kind}"] == value
            assert type(metadata[f"{at}.{kind}"]) is type(value)


def test_arrays_in_arrays_are_read_up_to_four_deep(tmp_path: Path) -> None:
    inner = build.array(build.U8, [b"\1", b"\2"])
    strings = build.array(build.STRING, [build.string("a"), build.string("")])
    nested = build.array(build.ARRAY, [inner, strings, build.array(build.ARRAY, [inner])])
    metadata = opened(tmp_path, build.Parts([build.pair("n", build.ARRAY, nested)])).metadata
    found: Any = metadata["n"]
    assert found[0].tolist() == [1, 2]
    assert found[1] == ("a", "")
    assert found[2][0].tolist() == [1, 2]


def test_tokens_that_are_not_utf_8_keep_their_bytes(tmp_path: Path) -> None:
    tokens = [b"caf\xc3\xa9", b"\xc3", b"\xff\xfe", b""]
    packed = build.array(build.STRING, [build.string(token) for token in tokens])
    metadata = opened(tmp_path, build.Parts([build.pair("t", build.ARRAY, packed)])).metadata
    texts = metadata.texts("t")
    assert texts[0] == "café"
    assert [text.encode("utf-8", "surrogateescape") for text in texts] == tokens


def test_a_string_that_is_not_utf_8_is_an_error_that_names_it(tmp_path: Path) -> None:
    pair = build.pair("general.name", build.STRING, build.string(b"ab\xff"))
    metadata = opened(tmp_path, build.Parts([pair])).metadata
    with pytest.raises(ModelFileError, match=r"'general.name' is not valid UTF-8 at its byte 2"):
        metadata.text("general.name")


def test_opening_does_not_decode_the_vocabulary(tmp_path: Path) -> None:
    tokens = build.array(build.STRING, [build.string(f"token{at}") for at in range(20_000)])
    parts = build.Parts([build.pair("tokens", build.ARRAY, tokens)])
    content = parts.build()
    (tmp_path / "model.gguf").write_bytes(content)
    with memory_at_most(2 * len(content) + 100_000):
        file = GGUFFile(tmp_path / "model.gguf")
    assert file.metadata.texts("tokens")[19_999] == "token19999"


def test_alignment_is_obeyed(tmp_path: Path) -> None:
    weights = np.arange(8, dtype="<f4").tobytes()
    parts = build.Parts(
        [build.unsigned("general.alignment", 4096)],
        [build.tensor_info("w", [4, 2])],
        weights,
        alignment=4096,
    )
    tensor = opened(tmp_path, parts).tensors["w"]
    assert tensor.shape == (2, 4)
    assert tensor.to_float32().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_gaps_between_tensors_are_allowed(tmp_path: Path) -> None:
    infos = [build.tensor_info("b", [1], offset=64), build.tensor_info("a", [2])]
    file = opened(tmp_path, build.Parts((), infos, struct.pack("<2f56x1f", 1, 2, 3)))
    assert list(file.tensors) == ["b", "a"]
    assert file.tensors["b"].to_float32().tolist() == [3]
    assert file.tensors["a"].to_float32().tolist() == [1, 2]


def test_tensors_outlive_their_file_which_is_closed_with_the_last_of_them(tmp_path: Path) -> None:
    def num_open() -> int:
        links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links)

    file = opened(
        tmp_path, build.Parts((), [build.tensor_info("w", [2])], struct.pack("<2f", 1, 2))
    )
    tensor = file.tensors["w"]
    file.close()
    assert len(file.metadata) == len(file.tensors) == 0
    assert tensor.to_float32().tolist() == [1, 2]
    assert num_open() == 1
    del tensor
    assert num_open() == 0


def test_whoever_takes_a_tensors_bytes_has_them_alone() -> None:
    with GGUFFile(fixture_file("tiny/Q4_0.gguf")) as file:
        tensor = file.tensors["output.weight"]
        data = tensor.data
        kept = data.tobytes()
        data[:] = 0
        assert tensor.data.tobytes() == kept


values = st.one_of(
    st.booleans().map(lambda value: (build.BOOL, build.number(build.BOOL, value), value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda v: (build.I64, build.number(build.I64, v), v)),
    st.floats(allow_nan=False).map(lambda v: (build.F64, build.number(build.F64, v), v)),
    st.text().map(lambda value: (build.STRING, build.string(value), value)),
    st.lists(st.text(), max_size=5).map(
        lambda texts: (
            build.ARRAY,
            build.array(build.STRING, [build.string(text) for text in texts]),
            tuple(texts),
        )
    ),
)


@given(st.dictionaries(st.text(min_size=1, max_size=20), values, max_size=8))
@settings(max_examples=100, deadline=None)
def test_metadata_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, tuple[int, bytes, object]]
) -> None:
    written.pop("general.alignment", None)
    written.pop("split.count", None)
    fields = [build.pair(key, kind, packed) for key, (kind, packed, _) in written.items()]
    file = opened(tmp_path_factory.getbasetemp(), build.Parts(fields))
    assert dict(file.metadata) == {key: value for key, (_, _, value) in written.items()}
