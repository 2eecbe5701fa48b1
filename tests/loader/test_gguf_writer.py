"""What the writer writes, our reader and the reference reader read back."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.core.errors import ModelFileError
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import Field, write_gguf
from quire.loader.tensor import Tensor
from quire.quant.formats import format_named

FIELDS: dict[str, Field] = {
    "general.architecture": "llama",
    "text": "größer ✓",
    "yes": True,
    "small": 7,
    "negative": -3,
    "large": 1 << 40,
    "very.negative": -(1 << 40),
    "number": 0.5,
    "numbers": [1.0, 2.5],
    "integers": [1, 2, 3],
    "words": ["a", "", "ü"],
}


def some_tensors() -> list[Tensor]:
    rng = np.random.default_rng(3)
    sizes = [("odd.bytes", (3,), "F32", 12), ("blocks", (2, 64), "Q8_0", 136)]
    sizes += [("halves", (2, 3, 5), "F16", 60), ("last", (1,), "F32", 4)]
    return [
        Tensor(name, shape, format_named(kind, name), rng.integers(0, 64, size, dtype=np.uint8))
        for name, shape, kind, size in sizes
    ]


def test_our_reader_reads_it_back(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_gguf(tmp_path / "m.gguf", FIELDS, tensors)
    with GGUFFile(tmp_path / "m.gguf") as file:
        for key, value in FIELDS.items():
            found = file.metadata[key]
            plain = found.tolist() if isinstance(found, np.ndarray) else found
            assert plain == (tuple(value) if key == "words" else value), key  # type: ignore[arg-type]
        assert list(file.tensors) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            found = file.tensors[tensor.name]
            assert (found.shape, found.format) == (tensor.shape, tensor.format)
            assert np.array_equal(found.data, tensor.data)


def test_the_reference_reader_reads_it_back(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_gguf(tmp_path / "m.gguf", FIELDS, tensors)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in FIELDS.items():
        assert reader.fields[key].contents() == value
    assert [tensor.name for tensor in reader.tensors] == [tensor.name for tensor in tensors]
    for found, tensor in zip(reader.tensors, tensors, strict=True):
        assert found.shape.tolist() == list(reversed(tensor.shape))
        assert found.tensor_type == tensor.format.ggml_type
        assert np.array_equal(found.data.view(np.uint8).reshape(-1), tensor.data)


def test_metadata_has_the_types_other_readers_ask_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", FIELDS, [])
    types = {key: field.types for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    kinds = gguf.GGUFValueType
    assert types["small"] == [kinds.UINT32]
    assert types["number"] == [kinds.FLOAT32]
    assert types["yes"] == [kinds.BOOL]
    assert types["words"] == [kinds.ARRAY, kinds.STRING]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (1 << 64, "takes more than 64 bits"),
        ([1, "a"], "values of one type"),
        ([], "values of one type"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, value: Field, complaint: str
) -> None:
    with pytest.raises(ModelFileError, match=f"'key'.*{complaint}"):
        write_gguf(tmp_path / "m.gguf", {"key": value}, [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot write .*m\.gguf"):
        write_gguf(tmp_path / "absent" / "m.gguf", {}, [])


def test_a_file_in_its_place_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("something else")
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, some_tensors())
    assert len(GGUFFile(tmp_path / "m.gguf").tensors) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
