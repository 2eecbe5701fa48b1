"""The families that quire runs, as data: what the files of each leave unsaid; and `describe`, which
makes a ModelSpec of a family and of what a file says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.rope import Rope
from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Layer,
    LayerInputs,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    Scoring,
)


class Placement(StrEnum):
    """Where a layer's norms are."""

    BEFORE = "before"  # each half
    AROUND = "around"  # before and after each half
    AFTER = "after"  # each half
    PARALLEL = "parallel"  # one before both halves, which run side by side
    PARALLEL_EACH = "parallel each"  # one before each of two halves that run side by side


class Windows(StrEnum):
    """Which layers a sliding window is for, where a file does not list them."""

    NONE = "none"
    EVERY = "every"
    LATER = "later"  # those from max_window_layers on
    MOST = "most"  # all but each `full_every`-th
    LISTED = "listed"  # none: a file with windows must list them


class NoRope(StrEnum):
    """Which layers have no rope."""

    NEVER = "never"
    FULL_LAYERS = "full layers"  # those without a window, in models that have windows
    LISTED = "listed"  # no_rope_layers; where there is none each `no_rope_every`-th


class RoutedLayers(StrEnum):
    """Which layers have experts."""

    ALL = "all"
    STEPS = "steps"  # each decoder_sparse_step-th but those of mlp_only_layers
    AFTER_DENSE = "after dense"  # those from first_k_dense_replace on
    SPAN = "span"  # from moe_layer_start_index to moe_layer_end_index, or to the last
    LISTED = "listed"  # moe_layers; where there is none each interleave_moe_layer_step-th


class ExpertLayout(StrEnum):
    """How safetensors keep the gate and up matrices of all experts where they are one tensor."""

    HALVES = "halves"  # [experts, gates then ups, in]
    TRANSPOSED_HALVES = "transposed halves"  # [experts, in, gates then ups]; or as HALVES
    TRANSPOSED_ALTERNATING = "transposed, alternating"  # [experts, in, gate, up, gate, up ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What files of a family with experts do not say. A text is the field that says it."""

    scoring: Scoring = Scoring.SOFTMAX
    gguf_scoring: Scoring | None = None  # where expert_gating_func is not there; None: as scoring
    normalises: bool | str = "norm_topk_prob"
    gguf_normalises: bool = False  # where expert_weights_norm is not there
    router_bias: bool = False
    expert_bias: bool = False
    choice_bias: bool = False
    num_group_best: int = 1
    weighs_input: bool = False
    layers: RoutedLayers = RoutedLayers.ALL
    shared_size: str | None = None  # of the shared expert
    shared_count: str | None = None  # how many experts' sizes it has
    has_shared_gate: bool = False
    is_beside_dense: bool = False  # experts beside a dense feed-forward, with norms of their own
    is_there_if: str | None = None  # this field says whether a model has experts
    activation: Activation | None = None  # None: as the dense layers'


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the files of one family do not say themselves.

    `config_defaults` are the values of fields that the family's config.json leaves out. A bias is
    there always, never, or where that field of config.json says so; GGUF's tensors tell.
    """

    name: str
    architectures: tuple[str, ...] = ()  # GGUF's general.architecture
    model_types: tuple[str, ...] = ()  # config.json's model_type
    with_experts: str | None = None  # the family of files of this architecture with experts

    # ---- layers
    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    has_bare_norms: bool = False  # files have no weights of norms: they are ones
    placement: Placement = Placement.BEFORE
    placement_if: str | None = None  # norms are there only where this field says so, else before
    sub_norms: bool = False
    qk_norm: NormSpan | None = None
    qk_norm_if: str | None = None  # there only where this field says so
    qk_norm_after_rope: bool = False
    has_bare_qk_norm: bool = False  # without weights
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    ffn_bias: bool | str = False
    head_bias: bool = False
    is_gated: bool = True
    has_sinks: bool = False
    has_latent: bool = False
    windows: Windows = Windows.NONE
    full_every: int = 1  # 0: never
    ends_full: bool = False  # the last layer never has a window
    is_chunked: bool = False  # windows are chunks
    no_rope: NoRope = NoRope.NEVER
    no_rope_every: int = 4
    # Norms of queries and keys are for layers with rope, the position scale for those without.
    splits_by_rope: bool = False
    sliding_rope: bool = False  # layers with a window have an unscaled rope, of this base
    sliding_rope_base: float | None = None  # None: the same as other layers'
    routing: Routing | None = None
    has_value_norm: bool = False
    has_unit_scale: bool = False  # attention scores are not scaled
    has_output_scale: bool = False
    scales_embedding: bool = False  # by the square root of the hidden size
    divides_logits: bool = False  # the logits' scale divides

    # ---- config.json and safetensors
    config_defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # fields that mean something in this family alone
    ignores: frozenset[str] = frozenset()  # fields that mean something in other families alone
    config_keys: Mapping[str, str] = field(default_factory=dict)  # what others call these fields
    listed_by_layer: frozenset[str] = frozenset()  # fields that may list one value for all layers
    epsilon: str = "rms_norm_eps"
    dense_size: str = "intermediate_size"
    interleaved_in_config: bool = False  # safetensors' q and k rows are in interleaved rope order
    has_legacy_gelu: bool = False  # "gelu" means its approximation by tanh
    has_extra_layers: bool = False  # layers behind the last predict further tokens: left out
    norm_offset: float = 0.0  # what norm weights are stored less of
    expert_layout: ExpertLayout = ExpertLayout.HALVES
    grouped_qkv: bool = False  # fused rows come by key head: its queries, its key, its value
    config_names: Mapping[str, str] = field(default_factory=dict)  # of parts of a layer, in ours

    # ---- GGUF
    gguf_reads: frozenset[str] = frozenset()
    interleaved_in_gguf: bool = False
    gguf_activation: Activation = Activation.SILU
    gguf_tied_head: bool = False  # whether or not the file has an output matrix of its own
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_unnormed_at: int = 0  # files of so many experts have no norms of queries and keys
    # By layer count: files whose attention scale is (hidden / heads) ** -0.5, which they do not say
    gguf_hidden_scale_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a file says of its model. `attention` has neither rope nor window: `ropes` and `windows`
    have one for each layer."""

    hidden_size: int
    vocabulary_size: int
    context_length: int
    norm: Norm
    attention: Attention
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    feed_forwards: tuple[Dense | Experts, ...]
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    tied_head: bool = False
    head_bias: bool = False
    linear_scales: bool = False
    sliding_attention: Attention | None = None  # of layers with a window; None: as others'
    num_shared_kv: int = 0  # so many layers at the end make no keys and values of their own
    layer_inputs: LayerInputs | None = None


