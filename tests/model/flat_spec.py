"""Specs of models whose layers are alike, from flat sizes."""

from dataclasses import replace
from typing import Any

from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Layer,
    ModelSpec,
    Norm,
    QKNorm,
)

_WHOLE = {"family", "hidden_size", "vocabulary_size", "context_length"}
_WHOLE |= {"logit_soft_cap", "tied_head", "linear_scales"}


def flat_spec(**sizes: Any) -> ModelSpec:
    """Takes what a llama, qwen or bitnet is made of by one name each."""
    whole = {name: sizes.pop(name) for name in _WHOLE & sizes.keys()}
    norm = Norm(epsilon=sizes.pop("norm_epsilon", 1e-5))
    sub_norm = norm if sizes.pop("sub_norms", False) else None
    num_layers = sizes.pop("num_layers")
    windows = sizes.pop("windows", (None,) * num_layers)
    feed = Dense(
        size=sizes.pop("ffn_size"),
        activation=sizes.pop("activation", Activation.SILU),
        has_bias=sizes.pop("ffn_bias", False),
        inner_norm=sub_norm,
    )
    mixer = Attention(
        qk_norm=QKNorm(norm=norm) if sizes.pop("qk_norm", False) else None,
        output_norm=sub_norm,
        soft_cap=sizes.pop("attention_soft_cap", 0.0),
        **sizes,
    )
    layer = Layer(mixer=mixer, feed_forward=feed, mixer_norm=norm, feed_forward_norm=norm)
    layers = (replace(layer, mixer=replace(mixer, window=window)) for window in windows)
    return ModelSpec(layers=tuple(layers), output_norm=norm, **whole)


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with these changes in the attention of every layer."""
    layers = [replace(layer, mixer=replace(layer.attention, **changes)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


def biases(spec: ModelSpec) -> tuple[bool, bool, bool]:
    """Of queries, keys and values; of the attention's output; of the feed-forward."""
    layer = spec.layers[0]
    return layer.attention.qkv_bias, layer.attention.output_bias, layer.feed.has_bias
