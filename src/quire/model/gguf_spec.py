"""From a GGUF file's metadata to a ModelSpec, and back."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from quire.core.errors import ModelFileError
from quire.loader.metadata import Fields, Metadata
from quire.loader.tensor import Tensor
from quire.model.families import CONFIG_FAMILIES, GGUF_FAMILIES, find_family
from quire.model.family import (
    Facts,
    Family,
    NoRope,
    Placement,
    RoutedLayers,
    Routing,
    Scales,
    Windows,
    describe,
)
from quire.model.rope import (
    DivisorScaling,
    LinearScaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from quire.model.spec import (
    MAX_SIZES,
    Attention,
    Dense,
    Experts,
    Latent,
    LayerInputs,
    ModelSpec,
    Norm,
    NormKind,
    PositionScale,
    QKNorm,
    Router,
    Scoring,
)
from quire.model.states import StateKind, StateMixer

# Keys under the architecture's name that are read below or say nothing about the mathematics.
_READ_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_epsilon",  # of layer norms; these families have RMS norms alone
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "attn_logit_softcapping",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)
# Keys that quire does not compute, with the values that mean "not in this model". Any other key is
# refused: it may change the mathematics.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # none, or the last token's state, which is what Want.POOLED gives
    "attention.kv_lora_rank": (0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (0.0,),
    "residual_scale": (0.0, 1.0),
    "rope.freq_base_swa": (),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
_OF_EXPERTS: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0.0, 1.0),
    "interleave_moe_layer_step": (0,),
    "leading_dense_block_count": (0,),
}
_KEY_LENGTH_SWA = "attention.key_length_swa"
_LAYER_EPSILON = "attention.layer_norm_epsilon"
_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
_CHUNK = 8192  # of llama4, whose files do not say it
_SCALING_TYPES = ("none", "linear", "yarn")
_WINDOW_LIMIT = 1 << 62


def gguf_family(metadata: Metadata) -> Family:
    """Of a file's architecture, or what files of that architecture with experts are."""
    architecture = metadata.text("general.architecture")
    family = find_family(GGUF_FAMILIES, "general.architecture", architecture)
    count = metadata.get(f"{architecture}.expert_count")
    has_experts = isinstance(count, int) and count > 0
    return CONFIG_FAMILIES[family.with_experts] if family.with_experts and has_experts else family


def spec_from_gguf(metadata: Metadata, tensors: Mapping[str, Tensor]) -> ModelSpec:
    """Describe the model; the tensors' names say which optional parts it has."""
    family = gguf_family(metadata)
    fields = Fields(metadata, "GGUF metadata", f"{metadata.text('general.architecture')}.")
    refused = {**_NEUTRAL_VALUES, **({} if family.routing else _OF_EXPERTS)}
    if fields.text("rope.scaling.type", "") == "yarn":  # llama.cpp's is the paper's in any case
        del refused["rope.scaling.yarn_attn_factor"]
    fields.refuse({key: refused[key] for key in refused.keys() - family.gguf_reads})
    fields.refuse_unknown(
        _READ_KEYS | family.gguf_reads | _NEUTRAL_VALUES.keys() | _OF_EXPERTS.keys()
    )
    return _spec(_placed(family, fields, tensors), fields, tensors)


def _placed(family: Family, fields: Fields, tensors: Mapping[str, Tensor]) -> Family:
    """What a file says of its family. Halves that share a norm are told by its absence, others by
    a key."""
    if "attention.max_alibi_bias" in family.gguf_reads:
        family = replace(family, alibi=fields.number("attention.max_alibi_bias"))
    if family.gguf_names_if is not None and f"blk.0.{family.gguf_names_if}.weight" not in tensors:
        return replace(family, placement=Placement.PARALLEL)  # falcon's with one norm
    if family.placement_if is None:
        return family
    is_there = "blk.0.ffn_norm.weight" not in tensors
    if family.placement is Placement.PARALLEL_EACH:
        is_there = fields.boolean("use_parallel_residual", True)
    return family if is_there else replace(family, placement=Placement.BEFORE)


