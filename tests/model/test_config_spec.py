"""From config.json to specs: what is read, what is refused, and how the refusal is worded."""

import json
import math
from typing import Any

import pytest
from tests.drawn_families import CASES, drawn_config
from tests.fixture_files import FIXTURES
from tests.model.flat_spec import biases

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.config_spec import spec_from_config
from quire.model.rope import LinearScaling, Llama3Scaling, YarnScaling
from quire.model.spec import Activation, ModelSpec, tensor_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def spec(model_type: str = "llama", /, **changes: Any) -> ModelSpec:
    return spec_from_config({**CONFIG, "model_type": model_type, **changes})


def test_what_a_family_leaves_out_is_what_transformers_means_by_it() -> None:
    llama = spec()
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_epsilon) == (4, 12, 1e-6)
    assert (llama.rope.base, llama.activation) == (10000.0, Activation.SILU)
    assert not llama.rope.interleaved and not llama.tied_head
    mistral = spec("mistral", num_attention_heads=8, max_position_embeddings=8192)
    assert mistral.num_kv_heads == 8
    assert mistral.windows == (4096, 4096, 4096)
    assert spec("qwen3", num_attention_heads=32).head_dim == 128
    bitnet = spec("bitnet", num_attention_heads=10)
    assert (bitnet.num_kv_heads, bitnet.activation) == (5, Activation.RELU2)
    assert (bitnet.rope.base, bitnet.norm_epsilon) == (500000.0, 1e-5)
    assert bitnet.sub_norms


def test_a_null_overrides_a_default() -> None:
    assert spec("mistral", num_key_value_heads=None, sliding_window=None).windows == (None,) * 3
    assert spec("mistral", num_key_value_heads=None).num_kv_heads == 4


def test_biases_are_where_each_family_has_them() -> None:
    plain, biased = spec(), spec(attention_bias=True, mlp_bias=True)
    assert not (
        plain.attention.qkv_bias
        or plain.attention.output_bias
        or plain.layers[0].feed_forward.has_bias
    )
    assert (
        biased.attention.qkv_bias
        and biased.attention.output_bias
        and biased.layers[0].feed_forward.has_bias
    )
    qwen2 = spec("qwen2", num_key_value_heads=2)
    assert biases(qwen2) == (True, False, False)


@pytest.mark.parametrize("window", [512, 2**31 - 1, 2**31, 2**32, 2**62])
def test_a_window_no_shorter_than_the_context_is_none(window: int) -> None:
    """No executor has to hold it."""
    shape = {"num_key_value_heads": 4, "max_position_embeddings": 512}
    assert spec("mistral", sliding_window=window, **shape).windows == (None,) * 3
    assert spec("mistral", sliding_window=511, **shape).windows == (511,) * 3
    with pytest.raises(ModelFileError, match="sliding_window"):
        spec("mistral", sliding_window=2**63, **shape)


def test_windows_of_later_layers_are_read_both_ways() -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        sizes = {"num_key_value_heads": 2, "sliding_window": 9, "max_window_layers": 1}
        return spec("qwen2", **sizes, **changes).windows

    assert windows() == (None, None, None)
    assert windows(use_sliding_window=True) == (None, 9, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == (9, None, 9)
    with pytest.raises(ModelFileError, match="layer_types must be a list of 3 strings"):
        windows(layer_types=kinds[:2])
    with pytest.raises(UnsupportedModelError, match=r"layer_types = .* is not supported"):
        windows(layer_types=["chunked_attention"] * 3)


def test_rope_is_read_from_old_and_new_fields_alike() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    old = spec(rope_theta=5e5, rope_scaling=scaling)
    new = spec(rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == new
    assert old.rope.base == 5e5
    assert old.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 16)
    oldest = spec(rope_scaling={"type": "linear", "factor": 2.0})
    assert oldest.rope.scaling == LinearScaling(2.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    assert spec(rope_scaling=yarn).rope.scaling == YarnScaling(4.0, 64, attention_factor=1.5)
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 9e3}).rope.base == 9e3


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "longrope"}, UnsupportedModelError, "rope_type = 'longrope' is not supp"),
        ({"type": "dynamic", "factor": 2.0}, UnsupportedModelError, "type = 'dynamic' is not supp"),
        ({"type": "linear"}, ModelFileError, "rope_scaling: factor is missing"),
        ({"type": "linear", "factor": "2"}, ModelFileError, "factor must be a finite number"),
        ({"type": "linear", "factor": 2, "mscale": 1}, UnsupportedModelError, "mscale = 1 is not"),
        ({"mrope_section": [1, 2]}, UnsupportedModelError, "mrope_section"),
        ({"type": "yarn", "factor": 2, "truncate": 1}, ModelFileError, "truncate must be true or"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor = 0.5"),
        ("yarn", ModelFileError, "rope_scaling must be an object"),
    ],
)
def test_rope_scaling_that_we_do_not_compute_is_refused(
    rope: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec(rope_scaling=rope)


def test_an_unknown_model_type_is_named_with_those_we_run() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"'mamba' \(model_type\).*supported: arcee, bitnet, cohere, .*, llama, .*, qwen3",
    ):
        spec("mamba")


