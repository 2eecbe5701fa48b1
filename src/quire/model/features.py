"""What a model has beyond a llama, by name, and which devices lower it: a device that does not is
known before a weight is loaded."""

from collections.abc import Iterator, Mapping
from enum import StrEnum

from quire.core.errors import UnsupportedModelError
from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Layer,
    ModelSpec,
    Norm,
    NormKind,
    QKNorm,
    Scoring,
)
from quire.model.states import StateKind


class Feature(StrEnum):
    """What a model may have beyond a llama; the text completes "the model has ..."."""

    LAYER_NORMS = "layer norms"
    NORMS_AFTER_HALVES = "norms after attention or feed-forward"
    NO_NORMS_BEFORE_HALVES = "attention or feed-forward without a norm before it"
    DIFFERENT_EPSILONS = "norms of different epsilons"
    PARALLEL_HALVES = "attention and feed-forward side by side"
    PARALLEL_NORMS = "attention and feed-forward side by side with a norm each"
    SINGLE_HALVES = "layers of one half alone"
    NO_ATTENTION = "no attention in any layer"
    STATE_BESIDE = "attention and a state side by side"
    RESIDUAL_SCALE = "a scale on what a layer adds"
    EMBEDDING_SCALE = "scaled embeddings"
    EMBEDDING_NORM = "a norm after the embedding"
    LEARNED_POSITIONS = "learned positions"
    HEAD_BIAS = "a head with a bias"
    LOGIT_SCALE = "scaled logits"
    LOGIT_SOFT_CAP = "a soft cap on logits"
    LINEAR_SCALES = "linears with a scale of their own"
    DIFFERENT_LAYERS = "layers of different sizes, biases or norms"
    DIFFERENT_ROPES = "layers of different rope"
    NO_ROPE = "layers without rope"
    HEAD_NORMS = "norms of queries and keys by head"
    OTHER_QK_NORMS = "norms of queries and keys that are not one weight vector by head before rope"
    QK_NORMS_AFTER_ROPE = "norms of queries and keys after rope"
    VALUE_NORMS = "norms of values"
    SUB_NORMS = "norms before its output projections"
    OTHER_ATTENTION_SCALE = "an attention scale that is not head_dim ** -0.5"
    POSITION_SCALE = "queries scaled by position"
    ATTENTION_SOFT_CAP = "a soft cap on attention scores"
    ALIBI = "positions by distance alone (ALiBi)"
    SINKS = "attention sinks"
    WINDOWS = "sliding windows"
    CHUNKS = "attention within chunks"
    OTHER_VALUE_SIZE = "values of another size than keys"
    LATENT = "latent attention"
    SHARED_KV = "layers that share keys and values"
    OUTPUT_GATE = "gates on what attention leaves"
    DELTA_NET = f"layers of {StateKind.DELTA_NET}"
    MAMBA = f"layers of {StateKind.MAMBA}"
    MAMBA_1 = f"layers of {StateKind.MAMBA_1}"
    CONVOLUTIONS = f"layers of {StateKind.CONVOLUTION}"
    UNGATED = "a feed-forward without a gate"
    GELU = "the activation gelu"
    GELU_TANH = "the activation gelu_tanh"
    RELU2 = "the activation relu2"
    CLAMPED_SWIGLU = "the activation clamped_swiglu"
    XIELU = "the activation xielu"
    EXPERTS = "a mixture of experts"
    EXPERT_BIASES = "experts with biases"
    UNGATED_EXPERTS = "experts without a gate"
    LATENT_EXPERTS = "experts of a projection of the hidden state"
    SHARED_EXPERT = "an expert that every token uses"
    SIGMOID_ROUTER = "a router with a sigmoid"
    SPARSE_MIXER = "a router that masks experts (SparseMixer)"
    ROUTER_BIAS = "a router with a bias"
    ROUTER_CHOICE = "a router that chooses with a bias of its own"
    ROUTER_GROUPS = "a router that chooses by groups of experts"
    WEIGHED_EXPERT_INPUT = "experts whose input is weighed"
    EXPERTS_BESIDE_DENSE = "experts beside a dense feed-forward"
    LAYER_INPUTS = "embeddings for each layer"
    OUTPUT_SCALE = "a scale on what leaves a layer"


OF_LLAMA = {Feature.WINDOWS, Feature.HEAD_NORMS}

