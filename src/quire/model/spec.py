"""ModelSpec: one description of a decoder, and the tensors it must find; the families that quire
runs, as data: what the files of each leave unsaid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.rope import Rope
from quire.quant.formats import Format

# Far beyond any model. Small enough to bound the work for a broken file, and that no executor's
# integers overflow. The CPU executor's constructor has the same bounds (native/sizes.h).
MAX_SIZES = {
    "hidden_size": 1 << 20,
    "ffn_size": 1 << 22,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocabulary_size": 1 << 24,
    "context_length": 1 << 30,
}
MAX_QUERY_SIZE = 1 << 22  # all query heads together
SOFT_CAPS = (1e-6, 1e9)  # beyond, a score divided by it is not a float32


class Activation(StrEnum):
    """The activation of the feed-forward gate."""

    SILU = "silu"
    RELU2 = "relu2"  # the square of the positive part


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Format: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder of pre-normed layers: attention, then a gated feed-forward, each with a residual.

    Every norm is an RMS norm. Tensors are named as GGUF names them; matrices are [out, in].
    """

    family: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    activation: Activation
    rope: Rope
    # Per layer: how many positions a token sees; None: all. A window that is no shorter than the
    # context becomes None.
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    ffn_bias: bool = False
    qk_norm: bool = False  # an RMS norm of queries and keys per head, before rope
    sub_norms: bool = False  # norms before the output and the down projection
    linear_scales: bool = False  # each linear's output is multiplied by a scalar (its .scale)
    attention_soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: off
    logit_soft_cap: float = 0.0  # likewise
    tied_head: bool = False  # logits come from the embedding matrix

    def __post_init__(self) -> None:
        for name, limit in MAX_SIZES.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelFileError(f"{name} must be from 1 to {limit}, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.query_size > MAX_QUERY_SIZE:
            raise ModelFileError(
                f"num_heads ({self.num_heads}) times head_dim ({self.head_dim}) must be at most "
                f"{MAX_QUERY_SIZE}, got {self.query_size}"
            )
        if self.rope.dims > self.head_dim:
            raise ModelFileError(
                f"rope dimensions ({self.rope.dims}) exceed head_dim ({self.head_dim})"
            )
        if not 0.0 <= self.norm_epsilon <= 1.0:
            raise ModelFileError(f"norm_epsilon must be from 0 to 1, got {self.norm_epsilon}")
        for name in ("attention_soft_cap", "logit_soft_cap"):
            cap = getattr(self, name)
            low, high = SOFT_CAPS
            if cap != 0.0 and not low <= cap <= high:
                raise ModelFileError(f"{name} must be 0 or from {low:g} to {high:g}, got {cap}")
        if len(self.windows) != self.num_layers:
            raise ModelFileError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers"
            )
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ModelFileError(f"the window of layer {layer} must be positive, got {window}")
        seen = (None if w is None or w >= self.context_length else w for w in self.windows)
        object.__setattr__(self, "windows", tuple(seen))

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_kv_elements(self) -> int:
        """Numbers that one token leaves in the cache: keys and values of every layer."""
        return 2 * self.num_layers * self.kv_size


def takes_bytes_by_token(spec: "ModelSpec", block_format: Format) -> bool:
    """Whether a matrix takes activations of one byte with one scale a token, as BitNet models are
    trained: they alone are kept as I2_S, and their family's ternary matrices are theirs. Ternary
    models of other families (TriLMs) are trained with float activations."""
    return block_format.name == "I2_S" or (block_format.is_ternary and spec.sub_norms)


LAYER_LINEARS = (
    *("attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """A layer's tensors, without the leading `blk.N.`."""
    hidden, ffn, query, kv = spec.hidden_size, spec.ffn_size, spec.query_size, spec.kv_size
    linears = {
        "attn_q": (query, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if spec.qk_norm:
        norms |= {"attn_q_norm": spec.head_dim, "attn_k_norm": spec.head_dim}
    if spec.sub_norms:
        norms |= {"attn_sub_norm": query, "ffn_sub_norm": ffn}
    biased = {
        "attn_q": spec.qkv_bias,
        "attn_k": spec.qkv_bias,
        "attn_v": spec.qkv_bias,
        "attn_output": spec.output_bias,
        "ffn_gate": spec.ffn_bias,
        "ffn_up": spec.ffn_bias,
        "ffn_down": spec.ffn_bias,
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        if biased[name]:
            shapes[f"{name}.bias"] = shape[:1]
        if spec.linear_scales:
            shapes[f"{name}.scale"] = (1,)
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the spec computes with."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (spec.vocabulary_size, spec.hidden_size),
        "output_norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_head:
        shapes["output.weight"] = (spec.vocabulary_size, spec.hidden_size)
    layer = layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


# Already part of the spec as Rope.scaling.
_READ_INTO_SPEC = frozenset({"rope_freqs.weight"})


def check_tensors(spec: ModelSpec, tensors: Mapping[str, Shaped]) -> None:
    """Raise unless the tensors are exactly those of the spec, in its shapes."""
    shapes = tensor_shapes(spec)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelFileError(
                f"tensor {name} {list(shape)} is missing: the {spec.family} model needs it"
            )
        if tuple(tensors[name].shape) != shape:
            raise ModelFileError(
                f"tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
            )
        if tensors[name].format.tail_bytes and not name.startswith("blk."):
            raise UnsupportedModelError(
                f"tensor {name} has type {tensors[name].format.name}, which quire runs in layers "
                "alone: quantise the embedding and the head as another type"
            )
    for name in tensors:
        if name not in shapes and name not in _READ_INTO_SPEC:
            raise UnsupportedModelError(
                f"tensor {name} {list(tensors[name].shape)} has no place in the {spec.family} "
                "model as quire runs it; leaving it out would change the results"
            )


# ---- families


@dataclass(frozen=True, slots=True)
class Family:
    """What the files of one family do not say themselves.

    `config_defaults` are the values of fields that the family's config.json leaves out.
    """

    name: str
    interleaved_in_gguf: bool = False  # GGUF's q and k rows are in interleaved rope order
    gguf_activation: Activation = Activation.SILU
    gguf_tied_head: bool = False  # whether or not the file has an output matrix of its own
    qkv_bias: bool = False  # whatever config.json says
    qk_norm: bool = False
    sub_norms: bool = False
    window: str = "none"  # sliding_window applies to none, every, or later layers
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

_BITNET_25 = replace(_BITNET, gguf_activation=Activation.RELU2, gguf_tied_head=True)

# By GGUF's general.architecture; Mistral's files call themselves llama.
GGUF_FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (_LLAMA, _QWEN2, _QWEN3, _BITNET)
} | {"bitnet-25": _BITNET_25, "bitnet-b1.58": _BITNET_25}  # of microsoft/BitNet's two converters
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