def _spec(family: Family, fields: Fields, tensors: Mapping[str, Tensor]) -> ModelSpec:
    hidden_size = fields.integer("embedding_length", high=MAX_SIZES["hidden_size"])
    num_layers = num_decoder_layers(fields)
    norm = _norm(family, fields)
    feeds = _fed_layers(family, fields, num_layers)
    states = _states(family, fields, tensors, hidden_size, feeds)
    attends = _layers_with_attention(family, feeds, states)
    windows = _windows(family, fields, num_layers)
    attention: Attention | None = None
    ropes: tuple[Rope | None, ...] = (None,) * num_layers
    if any(attends):
        attention = _attention(family, fields, tensors, hidden_size, attends.index(True))
    sliding = attention
    if attention is not None and _KEY_LENGTH_SWA in family.gguf_reads:
        sliding, attention = _both_attentions(fields, tensors, attention, windows)
    if attention is not None:
        ropes = _ropes(family, fields, tensors, attention, windows)
    context_length = fields.integer("context_length", high=MAX_SIZES["context_length"])
    facts = Facts(
        hidden_size=hidden_size,
        vocabulary_size=_vocabulary_size(fields, tensors),
        context_length=context_length,
        num_positions=context_length if family.has_positions else 0,
        norm=norm,
        attention=attention,
        ropes=ropes,
        windows=windows,
        feed_forwards=_feed_forwards(family, fields, tensors, norm, feeds),
        sliding_attention=sliding,
        num_shared_kv=fields.integer(
            "attention.shared_kv_layers", 0, low=0, high=max(0, num_layers - 1)
        ),
        states=states,
        attends=attends,
        layer_inputs=_layer_inputs(family, fields, norm),
        residual_scale=fields.number("residual_scale", 1.0) or 1.0,
        embedding_scale=fields.number("embedding_scale", 1.0) or 1.0,
        logit_scale=fields.number("logit_scale", 1.0) or 1.0,
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
        tied_head=family.gguf_tied_head or "output.weight" not in tensors,
        head_bias=family.head_bias is True or "output.bias" in tensors,
        linear_scales="blk.0.attn_q.scale" in tensors,
    )
    if family.gguf_scales is not None:
        facts = _scaled(facts, family.gguf_scales)
    return describe(family, facts)


def _scaled(facts: Facts, scales: Scales) -> Facts:
    return replace(
        facts,
        embedding_scale=scales.embedding,
        residual_scale=scales.depth * len(facts.windows) ** -0.5,
        logit_scale=facts.hidden_size / scales.hidden_size,
    )


def _layer_inputs(family: Family, fields: Fields, norm: Norm) -> LayerInputs | None:
    key = "embedding_length_per_layer_input"
    size = fields.integer(key, 0, low=0, high=MAX_SIZES["hidden_size"])
    if not size:
        return None
    return LayerInputs(size=size, activation=family.gguf_activation, norm=norm)


def num_decoder_layers(fields: Fields) -> int:
    """Without those that predict further tokens, which come last."""
    limit = MAX_SIZES["num_layers"]
    count = fields.integer("block_count", high=limit)
    return max(1, count - fields.integer("nextn_predict_layers", 0, low=0, high=limit))


def _norm(family: Family, fields: Fields) -> Norm:
    has_layer_epsilon = fields.get(_LAYER_EPSILON) is not None  # phimoe's has the other's name
    is_layer = family.norm is NormKind.LAYER and has_layer_epsilon
    epsilon = fields.number(_LAYER_EPSILON if is_layer else _RMS_EPSILON)
    return Norm(epsilon=epsilon, kind=family.norm, has_bias=family.norm_bias)


# ---- attention


