"""From a Hugging Face config.json to a ModelSpec."""

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.metadata import Fields, Metadata
from quire.model.families import CONFIG_FAMILIES, WITH_SENSES, find_family
from quire.model.family import (
    Facts,
    Family,
    NoRope,
    Placement,
    RoutedLayers,
    Routing,
    Windows,
    describe,
)
from quire.model.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from quire.model.spec import (
    MAX_SIZES,
    Activation,
    Attention,
    Dense,
    Experts,
    Latent,
    LayerInputs,
    ModelSpec,
    Norm,
    PositionScale,
    QKNorm,
    Router,
    Scoring,
)
from quire.model.states import StateKind, StateMixer

_FILE = "config.json"
_BAICHUAN_2 = 125_696  # the tokens of its vocabulary
_CONTEXT_LIMIT = MAX_SIZES["context_length"]
_WINDOW_LIMIT = 1 << 62  # ModelSpec takes a window beyond the context for none
_DEFAULTS: Mapping[str, object] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu2": Activation.RELU2,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "xielu": Activation.XIELU,
}

# Fields that change the mathematics in some family, with the values that mean "not in this model".
# A family that gives one a meaning reads it; in others they are refused. config.json is full of
# other fields; these alone matter.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_chunk_size": (),
    "attention_in_multiplier": (1.0,),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "attention_out_multiplier": (1.0,),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "hidden_size_per_layer_input": (0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "key_multiplier": (1.0,),
    "kv_lora_rank": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_multipliers": ([1.0, 1.0],),
    "moe_latent_size": (),
    "no_rope_layer_interval": (),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": (),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "route_norm": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_depth": (),
    "sliding_window_pattern": (),
    "ssm_in_multiplier": (1.0,),
    "ssm_multipliers": ([1.0] * 5,),
    "ssm_out_multiplier": (1.0,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "use_bidirectional_attention": (False, "vision"),  # of pictures alone
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
_OF_EXPERTS: Mapping[str, tuple[object, ...]] = {
    "moe_intermediate_size": (0,),
    "moe_layer_freq": (1,),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
_ROPE_KEYS = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "attn_factor",  # vLLM's: neither transformers nor llama.cpp computes with it
        "finetuned",  # how the model was made
        "truncate",
        "mscale",
        "mscale_all_dim",
        "max_position_embeddings",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "attention_factor",
    ),
}
_OWN_ROPE_KEYS = {  # of families that read what stands left
    "alpha": ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "llama_4_scaling_beta": ("llama_4_scaling_beta",),
    "long_mscale": ("short_mscale", "long_mscale"),
    "mrope": ("mrope_section", "mrope_interleaved"),
}
_NOT_TURNED = 1e30  # what a frequency is divided by, as in GGUF
_ROPE_COMMON_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


def config_family(config: Mapping[str, object]) -> Family:
    fields = Metadata(_FILE, config)
    name = fields.text("model_type")
    if _has_decoder_apart(config):
        name = fields.section("text_config").text("model_type", WITH_SENSES[name])
    family = find_family(CONFIG_FAMILIES, "model_type", WITH_SENSES.get(name, name))
    if family.other_if is not None and fields.boolean(family.other_if[0], False):
        return CONFIG_FAMILIES[family.other_if[1]]
    return family


def _has_decoder_apart(config: Mapping[str, object]) -> bool:
    """Whether text_config has the decoder's fields: the first files of Qwen2-VL have them beside
    those of pictures."""
    is_flat = config.get("text_config") is None and "hidden_size" in config
    return config.get("model_type") in WITH_SENSES and not is_flat


def spec_from_config(config: Mapping[str, object]) -> ModelSpec:
    """Describe the model; check_tensors then checks the folder's tensors against it.

    `config` is the file as it stands: an explicit null overrides a family's default, which is how
    files switch a sliding window off.
    """
    family = config_family(config)
    own = config
    if _has_decoder_apart(config):
        text = Metadata(_FILE, config).section("text_config")
        own = {**config, **text, "text_config": None}
        tied = "tie_word_embeddings"  # the head belongs to the whole model
        if config.get(tied) is not None:
            own[tied] = config[tied]
    read = {
        family.config_keys.get(key, key): _one(value) if key in family.listed_by_layer else value
        for key, value in own.items()
        if key not in family.ignores
    }
    merged = {**_DEFAULTS, **family.config_defaults, **read}
    fields = Fields(Metadata(_FILE, merged), _FILE)
    refused = {**_NEUTRAL_VALUES, **({} if family.routing else _OF_EXPERTS)}
    fields.refuse({key: refused[key] for key in refused.keys() - family.reads})
    if family.placement_if is not None and not fields.boolean(family.placement_if, False):
        family = replace(family, placement=Placement.BEFORE)
    if family.name == "baichuan" and fields.get("vocab_size") == _BAICHUAN_2:
        raise UnsupportedModelError(
            f"{_FILE}: Baichuan 2 (vocab_size = {_BAICHUAN_2}) is not supported from safetensors: "
            "rows of its head are normalised when it runs; use a GGUF file"
        )
    if isinstance(family.scales_embedding, str):
        is_scaled = fields.boolean(family.scales_embedding, False)
        family = replace(family, scales_embedding=is_scaled)
    if "attn_config" in family.reads:
        family = replace(family, alibi=_mpt_alibi(fields))
    if "new_decoder_architecture" in family.reads:
        family = replace(family, placement=_falcon_placement(fields))
    return _spec(family, fields)


def _mpt_alibi(fields: Fields) -> float:
    """Of MPT; what else its files may say of attention is refused."""
    fields.refuse({"no_bias": (True,), "expansion_ratio": (4,)})
    attention = fields.section("attn_config")
    attention.refuse(
        {
            "alibi": (True,),
            "attn_type": ("multihead_attention",),
            "clip_qkv": (),
            "kv_n_heads": (),
            "prefix_lm": (False,),
            "qk_ln": (False,),
            "softmax_scale": (),
        }
    )
    return attention.number("alibi_bias_max", 8.0)


def _falcon_placement(fields: Fields) -> Placement:
    """New decoders have halves with a norm each or one for both; older ones one for both, or halves
    one after the other."""
    if fields.boolean("new_decoder_architecture", False):
        count = fields.integer("num_ln_in_parallel_attn", 2, low=1, high=2)
        return Placement.PARALLEL_EACH if count == 2 else Placement.PARALLEL
    return Placement.PARALLEL if fields.boolean("parallel_attn", True) else Placement.BEFORE


def _has_one_key_head(family: Family, fields: Fields) -> bool:
    """As StarCoder and the first Falcons mostly do."""
    is_new = fields.boolean("new_decoder_architecture", False)
    return "multi_query" in family.reads and fields.boolean("multi_query", True) and not is_new


def _one(value: object) -> object:
    """What a list has for all layers; a list whose items differ as it is, which is refused."""
    is_same = isinstance(value, list) and value and value.count(value[0]) == len(value)
    return value[0] if is_same and isinstance(value, list) else value


def _spec(family: Family, fields: Fields) -> ModelSpec:
    halves = _halves(fields) if family.has_single_halves else ()
    num_layers = fields.integer(
        "num_hidden_layers", len(halves) or None, high=MAX_SIZES["num_layers"]
    )
    if family.has_states_alone:
        halves = (Half.STATE,) * num_layers
    if halves and len(halves) != num_layers:
        raise ModelFileError(
            f"{_FILE}: {len(halves)} layers are listed, num_hidden_layers is {num_layers}"
        )
    hidden_size = fields.integer("hidden_size", high=MAX_SIZES["hidden_size"])
    norm = Norm(epsilon=fields.number(family.epsilon), kind=family.norm, has_bias=family.norm_bias)
    windows = _windows(family, fields, num_layers)
    attends = not halves or Half.ATTENTION in halves
    sliding = attention = _attention(family, fields, hidden_size, norm) if attends else None
    if attention is not None and "per_layer_config" in family.reads:
        attention = _full_attention(family, fields, attention, windows)
    facts = Facts(
        hidden_size=hidden_size,
        vocabulary_size=fields.integer("vocab_size", high=MAX_SIZES["vocabulary_size"]),
        context_length=_context_length(family, fields),
        norm=norm,
        attention=attention,
        sliding_attention=sliding,
        ropes=_ropes(family, fields, (attention, sliding), windows),
        windows=windows,
        num_positions=_context_length(family, fields) if family.has_positions else 0,
        feed_forwards=_feed_forwards(family, fields, norm, num_layers, halves),
        num_shared_kv=fields.integer("num_kv_shared_layers", 0, low=0, high=num_layers - 1),
        states=_states(family, fields, hidden_size, norm, num_layers, halves),
        attends=tuple(half is Half.ATTENTION for half in halves),
        layer_inputs=_layer_inputs(family, fields, norm),
        residual_scale=_residual_scale(family, fields, num_layers),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=_logit_scale(family, fields, hidden_size),
        logit_soft_cap=fields.optional_number("final_logit_softcapping") or 0.0,
        tied_head=fields.boolean("tie_word_embeddings", False),
        head_bias=_says(family.head_bias, fields),
        linear_scales=family.has_multipliers,
    )
    return describe(family, facts)


def _residual_scale(family: Family, fields: Fields, num_layers: int) -> float:
    if "scale_depth" in family.reads:  # MiniCPM's
        return float(fields.number("scale_depth") * num_layers**-0.5)
    return fields.number("residual_multiplier", 1.0)


def _logit_scale(family: Family, fields: Fields, hidden_size: int) -> float:
    if "scale_depth" in family.reads:
        base = fields.integer("dim_model_base", hidden_size, high=MAX_SIZES["hidden_size"])
        return hidden_size / base
    return fields.number("logits_scaling", fields.number("logit_scale", 1.0))


def _context_length(family: Family, fields: Fields) -> int:
    """max_position_embeddings, or more where the file's yarn extends its original context further:
    Qwen's model cards have the scaling added and the rest left as it is."""
    context = fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT)
    rope = _rope_fields(fields)
    if family.sliding_rope and rope.get("full_attention") is not None:
        rope = rope.section("full_attention")
    if _rope_kind(rope) != "yarn" or "longrope" in family.reads:
        return context
    factor = rope.number("factor", 1.0)
    return max(context, int(min(_original_context(fields, rope) * factor, _CONTEXT_LIMIT)))