def describe(family: Family, facts: Facts) -> ModelSpec:
    layers = tuple(
        _layer(family, facts, _mixer(family, facts, index), feed)
        for index, feed in enumerate(facts.feed_forwards)
    )
    root = math.sqrt(facts.hidden_size) if family.scales_embedding else 1.0
    scale = facts.logit_scale
    return ModelSpec(
        family=family.name,
        hidden_size=facts.hidden_size,
        vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length,
        layers=layers,
        output_norm=facts.norm,
        embedding_scale=facts.embedding_scale * root,
        logit_scale=1.0 / scale if family.divides_logits and scale else scale,
        logit_soft_cap=facts.logit_soft_cap,
        tied_head=facts.tied_head,
        head_bias=facts.head_bias,
        layer_inputs=facts.layer_inputs,
        linear_scales=facts.linear_scales,
    )


def _mixer(family: Family, facts: Facts, index: int) -> Attention:
    rope, window = facts.ropes[index], facts.windows[index]
    attention = facts.attention
    if window is not None and facts.sliding_attention is not None:
        attention = facts.sliding_attention
    attention = replace(attention, kv_layer=_kv_layer(facts, index))
    is_chunked = family.is_chunked and window is not None
    mixer = replace(attention, rope=rope, window=window, is_chunked=is_chunked)
    if not family.splits_by_rope:
        return mixer
    return replace(mixer, qk_norm=None) if rope is None else replace(mixer, position_scale=None)


def _kv_layer(facts: Facts, index: int) -> int | None:
    """The layer whose keys and values a layer shares: the last of its kind that makes its own."""
    first_shared = len(facts.windows) - facts.num_shared_kv
    if index < first_shared:
        return None
    is_alike = [window == facts.windows[index] for window in facts.windows[:first_shared]]
    if not any(is_alike):
        raise ModelFileError(f"layer {index} shares keys and values with none before it")
    return max(layer for layer, found in enumerate(is_alike) if found)


def _layer(family: Family, facts: Facts, mixer: Attention, feed: Dense | Experts) -> Layer:
    placement = family.placement
    before = facts.norm if placement is not Placement.AFTER else None
    after = facts.norm if placement in (Placement.AROUND, Placement.AFTER) else None
    is_parallel = placement in (Placement.PARALLEL, Placement.PARALLEL_EACH)
    return Layer(
        mixer=mixer,
        feed_forward=feed,
        mixer_norm=before,
        mixer_output_norm=after,
        feed_forward_norm=None if placement is Placement.PARALLEL else before,
        feed_forward_output_norm=after,
        is_parallel=is_parallel,
        residual_scale=facts.residual_scale,
        has_output_scale=family.has_output_scale,
    )


# ---- the table

