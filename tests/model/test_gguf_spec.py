"""From GGUF metadata to specs: what is read, what is refused, and how the refusal is worded."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.model.tensors import tensor, zeros

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.metadata import Metadata
from quire.loader.tensor import Tensor
from quire.model.gguf_spec import spec_from_gguf
from quire.model.rope import DivisorScaling, LinearScaling, YarnScaling
from quire.model.spec import Activation, Experts, ModelSpec, PositionScale, Scoring

SIZES: dict[str, object] = {
    "context_length": 512,
    "embedding_length": 48,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 128,
}
EMBEDDING = zeros({"token_embd.weight": (128, 48), "output.weight": (128, 48)})


def spec(
    architecture: str = "llama", tensors: dict[str, Tensor] | None = None, /, **changes: object
) -> ModelSpec:
    """Changes are keys under the architecture's name, with `__` for dots; None leaves one out."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    fields = {f"{architecture}.{key}": value for key, value in {**SIZES, **changed}.items()}
    metadata = Metadata("m.gguf", {"general.architecture": architecture, **fields})
    return spec_from_gguf(metadata, EMBEDDING if tensors is None else tensors)


def test_a_plain_llama_is_read() -> None:
    found = spec()
    assert (found.hidden_size, found.ffn_size, found.num_layers) == (48, 96, 2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 12)
    assert (found.vocabulary_size, found.context_length) == (128, 512)
    assert found.windows == (None, None)
    assert found.rope.base == 10000.0 and found.rope.dims == 12 and found.rope.scaling is None
    assert not found.tied_head
    assert not (
        found.attention.qkv_bias or found.attention.output_bias or found.layers[0].feed.has_bias
    )


@pytest.mark.parametrize(
    ("architecture", "interleaved", "qkv_bias", "qk_norm", "sub_norms"),
    [
        ("llama", True, False, False, False),
        ("qwen2", False, True, False, False),
        ("qwen3", False, False, True, False),
        ("bitnet", False, False, False, True),
    ],
)
def test_each_architecture_has_its_own_parts(
    architecture: str, interleaved: bool, qkv_bias: bool, qk_norm: bool, sub_norms: bool
) -> None:
    found = spec(architecture)
    assert found.family == architecture
    assert found.rope.interleaved is interleaved
    assert (found.attention.qkv_bias, found.qk_norm, found.sub_norms) == (
        qkv_bias,
        qk_norm,
        sub_norms,
    )
    assert found.activation is Activation.SILU  # llama.cpp's bitnet too


def test_an_unknown_architecture_is_named_with_those_we_run() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"'maxima' \(general.architecture\).*supported: .*arcee, .*bitnet, bitnet-25, "
        r"bitnet-b1\.58, .*, llama, .*, qwen2, ",
    ):
        spec("maxima")


def test_a_missing_architecture_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        spec_from_gguf(Metadata("m.gguf", {}), {})


@pytest.mark.parametrize(
    "key", [key for key in SIZES if key not in {"attention.head_count_kv", "vocab_size"}]
)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=f"llama.{key} is missing"):
        spec(**{key: None})


@pytest.mark.parametrize("key", [key for key in SIZES if "epsilon" not in key])
@pytest.mark.parametrize("value", [0, -1, 2**40, 3.5, True, "4", np.array([4, 5])])
def test_a_size_that_cannot_be_is_named(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"llama.{key} must be an integer from 1 to"):
        spec(**{key: value})


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"]
)
def test_a_size_may_be_given_for_each_layer(key: str) -> None:
    """Where it is the same for all, as Granite 4's files have it."""
    size = Metadata("m.gguf", SIZES).integer(key)
    assert spec(**{key: np.full(spec().num_layers, size)}) == spec()
    with pytest.raises(ModelFileError, match=f"llama.{key} must be an integer"):
        spec(**{key: np.array([size, 2 * size])})


def test_what_a_file_may_leave_out() -> None:
    found = spec(attention__head_count_kv=None, vocab_size=None)
    assert found.num_kv_heads == 4
    assert found.vocabulary_size == 128  # the embedding's rows


def test_a_file_without_vocabulary_or_embedding_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"llama\.vocab_size is missing"):
        spec("llama", {}, vocab_size=None)


def test_head_size_is_read_where_it_is_not_the_quotient() -> None:
    found = spec("qwen3", attention__key_length=32, attention__value_length=32)
    assert found.head_dim == 32 and found.query_size == 128 and found.rope.dims == 32
    with pytest.raises(UnsupportedModelError, match=r"attention\.value_length = 16"):
        spec("qwen3", attention__key_length=32, attention__value_length=16)


def test_part_of_a_head_may_turn() -> None:
    assert spec(rope__dimension_count=4).rope.dims == 4


def test_optional_tensors_switch_their_parts_on() -> None:
    names = ("attn_q.bias", "attn_output.bias", "ffn_up.bias", "attn_q.scale")
    found = spec("llama", {**EMBEDDING, **zeros({f"blk.0.{name}": (1,) for name in names})})
    assert (
        found.attention.qkv_bias
        and found.attention.output_bias
        and found.layers[0].feed.has_bias
        and found.linear_scales
    )


