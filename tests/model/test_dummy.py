"""Models without files: what their names mean, what is in them, and that they run."""

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from quire.loader.tensor import Tensor
from quire.model.dummy import SHAPES, DummyModel, random_blocks, read_name
from quire.model.gguf_spec import spec_from_gguf
from quire.model.loading import Model, load_model
from quire.model.quant_mixes import MIXES
from quire.quant.formats import FORMATS, Format


def formats(name: str) -> dict[str, str]:
    return {tensor.name: tensor.format.name for tensor in DummyModel(name).planned}


def layers_of(name: str, tensor: str, wanted: str) -> list[int]:
    found = formats(name)
    layers = (key.split(".") for key, held in found.items() if held == wanted)
    return sorted(int(parts[1]) for parts in layers if parts[0] == "blk" and parts[2] == tensor)


# ---- names


def test_a_name_says_shape_mix_and_seed() -> None:
    assert read_name("dummy:llama-1b:q4_k_m:7").text == "dummy:llama-1b:Q4_K_M:7"
    assert read_name("dummy:llama-1b").text == "dummy:llama-1b:Q4_K_M"
    assert read_name("dummy:bitnet-2b").text == "dummy:bitnet-2b:TQ2_0"
    assert read_name("dummy:llama-8b:bf16").mix.base == "BF16"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("dummy:llama-2b", "no shape 'llama-2b'; there are smollm2-135m, "),
        ("dummy:", "no shape ''"),
        ("dummy:tiny:Q4_K_XL", "no mix 'Q4_K_XL'; there are F32, "),
        ("dummy:tiny:Q8_0:x", "the seed must be from 0 to 4294967295, got 'x'"),
        ("dummy:tiny:Q8_0:4294967296", "the seed must be"),
        ("dummy:tiny:Q8_0:1:2", "dummy:SHAPE:MIX"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_model(name)


# ---- shapes and mixes


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        *(("smollm2-135m", 0.1345), ("llama-1b", 1.174), ("llama-8b", 8.03), ("bitnet-2b", 2.413)),
        *(("olmoe-7b", 6.919), ("qwen3-30b-a3b", 30.53), ("gpt-oss-20b", 20.91)),
    ],
)
def test_shapes_have_the_weights_of_the_models_they_stand_for(shape: str, billions: float) -> None:
    weights = sum(np.prod(tensor.shape) for tensor in DummyModel(f"dummy:{shape}").planned)
    assert weights / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [  # what the mixes come to: held so that a change of a mix shows, not taken from other files
        ("dummy:llama-8b:Q4_K_M", 4.92),
        ("dummy:llama-8b:Q5_K_M", 5.73),
        ("dummy:llama-8b:Q6_K", 6.60),
        ("dummy:llama-8b:Q8_0", 8.54),
        ("dummy:llama-8b:Q4_K_S", 4.69),
        ("dummy:llama-8b:Q3_K_M", 4.02),
        ("dummy:llama-8b:Q3_K_L", 4.32),
        ("dummy:llama-8b:Q2_K", 3.18),
        ("dummy:llama-8b:IQ3_M", 3.78),
        ("dummy:llama-8b:IQ3_S", 3.68),
        ("dummy:llama-8b:IQ3_XS", 3.52),
        ("dummy:llama-8b:IQ3_XXS", 3.27),
        ("dummy:llama-8b:IQ2_M", 2.95),
        ("dummy:llama-8b:IQ2_S", 2.76),
        ("dummy:llama-8b:IQ2_XS", 2.60),
        ("dummy:llama-8b:IQ2_XXS", 2.40),
        ("dummy:llama-8b:IQ1_M", 2.16),
        ("dummy:llama-8b:IQ1_S", 2.02),
    ],
)
def test_the_weight_of_each_mix_of_an_8b_model_stays_what_it_is(
    name: str, gigabytes: float
) -> None:
    assert DummyModel(name).file_bytes / 1e9 == pytest.approx(gigabytes, abs=0.012)


def test_medium_mixes_give_more_bits_to_some_layers_values_and_down_projections() -> None:
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for mix, base in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K")):
        name = f"dummy:llama-8b:{mix}"
        assert layers_of(name, "attn_v", "Q6_K") == more
        assert layers_of(name, "ffn_down", "Q6_K") == more
        found = formats(name)
        assert found["output.weight"] == "Q6_K"
        assert found["token_embd.weight"] == base
        assert found["blk.0.attn_norm.weight"] == "F32"
        assert Counter(found.values()) == {"F32": 65, "Q6_K": 33, base: 193}