# By device, and whatever it is that a device does not lower is refused by name when a model is
# loaded. The reference executor lowers all there is.
LOWERED: Mapping[str, frozenset[Feature]] = {
    "cpu": frozenset(
        OF_LLAMA
        | {Feature.SUB_NORMS, Feature.LINEAR_SCALES, Feature.RELU2}
        | {Feature.ATTENTION_SOFT_CAP, Feature.LOGIT_SOFT_CAP, Feature.OTHER_ATTENTION_SCALE}
        | {Feature.DIFFERENT_LAYERS, Feature.DIFFERENT_EPSILONS, Feature.OTHER_VALUE_SIZE}
        | {Feature.DIFFERENT_ROPES, Feature.NO_ROPE}
        | {Feature.GELU, Feature.GELU_TANH, Feature.CLAMPED_SWIGLU, Feature.UNGATED}
        | {Feature.LAYER_NORMS, Feature.NORMS_AFTER_HALVES, Feature.NO_NORMS_BEFORE_HALVES}
        | {Feature.PARALLEL_HALVES, Feature.PARALLEL_NORMS, Feature.HEAD_BIAS}
        | {Feature.SINGLE_HALVES, Feature.NO_ATTENTION, Feature.STATE_BESIDE}
        | {Feature.RESIDUAL_SCALE, Feature.OUTPUT_SCALE}
        | {Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE, Feature.LAYER_INPUTS}
        | {Feature.OTHER_QK_NORMS, Feature.QK_NORMS_AFTER_ROPE}
        | {Feature.VALUE_NORMS, Feature.POSITION_SCALE}
        | {Feature.SINKS, Feature.CHUNKS, Feature.SHARED_KV, Feature.LATENT}
        | {Feature.EXPERTS, Feature.EXPERT_BIASES, Feature.UNGATED_EXPERTS}
        | {Feature.WEIGHED_EXPERT_INPUT, Feature.LATENT_EXPERTS}
        | {Feature.SIGMOID_ROUTER, Feature.ROUTER_BIAS, Feature.ROUTER_CHOICE}
        | {Feature.ROUTER_GROUPS, Feature.SHARED_EXPERT, Feature.EXPERTS_BESIDE_DENSE}
        | {Feature.OUTPUT_GATE, Feature.DELTA_NET, Feature.MAMBA, Feature.MAMBA_1}
        | {Feature.CONVOLUTIONS}
        | {Feature.SPARSE_MIXER, Feature.XIELU, Feature.LEARNED_POSITIONS}
        | {Feature.ALIBI, Feature.EMBEDDING_NORM}
    ),
    "cuda": frozenset(
        OF_LLAMA
        | {Feature.SUB_NORMS, Feature.LINEAR_SCALES}  # the first beside ternary matrices alone
        | {Feature.LAYER_NORMS, Feature.DIFFERENT_EPSILONS}
        | {Feature.PARALLEL_HALVES, Feature.PARALLEL_NORMS}
        | {Feature.NORMS_AFTER_HALVES, Feature.NO_NORMS_BEFORE_HALVES}
        | {Feature.OTHER_QK_NORMS, Feature.QK_NORMS_AFTER_ROPE}
        | {Feature.RESIDUAL_SCALE, Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE}
        | {Feature.LOGIT_SOFT_CAP, Feature.ATTENTION_SOFT_CAP, Feature.OTHER_ATTENTION_SCALE}
        | {Feature.DIFFERENT_ROPES, Feature.NO_ROPE, Feature.POSITION_SCALE, Feature.SINKS}
        | {Feature.ALIBI, Feature.OUTPUT_GATE}
        | {Feature.DELTA_NET, Feature.MAMBA, Feature.CONVOLUTIONS}
        | {Feature.SINGLE_HALVES, Feature.NO_ATTENTION, Feature.STATE_BESIDE}
        | {Feature.UNGATED, Feature.GELU, Feature.GELU_TANH, Feature.RELU2}
        | {Feature.CLAMPED_SWIGLU, Feature.XIELU, Feature.DIFFERENT_LAYERS}
        | {Feature.LEARNED_POSITIONS, Feature.EMBEDDING_NORM, Feature.HEAD_BIAS}
        | {Feature.EXPERTS, Feature.EXPERT_BIASES, Feature.UNGATED_EXPERTS, Feature.SHARED_EXPERT}
        | {Feature.ROUTER_BIAS, Feature.SIGMOID_ROUTER, Feature.ROUTER_CHOICE}
        | {Feature.VALUE_NORMS, Feature.SHARED_KV, Feature.EXPERTS_BESIDE_DENSE}
        | {Feature.LAYER_INPUTS, Feature.OUTPUT_SCALE, Feature.CHUNKS, Feature.LATENT}
        | {Feature.ROUTER_GROUPS, Feature.SPARSE_MIXER, Feature.WEIGHED_EXPERT_INPUT}
    ),
    "reference": frozenset(Feature),
}