def _rope_dims(attention: Attention) -> int:
    return attention.head_dim if attention.latent is None else attention.latent.rope_dims


def _layer_inputs(family: Family, fields: Fields, norm: Norm) -> LayerInputs | None:
    key = "hidden_size_per_layer_input"
    size = fields.integer(key, 0, low=0, high=MAX_SIZES["hidden_size"])
    if not size:
        return None
    return LayerInputs(size=size, activation=_activation(family, fields), norm=norm)


# ---- attention


def _attention(family: Family, fields: Fields, hidden_size: int, norm: Norm) -> Attention:
    num_heads = fields.integer("num_attention_heads", high=MAX_SIZES["num_heads"])
    head_dim = max(1, hidden_size // num_heads)
    limit = MAX_SIZES["num_kv_heads"]
    fields.refuse({"attn_output_gate": (family.has_output_gate,)})
    if family.has_latent:
        return _latent_attention(fields, num_heads, head_dim)
    if family.has_multipliers:
        fields.refuse({"attention_bias": (False,), "mlp_bias": (False,)})
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, high=limit)
    return Attention(
        num_heads=num_heads,
        num_kv_heads=1 if _has_one_key_head(family, fields) else num_kv_heads,
        head_dim=fields.integer("head_dim", head_dim, high=MAX_SIZES["head_dim"]),
        qkv_bias=_says(family.qkv_bias, fields),
        output_bias=_says(family.output_bias, fields),
        qk_norm=_qk_norm(family, fields, norm),
        value_norm=_without_weights(norm) if family.has_value_norm else None,
        output_norm=norm if family.sub_norms else None,
        soft_cap=fields.optional_number("attn_logit_softcapping") or 0.0,
        scale=1.0 if family.has_unit_scale else _attention_scale(fields),
        position_scale=_position_scale(fields),
        has_sinks=family.has_sinks,
        has_output_gate=family.has_output_gate,
    )


