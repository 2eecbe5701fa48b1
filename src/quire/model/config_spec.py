"""From a Hugging Face config.json to a ModelSpec."""

from collections.abc import Mapping

from quire.core.errors import ModelFileError
from quire.loader.metadata import Fields, Metadata
from quire.model.families import CONFIG_FAMILIES, Facts, Family, Windows, describe, find_family
from quire.model.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from quire.model.spec import MAX_SIZES, Activation, Attention, Dense, ModelSpec, Norm, QKNorm

_FILE = "config.json"
_CONTEXT_LIMIT = MAX_SIZES["context_length"]
_WINDOW_LIMIT = 1 << 62  # ModelSpec takes a window beyond the context for none
_DEFAULTS: Mapping[str, object] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "relu2": Activation.RELU2}

# Fields that change the mathematics in some family and that quire does not compute, with the values
# that mean "not in this model". config.json is full of other fields; these alone matter.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1.0,),
    "moe_intermediate_size": (0,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
_ROPE_KEYS = {
    "default": (),
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
        "truncate",
    ),
}
_ROPE_COMMON_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


def spec_from_config(config: Mapping[str, object]) -> ModelSpec:
    """Describe the model; check_tensors then checks the folder's tensors against it.

    `config` is the file as it stands: an explicit null overrides a family's default, which is how
    files switch a sliding window off.
    """
    name = Metadata(_FILE, config).text("model_type")
    family = find_family(CONFIG_FAMILIES, "model_type", name)
    fields = Fields(Metadata(_FILE, {**_DEFAULTS, **family.config_defaults, **config}), _FILE)
    fields.refuse(_NEUTRAL_VALUES)
    return _spec(family, fields)


def _spec(family: Family, fields: Fields) -> ModelSpec:
    num_layers = fields.integer("num_hidden_layers", high=MAX_SIZES["num_layers"])
    hidden_size = fields.integer("hidden_size", high=MAX_SIZES["hidden_size"])
    epsilon = fields.number("rms_norm_eps")
    attention = _attention(family, fields, hidden_size, epsilon)
    feed = Dense(
        size=fields.integer("intermediate_size", high=MAX_SIZES["ffn_size"]),
        activation=_activation(fields),
        is_gated=family.is_gated,
        has_bias=_has_bias(family.ffn_bias, fields),
        inner_norm=Norm(epsilon=epsilon) if family.sub_norms else None,
    )
    facts = Facts(
        hidden_size=hidden_size,
        vocabulary_size=fields.integer("vocab_size", high=MAX_SIZES["vocabulary_size"]),
        context_length=fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT),
        norm_epsilon=epsilon,
        attention=attention,
        ropes=(_rope(fields, attention.head_dim),) * num_layers,
        windows=_windows(family, fields, num_layers),
        feed_forwards=(feed,) * num_layers,
        logit_soft_cap=fields.optional_number("final_logit_softcapping") or 0.0,
        tied_head=fields.boolean("tie_word_embeddings", False),
    )
    return describe(family, facts)


def _attention(family: Family, fields: Fields, hidden_size: int, epsilon: float) -> Attention:
    num_heads = fields.integer("num_attention_heads", high=MAX_SIZES["num_heads"])
    head_dim = max(1, hidden_size // num_heads)
    limit = MAX_SIZES["num_kv_heads"]
    norm = Norm(epsilon=epsilon)
    return Attention(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, high=limit),
        head_dim=fields.integer("head_dim", head_dim, high=MAX_SIZES["head_dim"]),
        qkv_bias=_has_bias(family.qkv_bias, fields),
        output_bias=_has_bias(family.output_bias, fields),
        qk_norm=None if family.qk_norm is None else QKNorm(norm=norm, span=family.qk_norm),
        output_norm=norm if family.sub_norms else None,
        soft_cap=fields.optional_number("attn_logit_softcapping") or 0.0,
    )


def _has_bias(where: bool | str, fields: Fields) -> bool:
    return where if isinstance(where, bool) else fields.boolean(where, False)


def _activation(fields: Fields) -> Activation:
    name = fields.text("hidden_act")
    if name not in _ACTIVATIONS:
        raise fields.unsupported("hidden_act", _ACTIVATIONS)
    return _ACTIVATIONS[name]


def _windows(family: Family, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if family.windows is Windows.NONE:
        fields.refuse({"sliding_window": (), "use_sliding_window": (False,)})
        return (None,) * num_layers
    window = fields.optional_integer("sliding_window", high=_WINDOW_LIMIT)
    if family.windows is Windows.EVERY:
        fields.refuse({"layer_types": ()})
        return (window,) * num_layers
    if not fields.boolean("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", low=0, high=MAX_SIZES["num_layers"])
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelFileError(
            f"{_FILE}: layer_types must be a list of {num_layers} strings, one for each layer"
        )
    return tuple(_layer_window(fields, kind, window) for kind in kinds)


def _layer_window(fields: Fields, kind: object, window: int | None) -> int | None:
    if kind == "sliding_attention":
        return window
    if kind == "full_attention":
        return None
    raise fields.unsupported("layer_types", ["full_attention", "sliding_attention"])


def _rope(fields: Fields, head_dim: int) -> Rope:
    """Newer files say all in rope_parameters, older ones in rope_scaling and rope_theta."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    rope = old if fields.get("rope_scaling") else new
    return Rope(
        base=rope.number("rope_theta", fields.number("rope_theta")),
        dims=head_dim,
        interleaved=False,
        scaling=_scaling(rope, fields.integer("max_position_embeddings", high=_CONTEXT_LIMIT)),
    )


def _scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(key, "default")
    if kind not in _ROPE_KEYS:
        raise rope.unsupported(key, _ROPE_KEYS)
    rope.refuse_unknown((*_ROPE_COMMON_KEYS, *_ROPE_KEYS[kind]))
    rope.refuse({"partial_rotary_factor": (1.0,), "truncate": (True,)})
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = rope.integer("original_max_position_embeddings", context_length, high=_CONTEXT_LIMIT)
    if kind == "llama3":
        return Llama3Scaling(
            factor, rope.number("low_freq_factor"), rope.number("high_freq_factor"), original
        )
    return YarnScaling(
        factor,
        original,
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.optional_number("attention_factor"),
    )
