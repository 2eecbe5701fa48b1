"""The families quire runs, as data: what the files of each leave unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.errors import UnsupportedModelError
from quire.model.spec import Activation


@dataclass(frozen=True, slots=True)
class Family:
    """What the files of one family do not say themselves.

    `config_defaults` are what the family's config.json means by leaving a field out.
    """

    name: str
    interleaved_in_gguf: bool = False  # GGUF keeps q and k rows so that neighbours turn together
    gguf_activation: Activation = Activation.SILU
    qkv_bias: bool = False  # always, whatever config.json says of biases
    qk_norm: bool = False
    sub_norms: bool = False
    window: str = "none"  # config.json's sliding_window holds for: none, every, or later layers
    config_defaults: Mapping[str, object] = field(default_factory=dict)


_LLAMA = Family("llama", interleaved_in_gguf=True)
_MISTRAL = Family(
    "mistral",
    window="every",
    config_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
_QWEN2 = Family(
    "qwen2",
    qkv_bias=True,
    window="later",
    config_defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
)
_QWEN3 = Family(
    "qwen3",
    qk_norm=True,
    window="later",
    config_defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
_BITNET = Family(
    "bitnet",
    sub_norms=True,
    config_defaults={
        "num_key_value_heads": 5,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
)

# By GGUF's general.architecture; Mistral's files call themselves llama.
GGUF_FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (_LLAMA, _QWEN2, _QWEN3, _BITNET)
}
# By config.json's model_type.
CONFIG_FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _BITNET)
}


def find_family(families: Mapping[str, Family], field_name: str, name: str) -> Family:
    if name not in families:
        raise UnsupportedModelError(
            f"architecture {name!r} ({field_name}) is not supported; "
            f"supported: {', '.join(sorted(families))}"
        )
    return families[name]
