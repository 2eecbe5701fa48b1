"""From a file's tensors to those of a spec: names of Hugging Face in ours, and what files fuse."""

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from tests.drawn_families import drawn_config, write_drawn
from tests.model.gguf_families import write_family
from tests.model.tensors import tensor

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import write_gguf as write_fields
from quire.loader.safetensors import SafetensorsFolder
from quire.loader.tensor import Tensor
from quire.model.config_spec import config_family, spec_from_config
from quire.model.dummy import random_blocks
from quire.model.families import CONFIG_FAMILIES, GGUF_FAMILIES
from quire.model.loading import load_model
from quire.model.tensors import (
    arranged,
    from_hugging_face,
    named_as_ours,
    named_in_gguf,
    of_decoder,
)
from quire.quant.formats import format_named

Floats = npt.NDArray[np.float32]


def ours(model_type: str, name: str) -> str | None:
    return from_hugging_face(CONFIG_FAMILIES[model_type], name)


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
        assert ours(family, f"{name}.weight") == f"{expected}.weight"


def test_biases_are_named_like_their_weights() -> None:
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        weight = ours("qwen2", f"model.layers.3.{part}.weight")
        assert weight is not None
        bias = ours("qwen2", f"model.layers.3.{part}.bias")
        assert bias == weight.replace("weight", "bias")


def test_both_names_of_bitnets_norms_are_known() -> None:
    layer = "model.layers.0."
    for new, old in (("attn_sub_norm", "inner_attn_ln"), ("ffn_sub_norm", "ffn_layernorm")):
        module = "self_attn" if new.startswith("attn") else "mlp"
        found = ours("bitnet", f"{layer}{module}.{new}.weight")
        assert found == ours("bitnet", f"{layer}{module}.{old}.weight") == f"blk.0.{new}.weight"