def test_soft_caps_are_read_and_null_is_none() -> None:
    found = spec(attn_logit_softcapping=50.0, final_logit_softcapping=None)
    assert (found.attention_soft_cap, found.logit_soft_cap) == (50.0, 0.0)


@pytest.mark.parametrize("key", CONFIG)
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: {key} is missing"):
        spec_from_config({name: value for name, value in CONFIG.items() if name != key})


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
@pytest.mark.parametrize("value", [0, -1, 2**40, 3.5, True, "4", [4]])
def test_a_field_that_cannot_be_is_named(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: {key} must be an integer from 1 to"):
        spec(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_fast"),
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("partial_rotary_factor", 0.5),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.015),
        ("logits_scaling", 8.0),
        ("sliding_window", 4096),
        ("rope_interleaved", True),
        ("is_causal", False),
        ("no_rope_layers", [1, 1, 0]),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json: {key} = .* is not supported"):
        spec(**{key: value})


def test_what_says_nothing_of_the_mathematics_is_accepted() -> None:
    # Fields that published files of these families carry.
    harmless = {
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "initializer_range": 0.02,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
        "use_cache": True,
    }
    assert spec(**harmless) == spec()


@pytest.mark.parametrize("family", sorted(p.name for p in (FIXTURES / "families").iterdir()))
def test_what_transformers_writes_today_is_read(family: str) -> None:
    config = json.loads((FIXTURES / "families" / family / "config.json").read_text())
    found = spec_from_config(config)
    assert found.family == config["model_type"]
    assert found.tied_head is config["tie_word_embeddings"]


def in_the_older_form(config: dict[str, Any]) -> dict[str, Any]:
    """As files on the hub mostly are: rope_theta and rope_scaling, and no list of layers."""
    if "per_layer_config" in config:  # gemma4, whose ropes were never told otherwise
        own = next(iter(config["per_layer_config"].values()))
        heads = {"num_global_key_value_heads": own.get("num_key_value_heads")}
        return {**config, "per_layer_config": None, "global_head_dim": own["head_dim"], **heads}
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old["torch_dtype"] = config.get("dtype")
    rope = dict(config.get("rope_parameters") or {})
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in rope and (key != "original_max_position_embeddings" or "long_factor" in rope):
            old[key] = rope.pop(key)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if config["model_type"] != "ministral":  # whose list is not the usual one
        del_layers = old.pop("layer_types", None)
        assert del_layers is None or len(del_layers) == config["num_hidden_layers"]
    return old


@pytest.mark.parametrize("case", CASES)
def test_the_older_form_of_a_config_gives_the_same_spec(case: str) -> None:
    config = drawn_config(case)
    assert spec_from_config(in_the_older_form(config)) == spec_from_config(config)


@pytest.mark.parametrize(
    ("outer", "case"), [("gemma3", "gemma3"), ("mistral3", "ministral3"), ("llama4", "llama4")]
)
def test_a_model_that_sees_has_its_decoders_fields_apart(outer: str, case: str) -> None:
    text = drawn_config(case)
    whole = {"model_type": outer, "text_config": text, "vision_config": {"hidden_size": 7}}
    assert spec_from_config(whole) == spec_from_config(text)
    with pytest.raises(ModelFileError, match="text_config is missing"):
        spec_from_config({"model_type": outer})


def test_what_other_models_of_a_family_compute_is_refused_by_name() -> None:
    for case, key, value in (
        ("gpt-oss", "swiglu_limit", 9.0),
        ("deepseek2", "scoring_func", "softmax"),
        ("deepseek2", "moe_layer_freq", 2),
        ("qwen2moe", "use_sliding_window", True),
    ):
        config = {**drawn_config(case), "layer_types": None, "sliding_window": 9}
        if case == "deepseek2":
            del config["sliding_window"]
        with pytest.raises(UnsupportedModelError, match=f"{key} = .* is not supported"):
            spec_from_config({**config, key: value})


def test_a_pattern_of_windows_may_be_letters() -> None:
    config = {**drawn_config("exaone4"), "layer_types": None}
    windows = [spec_from_config({**config, "sliding_window_pattern": p}).windows for p in (2, "LG")]
    assert windows == [(9, None, 9, None)] * 2
    with pytest.raises(ModelFileError, match="sliding_window_pattern must be an integer"):
        spec_from_config({**config, "sliding_window_pattern": "GL"})


# Billions of weights that models of these sizes are known to have (of those that see: the decoder).
PUBLISHED = {
    "command-r7b": 8.03,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "exaone4-32b": 32.0,
    "gemma-3-4b": 3.88,
    "glm-4.5-air": 106.9,
    "gpt-oss-20b": 20.9,
    "granite-3.3-8b": 8.17,
    "llama4-scout": 107.8,
    "mixtral-8x7b": 46.7,
    "phi-4-mini": 3.84,
    "qwen3-30b-a3b": 30.5,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_with_the_fields_of_published_models_have_their_weights(name: str) -> None:
    config = json.loads((FIXTURES / "published-configs.json").read_text())[name]
    weights = sum(math.prod(shape) for shape in tensor_shapes(spec_from_config(config)).values())
    assert weights / 1e9 == pytest.approx(PUBLISHED[name], rel=3e-3)
