"""The families that quire runs, as data: what the files of each leave unsaid; and `describe`, which
makes a ModelSpec of a family and of what a file says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quire.core.errors import UnsupportedModelError
from quire.model.rope import Rope
from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Layer,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
)


class Placement(StrEnum):
    """Where a layer's norms are."""

    BEFORE = "before"  # each half
    AROUND = "around"  # before and after each half
    AFTER = "after"  # each half
    PARALLEL = "parallel"  # one before both halves, which run side by side


class Windows(StrEnum):
    """Which layers a sliding window is for, where a file does not list them."""

    NONE = "none"
    EVERY = "every"
    LATER = "later"  # those from max_window_layers on
    MOST = "most"  # all but each `full_every`-th


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the files of one family do not say themselves.

    `config_defaults` are the values of fields that the family's config.json leaves out. A bias is
    there always, never, or where that field of config.json says so; GGUF's tensors tell.
    """

    name: str
    architectures: tuple[str, ...] = ()  # GGUF's general.architecture
    model_types: tuple[str, ...] = ()  # config.json's model_type
    config_defaults: Mapping[str, object] = field(default_factory=dict)

    norm: NormKind = NormKind.RMS
    placement: Placement = Placement.BEFORE
    sub_norms: bool = False
    qk_norm: NormSpan | None = None
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    ffn_bias: bool | str = "mlp_bias"
    is_gated: bool = True
    windows: Windows = Windows.NONE
    full_every: int = 1

    interleaved_in_gguf: bool = False  # GGUF's q and k rows are in interleaved rope order
    gguf_activation: Activation = Activation.SILU
    gguf_tied_head: bool = False  # whether or not the file has an output matrix of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a file says of its model. `attention` has neither rope nor window: `ropes` and `windows`
    have one for each layer."""

    hidden_size: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    attention: Attention
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    feed_forwards: tuple[Dense | Experts, ...]
    logit_soft_cap: float = 0.0
    tied_head: bool = False
    linear_scales: bool = False


def describe(family: Family, facts: Facts) -> ModelSpec:
    norm = Norm(epsilon=facts.norm_epsilon, kind=family.norm)
    halves = zip(facts.ropes, facts.windows, facts.feed_forwards, strict=True)
    layers = tuple(
        _layer(family, norm, replace(facts.attention, rope=rope, window=window), feed)
        for rope, window, feed in halves
    )
    return ModelSpec(
        family=family.name,
        hidden_size=facts.hidden_size,
        vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length,
        layers=layers,
        output_norm=norm,
        logit_soft_cap=facts.logit_soft_cap,
        tied_head=facts.tied_head,
        linear_scales=facts.linear_scales,
    )


def _layer(family: Family, norm: Norm, mixer: Attention, feed: Dense | Experts) -> Layer:
    placement = family.placement
    before = norm if placement is not Placement.AFTER else None
    after = norm if placement in (Placement.AROUND, Placement.AFTER) else None
    is_parallel = placement is Placement.PARALLEL
    return Layer(
        mixer=mixer,
        feed_forward=feed,
        mixer_norm=before,
        mixer_output_norm=after,
        feed_forward_norm=None if is_parallel else before,
        feed_forward_output_norm=after,
        is_parallel=is_parallel,
    )


# ---- the table

FAMILIES = (
    Family(
        name="llama",
        architectures=("llama",),  # Mistral's files too
        model_types=("llama",),
        interleaved_in_gguf=True,
    ),
    Family(
        name="mistral",
        model_types=("mistral",),
        windows=Windows.EVERY,
        config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        name="qwen2",
        architectures=("qwen2",),
        model_types=("qwen2",),
        qkv_bias=True,
        windows=Windows.LATER,
        config_defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    Family(
        name="qwen3",
        architectures=("qwen3",),
        model_types=("qwen3",),
        qk_norm=NormSpan.HEAD,
        windows=Windows.LATER,
        config_defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
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
)

GGUF_FAMILIES = {name: family for family in FAMILIES for name in family.architectures}
CONFIG_FAMILIES = {name: family for family in FAMILIES for name in family.model_types}


def find_family(families: Mapping[str, Family], field_name: str, name: str) -> Family:
    if name not in families:
        raise UnsupportedModelError(
            f"architecture {name!r} ({field_name}) is not supported; "
            f"supported: {', '.join(sorted(families))}"
        )
    return families[name]
