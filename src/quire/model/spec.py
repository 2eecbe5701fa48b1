"""ModelSpec: a decoder as data (embedding, layers, head), and the tensors it computes with.

A layer is its mixer (attention), its feed-forward, and the norms around them; layers may differ.
Executors lower this description and nothing else. What only files differ in (fused, permuted or
transposed tensors, norm weights stored less one) is undone when a model is loaded: tensors are
named as GGUF names them, matrices are [out, in], experts are stacked [experts, out, in].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    "num_experts": 1 << 14,
}
MAX_QUERY_SIZE = 1 << 22  # all query heads together
SOFT_CAPS = (1e-6, 1e9)  # beyond, a score divided by it is not a float32
SCALES = (1e-9, 1e9)


class Activation(StrEnum):
    """What a feed-forward applies to its gate, or to its values where it has no gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"  # the square of the positive part
    # gpt-oss: gate and value are clamped at 7, the gate's sigmoid has a slope of 1.702, and the
    # value has 1 added.
    CLAMPED_SWIGLU = "clamped_swiglu"


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"  # the mean is taken off first


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    epsilon: float
    kind: NormKind = NormKind.RMS
    has_weight: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.epsilon <= 1.0:
            raise ModelFileError(f"norm_epsilon must be from 0 to 1, got {self.epsilon}")


