"""BitNet models in another form: the codes are the same, and so are logits where scales are."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.fixture_files import fixture_file
from tests.model.bitnet_forms import error, published
from tests.model.test_bitnet import as_arm, logits, packed_folder

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import write_gguf
from quire.loader.tensor import Tensor
from quire.model import conversion
from quire.model.conversion import Conversion, plan_conversion
from quire.model.loading import load_model, read_tokenizer
from quire.quant.formats import format_named

TOKENS = [7, 301, 44, 5, 260, 12, 399, 83, 83, 2, 190, 33, 61, 7, 7, 120]
DEVICES = ("cpu", "reference")


def convert(source: Path, path: Path, to: str, **how: Any) -> Conversion:
    packing = how.pop("i2s_packing", None)
    with load_model(source, i2s_packing=packing) as model:
        plan = plan_conversion(model, to, **how)
        plan.write(path)
    return plan


def codes(path: Path) -> dict[str, npt.NDArray[np.int8]]:
    with load_model(path) as model:
        weights = {n: t.to_float32() for n, t in model.tensors.items() if t.format.is_ternary}
    return {name: np.sign(values).astype(np.int8) for name, values in weights.items()}


def have_the_same_codes(one: Path, other: Path) -> bool:
    found, expected = codes(one), codes(other)
    assert found.keys() == expected.keys() and found
    return all(np.array_equal(found[name], expected[name]) for name in found)


def give_the_same_bits(one: Path, other: Path) -> bool:
    return all(
        np.array_equal(logits(one, device, TOKENS), logits(other, device, TOKENS))
        for device in DEVICES
    )


@pytest.fixture(scope="module")
def packed() -> Path:
    return published("a", "hf-packed")


@pytest.fixture(scope="module")
def made(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The packed checkpoint in each of the three types. Its scales are bfloat16s that are float16s
    as well, so that nothing is lost."""
    folder = tmp_path_factory.mktemp("made")
    paths = {to: folder / f"{to}.gguf" for to in ("TQ2_0", "TQ1_0", "I2_S")}
    for to, path in paths.items():
        assert convert(packed, path, to).worst_loss is None
    return paths


# ---- what comes out


@pytest.mark.parametrize("to", ["TQ2_0", "TQ1_0", "I2_S"])
def test_a_packed_checkpoint_gives_the_same_bits_in_every_type(
    packed: Path, made: Mapping[str, Path], to: str
) -> None:
    assert have_the_same_codes(made[to], packed)
    assert give_the_same_bits(made[to], packed)


@pytest.mark.parametrize("to", ["TQ2_0", "TQ1_0", "I2_S"])
def test_the_reference_reader_reads_every_tensor(made: Mapping[str, Path], to: str) -> None:
    with load_model(made[to]) as model:
        expected = {name: tensor.to_float32() for name, tensor in model.tensors.items()}
    if to == "I2_S":  # which the package does not know: its header says where everything is
        with GGUFFile(made[to]) as file:
            assert {t.format.name for t in file.tensors.values()} == {"I2_S", "F16", "F32"}
        return
    reader = gguf.GGUFReader(made[to])
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    for tensor in reader.tensors:
        found = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        assert np.array_equal(found.reshape(expected[tensor.name].shape), expected[tensor.name])
    assert reader.fields["tokenizer.ggml.token_type"].types[1] == gguf.GGUFValueType.INT32
    assert reader.fields["general.file_type"].contents() == {"TQ2_0": 37, "TQ1_0": 36}[to]


def test_from_the_packed_checkpoint_i2_s_is_byte_for_byte_the_real_converters(
    packed: Path, made: Mapping[str, Path]
) -> None:
    with load_model(published("a", "i2s-b158.gguf")) as real, load_model(made["I2_S"]) as ours:
        assert real.spec == ours.spec
        assert real.tensors.keys() == ours.tensors.keys()
        for name, tensor in real.tensors.items():
            assert ours.tensors[name].format is tensor.format
            assert np.array_equal(ours.tensors[name].data, tensor.data), name


