"""ModelSpec: a decoder as data (embedding, layers, head), and the tensors it computes with.

A layer is its mixer (attention, or what keeps a state: states.py), its feed-forward, and the norms
around them; layers may differ, and may have one of these halves alone.
Executors lower this description and nothing else. What only files differ in (fused, permuted or
transposed tensors, norm weights stored less one) is undone when a model is loaded: tensors are
named as GGUF names them, matrices are [out, in], experts are stacked [experts, out, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.rope import Rope
from quire.model.states import StateMixer
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
MAX_ALIBI = 64.0  # the paper has 8
_FEW_STATES = 8


class Activation(StrEnum):
    """What a feed-forward applies to its gate, or to its values where it has no gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"  # the square of the positive part
    # gpt-oss: gate and value are clamped at 7, the gate's sigmoid has a slope of 1.702, and the
    # value has 1 added.
    CLAMPED_SWIGLU = "clamped_swiglu"
    # Apertus, without a gate, with four numbers of each layer: beta * x, plus alpha * x ** 2 where
    # x is positive, else another alpha times exp(min(x, epsilon)) - 1 - x.
    XIELU = "xielu"


XIELU_NUMBERS = 4  # alpha of positive and of other values, beta, epsilon


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
    has_output_gate: bool = False  # what heads leave is multiplied by a sigmoid of the input's own
    kv_layer: int | None = None  # reads that layer's keys and values and makes none of its own
    has_key_values: bool = False  # values are what keys are before norm and rope
    # ALiBi: the exponent by which the slopes of heads fall; 0: none. A score gets the slope of its
    # head times the position of the key less the query's added.
    alibi: float = 0.0

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
        if self.latent is not None and (self.has_output_gate or self.alibi):
            raise UnsupportedModelError("latent attention with a gate or ALiBi is not supported")
        if not 0.0 <= self.alibi <= MAX_ALIBI:
            raise ModelFileError(f"alibi_bias_max must be from 0 to {MAX_ALIBI}, got {self.alibi}")
        if self.window is not None and self.window < 1:
            raise ModelFileError(f"a layer's window must be positive, got {self.window}")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        _check_scale("attention_scale", self.scale)
        _check_cap("attention_soft_cap", self.soft_cap)

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """Of each head: powers of 2 ** (-alibi / n), n being the greatest power of two that is no
        more than the heads; of those beyond, odd powers of its root."""
        usual = 1 << (self.num_heads.bit_length() - 1)
        exponents = [head + 1.0 for head in range(usual)]
        exponents += [head + 0.5 for head in range(self.num_heads - usual)]
        return tuple(float(2.0 ** (-self.alibi * exponent / usual)) for exponent in exponents)

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
        if self.activation is Activation.XIELU and self.is_gated:
            raise UnsupportedModelError("the activation xielu of a gate is not supported")

    def of_size(self, size: int) -> "Dense":
        """Another of its kind, without biases: an expert that every token uses."""
        return Dense(size=size, activation=self.activation, is_gated=self.is_gated)