class NormSpan(StrEnum):
    """What a norm of queries and keys is taken over."""

    HEAD = "head"  # each head, with one weight vector for all
    EACH_HEAD = "each head"  # each head, with weights of its own
    PROJECTION = "projection"  # all heads together


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    norm: Norm
    span: NormSpan = NormSpan.HEAD
    is_after_rope: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose keys and values are made of one vector a token (DeepSeek's MLA): the cache
    keeps that vector, normed, and one rotated key that all heads share.

    A head's query and key are `head_dim - rope_dims` numbers without rope, then `rope_dims` with.
    """

    kv_rank: int
    rope_dims: int
    norm: Norm
    query_rank: int | None = None  # queries are made of a vector of this size; None: directly

    def __post_init__(self) -> None:
        _check_size("kv_rank", self.kv_rank, MAX_SIZES["hidden_size"])
        _check_size("rope_dims", self.rope_dims, MAX_SIZES["head_dim"])
        if self.query_rank is not None:
            _check_size("query_rank", self.query_rank, MAX_SIZES["hidden_size"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """Queries are multiplied by 1 + factor * ln(1 + floor((position + offset) / length))."""

    factor: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    rope: Rope | None = None
    # How many positions a token sees, or the size of the chunk of which it sees the part up to
    # itself; None: all. ModelSpec makes a window that is no shorter than the context None.
    window: int | None = None
    is_chunked: bool = False
    scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    position_scale: PositionScale | None = None
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: off
    has_sinks: bool = False  # a learned score for each head that only takes weight away
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    value_norm: Norm | None = None  # of each value head
    output_norm: Norm | None = None  # BitNet's, before the output projection
    latent: Latent | None = None
    kv_layer: int | None = None  # reads that layer's keys and values and makes none of its own
    has_key_values: bool = False  # values are what keys are before norm and rope

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _check_size(name, getattr(self, name))
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        _check_size("value_dim", self.value_dim, MAX_SIZES["head_dim"])
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if max(self.query_size, self.num_heads * self.value_dim) > MAX_QUERY_SIZE:
            raise ModelFileError(
                f"num_heads ({self.num_heads}) times head_dim ({self.head_dim}) must be at most "
                f"{MAX_QUERY_SIZE}, got {self.query_size}"
            )
        if self.rope is not None and self.rope.dims > self.head_dim:
            raise ModelFileError(
                f"rope dimensions ({self.rope.dims}) exceed head_dim ({self.head_dim})"
            )
        if self.window is not None and self.window < 1:
            raise ModelFileError(f"a layer's window must be positive, got {self.window}")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        _check_scale("attention_scale", self.scale)
        _check_cap("attention_soft_cap", self.soft_cap)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def has_usual_scale(self) -> bool:
        return bool(self.scale == self.head_dim**-0.5)

    @property
    def num_kv_elements(self) -> int:
        """Numbers that one token leaves in the cache."""
        if self.kv_layer is not None:
            return 0
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dims
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    size: int
    activation: Activation
    is_gated: bool = True
    has_bias: bool = False
    inner_norm: Norm | None = None  # BitNet's, before the down projection

    def __post_init__(self) -> None:
        _check_size("ffn_size", self.size)


class Scoring(StrEnum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """From a token's scores of all experts to those it uses and their weights."""

    scoring: Scoring = Scoring.SOFTMAX
    normalises: bool = False  # the weights of those chosen are divided by their sum
    scale: float = 1.0  # of the weights
    has_bias: bool = False  # of the scores
    has_choice_bias: bool = False  # added to scores when experts are chosen, not to their weights
    # Experts are in groups of equal size; only the best groups are chosen from. A group is as good
    # as the sum of its `num_group_best` best experts.
    num_groups: int = 1
    num_used_groups: int = 1
    num_group_best: int = 1
    weighs_input: bool = False  # an expert's weight multiplies its input, not its output
    # gemma4: scores are made of the layer's state behind this norm, times a vector and
    # hidden_size ** -0.5; and each expert has a factor for its weight.
    input_norm: Norm | None = None

    def __post_init__(self) -> None:
        _check_scale("expert_weights_scale", self.scale)
        _check_size("num_groups", self.num_groups, MAX_SIZES["num_experts"])
        if not 1 <= self.num_used_groups <= self.num_groups:
            raise ModelFileError(
                f"{self.num_used_groups} of {self.num_groups} groups of experts cannot be used"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Gated feed-forwards of which each token uses a few. A token's sum runs over its experts in
    ascending order, then the shared one is added: other tokens change no bit of it."""

    count: int
    num_used: int
    size: int
    activation: Activation
    router: Router
    has_bias: bool = False
    shared: Dense | None = None  # used by every token
    has_shared_gate: bool = False  # the shared one is multiplied by a sigmoid of its own
    # gemma4: the half's dense feed-forward beside the experts, which take the layer's state behind
    # a norm of their own; the outputs of both are normed before they are added.
    beside: Dense | None = None
    beside_norm: Norm | None = None

    def __post_init__(self) -> None:
        _check_size("num_experts", self.count)
        _check_size("num_used_experts", self.num_used, self.count)
        _check_size("expert_ffn_size", self.size, MAX_SIZES["ffn_size"])
        groups = self.router.num_groups
        per_group = self.count // groups
        if self.count % groups or self.num_used > self.router.num_used_groups * per_group:
            raise ModelFileError(
                f"{self.num_used} of {self.count} experts cannot be chosen from "
                f"{self.router.num_used_groups} of {groups} groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); `mixer` is where a layer that keeps a
    state instead of keys and values gets its description.

    Where it is parallel both halves take the layer's input, and are added together; the
    feed-forward takes it as the mixer does where it has no norm of its own.
    """

    mixer: Attention
    feed_forward: Dense | Experts
    mixer_norm: Norm | None = None  # before
    mixer_output_norm: Norm | None = None  # after, before it is added
    feed_forward_norm: Norm | None = None
    feed_forward_output_norm: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0  # of what is added
    has_output_scale: bool = False  # what leaves the layer is multiplied by a learned scalar

    def __post_init__(self) -> None:
        _check_scale("residual_scale", self.residual_scale)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those of hidden states."""
        every = (
            *(self.mixer_norm, self.mixer_output_norm),
            *(self.feed_forward_norm, self.feed_forward_output_norm),
        )
        return tuple(norm for norm in every if norm is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """gemma4: a second embedding has a vector for each layer. The mean of it and of a normed
    projection of the first, times the root of two, is multiplied by a gate of what leaves a layer,
    projected, normed and added to that."""

    size: int
    activation: Activation
    norm: Norm

    def __post_init__(self) -> None:
        _check_size("layer_input_size", self.size, MAX_SIZES["hidden_size"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder: embedding, layers, a last norm and a head."""

    family: str
    hidden_size: int
    vocabulary_size: int
    context_length: int
    layers: tuple[Layer, ...]
    output_norm: Norm
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # as attention's
    tied_head: bool = False  # logits come from the embedding matrix
    head_bias: bool = False
    layer_inputs: LayerInputs | None = None
    linear_scales: bool = False  # each linear's output is multiplied by a scalar (its .scale)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocabulary_size", "context_length"):
            _check_size(name, getattr(self, name))
        for name in ("embedding_scale", "logit_scale"):
            _check_scale(name, getattr(self, name))
        _check_cap("logit_soft_cap", self.logit_soft_cap)
        if self.head_bias and (self.tied_head or self.logit_scale != 1.0):
            raise UnsupportedModelError("a head that is tied or scaled cannot have a bias")
        seen: dict[Layer, Layer] = {}
        for layer in self.layers:
            if layer not in seen:
                seen[layer] = _within(layer, self.context_length)
        object.__setattr__(self, "layers", tuple(seen[layer] for layer in self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Each that some layer has, once."""
        found = dict.fromkeys(layer.mixer.rope for layer in self.layers)
        return tuple(rope for rope in found if rope is not None)

    @property
    def num_kv_elements(self) -> int:
        """Numbers that one token leaves in the cache: keys and values of every layer."""
        return sum(layer.mixer.num_kv_elements for layer in self.layers)

    # ---- of every layer, in models whose layers are alike

    @property
    def attention(self) -> Attention:
        return self.layers[0].mixer

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def query_size(self) -> int:
        return self.attention.query_size

    @property
    def kv_size(self) -> int:
        return self.attention.kv_size

    @property
    def rope(self) -> Rope:
        return self.ropes[0]

    @property
    def qk_norm(self) -> bool:
        return self.attention.qk_norm is not None

    @property
    def attention_soft_cap(self) -> float:
        return self.attention.soft_cap

    @property
    def ffn_size(self) -> int:
        """The widest that a token's feed-forward gets."""
        return max(_width(layer.feed_forward) for layer in self.layers)

    @property
    def activation(self) -> Activation:
        return self.layers[0].feed_forward.activation

    @property
    def norm_epsilon(self) -> float:
        return self.output_norm.epsilon

    @property
    def sub_norms(self) -> bool:
        """BitNet's norms before the output and the down projection."""
        return self.attention.output_norm is not None


def _width(feed: Dense | Experts) -> int:
    if isinstance(feed, Dense):
        return feed.size
    others = [part.size for part in (feed.shared, feed.beside) if part is not None]
    return max(feed.size, *others, 0)


def _within(layer: Layer, context_length: int) -> Layer:
    """The layer in a model of that context: what depends on it is fixed once."""
    mixer = layer.mixer
    if mixer.rope is not None:
        mixer = replace(mixer, rope=mixer.rope.within(context_length))
    if mixer.window is not None and mixer.window >= context_length:
        mixer = replace(mixer, window=None, is_chunked=False)
    return replace(layer, mixer=mixer)


def _check_size(name: str, value: int, limit: int | None = None) -> None:
    limit = MAX_SIZES[name] if limit is None else limit
    if not 1 <= value <= limit:
        raise ModelFileError(f"{name} must be from 1 to {limit}, got {value}")


def _check_cap(name: str, cap: float) -> None:
    low, high = SOFT_CAPS
    if cap != 0.0 and not low <= cap <= high:
        raise ModelFileError(f"{name} must be 0 or from {low:g} to {high:g}, got {cap}")


def _check_scale(name: str, scale: float) -> None:
    low, high = SCALES
    if not low <= scale <= high:
        raise ModelFileError(f"{name} must be from {low:g} to {high:g}, got {scale}")


def takes_bytes_by_token(spec: ModelSpec, block_format: Format) -> bool:
    """Whether a matrix takes activations of one byte with one scale a token, as BitNet models are
    trained: they alone are kept as I2_S, and their family's ternary matrices are theirs. Ternary
    models of other families (TriLMs) are trained with float activations."""
    return block_format.name == "I2_S" or (block_format.is_ternary and spec.sub_norms)


# ---- tensors

LAYER_LINEARS = (
    *("attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)

Shape = tuple[int, ...]


class Shaped(Protocol):
    @property
    def shape(self) -> Shape: ...
    @property
    def format(self) -> Format: ...


def layer_shapes(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """A layer's tensors, without the leading `blk.N.`."""
    layer, hidden = spec.layers[index], spec.hidden_size
    shapes: dict[str, Shape] = {}
    for name, norm in (
        ("attn_norm", layer.mixer_norm),
        ("post_attention_norm", layer.mixer_output_norm),
        ("ffn_norm", layer.feed_forward_norm),
        ("post_ffw_norm", layer.feed_forward_output_norm),
    ):
        shapes |= _norm_shapes(name, norm, (hidden,))
    parts = [_attention_linears(layer.mixer, hidden), _feed_linears(layer.feed_forward, hidden)]
    shapes |= _attention_vectors(layer.mixer) | _feed_vectors(layer.feed_forward, hidden)
    if layer.has_output_scale:
        shapes["layer_output_scale.weight"] = (1,)
    inputs = spec.layer_inputs
    if inputs is not None:
        shapes |= _norm_shapes("post_norm", inputs.norm, (hidden,))
        sizes = {"inp_gate": (inputs.size, hidden), "proj": (hidden, inputs.size)}
        parts.append({name: (shape, False) for name, shape in sizes.items()})
    for linears in parts:
        for name, (shape, is_biased) in linears.items():
            shapes[f"{name}.weight"] = shape
            if is_biased:
                shapes[f"{name}.bias"] = shape[:-1]
            if spec.linear_scales:
                shapes[f"{name}.scale"] = (1,)
    return shapes


def _norm_shapes(name: str, norm: Norm | None, shape: Shape) -> dict[str, Shape]:
    if norm is None or not norm.has_weight:
        return {}
    weight = {f"{name}.weight": shape}
    return {**weight, f"{name}.bias": shape} if norm.has_bias else weight


def _attention_linears(part: Attention, hidden: int) -> dict[str, tuple[Shape, bool]]:
    """Matrices, and whether they have a bias."""
    bias, latent = part.qkv_bias, part.latent
    out_size = part.num_heads * part.value_dim
    output: dict[str, tuple[Shape, bool]] = {"attn_output": ((hidden, out_size), part.output_bias)}
    if latent is not None:
        return _latent_linears(part, latent, hidden) | output
    linears: dict[str, tuple[Shape, bool]] = {"attn_q": ((part.query_size, hidden), bias)}
    if part.kv_layer is None:
        linears["attn_k"] = ((part.kv_size, hidden), bias)
        if not part.has_key_values:
            linears["attn_v"] = ((part.num_kv_heads * part.value_dim, hidden), bias)
    return linears | output


def _latent_linears(part: Attention, latent: Latent, hidden: int) -> dict[str, tuple[Shape, bool]]:
    plain_dims = part.head_dim - latent.rope_dims
    queries: dict[str, tuple[Shape, bool]] = {"attn_q": ((part.query_size, hidden), False)}
    if latent.query_rank is not None:
        queries = {
            "attn_q_a": ((latent.query_rank, hidden), part.qkv_bias),
            "attn_q_b": ((part.query_size, latent.query_rank), False),
        }
    return queries | {
        "attn_kv_a_mqa": ((latent.kv_rank + latent.rope_dims, hidden), part.qkv_bias),
        "attn_k_b": ((part.num_heads, latent.kv_rank, plain_dims), False),
        "attn_v_b": ((part.num_heads, part.value_dim, latent.kv_rank), False),
    }


def _attention_vectors(part: Attention) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if part.qk_norm is not None:
        norm, span = part.qk_norm.norm, part.qk_norm.span
        heads = {"attn_q_norm": part.num_heads, "attn_k_norm": part.num_kv_heads}
        if part.kv_layer is not None:
            del heads["attn_k_norm"]
        for name, count in heads.items():
            by_span = {
                NormSpan.HEAD: (part.head_dim,),
                NormSpan.EACH_HEAD: (count, part.head_dim),
                NormSpan.PROJECTION: (count * part.head_dim,),
            }
            shapes |= _norm_shapes(name, norm, by_span[span])
    shapes |= _norm_shapes("attn_sub_norm", part.output_norm, (part.query_size,))
    if part.has_sinks:
        shapes["attn_sinks.weight"] = (part.num_heads,)
    if part.latent is not None:
        shapes |= _norm_shapes("attn_kv_a_norm", part.latent.norm, (part.latent.kv_rank,))
        if part.latent.query_rank is not None:
            shapes |= _norm_shapes("attn_q_a_norm", part.latent.norm, (part.latent.query_rank,))
    return shapes


def _feed_linears(part: Dense | Experts, hidden: int) -> dict[str, tuple[Shape, bool]]:
    if isinstance(part, Dense):
        return _dense_linears(part, hidden, "")
    up, down = (part.count, part.size, hidden), (part.count, hidden, part.size)
    linears: dict[str, tuple[Shape, bool]] = {
        "ffn_gate_inp": ((part.count, hidden), part.router.has_bias),
        "ffn_gate_exps": (up, part.has_bias),
        "ffn_up_exps": (up, part.has_bias),
        "ffn_down_exps": (down, part.has_bias),
    }
    if part.shared is not None:
        linears |= _dense_linears(part.shared, hidden, "_shexp")
    if part.beside is not None:
        linears |= _dense_linears(part.beside, hidden, "")
    return linears


def _dense_linears(part: Dense, hidden: int, suffix: str) -> dict[str, tuple[Shape, bool]]:
    up, down = (part.size, hidden), (hidden, part.size)
    linears: dict[str, tuple[Shape, bool]] = {}
    for name, shape in (("gate", up), ("up", up), ("down", down)):
        if part.is_gated or name != "gate":
            linears[f"ffn_{name}{suffix}"] = (shape, part.has_bias)
    return linears


def _feed_vectors(part: Dense | Experts, hidden: int) -> dict[str, Shape]:
    if isinstance(part, Dense):
        return _norm_shapes("ffn_sub_norm", part.inner_norm, (part.size,))
    shapes: dict[str, Shape] = {}
    if part.router.has_choice_bias:
        shapes["exp_probs_b.bias"] = (part.count,)
    if part.has_shared_gate:
        shapes["ffn_gate_inp_shexp.weight"] = (hidden,)
    if part.router.input_norm is not None:
        shapes |= {"ffn_gate_inp.scale": (hidden,), "ffn_down_exps.scale": (part.count,)}
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        shapes |= _norm_shapes(name, part.beside_norm, (hidden,))
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor the spec computes with."""
    shapes: dict[str, Shape] = {"token_embd.weight": (spec.vocabulary_size, spec.hidden_size)}
    shapes |= _norm_shapes("output_norm", spec.output_norm, (spec.hidden_size,))
    if not spec.tied_head:
        shapes["output.weight"] = (spec.vocabulary_size, spec.hidden_size)
    if spec.head_bias:
        shapes["output.bias"] = (spec.vocabulary_size,)
    if spec.layer_inputs is not None:
        every = spec.num_layers * spec.layer_inputs.size
        shapes["per_layer_token_embd.weight"] = (spec.vocabulary_size, every)
        shapes["per_layer_model_proj.weight"] = (every, spec.hidden_size)
        size = (spec.layer_inputs.size,)
        shapes |= _norm_shapes("per_layer_proj_norm", spec.layer_inputs.norm, size)
    by_layer: dict[Layer, dict[str, Shape]] = {}
    for index, layer in enumerate(spec.layers):
        if layer not in by_layer:
            by_layer[layer] = layer_shapes(spec, index)
        shapes |= {f"blk.{index}.{name}": shape for name, shape in by_layer[layer].items()}
    return shapes


# Already part of the spec as Rope.scaling.
_READ_INTO_SPEC = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


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


# ---- what executors lower


class Feature(StrEnum):
    """What a model may have beyond a llama; the text completes "the model has ..."."""

    LAYER_NORMS = "layer norms"
    NORMS_AFTER_HALVES = "norms after attention or feed-forward"
    NO_NORMS_BEFORE_HALVES = "attention or feed-forward without a norm before it"
    DIFFERENT_EPSILONS = "norms of different epsilons"
    PARALLEL_HALVES = "attention and feed-forward side by side"
    PARALLEL_NORMS = "attention and feed-forward side by side with a norm each"
    RESIDUAL_SCALE = "a scale on what a layer adds"
    EMBEDDING_SCALE = "scaled embeddings"
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
    SINKS = "attention sinks"
    WINDOWS = "sliding windows"
    CHUNKS = "attention within chunks"
    OTHER_VALUE_SIZE = "values of another size than keys"
    LATENT = "latent attention"
    SHARED_KV = "layers that share keys and values"
    UNGATED = "a feed-forward without a gate"
    GELU = "the activation gelu"
    GELU_TANH = "the activation gelu_tanh"
    RELU2 = "the activation relu2"
    CLAMPED_SWIGLU = "the activation clamped_swiglu"
    EXPERTS = "a mixture of experts"
    EXPERT_BIASES = "experts with biases"
    SHARED_EXPERT = "an expert that every token uses"
    SIGMOID_ROUTER = "a router with a sigmoid"
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
        | {Feature.RESIDUAL_SCALE, Feature.OUTPUT_SCALE}
        | {Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE, Feature.LAYER_INPUTS}
        | {Feature.OTHER_QK_NORMS, Feature.QK_NORMS_AFTER_ROPE}
        | {Feature.VALUE_NORMS, Feature.POSITION_SCALE}
        | {Feature.SINKS, Feature.CHUNKS, Feature.SHARED_KV, Feature.LATENT}
        | {Feature.EXPERTS, Feature.EXPERT_BIASES, Feature.WEIGHED_EXPERT_INPUT}
        | {Feature.SIGMOID_ROUTER, Feature.ROUTER_BIAS, Feature.ROUTER_CHOICE}
        | {Feature.ROUTER_GROUPS, Feature.SHARED_EXPERT, Feature.EXPERTS_BESIDE_DENSE}
    ),
    "cuda": frozenset(
        OF_LLAMA
        | {Feature.SUB_NORMS, Feature.LINEAR_SCALES}  # BitNet's, beside ternary matrices alone
        | {Feature.LAYER_NORMS, Feature.DIFFERENT_EPSILONS, Feature.PARALLEL_HALVES}
        | {Feature.NORMS_AFTER_HALVES, Feature.NO_NORMS_BEFORE_HALVES, Feature.OTHER_QK_NORMS}
        | {Feature.RESIDUAL_SCALE, Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE}
        | {Feature.LOGIT_SOFT_CAP, Feature.ATTENTION_SOFT_CAP, Feature.OTHER_ATTENTION_SCALE}
        | {Feature.DIFFERENT_ROPES, Feature.NO_ROPE, Feature.POSITION_SCALE, Feature.SINKS}
        | {Feature.UNGATED, Feature.GELU, Feature.GELU_TANH, Feature.RELU2}
        | {Feature.CLAMPED_SWIGLU, Feature.DIFFERENT_LAYERS}
        | {Feature.EXPERTS, Feature.EXPERT_BIASES, Feature.SHARED_EXPERT}
        | {Feature.ROUTER_BIAS, Feature.SIGMOID_ROUTER, Feature.ROUTER_CHOICE}
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
        Feature.HEAD_BIAS: spec.head_bias,
        Feature.LOGIT_SCALE: spec.logit_scale != 1.0,
        Feature.LOGIT_SOFT_CAP: spec.logit_soft_cap != 0.0,
        Feature.LINEAR_SCALES: spec.linear_scales,
        Feature.LAYER_INPUTS: spec.layer_inputs is not None,
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
    first = spec.layers[0]
    norms = [norm for norm in _all_norms(layer) if norm is not None]
    before = (layer.mixer_norm, layer.feed_forward_norm)
    after = (layer.mixer_output_norm, layer.feed_forward_output_norm)
    return {
        Feature.LAYER_NORMS: any(norm.kind is not NormKind.RMS for norm in norms),
        Feature.DIFFERENT_EPSILONS: any(norm.epsilon != spec.norm_epsilon for norm in norms),
        Feature.NORMS_AFTER_HALVES: any(norm is not None for norm in after),
        Feature.NO_NORMS_BEFORE_HALVES: any(norm is None for norm in before),
        Feature.PARALLEL_HALVES: layer.is_parallel,
        Feature.PARALLEL_NORMS: layer.is_parallel and layer.feed_forward_norm is not None,
        Feature.RESIDUAL_SCALE: layer.residual_scale != 1.0,
        Feature.OUTPUT_SCALE: layer.has_output_scale,
        Feature.DIFFERENT_LAYERS: _sizes(layer) != _sizes(first),
        **_attention_features(layer.mixer, first.mixer),
        **_feed_features(layer.feed_forward),
    }


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
        Feature.SINKS: part.has_sinks,
        Feature.WINDOWS: part.window is not None and not part.is_chunked,
        Feature.CHUNKS: part.is_chunked,
        Feature.OTHER_VALUE_SIZE: part.value_dim != part.head_dim and part.latent is None,
        Feature.LATENT: part.latent is not None,
        Feature.SHARED_KV: part.kv_layer is not None or part.has_key_values,
    }


def _feed_features(part: Dense | Experts) -> dict[Feature, bool]:
    found = {Feature.EXPERTS: isinstance(part, Experts)}
    if isinstance(part, Dense):
        found[Feature.UNGATED] = not part.is_gated
    else:
        router = part.router
        found |= {
            Feature.EXPERT_BIASES: part.has_bias,
            Feature.SHARED_EXPERT: part.shared is not None,
            Feature.SIGMOID_ROUTER: router.scoring is Scoring.SIGMOID,
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
    own = mixer.qk_norm.norm if mixer.qk_norm is not None else None
    return (*layer.norms, mixer.output_norm, inner, own, mixer.value_norm)


def _sizes(layer: Layer) -> tuple[object, ...]:
    """What is the same in all layers of a model whose layers are alike."""
    part, feed = layer.mixer, layer.feed_forward
    is_biased = (part.qkv_bias, part.output_bias, feed.has_bias)
    caps = (part.soft_cap, part.qk_norm is None, part.output_norm is None)
    heads = (part.num_heads, part.num_kv_heads, part.head_dim)
    return (type(feed), feed.size, feed.activation, *is_biased, *caps, *heads)