def _says(where: bool | str, fields: Fields) -> bool:
    return where if isinstance(where, bool) else fields.boolean(where, False)


def _qk_norm(family: Family, fields: Fields, norm: Norm) -> QKNorm | None:
    if family.qk_norm is None or not _says(family.qk_norm_if or True, fields):
        return None
    is_after = family.qk_norm_after_rope
    has_weight = not family.has_bare_qk_norm
    own = Norm(epsilon=norm.epsilon, kind=norm.kind, has_weight=has_weight)
    return QKNorm(norm=own, span=family.qk_norm, is_after_rope=is_after)


def _without_weights(norm: Norm) -> Norm:
    return Norm(epsilon=norm.epsilon, kind=norm.kind, has_weight=False)


def _full_attention(
    family: Family, fields: Fields, sliding: Attention, windows: tuple[int | None, ...]
) -> Attention:
    """Of gemma4's layers without a window: heads of another size, fewer of keys, which may be the
    values too. Newer files list what differs by layer."""
    is_shared = fields.boolean("attention_k_eq_v", False)
    full = next((layer for layer, window in enumerate(windows) if window is None), None)
    own, names = fields, ("global_head_dim", "num_global_key_value_heads")
    if full is not None and fields.get("per_layer_config") is not None:
        own = fields.section("per_layer_config").section(str(full))
        names = ("head_dim", "num_key_value_heads")
    count = sliding.num_kv_heads
    if is_shared:
        count = own.optional_integer(names[1], high=MAX_SIZES["num_kv_heads"]) or count
    return replace(
        sliding,
        head_dim=own.integer(names[0], sliding.head_dim, high=MAX_SIZES["head_dim"]),
        value_dim=0,
        num_kv_heads=count,
        has_key_values=is_shared,
        scale=1.0 if family.has_unit_scale else 0.0,
    )


def _attention_scale(fields: Fields) -> float:
    """0: the usual one."""
    scalar = fields.optional_number("query_pre_attn_scalar")
    if scalar is not None:
        if not scalar > 0:
            raise ModelFileError(f"{_FILE}: query_pre_attn_scalar must be positive, got {scalar}")
        return float(scalar**-0.5)
    return fields.optional_number("attention_multiplier") or 0.0


def _position_scale(fields: Fields) -> PositionScale | None:
    """Of llama4, whose fields it is read from, and of ministral3, which has it beside its rope."""
    if fields.get("attn_temperature_tuning") not in (None, False, 0):
        length = fields.integer("floor_scale", high=_CONTEXT_LIMIT)
        return PositionScale(factor=fields.number("attn_scale"), length=length, offset=1)
    rope = _rope_fields(fields)
    factor = rope.optional_number("llama_4_scaling_beta")
    if factor is None:
        return None
    length = rope.integer("original_max_position_embeddings", high=_CONTEXT_LIMIT)
    return PositionScale(factor=factor, length=length)


def _latent_attention(fields: Fields, num_heads: int, value_dim: int) -> Attention:
    limit, size_limit = MAX_SIZES["head_dim"], MAX_SIZES["hidden_size"]
    rope_dims = fields.integer("qk_rope_head_dim", high=limit)
    head_dim = fields.integer("qk_nope_head_dim", high=limit) + rope_dims
    own = Norm(epsilon=1e-6)  # as the checkpoints were trained, whatever rms_norm_eps is
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        value_dim=fields.integer("v_head_dim", value_dim, high=limit),
        qkv_bias=fields.boolean("attention_bias", False),
        output_bias=fields.boolean("attention_bias", False),
        scale=head_dim**-0.5 * _yarn_scale(_rope_fields(fields)),
        position_scale=_position_scale(fields),
        latent=Latent(
            kv_rank=fields.integer("kv_lora_rank", high=size_limit),
            rope_dims=rope_dims,
            norm=own,
            query_rank=fields.optional_integer("q_lora_rank", high=size_limit),
        ),
    )


