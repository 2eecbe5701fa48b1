"""Safetensors folders: whole, in shards, what is refused; Hugging Face's tensor names in ours."""

import json
from pathlib import Path
from typing import Any

import gguf
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
from quire.loader.safetensors import SafetensorsFolder, from_hugging_face
from quire.quant.formats import format_named

EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def weights(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_file_of_floats_is_read_under_our_names(tmp_path: Path, dtype: str) -> None:
    embedding, norm = weights(4, 6), weights(6)
    content = file_bytes({EMBEDDING: embedding, NORM: norm}, dtype)
    with SafetensorsFolder(write_folder(tmp_path, content)) as folder:
        assert list(folder.tensors) == ["token_embd.weight", "output_norm.weight"]
        tensor = folder.tensors["token_embd.weight"]
        assert tensor.name == "token_embd.weight"
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
    assert np.array_equal(tensors["token_embd.weight"].to_float32(), arrays[EMBEDDING])
    assert np.array_equal(tensors["blk.0.attn_q.weight"].to_float32(), arrays[QUERY])


def test_shards_are_gathered_through_the_index(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {EMBEDDING: weights(4, 2)},
        "model-00002-of-00002.safetensors": {QUERY: weights(2, 2), NORM: weights(2)},
    }
    folder = SafetensorsFolder(write_shards(tmp_path, shards))
    assert sorted(folder.tensors) == [
        "blk.0.attn_q.weight",
        "output_norm.weight",
        "token_embd.weight",
    ]
    sizes = [(tmp_path / name).stat().st_size for name in shards]
    assert folder.file_bytes == sum(sizes)


def test_derived_tables_are_left_out(tmp_path: Path) -> None:
    names = {NORM: weights(2), "model.layers.0.self_attn.rotary_emb.inv_freq": weights(1)}
    folder = SafetensorsFolder(write_folder(tmp_path, file_bytes(names)))
    assert list(folder.tensors) == ["output_norm.weight"]


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


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    content = file_bytes({"model.layers.0.mlp.experts.3.w1.weight": weights(2)})
    with pytest.raises(UnsupportedModelError, match=r"'model.layers.0.mlp.experts.3.w1.weight'"):
        SafetensorsFolder(write_folder(tmp_path, content))


def test_another_type_is_named_with_what_is_supported(tmp_path: Path) -> None:
    header = {QUERY: {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}
    content = with_header(json.dumps(header).encode(), b"ab")
    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight' has type I8; .*BF16"):
        SafetensorsFolder(write_folder(tmp_path, content))


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    content = file_bytes({"norm.weight": weights(2), NORM: weights(2)})
    with pytest.raises(ModelFileError, match=r"'output_norm.weight' appears twice"):
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


LAYER_PARTS = {
    "llama": (
        *("input_layernorm", "post_attention_layernorm"),
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm"),
    "bitnet": ("self_attn.inner_attn_ln", "mlp.ffn_layernorm"),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "bitnet": gguf.MODEL_ARCH.BITNET,
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_names_are_those_that_gguf_gives(family: str) -> None:
    theirs = gguf.get_tensor_name_map(ARCHITECTURES[family], 13)
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{n}.{part}" for n in (0, 12) for part in LAYER_PARTS[family]]
    for name in names:
        expected = theirs.get_name(name)
        if expected is None:
            assert (family, name) == ("bitnet", "lm_head")  # its head is always tied
            continue
        assert from_hugging_face(f"{name}.weight") == f"{expected}.weight"


def test_biases_are_named_like_their_weights() -> None:
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        weight = from_hugging_face(f"model.layers.3.{part}.weight")
        assert weight is not None
        assert from_hugging_face(f"model.layers.3.{part}.bias") == weight.replace("weight", "bias")


def test_both_names_of_bitnets_norms_are_known() -> None:
    layer = "model.layers.0."
    for new, old in (("attn_sub_norm", "inner_attn_ln"), ("ffn_sub_norm", "ffn_layernorm")):
        module = "self_attn" if new.startswith("attn") else "mlp"
        ours = from_hugging_face(f"{layer}{module}.{new}.weight")
        assert ours == from_hugging_face(f"{layer}{module}.{old}.weight") == f"blk.0.{new}.weight"


def test_the_bare_decoder_has_the_same_tensors() -> None:
    assert from_hugging_face("layers.0.mlp.up_proj.weight") == "blk.0.ffn_up.weight"
    assert from_hugging_face("embed_tokens.weight") == "token_embd.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.7.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_tables_that_follow_from_the_configuration_are_left_out(name: str) -> None:
    assert from_hugging_face(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "model.", "model.layers.0.self_attn.q_proj", "model.layers.-1.mlp.up_proj.weight"),
        *("model.layers.00.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_zero"),
        *("model.layers.0.block_sparse_moe.gate.weight", "transformer.h.0.attn.c_attn.weight"),
        *("model.layers.99999.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight\n"),
        "blk.0.attn_q.weight",
    ],
)
def test_any_other_name_is_an_error_that_says_it(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        from_hugging_face(name)
    assert repr(name) in str(caught.value)