def test_a_file_without_a_head_ties_it_to_the_embedding() -> None:
    assert spec("llama", zeros({"token_embd.weight": (128, 48)})).tied_head


def test_a_window_holds_for_every_layer_and_zero_means_none() -> None:
    assert spec(attention__sliding_window=64).windows == (64, 64)
    assert spec(attention__sliding_window=0).windows == (None, None)


def test_rope_scaling_is_read() -> None:
    assert spec(rope__scaling__type="none", rope__scaling__factor=8.0).rope.scaling is None
    # What llama.cpp's converter writes for every bitnet.
    unscaled = spec("bitnet", rope__scaling__type="linear", rope__scaling__factor=1.0)
    assert unscaled.rope.scaling is None
    linear = LinearScaling(2.0)
    assert spec(rope__scaling__type="linear", rope__scaling__factor=2.0).rope.scaling == linear
    assert spec(rope__scaling__factor=2.0).rope.scaling == linear
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    assert spec("qwen2", **yarn).rope.scaling == YarnScaling(4.0, 512)
    fields = {
        **yarn,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    assert spec("qwen2", **fields).rope.scaling == YarnScaling(4.0, 128, beta_fast=16.0)


def test_frequency_divisors_are_read_from_their_tensor() -> None:
    divisors = {"rope_freqs.weight": tensor("rope_freqs.weight", [1, 1, 2, 4, 8, 8])}
    found = spec("llama", {**EMBEDDING, **divisors})
    assert found.rope.scaling == DivisorScaling((1.0, 1.0, 2.0, 4.0, 8.0, 8.0))
    with pytest.raises(UnsupportedModelError, match="none beside rope_freqs"):
        spec("llama", {**EMBEDDING, **divisors}, rope__scaling__factor=2.0)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight has shape \[6\], expected \[5\]"):
        spec("llama", {**EMBEDDING, **divisors}, rope__dimension_count=10)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 2),
        ("expert_count", np.array([8, 8])),
        ("attention.causal", False),
        ("attention.scale", 0.1),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("pooling_type", 1),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_attn_factor", 1.2),
        ("rope.dimension_sections", np.array([16, 24, 24, 0])),
        ("attention.sliding_window_pattern", np.array([True, False])),
        ("something.new", 1),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} = .* is not supported"):
        spec(**{key: value})


def test_a_yarn_attention_factor_of_one_changes_nothing() -> None:
    assert spec(**{"rope.scaling.yarn_attn_factor": 1.0}) == spec()
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
    }  # which llama.cpp scales itself
    assert spec(**yarn, **{"rope.scaling.yarn_attn_factor": 0.88}) == spec(**yarn)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("attention.causal", True),
        ("attn_logit_softcapping", 0.0),
        ("rope.scaling.finetuned", True),
        ("tensor_data_layout", "Meta AI original pth"),
        ("pooling_type", 3),
    ],
)
def test_what_says_nothing_new_is_accepted(key: str, value: object) -> None:
    assert spec(**{key: value}) == spec()