@pytest.mark.parametrize(("to", "real"), [("TQ2_0", "tq2.gguf"), ("TQ1_0", "extra/tq1.gguf")])
def test_from_the_master_blocks_are_byte_for_byte_the_real_quantisers(
    to: str, real: str, tmp_path: Path
) -> None:
    convert(published("a", "hf-bf16"), tmp_path / "m.gguf", to)
    with load_model(published("a", real)) as theirs, load_model(tmp_path / "m.gguf") as ours:
        for name, tensor in theirs.tensors.items():
            assert np.array_equal(ours.tensors[name].data, tensor.data), name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tq2.gguf", "extra/tq1.gguf"),
        ("extra/tq2-silu-upstream.gguf", "extra/tq1-silu-upstream.gguf"),
    ],
)
def test_llama_cpps_two_types_become_each_other_byte_for_byte(
    one: str, other: str, tmp_path: Path
) -> None:
    tq2, tq1 = published("a", one), published("a", other)
    assert convert(tq1, tmp_path / "tq2", "TQ2_0").losses.scales == []
    assert (tmp_path / "tq2").read_bytes() == tq2.read_bytes(), "all of the real tool's file"
    convert(tq2, tmp_path / "tq1", "TQ1_0")
    assert (tmp_path / "tq1").read_bytes() == tq1.read_bytes()


