"""Family: what the files of a family of models leave unsaid, as data; and `describe`, which makes a
ModelSpec of a family and of what a file says. The families are in families.py."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quire.core.errors import ModelFileError
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
from quire.model.states import StateKind, StateMixer


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
    ALL = "all"
    FULL_LAYERS = "full layers"  # those without a window, in models that have windows
    LISTED = "listed"  # no_rope_layers; where there is none each `no_rope_every`-th


class RoutedLayers(StrEnum):
    """Which layers have experts."""

    ALL = "all"
    STEPS = "steps"  # each decoder_sparse_step-th but those of mlp_only_layers
    AFTER_DENSE = "after dense"  # those from first_k_dense_replace on
    SPAN = "span"  # from moe_layer_start_index to moe_layer_end_index, or to the last
    LISTED = "listed"  # moe_layers; where there is none each interleave_moe_layer_step-th
    PERIODS = "periods"  # each expert_layer_period-th from expert_layer_offset on; GGUF's tensors


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
    choice_bias: bool | str = False
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
class Scales:
    """MiniCPM's: of embeddings, of what a layer adds times the root of the number of layers, and
    the hidden size that logits are not scaled at."""

    embedding: float
    depth: float
    hidden_size: int


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
    # A field of config.json, and the model_type that files are of where it is true.
    other_if: tuple[str, str] | None = None

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
    head_bias: bool | str = False
    is_gated: bool = True
    has_sinks: bool = False
    has_output_gate: bool = False
    has_latent: bool = False
    state: StateKind | None = None  # of the layers that keep one
    has_single_halves: bool = False  # a layer is one half, which files list
    has_states_alone: bool = False  # a layer is a state
    has_state_beside: bool = False  # every layer keeps a state beside its attention
    has_step_norms: bool = False  # of what Mamba 1 makes its time steps, keys and queries of
    state_norm_if: str | None = None  # what states leave is normed only where this field says so
    windows: Windows = Windows.NONE
    full_every: int = 1  # 0: never
    ends_full: bool = False  # the last layer never has a window
    is_chunked: bool = False  # windows are chunks
    no_rope: NoRope = NoRope.NEVER
    no_rope_every: int = 4
    alibi: float = 0.0
    alibi_at: int = 0  # models of so many layers have it, instead of rope
    has_embedding_norm: bool = False
    # Norms of queries and keys are for layers with rope, the position scale for those without.
    splits_by_rope: bool = False
    sliding_rope: bool = False  # layers with a window have an unscaled rope, of this base
    sliding_rope_base: float | None = None  # None: the same as other layers'
    routing: Routing | None = None
    has_value_norm: bool = False
    has_unit_scale: bool = False  # attention scores are not scaled
    has_output_scale: bool = False
    has_positions: bool = False  # learned ones
    scales_embedding: bool | str = False  # by the square root of the hidden size
    divides_logits: bool = False  # the logits' scale divides

    # ---- config.json and safetensors
    config_defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # fields that mean something in this family alone
    ignores: frozenset[str] = frozenset()  # fields that mean something in other families alone
    config_keys: Mapping[str, str] = field(default_factory=dict)  # what others call these fields
    listed_by_layer: frozenset[str] = frozenset()  # fields that may list one value for all layers
    epsilon: str = "rms_norm_eps"
    dense_size: str = "intermediate_size"
    dense_halved: bool = False  # files say the size of gate and up together
    dense_multiple: int = 0  # of the hidden size, where a file does not say it; 0: it must
    interleaved_in_config: bool = False  # safetensors' q and k rows are in interleaved rope order
    has_multipliers: bool = False  # of linears, which have no biases then
    has_legacy_gelu: bool = False  # "gelu" means its approximation by tanh
    has_extra_layers: bool = False  # layers behind the last predict further tokens: left out
    norm_offset: float = 0.0  # what norm weights are stored less of
    expert_layout: ExpertLayout = ExpertLayout.HALVES
    transposes_matrices: bool = False  # those of layers are [in, out]
    grouped_qkv: bool = False  # fused rows come by key head: its queries, its key, its value
    config_names: Mapping[str, str] = field(default_factory=dict)  # of parts of a layer, in ours

    # ---- GGUF
    gguf_reads: frozenset[str] = frozenset()
    interleaved_in_gguf: bool = False
    gguf_activation: Activation = Activation.SILU
    gguf_tied_head: bool = False  # whether or not the file has an output matrix of its own
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names_if: str | None = None  # names are others only in files that have this
    gguf_scales: "Scales | None" = None  # which files do not say
    gguf_unnormed_at: int = 0  # files of so many experts have no norms of queries and keys
    gguf_tiles_heads: bool = False  # a state's heads take turns with its groups
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
    attention: Attention | None  # None: no layer attends
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    feed_forwards: tuple[Dense | Experts | None, ...]
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    tied_head: bool = False
    head_bias: bool = False
    num_positions: int = 0
    linear_scales: bool = False
    sliding_attention: Attention | None = None  # of layers with a window; None: as others'
    num_shared_kv: int = 0  # so many layers at the end make no keys and values of their own
    states: tuple[StateMixer | None, ...] = ()  # of each layer; empty: no layer has one
    attends: tuple[bool, ...] = ()  # of each layer; empty: all that keep no state do
    layer_inputs: LayerInputs | None = None


def describe(family: Family, facts: Facts) -> ModelSpec:
    layers = tuple(
        _layer(family, facts, index, feed) for index, feed in enumerate(facts.feed_forwards)
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
        embedding_norm=facts.norm if family.has_embedding_norm else None,
        num_positions=facts.num_positions,
        layer_inputs=facts.layer_inputs,
        linear_scales=facts.linear_scales,
    )


def _mixer(family: Family, facts: Facts, index: int) -> Attention | StateMixer | None:
    state = facts.states[index] if facts.states else None
    if state is not None and not family.has_state_beside:
        return state
    if facts.attends and not facts.attends[index]:
        return None
    rope, window = facts.ropes[index], facts.windows[index]
    attention = facts.attention
    assert attention is not None
    if window is not None and facts.sliding_attention is not None:
        attention = facts.sliding_attention
    attention = replace(attention, kv_layer=_kv_layer(facts, index))
    is_chunked = family.is_chunked and window is not None
    mixer = replace(attention, rope=rope, window=window, is_chunked=is_chunked)
    if family.alibi and family.alibi_at in (0, len(facts.windows)):
        mixer = replace(mixer, rope=None, alibi=family.alibi)
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


def _layer(family: Family, facts: Facts, index: int, feed: Dense | Experts | None) -> Layer:
    placement, mixer = family.placement, _mixer(family, facts, index)
    before = facts.norm if placement is not Placement.AFTER else None
    after = facts.norm if placement in (Placement.AROUND, Placement.AFTER) else None
    is_parallel = placement in (Placement.PARALLEL, Placement.PARALLEL_EACH)
    return Layer(
        mixer=mixer,
        feed_forward=feed,
        state_beside=facts.states[index] if family.has_state_beside else None,
        mixer_norm=None if mixer is None else before,
        mixer_output_norm=None if mixer is None else after,
        feed_forward_norm=None if feed is None or placement is Placement.PARALLEL else before,
        feed_forward_output_norm=None if feed is None else after,
        is_parallel=is_parallel,
        residual_scale=facts.residual_scale,
        has_output_scale=family.has_output_scale,
    )