def test_rows_that_do_not_fill_a_block_get_a_format_of_smaller_blocks() -> None:
    found = formats("dummy:smollm2-135m:Q4_K_M")
    assert found["token_embd.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == "Q5_0"
    assert found["blk.0.attn_v.weight"] == "Q8_0"
    assert found["blk.0.ffn_down.weight"] == "Q6_K"  # rows of 1536 do fill it
    assert found["blk.5.ffn_down.weight"] == "Q6_K"
    assert found["blk.6.ffn_down.weight"] == "Q4_K"


def test_ternary_mixes_keep_embeddings_finer() -> None:
    tied = formats("dummy:bitnet-2b:TQ2_0")
    assert tied["token_embd.weight"] == "Q6_K"
    assert {tied[f"blk.7.{name}.weight"] for name in ("attn_v", "ffn_down")} == {"TQ2_0"}
    own = formats("dummy:llama-1b:TQ1_0")
    assert (own["token_embd.weight"], own["output.weight"]) == ("Q4_K", "Q6_K")


def test_mxfp4_is_for_experts_and_for_all_matrices_of_a_model_without_them() -> None:
    found = formats("dummy:tiny-moe:MXFP4")
    assert {name for name, block in found.items() if block == "MXFP4"} == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1) for part in ("gate", "up", "down")
    }
    assert (found["output.weight"], found["blk.1.attn_v.weight"]) == ("Q8_0", "Q8_0")
    assert formats("dummy:tiny:MXFP4")["blk.1.attn_v.weight"] == "MXFP4"


def test_nvfp4_is_for_linears_and_q1_0_and_q2_0_for_all_but_the_head() -> None:
    """As llama.cpp converts checkpoints to the one and quantises to the others."""
    nvfp4, q1_0 = (formats(f"dummy:tiny:{name}") for name in ("NVFP4", "Q1_0"))
    assert (nvfp4["token_embd.weight"], nvfp4["output.weight"]) == ("BF16", "BF16")
    assert {nvfp4[name] for name in nvfp4 if "blk" in name} == {"NVFP4", "F32"}
    assert (q1_0["token_embd.weight"], q1_0["output.weight"]) == ("Q1_0", "Q6_K")
    q2_0 = formats("dummy:tiny:Q2_0")
    assert (q2_0["token_embd.weight"], q2_0["output.weight"]) == ("Q4_K", "Q6_K")
    assert {q2_0[name] for name in q2_0 if "blk" in name} == {"Q2_0", "F32"}


def test_float_mixes_are_float_throughout() -> None:
    assert Counter(formats("dummy:tiny:bf16").values()) == {"BF16": 16, "F32": 5}


def test_the_mix_of_the_default_model_is_that_of_its_file() -> None:
    """SmolLM2-135M-Instruct.Q4_1.gguf, as `quire pull` fetches it."""
    found = formats("dummy:smollm2-135m:Q4_1")
    assert found.pop("token_embd.weight") == "Q8_0"
    assert Counter(found.values()) == {"Q4_1": 210, "F32": 61}


# ---- what is in them


def digest(model: Model) -> str:
    hashed = hashlib.sha256()
    for tensor in model.tensors.values():
        hashed.update(tensor.data.data)
    return hashed.hexdigest()


def test_one_name_is_one_model_and_another_seed_another() -> None:
    first, again = load_model("dummy:tiny"), load_model("dummy:tiny:Q4_K_M:0")
    assert digest(first) == digest(again)
    assert digest(load_model("dummy:tiny:Q4_K_M:1")) != digest(first)
    two = first.tensors["blk.0.attn_q.weight"], first.tensors["blk.1.attn_q.weight"]
    assert not np.array_equal(two[0].data, two[1].data)


@pytest.mark.parametrize(
    "block_format", [one for one in FORMATS if not one.tail_bytes], ids=lambda one: str(one.name)
)
@pytest.mark.parametrize("size", [0.01, 0.05])
def test_random_weights_have_the_size_asked_for_and_hardly_a_mean(
    block_format: Format, size: float
) -> None:
    data = random_blocks(block_format, 256 * 1000, size, np.random.default_rng(5))
    weights = block_format.decode(data.reshape(-1, block_format.block_bytes)).astype(np.float64)
    assert 0.65 * size < np.sqrt(np.mean(weights**2)) < 1.3 * size
    assert abs(weights.mean()) < 0.15 * size
    assert np.abs(weights).max() < 8 * size


def test_bitnets_matrices_have_one_scale_each_and_those_of_other_families_a_scale_a_block() -> None:
    def num_scales(name: str, tensor: str) -> int:
        [planned] = [one for one in DummyModel(name).planned if one.name == tensor]
        return len(np.unique(planned.data.reshape(-1, 66)[:, 64:].copy().view(np.uint16)))

    assert num_scales("dummy:bitnet-2b:TQ2_0", "blk.3.attn_k.weight") == 1
    assert num_scales("dummy:tiny:TQ2_0", "blk.1.attn_k.weight") > 1