def unsupported(spec: ModelSpec, device: str) -> list[str]:
    """What a device does not lower of a model: each thing once, with the first layer that has it;
    empty where it runs the model."""
    found: dict[Feature, str] = {}
    for feature, where in features(spec):
        if feature not in LOWERED[device]:
            found.setdefault(feature, f"{feature}{where}")
    return list(found.values())


def check_lowered(spec: ModelSpec, device: str) -> None:
    """Raise where a device does not lower a model: what it lacks, and which devices run it."""
    lacking = unsupported(spec, device)
    if lacking:
        others = [f"device={name!r}" for name in LOWERED if not unsupported(spec, name)]
        raise UnsupportedModelError(
            f"the {spec.family} model has {', '.join(lacking)}, which the {device} executor does "
            f"not run yet: use {' or '.join(others)}"
        )


def features(spec: ModelSpec) -> Iterator[tuple[Feature, str]]:
    """What a model has beyond a llama, and where: " in layer N", or "" for the whole model."""
    whole = {
        Feature.EMBEDDING_SCALE: spec.embedding_scale != 1.0,
        Feature.EMBEDDING_NORM: spec.embedding_norm is not None,
        Feature.LEARNED_POSITIONS: spec.num_positions > 0,
        Feature.HEAD_BIAS: spec.head_bias,
        Feature.LOGIT_SCALE: spec.logit_scale != 1.0,
        Feature.LOGIT_SOFT_CAP: spec.logit_soft_cap != 0.0,
        Feature.LINEAR_SCALES: spec.linear_scales,
        Feature.LAYER_INPUTS: spec.layer_inputs is not None,
        Feature.NO_ATTENTION: not spec.attentions,
        Feature.LAYER_NORMS: spec.output_norm.kind is not NormKind.RMS,
    }
    yield from ((feature, "") for feature, is_there in whole.items() if is_there)
    seen: set[Layer] = set()
    for index, layer in enumerate(spec.layers):
        if layer not in seen:
            seen.add(layer)
            for feature, is_there in _layer_features(spec, layer).items():
                if is_there:
                    yield feature, f" in layer {index}"


def _layer_features(spec: ModelSpec, layer: Layer) -> dict[Feature, bool]:
    norms = [norm for norm in _all_norms(layer) if norm is not None]
    halves = (layer.mixer, layer.mixer_norm), (layer.feed_forward, layer.feed_forward_norm)
    after = (layer.mixer_output_norm, layer.feed_forward_output_norm)
    return {
        Feature.LAYER_NORMS: any(norm.kind is not NormKind.RMS for norm in norms),
        Feature.DIFFERENT_EPSILONS: any(norm.epsilon != spec.norm_epsilon for norm in norms),
        Feature.NORMS_AFTER_HALVES: any(norm is not None for norm in after),
        Feature.NO_NORMS_BEFORE_HALVES: any(
            part is not None and norm is None for part, norm in halves
        ),
        Feature.PARALLEL_HALVES: layer.is_parallel,
        Feature.PARALLEL_NORMS: layer.is_parallel and layer.feed_forward_norm is not None,
        Feature.SINGLE_HALVES: layer.mixer is None or layer.feed_forward is None,
        Feature.STATE_BESIDE: layer.state_beside is not None,
        Feature.RESIDUAL_SCALE: layer.residual_scale != 1.0,
        Feature.OUTPUT_SCALE: layer.has_output_scale,
        Feature.DIFFERENT_LAYERS: _is_different(spec, layer),
        **_mixer_features(spec, layer),
        **({} if layer.feed_forward is None else _feed_features(layer.feed_forward)),
    }