def test_soft_caps_are_read_and_must_be_possible() -> None:
    found = spec(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (found.attention_soft_cap, found.logit_soft_cap) == (50.0, 30.0)
    for cap in (-1.0, 1e-300, 1e300):
        message = rf"logit_soft_cap must be 0 or from 1e-06 to 1e\+09, got {re.escape(str(cap))}"
        with pytest.raises(ModelFileError, match=message):
            spec(final_logit_softcapping=cap)


@pytest.mark.parametrize("window", [512, 2**31, 2**32 - 1, 2**62])
def test_a_window_no_shorter_than_the_context_is_none(window: int) -> None:
    assert spec(**{"attention.sliding_window": window}).windows == spec().windows


def test_keys_of_other_architectures_are_none_of_our_business() -> None:
    metadata = {"general.architecture": "llama", "llamafile.version": 1, "clip.projector": "x"}
    fields = {f"llama.{key}": value for key, value in SIZES.items()}
    assert spec_from_gguf(Metadata("m.gguf", {**metadata, **fields}), EMBEDDING) == spec()


EXPERTS: dict[str, object] = {"expert_count": 8, "expert_used_count": 2}


def experts(architecture: str, /, **changes: object) -> Experts:
    found = spec(architecture, **{**EXPERTS, **changes}).layers[-1].feed_forward
    assert isinstance(found, Experts)
    return found


def test_a_llama_with_experts_is_a_mixtral() -> None:
    assert spec(**EXPERTS).family == "mixtral"
    assert experts("llama").router.normalises and experts("llama").size == 96
    assert spec(expert_count=0).family == "llama"


def test_what_files_do_not_say_of_routers_is_what_llama_cpp_takes_for_granted() -> None:
    assert experts("qwen3moe").router.normalises
    assert not experts("qwen2moe").router.normalises and not experts("olmoe").router.normalises
    latent: dict[str, object] = {
        "attention.kv_lora_rank": 8,
        "attention.key_length_mla": 12,
        "attention.value_length_mla": 8,
        "rope.dimension_count": 4,
    }
    assert experts("deepseek2", **latent).router.scoring is Scoring.SOFTMAX
    third = experts("deepseek2", **latent, expert_gating_func=2)
    assert third.router.scoring is Scoring.SIGMOID and not third.router.has_choice_bias
    for num_layers, size, scoring in (
        (47, 154_880, Scoring.SIGMOID),  # GLM 4.7 Lite
        (48, 154_880, Scoring.SIGMOID),
        (46, 154_880, Scoring.SOFTMAX),
        (47, 154_881, Scoring.SOFTMAX),
    ):
        sizes = {"block_count": num_layers, "vocab_size": size}
        assert experts("deepseek2", **latent, **sizes).router.scoring is scoring
    lite = experts("deepseek2", **latent, block_count=47, vocab_size=154_880, expert_gating_func=1)
    assert lite.router.scoring is Scoring.SOFTMAX
    with pytest.raises(UnsupportedModelError, match=r"expert_gating_func = 3 .* 1 \(softmax\)"):
        experts("deepseek2", **latent, expert_gating_func=3)


def test_a_pattern_of_windows_is_read_as_a_list_and_as_a_period() -> None:
    window: dict[str, object] = {"attention.sliding_window": 9, "block_count": 4}
    assert spec("gemma2", **window).windows == (9, None, 9, None)
    assert spec("gemma3", **window).windows == (9, 9, 9, 9)
    key = "attention.sliding_window_pattern"
    assert spec("gemma3", **window, **{key: 2}).windows == (9, None, 9, None)
    listed = np.array([False, True, True, False])
    assert spec("olmo2", **window, **{key: listed}).windows == (None, 9, 9, None)
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern"):
        spec("olmo2", **window, **{key: listed[:3]})


def test_attention_scales_that_follow_from_the_number_of_layers() -> None:
    sizes: dict[str, object] = {"attention.key_length": 16, "attention.value_length": 16}
    assert spec("gemma2", **sizes).attention.scale == 16**-0.5
    assert spec("gemma2", **sizes, block_count=46).attention.scale == 12**-0.5
    assert spec("gemma3", **sizes, block_count=62).attention.scale == 12**-0.5


def test_llama4_of_128_experts_has_no_norms_of_queries_and_keys() -> None:
    few = spec("llama4", **EXPERTS, block_count=4)
    many = spec("llama4", **{**EXPERTS, "expert_count": 128}, block_count=4)
    assert few.layers[0].attention.qk_norm is not None and many.layers[0].attention.qk_norm is None
    assert [layer.attention.rope is None for layer in few.layers] == [False, False, False, True]
    assert few.layers[3].attention.position_scale == PositionScale(
        factor=0.1, length=8192, offset=1
    )
    with pytest.raises(UnsupportedModelError, match=r"attention\.sliding_window = 0"):
        spec("llama4", **EXPERTS, **{"attention.sliding_window": 0})


def test_halves_of_nemotrons_layers_are_told_by_their_sizes() -> None:
    sizes: dict[str, object] = {
        "block_count": 5,
        "attention.head_count_kv": np.array([0, 0, 2, 0, 2]),
        "feed_forward_length": np.array([0, 96, 0, 0, 96]),
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "ssm.inner_size": 96,
        "ssm.state_size": 8,
        "ssm.time_step_rank": 6,
        "nextn_predict_layers": 1,  # the last layer, which is left out
    }
    names = ("blk.1.ffn_up.bias", "blk.2.attn_output.bias", "blk.0.ssm_conv1d.bias")
    tensors = {**EMBEDDING, **zeros(dict.fromkeys(names, (1,)))}
    found = spec("nemotron_h", tensors, **sizes)
    assert [*found.states] == [0, 3] and [*found.attentions] == [2]
    assert [layer.feed_forward is not None for layer in found.layers] == [False, True] + [False] * 2
    assert found.layers[1].feed.has_bias and found.attention.output_bias
    assert found.states[3].has_convolution_bias and found.attention.rope is None
    routed = {**EXPERTS, "expert_shared_feed_forward_length": 40}
    mixed = spec("nemotron_h_moe", **sizes, **routed).layers[1].feed_forward
    assert isinstance(mixed, Experts) and not mixed.is_gated and mixed.shared is not None
    assert mixed.router.scoring is Scoring.SIGMOID and not mixed.shared.is_gated
    latent = spec("nemotron_h_moe", **sizes, **routed, moe_latent_size=16).layers[1].feed
    assert latent == replace(mixed, latent_size=16)
    with pytest.raises(UnsupportedModelError, match=r"moe_latent_size = 16 is not supported"):
        spec(moe_latent_size=16)
    for key in ("feed_forward_length", "attention.head_count_kv"):
        few = {**sizes, key: np.array([2, 0, 2])}
        with pytest.raises(UnsupportedModelError, match=rf"{key} = .* a number for each layer"):
            spec("nemotron_h", **few)