def test_files_of_ours_become_each_other_byte_for_byte(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    for one, other in (("TQ2_0", "TQ1_0"), ("TQ1_0", "TQ2_0"), ("TQ2_0", "I2_S")):
        convert(made[one], tmp_path / "there", other)
        assert (tmp_path / "there").read_bytes() == made[other].read_bytes(), (one, other)


def test_how_many_rows_are_converted_at_once_changes_nothing(
    packed: Path, made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_WEIGHTS_AT_ONCE", 3000)
    for to, path in made.items():
        convert(packed, tmp_path / "m.gguf", to)
        assert (tmp_path / "m.gguf").read_bytes() == path.read_bytes()
    convert(made["TQ1_0"], tmp_path / "m.gguf", "I2_S")
    assert (tmp_path / "m.gguf").read_bytes() == made["I2_S"].read_bytes()
    folder = llama_folder(tmp_path / "llama")
    convert(folder, tmp_path / "some.gguf", "I2_S")
    monkeypatch.undo()
    convert(folder, tmp_path / "all.gguf", "I2_S")
    assert (tmp_path / "some.gguf").read_bytes() == (tmp_path / "all.gguf").read_bytes()


def test_progress_counts_every_byte(packed: Path, tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    with load_model(packed) as model:
        plan = plan_conversion(model, "TQ2_0")
        plan.write(tmp_path / "m.gguf", lambda done, name: told.append((done, name)))
    counts = [done for done, _ in told]
    assert counts == sorted(counts)
    assert counts[-1] == plan.nbytes == sum(tensor.nbytes for tensor in plan.tensors)
    assert {name for _, name in told} == {tensor.name for tensor in plan.tensors}


def test_through_llama_cpps_blocks_and_back_every_code_is_kept_and_the_scale_is_said(
    tmp_path: Path,
) -> None:
    master = master_folder(tmp_path / "master")
    convert(master, tmp_path / "first", "I2_S")
    with load_model(tmp_path / "first") as model:
        there = plan_conversion(model, "TQ1_0")
        for _ in range(2):  # which counts nothing twice
            there.write(tmp_path / "tq1")
    back = convert(tmp_path / "tq1", tmp_path / "back", "I2_S")
    assert have_the_same_codes(tmp_path / "back", master)
    assert len(there.losses.scales) == 14
    with load_model(tmp_path / "first") as before, load_model(tmp_path / "back") as after:
        for loss in there.losses.scales:
            assert before.tensors[loss.tensor].scale == loss.before
            assert after.tensors[loss.tensor].scale == loss.after == float(np.float16(loss.before))
    assert there.worst_loss is not None and 0 < there.worst_loss.relative < 2**-11
    assert back.worst_loss is None


def test_the_packing_of_arm_builds_becomes_x86s(tmp_path: Path) -> None:
    x86 = published("c", "i2s.gguf")
    arm = as_arm(x86, tmp_path / "arm.gguf")
    convert(arm, tmp_path / "out.gguf", "I2_S", i2s_packing="arm")
    assert have_the_same_codes(tmp_path / "out.gguf", x86)
    with load_model(x86) as expected, load_model(tmp_path / "out.gguf") as found:
        for name, tensor in expected.tensors.items():
            assert np.array_equal(found.tensors[name].blocks, tensor.blocks), name


def test_a_file_in_parts_becomes_one(made: Mapping[str, Path], tmp_path: Path) -> None:
    with load_model(made["TQ1_0"]) as model:
        tensors = list(model.tensors.values())
        fields: dict[str, Any] = {key: model.metadata[key] for key in model.metadata}
    for number, part in enumerate((tensors[:9], tensors[9:])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        write_gguf(path, split if number else fields | split, part)
    convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "m.gguf", "TQ2_0")
    assert (tmp_path / "m.gguf").read_bytes() == made["TQ2_0"].read_bytes()


def test_the_tokenizer_goes_along(packed: Path, made: Mapping[str, Path]) -> None:
    with load_model(packed) as one, load_model(made["TQ2_0"]) as other:
        wanted, found = read_tokenizer(one), read_tokenizer(other)
        assert other.metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert wanted is not None and found is not None
    text = "The quick (brown) fox's 12345 tails\n\n  naïve <|eot_id|> 你好"
    assert found.encode(text) == wanted.encode(text)
    assert found.decode(wanted.encode(text)) == wanted.decode(wanted.encode(text))
    assert found.chat_template == wanted.chat_template is not None
    assert found.end_token_ids == wanted.end_token_ids
    assert (found.bos_token_id, found.eos_token_id) == (wanted.bos_token_id, wanted.eos_token_id)


def test_rows_of_the_embedding_without_a_token_are_padding(packed: Path, tmp_path: Path) -> None:
    folder = changed_folder(packed, tmp_path / "padded", {"vocab_size": 452}, pad_rows=4)
    convert(folder, tmp_path / "m.gguf", "I2_S")
    with load_model(tmp_path / "m.gguf") as model:
        tokens = model.metadata.texts("tokenizer.ggml.tokens")
        kinds = model.metadata.integers("tokenizer.ggml.token_type")
        assert read_tokenizer(model) is not None
    assert len(tokens) == 452
    assert (tokens[-1], kinds[-4:], kinds[-5]) == ("[PAD451]", (5, 5, 5, 5), 3)


@pytest.mark.parametrize(("embedding", "limit"), [("Q8_0", 1e-3), ("Q6_K", 5e-3), ("keep", 0.0)])
def test_the_embedding_has_the_type_asked_for(
    packed: Path, embedding: str, limit: float, tmp_path: Path
) -> None:
    plan = convert(packed, tmp_path / "m.gguf", "TQ2_0", embedding=embedding)
    name = "BF16" if embedding == "keep" else embedding
    assert plan.embeddings == {"token_embd.weight": name}
    with load_model(packed) as one, load_model(tmp_path / "m.gguf") as other:
        expected = one.tensors["token_embd.weight"].to_float32()
        found = other.tensors["token_embd.weight"]
        assert found.format.name == name
        assert error(found.to_float32(), expected) <= limit


def test_weights_that_f16_rounds_are_counted_and_those_it_cannot_hold_are_refused(
    packed: Path, tmp_path: Path
) -> None:
    def embedding(value: float) -> Path:
        def change(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            weights[3, 5] = value
            return weights

        folder = tmp_path / str(value)
        return changed_folder(packed, folder, {}, {"model.embed_tokens.weight": change})

    plan = convert(embedding(1e-8), tmp_path / "m.gguf", "I2_S")
    assert plan.losses.rounded == {"token_embd.weight": 1}
    with pytest.raises(UnsupportedModelError, match=r"100000\.0, which is too large for F16"):
        convert(embedding(1e5), tmp_path / "n.gguf", "I2_S")
    assert not (tmp_path / "n.gguf").exists()
    assert [path.name for path in tmp_path.glob(".*")] == [], "nor is a part of it left"


# ---- other architectures


def changed_folder(
    source: Path,
    folder: Path,
    config: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    pad_rows: int = 0,
) -> Path:
    """The packed checkpoint with another configuration and other tensors (None: without)."""
    folder.mkdir()
    packed_folder(folder, {}, None, source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    said = json.loads((folder / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps(said))
    tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    for name, change in (changes or {}).items():
        tensors[name] = None if change is None else change(tensors.get(name))
    if pad_rows:
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = np.pad(rows, ((0, pad_rows), (0, 0)))
    kept = {name: np.ascontiguousarray(t) for name, t in tensors.items() if t is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def tensor_names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return list(file.keys())


def master_folder(folder: Path) -> Path:
    """A master checkpoint: floats that are made ternary when they are loaded."""
    rng = np.random.default_rng(11)

    def floats(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return rng.normal(0, 0.05, (4 * packed.shape[0], packed.shape[1])).astype(np.float32)

    names = tensor_names(published("a", "hf-packed"))
    changes = {name: floats for name in names if name.endswith("_proj.weight")}
    scales = {name: None for name in names if name.endswith("weight_scale")}
    online = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    config = {"quantization_config": online}
    return changed_folder(published("a", "hf-packed"), folder, config, changes | scales)


def test_a_master_checkpoint_is_made_ternary_as_in_training(tmp_path: Path) -> None:
    master = master_folder(tmp_path / "master")
    plan = convert(master, tmp_path / "m.gguf", "I2_S")
    assert plan.matrices == {"F32, made ternary as in training": 14}
    assert have_the_same_codes(tmp_path / "m.gguf", master)
    assert give_the_same_bits(tmp_path / "m.gguf", master)


def llama_folder(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """The same matrices as a Llama of Hugging Face's BitLinear, as Falcon3-1.58bit is published."""
    source = published("a", "hf-packed")
    names = tensor_names(source)
    changes: dict[str, Any] = {name: None for name in names if "sub_norm" in name}
    changes["lm_head.weight"] = lambda _: (
        np.random.default_rng(5).normal(0, 0.1, (448, 256)).astype(np.float32)
    )
    for name in names:
        if name.endswith("weight_scale"):
            changes[name] = lambda scale: np.float32(1) / scale
    said = {
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]},
        **(config or {}),
    }
    return changed_folder(source, folder, said, changes)


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "rope",
    [None, LLAMA_3, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}],
    ids=lambda rope: rope and rope["rope_type"],
)
def test_a_llama_has_its_queries_and_keys_in_interleaved_order(
    rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path / "llama", {"rope_scaling": rope})
    plan = convert(folder, tmp_path / "m.gguf", "I2_S")
    assert plan.architecture == "llama"
    assert "interleaved order" in plan.reason
    with load_model(tmp_path / "m.gguf") as model:
        assert model.spec.rope.interleaved and not model.spec.tied_head
        assert ("rope_freqs.weight" in model.tensors) == (rope is LLAMA_3)
    for device in DEVICES:
        expected = logits(folder, device, TOKENS)
        assert error(logits(tmp_path / "m.gguf", device, TOKENS), expected) < 1e-4
    assert not have_the_same_codes(tmp_path / "m.gguf", folder), "the rows are in another order"


def test_a_llama_in_llama_cpps_blocks_comes_with_a_warning(tmp_path: Path) -> None:
    plan = convert(llama_folder(tmp_path / "llama"), tmp_path / "m.gguf", "TQ2_0")
    assert "do not round activations" in plan.notes[0]


def test_which_architecture_is_written_follows_from_the_activation(
    packed: Path, tmp_path: Path
) -> None:
    assert convert(packed, tmp_path / "a.gguf", "TQ2_0").architecture == "bitnet-b1.58"
    silu = changed_folder(packed, tmp_path / "silu", {"hidden_act": "silu"})
    plan = convert(silu, tmp_path / "b.gguf", "TQ2_0")
    assert plan.architecture == "bitnet"
    assert "llama.cpp and bitnet.cpp run" in plan.reason
    assert give_the_same_bits(tmp_path / "b.gguf", silu)
    again = convert(tmp_path / "b.gguf", tmp_path / "c.gguf", "I2_S")
    assert (again.architecture, again.reason[:12]) == ("bitnet", "the source's")


@pytest.mark.parametrize("name", ["silu-tq2", "silu-tq1", "llama-tq2", "llama3-tq2"])
def test_llama_cpp_runs_what_is_written(name: str, packed: Path, tmp_path: Path) -> None:
    """Its logits of these very files are kept (tests/oracles/make_llama_cpp_goldens.py). It rounds
    activations by 256, and these models are trained for a scale a token."""
    source, _, kind = name.partition("-")
    if source == "silu":
        folder = changed_folder(packed, tmp_path / source, {"hidden_act": "silu"})
    else:
        rope = LLAMA_3 if source == "llama3" else None
        folder = llama_folder(tmp_path / source, {"rope_scaling": rope})
    path = tmp_path / f"{name}.gguf"
    convert(folder, path, {"tq2": "TQ2_0", "tq1": "TQ1_0"}[kind])
    golden = np.load(published("a", "llama-cpp.npz"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == str(golden[f"{name}.sha256"]), f"make the golden again, of {path}"
    assert golden["tokens"].tolist() == TOKENS
    for found in (logits(path, "reference", TOKENS), logits(folder, "reference", TOKENS)):
        assert error(found, golden[name]) <= 2e-3


# ---- what cannot be converted


@pytest.mark.parametrize("to", ["TQ2_0", "TQ1_0"])
def test_rows_that_do_not_fill_blocks_of_256_are_refused_by_name(to: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.\w+\.weight has rows of .*{to}"):
        convert(published("c", "hf-packed"), tmp_path / "m.gguf", to)
    with pytest.raises(UnsupportedModelError, match=r"Take --to I2_S"):
        convert(published("c", "i2s.gguf"), tmp_path / "m.gguf", to)


@pytest.mark.parametrize("at_once", [1 << 22, 3000])
def test_blocks_of_different_scales_are_no_i2_s(
    at_once: int, made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_WEIGHTS_AT_ONCE", at_once)
    with load_model(made["TQ2_0"]) as model:
        blocks = model.tensors["blk.1.ffn_up.weight"].data.reshape(-1, 66).copy()
    content = bytearray(made["TQ2_0"].read_bytes())
    at = content.find(blocks.tobytes()) + 37 * 66 + 64
    for scale in (0.75, float("inf")):
        content[at : at + 2] = np.array([scale], "<f2").tobytes()
        (tmp_path / "m.gguf").write_bytes(content)
        where = rf"blk\.1\.ffn_up\.weight .*: block 0 of row 37 has the scale {scale}"
        with pytest.raises(UnsupportedModelError, match=where):
            convert(tmp_path / "m.gguf", tmp_path / "n.gguf", "I2_S")
        assert not (tmp_path / "n.gguf").exists()
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", "TQ1_0")


def test_the_scale_of_a_block_of_zeros_does_not_matter(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    zeros = np.full((1, 64), 0x55, np.uint8)
    with load_model(made["TQ2_0"]) as model:
        tensors = list(model.tensors.values())
        blocks = model.tensors["blk.0.attn_q.weight"].data.reshape(-1, 66).copy()
        blocks[0, :64], blocks[0, 64:] = zeros, np.array([9.0], "<f2").view(np.uint8)
        changed = Tensor(
            "blk.0.attn_q.weight", (256, 256), format_named("TQ2_0", ""), blocks.ravel()
        )
        kept = [changed if tensor.name == changed.name else tensor for tensor in tensors]
        fields: dict[str, Any] = {k: model.metadata[k] for k in model.metadata}
        write_gguf(tmp_path / "m.gguf", fields, kept)
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf", "I2_S")
    assert have_the_same_codes(tmp_path / "m.gguf", tmp_path / "n.gguf")


def test_the_fourth_code_is_refused(made: Mapping[str, Path], tmp_path: Path) -> None:
    with load_model(made["TQ2_0"]) as model:
        start = model.tensors["blk.0.ffn_up.weight"].data[:66].tobytes()
    content = bytearray(made["TQ2_0"].read_bytes())
    content[content.find(start)] |= 3
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight holds the ternary code 3"):
        convert(tmp_path / "m.gguf", tmp_path / "n.gguf", "I2_S")


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_a_scale_that_a_float16_cannot_hold_is_refused(scale: float, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale"
    change = {name: lambda _: np.array([scale], np.float32)}
    folder = changed_folder(published("a", "hf-packed"), tmp_path / "in", {}, change)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_up\.weight has the scale"):
        convert(folder, tmp_path / "m.gguf", "TQ2_0")
    convert(folder, tmp_path / "m.gguf", "I2_S")


@pytest.mark.parametrize("name", ["tiny/Q6_K.gguf", "tiny/F32.gguf", "families/llama"])
def test_a_model_that_is_not_ternary_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"is no BitNet model.*has type"):
        convert(fixture_file(name), tmp_path / "m.gguf", "TQ2_0")


def test_an_untied_head_is_refused_where_the_graph_has_none(packed: Path, tmp_path: Path) -> None:
    head = {"lm_head.weight": lambda _: np.ones((448, 256), np.float32)}
    folder = changed_folder(packed, tmp_path / "in", {"tie_word_embeddings": False}, head)
    with pytest.raises(
        UnsupportedModelError, match=r"bitnet-b1\.58.*tied_head of the model is False"
    ):
        convert(folder, tmp_path / "m.gguf", "I2_S")


def test_rope_that_the_architecture_cannot_say_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = changed_folder(packed, tmp_path / "in", {"rope_scaling": LLAMA_3})
    with pytest.raises(
        UnsupportedModelError, match=r"bitnet-b1\.58.*rope is scaled by Llama3Scaling"
    ):
        convert(folder, tmp_path / "m.gguf", "I2_S")


def test_a_llama_with_squared_relu_is_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "in", {"hidden_act": "relu2"})
    with pytest.raises(
        UnsupportedModelError, match=r"activation of .* is relu2, which there is silu"
    ):
        convert(folder, tmp_path / "m.gguf", "I2_S")


def test_a_tokenizer_that_no_name_stands_for_is_refused_and_may_be_left_out(
    packed: Path, tmp_path: Path
) -> None:
    folder = changed_folder(packed, tmp_path / "in", {})
    said = json.loads((folder / "tokenizer.json").read_text())
    said["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match=r"differs from llama-bpe.*--no-tokenizer"):
        convert(folder, tmp_path / "m.gguf", "I2_S")
    plan = convert(folder, tmp_path / "m.gguf", "I2_S", with_tokenizer=False)
    assert plan.tokenizer is None
    with load_model(tmp_path / "m.gguf") as model:
        assert read_tokenizer(model) is None
