"""Which format each tensor has in a mix, such as Q4_K_M: the choices llama.cpp's quantiser makes.

They are its choices without an importance matrix, and with one for the mixes that need it (those of
IQ1, IQ2 and IQ3_XXS); routers and biases stay floats. A mix has a base format; the tensors that
suffer most from rounding (the head, values, down projections of some layers) get more bits, and
rows that do not fill a format's blocks get a format of smaller blocks.
"""

import re
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.model.spec import Experts, ModelSpec
from quire.quant.formats import Format, format_named


@dataclass(frozen=True, slots=True)
class Mix:
    """A way to quantise a model; `file_type` is its number in general.file_type."""

    name: str
    base: str
    file_type: int


MIXES = {
    mix.name: mix
    for mix in (
        Mix("F32", "F32", 0),
        Mix("F16", "F16", 1),
        Mix("BF16", "BF16", 32),
        Mix("Q8_0", "Q8_0", 7),
        Mix("Q6_K", "Q6_K", 18),
        Mix("Q5_K_M", "Q5_K", 17),
        Mix("Q5_K_S", "Q5_K", 16),
        Mix("Q5_1", "Q5_1", 9),
        Mix("Q5_0", "Q5_0", 8),
        Mix("Q4_K_M", "Q4_K", 15),
        Mix("Q4_K_S", "Q4_K", 14),
        Mix("Q4_1", "Q4_1", 3),
        Mix("Q4_0", "Q4_0", 2),
        Mix("IQ4_NL", "IQ4_NL", 25),
        Mix("IQ4_XS", "IQ4_XS", 30),
        Mix("MXFP4", "MXFP4", 38),  # of experts alone where a model has them
        Mix("NVFP4", "NVFP4", 39),  # as llama.cpp converts checkpoints: what is no linear is BF16
        Mix("IQ3_M", "IQ3_S", 27),
        Mix("IQ3_S", "IQ3_S", 26),
        Mix("IQ3_XS", "IQ3_S", 22),
        Mix("IQ3_XXS", "IQ3_XXS", 23),
        Mix("IQ2_M", "IQ2_S", 29),
        Mix("IQ2_S", "IQ2_XS", 28),
        Mix("IQ2_XS", "IQ2_XS", 20),
        Mix("IQ2_XXS", "IQ2_XXS", 19),
        Mix("IQ1_M", "IQ1_M", 31),
        Mix("IQ1_S", "IQ1_S", 24),
        Mix("Q3_K_L", "Q3_K", 13),
        Mix("Q3_K_M", "Q3_K", 12),
        Mix("Q3_K_S", "Q3_K", 11),
        Mix("Q2_K", "Q2_K", 10),
        Mix("TQ2_0", "TQ2_0", 37),
        Mix("TQ1_0", "TQ1_0", 36),
        Mix("Q1_0", "Q1_0", 40),
        Mix("Q2_0", "Q2_0", 41),
    )
}

# What replaces a format whose blocks of 256 a row does not fill.
_SMALLER_BLOCKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "IQ4_NL"),
    "IQ4_XS": "IQ4_NL",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "Q2_0": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


# Mixes of about two bits, with the format of their more important matrices.
_TWO_BITS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M"), "IQ3_S"),
}
# What a mix gives attn_output of a model without eight experts, if not its base.
_OUTPUTS = {
    "Q2_K": "Q3_K",
    "Q3_K_M": "Q4_K",
    "Q3_K_L": "Q5_K",
    "IQ3_XXS": "IQ3_S",
    "IQ3_M": "Q4_K",
    "IQ1_S": "IQ2_XXS",
    "IQ1_M": "IQ2_XXS",
    "IQ2_S": "IQ3_S",
    "IQ2_M": "IQ3_S",
}
# What mixes give queries and keys; IQ3_XS also gate and up of the layers in the middle.
_LOWER = {"IQ3_XXS": "IQ2_S", "IQ3_XS": "IQ3_XXS"}

# Mixes that give attn_output of a model with eight experts Q5_K.
_FINER_OUTPUT = frozenset(
    {"Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M", *_TWO_BITS}
    | {"IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M"}
)


def find_mix(name: str) -> Mix:
    """The mix of that name, in whatever case."""
    if name.upper() not in MIXES:
        raise ConfigError(f"there is no mix {name!r}; there are {', '.join(MIXES)}")
    return MIXES[name.upper()]