def _attention(
    family: Family,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    hidden_size: int,
    first: int,  # layer that attends
) -> Attention:
    limit, num_layers = MAX_SIZES["num_heads"], num_decoder_layers(fields)
    num_heads = _by_layer(family, fields, "attention.head_count", None, limit)[0]
    norm = _norm(family, fields)
    if family.has_latent:
        return _latent_attention(family, fields, num_heads, hidden_size, norm)
    limit = MAX_SIZES["num_kv_heads"]
    has_bias = any(f"blk.{first}.{name}.bias" in tensors for name in ("attn_q", "attn_qkv"))
    scale = fields.number("attention.scale", 0.0)
    if not scale and num_layers in family.gguf_hidden_scale_at:
        scale = (hidden_size / num_heads) ** -0.5
    return Attention(
        num_heads=num_heads,
        num_kv_heads=_by_layer(family, fields, "attention.head_count_kv", num_heads, limit)[0],
        head_dim=_head_dim(fields, hidden_size, num_heads),
        qkv_bias=family.qkv_bias is True or has_bias,
        output_bias=f"blk.{first}.attn_output.bias" in tensors,
        qk_norm=_qk_norm(family, fields, tensors, norm),
        value_norm=_without_weights(norm) if family.has_value_norm else None,
        output_norm=norm if family.sub_norms else None,
        soft_cap=fields.number("attn_logit_softcapping", 0.0),
        scale=1.0 if family.has_unit_scale else scale,
        position_scale=_position_scale(family, fields),
        has_sinks=family.has_sinks,
        has_output_gate=family.has_output_gate,
    )


def _without_weights(norm: Norm) -> Norm:
    return Norm(epsilon=norm.epsilon, kind=norm.kind, has_weight=False)


def _by_layer(
    family: Family, fields: Fields, key: str, default: int | None, limit: int
) -> tuple[int, ...]:
    """A size that files may give for each layer; one where it is the same for all, which in
    gemma4's files alone it need not be."""
    if not isinstance(fields.get(key), np.ndarray):
        return (fields.integer(key, default, high=limit),)
    sizes = fields.integers(key)
    has_all = len(sizes) == fields.integer("block_count", high=MAX_SIZES["num_layers"])
    if _KEY_LENGTH_SWA in family.gguf_reads:
        if not has_all:
            raise fields.unsupported(key, ["a size for each layer"])
        return sizes
    if family.state is not None:  # none in layers that keep a state
        sizes = tuple(size for size in sizes if size)
    if has_all and len({*sizes}) == 1 and 1 <= sizes[0] <= limit:
        return sizes[:1]
    return (fields.integer(key, default, high=limit),)  # which refuses it by name


def _states(
    family: Family,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    hidden_size: int,
    feeds: tuple[bool, ...],
) -> tuple[StateMixer | None, ...]:
    if family.state is None:
        return ()
    has_state = [True] * len(feeds)
    if not (family.has_state_beside or family.has_states_alone):
        has_state = _state_layers(fields, len(feeds))
    if family.has_single_halves:
        has_state = [is_there and not fed for is_there, fed in zip(has_state, feeds, strict=True)]
    if not any(has_state):
        return ()
    mixer = _state_mixer(family, fields, hidden_size)
    first = has_state.index(True)
    mixer = replace(
        mixer,
        has_convolution_bias=f"blk.{first}.ssm_conv1d.bias" in tensors,
        has_norm=mixer.has_norm
        and (family.state_norm_if is None or f"blk.{first}.ssm_norm.weight" in tensors),
    )
    return tuple(mixer if is_there else None for is_there in has_state)


