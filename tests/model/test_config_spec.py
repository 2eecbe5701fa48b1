"""From config.json to specs: what is read, what is refused, and how the refusal is worded."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from tests.drawn_families import CASES, DRAWN, drawn_config
from tests.fixture_files import FIXTURES
from tests.model.flat_spec import biases
from tests.oracles.drawn_weights import drawn

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.config_spec import config_family, spec_from_config
from quire.model.loading import load_model
from quire.model.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
)
from quire.model.spec import Activation, Dense, Experts, ModelSpec, tensor_shapes

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
        plain.attention.qkv_bias or plain.attention.output_bias or plain.layers[0].feed.has_bias
    )
    assert (
        biased.attention.qkv_bias
        and biased.attention.output_bias
        and biased.layers[0].feed.has_bias
    )
    qwen2 = spec("qwen2", num_key_value_heads=2)
    assert biases(qwen2) == (True, False, False)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("mistral", (False, False, False)),
        ("phi3", (False, False, False)),
        ("qwen2", (True, False, False)),
        ("qwen3", (True, True, False)),
        ("gemma", (True, True, False)),
        ("glm4", (True, False, False)),
        ("granite", (True, True, True)),
    ],
)
def test_fields_of_biases_count_where_transformers_reads_them(
    model_type: str, expected: tuple[bool, ...]
) -> None:
    found = spec(model_type, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    assert biases(found) == expected


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
    # Which scales beyond max_position_embeddings alone: no context is longer here.
    assert spec(rope_scaling={"type": "dynamic", "factor": 2.0}) == spec()


def test_fields_that_change_nothing_in_transformers_are_no_refusal() -> None:
    """As DeepSeek-R1-0528-Qwen3-8B, Yarn-Llama-2, Qwen3-Coder and dots.llm1 have them."""
    dots = drawn_config("dots1")
    assert spec_from_config({**dots, "scoring_func": "noaux_tc"}) == spec_from_config(dots)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert spec(rope_scaling={**yarn, "attn_factor": 0.88, "finetuned": True}) == spec(
        rope_scaling=yarn
    )
    experts = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    assert spec("qwen3_moe", **experts, use_qk_norm=True) == spec("qwen3_moe", **experts)


def test_the_original_context_may_stand_outside_of_the_rope() -> None:
    key = "original_max_position_embeddings"
    yarn = {"rope_type": "yarn", "factor": 4.0, key: 32}
    assert spec(rope_scaling=yarn, **{key: 16}).rope.scaling == YarnScaling(4.0, 16)
    without = spec(rope_scaling={**yarn, "factor": None, key: 16})
    assert without.rope.scaling == YarnScaling(4.0, 16)


def test_yarn_makes_the_context_as_long_as_it_says() -> None:
    """As Qwen's model cards have it: the scaling is added, max_position_embeddings is left."""
    key = "original_max_position_embeddings"
    yarn = {"rope_type": "yarn", "factor": 4.0, key: 60}
    assert spec(rope_scaling=yarn).context_length == 240
    assert spec(rope_scaling={**yarn, key: 8}).context_length == 64
    assert spec(rope_scaling={**yarn, "rope_type": "linear", key: None}).context_length == 64


def ropes(config: dict[str, Any]) -> list[Rope]:
    found = [layer.attention.rope for layer in spec_from_config(config).layers]
    return [rope for rope in found if rope is not None]


def test_a_rope_that_a_file_leaves_out_is_its_familys() -> None:
    gpt_oss = drawn_config("gpt-oss")
    del gpt_oss["rope_parameters"]
    assert ropes(gpt_oss)[0].scaling == YarnScaling(32.0, 4096, truncates=False)
    gemma4 = drawn_config("gemma4")
    del gemma4["rope_parameters"]
    sliding, full = (ropes(gemma4)[layer] for layer in (0, 2))
    assert sliding.scaling is None and sliding.base == 1e4
    assert full.scaling == DivisorScaling((1.0,) * 2 + (1e30,) * 6) and full.base == 1e6


def test_deepseek_may_keep_the_halves_of_its_rope_apart() -> None:
    config = drawn_config("deepseek2")
    found = [ropes({**config, "rope_interleave": value})[0].interleaved for value in (True, False)]
    assert found == [True, False]
    with pytest.raises(UnsupportedModelError, match="rope_interleave = True is not supported"):
        spec(rope_interleave=True)