class Scoring(StrEnum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    # Phi's: the best expert's share in a softmax over those whose scores are within two hundredths
    # of the larger of its own and their size; then that of the best of the others among these.
    SPARSE_MIXER = "sparse_mixer"


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
    """Feed-forwards of which each token uses a few. A token's sum runs over its experts in
    ascending order, then the shared one is added: other tokens change no bit of it."""

    count: int
    num_used: int
    size: int
    activation: Activation
    router: Router
    is_gated: bool = True
    has_bias: bool = False
    # Nemotron 3 Super's: experts take a projection of this size of the hidden state, and their sum
    # is projected back before the shared one is added; None: the hidden state itself.
    latent_size: int | None = None
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
        if self.latent_size is not None:
            _check_size("moe_latent_size", self.latent_size, MAX_SIZES["hidden_size"])
            if self.beside is not None:
                raise UnsupportedModelError(
                    "experts of a projection beside a dense feed-forward are not supported"
                )
        if not self.is_gated and self.activation in (Activation.CLAMPED_SWIGLU, Activation.XIELU):
            raise UnsupportedModelError(
                f"experts without a gate whose activation is {self.activation} are not supported"
            )
        if self.router.scoring is Scoring.SPARSE_MIXER and self.num_used != 2:
            raise UnsupportedModelError(
                f"a SparseMixer chooses two experts, not {self.num_used} (num_experts_per_tok)"
            )
        groups = self.router.num_groups
        per_group = self.count // groups
        if self.count % groups or self.num_used > self.router.num_used_groups * per_group:
            raise ModelFileError(
                f"{self.num_used} of {self.count} experts cannot be chosen from "
                f"{self.router.num_used_groups} of {groups} groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); or one of these halves alone.

    Where it is parallel both halves take the layer's input, and are added together; the
    feed-forward takes it as the mixer does where it has no norm of its own.
    """

    mixer: Attention | StateMixer | None
    feed_forward: Dense | Experts | None
    # Falcon-H1's, which takes what its attention does, and what they make is added.
    state_beside: StateMixer | None = None
    mixer_norm: Norm | None = None  # before
    mixer_output_norm: Norm | None = None  # after, before it is added
    feed_forward_norm: Norm | None = None
    feed_forward_output_norm: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0  # of what is added
    has_output_scale: bool = False  # what leaves the layer is multiplied by a learned scalar

    def __post_init__(self) -> None:
        _check_scale("residual_scale", self.residual_scale)
        is_whole = self.mixer is not None and self.feed_forward is not None
        if self.is_parallel and (not is_whole or self.state_beside is not None):
            raise UnsupportedModelError("halves side by side are an attention or a state each")

    @property
    def attention(self) -> Attention:
        """Its mixer, where a caller knows that it keeps no state."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def feed(self) -> Dense | Experts:
        """Its feed-forward, where a caller knows that it has one."""
        assert self.feed_forward is not None
        return self.feed_forward

    @property
    def state(self) -> StateMixer | None:
        """What keeps a state in it."""
        return self.mixer if isinstance(self.mixer, StateMixer) else self.state_beside

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
    embedding_norm: Norm | None = None  # of a token's vector, before the layers
    num_positions: int = 0  # that have a learned vector, which is added to a token's; 0: none has
    layer_inputs: LayerInputs | None = None
    linear_scales: bool = False  # each linear's output is multiplied by a scalar (its .scale)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocabulary_size", "context_length"):
            _check_size(name, getattr(self, name))
        for name in ("embedding_scale", "logit_scale"):
            _check_scale(name, getattr(self, name))
        _check_cap("logit_soft_cap", self.logit_soft_cap)
        if self.num_positions and self.context_length > self.num_positions:
            raise ModelFileError(
                f"a context of {self.context_length} exceeds the {self.num_positions} positions "
                "that the model learned"
            )
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
    def attentions(self) -> dict[int, Attention]:
        """By layer, of those that keep keys and values."""
        mixers = {index: layer.mixer for index, layer in enumerate(self.layers)}
        return {index: part for index, part in mixers.items() if isinstance(part, Attention)}

    @property
    def states(self) -> dict[int, StateMixer]:
        """By layer, of those that keep a state."""
        states = {index: layer.state for index, layer in enumerate(self.layers)}
        return {index: part for index, part in states.items() if part is not None}

    @property
    def feed_forwards(self) -> tuple[Dense | Experts, ...]:
        """Of the layers that have one."""
        every = (layer.feed_forward for layer in self.layers)
        return tuple(part for part in every if part is not None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer that keeps keys and values."""
        return tuple(part.window for part in self.attentions.values())

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Each that some layer has, once."""
        found = dict.fromkeys(part.rope for part in self.attentions.values())
        return tuple(rope for rope in found if rope is not None)

    @property
    def num_kv_elements(self) -> int:
        """Numbers that one token leaves in the cache: keys and values of every layer."""
        return sum(part.num_kv_elements for part in self.attentions.values())

    @property
    def num_state_elements(self) -> int:
        """Numbers of a sequence's state, of all layers that keep one."""
        return sum(part.num_elements for part in self.states.values())

    def num_state_slots(self, asked: int | None) -> int:
        """Slots for states of sequences that an executor has: as asked, or a few; 0 where no layer
        keeps a state."""
        if not self.states:
            return 0
        return _FEW_STATES if asked is None else asked

    # ---- of every layer, in models whose layers are alike and attend

    @property
    def attention(self) -> Attention:
        return next(iter(self.attentions.values()))

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
        return max((_width(part) for part in self.feed_forwards), default=0)

    @property
    def activation(self) -> Activation:
        return self.feed_forwards[0].activation

    @property
    def norm_epsilon(self) -> float:
        return self.output_norm.epsilon

    @property
    def sub_norms(self) -> bool:
        """BitNet's norms before the output and the down projection."""
        return bool(self.attentions) and self.attention.output_norm is not None


def _width(feed: Dense | Experts) -> int:
    if isinstance(feed, Dense):
        return feed.size
    others = [part.size for part in (feed.shared, feed.beside) if part is not None]
    return max(feed.size, *others, 0)


def _within(layer: Layer, context_length: int) -> Layer:
    """The layer in a model of that context: what depends on it is fixed once."""
    mixer = layer.mixer
    if not isinstance(mixer, Attention):
        return layer
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
    parts = []
    for mixer in (layer.mixer, layer.state_beside):
        if mixer is not None:
            parts.append(_mixer_linears(mixer, hidden))
            shapes |= _mixer_vectors(mixer)
    parts.append(_feed_linears(layer.feed_forward, hidden))
    shapes |= _feed_vectors(layer.feed_forward, hidden)
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


def _mixer_linears(part: Attention | StateMixer, hidden: int) -> dict[str, tuple[Shape, bool]]:
    if isinstance(part, Attention):
        return _attention_linears(part, hidden)
    return {name: (shape, False) for name, shape in part.matrices(hidden).items()}


def _mixer_vectors(part: Attention | StateMixer) -> dict[str, Shape]:
    return _attention_vectors(part) if isinstance(part, Attention) else part.vectors()


def _attention_linears(part: Attention, hidden: int) -> dict[str, tuple[Shape, bool]]:
    """Matrices, and whether they have a bias."""
    bias, latent = part.qkv_bias, part.latent
    out_size = part.num_heads * part.value_dim
    output: dict[str, tuple[Shape, bool]] = {"attn_output": ((hidden, out_size), part.output_bias)}
    if latent is not None:
        return _latent_linears(part, latent, hidden) | output
    linears: dict[str, tuple[Shape, bool]] = {"attn_q": ((part.query_size, hidden), bias)}
    if part.has_output_gate:
        linears["attn_gate"] = ((out_size, hidden), bias)
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


def _feed_linears(part: Dense | Experts | None, hidden: int) -> dict[str, tuple[Shape, bool]]:
    if part is None:
        return {}
    if isinstance(part, Dense):
        return _dense_linears(part, hidden, "")
    width = part.latent_size or hidden
    up, down = (part.count, part.size, width), (part.count, width, part.size)
    linears: dict[str, tuple[Shape, bool]] = {
        "ffn_gate_inp": ((part.count, hidden), part.router.has_bias)
    }
    if part.latent_size is not None:
        linears["ffn_latent_down"] = ((part.latent_size, hidden), False)
        linears["ffn_latent_up"] = ((hidden, part.latent_size), False)
    for name, shape in (("gate", up), ("up", up), ("down", down)):
        if part.is_gated or name != "gate":
            linears[f"ffn_{name}_exps"] = (shape, part.has_bias)
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


def _feed_vectors(part: Dense | Experts | None, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if part is None:
        return shapes
    if isinstance(part, Dense):
        if part.activation is Activation.XIELU:
            shapes["ffn_xielu.weight"] = (XIELU_NUMBERS,)
        return shapes | _norm_shapes("ffn_sub_norm", part.inner_norm, (part.size,))
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
    shapes |= _norm_shapes("token_embd_norm", spec.embedding_norm, (spec.hidden_size,))
    if spec.num_positions:
        shapes["position_embd.weight"] = (spec.num_positions, spec.hidden_size)
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