def _yarn_scale(rope: Fields) -> float:
    """What DeepSeek multiplies the attention's scale by where its context was extended."""
    dims_scale = rope.optional_number("mscale_all_dim") or 0.0
    factor = rope.optional_number("factor") or 1.0
    extended = _mscale(factor, dims_scale)
    return extended * extended if dims_scale else 1.0


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


# ---- layers with a state


class Half(StrEnum):
    """Of a layer that is one half alone: its letter in a pattern."""

    STATE = "M"
    ATTENTION = "*"
    DENSE = "-"
    EXPERTS = "E"


_HALVES = {
    **dict.fromkeys(("mamba", "linear_attention"), Half.STATE),
    **dict.fromkeys(("attention", "full_attention"), Half.ATTENTION),
    "mlp": Half.DENSE,
    "moe": Half.EXPERTS,
}


def _halves(fields: Fields) -> tuple[Half, ...]:
    """Of each layer: a list of kinds, in both ages of config.json, or a string of letters."""
    kinds, pattern = fields.get("layer_types"), fields.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        if not {*pattern} <= {*Half} or not pattern:
            raise fields.unsupported("hybrid_override_pattern", [*Half])
        return tuple(Half(letter) for letter in pattern)
    if not isinstance(kinds, list) or not kinds or not {*map(str, kinds)} <= _HALVES.keys():
        raise fields.unsupported("layer_types", _HALVES)
    return tuple(_HALVES[kind] for kind in kinds)


# What files call layers, in both ages of config.json.
_STATE_LAYERS = {
    StateKind.DELTA_NET: ("linear_attention",),
    StateKind.MAMBA: ("linear_attention", "mamba"),
    StateKind.MAMBA_1: ("linear_attention", "mamba"),
    StateKind.CONVOLUTION: ("conv",),
}
_ATTENTION_LAYERS = ("full_attention", "attention")


def _states(
    family: Family,
    fields: Fields,
    hidden_size: int,
    norm: Norm,
    num_layers: int,
    halves: tuple[Half, ...],
) -> tuple[StateMixer | None, ...]:
    if family.state is None:
        return ()
    has_state = [half is Half.STATE for half in halves]
    if family.has_state_beside:
        has_state = [True] * num_layers
    has_state = has_state or _state_layers(family.state, fields, num_layers)
    if not any(has_state):
        return ()
    mixer = _state_mixer(family, family.state, fields, hidden_size, norm)
    return tuple(mixer if is_there else None for is_there in has_state)