def _fed_layers(family: Family, fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Those with a feed-forward: where layers are one half alone, those that have its size."""
    if not family.has_single_halves:
        return (not family.has_states_alone,) * num_layers
    sizes = fields.integers("feed_forward_length")
    if len(sizes) < num_layers:
        raise fields.unsupported("feed_forward_length", ["a number for each layer"])
    return tuple(size > 0 for size in sizes[:num_layers])


def _layers_with_attention(
    family: Family, feeds: tuple[bool, ...], states: tuple[StateMixer | None, ...]
) -> tuple[bool, ...]:
    if family.has_state_beside:
        return (True,) * len(feeds)
    others = states or (None,) * len(feeds)
    return tuple(
        state is None and not (family.has_single_halves and fed)
        for state, fed in zip(others, feeds, strict=True)
    )


def _state_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Those without heads of keys; DeltaNets' files list them, or say how often a layer attends."""
    if isinstance(fields.get("attention.head_count_kv"), np.ndarray):
        counts = fields.integers("attention.head_count_kv")
        if len(counts) < num_layers:
            raise fields.unsupported("attention.head_count_kv", ["a number for each layer"])
        return [count == 0 for count in counts[:num_layers]]
    listed = "attention.recurrent_layers"
    if fields.get(listed) is not None:
        has_state = fields.booleans(listed)
        if len(has_state) < num_layers:
            raise fields.unsupported(listed, ["a boolean for each layer"])
        return list(has_state[:num_layers])
    every = fields.integer("full_attention_interval", 4, high=MAX_SIZES["num_layers"])
    return [(layer + 1) % every != 0 for layer in range(num_layers)]


def _state_mixer(family: Family, fields: Fields, hidden_size: int) -> StateMixer:
    limit, size_limit = MAX_SIZES["num_heads"], MAX_SIZES["head_dim"]
    assert family.state is not None
    if family.state is StateKind.CONVOLUTION:
        kernel = fields.integer("shortconv.l_cache", high=size_limit)
        return StateMixer(kind=family.state, kernel=kernel, value_dim=hidden_size)
    if family.state is StateKind.MAMBA_1:
        return _first_mamba(family, fields)
    num_heads = fields.integer("ssm.time_step_rank", high=limit)
    return StateMixer(
        kind=family.state,
        kernel=fields.integer("ssm.conv_kernel", high=size_limit),
        num_heads=num_heads,
        num_groups=fields.integer("ssm.group_count", high=limit),
        key_dim=fields.integer("ssm.state_size", high=size_limit),
        value_dim=fields.integer("ssm.inner_size", high=MAX_SIZES["ffn_size"]) // num_heads,
        is_tiled=fields.boolean("ssm.v_head_reordered", family.gguf_tiles_heads),
        norm_epsilon=_norm(family, fields).epsilon,
    )


def _first_mamba(family: Family, fields: Fields) -> StateMixer:
    limit = MAX_SIZES["head_dim"]
    return StateMixer(
        kind=StateKind.MAMBA_1,
        kernel=fields.integer("ssm.conv_kernel", high=limit),
        key_dim=fields.integer("ssm.state_size", high=limit),
        value_dim=fields.integer("ssm.inner_size", high=MAX_SIZES["ffn_size"]),
        has_norm=False,
        step_rank=fields.integer("ssm.time_step_rank", high=limit),
        has_step_norms=family.has_step_norms or fields.boolean("ssm.dt_b_c_rms", False),
        has_step_weights=family.has_step_norms,
        norm_epsilon=_norm(family, fields).epsilon,
    )


def _both_attentions(
    fields: Fields,
    tensors: Mapping[str, Tensor],
    attention: Attention,
    windows: tuple[int | None, ...],
) -> tuple[Attention, Attention]:
    """gemma4's with a window and without; keys are values too where a file has no values."""
    found = []
    counts = fields.get("attention.head_count_kv")
    for is_full in (False, True):
        kind = [layer for layer, window in enumerate(windows) if (window is None) == is_full]
        layer = kind[0] if kind else 0
        count = attention.num_kv_heads
        if isinstance(counts, np.ndarray):
            count = fields.integers("attention.head_count_kv")[layer]
        head_dim = attention.head_dim
        if not is_full:
            head_dim = fields.integer(_KEY_LENGTH_SWA, head_dim, high=MAX_SIZES["head_dim"])
        names = [f"blk.{layer}.attn_{name}.weight" for name in "kv"]
        has_key_values = names[0] in tensors and names[1] not in tensors
        sizes = replace(attention, num_kv_heads=count, head_dim=head_dim, value_dim=0, scale=1.0)
        found.append(replace(sizes, has_key_values=has_key_values))
    return found[0], found[1]


def _qk_norm(
    family: Family, fields: Fields, tensors: Mapping[str, Tensor], norm: Norm
) -> QKNorm | None:
    """A family that has it in some models alone: where the file has its weights."""
    if family.qk_norm is None:
        return None
    count = fields.get("expert_count")
    if family.gguf_unnormed_at and isinstance(count, int) and count == family.gguf_unnormed_at:
        return None
    has_weights = any(name.endswith(".attn_q_norm.weight") for name in tensors)
    if family.qk_norm_if and not family.has_bare_qk_norm and not has_weights:
        return None
    has_weight = not family.has_bare_qk_norm
    own = Norm(epsilon=norm.epsilon, kind=norm.kind, has_weight=has_weight)
    return QKNorm(norm=own, span=family.qk_norm, is_after_rope=family.qk_norm_after_rope)


def _position_scale(family: Family, fields: Fields) -> PositionScale | None:
    if family.splits_by_rope:  # llama4, whose files do not say it
        return PositionScale(factor=0.1, length=_CHUNK, offset=1)
    factor = fields.number("attention.temperature_scale", 0.0)
    if not factor:
        return None
    limit = MAX_SIZES["context_length"]
    length = fields.optional_integer("attention.temperature_length", high=limit)
    if length is None:
        length = fields.integer("rope.scaling.original_context_length", high=limit)
    return PositionScale(factor=factor, length=length)


def _latent_attention(
    family: Family, fields: Fields, num_heads: int, hidden_size: int, norm: Norm
) -> Attention:
    """Files say the sizes of the cached vector; those of heads have the suffix _mla. Older files,
    whose keys and values have one matrix (attn_kv_b), say those of heads."""
    limit, size_limit = MAX_SIZES["head_dim"], MAX_SIZES["hidden_size"]
    suffix = "" if fields.get("attention.key_length_mla") is None else "_mla"
    head_dim = fields.integer(f"attention.key_length{suffix}", high=limit)
    rope_dims = fields.integer("rope.dimension_count", high=limit)
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    factor = fields.number("rope.scaling.factor", 1.0)
    extended = 1.0 + multiplier * math.log(factor) if factor > 1 else 1.0
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        value_dim=fields.integer(
            f"attention.value_length{suffix}", max(1, hidden_size // num_heads), high=limit
        ),
        scale=head_dim**-0.5 * extended * extended,
        position_scale=_position_scale(family, fields),
        latent=Latent(
            kv_rank=fields.integer("attention.kv_lora_rank", high=size_limit),
            rope_dims=rope_dims,
            norm=norm,
            query_rank=fields.optional_integer("attention.q_lora_rank", high=size_limit),
        ),
    )


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    limit = MAX_SIZES["head_dim"]
    default = max(1, hidden_size // num_heads)
    head_dim = fields.integer("attention.key_length", default, high=limit)
    if fields.integer("attention.value_length", head_dim, high=limit) != head_dim:
        raise fields.unsupported("attention.value_length", [f"{head_dim}, the key_length"])
    return head_dim


def _vocabulary_size(fields: Fields, tensors: Mapping[str, Tensor]) -> int:
    """Files may leave it to the embedding matrix."""
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    return fields.integer("vocab_size", rows, high=MAX_SIZES["vocabulary_size"])


def _windows(family: Family, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Zero means none. A pattern says of each layer whether it has the window."""
    window = fields.integer("attention.sliding_window", 0, low=0, high=_WINDOW_LIMIT) or None
    if family.is_chunked:
        if window is None and fields.get("attention.sliding_window") is not None:
            raise fields.unsupported("attention.sliding_window", [f"chunks of {_CHUNK}"])
        window = _CHUNK
    every = family.full_every if family.windows is Windows.MOST else 0
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        limit = MAX_SIZES["num_layers"]
        every = fields.integer("attention.sliding_window_pattern", low=0, high=limit)
    elif pattern is not None:
        slides = fields.booleans("attention.sliding_window_pattern")
        if len(slides) < num_layers:
            raise fields.unsupported("attention.sliding_window_pattern")
        return tuple(window if is_there else None for is_there in slides[:num_layers])
    return tuple(
        window if not every or (layer + 1) % every else None for layer in range(num_layers)
    )


# ---- feed-forward


def _feed_forwards(
    family: Family,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    norm: Norm,
    feeds: tuple[bool, ...],
) -> tuple[Dense | Experts | None, ...]:
    limit, num_layers = MAX_SIZES["num_layers"], len(feeds)
    if not any(feeds):
        return (None,) * num_layers
    first_fed = feeds.index(True)
    sizes = _dense_sizes(family, fields)
    if family.dense_halved:
        sizes = tuple(size // 2 for size in sizes)
    dense = Dense(
        size=sizes[0],
        activation=family.gguf_activation,
        is_gated=family.is_gated,
        has_bias=f"blk.{first_fed}.ffn_up.bias" in tensors,
        inner_norm=norm if family.sub_norms else None,
    )
    count = fields.get("expert_count")
    has_experts = isinstance(count, int) and count > 0
    if family.routing is None or (family.routing.is_there_if and not has_experts):
        every = sizes * num_layers if len(sizes) == 1 else sizes
        return tuple(
            replace(dense, size=size) if is_fed else None
            for size, is_fed in zip(every, feeds, strict=True)
        )
    if family.routing.layers is RoutedLayers.PERIODS:
        names = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers)]
        if not any(name in tensors for name in names):
            return (dense,) * num_layers
        routed = _experts(family.routing, fields, tensors, dense)
        return tuple(routed if name in tensors else dense for name in names)
    experts = _experts(family.routing, fields, tensors, dense)
    if family.routing.is_beside_dense:
        router = replace(experts.router, input_norm=_without_weights(norm))
        experts = replace(experts, router=router, beside=dense, beside_norm=norm)
    first = fields.integer("leading_dense_block_count", 0, low=0, high=limit)
    step = fields.integer("interleave_moe_layer_step", 1, high=limit)
    return tuple(
        None if not is_fed else experts if layer >= first and (layer + 1) % step == 0 else dense
        for layer, is_fed in enumerate(feeds)
    )


def _dense_sizes(family: Family, fields: Fields) -> tuple[int, ...]:
    """One for all layers or each its own. Where no layer is dense files leave it out or say 0, and
    have that of experts."""
    key, of_experts = "feed_forward_length", "expert_feed_forward_length"
    given = fields.get(key)
    is_said = given is not None and (isinstance(given, np.ndarray) or given != 0)
    if family.routing is not None and not is_said and fields.get(of_experts) is not None:
        key = of_experts
    return _by_layer(family, fields, key, None, MAX_SIZES["ffn_size"])


def _experts(
    routing: Routing, fields: Fields, tensors: Mapping[str, Tensor], dense: Dense
) -> Experts:
    limit, size_limit = MAX_SIZES["num_experts"], MAX_SIZES["ffn_size"]
    size = fields.integer("expert_feed_forward_length", dense.size, high=size_limit)
    scoring = _scoring(routing, fields, tensors)
    groups = fields.integer("expert_group_count", 1, high=limit)
    router = Router(
        scoring=scoring,
        normalises=fields.boolean("expert_weights_norm", routing.gguf_normalises),
        scale=fields.number("expert_weights_scale", 1.0) or 1.0,
        has_bias=routing.router_bias,
        has_choice_bias=bool(routing.choice_bias) and _has_choice_bias(tensors),
        num_groups=groups,
        num_used_groups=fields.integer("expert_group_used_count", groups, high=limit),
        num_group_best=routing.num_group_best if scoring is Scoring.SIGMOID else 1,
        weighs_input=routing.weighs_input,
    )
    shared = _shared_size(routing, fields, tensors, size)
    return Experts(
        count=fields.integer("expert_count", high=limit),
        num_used=fields.integer("expert_used_count", high=limit),
        size=size,
        activation=routing.activation or dense.activation,
        router=router,
        is_gated=dense.is_gated,
        has_bias=routing.expert_bias,
        latent_size=fields.optional_integer("moe_latent_size", high=MAX_SIZES["hidden_size"]),
        shared=dense.of_size(shared) if shared else None,
        has_shared_gate=routing.has_shared_gate,
    )


def _has_choice_bias(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(".exp_probs_b.bias") for name in tensors)


def _scoring(routing: Routing, fields: Fields, tensors: Mapping[str, Tensor]) -> Scoring:
    key = "expert_gating_func"
    usual = routing.gguf_scoring or routing.scoring
    if routing.gguf_scoring is not None and _is_glm_47_lite(fields, tensors):
        usual = routing.scoring
    kinds = {0: usual, 1: Scoring.SOFTMAX, 2: Scoring.SIGMOID}
    number = fields.integer(key, 0, low=0, high=MAX_SIZES["num_experts"])
    if number not in kinds:
        raise fields.unsupported(key, ["1 (softmax)", "2 (sigmoid)"])
    return kinds[number]


def _is_glm_47_lite(fields: Fields, tensors: Mapping[str, Tensor]) -> bool:
    """A deepseek2 whose first files do not name its scoring, which llama.cpp tells by its sizes."""
    num_layers = fields.integer("block_count", high=MAX_SIZES["num_layers"])
    return num_layers in (47, 48) and _vocabulary_size(fields, tensors) == 154_880


def _shared_size(
    routing: Routing, fields: Fields, tensors: Mapping[str, Tensor], expert_size: int
) -> int:
    """Of the shared expert; 0: there is none."""
    if routing.shared_size is None and routing.shared_count is None:
        return 0
    limit = MAX_SIZES["ffn_size"]
    key = "expert_shared_feed_forward_length"
    if fields.get(key) is not None:
        return fields.integer(key, low=0, high=limit)
    is_there = any(name.endswith(".ffn_up_shexp.weight") for name in tensors)
    usual = 1 if routing.shared_size is not None and is_there else 0
    count = fields.integer("expert_shared_count", usual, low=0, high=limit // expert_size)
    return count * expert_size


# ---- rope


def _ropes(
    family: Family,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    attention: Attention,
    windows: tuple[int | None, ...],
) -> tuple[Rope | None, ...]:
    latent = attention.latent
    rope_dims = attention.head_dim if latent is None else latent.rope_dims
    usual = _rope(family, fields, tensors, rope_dims)
    sliding = usual
    if family.sliding_rope:
        base = family.sliding_rope_base or usual.base
        sliding = Rope(
            base=fields.number("rope.freq_base_swa", base),
            dims=fields.integer("rope.dimension_count_swa", usual.dims, high=MAX_SIZES["head_dim"]),
            interleaved=usual.interleaved,
        )
    has_rope = [True] * len(windows)
    if "position_embedding_type" in family.reads:  # Granite's files say so by this key
        has_rope = [fields.boolean("rope.scaling.finetuned", True)] * len(windows)
    elif family.no_rope is NoRope.ALL:
        has_rope = [False] * len(windows)
    elif family.no_rope is NoRope.FULL_LAYERS:
        has_rope = [window is not None or not any(windows) for window in windows]
    elif family.no_rope is NoRope.LISTED:
        has_rope = [(layer + 1) % family.no_rope_every != 0 for layer in range(len(windows))]
    return tuple(
        None if not is_there else usual if window is None else sliding
        for window, is_there in zip(windows, has_rope, strict=True)
    )


def _rope(family: Family, fields: Fields, tensors: Mapping[str, Tensor], head_dim: int) -> Rope:
    dims = fields.integer("rope.dimension_count", head_dim, high=MAX_SIZES["head_dim"])
    scaling = _scaling(family, fields)
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None:
        if scaling is not None:
            raise fields.unsupported("rope.scaling.type", ["none beside rope_freqs.weight"])
        scaling = DivisorScaling(_factors(divisors, dims))
    elif "rope_factors_long.weight" in tensors:
        scaling = _long_scaling(fields, tensors, dims)
    return Rope(
        base=fields.number("rope.freq_base", 10000.0),
        dims=dims,
        # Sections of pictures' positions are of halves: the rows of GLM's are permuted then.
        interleaved=family.interleaved_in_gguf and fields.get("rope.dimension_sections") is None,
        scaling=scaling,
    )


def _long_scaling(fields: Fields, tensors: Mapping[str, Tensor], dims: int) -> LongScaling:
    limit = MAX_SIZES["context_length"]
    if "rope_factors_short.weight" not in tensors:
        raise ModelFileError("tensor rope_factors_short.weight is missing beside the long factors")
    return LongScaling(
        short=_factors(tensors["rope_factors_short.weight"], dims),
        long=_factors(tensors["rope_factors_long.weight"], dims),
        original_context=fields.integer(
            "rope.scaling.original_context_length",
            fields.integer("context_length", high=limit),
            high=limit,
        ),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def _factors(tensor: Tensor, dims: int) -> tuple[float, ...]:
    if tensor.shape != (dims // 2,):
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected [{dims // 2}]: half of "
            f"the {dims} rope dimensions"
        )
    return tuple(tensor.to_float32().tolist())


def _scaling(family: Family, fields: Fields) -> RopeScaling | None:
    factor = fields.number("rope.scaling.factor", 1.0)
    kind = fields.text("rope.scaling.type", "linear")  # a factor alone means linear
    if kind == "longrope" and "rope.scaling.attn_factor" in family.gguf_reads:
        return None  # its factors are tensors
    if kind not in _SCALING_TYPES:
        raise fields.unsupported("rope.scaling.type", _SCALING_TYPES)
    if kind == "yarn":
        limit = MAX_SIZES["context_length"]
        return YarnScaling(
            factor=factor,
            original_context=fields.integer(
                "rope.scaling.original_context_length",
                fields.integer("context_length", high=limit),
                high=limit,
            ),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=_attention_factor(family, fields, factor),
        )
    if kind == "none" or factor in (0.0, 1.0):
        return None
    return LinearScaling(factor)


def _attention_factor(family: Family, fields: Fields, factor: float) -> float | None:
    """Where a multiplier is given: DeepSeek's is for the attention's scale alone."""
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not multiplier or factor <= 1.0:
        return None
    if family.has_latent:
        return 1.0
    divisor = 1.0 + 0.1 * multiplier * math.log(factor)
    if not divisor > 0:
        raise ModelFileError(f"rope.scaling.yarn_log_multiplier cannot be {multiplier}")
    return (1.0 + 0.1 * math.log(factor)) / divisor


# ---- the metadata of a spec


def fields_of_spec(spec: ModelSpec, architecture: str) -> dict[str, str | int | float]:
    """The fields under the architecture's name from which `spec_from_gguf` makes this spec, as far
    as GGUF has words for it; rope_freqs.weight is a tensor."""
    fields: dict[str, str | int | float] = {
        "vocab_size": spec.vocabulary_size,
        "context_length": spec.context_length,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.ffn_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_epsilon,
        "rope.dimension_count": spec.rope.dims,
        "rope.freq_base": spec.rope.base,
    }
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        fields |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    match spec.rope.scaling:
        case LinearScaling(factor):
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling() as yarn:
            fields |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_context,
                "rope.scaling.yarn_beta_fast": yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }
    return {f"{architecture}.{key}": value for key, value in fields.items()}
