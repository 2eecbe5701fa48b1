"""GGUF models that were split into parts."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.loader import gguf_bytes as build

from quire.core.errors import ModelFileError
from quire.loader.gguf import GGUFFile


def part(
    number: int, names: str, *, count: int = 3, total: int = 3, extra: tuple[bytes, ...] = ()
) -> bytes:
    """Part `number` (from 0) with one-weight tensors of these letters."""
    fields = [
        *extra,
        build.unsigned("split.no", number, build.U16),
        build.unsigned("split.count", count, build.U16),
        build.unsigned("split.tensors.count", total, build.I32),
    ]
    infos = [build.tensor_info(name, [1], offset=32 * at) for at, name in enumerate(names)]
    data = b"".join(struct.pack("<f28x", ord(name)) for name in names)
    return build.Parts(fields, infos, data).build()


def write(folder: Path, *parts: bytes) -> Path:
    for at, content in enumerate(parts, 1):
        (folder / f"m-{at:05d}-of-{len(parts):05d}.gguf").write_bytes(content)
    return folder / f"m-00001-of-{len(parts):05d}.gguf"


def test_parts_make_one_model(tmp_path: Path) -> None:
    name = build.pair("general.name", build.STRING, build.string("whole"))
    first = write(tmp_path, part(0, "", extra=(name,)), part(1, "ab"), part(2, "c"))
    with GGUFFile(first) as file:
        assert list(file.tensors) == ["a", "b", "c"]
        assert file.tensors["b"].to_float32().tolist() == [ord("b")]
        assert file.metadata.text("general.name") == "whole"
        assert len(file.parts) == 3
        assert file.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_single_part_is_a_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(part(0, "a", count=1, total=1))
    assert list(GGUFFile(path).tensors) == ["a"]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), part(1, "b"), part(2, "c"))
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003.gguf is not beside it: fetch all"):
        GGUFFile(first)


def test_opening_another_part_names_the_first(tmp_path: Path) -> None:
    write(tmp_path, part(0, "a"), part(1, "b"), part(2, "c"))
    with pytest.raises(ModelFileError, match=r"is part 2 of 3: open the first, m-00001-of-00003"):
        GGUFFile(tmp_path / "m-00002-of-00003.gguf")


def test_a_first_part_of_another_name_says_how_to_name_it(tmp_path: Path) -> None:
    renamed = write(tmp_path, part(0, "a"), part(1, "b"), part(2, "c")).rename(tmp_path / "x.gguf")
    with pytest.raises(ModelFileError, match=r"must be named x-00001-of-00003.gguf"):
        GGUFFile(renamed)


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), part(2, "c"), part(1, "b"))
    with pytest.raises(ModelFileError, match=r"split.no and split.count must be 1 and 3, got 2"):
        GGUFFile(first)


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), part(1, "b", count=4), part(2, "c"))
    with pytest.raises(ModelFileError, match=r"must be 1 and 3, got 1 and 4"):
        GGUFFile(first)


def test_a_part_that_is_no_part_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), build.Parts().build(), part(2, "c"))
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003.gguf: split.no is missing"):
        GGUFFile(first)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), part(1, "b"), part(2, "b"))
    with pytest.raises(ModelFileError, match=r"m-00003.*'b' is in another part too"):
        GGUFFile(first)


def test_the_number_of_tensors_must_be_right(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a", total=4), part(1, "b"), part(2, "c"))
    with pytest.raises(ModelFileError, match=r"split.tensors.count is 4, but the 3 parts hold 3"):
        GGUFFile(first)


def test_a_broken_part_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, part(0, "a"), part(1, "b"), part(2, "c")[:-30])
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003.gguf: tensor 'c' ends at byte"):
        GGUFFile(first)


def test_what_the_gguf_package_splits_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    arrays = {f"t{at}": np.full((2, 3), at, dtype=np.float32) for at in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m-00001-of-00003.gguf") as file:
        assert file.metadata.text("general.architecture") == "llama"
        assert list(file.tensors) == list(arrays)
        for name, array in arrays.items():
            assert np.array_equal(file.tensors[name].to_float32(), array)
