"""BitNet files as they are published, against the tools that made them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.cli.program import quire
from tests.fixture_files import fixture_file
from tests.model.bitnet_forms import (
    CASES,
    FORMS,
    VOCABULARY,
    Floats,
    PlainModel,
    as_folder,
    as_gguf,
    error,
    golden,
    packing_of,
    permuted,
    published,
    random_model,
)

from quire import LLM, AsyncLLM
from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.loader.gguf_writer import write_gguf
from quire.loader.reading import Region
from quire.loader.tensor import Tensor
from quire.model.conversion import plan_conversion
from quire.model.loading import load_model, read_tokenizer
from quire.quant import ternary
from quire.quant.formats import format_named


def logits(path: Path, device: str, tokens: list[int], packing: str | None = None) -> Floats:
    with LLM(path, device=device, kv_memory="8MiB", i2s_packing=packing) as llm:
        found: Floats = np.asarray(llm.forward_batch([tokens])[0], np.float32)
        return found


@pytest.mark.parametrize(("model", "form"), CASES, ids=lambda part: str(part))
def test_a_published_form_gives_the_logits_of_its_tool(model: str, form: str) -> None:
    name, limit = FORMS[form]
    path = published(model, form)
    tokens, expected = golden(model, name)
    if model == "c" and form in ("i2s.gguf", "extra/i2s-arm.gguf"):
        limit = 2e-4  # its embedding is in Q8_0
    packing = packing_of(form)
    assert error(logits(path, "reference", tokens, packing), expected) <= limit
    assert error(logits(path, "cpu", tokens, packing), expected) <= 1e-3


# ---- the packing of ARM builds


def as_arm(source: Path, path: Path) -> Path:
    """The file as an ARM build of bitnet.cpp writes it: each 32 bytes of codes packed anew."""
    content = np.frombuffer(source.read_bytes(), np.uint8).copy()
    with load_model(source) as model:
        for tensor in model.tensors.values():
            if tensor.format.name == "I2_S":
                assert isinstance(tensor.source, Region)
                at = tensor.source.start
                blocks = content[at : at + tensor.num_block_bytes]
                codes = ternary.unpack_i2s(blocks, ternary.X86_BLOCK)
                blocks[:] = ternary.pack_i2s(codes, ternary.ARM_BLOCK)
    path.write_bytes(content.tobytes())
    return path


@pytest.mark.parametrize("model", ["a", "c"])
def test_a_file_of_an_arm_build_is_the_other_packing_of_the_same_codes(
    model: str, tmp_path: Path
) -> None:
    made = as_arm(published(model, "i2s.gguf"), tmp_path / "arm.gguf")
    real = published(model, "extra/i2s-arm.gguf")
    with load_model(made) as ours, load_model(real) as theirs:
        for name, tensor in theirs.tensors.items():
            assert np.array_equal(ours.tensors[name].blocks, tensor.blocks), name
            assert ours.tensors[name].scale == tensor.scale


def test_both_packings_of_a_model_give_the_same_bits(tmp_path: Path) -> None:
    x86 = published("c", "i2s.gguf")
    arm = as_arm(x86, tmp_path / "arm.gguf")
    tokens, expected = golden("c", "i2s")
    for device in ("cpu", "reference"):
        found = logits(x86, device, tokens, "x86")
        assert np.array_equal(logits(arm, device, tokens, "arm"), found)
    assert error(logits(arm, "reference", tokens), expected) > 0.5, "nobody guesses"


def test_a_part_of_a_tensor_in_arms_packing_is_the_same_part(tmp_path: Path) -> None:
    arm = as_arm(published("c", "i2s.gguf"), tmp_path / "arm.gguf")
    with load_model(published("c", "i2s.gguf")) as one, load_model(arm, i2s_packing="arm") as other:
        expected, found = (m.tensors["blk.0.attn_q.weight"] for m in (one, other))
    whole, end = expected.data, expected.nbytes
    for start, stop in (
        (0, end),
        (0, 32),
        (5, 70),
        (end - 40, end),
        (end - 32, end),
        (end - 8, end),
    ):
        assert np.array_equal(found.read(start, stop), whole[start:stop]), (start, stop)
    assert found.scale == expected.scale
    assert np.array_equal(found.rows_float32(3, 9), expected.rows_float32(3, 9))


def test_the_program_takes_the_packing(tmp_path: Path) -> None:
    x86 = published("c", "i2s.gguf")
    arm = as_arm(x86, tmp_path / "arm.gguf")
    asked = ("--prompt", "The model", "--max-tokens", "8", "--ignore-eos", "--logprobs", "3")

    def completions(path: Path, *more: str) -> object:
        run = quire("generate", "--model", path, *asked, "--device", "cpu", "--json", *more)
        assert run.code == 0, run.err
        return json.loads(run.out)["outputs"][0]["completions"]

    assert completions(arm, "--i2s-packing", "arm") == completions(x86)
    assert completions(arm) != completions(x86)


@pytest.mark.parametrize("packing", ["x86", "arm"])
def test_a_packing_of_what_has_none_is_refused(packing: str) -> None:
    for path in (fixture_file("tiny/Q8_0.gguf"), published("c", "hf-packed"), "dummy:tiny"):
        with pytest.raises(ConfigError, match=r"no tensor of type I2_S: leave it out"):
            LLM(path, device="cpu", i2s_packing=packing)
        with pytest.raises(ConfigError, match=r"no tensor of type I2_S: leave it out"):
            AsyncLLM(path, device="cpu", i2s_packing=packing)


def test_there_are_two_packings() -> None:
    with pytest.raises(ConfigError, match="i2s_packing must be one of x86, arm, got 'neon'"):
        LLM(published("c", "i2s.gguf"), i2s_packing="neon")
    with pytest.raises(ConfigError, match="must be one of x86, arm"):
        load_model(published("c", "i2s.gguf"), i2s_packing="neon")


@pytest.mark.parametrize("model", ["a", "c"])
def test_a_file_that_does_not_name_its_pre_tokenizer_is_tokenised_as_the_model_was_trained(
    model: str,
) -> None:
    asked = json.loads(published(model, "tokenize.json").read_text())
    with load_model(published(model, "i2s.gguf")) as opened:
        tokenizer = read_tokenizer(opened)
    assert tokenizer is not None
    assert tokenizer.encode(asked["text"]) == asked["hf_tokenizers"]
    assert asked["hf_tokenizers"] != asked["bitnetcpp_no_pre_default"]


# The CPU's cache of halves costs 3e-5.
@pytest.mark.parametrize(("device", "limit"), [("reference", 1e-9), ("cpu", 1e-4)])
def test_i2_s_under_the_architecture_llama_has_its_queries_and_keys_interleaved(
    tmp_path: Path, device: str, limit: float
) -> None:
    plain = random_model(8, sub_norms=False)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, 10).tolist()
    expected = PlainModel(plain, relu2=False).logits(tokens)
    path = as_gguf(permuted(plain), tmp_path / "llama.gguf", "llama", "I2_S")
    with load_model(path) as model:
        assert model.spec.family == "llama"
        assert model.tensors["blk.0.attn_q.weight"].format.name == "I2_S"
    assert error(logits(path, device, tokens), expected) <= limit
    as_they_are = as_gguf(plain, tmp_path / "wrong.gguf", "llama", "I2_S")
    assert error(logits(as_they_are, device, tokens), expected) > 1e-3
    packed = as_folder(
        plain, tmp_path / "hf", linear_class="bitlinear", mode="offline", activation="silu"
    )
    assert error(logits(packed, device, tokens), expected) <= limit


@pytest.mark.parametrize(
    ("architecture", "is_relu2"), [("bitnet", False), ("bitnet-25", True), ("bitnet-b1.58", True)]
)
def test_each_architecture_has_its_activation_and_its_sub_norms(
    tmp_path: Path, architecture: str, is_relu2: bool
) -> None:
    model = random_model(7)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, 10).tolist()
    expected = PlainModel(model, relu2=is_relu2).logits(tokens)
    path = as_gguf(model, tmp_path / "model.gguf", architecture, "TQ2_0")
    assert error(logits(path, "reference", tokens), expected) <= 1e-9


# ---- files that are not sound


def packed_folder(
    tmp_path: Path,
    changes: Mapping[str, Any],
    quantisation: Mapping[str, Any] | None = None,
    source: Path | None = None,
) -> Path:
    """The packed checkpoint with other tensors, or other words on its quantisation."""
    source = published("c", "hf-packed") if source is None else source
    config = json.loads((source / "config.json").read_text())
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = (source / "model.safetensors").read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            raw = np.frombuffer(content[8 + header_size + start : 8 + header_size + stop], np.uint8)
            if entry["dtype"] == "BF16":
                floats = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
                tensors[name] = floats.reshape(entry["shape"])
            else:
                tensors[name] = raw.reshape(entry["shape"])
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])
    save_file(
        {name: np.ascontiguousarray(one) for name, one in tensors.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_packed_weights_need_their_scale(tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {f"{QUERY}_scale": None})
    with pytest.raises(ModelFileError, match="weight_scale is missing"):
        load_model(path)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_must_be_positive(tmp_path: Path, scale: float) -> None:
    path = packed_folder(tmp_path, {f"{QUERY}_scale": lambda _: np.array([scale], np.float32)})
    with pytest.raises(ModelFileError, match="must be a positive"):
        load_model(path)


def test_the_fourth_code_is_refused(tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {QUERY: lambda packed: packed | 3})
    with load_model(path) as model, pytest.raises(ModelFileError, match="ternary code 3"):
        model.tensors["blk.0.attn_q.weight"].to_float32()


@pytest.mark.parametrize(
    ("quantisation", "complaint"),
    [
        (
            {"quant_method": "hqq"},
            "quant_method = 'hqq' is not supported; supported: .*, bitnet, mxfp4",
        ),
        ({"quant_method": "bitnet", "linear_class": "other"}, "linear_class = 'other'"),
        ({"quant_method": "bitnet", "quantization_mode": "later"}, "quantization_mode = 'later'"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "quantization_mode = 'online'"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm = True"),
        ({"quant_method": "bitnet", "bits": 2}, "bits = 2"),
        (
            {"quant_method": "bitnet", "modules_to_not_convert": ["q_proj"]},
            "modules_to_not_convert",
        ),
    ],
)
def test_other_quantisation_is_refused_by_name(
    tmp_path: Path, quantisation: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint):
        load_model(packed_folder(tmp_path, {}, quantisation))


def test_bytes_without_words_on_them_are_no_weights(tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {f"{QUERY}_scale": None})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="has type U8"):
        load_model(path)


def test_floats_where_packed_weights_are_expected_are_refused(tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {QUERY: lambda packed: packed.astype(np.float32)})
    with pytest.raises(ModelFileError, match=r"type F32, but .* weights are packed"):
        load_model(path)


def test_packed_weights_where_floats_are_expected_are_refused(tmp_path: Path) -> None:
    online = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    with pytest.raises(ModelFileError, match="floats are expected"):
        load_model(packed_folder(tmp_path, {}, online))


def test_an_i2_s_file_with_the_fourth_code_is_refused(tmp_path: Path) -> None:
    content = bytearray(published("c", "i2s.gguf").read_bytes())
    with load_model(published("c", "i2s.gguf")) as model:
        blocks = model.tensors["blk.0.attn_q.weight"].blocks.tobytes()
    at = content.find(blocks)
    assert at > 0
    content[at] = 0xFF
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with load_model(path) as model, pytest.raises(ModelFileError, match="ternary code 3"):
        model.tensors["blk.0.attn_q.weight"].to_float32()
    with pytest.raises(ModelFileError, match="ternary code 3"):
        LLM(path, device="cpu")


def test_an_i2_s_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    content = published("c", "i2s.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:-40])
    with pytest.raises(ModelFileError, match="truncated or broken"):
        load_model(path)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -0.25])
def test_an_i2_s_scale_must_be_a_size(tmp_path: Path, scale: float) -> None:
    content = bytearray(published("c", "i2s.gguf").read_bytes())
    with load_model(published("c", "i2s.gguf")) as model:
        tensor = model.tensors["blk.0.attn_q.weight"]
        at = content.find(tensor.blocks.tobytes()) + tensor.num_block_bytes
    content[at : at + 4] = np.array([scale], "<f4").tobytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with load_model(path) as model, pytest.raises(ModelFileError, match=f"has the scale {scale}"):
        model.tensors["blk.0.attn_q.weight"].to_float32()
    with pytest.raises(ModelFileError, match=f"has the scale {scale}"):
        LLM(path, device="cpu")


def test_an_embedding_in_i2_s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    with load_model(published("c", "i2s.gguf")) as model:
        fields: dict[str, Any] = {key: model.metadata[key] for key in model.metadata}
        codes = np.ones((400, 384), np.uint8)
        data = np.append(ternary.pack_i2s(codes), ternary.i2s_tail(np.float32(1)))
        embedding = Tensor("token_embd.weight", codes.shape, format_named("I2_S", ""), data)
        write_gguf(path, fields, list({**model.tensors, embedding.name: embedding}.values()))
    with pytest.raises(UnsupportedModelError, match=r"token_embd.*I2_S.*in layers alone"):
        load_model(path)


def relabelled(source: Path, path: Path, types: Mapping[int, int]) -> Path:
    """The file with other numbers of types in the list of its tensors."""
    content = bytearray(source.read_bytes())
    with load_model(source) as model:
        for name, tensor in model.tensors.items():
            kind = tensor.format.ggml_type
            if kind in types:
                at = content.find(name.encode()) + len(name) + 4 + 8 * len(tensor.shape)
                assert content[at] == kind, name
                content[at] = types[kind]
    path.write_bytes(content)
    return path


TQ1_0, TQ2_0, I2_S = 34, 35, 36


@pytest.mark.parametrize("said", [TQ1_0, TQ2_0, I2_S])
@pytest.mark.parametrize("real", [TQ1_0, TQ2_0, I2_S])
def test_one_ternary_type_in_the_name_of_another_is_refused(
    real: int, said: int, tmp_path: Path
) -> None:
    to = {TQ1_0: "TQ1_0", TQ2_0: "TQ2_0", I2_S: "I2_S"}[real]
    with load_model(published("a", "hf-packed")) as model:
        plan_conversion(model, to).write(tmp_path / "sound.gguf")
    path = relabelled(tmp_path / "sound.gguf", tmp_path / "m.gguf", {real: said})
    if real == said:
        load_model(path).close()
        return
    with pytest.raises(ModelFileError, match=r"of another type than the file says|overlaps"):
        load_model(path)


@pytest.mark.parametrize("lost", [1, 40, 4096, 200_000])
@pytest.mark.parametrize("to", ["TQ1_0", "TQ2_0", "I2_S"])
def test_a_file_that_is_cut_is_refused(to: str, lost: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with load_model(published("a", "hf-packed")) as model:
        plan_conversion(model, to).write(path)
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    with pytest.raises(ModelFileError, match="truncated or broken"):
        load_model(path)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((96,), r"attn_q\.weight has shape \[96\], no matrix's"),
        ((48, 384), r"attn_q\.weight has shape \[192, 384\], expected \[384, 384\]"),
        ((96, 256), r"attn_q\.weight has shape \[384, 256\], expected \[384, 384\]"),
        ((384, 384), r"attn_q\.weight has shape \[1536, 384\]"),
        ((96, 100), r"rows of 100 ternary weights; quire runs multiples of 128"),
    ],
)
def test_packed_weights_of_another_shape_are_refused(
    shape: tuple[int, ...], complaint: str, tmp_path: Path
) -> None:
    path = packed_folder(tmp_path, {QUERY: lambda _: np.zeros(shape, np.uint8)})
    with pytest.raises((ModelFileError, UnsupportedModelError), match=complaint):
        load_model(path)


@pytest.mark.parametrize("shape", [(2,), (1, 1), (384,)])
def test_a_scale_must_be_one_number(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {f"{QUERY}_scale": lambda _: np.ones(shape, np.float32)})
    with pytest.raises(ModelFileError, match=r"weight_scale has shape .*, expected \[1\]"):
        load_model(path)


def test_a_packed_checkpoint_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = packed_folder(tmp_path, {})
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        load_model(path)