def test_ternary_blocks_hold_ternary_weights() -> None:
    tensor = load_model("dummy:tiny:TQ2_0").tensors["blk.0.attn_q.weight"]
    row = tensor.rows_float32(0, 1)[0]
    assert len(np.unique(np.abs(row))) == 2  # zero and the scale of its one block
    assert set(np.unique(np.sign(row))) == {-1.0, 0.0, 1.0}


def test_a_model_too_large_for_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 512)
    with pytest.raises(ConfigError, match=r"dummy:tiny:Q4_K_M takes 0\.0 GiB, and this machine"):
        load_model("dummy:tiny")


# ---- running them


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("dummy:tiny", kv_memory="8MiB", max_batch_size=4) as llm:
        yield llm


def test_a_dummy_model_runs_and_repeats_itself(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    first, other = tiny.generate([[1, 2, 3], [4, 5]], params)
    assert first.error is None and other.error is None
    assert len(first.token_ids) == 5
    assert tiny.generate([1, 2, 3], params)[0].token_ids == first.token_ids
    assert tiny.tokenizer is None


def test_its_logits_are_neither_flat_nor_wild(tiny: LLM) -> None:
    [logits] = tiny.forward_batch([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 20


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_runs(mix: str) -> None:
    with LLM(f"dummy:tiny:{mix}", kv_memory="8MiB", max_batch_size=1) as llm:
        [logits] = llm.forward_batch([[1, 2]])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_model_that_quire_runs(shape: str) -> None:
    model = DummyModel(f"dummy:{shape}")
    planned = {tensor.name: tensor for tensor in model.planned}
    assert ("output.weight" not in planned) == SHAPES[shape].tied_head
    assert planned["token_embd.weight"].shape[0] == SHAPES[shape].vocabulary_size


def test_eight_experts_leave_bits_for_keys_values_and_attentions_output() -> None:
    """llama.cpp's choice for Mixtral, and for any model of eight experts."""
    found = formats("dummy:tiny-moe:Q4_K_M")
    for layer in range(2):
        kinds = [found[f"blk.{layer}.attn_{name}.weight"] for name in ("q", "k", "v", "output")]
        assert kinds == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]
    assert formats("dummy:tiny-moe:Q5_K_M")["blk.0.attn_output.weight"] == "Q5_K"
    assert formats("dummy:tiny-moe:Q6_K")["blk.0.attn_output.weight"] == "Q6_K"
    many = formats("dummy:olmoe-7b:Q4_K_M")
    assert [many[f"blk.4.attn_{name}.weight"] for name in "qkv"] == ["Q4_K", "Q4_K", "Q6_K"]


def test_gpt_oss_has_its_windows_biases_sinks_and_names() -> None:
    model = DummyModel("dummy:gpt-oss-20b:Q8_0")
    planned = {tensor.name: tensor for tensor in model.planned}
    assert "blk.0.post_attention_norm.weight" in planned and "blk.0.ffn_norm.weight" not in planned
    assert planned["blk.23.attn_sinks.weight"].shape == (64,)
    assert planned["blk.1.ffn_gate_exps.bias"].shape == (32, 2880)
    assert planned["blk.1.ffn_gate_exps.bias"].format.name == "F32"
    assert abs(planned["blk.1.attn_q.bias"].data.view("<f4").mean()) < 0.01
    nothing = np.empty(0, np.uint8)
    held = {one.name: Tensor(one.name, one.shape, one.format, nothing) for one in model.planned}
    spec = spec_from_gguf(model.metadata, held)
    assert [layer.attention.window for layer in spec.layers] == [128, None] * 12


def test_experts_are_quantised_as_the_dense_matrices_of_their_kind_and_routers_are_not() -> None:
    found = formats("dummy:tiny-moe:Q4_K_M")
    dense = formats("dummy:tiny:Q4_K_M")
    for layer in range(2):
        for name in ("gate", "up", "down"):
            key = f"blk.{layer}.ffn_{name}"
            assert found[f"{key}_exps.weight"] == dense[f"{key}.weight"]
        assert found[f"blk.{layer}.ffn_gate_inp.weight"] == "F32"


def test_a_dummy_with_experts_runs() -> None:
    with LLM("dummy:tiny-moe:Q8_0", device="reference", kv_memory="4MiB") as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        both = llm.generate([[1, 2, 3], [4, 5]], params)
        alone = llm.generate([[1, 2, 3]], params)
    assert both[0].completions[0].token_ids == alone[0].completions[0].token_ids
    assert len(alone[0].completions[0].token_ids) == 6