_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm"}
_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_GLM4_MOE = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_GRANITE = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
_GRANITE_KEYS = {"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}
_OF_DEEPSEEK = Routing(
    scoring=Scoring.SIGMOID,
    choice_bias=True,
    num_group_best=2,
    layers=RoutedLayers.AFTER_DENSE,
    shared_count="n_shared_experts",
)
_HUNYUAN_NORMS = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
# The norm before the feed-forward has another name in GGUF files of these.
_NORM_BEFORE_FEED = {"post_attention_norm": "ffn_norm"}

FAMILIES = (
    Family(
        name="llama",
        architectures=("llama",),  # Mistral's and Mixtral's files too
        model_types=("llama",),
        with_experts="mixtral",
        ffn_bias="mlp_bias",
        interleaved_in_gguf=True,
    ),
    Family(
        name="mistral",
        model_types=("mistral",),
        qkv_bias=False,
        output_bias=False,
        windows=Windows.EVERY,
        config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        name="ministral",
        model_types=("ministral",),
        qkv_bias=False,
        output_bias=False,
        windows=Windows.MOST,
        full_every=0,
        config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        name="ministral3",
        architectures=("mistral3",),
        model_types=("ministral3",),
        qkv_bias=False,
        output_bias=False,
        windows=Windows.EVERY,
        interleaved_in_gguf=True,
        config_defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        reads=frozenset({"llama_4_scaling_beta"}),
        gguf_reads=frozenset(
            {
                "attention.temperature_length",
                "attention.temperature_scale",
                "rope.scaling.yarn_log_multiplier",
            }
        ),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        qkv_bias=False,
        output_bias=False,
        interleaved_in_gguf=True,
        windows=Windows.EVERY,
        config_defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        routing=Routing(normalises=True, gguf_normalises=True),
    ),
    Family(
        name="qwen2",
        architectures=("qwen2", "qwen2vl"),  # its positions in pictures are those of text here
        model_types=("qwen2",),
        qkv_bias=True,
        output_bias=False,
        windows=Windows.LATER,
        config_defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS},
        gguf_reads=frozenset({"rope.dimension_sections"}),
    ),
    Family(
        name="qwen2",
        model_types=("qwen2_vl_text", "qwen2_5_vl_text"),
        qkv_bias=True,
        output_bias=False,
        windows=Windows.LATER,
        config_defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "max_window_layers": 80,
        },
        reads=frozenset({"mrope"}),
    ),
    Family(
        name="qwen2moe",
        architectures=("qwen2moe",),
        model_types=("qwen2_moe",),
        qkv_bias="qkv_bias",
        output_bias=False,
        windows=Windows.LISTED,
        config_defaults={
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        routing=Routing(
            layers=RoutedLayers.STEPS,
            shared_size="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
    ),
    Family(
        name="qwen3",
        architectures=("qwen3", "qwen3vl"),
        model_types=("qwen3",),
        qk_norm=NormSpan.HEAD,
        windows=Windows.LATER,
        config_defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS},
        gguf_reads=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
    ),
    Family(
        name="qwen3",
        model_types=("qwen3_vl_text",),
        qk_norm=NormSpan.HEAD,
        config_defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
        reads=frozenset({"mrope"}),
    ),
    Family(
        name="qwen3moe",
        architectures=("qwen3moe", "qwen3vlmoe"),
        model_types=("qwen3_moe",),
        qk_norm=NormSpan.HEAD,
        windows=Windows.EVERY,
        config_defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        # Norms of queries and keys are there whether or not a file says so (Qwen3-Coder's do).
        ignores=frozenset({"layer_types", "use_qk_norm"}),
        routing=Routing(gguf_normalises=True, layers=RoutedLayers.STEPS),
        gguf_reads=frozenset({"rope.dimension_sections", "n_deepstack_layers"}),
    ),
    Family(
        name="qwen3moe",
        model_types=("qwen3_vl_moe_text",),
        qk_norm=NormSpan.HEAD,
        config_defaults={
            "num_key_value_heads": 16,
            "rope_theta": 5e5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        reads=frozenset({"mrope"}),
        routing=Routing(normalises=True, layers=RoutedLayers.STEPS),
        expert_layout=ExpertLayout.TRANSPOSED_HALVES,
    ),
    Family(
        name="bitnet",
        architectures=("bitnet",),
        model_types=("bitnet",),
        sub_norms=True,
        config_defaults={
            "num_key_value_heads": 5,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
    ),
    Family(
        name="bitnet",
        architectures=("bitnet-25", "bitnet-b1.58"),  # of microsoft/BitNet's two converters
        sub_norms=True,
        gguf_activation=Activation.RELU2,
        gguf_tied_head=True,
    ),
    Family(
        name="phi3",
        architectures=("phi3",),
        model_types=("phi3",),
        qkv_bias=False,
        output_bias=False,
        windows=Windows.EVERY,
        config_defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        reads=frozenset({"partial_rotary_factor", "longrope"}),
        gguf_reads=frozenset({"rope.scaling.attn_factor"}),
        gguf_names={"ffn_up": "ffn_gate_up"},
    ),
    Family(
        name="gemma",
        architectures=("gemma",),
        model_types=("gemma",),
        norm_offset=1.0,
        scales_embedding=True,
        has_legacy_gelu=True,
        gguf_activation=Activation.GELU_TANH,
        config_defaults={**_GEMMA, "num_key_value_heads": 16},
    ),
    Family(
        name="gemma2",
        architectures=("gemma2",),
        model_types=("gemma2",),
        placement=Placement.AROUND,
        norm_offset=1.0,
        scales_embedding=True,
        windows=Windows.MOST,
        full_every=2,
        has_legacy_gelu=True,
        gguf_activation=Activation.GELU_TANH,
        config_defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        reads=frozenset({"query_pre_attn_scalar"}),
        ignores=frozenset({"hidden_act"}),
        config_names=_SANDWICH,
        gguf_hidden_scale_at=(46,),
    ),
    Family(
        name="gemma3",
        architectures=("gemma3",),
        model_types=("gemma3_text",),
        placement=Placement.AROUND,
        qk_norm=NormSpan.HEAD,
        norm_offset=1.0,
        scales_embedding=True,
        windows=Windows.MOST,
        full_every=6,
        sliding_rope=True,
        sliding_rope_base=10000.0,
        has_legacy_gelu=True,
        gguf_activation=Activation.GELU_TANH,
        config_defaults={
            **_GEMMA,
            "rope_theta": 1e6,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        reads=frozenset({"query_pre_attn_scalar", "sliding_window_pattern"}),
        ignores=frozenset({"hidden_act", "attn_logit_softcapping"}),
        config_names=_SANDWICH,
        gguf_reads=frozenset({"rope.freq_base_swa", "attention.sliding_window_pattern"}),
        gguf_hidden_scale_at=(62,),
    ),
    Family(
        name="gemma4",
        architectures=("gemma4",),
        model_types=("gemma4_text",),
        placement=Placement.AROUND,
        qk_norm=NormSpan.HEAD,
        has_value_norm=True,
        has_unit_scale=True,
        has_output_scale=True,
        scales_embedding=True,
        windows=Windows.MOST,
        full_every=6,
        ends_full=True,
        sliding_rope=True,
        sliding_rope_base=10000.0,
        gguf_activation=Activation.GELU_TANH,
        config_defaults={
            **_GEMMA,
            "rope_theta": 1e6,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        reads=frozenset(
            {"num_kv_shared_layers", "attention_k_eq_v", "hidden_size_per_layer_input"}
            | {"per_layer_config", "proportional", "partial_rotary_factor"}
        ),
        ignores=frozenset({"hidden_act"}),
        config_names={
            **_SANDWICH,
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "post_per_layer_input_norm": "post_norm",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "router.proj": "ffn_gate_inp",
        },
        routing=Routing(
            normalises=True,
            gguf_normalises=True,
            is_beside_dense=True,
            is_there_if="enable_moe_block",
        ),
        gguf_reads=frozenset(
            {
                "attention.key_length_swa",
                "attention.shared_kv_layers",
                "attention.sliding_window_pattern",
                "attention.value_length_swa",
                "embedding_length_per_layer_input",
                "rope.dimension_count_swa",
                "rope.freq_base_swa",
            }
        ),
    ),
    Family(
        name="gpt-oss",
        architectures=("gpt-oss",),
        model_types=("gpt_oss",),
        has_sinks=True,
        windows=Windows.MOST,
        full_every=2,
        config_defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        routing=Routing(
            normalises=True,
            gguf_normalises=True,
            router_bias=True,
            expert_bias=True,
            activation=Activation.CLAMPED_SWIGLU,
        ),
        expert_layout=ExpertLayout.TRANSPOSED_ALTERNATING,
        gguf_names=_NORM_BEFORE_FEED,
    ),
    Family(
        name="olmo2",
        architectures=("olmo2",),  # Olmo 3's files too
        model_types=("olmo2",),
        placement=Placement.AFTER,
        qk_norm=NormSpan.PROJECTION,
        sliding_rope=True,
        config_defaults={"rms_norm_eps": 1e-5},
        config_names=_AFTER,
        gguf_reads=frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
    ),
    Family(
        name="olmo3",
        model_types=("olmo3",),
        placement=Placement.AFTER,
        qk_norm=NormSpan.PROJECTION,
        windows=Windows.MOST,
        full_every=4,
        sliding_rope=True,
        config_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        config_names=_AFTER,
    ),
    Family(
        name="olmoe",
        architectures=("olmoe",),
        model_types=("olmoe",),
        qk_norm=NormSpan.PROJECTION,
        config_defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        routing=Routing(),
    ),
    Family(
        name="smollm3",
        architectures=("smollm3",),
        model_types=("smollm3",),
        ffn_bias="mlp_bias",
        no_rope=NoRope.LISTED,
        interleaved_in_gguf=True,
        config_defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    Family(
        name="granite",
        architectures=("granite",),
        model_types=("granite",),
        ffn_bias="mlp_bias",
        interleaved_in_gguf=True,
        divides_logits=True,
        config_defaults={"attention_multiplier": 1.0},
        reads=frozenset(_GRANITE),
        # Granite 4's files without experts and state-space layers describe these nevertheless.
        gguf_reads=frozenset(
            {
                *_GRANITE_KEYS,
                "expert_shared_feed_forward_length",
                *("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size"),
                "ssm.time_step_rank",
            }
        ),
    ),
    Family(
        name="granite",
        model_types=("granitemoehybrid",),  # Granite 4's without state-space layers and experts
        dense_size="shared_intermediate_size",
        divides_logits=True,
        config_defaults={"attention_multiplier": 1.0, "num_local_experts": 8},
        reads=frozenset({*_GRANITE, "position_embedding_type"}),
        config_names={
            "shared_mlp.input_linear": "ffn_gate_up",
            "shared_mlp.output_linear": "ffn_down",
        },
    ),
    Family(
        name="granitemoe",
        architectures=("granitemoe",),
        model_types=("granitemoe",),
        interleaved_in_gguf=True,
        divides_logits=True,
        config_defaults={
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        reads=frozenset(_GRANITE),
        gguf_reads=frozenset(_GRANITE_KEYS),
        routing=Routing(normalises=True, gguf_normalises=True),
    ),
    Family(
        name="arcee",
        architectures=("arcee",),
        model_types=("arcee",),
        ffn_bias="mlp_bias",
        is_gated=False,
        interleaved_in_gguf=True,
        gguf_activation=Activation.RELU2,
        config_defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    Family(
        name="nemotron",
        architectures=("nemotron",),
        model_types=("nemotron",),
        ffn_bias="mlp_bias",
        norm=NormKind.LAYER,
        norm_bias=True,
        norm_offset=1.0,
        is_gated=False,
        epsilon="norm_eps",
        gguf_activation=Activation.RELU2,
        config_defaults={
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        reads=frozenset({"partial_rotary_factor"}),
    ),
    Family(
        name="stablelm",
        architectures=("stablelm",),
        model_types=("stablelm",),
        norm=NormKind.LAYER,
        norm_bias=True,
        placement=Placement.PARALLEL,
        placement_if="use_parallel_residual",
        qk_norm=NormSpan.EACH_HEAD,
        qk_norm_if="qk_layernorm",
        qkv_bias="use_qkv_bias",
        output_bias=False,
        epsilon="layer_norm_eps",
        config_defaults={
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
        },
        reads=frozenset({"partial_rotary_factor", "use_parallel_residual", "qk_layernorm"}),
        # Files of models whose halves follow each other say true as well: tensors tell.
        gguf_reads=frozenset({"use_parallel_residual"}),
    ),
    Family(
        name="olmo",
        architectures=("olmo",),
        model_types=("olmo",),
        norm=NormKind.LAYER,
        has_bare_norms=True,
        interleaved_in_gguf=True,
        epsilon="layer_norm_eps",
        config_defaults={"layer_norm_eps": 1e-5},
    ),
    Family(
        name="ernie4_5",
        architectures=("ernie4_5",),
        model_types=("ernie4_5",),
        qkv_bias="use_bias",
        output_bias="use_bias",
        ffn_bias="use_bias",
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        config_defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        name="dots1",
        architectures=("dots1",),
        model_types=("dots1",),
        qk_norm=NormSpan.HEAD,
        windows=Windows.LATER,
        config_defaults={
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        # Its files call their scoring, which is a sigmoid, noaux_tc.
        ignores=frozenset({"use_sliding_window", "scoring_func"}),
        routing=_OF_DEEPSEEK,
    ),
    Family(
        name="glm",
        architectures=("chatglm",),
        model_types=("glm",),
        output_bias=False,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        config_defaults={
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
        },
        reads=frozenset({"partial_rotary_factor"}),
        gguf_names={"ffn_up": "ffn_gate_up"},
    ),
    Family(
        name="glm4",
        architectures=("glm4",),
        model_types=("glm4",),
        placement=Placement.AROUND,
        output_bias=False,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        config_defaults={
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
        },
        reads=frozenset({"partial_rotary_factor"}),
        config_names={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        gguf_reads=frozenset({"rope.dimension_sections"}),
        gguf_names={"ffn_up": "ffn_gate_up"},
    ),
    Family(
        name="glm4",
        model_types=("glm4v_text",),
        qkv_bias=True,
        placement=Placement.AROUND,
        output_bias=False,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        config_defaults={
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        reads=frozenset({"partial_rotary_factor", "mrope"}),
        config_names={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    Family(
        name="glm4moe",
        architectures=("glm4moe",),
        model_types=("glm4_moe",),
        qk_norm=NormSpan.HEAD,
        qk_norm_if="use_qk_norm",
        output_bias=False,
        has_extra_layers=True,
        config_defaults=_GLM4_MOE,
        reads=frozenset({"partial_rotary_factor", "use_qk_norm"}),
        routing=_OF_DEEPSEEK,
        gguf_reads=frozenset({"nextn_predict_layers", "rope.dimension_sections"}),
        gguf_names=_NORM_BEFORE_FEED,
    ),
    Family(
        name="command-r",
        architectures=("command-r",),
        model_types=("cohere",),
        norm=NormKind.LAYER,
        placement=Placement.PARALLEL,
        qk_norm=NormSpan.EACH_HEAD,
        qk_norm_if="use_qk_norm",
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        epsilon="layer_norm_eps",
        config_defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        reads=frozenset({"logit_scale", "use_qk_norm"}),
        gguf_reads=frozenset({"logit_scale"}),
    ),
    Family(
        name="cohere2",
        architectures=("cohere2",),
        model_types=("cohere2",),
        norm=NormKind.LAYER,
        placement=Placement.PARALLEL,
        windows=Windows.MOST,
        full_every=4,
        no_rope=NoRope.FULL_LAYERS,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        epsilon="layer_norm_eps",
        config_defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        reads=frozenset({"logit_scale", "sliding_window_pattern"}),
        gguf_reads=frozenset({"logit_scale", "attention.sliding_window_pattern"}),
    ),
    Family(
        name="starcoder2",
        architectures=("starcoder2",),
        model_types=("starcoder2",),
        norm=NormKind.LAYER,
        norm_bias=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        ffn_bias="use_bias",
        is_gated=False,
        windows=Windows.EVERY,
        epsilon="norm_epsilon",
        gguf_activation=Activation.GELU_TANH,
        config_defaults={
            "use_bias": True,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        name="seed_oss",
        architectures=("seed_oss",),
        model_types=("seed_oss",),
        ffn_bias="mlp_bias",
        output_bias="attention_out_bias",
        config_defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
        gguf_names=_NORM_BEFORE_FEED,
    ),
    Family(
        name="exaone4",
        architectures=("exaone4",),
        model_types=("exaone4",),
        placement=Placement.AFTER,
        qk_norm=NormSpan.HEAD,
        qkv_bias=False,
        output_bias=False,
        windows=Windows.MOST,
        full_every=4,
        no_rope=NoRope.FULL_LAYERS,
        config_defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        reads=frozenset({"sliding_window_pattern"}),
        config_names=_AFTER,
        gguf_reads=frozenset({"attention.sliding_window_pattern"}),
    ),
    Family(
        name="llama4",
        architectures=("llama4",),
        model_types=("llama4_text",),
        qk_norm=NormSpan.HEAD,
        qk_norm_if="use_qk_norm",
        qk_norm_after_rope=True,
        has_bare_qk_norm=True,
        windows=Windows.MOST,
        full_every=4,
        is_chunked=True,
        no_rope=NoRope.LISTED,
        splits_by_rope=True,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        dense_size="intermediate_size_mlp",
        config_defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        reads=frozenset(
            {"use_qk_norm", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"}
        ),
        routing=Routing(
            scoring=Scoring.SIGMOID,
            normalises=False,
            weighs_input=True,
            layers=RoutedLayers.LISTED,
            shared_size="intermediate_size",
        ),
        expert_layout=ExpertLayout.TRANSPOSED_HALVES,
        gguf_unnormed_at=128,  # Maverick
    ),
    Family(
        name="deepseek2",
        architectures=("deepseek2",),
        model_types=("deepseek_v3",),
        has_latent=True,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        has_extra_layers=True,
        config_defaults={
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
        },
        reads=frozenset({"kv_lora_rank", "rope_interleave"}),
        routing=replace(_OF_DEEPSEEK, gguf_scoring=Scoring.SOFTMAX),  # DeepSeek V2's files
        gguf_reads=frozenset(
            {
                "attention.kv_lora_rank",
                "attention.q_lora_rank",
                "attention.key_length_mla",
                "attention.value_length_mla",
                "nextn_predict_layers",
                "rope.scaling.yarn_log_multiplier",
            }
        ),
    ),
    Family(
        name="deepseek2",
        model_types=("glm4_moe_lite",),  # GLM 4.7 Flash
        has_latent=True,
        interleaved_in_config=True,
        has_extra_layers=True,
        config_defaults={
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "q_lora_rank": 768,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        reads=frozenset({"kv_lora_rank", "rope_interleave"}),
        routing=_OF_DEEPSEEK,
    ),
    Family(
        name="deepseek2",
        model_types=("deepseek_v2",),
        ffn_bias="mlp_bias",
        has_latent=True,
        interleaved_in_config=True,
        config_defaults={
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "topk_method": "greedy",
        },
        reads=frozenset({"kv_lora_rank"}),
        routing=Routing(
            normalises=False,
            layers=RoutedLayers.AFTER_DENSE,
            shared_count="n_shared_experts",
        ),
    ),
    Family(
        name="mistral4",
        architectures=("mistral4",),
        model_types=("mistral4",),
        has_latent=True,
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        config_defaults={
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 1024,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        reads=frozenset(
            {"kv_lora_rank", "rope_interleave", "llama_4_scaling_beta", "partial_rotary_factor"}
        ),
        routing=Routing(
            num_group_best=2, layers=RoutedLayers.AFTER_DENSE, shared_count="n_shared_experts"
        ),
        gguf_reads=frozenset(
            {
                "attention.kv_lora_rank",
                "attention.q_lora_rank",
                "attention.key_length_mla",
                "attention.value_length_mla",
                "attention.temperature_length",
                "attention.temperature_scale",
                "rope.scaling.yarn_log_multiplier",
            }
        ),
    ),
    Family(
        name="glm4moe",
        model_types=("glm4v_moe_text",),  # GLM-4.5V
        output_bias=False,
        config_defaults={**_GLM4_MOE, "attention_bias": True},
        reads=frozenset({"partial_rotary_factor", "mrope"}),
        routing=_OF_DEEPSEEK,
        has_extra_layers=True,
    ),
    Family(
        name="phi2",
        architectures=("phi2",),
        model_types=("phi",),
        norm=NormKind.LAYER,
        norm_bias=True,
        placement=Placement.PARALLEL,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        head_bias=True,
        is_gated=False,
        epsilon="layer_norm_eps",
        gguf_activation=Activation.GELU_TANH,
        config_defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        reads=frozenset({"partial_rotary_factor"}),
        config_names={"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    ),
    Family(
        name="gptneox",
        architectures=("gptneox",),
        model_types=("gpt_neox",),
        norm=NormKind.LAYER,
        norm_bias=True,
        placement=Placement.PARALLEL_EACH,
        placement_if="use_parallel_residual",
        ffn_bias=True,
        is_gated=False,
        epsilon="layer_norm_eps",
        gguf_activation=Activation.GELU,
        grouped_qkv=True,
        config_defaults={
            "attention_bias": True,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        config_keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        reads=frozenset({"partial_rotary_factor", "use_parallel_residual"}),
        gguf_reads=frozenset({"use_parallel_residual"}),
        config_names={
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
    ),
    Family(
        name="internlm2",
        architectures=("internlm2",),
        model_types=("internlm2",),
        qkv_bias="bias",
        output_bias="bias",
        interleaved_in_gguf=True,
        grouped_qkv=True,
        config_defaults={"bias": True},
        config_names={
            "attention_norm": "attn_norm",
            "attention.wqkv": "attn_qkv",
            "attention.wo": "attn_output",
            "ffn_norm": "ffn_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        },
    ),
    Family(
        name="llama",
        model_types=("internlm3",),  # its GGUF files call themselves llama
        qkv_bias="qkv_bias",
        output_bias="bias",
        ffn_bias="bias",
        config_defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        name="exaone",
        architectures=("exaone",),
        model_types=("exaone",),
        config_defaults={"rms_norm_eps": 1e-5},
        config_keys={
            "num_layers": "num_hidden_layers",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        config_names={
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            **{f"attn.attention.{x}_proj": f"attn_{x}" for x in "qkv"},
            "attn.attention.out_proj": "attn_output",
            "mlp.c_fc_0": "ffn_gate",
            "mlp.c_fc_1": "ffn_up",
        },
    ),
    Family(
        name="minicpm",
        architectures=("minicpm",),
        model_types=("minicpm",),
        interleaved_in_gguf=True,
        divides_logits=True,
        config_defaults={"scale_depth": 1.0},
        config_keys={"scale_emb": "embedding_multiplier"},
        reads=frozenset({"embedding_multiplier", "scale_depth", "longrope"}),
        gguf_reads=frozenset({*_GRANITE_KEYS, "rope.scaling.attn_factor"}),
    ),
    Family(
        name="hunyuan-dense",
        architectures=("hunyuan-dense",),
        model_types=("hunyuan_v1_dense",),
        qk_norm=NormSpan.HEAD,
        qk_norm_after_rope=True,
        config_defaults={"rms_norm_eps": 1e-5},
        reads=frozenset({"alpha"}),
        ignores=frozenset({"use_qk_norm"}),
        config_names=_HUNYUAN_NORMS,
    ),
    Family(
        name="hunyuan-moe",
        architectures=("hunyuan-moe",),
        model_types=("hunyuan_v1_moe",),
        qk_norm=NormSpan.HEAD,
        qk_norm_after_rope=True,
        config_defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "num_experts_per_tok": 1},
        config_keys={"moe_topk": "num_experts_per_tok"},
        listed_by_layer=frozenset({"moe_topk", "moe_intermediate_size"}),
        reads=frozenset({"alpha"}),
        ignores=frozenset({"use_qk_norm", "n_group", "topk_group", "routed_scaling_factor"}),
        routing=Routing(normalises=True, gguf_normalises=True, shared_size="intermediate_size"),
        config_names={
            **_HUNYUAN_NORMS,
            "mlp.gate.wg": "ffn_gate_inp",
            **{f"mlp.shared_mlp.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
        },
    ),
    Family(
        name="ernie4_5-moe",
        architectures=("ernie4_5-moe",),
        model_types=("ernie4_5_moe",),
        qkv_bias="use_bias",
        output_bias="use_bias",
        ffn_bias="use_bias",
        interleaved_in_config=True,
        interleaved_in_gguf=True,
        has_extra_layers=True,
        config_defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        config_keys={
            "moe_num_experts": "num_experts",
            "moe_k": "num_experts_per_tok",
            "moe_num_shared_experts": "n_shared_experts",
        },
        routing=Routing(
            normalises=True,
            gguf_normalises=True,
            choice_bias=True,
            layers=RoutedLayers.SPAN,
            shared_count="n_shared_experts",
        ),
    ),
    Family(
        name="minimax-m2",
        architectures=("minimax-m2",),
        model_types=("minimax_m2",),
        qkv_bias=False,
        output_bias=False,
        qk_norm=NormSpan.PROJECTION,
        has_extra_layers=True,
        config_defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        reads=frozenset({"partial_rotary_factor", "rotary_dim"}),
        ignores=frozenset({"use_qk_norm"}),
        routing=Routing(
            scoring=Scoring.SIGMOID, normalises=True, gguf_normalises=True, choice_bias=True
        ),
    ),
    Family(
        name="glm4moe",
        model_types=("solar_open",),  # its GGUF files call themselves glm4moe
        output_bias=False,
        config_defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "intermediate_size": 10240,  # of no layer
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        reads=frozenset({"partial_rotary_factor"}),
        routing=replace(_OF_DEEPSEEK, layers=RoutedLayers.ALL),
    ),
)

GGUF_FAMILIES = {name: family for family in FAMILIES for name in family.architectures}
CONFIG_FAMILIES = {name: family for family in FAMILIES for name in family.model_types}
# Models that see or hear: config.json keeps the decoder's fields under text_config, which says its
# own type where it is not this one.
WITH_SENSES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
}


# What architectures that are met often have and quire does not run, by the names of both files.
_LACKING: Mapping[str, tuple[str, ...]] = {
    "state-space layers": (
        *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "plamo2"),
        *("falcon_h1", "falcon-h1", "nemotron_h", "nemotron_h_moe", "granitehybrid"),
    ),
    "gated delta networks": (
        *("qwen3_next", "qwen3next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen35", "qwen35moe", "kimi_linear", "kimi-linear", "olmo_hybrid"),
    ),
    "recurrent layers": ("rwkv", "rwkv6", "rwkv7", "recurrent_gemma", "xlstm"),
    "short convolutions": ("lfm2", "lfm2_moe", "lfm2moe", "lfm2_vl"),
    "alternating updates of several states": ("gemma3n", "gemma3n_text"),
    "attention to tokens that an index chooses": (
        *("deepseek_v32", "deepseek32", "deepseek_v4", "glm_moe_dsa", "glm-dsa"),
    ),
    "attention to what an encoder makes": (
        *("mllama", "t5", "t5gemma", "bart", "whisper", "t5encoder"),
    ),
    "attention to later tokens": (
        *("bert", "nomic-bert", "nomic_bert", "modernbert", "xlm-roberta", "gemma-embedding"),
    ),
    "learned positions": ("gpt2", "gpt_bigcode", "starcoder", "opt", "gpt_neo"),
    "positions by distance alone (ALiBi)": ("bloom", "mpt"),
    "a router that masks experts (SparseMixer)": ("phimoe",),
    "an activation with weights (xIELU)": ("apertus",),
}


def find_family(families: Mapping[str, Family], field_name: str, name: str) -> Family:
    for part, names in _LACKING.items():
        if name in names:
            raise UnsupportedModelError(
                f"architecture {name!r} ({field_name}) is not supported: it has {part}, which "
                "quire does not run"
            )
    if name not in families:
        raise UnsupportedModelError(
            f"architecture {name!r} ({field_name}) is not supported; "
            f"supported: {', '.join(sorted(families))}"
        )
    return families[name]