def _is_different(spec: ModelSpec, layer: Layer) -> bool:
    """Whether one of its halves is unlike the first of its kind in the model."""
    mixer, feed = layer.mixer, layer.feed_forward
    if isinstance(mixer, Attention) and _mixer_sizes(mixer) != _mixer_sizes(spec.attention):
        return True
    return feed is not None and _feed_sizes(feed) != _feed_sizes(spec.feed_forwards[0])


def _mixer_features(spec: ModelSpec, layer: Layer) -> dict[Feature, bool]:
    found: dict[Feature, bool] = {}
    if layer.state is not None:
        found[Feature(f"layers of {layer.state.kind}")] = True
    if isinstance(layer.mixer, Attention):
        found |= _attention_features(layer.mixer, spec.attention)
    return found


def _attention_features(part: Attention, first: Attention) -> dict[Feature, bool]:
    norm = part.qk_norm
    is_head_norm = norm is not None and norm == QKNorm(norm=Norm(epsilon=norm.norm.epsilon))
    return {
        Feature.NO_ROPE: part.rope is None,
        Feature.DIFFERENT_ROPES: part.rope is not None and part.rope != first.rope,
        Feature.HEAD_NORMS: is_head_norm,
        Feature.OTHER_QK_NORMS: norm is not None and not is_head_norm,
        Feature.QK_NORMS_AFTER_ROPE: norm is not None and norm.is_after_rope,
        Feature.VALUE_NORMS: part.value_norm is not None,
        Feature.SUB_NORMS: part.output_norm is not None,
        Feature.OTHER_ATTENTION_SCALE: not part.has_usual_scale,
        Feature.POSITION_SCALE: part.position_scale is not None,
        Feature.ATTENTION_SOFT_CAP: part.soft_cap != 0.0,
        Feature.ALIBI: part.alibi != 0.0,
        Feature.SINKS: part.has_sinks,
        Feature.WINDOWS: part.window is not None and not part.is_chunked,
        Feature.CHUNKS: part.is_chunked,
        Feature.OTHER_VALUE_SIZE: part.value_dim != part.head_dim and part.latent is None,
        Feature.LATENT: part.latent is not None,
        Feature.SHARED_KV: part.kv_layer is not None or part.has_key_values,
        Feature.OUTPUT_GATE: part.has_output_gate,
    }


def _feed_features(part: Dense | Experts) -> dict[Feature, bool]:
    found = {Feature.EXPERTS: isinstance(part, Experts)}
    if isinstance(part, Dense):
        found[Feature.UNGATED] = not part.is_gated
    else:
        router = part.router
        found |= {
            Feature.EXPERT_BIASES: part.has_bias,
            Feature.UNGATED_EXPERTS: not part.is_gated,
            Feature.LATENT_EXPERTS: part.latent_size is not None,
            Feature.SHARED_EXPERT: part.shared is not None,
            Feature.SIGMOID_ROUTER: router.scoring is Scoring.SIGMOID,
            Feature.SPARSE_MIXER: router.scoring is Scoring.SPARSE_MIXER,
            Feature.ROUTER_BIAS: router.has_bias,
            Feature.ROUTER_CHOICE: router.has_choice_bias,
            Feature.ROUTER_GROUPS: router.num_groups > 1,
            Feature.WEIGHED_EXPERT_INPUT: router.weighs_input,
            Feature.EXPERTS_BESIDE_DENSE: part.beside is not None,
        }
    if part.activation is not Activation.SILU:
        found[Feature(f"the activation {part.activation}")] = True
    return found


def _all_norms(layer: Layer) -> tuple[Norm | None, ...]:
    mixer, feed = layer.mixer, layer.feed_forward
    inner = feed.inner_norm if isinstance(feed, Dense) else None
    if not isinstance(mixer, Attention):
        return (*layer.norms, inner)
    own = mixer.qk_norm.norm if mixer.qk_norm is not None else None
    return (*layer.norms, mixer.output_norm, inner, own, mixer.value_norm)


def _feed_sizes(feed: Dense | Experts) -> tuple[object, ...]:
    """What is the same in all layers of a model whose layers are alike."""
    return type(feed), feed.size, feed.activation, feed.has_bias


def _mixer_sizes(part: Attention) -> tuple[object, ...]:
    """The same of those that attend."""
    caps = (part.soft_cap, part.qk_norm is None, part.output_norm is None)
    heads = (part.num_heads, part.num_kv_heads, part.head_dim)
    return (part.qkv_bias, part.output_bias, *caps, *heads)