def tensor_format(mix: Mix, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Format:
    """The format that a tensor has in a mix."""
    if len(shape) < 2 or name.endswith((".bias", "_norm.weight")) or "ffn_gate_inp" in name:
        return format_named("F32", name)
    base = format_named(mix.base, name)
    if base.is_float:
        return base
    chosen = format_named(_chosen(mix, spec, name, shape[-1] % base.block_size == 0), name)
    return chosen if shape[-1] % chosen.block_size == 0 else _filled(chosen, name, shape[-1])


def _filled(wanted: Format, name: str, columns: int) -> Format:
    if name.endswith("ssm_conv1d.weight"):  # a few taps a row
        return format_named("F16", name)
    smaller = _SMALLER_BLOCKS.get(wanted.name)
    if smaller is None:
        raise ConfigError(
            f"tensor {name} has rows of {columns} weights, which do not fill {wanted.name}'s "
            f"blocks of {wanted.block_size}: choose F16 or BF16"
        )
    replacement = format_named(smaller, name)
    return replacement if columns % replacement.block_size == 0 else format_named("F16", name)


def _chosen(mix: Mix, spec: ModelSpec, name: str, fills_base: bool) -> str:
    if mix.name == "NVFP4":
        return "BF16" if name in ("output.weight", "token_embd.weight") else mix.base
    if name == "output.weight" or (name == "token_embd.weight" and spec.tied_head):
        if mix.base in ("Q8_0", "MXFP4") or not fills_base:
            return "Q8_0"
        return "Q5_K" if mix.name in (*_TWO_BITS, "IQ3_XXS") else "Q6_K"
    if name == "token_embd.weight":
        own = {
            "MXFP4": "Q8_0",
            **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_K"),
            "IQ3_XXS": "IQ3_S",
            **_TWO_BITS,
        }
        return own.get(mix.name, mix.base)
    layer, kind = _layer_and_kind(name)
    if mix.name == "MXFP4":
        return mix.base if kind.endswith("_exps") or not _num_experts(spec) else "Q8_0"
    if _num_experts(spec) == 8 and kind in ("attn_k", "attn_v"):  # small beside eight experts
        return "Q4_K" if mix.name in _TWO_BITS else "Q8_0"
    match kind.removesuffix("_exps").removesuffix("_shexp"):
        case "attn_v":
            return _values(mix, spec, layer)
        case "ffn_down":
            return _down(mix, spec, layer)
        case "attn_output" if _num_experts(spec) == 8:
            return "Q5_K" if mix.name in _FINER_OUTPUT else mix.base
        case "attn_output":
            return _OUTPUTS.get(mix.name, mix.base)
        case "attn_q" | "attn_k":
            return _LOWER.get(mix.name, mix.base)
        case "ffn_gate" | "ffn_up" if mix.name == "IQ3_XS" and _is_middle(layer, spec.num_layers):
            return _LOWER[mix.name]
    return mix.base


def _num_experts(spec: ModelSpec) -> int:
    feeds = (layer.feed_forward for layer in spec.layers)
    return max((feed.count for feed in feeds if isinstance(feed, Experts)), default=0)


def _layer_and_kind(name: str) -> tuple[int, str]:
    """The layer and the kind of a tensor, such as (3, "attn_v")."""
    matched = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    assert matched is not None, f"{name} is no matrix of a layer"
    return int(matched[1]), matched[2]


def _values(mix: Mix, spec: ModelSpec, layer: int) -> str:
    shares_much = spec.num_heads // spec.num_kv_heads >= 4  # attn_v is small: more bits cost little
    if mix.name in _TWO_BITS:
        return "Q4_K" if shares_much or _num_experts(spec) >= 4 else _TWO_BITS[mix.name]
    match mix.name:
        case "IQ3_XXS" | "IQ3_XS" | "IQ3_S" if shares_much:
            return "Q4_K"
        case "IQ3_M":
            return "Q4_K"
        case "Q2_K":
            return "Q4_K" if shares_much else "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if shares_much:
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _is_sensitive(layer, spec.num_layers):
            return "Q6_K"
        case "Q4_K_S" if layer < 4:
            return "Q5_K"
    return mix.base


def _down(mix: Mix, spec: ModelSpec, layer: int) -> str:
    is_early = layer < spec.num_layers // 8
    match mix.name:
        case name if name in _TWO_BITS and is_early:
            return _TWO_BITS[name]
        case "IQ3_M" if is_early:
            return "Q4_K"
        case "IQ3_M" if _num_experts(spec) == 8 and _is_sensitive(layer, spec.num_layers):
            return "Q4_K"
        case "Q2_K":
            return "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if layer < spec.num_layers // 16 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _is_sensitive(layer, spec.num_layers):
            return "Q6_K"
        case "IQ4_NL" | "IQ4_XS" | "Q4_K_S" if is_early:
            return "Q5_K"
    return mix.base


def _is_middle(layer: int, num_layers: int) -> bool:
    return num_layers // 8 <= layer < 7 * num_layers // 8


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """The first eighth of the layers, the last, and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
