"""Safetensors folders: whole, in shards, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from tests.loader.safetensors_bytes import (
    file_bytes,
    packed,
    with_header,
    write_folder,
    write_index,
    write_shards,
)

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.safetensors import SafetensorsFolder
from quire.quant.formats import format_named

EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def weights(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_file_of_floats_is_read(tmp_path: Path, dtype: str) -> None:
    embedding, norm = weights(4, 6), weights(6)
    content = file_bytes({EMBEDDING: embedding, NORM: norm}, dtype)
    with SafetensorsFolder(write_folder(tmp_path, content)) as folder:
        assert list(folder.tensors) == [EMBEDDING, NORM]
        tensor = folder.tensors[EMBEDDING]
        assert tensor.name == EMBEDDING
        assert tensor.shape == (4, 6)
        assert tensor.format.name == dtype
        assert tensor.data.tobytes() == packed(embedding, dtype)
        rounded = format_named(dtype, "").decode(
            np.frombuffer(packed(embedding, dtype), np.uint8).reshape(24, -1)
        )
        assert np.array_equal(tensor.to_float32(), rounded.reshape(4, 6))
        assert folder.file_bytes == len(content)
    assert folder.tensors == {}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        EMBEDDING: weights(3, 2),
        QUERY: weights(2, 2).astype(np.float16),
    }
    write_folder(tmp_path, b"")
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = SafetensorsFolder(tmp_path).tensors
    assert np.array_equal(tensors[EMBEDDING].to_float32(), arrays[EMBEDDING])
    assert np.array_equal(tensors[QUERY].to_float32(), arrays[QUERY])


def test_shards_are_gathered_through_the_index(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {EMBEDDING: weights(4, 2)},
        "model-00002-of-00002.safetensors": {QUERY: weights(2, 2), NORM: weights(2)},
    }
    folder = SafetensorsFolder(write_shards(tmp_path, shards))
    assert sorted(folder.tensors) == sorted([EMBEDDING, QUERY, NORM])
    sizes = [(tmp_path / name).stat().st_size for name in shards]
    assert folder.file_bytes == sum(sizes)


def test_config_and_the_files_beside_the_model_are_found(tmp_path: Path) -> None:
    content = file_bytes({NORM: weights(2)})
    folder = SafetensorsFolder(
        write_folder(tmp_path, content, '{"model_type": "llama", "n": null}')
    )
    assert folder.config.text("model_type") == "llama"
    assert "n" not in folder.config
    assert folder.whole_config == {"model_type": "llama", "n": None}
    assert folder.read_beside("tokenizer.json", 3) is None
    (tmp_path / "tokenizer.json").write_text("{} ")
    assert folder.read_beside("tokenizer.json", 3) == b"{} "
    with pytest.raises(ModelFileError, match=r"tokenizer.json has 3 bytes; quire reads at most 2"):
        folder.read_beside("tokenizer.json", 2)
    (tmp_path / "folder").mkdir()
    assert folder.read_beside("folder", 3) is None


def test_another_type_is_named_with_what_is_supported(tmp_path: Path) -> None:
    header = {QUERY: {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}}
    content = with_header(json.dumps(header).encode(), b"ab")
    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight' has type F8_E5M2; .*BF16"):
        SafetensorsFolder(write_folder(tmp_path, content))


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    header = {NORM: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    with pytest.raises(ModelFileError, match=r"'model.norm.weight' of shape \(0,\) is empty"):
        SafetensorsFolder(write_folder(tmp_path, with_header(json.dumps(header).encode())))


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "a\\b.safetensors", "a.bin"],
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "inside"
    write_shards(folder, {})
    write_index(folder, {NORM: shard})
    (tmp_path / "model.safetensors").write_bytes(file_bytes({NORM: weights(2)}))
    with pytest.raises(ModelFileError, match=r"'model.norm.weight' into .*is not the name"):
        SafetensorsFolder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-00001-of-00001.safetensors": {NORM: weights(2)}})
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00001-of-00001.safetensors: No such file"):
        SafetensorsFolder(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a.safetensors": {NORM: weights(2)}})
    write_index(tmp_path, {NORM: "a.safetensors", EMBEDDING: "a.safetensors"})
    with pytest.raises(ModelFileError, match=r"disagree: tensor 'model.embed.*only in the index"):
        SafetensorsFolder(tmp_path)
    write_shards(tmp_path, {"a.safetensors": {NORM: weights(2), EMBEDDING: weights(2)}})
    write_index(tmp_path, {NORM: "a.safetensors"})
    with pytest.raises(ModelFileError, match=r"disagree: tensor 'model.embed.*not in the index"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "lists no tensors"),
        ([], "weight_map must be an object"),
        ({NORM: 3}, "norm.weight must"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    write_shards(tmp_path, {})
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "config.json does not hold sound JSON"),
        ("[1]", "config.json must hold a JSON object, not list"),
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[" * 100_000, "config.json does not hold sound JSON"),
        ('{"a": ' + "1" * 5000 + "}", "config.json does not hold sound JSON"),
        (" " * (1 << 20) + "{}", "at most 1048576"),
    ],
    ids=["empty", "list", "duplicate", "deep", "long number", "large"],
)
def test_a_broken_config_is_refused(tmp_path: Path, config: str, message: str) -> None:
    write_folder(tmp_path, file_bytes({NORM: weights(2)}), config)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFolder(tmp_path)


def test_a_config_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, file_bytes({NORM: weights(2)}))
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelFileError, match=r"config.json does not hold sound JSON"):
        SafetensorsFolder(tmp_path)


# ---- names; GGUF's own map is the reference