def _state_layers(kind: StateKind, fields: Fields, num_layers: int) -> list[bool]:
    """Listed by kind; older files say which layers attend, or how often one does."""
    kinds = fields.get("layer_types")
    if kinds is None:
        listed = _layer_numbers(fields, "full_attn_idxs")
        if listed is not None:
            return [layer not in listed for layer in range(num_layers)]
        period = fields.optional_integer("attn_layer_period", high=MAX_SIZES["num_layers"])
        if period is not None:  # Jamba's
            first = fields.integer("attn_layer_offset", low=0, high=MAX_SIZES["num_layers"])
            return [layer % period != first for layer in range(num_layers)]
        every = fields.optional_integer("full_attention_interval", high=MAX_SIZES["num_layers"])
        return [every is None or (layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFileError(
            f"{_FILE}: layer_types must be a list of {num_layers} strings, one for each layer"
        )
    known = (*_STATE_LAYERS[kind], *_ATTENTION_LAYERS)
    if not {*map(str, kinds)} <= {*known}:
        raise fields.unsupported("layer_types", known)
    return [name in _STATE_LAYERS[kind] for name in kinds]


def _state_mixer(
    family: Family, kind: StateKind, fields: Fields, hidden_size: int, norm: Norm
) -> StateMixer:
    limit, size_limit = MAX_SIZES["num_heads"], MAX_SIZES["head_dim"]
    if kind is StateKind.CONVOLUTION:
        fields.refuse({"conv_bias": (False,)})
        return StateMixer(
            kind=kind,
            kernel=fields.integer("conv_L_cache", high=size_limit),
            value_dim=hidden_size,
        )
    key = "hidden_act" if fields.get("mamba_hidden_act") is None else "mamba_hidden_act"
    if fields.text(key) not in ("silu", "swish"):
        raise fields.unsupported(key, ["silu"])
    if kind is StateKind.DELTA_NET:
        return StateMixer(
            kind=kind,
            kernel=fields.integer("linear_conv_kernel_dim", high=size_limit),
            num_heads=fields.integer("linear_num_value_heads", high=limit),
            num_groups=fields.integer("linear_num_key_heads", high=limit),
            key_dim=fields.integer("linear_key_head_dim", high=size_limit),
            value_dim=fields.integer("linear_value_head_dim", high=size_limit),
            norm_epsilon=norm.epsilon,
        )
    fields.refuse(dict.fromkeys(("mamba_proj_bias", "projectors_bias", "use_bias"), (False,)))
    if kind is StateKind.MAMBA_1:
        return _first_mamba(family, fields, hidden_size, norm)
    _refuse_time_steps(fields)
    has_norm = _says(family.state_norm_if or True, fields)
    if has_norm:
        fields.refuse({"mamba_norm_before_gate": (False,)})
    num_heads = fields.integer("mamba_n_heads", high=limit)
    if fields.get("mamba_d_head") == "auto":
        inner = fields.optional_integer("mamba_d_ssm", high=MAX_SIZES["ffn_size"])
        inner = inner or fields.integer("mamba_expand", high=size_limit) * hidden_size
        head_dim = inner // num_heads
    else:
        head_dim = fields.integer("mamba_d_head", high=size_limit)
    return StateMixer(
        kind=kind,
        kernel=fields.integer("mamba_d_conv", high=size_limit),
        num_heads=num_heads,
        num_groups=fields.integer("mamba_n_groups", high=limit),
        key_dim=fields.integer("mamba_d_state", high=size_limit),
        value_dim=head_dim,
        has_convolution_bias=fields.boolean("mamba_conv_bias", True),
        has_norm=has_norm,
        norm_epsilon=norm.epsilon,
    )


def _first_mamba(family: Family, fields: Fields, hidden_size: int, norm: Norm) -> StateMixer:
    limit = MAX_SIZES["head_dim"]
    rank = -(-hidden_size // 16)
    if fields.get("mamba_dt_rank") != "auto":
        rank = fields.integer("mamba_dt_rank", high=limit)
    own = fields.optional_number("mixer_rms_eps")  # falcon_mamba's
    return StateMixer(
        kind=StateKind.MAMBA_1,
        kernel=fields.integer("mamba_d_conv", high=limit),
        key_dim=fields.integer("mamba_d_state", high=limit),
        value_dim=fields.integer("mamba_expand", high=limit) * hidden_size,
        has_convolution_bias=fields.boolean("mamba_conv_bias", True),
        has_norm=False,
        step_rank=rank,
        has_step_norms=family.has_step_norms,
        has_step_weights=family.has_step_norms and own is None,
        norm_epsilon=norm.epsilon if own is None else own,
    )


def _refuse_time_steps(fields: Fields) -> None:
    """Bounds of Mamba's time steps: from 0 to infinity, which transformers 5 writes as a word."""
    limits = fields.get("time_step_limit")
    unbounded = (math.inf, {"__float__": "Infinity"})
    if limits is None or (
        isinstance(limits, list) and len(limits) == 2 and not limits[0] and limits[1] in unbounded
    ):
        return
    raise fields.unsupported("time_step_limit", ["[0, Infinity]"])


# ---- feed-forward


def _feed_forwards(
    family: Family, fields: Fields, norm: Norm, num_layers: int, halves: tuple[Half, ...]
) -> tuple[Dense | Experts | None, ...]:
    if halves and not {*halves} & {Half.DENSE, Half.EXPERTS}:
        return (None,) * num_layers
    hidden_size = fields.integer("hidden_size", high=MAX_SIZES["hidden_size"])
    usual_size = family.dense_multiple * hidden_size or None
    dense = Dense(
        size=_dense_size(family, fields, usual_size),
        activation=_activation(family, fields),
        is_gated=family.is_gated,
        has_bias=_says(family.ffn_bias, fields),
        inner_norm=norm if family.sub_norms else None,
    )
    routing = family.routing
    if halves:
        kinds: dict[Half, Dense | Experts] = {Half.DENSE: dense}
        if routing is not None and Half.EXPERTS in halves:
            kinds[Half.EXPERTS] = _experts(routing, fields, dense)
        return tuple(kinds.get(half) for half in halves)
    if routing is None or not _has_experts(routing, fields):
        return _widened(fields, dense, num_layers)
    experts = _experts(routing, fields, dense)
    if routing.is_beside_dense:
        router = replace(experts.router, input_norm=_without_weights(norm))
        experts = replace(experts, router=router, beside=dense, beside_norm=norm)
    routed = _routed_layers(routing.layers, fields, num_layers)
    return tuple(experts if is_routed else dense for is_routed in routed)


def _has_experts(routing: Routing, fields: Fields) -> bool:
    """A boolean says so, or a count."""
    key = routing.is_there_if
    if routing.layers is RoutedLayers.PERIODS:
        return fields.integer("num_experts", low=0, high=MAX_SIZES["num_experts"]) > 1
    if key is None or isinstance(fields.get(key), int):
        return key is None or bool(fields.get(key))
    return fields.boolean(key, False)


def _dense_size(family: Family, fields: Fields, usual: int | None) -> int:
    size = fields.integer(family.dense_size, usual, high=MAX_SIZES["ffn_size"])
    if family.dense_halved:
        return size // 2
    adjusts = "block_auto_adjust_ff_dim"  # LFM2's
    if adjusts not in family.reads or not fields.boolean(adjusts, True):
        return size
    size = 2 * size // 3
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if factor is None:
        return size
    multiple = fields.integer("block_multiple_of", high=MAX_SIZES["ffn_size"])
    return -(-int(factor * size) // multiple) * multiple


def _widened(fields: Fields, dense: Dense, num_layers: int) -> tuple[Dense, ...]:
    """Dense layers; gemma4's that share keys and values may be of twice the size."""
    num_wide = fields.integer("num_kv_shared_layers", 0, low=0, high=num_layers - 1)
    if not fields.boolean("use_double_wide_mlp", False):
        num_wide = 0
    wide = replace(dense, size=2 * dense.size) if num_wide else dense
    return (dense,) * (num_layers - num_wide) + (wide,) * num_wide


def _activation(family: Family, fields: Fields) -> Activation:
    key = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        raise fields.unsupported(key, _ACTIVATIONS)
    found = _ACTIVATIONS[name]
    is_legacy = family.has_legacy_gelu and found is Activation.GELU
    return Activation.GELU_TANH if is_legacy else found


def _experts(routing: Routing, fields: Fields, dense: Dense) -> Experts:
    limit, size_limit = MAX_SIZES["num_experts"], MAX_SIZES["ffn_size"]
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count_key = next((name for name in names if fields.get(name) is not None), names[0])
    scoring = fields.get("scoring_func")
    if scoring not in (None, routing.scoring.value):
        raise fields.unsupported("scoring_func", [routing.scoring.value])
    fields.refuse({"moe_layer_freq": (1,)})
    if routing.scoring is Scoring.SPARSE_MIXER:
        fields.refuse({"router_jitter_noise": (0.01,)})  # half of how far scores may be apart
    size_key = "moe_intermediate_size"
    if fields.get(size_key) is None:
        size_key = "intermediate_size"
    size = fields.integer(size_key, high=size_limit)
    num_groups = fields.optional_integer("n_group", high=limit) or 1
    if fields.get("topk_method") == "greedy":  # DeepSeek V2: all groups are chosen from
        num_groups = 1
    num_used_groups = fields.optional_integer("topk_group", high=limit) or num_groups
    router = Router(
        scoring=routing.scoring,
        normalises=_says(routing.normalises, fields),
        scale=fields.number("routed_scaling_factor", 1.0),
        has_bias=routing.router_bias,
        has_choice_bias=_says(routing.choice_bias, fields),
        num_groups=num_groups,
        num_used_groups=min(num_used_groups, num_groups),
        num_group_best=routing.num_group_best,
        weighs_input=routing.weighs_input,
    )
    shared = _shared_size(routing, fields, size)
    return Experts(
        count=fields.integer(count_key, high=limit),
        num_used=fields.integer(
            "top_k_experts" if fields.get("top_k_experts") else "num_experts_per_tok", high=limit
        ),
        size=size,
        activation=routing.activation or dense.activation,
        router=router,
        is_gated=dense.is_gated,
        has_bias=routing.expert_bias,
        latent_size=fields.optional_integer("moe_latent_size", high=MAX_SIZES["hidden_size"]),
        shared=dense.of_size(shared) if shared else None,
        has_shared_gate=routing.has_shared_gate,
    )


def _shared_size(routing: Routing, fields: Fields, expert_size: int) -> int:
    """Of the shared expert; 0: there is none."""
    limit = MAX_SIZES["ffn_size"]
    if routing.shared_size is not None:
        return fields.integer(routing.shared_size, low=0, high=limit)
    if routing.shared_count is not None and fields.get(routing.shared_count) is not None:
        return fields.integer(routing.shared_count, low=0, high=limit // expert_size) * expert_size
    return 0


def _routed_layers(kind: RoutedLayers, fields: Fields, num_layers: int) -> list[bool]:
    layers, limit = range(num_layers), MAX_SIZES["num_layers"]
    match kind:
        case RoutedLayers.STEPS:
            step = fields.integer("decoder_sparse_step", 1, high=limit)
            dense = _layer_numbers(fields, "mlp_only_layers") or ()
            return [(layer + 1) % step == 0 and layer not in dense for layer in layers]
        case RoutedLayers.AFTER_DENSE if fields.get("mlp_layer_types") is not None:
            return _listed_experts(fields, num_layers)
        case RoutedLayers.AFTER_DENSE:
            first = fields.integer("first_k_dense_replace", 0, low=0, high=limit)
            return [layer >= first for layer in layers]
        case RoutedLayers.SPAN:
            fields.refuse({"moe_layer_interval": (1,)})
            first = fields.integer("moe_layer_start_index", low=0, high=limit)
            last = fields.integer("moe_layer_end_index", -1, low=-1, high=limit)
            return [first <= layer and (last < 0 or layer <= last) for layer in layers]
        case RoutedLayers.PERIODS:
            period = fields.integer("expert_layer_period", high=limit)
            first = fields.integer("expert_layer_offset", low=0, high=limit)
            return [layer % period == first for layer in layers]
        case RoutedLayers.LISTED:
            listed = _layer_numbers(fields, "moe_layers")
            step = fields.integer("interleave_moe_layer_step", 1, high=limit)
            if listed is None:
                return [(layer + 1) % step == 0 for layer in layers]
            return [layer in listed for layer in layers]
    return [True] * num_layers


def _listed_experts(fields: Fields, num_layers: int) -> list[bool]:
    kinds = fields.get("mlp_layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFileError(
            f"{_FILE}: mlp_layer_types must be a list of {num_layers} strings, one for each layer"
        )
    if not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise fields.unsupported("mlp_layer_types", ["dense", "sparse"])
    return [kind == "sparse" for kind in kinds]


def _layer_numbers(fields: Fields, key: str) -> frozenset[int] | None:
    found = fields.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(item, int) for item in found):
        raise ModelFileError(f"{_FILE}: {key} must be a list of layers, got {found!r:.100}")
    return frozenset(found)


# ---- windows


def _windows(family: Family, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if family.windows is Windows.NONE:
        fields.refuse({"use_sliding_window": (False,)})
        if fields.get("use_sliding_window") is None:
            fields.refuse({"sliding_window": ()})
        return (None,) * num_layers
    key = "attention_chunk_size" if family.is_chunked else "sliding_window"
    is_used = fields.boolean("use_sliding_window", family.windows is not Windows.LATER)
    window = fields.optional_integer(key, high=_WINDOW_LIMIT) if is_used else None
    if family.windows is Windows.EVERY:
        fields.refuse({"layer_types": ()})
        return (window,) * num_layers
    kinds = fields.get("layer_types")
    if "attention_types" in family.reads:
        kinds = _listed_kinds(fields)
    if kinds is None:
        return _usual_windows(family, fields, window, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFileError(
            f"{_FILE}: layer_types must be a list of {num_layers} strings, one for each layer"
        )
    sliding = "chunked_attention" if family.is_chunked else "sliding_attention"
    for kind in kinds:
        if kind not in (sliding, "full_attention"):
            raise fields.unsupported("layer_types", ["full_attention", sliding])
    return tuple(window if kind == sliding else None for kind in kinds)


def _listed_kinds(fields: Fields) -> list[str]:
    """GPT-Neo's: pairs of a list of kinds and how often it is repeated."""
    names = {"global": "full_attention", "local": "sliding_attention"}
    kinds: list[str] = []
    pairs = fields.get("attention_types")
    for pair in pairs if isinstance(pairs, list) else ():
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list):
            raise fields.unsupported("attention_types", ["pairs of kinds and a number"])
        count = Metadata(_FILE, {"attention_types": pair[1]}).integer(
            "attention_types", low=0, high=MAX_SIZES["num_layers"]
        )
        if not {*map(str, pair[0])} <= names.keys():
            raise fields.unsupported("attention_types", names)
        kinds += [names[kind] for kind in pair[0]] * count
    return kinds


def _usual_windows(
    family: Family, fields: Fields, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    limit = MAX_SIZES["num_layers"]
    if family.windows is Windows.LATER:
        first = fields.integer("max_window_layers", low=0, high=limit)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if family.windows is Windows.LISTED:
        fields.refuse({"use_sliding_window": (False,)})
        return (None,) * num_layers
    if family.is_chunked:  # layers without rope attend to everything
        has_rope = _layers_with_rope(family, fields, (None,) * num_layers)
        return tuple(window if is_there else None for is_there in has_rope)
    every = family.full_every
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        every = len(pattern)  # EXAONE's, such as LLLG
    elif pattern is not None:
        every = fields.integer("sliding_window_pattern", high=limit)
    last = num_layers - 1 if family.ends_full else None
    return tuple(
        window if layer != last and (not every or (layer + 1) % every) else None
        for layer in range(num_layers)
    )


# ---- rope


def _rope_fields(fields: Fields) -> Fields:
    """Newer files say all in rope_parameters, older ones in rope_scaling and rope_theta."""
    return fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")


def _ropes(
    family: Family,
    fields: Fields,
    attentions: tuple[Attention | None, Attention | None],  # without and with a window
    windows: tuple[int | None, ...],
) -> tuple[Rope | None, ...]:
    if None in attentions:
        return (None,) * len(windows)
    head_dims = [_rope_dims(part) for part in attentions if part is not None]
    rope, base = _rope_fields(fields), fields.number("rope_theta")
    own = Fields(Metadata(_FILE, {}), _FILE)  # of layers with a window: unscaled
    if family.sliding_rope and rope.get("full_attention") is not None:
        rope, own = rope.section("full_attention"), rope.section("sliding_attention")
    usual = sliding = _rope(family, fields, rope, head_dims[0], base)
    if family.sliding_rope:
        local = fields.number("rope_local_base_freq", family.sliding_rope_base or base)
        sliding = _rope(family, fields, own, head_dims[1], local)
    has_rope = _layers_with_rope(family, fields, windows)
    return tuple(
        None if not is_there else usual if window is None else sliding
        for window, is_there in zip(windows, has_rope, strict=True)
    )


def _layers_with_rope(
    family: Family, fields: Fields, windows: tuple[int | None, ...]
) -> list[bool]:
    if "position_embedding_type" in family.reads:  # Granite's
        return [fields.get("position_embedding_type") == "rope"] * len(windows)
    match family.no_rope:
        case NoRope.ALL:
            return [False] * len(windows)
        case NoRope.FULL_LAYERS:
            has_windows = fields.get("sliding_window") is not None  # even where no layer has one
            return [window is not None or not has_windows for window in windows]
        case NoRope.LISTED:
            listed = fields.get("no_rope_layers")
            if not listed:
                limit = MAX_SIZES["num_layers"]
                every = fields.integer("no_rope_layer_interval", family.no_rope_every, high=limit)
                return [(layer + 1) % every != 0 for layer in range(len(windows))]
            if not isinstance(listed, list) or len(listed) != len(windows):
                raise ModelFileError(
                    f"{_FILE}: no_rope_layers must be a list of {len(windows)} numbers, one for "
                    "each layer"
                )
            return [bool(item) for item in listed]
    return [True] * len(windows)


def _rope(family: Family, fields: Fields, rope: Fields, head_dim: int, base: float) -> Rope:
    key = "partial_rotary_factor"
    share = rope.number(key, fields.number(key, 1.0))
    if key not in family.reads:
        rope.refuse({key: (1.0,)})
    if family.has_latent:  # the size of the rotated part is a field of its own
        share = 1.0
    if not 0 < share <= 1:
        raise ModelFileError(f"{_FILE}: {key} must be above 0 and at most 1, got {share}")
    if _is_proportional(family, rope):
        return _proportional_rope(rope, head_dim, share, base)
    dims = int(head_dim * share)
    if "rotary_dim" in family.reads and rope.get(key) is None:
        dims = fields.integer("rotary_dim", dims, high=head_dim)
    return Rope(
        base=_stretched(family, rope, rope.number("rope_theta", base), dims),
        dims=dims,
        interleaved=_is_interleaved(family, fields),
        scaling=_scaling(family, fields, rope),
    )


def _stretched(family: Family, rope: Fields, base: float, dims: int) -> float:
    """Hunyuan's rope, which its files call dynamic, has a greater base in any context."""
    alpha = rope.optional_number("alpha") if "alpha" in family.reads else None
    if not alpha:
        return base
    if alpha < 1 or dims < 3:
        raise ModelFileError(f"{_FILE}: alpha of a rope must be at least 1, got {alpha}")
    return float(base * alpha ** (dims / (dims - 2)))


def _is_interleaved(family: Family, fields: Fields) -> bool:
    key = "rope_interleave"
    if key in family.reads:
        return fields.boolean(key, family.interleaved_in_config)
    fields.refuse({key: (family.interleaved_in_config,)})
    return family.interleaved_in_config


def _is_proportional(family: Family, rope: Fields) -> bool:
    return "proportional" in family.reads and rope.get("rope_type") == "proportional"


def _proportional_rope(rope: Fields, head_dim: int, share: float, base: float) -> Rope:
    """The frequencies are those of a whole head; pairs behind the share of it do not turn."""
    rope.refuse_unknown(_ROPE_COMMON_KEYS)
    num_pairs = head_dim // 2
    num_turned = int(share * head_dim // 2)
    divisors = (1.0,) * num_turned + (_NOT_TURNED,) * (num_pairs - num_turned)
    scaling = DivisorScaling(divisors)
    return Rope(rope.number("rope_theta", base), 2 * num_pairs, interleaved=False, scaling=scaling)


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _scaling(family: Family, fields: Fields, rope: Fields) -> RopeScaling | None:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = _rope_kind(rope)
    if "mrope" in family.reads and kind == "mrope":
        kind = "default"  # text has one position in time, height and width
    if "longrope" in family.reads and kind in ("su", "yarn"):
        kind = "longrope"  # as Phi's first files call it
    if kind not in _ROPE_KEYS or (kind == "longrope" and "longrope" not in family.reads):
        raise rope.unsupported(key, sorted(_ROPE_KEYS.keys() - ({"longrope"} - family.reads)))
    own = [key for name in family.reads for key in _OWN_ROPE_KEYS.get(name, ())]
    rope.refuse_unknown((*_ROPE_COMMON_KEYS, *_ROPE_KEYS[kind], *own))
    if kind in ("default", "dynamic"):  # which scales beyond max_position_embeddings alone
        return None
    original = _original_context(fields, rope)
    if kind == "longrope":
        return _long_scaling(fields, rope, original)
    if kind == "yarn" and rope.get("factor") is None:
        factor = fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT) / original
    else:
        factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        return Llama3Scaling(
            factor, rope.number("low_freq_factor"), rope.number("high_freq_factor"), original
        )
    return YarnScaling(
        factor,
        original,
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        _attention_factor(rope, factor),
        truncates=rope.boolean("truncate", True),
    )


def _original_context(fields: Fields, rope: Fields) -> int:
    """The context before it was extended. Where a file has it twice, Phi's place comes first."""
    key = "original_max_position_embeddings"
    context = fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT)
    inner = rope.integer(key, context, high=_CONTEXT_LIMIT)
    return fields.integer(key, inner, high=_CONTEXT_LIMIT)


def _attention_factor(rope: Fields, factor: float) -> float | None:
    given = rope.optional_number("attention_factor")
    scale, dims_scale = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if given is None and scale and dims_scale:
        divisor = _mscale(factor, dims_scale)
        if not divisor > 0:
            raise ModelFileError(f"{_FILE}: mscale_all_dim of a rope cannot be {dims_scale}")
        return _mscale(factor, scale) / divisor
    return given


def _long_scaling(fields: Fields, rope: Fields, original: int) -> LongScaling:
    factor = fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT) / original
    magnitude = 1.0
    if factor > 1.0 and original > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (rope.optional_number(f"{name}_mscale") for name in ("short", "long"))
    if short != long:
        raise rope.unsupported("short_mscale", [f"{long}, the long_mscale"])
    magnitude = magnitude if long is None else long
    return LongScaling(
        short=rope.numbers("short_factor"),
        long=rope.numbers("long_factor"),
        original_context=original,
        attention_factor=rope.number("attention_factor", magnitude),
    )