def test_phis_mixtures_scale_their_rope_as_they_say() -> None:
    config = drawn_config("phimoe")
    rope = config["rope_parameters"]
    old = {"type": "longrope", **rope, "long_mscale": 1.3, "short_mscale": 1.3}
    del old["rope_type"]
    found = ropes({**config, "rope_parameters": None, "rope_scaling": old})[0].scaling
    assert isinstance(found, LongScaling) and found.attention_factor == 1.3
    other = {**rope, "long_mscale": 1.3}
    with pytest.raises(UnsupportedModelError, match=r"short_mscale = .* supported: 1\.3, the"):
        spec_from_config({**config, "rope_parameters": other})
    with pytest.raises(UnsupportedModelError, match=r"router_jitter_noise = 0\.1 is not supp"):
        spec_from_config({**config, "router_jitter_noise": 0.1})
    with pytest.raises(UnsupportedModelError, match="chooses two experts, not 3"):
        spec_from_config({**config, "num_experts_per_tok": 3})


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "longrope"}, UnsupportedModelError, "rope_type = 'longrope' is not supp"),
        ({"type": "ntk", "factor": 2.0}, UnsupportedModelError, "type = 'ntk' is not supp"),
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
        match=r"'maxima' \(model_type\).*supported: .*arcee, .*bitnet, .*, llama, .*, qwen3",
    ):
        spec("maxima")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("zamba2", "state-space layers"),
        ("kimi_linear", "gated delta networks of another kind"),
        ("opt", "learned positions that begin at the second"),
    ],
)
def test_what_a_known_architecture_has_beyond_us_is_said(name: str, part: str) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=rf"^architecture '{name}' \(model_type\) is not supported: it has {part}, which "
        "quire does not run$",
    ):
        spec(name)


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


WITHOUT_USUAL_LAYERS = ("ministral", "granitemoehybrid", "lfm2", "lfm2_moe")


def in_the_older_form(config: dict[str, Any]) -> dict[str, Any]:
    """As files on the hub mostly are: rope_theta and rope_scaling, and no list of layers."""
    if "rope_scaling" in config:
        return config
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
    if config["model_type"] not in WITHOUT_USUAL_LAYERS:
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


def test_a_model_that_sees_says_itself_whether_its_head_is_tied() -> None:
    """Where transformers writes its decoder's fields, they have the decoder's default."""
    text = {**drawn_config("gemma3"), "tie_word_embeddings": True}
    whole = {"model_type": "gemma3", "text_config": text}
    assert spec_from_config(whole).tied_head
    assert not spec_from_config({**whole, "tie_word_embeddings": False}).tied_head