def test_the_bare_decoder_has_the_same_tensors() -> None:
    assert ours("llama", "layers.0.mlp.up_proj.weight") == "blk.0.ffn_up.weight"
    assert ours("llama", "embed_tokens.weight") == "token_embd.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.7.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_tables_that_follow_from_the_configuration_are_left_out(name: str) -> None:
    assert ours("llama", name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "model.", "model.layers.0.self_attn.q_proj", "model.layers.-1.mlp.up_proj.weight"),
        *("model.layers.00.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_zero"),
        *("model.layers.0.mlp.experts.0.w4.weight", "transformer.h.0.attn.c_attn.weight"),
        *("vision_tower.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.sinks.weight"),
        *("model.layers.99999.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight\n"),
        "blk.0.attn_q.weight",
    ],
)
def test_any_other_name_is_an_error_that_says_it(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ours("llama", name)
    assert repr(name) in str(caught.value)


def test_what_a_model_sees_with_is_left_out_of_families_that_see() -> None:
    names = ("vision_tower.a.weight", "model.multi_modal_projector.b.weight")
    family = CONFIG_FAMILIES["gemma3_text"]
    seen = {name: tensor(name, np.ones(2)) for name in names}
    assert named_as_ours(family, 2, of_decoder(seen)) == {}
    with pytest.raises(UnsupportedModelError, match="vision_tower"):
        named_as_ours(family, 2, seen)
    for prefix in ("language_model.model.", "model.language_model.", "model.", ""):
        assert ours("gemma3_text", f"{prefix}layers.0.mlp.up_proj.weight") == "blk.0.ffn_up.weight"
    assert ours("gemma3_text", "language_model.lm_head.weight") == "output.weight"


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    names = [f"model.layers.{n}.input_layernorm.weight" for n in (0, 1, 2)]
    found = {name: tensor(name, np.ones(2)) for name in names}
    # As published: what layers before them do not have.
    own = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    more = {f"model.layers.2.{name}.weight": tensor(name, np.ones(2)) for name in own}
    for family in ("glm4_moe", "deepseek_v3"):
        assert list(named_as_ours(CONFIG_FAMILIES[family], 2, found | more)) == [
            "blk.0.attn_norm.weight",
            "blk.1.attn_norm.weight",
        ]
        with pytest.raises(UnsupportedModelError, match="embed_tokens"):
            named_as_ours(CONFIG_FAMILIES[family], 3, found | more)
    assert len(named_as_ours(CONFIG_FAMILIES["llama"], 2, found)) == 3
    theirs = {f"blk.{n}.nextn.enorm.weight": tensor("x", np.ones(2)) for n in (1, 2)}
    assert list(named_in_gguf(GGUF_FAMILIES["glm4moe"], 2, theirs)) == ["blk.1.nextn.enorm.weight"]


def test_two_tensors_of_one_name_are_refused() -> None:
    names = ("model.norm.weight", "norm.weight")
    with pytest.raises(ModelFileError, match=r"appears twice, as output_norm\.weight"):
        named_as_ours(
            CONFIG_FAMILIES["llama"], 2, {name: tensor(name, np.ones(2)) for name in names}
        )


def layers_of(case: str, folder: Path) -> tuple[dict[str, Floats], dict[str, Tensor]]:
    """A drawn family's tensors as its file has them, and as the spec names them."""
    path = write_drawn(case, folder / case)
    with SafetensorsFolder(path) as source:
        theirs = {name: found.to_float32() for name, found in source.tensors.items()}
    with load_model(path) as model:
        return theirs, dict(model.tensors)


def test_fused_rows_are_divided(tmp_path: Path) -> None:
    theirs, found = layers_of("phi3", tmp_path)
    whole = theirs["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [found[f"blk.1.attn_{name}.weight"].to_float32() for name in "qkv"]
    assert np.array_equal(np.concatenate(parts), whole)
    gate_up = theirs["model.layers.1.mlp.gate_up_proj.weight"]
    parts = [found[f"blk.1.ffn_{name}.weight"].to_float32() for name in ("gate", "up")]
    assert np.array_equal(np.concatenate(parts), gate_up)


def test_experts_are_stacked_and_read_in_any_piece(tmp_path: Path) -> None:
    theirs, found = layers_of("mixtral", tmp_path)
    prefix = "model.layers.2.block_sparse_moe.experts"
    expected = np.stack([theirs[f"{prefix}.{n}.w2.weight"] for n in range(8)])
    stack = found["blk.2.ffn_down_exps.weight"]
    assert np.array_equal(stack.to_float32(), expected)
    raw = expected.astype("<f4").tobytes()
    size = len(raw)
    for start, stop in ((0, 0), (0, 1), (size // 8 - 1, size // 8 + 1), (7, size - 3), (5, size)):
        assert stack.read(start, stop).tobytes() == raw[start:stop]
    assert np.array_equal(stack.rows_float32(3, 5), expected[3:5])


def test_transposed_and_alternating_experts_are_taken_apart(tmp_path: Path) -> None:
    theirs, found = layers_of("gpt-oss", tmp_path)
    weights = theirs["model.layers.0.mlp.experts.gate_up_proj"]  # [experts, in, gate and up]
    bias = theirs["model.layers.0.mlp.experts.gate_up_proj_bias"]
    for index, name in enumerate(("gate", "up")):
        own = found[f"blk.0.ffn_{name}_exps.weight"]
        expected = weights[:, :, index::2].swapaxes(1, 2)
        assert np.array_equal(own.to_float32(), expected)
        raw = np.ascontiguousarray(expected).astype("<f4").tobytes()
        assert own.read(11, len(raw) - 9).tobytes() == raw[11:-9]
        own_bias = found[f"blk.0.ffn_{name}_exps.bias"].to_float32()
        assert np.array_equal(own_bias, bias[:, index::2])


def test_a_quantised_matrix_of_keys_and_values_is_divided_without_rounding(tmp_path: Path) -> None:
    """Values stay in their blocks; keys are transposed, which their blocks cannot be."""
    with SafetensorsFolder(write_drawn("deepseek2", tmp_path)) as folder:
        config = {**folder.whole_config, "kv_lora_rank": 64}
    spec, family = spec_from_config(config), config_family(config)
    kind, name = format_named("Q8_0", ""), "blk.2.attn_kv_b.weight"
    data = random_blocks(kind, 4 * 22 * 64, 0.1, np.random.default_rng(2))
    whole = Tensor(name, (4 * 22, 64), kind, data)
    found = arranged(family, spec, {name: whole}, is_gguf=True)
    heads = whole.to_float32().reshape(4, 22, 64)
    keys, values = (found[f"blk.2.attn_{part}_b.weight"] for part in "kv")
    assert np.array_equal(keys.to_float32(), heads[:, :12].swapaxes(1, 2))
    assert np.array_equal(values.to_float32(), heads[:, 12:])
    assert (keys.format.name, values.format.name) == ("F32", "Q8_0")


def test_norm_weights_stored_less_one_get_it_back(tmp_path: Path) -> None:
    theirs, found = layers_of("gemma3", tmp_path)
    for name, mine in (
        ("norm", "output_norm"),
        ("layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
    ):
        expected = theirs[f"model.{name}.weight"] + np.float32(1.0)
        assert np.array_equal(found[f"{mine}.weight"].to_float32(), expected)


@pytest.mark.parametrize(
    ("case", "name", "shape", "message"),
    [
        ("phi3", "blk.0.attn_qkv.weight", (7, 48), r"has shape \[7, 48\], expected 96 rows"),
        ("gpt-oss", "blk.0.ffn_gate_up_exps.weight", (8, 48), "expected 3 dimensions"),
        ("gpt-oss", "blk.0.ffn_down_exps.weight", (8,), "expected 3 dimensions"),
        ("deepseek2", "blk.0.attn_kv_b.weight", (3, 20), r"has shape \[3, 20\], expected"),
        ("phi3", "blk.0.attn_qkv.weight", (), "has no dimensions"),
        ("mixtral", "blk.0.ffn_up_exps.1.weight", (4, 4), "not numbered from 0 on"),
    ],
)
def test_fused_tensors_of_other_shapes_are_refused(
    case: str, name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    with SafetensorsFolder(write_drawn(case, tmp_path)) as folder:
        config = folder.whole_config
    spec, family = spec_from_config(config), config_family(config)
    with pytest.raises(ModelFileError, match=message):
        arranged(family, spec, {name: tensor(name, np.zeros(shape))}, is_gguf=False)


def test_experts_of_one_layer_must_be_alike(tmp_path: Path) -> None:
    with SafetensorsFolder(write_drawn("mixtral", tmp_path)) as folder:
        config = folder.whole_config
    spec, family = spec_from_config(config), config_family(config)
    names = [f"blk.0.ffn_up_exps.{n}.weight" for n in (0, 1)]
    tensors = {name: tensor(name, np.zeros((4 + n, 4))) for n, name in enumerate(names)}
    with pytest.raises(UnsupportedModelError, match="experts of one layer must be alike"):
        arranged(family, spec, tensors, is_gguf=False)


# ---- Apertus


def xielu_file(folder: Path, **changes: object) -> Path:
    """Apertus as GGUF, with other numbers in its metadata; None: without."""
    with load_model(write_drawn("apertus", folder / "apertus")) as model:
        path = write_family("apertus", drawn_config("apertus"), model, folder / "apertus.gguf")
    with GGUFFile(path) as file:
        fields = {**file.metadata, **{f"xielu.{name}": x for name, x in changes.items()}}
        fields = {key: value for key, value in fields.items() if value is not None}
        write_fields(path, fields, list(file.tensors.values()))  # type: ignore[arg-type]
    return path


def test_one_number_of_xielu_may_be_for_all_layers(tmp_path: Path) -> None:
    with load_model(xielu_file(tmp_path, alpha_p=0.0, beta=0.25)) as model:
        numbers = [model.tensors[f"blk.{x}.ffn_xielu.weight"].to_float32() for x in range(4)]
    assert [x[0] for x in numbers] == pytest.approx([math.log(2)] * 4)
    assert {float(x[2]) for x in numbers} == {0.25}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_n": [1.0, 2.0]}, "xielu.alpha_n has 2 numbers for 4 layers"),
        ({"beta": None}, r"xielu.beta is missing"),
        ({"eps": "small"}, r"xielu.eps must be a finite number, got 'small'"),
    ],
)
def test_numbers_of_xielu_that_a_file_lacks_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_model(xielu_file(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("alpha_p", None, "tensor blk.2.ffn_xielu.alpha_p is missing"),
        ("beta", (2,), r"ffn_xielu.beta has shape \[2\], expected one number"),
    ],
)
def test_tensors_of_xielu_are_one_number_each(
    name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    folder = write_drawn("apertus", tmp_path / "apertus")
    weights = load_file(folder / "model.safetensors")
    full = f"model.layers.2.mlp.act_fn.{name}"
    del weights[full]
    if shape is not None:
        weights[full] = np.zeros(shape, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        load_model(folder)