def test_a_head_of_which_a_model_that_sees_says_nothing_is_tied_where_there_is_none(
    tmp_path: Path,
) -> None:
    """mistral3 ties its head unless told otherwise, mistral does not."""
    text = {**drawn_config("ministral3"), "tie_word_embeddings": None}
    shapes = json.loads((DRAWN / "ministral3" / "tensors.json").read_text())
    names = {name: f"language_model.{name}" for name in shapes}
    for has_head in (True, False):
        weights = {
            names[name]: drawn(name, tuple(shape))
            for name, shape in shapes.items()
            if has_head or name != "lm_head.weight"
        }
        folder = tmp_path / str(has_head)
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        whole = {"model_type": "mistral3", "text_config": text}
        (folder / "config.json").write_text(json.dumps(whole))
        with load_model(folder) as model:
            assert model.spec.tied_head is not has_head
    text["tie_word_embeddings"] = False  # as transformers 5 writes a head that is tied
    (folder / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True}))
    with load_model(folder) as model:
        assert model.spec.tied_head
    (folder / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": False}))
    with pytest.raises(ModelFileError, match=r"output\.weight \[64, 48\] is missing"):
        load_model(folder)


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


def test_granite_4_has_states_experts_and_rope_where_its_file_says_so() -> None:
    config = drawn_config("granitehybrid-dense")
    found = spec_from_config(config)
    assert [*found.states] == [0, 2, 3] and found.attention.rope is not None
    kinds = ["mamba", "attention", "attention", "mamba"]
    older = {**config, "layer_types": None, "layers_block_type": kinds, "num_local_experts": 8}
    found = spec_from_config({**older, "num_experts_per_tok": 2, "position_embedding_type": "nope"})
    assert [*found.states] == [0, 3] and found.attention.rope is None
    assert all(isinstance(layer.feed_forward, Experts) for layer in found.layers)
    for key, value in (
        ("layer_types", ["mamba", "attention", "conv1d", "mamba"]),
        ("mamba_proj_bias", True),
        ("time_step_limit", [0.0, 1.5]),
        ("hidden_act", "gelu"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{key} = .* is not supported"):
            spec_from_config({**config, key: value})
    alone = spec_from_config({**config, "layer_types": None})
    assert [*alone.states] == [0, 1, 2, 3] and not alone.attentions


def test_an_lfm2_may_say_which_layers_attend() -> None:
    config = drawn_config("lfm2")
    listed = {**config, "layer_types": None, "full_attn_idxs": [1]}
    assert spec_from_config(listed) == spec_from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"layer_types = .* is not supported"):
        spec_from_config({**config, "layer_types": ["mamba", "full_attention", "conv", "conv"]})
    for key in ("conv_bias", "conv_L_cache"):
        with pytest.raises((UnsupportedModelError, ModelFileError), match=key):
            spec_from_config({**config, key: True})


def test_a_delta_net_attends_in_every_fourth_layer_unless_its_file_says_otherwise() -> None:
    config = {**drawn_config("qwen35"), "layer_types": None}
    assert [*spec_from_config(config).attentions] == [3]
    assert [*spec_from_config({**config, "full_attention_interval": 2}).attentions] == [1, 3]


@pytest.mark.parametrize(("case", "has_gate"), [("qwen35", True), ("qwen3moe", False)])
def test_a_gate_on_what_attention_leaves_is_the_family_s(case: str, has_gate: bool) -> None:
    config = drawn_config(case)
    assert spec_from_config({**config, "attn_output_gate": has_gate}) == spec_from_config(config)
    with pytest.raises(UnsupportedModelError, match=f"attn_output_gate = {not has_gate} is not"):
        spec_from_config({**config, "attn_output_gate": not has_gate})


def test_layers_with_experts_may_be_listed() -> None:
    config = drawn_config("deepseek2-glm")
    kinds = ["sparse", "dense", "sparse", "dense"]
    layers = spec_from_config({**config, "mlp_layer_types": kinds}).layers
    assert [isinstance(layer.feed_forward, Experts) for layer in layers] == [True, False] * 2
    with pytest.raises(UnsupportedModelError, match=r"mlp_layer_types = .* is not supported"):
        spec_from_config({**config, "mlp_layer_types": ["moe"] * 4})
    with pytest.raises(ModelFileError, match="mlp_layer_types must be a list of 4 strings"):
        spec_from_config({**config, "mlp_layer_types": kinds[:2]})


def test_llama4_attends_within_chunks_where_it_has_rope() -> None:
    config = {**drawn_config("llama4"), "layer_types": None, "no_rope_layers": None}
    every_other = spec_from_config({**config, "no_rope_layer_interval": 2})
    assert every_other.windows == (16, None, 16, None)
    listed = spec_from_config({**config, "no_rope_layers": [0, 1, 1, 0]})
    assert listed.windows == (None, 16, 16, None)


def test_the_last_layer_of_gemma4_has_no_window() -> None:
    config = {**drawn_config("gemma4-experts"), "layer_types": None, "per_layer_config": None}
    assert spec_from_config({**config, "global_head_dim": 16}).windows == (9, 9, 9, None)


def test_windows_of_dots1_are_those_of_later_layers_whatever_switches_them_off() -> None:
    config = {**drawn_config("dots1"), "layer_types": None, "sliding_window": 9}
    config |= {"max_window_layers": 2, "use_sliding_window": False}
    assert spec_from_config(config).windows == (None, None, 9, 9)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert spec(sliding_window=9, use_sliding_window=False) == spec()
    for changes in ({"sliding_window": 9}, {"sliding_window": 9, "use_sliding_window": True}):
        with pytest.raises(UnsupportedModelError, match=r"sliding_window = .* is not supp"):
            spec(**changes)


def test_fields_that_transformers_does_not_read_in_a_family_are_not_read() -> None:
    for case, changes in (
        ("gemma3", {"hidden_act": "silu", "attn_logit_softcapping": 50.0}),
        ("qwen3moe", {"layer_types": ["sliding_attention"] * 4}),
    ):
        config = drawn_config(case)
        assert spec_from_config({**config, **changes}) == spec_from_config(config)


def test_exaone4_has_no_rope_in_full_layers_of_a_model_with_a_window() -> None:
    config = {**drawn_config("exaone4"), "layer_types": ["full_attention"] * 4}
    assert ropes(config) == []
    assert len(ropes({**config, "sliding_window": None})) == 4


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
    "falcon-h1-0.5b": 0.521,
    "falcon-h1-7b": 7.59,
    "gemma-3-4b": 3.88,
    "glm-4.5-air": 106.9,
    "gpt-oss-20b": 20.9,
    "granite-3.3-8b": 8.17,
    "llama4-scout": 107.8,
    "mixtral-8x7b": 46.7,
    "nemotron-3-nano": 31.6,
    "nemotron-h-8b": 8.10,
    "nemotron-nano-9b-v2": 8.89,
    "phi-4-mini": 3.84,
    "qwen3-30b-a3b": 30.5,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_with_the_fields_of_published_models_have_their_weights(name: str) -> None:
    config = json.loads((FIXTURES / "published-configs.json").read_text())[name]
    weights = sum(math.prod(shape) for shape in tensor_shapes(spec_from_config(config)).values())
    assert weights / 1e9 == pytest.approx(PUBLISHED[name], rel=3e-3)


def test_nemotrons_layers_are_listed_or_letters() -> None:
    config = drawn_config("nemotron_h")
    listed = spec_from_config(config)
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    older = [names.get(kind, kind) for kind in config["layers_block_type"]]
    assert spec_from_config({**config, "layers_block_type": older}) == listed
    pattern = {**config, "layers_block_type": None, "hybrid_override_pattern": "M-M*-*-"}
    assert spec_from_config({**pattern, "num_hidden_layers": 7}) == listed
    with pytest.raises(ModelFileError, match="7 layers are listed, num_hidden_layers is 8"):
        spec_from_config({**pattern, "num_hidden_layers": 8})
    other = {**pattern, "hybrid_override_pattern": "M-M*E-*", "n_routed_experts": 4}
    assert isinstance(spec_from_config(other).layers[4].feed_forward, Experts)
    for key, value in (
        ("hybrid_override_pattern", "M-X*"),
        ("hybrid_override_pattern", ""),
        ("layer_types", ["mamba", "conv"]),
        ("layer_types", []),
        ("use_bias", True),
        ("mamba_hidden_act", "gelu"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{key} = .* is not supported"):
            spec_from_config({**pattern, key: value})
    alone = spec_from_config({**pattern, "hybrid_override_pattern": "M-M-"})
    assert not alone.attentions and alone.ropes == ()
    with pytest.raises(UnsupportedModelError, match="moe_latent_size = 24 is not supported"):
        spec(moe_latent_size=24)


def test_falcon_h1_norms_what_its_states_leave_where_its_file_says_so() -> None:
    config = drawn_config("falcon-h1")
    found = [spec_from_config({**config, "mamba_norm_before_gate": x}) for x in (True, False)]
    assert found[0] == found[1] and not found[0].states[0].has_norm
    normed = {**config, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    assert spec_from_config(normed).states[3].has_norm
    automatic = {**config, "mamba_d_head": "auto"}
    assert spec_from_config(automatic) == found[0]
    assert spec_from_config({**automatic, "mamba_d_ssm": None}) == found[0]
    for key, value in (
        ("mamba_norm_before_gate", True),
        ("projectors_bias", True),
        ("attention_bias", True),
        ("mlp_bias", True),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{key} = True is not supported"):
            spec_from_config({**normed, key: value})
    with pytest.raises(UnsupportedModelError, match=r"key_multiplier = 0\.5 is not supported"):
        spec(key_multiplier=0.5)


def test_lings_second_models_have_the_type_of_its_first() -> None:
    families = [config_family(drawn_config(case)).name for case in ("bailingmoe", "bailingmoe2")]
    assert families == ["bailingmoe", "bailingmoe2"]
    later = {**drawn_config("bailingmoe2"), "model_type": "bailing_moe_v2"}
    assert spec_from_config(later) == spec_from_config(drawn_config("bailingmoe2"))
    with pytest.raises(UnsupportedModelError, match="norm_head = True is not supported"):
        spec_from_config({**drawn_config("bailingmoe"), "norm_head": True})


def test_baichuans_are_told_by_their_sizes() -> None:
    config = drawn_config("baichuan")
    large = spec_from_config({**config, "num_hidden_layers": 40})  # the 13B
    assert large.ropes == () and large.attention.alibi == 8.0
    with pytest.raises(UnsupportedModelError, match=r"Baichuan 2 .* is not supported from safet"):
        spec_from_config({**config, "vocab_size": 125_696})


def test_contexts_of_the_first_qwen_end_where_its_rope_would_be_stretched() -> None:
    assert spec_from_config(drawn_config("qwen")).context_length == 64
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5 is not supp"):
        spec_from_config({**drawn_config("qwen"), "rotary_pct": 0.5})


@pytest.mark.parametrize(
    "types", [[["global"]], [[["global"], 1], 3], [[["banded"], 4]], [[[["global"]], 4]]]
)
def test_kinds_of_gpt_neos_layers_that_are_not_there_are_named(types: list[Any]) -> None:
    config = drawn_config("gpt_neo")
    windows = [9 if kind == "local" else None for kind in config["attention_layers"]]
    assert list(spec_from_config(config).windows) == windows
    with pytest.raises(UnsupportedModelError, match=r"attention_types = .* is not supported"):
        spec_from_config({**config, "attention_types": types})
    with pytest.raises(ModelFileError, match="attention_types must be an integer"):
        spec_from_config({**config, "attention_types": [[["global"], 10**9]]})
    with pytest.raises(ModelFileError, match="layer_types must be a list of 4 strings"):
        spec_from_config({**config, "attention_types": [[["global"], 3]]})


def test_mpts_slopes_are_those_that_a_file_says() -> None:
    config = drawn_config("mpt")
    attention = spec_from_config(config).attention
    assert attention.alibi_slopes == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    own = {**config["attn_config"], "alibi_bias_max": 4}
    assert spec_from_config({**config, "attn_config": own}).attention.alibi == 4.0
    for key, value in {"alibi": False, "clip_qkv": 6, "qk_ln": True, "softmax_scale": 0.1}.items():
        with pytest.raises(UnsupportedModelError, match=f"attn_config: {key} = "):
            spec_from_config({**config, "attn_config": {**own, key: value}})
    with pytest.raises(ModelFileError, match=r"alibi_bias_max must be from 0 to 64\.0, got 99"):
        spec_from_config({**config, "attn_config": {**own, "alibi_bias_max": 99}})
    three = replace(attention, num_heads=3, num_kv_heads=3)
    assert three.alibi_slopes == (2.0**-4, 2.0**-8, 2.0**-2)


def test_jambas_layers_come_in_periods() -> None:
    config = drawn_config("jamba")
    found = spec_from_config(config)
    assert [*found.attentions] == [1] and [*found.states] == [0, 2, 3]
    assert [isinstance(layer.feed_forward, Experts) for layer in found.layers] == [False, True] * 2
    assert found.states[0].step_rank == 5 and found.states[0].has_step_weights
    dense = spec_from_config({**config, "num_experts": 1, "mamba_dt_rank": "auto"})
    assert all(isinstance(layer.feed_forward, Dense) for layer in dense.layers)
    assert dense.states[0].step_rank == 3
    with pytest.raises(UnsupportedModelError, match="mamba_proj_bias = True is not supported"):
        spec_from_config({**config, "mamba_proj_bias": True})
    with pytest.raises(ModelFileError, match="attn_layer_offset must be an integer"):
        spec_from_config({**config, "attn_layer_offset": -1})


def test_falcon_mambas_steps_are_normed_with_an_epsilon_of_their_own() -> None:
    part = spec_from_config(drawn_config("falcon_mamba")).states[0]
    assert part.has_step_norms and not part.has_step_weights and part.norm_epsilon == 0.01
    assert not spec_from_config(drawn_config("mamba")).states[0].has_step_norms
    config = drawn_config("falcon_mamba")
    del config["mixer_rms_eps"]
    assert spec_from_config(config).states[0].norm_epsilon == 1e-6
