"""A model's weights on the device: every matrix in planes, joined and ordered as the kernels read.

Hidden and feed-forward vectors live in operand order (see planes.py), so the rows of whatever makes
them are reordered here, once. Rows of gates and of their ups alternate by eight, so that a
thread of the GEMM holds both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import torch

from quire.core.errors import UnsupportedModelError
from quire.core.progress import WEIGHTS, reported
from quire.executors.cuda.expert_weights import (
    ROUTER_MATRIX,
    ExpertLoader,
    ExpertWeights,
    check_experts,
)
from quire.executors.cuda.kernels.layers import OutputNorm
from quire.executors.cuda.planes import (
    GATED_DIVISOR,
    Array,
    Planes,
    block_bytes,
    check_supported,
    operand_order,
    padded,
    reorder,
    to_operand_order,
)
from quire.executors.cuda.states import (
    StateWeights,
    check_states,
    num_projected,
    output_divisor,
)
from quire.executors.cuda.ternary import MAX_COLUMNS, in_order, pack, planes_of
from quire.loader.tensor import Tensor
from quire.model.features import OF_LLAMA, Feature, check_lowered, features
from quire.model.spec import (
    LAYER_LINEARS,
    Activation,
    Attention,
    Dense,
    Experts,
    Layer,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    QKNorm,
    takes_bytes_by_token,
)
from quire.model.states import StateMixer
from quire.quant.formats import format_named

_SPLIT_TILES = 264  # programs that fill a GPU of 132 multiprocessors, two on each
_TILE_ROWS = 64
_MIN_SPLIT_BLOCKS = 6  # of 256 columns
_MIN_TERNARY_SPLIT_BLOCKS = 4

# What launchers can launch. Grids have at most 65535 programs in their second and third direction,
# a norm's row lies in one program, and so does a tile of the query heads of a kv head.
MAX_HEAD_DIM = 512
MAX_LATENT_ROPE = 128
MAX_QUERY_RANK = 1 << 13
MAX_HIDDEN = 1 << 15
MAX_GEMM_ROWS = 65535 * _TILE_ROWS
MAX_CONTEXT = 1 << 24  # positions; 512 of them are a split, which may have a program

_OF_TERNARY = frozenset({Feature.SUB_NORMS})
_BESIDE_TERNARY = _OF_TERNARY | OF_LLAMA | {Feature.LINEAR_SCALES, Feature.RELU2}
_POSITIONS = "position_embd.weight"
_TAPS = "ssm_conv1d.weight"
_DECODED = (ROUTER_MATRIX, _POSITIONS, _TAPS)  # when they are loaded, whatever their format
_FEW_ROWS = ("ssm_alpha.weight", "ssm_beta.weight")  # which files may have in F32
_EXPERT_ACTIVATIONS = (
    *(Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU),
    Activation.RELU2,
)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of a GEMM that share a format."""

    planes: Planes
    first_row: int
    bias: Array | None  # float32 [rows]
    scale: float = 1.0  # of its sums, before the bias


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A GEMM of one or more segments; its columns are summed in `num_splits` splits."""

    segments: tuple[Segment, ...]
    num_rows: int
    num_splits: int
    is_gated: bool = False  # eight gates, then their eight ups, and so on
    has_gates: bool = True  # where an activation is applied; otherwise to all its rows
    activation: Activation = Activation.SILU
    xielu: tuple[float, ...] = ()  # the numbers of that activation
    scale: float = 1.0  # of its sums, before the bias
    scales: tuple[float, ...] = ()  # of ternary matrices, one each: their sums come without

    @property
    def is_ternary(self) -> bool:
        return self.segments[0].planes.is_ternary

    @property
    def sums_integers(self) -> bool:
        """Whether its sums are exact, so that any splits of its columns give the same."""
        return all(x.planes.is_ternary and x.planes.deltas is None for x in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.planes.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm of hidden vectors, in operand order."""

    weight: Array | None = None
    bias: Array | None = None
    epsilon: float = 0.0
    kind: str = ""  # the value of a NormKind; "": there is no norm

    @property
    def output(self) -> OutputNorm:
        """As kernels take it that norm what a half of a layer made."""
        return OutputNorm(self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """A feed-forward that every token takes."""

    gate_up: Linear
    down: Linear
    sub_norm: Array | None = None  # before down

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """The expert that every token uses."""

    feed: DenseWeights
    gate: Array | None  # float32 [hidden], in operand order: its sigmoid multiplies what it makes


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Latent attention's beside `qkv`, which makes queries, or what they are made of, and then what
    the cache keeps. Matrices of heads lie one below the other."""

    key_norm: Array  # float32 [kv_rank]
    query_norm: Array | None  # float32 [query_rank]
    query: Linear | None  # of the normed vector of that size
    keys: Planes  # from a head's query to one against the cache
    values: Planes  # from what attention leaves to a head's values


@dataclass(frozen=True, slots=True, eq=False)
class BesideExperts:
    """The dense feed-forward beside a layer's experts, and the norms of both."""

    feed: DenseWeights
    output_norm: NormWeights  # of what it makes
    input_norm: NormWeights  # of what experts take
    router_norm: NormWeights  # of what their router sees; its weights are the router's
    expert_output_norm: NormWeights


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """How a layer takes what it gets of a token, after its halves."""

    gate: Linear
    output: Linear
    norm: NormWeights  # of what `output` makes


@dataclass(frozen=True, slots=True, eq=False)
class InputWeights:
    """What makes the layers' inputs of a token."""

    embedding: Planes  # of all layers, one after the other
    projection: Linear
    norm: Array  # float32 [size]

    @property
    def num_bytes(self) -> int:
        return self.embedding.num_bytes + self.projection.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    mixer_norm: NormWeights | None
    mixer_output_norm: NormWeights | None
    feed_forward_norm: NormWeights | None
    feed_forward_output_norm: NormWeights | None
    query_norm: Array | None
    key_norm: Array | None
    # What attention is made of. None, as `output`: of a layer without, and of a part of a model
    # that has feed-forwards alone.
    qkv: Linear | None
    output: Linear | None
    feed_forward: DenseWeights | ExpertWeights | None
    shared: SharedExpert | None = None
    sinks: Array | None = None  # times log2(e)
    sub_norm: Array | None = None  # before the output projection
    beside: BesideExperts | None = None
    inputs: LayerInput | None = None
    latent: LatentWeights | None = None
    output_scale: float = 1.0  # of what leaves the layer
    state: StateWeights | None = None  # where it keeps a state
    state_input: Linear | None = None  # what that is made of, and gates
    state_output: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.others, *(linear for feed in self.denses for linear in feed.linears)

    @property
    def others(self) -> tuple[Linear, ...]:
        """Those of no feed-forward."""
        of_input = () if self.inputs is None else (self.inputs.gate, self.inputs.output)
        own = (self.qkv, self.output, self.state_input, self.state_output, *of_input)
        if self.latent is not None:
            own = (*own, self.latent.query)
        return tuple(linear for linear in own if linear is not None)

    @property
    def denses(self) -> tuple[DenseWeights, ...]:
        """Its feed-forwards that every token takes."""
        own = self.shared.feed if self.shared is not None else self.feed_forward
        if self.beside is not None:
            own = self.beside.feed
        return (own,) if isinstance(own, DenseWeights) else ()

    @property
    def dense(self) -> DenseWeights:
        """Of a layer without experts."""
        assert isinstance(self.feed_forward, DenseWeights)
        return self.feed_forward


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embedding: Planes | None  # None: of a model's last layers, which are given hidden states
    output_norm: NormWeights
    head: Linear
    layers: tuple[LayerWeights, ...]
    positions: Array | None = None  # float32 [position, hidden], in operand order
    embedding_norm: NormWeights | None = None  # of a token's vector
    inputs: InputWeights | None = None  # of layers

    @property
    def num_bytes(self) -> int:
        total = self.head.num_bytes
        if self.embedding is not None and self.embedding is not self.head.segments[0].planes:
            total += self.embedding.num_bytes
        if self.positions is not None:
            total += self.positions.nbytes
        if self.inputs is not None:
            total += self.inputs.num_bytes
        for layer in self.layers:
            total += sum(linear.num_bytes for linear in layer.linears)
            if layer.latent is not None:
                total += layer.latent.keys.num_bytes + layer.latent.values.num_bytes
            total += 0 if layer.state is None else layer.state.num_bytes
        return total + sum(experts.num_bytes for experts in self.experts)

    @property
    def experts(self) -> tuple[ExpertWeights, ...]:
        """Of each layer that has any."""
        feeds = (layer.feed_forward for layer in self.layers)
        return tuple(feed for feed in feeds if isinstance(feed, ExpertWeights))

    @property
    def is_ternary(self) -> bool:
        linears = self.layers[0].linears
        return bool(linears) and linears[0].is_ternary

    @property
    def formats(self) -> tuple[str, ...]:
        linears = [self.head, *(linear for layer in self.layers for linear in layer.linears)]
        names = {segment.planes.format for linear in linears for segment in linear.segments}
        names |= {name for experts in self.experts for name in experts.formats}
        if self.embedding is not None:
            names.add(self.embedding.format)
        latents = (layer.latent for layer in self.layers if layer.latent is not None)
        names |= {x.format for latent in latents for x in (latent.keys, latent.values)}
        if self.inputs is not None:
            segments = self.inputs.projection.segments
            names |= {self.inputs.embedding.format, *(x.planes.format for x in segments)}
        return tuple(sorted(names))


def num_splits(num_rows: int, num_blocks: int, min_blocks: int = _MIN_SPLIT_BLOCKS) -> int:
    """Splits of the columns: by the matrix's shape and never by the batch."""
    splits = 1
    for wanted in (2, 4):
        tiles = -(-num_rows // _TILE_ROWS) * wanted
        if tiles <= _SPLIT_TILES and num_blocks // wanted >= min_blocks:
            splits = wanted
    return splits


def check_model(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what these kernels do not compute, before anything is moved."""
    check_lowered(spec, "cuda")
    _check_shape(spec)
    is_ternary = is_ternary_model(spec, tensors)
    # What BitNet models have beyond a llama has kernels beside ternary matrices alone, and what
    # others have beside matrices that are not.
    for feature, where in features(spec):
        if not is_ternary and feature in _OF_TERNARY:
            _refuse(spec, f"{feature} and matrices that are not ternary")
        if is_ternary and feature not in _BESIDE_TERNARY:
            _refuse(spec, f"{feature}{where} beside ternary matrices")
    check_states(spec)
    if spec.linear_scales:
        _check_linear_scales(spec)
    for part in set(spec.attentions.values()):
        _check_head_norm(spec, part)
    if is_ternary and any(name.endswith(".bias") for name in tensors):
        _refuse(spec, "biases beside ternary matrices")
    for name, tensor in tensors.items():
        is_own = (is_ternary and _is_linear(name)) or name.endswith(_DECODED)
        is_own |= tensor.format.name == "F32" and name.endswith(_FEW_ROWS)
        if len(tensor.shape) > 1 and not is_own and not name.endswith(".bias"):
            check_supported(tensor.format.name, name)
    _check_feed_forwards(spec, tensors)


def _check_feed_forwards(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    for index, layer in enumerate(spec.layers):
        feed = layer.feed_forward
        if feed is None:
            continue
        if isinstance(feed, Experts):
            if feed.activation not in _EXPERT_ACTIVATIONS:
                _refuse(spec, f"experts with the activation {feed.activation}")
            if feed.beside is not None and layer.is_parallel:
                _refuse(spec, f"{Feature.EXPERTS_BESIDE_DENSE} and {Feature.PARALLEL_HALVES}")
            check_experts(feed, tensors, f"blk.{index}.")
        elif feed.activation is Activation.CLAMPED_SWIGLU and not feed.is_gated:
            _refuse(spec, f"{Feature.CLAMPED_SWIGLU} without a gate")


def _check_linear_scales(spec: ModelSpec) -> None:
    """Stacks of matrices have none, and what layers get of a token."""
    others = {Feature.EXPERTS, Feature.LATENT, Feature.LAYER_INPUTS}
    for feature, where in features(spec):
        if feature in others:
            _refuse(spec, f"{Feature.LINEAR_SCALES} and {feature}{where}")


def _check_head_norm(spec: ModelSpec, part: Attention) -> None:
    norm, usual = part.qk_norm, QKNorm(norm=Norm(epsilon=0.0))
    if part.value_norm is not None:
        epsilon = part.value_norm.epsilon
        is_plain = part.value_norm == Norm(epsilon=epsilon, has_weight=False)
        if not is_plain or norm != replace(usual, norm=Norm(epsilon=epsilon)):
            _refuse(spec, f"{Feature.VALUE_NORMS} of another kind than those of keys")
    if norm is None:
        return
    if part.kv_layer is not None and norm.span is not NormSpan.HEAD:
        _refuse(spec, f"{Feature.SHARED_KV} and {Feature.OTHER_QK_NORMS}")
    if norm.norm.has_bias:
        _refuse(spec, "norms of queries and keys with biases")
    if norm.span is NormSpan.PROJECTION and norm.norm.kind is not NormKind.RMS:
        _refuse(spec, "layer norms of queries and keys over all heads")
    if norm.span is NormSpan.PROJECTION and norm.is_after_rope:
        _refuse(spec, f"{Feature.QK_NORMS_AFTER_ROPE} over all heads")


def _refuse(spec: ModelSpec, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"the {spec.family} model has {what}, which the CUDA executor does not run yet: "
        "use device='cpu'"
    )


def is_ternary_model(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> bool:
    """Whether every matrix of its layers is ternary with int8 activations, as BitNet's are."""
    linears = [tensor for name, tensor in tensors.items() if _is_linear(name)]
    return bool(linears) and all(takes_bytes_by_token(spec, x.format) for x in linears)


def _is_linear(name: str) -> bool:
    """Whether a tensor is a matrix of a layer."""
    return name.startswith("blk.") and name.removesuffix(".weight").split(".")[-1] in LAYER_LINEARS


def _check_shape(spec: ModelSpec) -> None:
    """Refuse what no launcher can launch: what a file says decides grids, tiles and offsets."""
    parts = set(spec.attentions.values())
    projected = (*map(_num_projected, parts), *map(num_projected, spec.states.values()))
    rows = max(spec.vocabulary_size, 2 * padded(spec.ffn_size), *projected)
    if spec.layer_inputs is not None:
        rows = max(rows, spec.num_layers * spec.layer_inputs.size)
    _check_bounds(
        {
            "hidden_size, up to whole blocks": (padded(spec.hidden_size), MAX_HIDDEN),
            "the rows of its largest matrix multiplication": (rows, MAX_GEMM_ROWS),
            "context_length": (spec.context_length, MAX_CONTEXT),
            "ffn_size": (spec.ffn_size, MAX_COLUMNS),
        }
    )
    for part in parts:
        _check_heads(spec, part)


def _check_latent(spec: ModelSpec, part: Attention) -> None:
    latent = part.latent
    if latent is None:
        if spec.attention.latent is not None:
            _refuse(spec, f"{Feature.LATENT} beside layers of another kind")
        return
    if part.rope is None or part.rope.dims != latent.rope_dims or latent.rope_dims % 2:
        _refuse(spec, f"{Feature.LATENT} without rope of whole pairs")
    if latent.norm.kind is not NormKind.RMS or latent.norm.has_bias or not latent.norm.has_weight:
        _refuse(spec, f"{Feature.LATENT} and {Feature.LAYER_NORMS} of its vectors")
    _check_bounds(
        {
            "kv_lora_rank": (latent.kv_rank, MAX_HEAD_DIM),
            "qk_nope_head_dim": (part.head_dim - latent.rope_dims, MAX_HEAD_DIM),
            "qk_rope_head_dim": (latent.rope_dims, MAX_LATENT_ROPE),
            "v_head_dim": (part.value_dim, MAX_HEAD_DIM),
            "q_lora_rank": (latent.query_rank or 0, MAX_QUERY_RANK),
        }
    )


def _check_heads(spec: ModelSpec, part: Attention) -> None:
    _check_latent(spec, part)
    if part.latent is not None:
        return
    size, group = part.head_dim, part.num_heads // part.num_kv_heads
    heads = f"num_heads over num_kv_heads, for heads of {size}"
    _check_bounds({"head_dim": (size, MAX_HEAD_DIM), heads: (group, largest_group(size))})
    if size % 2:
        raise UnsupportedModelError(
            f"head_dim is {size}, but the CUDA executor runs even ones: use device='cpu'"
        )


def _check_bounds(bounds: Mapping[str, tuple[int, int]]) -> None:
    for what, (value, limit) in bounds.items():
        if value > limit:
            raise UnsupportedModelError(
                f"{what} is {value}, but the CUDA executor runs at most {limit}: use device='cpu'"
            )


def _num_projected(part: Attention) -> int:
    gate = part.query_size if part.has_output_gate else 0
    return part.query_size + 2 * part.kv_size + gate


def largest_group(head_dim: int) -> int:
    """Query heads of one kv head whose tile fits a multiprocessor's shared memory."""
    return 128 if head_dim <= 128 else 32 if head_dim <= 256 else 16


_ROWS_AS_THEY_ARE = {
    *("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_gate", "ffn_gate_inp"),
    *("per_layer_token_embd", "per_layer_model_proj"),
    *("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b"),
    *("ssm_in", "ssm_gate", "ssm_alpha", "ssm_beta"),
}


def packed_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What the weights take on the device: planes hold whole blocks of 256 columns, and those that
    make hidden or feed-forward vectors as many rows."""
    return sum(_device_bytes(name, tensor) for name, tensor in tensors.items())


def _device_bytes(name: str, tensor: Tensor) -> int:
    if len(tensor.shape) < 2:
        return tensor.nbytes
    if name.endswith(_TAPS):
        return 4 * tensor.num_weights
    *_, rows, columns = tensor.shape
    if name == _POSITIONS:
        return 4 * rows * padded(columns)
    is_padded = name.removesuffix(".weight").split(".")[-1] not in _ROWS_AS_THEY_ARE
    num_rows = padded(rows) if is_padded else rows
    taken, kept = block_bytes(tensor.format.name)
    return tensor.nbytes * taken * num_rows * padded(columns) // (kept * rows * columns)


class Loader:
    """Moves tensors to the device, one at a time, and reorders them there."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], device: str) -> None:
        self._spec = spec
        self._tensors = tensors
        self._device = device

    def load(self) -> ModelWeights:
        spec = self._spec
        name = "token_embd.weight"
        embedding = self._planes([name]) if name in self._tensors else None
        head = embedding if spec.tied_head else self._planes(["output.weight"])
        assert head is not None
        norm = spec.embedding_norm
        return ModelWeights(
            embedding=embedding,
            positions=self._norm(_POSITIONS) if spec.num_positions else None,
            embedding_norm=None if norm is None else self._hidden_norm("token_embd_norm", norm),
            inputs=None if spec.layer_inputs is None else self._inputs(),
            output_norm=self._hidden_norm("output_norm", spec.output_norm),
            head=Linear(
                (Segment(head, 0, self._bias("output")),),
                head.num_rows,
                1,
                scale=spec.logit_scale,
            ),
            layers=tuple(
                self._layer(f"blk.{at}.", part)
                for at, part in enumerate(reported(WEIGHTS, spec.layers))
            ),
        )

    def _inputs(self) -> InputWeights:
        return InputWeights(
            self._planes(["per_layer_token_embd.weight"]),
            self._joined(["per_layer_model_proj"]),
            self._floats("per_layer_proj_norm.weight"),
        )

    def _layer(self, prefix: str, layer: Layer) -> LayerWeights:
        attention, state = None, None
        if self._has_mixer(prefix, layer):
            attention = layer.mixer if isinstance(layer.mixer, Attention) else None
            state = layer.state
        else:
            layer = replace(layer, mixer_norm=None, mixer_output_norm=None)
        return LayerWeights(
            **self._norms(prefix, layer),
            **self._attention(prefix, attention),
            **self._state(prefix, state),
            **self._feed_forward_parts(prefix, layer),
            inputs=self._input(prefix),
        )

    def _attention(self, prefix: str, part: Attention | None) -> dict[str, Any]:
        """A layer's attention, by its names in LayerWeights."""
        found = dict.fromkeys(("query_norm", "key_norm", "qkv", "output"))
        if part is None:
            return found
        norm, names = part.qk_norm, _projected(part)
        if norm is not None and norm.norm.has_weight:
            for name, own in (("query_norm", "q"), ("key_norm", "k")):
                if own in names:
                    found[name] = self._floats(f"{prefix}attn_{own}_norm.weight")
        return found | {
            "qkv": self._joined([f"{prefix}attn_{x}" for x in names]),
            "output": self._hidden(f"{prefix}attn_output"),
            "sinks": self._sinks(prefix) if part.has_sinks else None,
            "latent": self._latent(prefix, part),
        }

    def _sinks(self, prefix: str) -> Array:
        return self._floats(f"{prefix}attn_sinks.weight") * math.log2(math.e)

    def _latent(self, prefix: str, part: Attention) -> LatentWeights | None:
        if part.latent is None:
            return None
        has_rank = part.latent.query_rank is not None
        return LatentWeights(
            key_norm=self._floats(f"{prefix}attn_kv_a_norm.weight"),
            query_norm=self._floats(f"{prefix}attn_q_a_norm.weight") if has_rank else None,
            query=self._joined([f"{prefix}attn_q_b"]) if has_rank else None,
            keys=self._of_heads(f"{prefix}attn_k_b.weight"),
            values=self._of_heads(f"{prefix}attn_v_b.weight"),
        )

    def _of_heads(self, name: str) -> Planes:
        tensor = self._tensors[name]
        heads, rows, columns = tensor.shape
        return reorder(tensor.format.name, self._raw(tensor), heads * rows, columns)

    def _feed_forward_parts(self, prefix: str, layer: Layer) -> dict[str, Any]:
        """What stands behind the mixer's half, by its names in LayerWeights."""
        name, feed = f"{prefix}layer_output_scale.weight", layer.feed_forward
        found = {
            "feed_forward": None,
            "output_scale": float(self._floats(name)[0]) if layer.has_output_scale else 1.0,
        }
        if feed is None:
            return found
        return found | {
            "feed_forward": self._feed_forward(prefix, feed),
            "shared": self._shared(prefix, feed),
            "beside": self._beside(prefix, feed),
        }

    def _beside(self, prefix: str, part: Dense | Experts) -> BesideExperts | None:
        if isinstance(part, Dense) or part.beside is None:
            return None
        norm, seen = part.beside_norm, part.router.input_norm
        assert norm is not None and seen is not None
        return BesideExperts(
            feed=self._dense(prefix, part.beside),
            output_norm=self._hidden_norm(f"{prefix}post_ffw_norm_1", norm),
            input_norm=self._hidden_norm(f"{prefix}pre_ffw_norm_2", norm),
            router_norm=NormWeights(epsilon=seen.epsilon, kind=seen.kind.value),
            expert_output_norm=self._hidden_norm(f"{prefix}post_ffw_norm_2", norm),
        )

    def _input(self, prefix: str) -> LayerInput | None:
        part = self._spec.layer_inputs
        if part is None:
            return None
        return LayerInput(
            gate=self._hidden(f"{prefix}inp_gate"),
            output=replace(self._hidden(f"{prefix}proj"), scale=GATED_DIVISOR),
            norm=self._hidden_norm(f"{prefix}post_norm", part.norm),
        )

    def _has_mixer(self, prefix: str, layer: Layer) -> bool:
        """Whether its tensors are there: in a part that has feed-forwards alone they are not."""
        name = "attn_output" if isinstance(layer.mixer, Attention) else "ssm_out"
        return layer.mixer is not None and f"{prefix}{name}.weight" in self._tensors

    def _state(self, prefix: str, part: StateMixer | None) -> dict[str, Any]:
        """What a layer keeps a state with, by its names in LayerWeights."""
        if part is None:
            return {}
        names = [name for name in part.matrices(1) if name != "ssm_out"]
        output = self._hidden(f"{prefix}ssm_out")
        return {
            "state": self._state_vectors(prefix),
            "state_input": self._joined([prefix + name for name in names]),
            "state_output": replace(output, scale=output_divisor(part)),
        }

    def _state_vectors(self, prefix: str) -> StateWeights:
        names = {"bias": "conv1d.bias", "a": "a.weight", "dt": "dt.bias", "d": "d.weight"}
        names["norm"] = "norm.weight"
        full = {ours: f"{prefix}ssm_{name}" for ours, name in names.items()}
        vectors = {
            ours: self._floats(name) if name in self._tensors else None
            for ours, name in full.items()
        }
        taps = self._floats(prefix + _TAPS)  # [channels, kernel]
        return StateWeights(taps.T.contiguous(), **vectors)

    def _norms(self, prefix: str, layer: Layer) -> dict[str, Any]:
        """Those of hidden vectors, by their names in LayerWeights."""
        norms = {
            "mixer_norm": ("attn_norm", layer.mixer_norm),
            "mixer_output_norm": ("post_attention_norm", layer.mixer_output_norm),
            "feed_forward_norm": ("ffn_norm", layer.feed_forward_norm),
            "feed_forward_output_norm": ("post_ffw_norm", layer.feed_forward_output_norm),
        }
        return {
            name: None if norm is None else self._hidden_norm(prefix + tensor, norm)
            for name, (tensor, norm) in norms.items()
        }

    def _feed_forward(self, prefix: str, part: Dense | Experts) -> DenseWeights | ExpertWeights:
        if isinstance(part, Experts):
            return ExpertLoader(self._tensors, self._device).load(part, prefix)
        return self._dense(prefix, part)

    def _shared(self, prefix: str, part: Dense | Experts) -> SharedExpert | None:
        if isinstance(part, Dense) or part.shared is None:
            return None
        feed = self._dense(prefix, part.shared, "_shexp")
        gate = f"{prefix}ffn_gate_inp_shexp.weight"
        return SharedExpert(feed, self._norm(gate) if part.has_shared_gate else None)

    def _dense(self, prefix: str, part: Dense, suffix: str = "") -> DenseWeights:
        gate, up, down = (f"{prefix}ffn_{x}{suffix}" for x in ("gate", "up", "down"))
        if part.is_gated:
            gate_up = self._gated(gate, up)
        else:
            gate_up = replace(self._hidden(up), num_splits=1, has_gates=False)
        numbers: tuple[float, ...] = ()
        if part.activation is Activation.XIELU:
            numbers = tuple(self._floats(f"{prefix}ffn_xielu{suffix}.weight").tolist())
        return DenseWeights(
            gate_up=replace(gate_up, activation=part.activation, xielu=numbers),
            down=replace(self._hidden(down), scale=GATED_DIVISOR),
        )

    def _hidden_norm(self, name: str, norm: Norm) -> NormWeights:
        weight = self._norm(f"{name}.weight") if norm.has_weight else None
        bias = self._norm(f"{name}.bias") if norm.has_weight and norm.has_bias else None
        return NormWeights(weight, bias, norm.epsilon, norm.kind.value)

    # ---- kinds of GEMM

    def _joined(self, names: Sequence[str]) -> Linear:
        """One GEMM of several matrices, rows as they are; a segment has one format and scale."""
        segments = []
        first_row = 0
        for _, run in groupby(names, key=lambda name: (self._format(name), self._own_scale(name))):
            group = list(run)
            planes = self._planes([f"{name}.weight" for name in group])
            biases = [self._bias(name) for name in group]
            bias = None if biases[0] is None else torch.cat(biases)
            segments.append(Segment(planes, first_row, bias, self._own_scale(group[0])))
            first_row += planes.num_rows
        return _linear(segments, first_row)

    def _hidden(self, name: str) -> Linear:
        """A GEMM that makes a hidden vector, in operand order."""
        size = self._tensors[f"{name}.weight"].shape[0]
        rows = _with_padding(operand_order(padded(size)), size)
        bias = self._bias(name)
        if bias is not None:
            bias = torch.cat([bias, bias.new_zeros(1)])[rows.to(bias.device)]
        planes = self._planes([f"{name}.weight"], rows)
        return _linear([Segment(planes, 0, bias, self._own_scale(name))], planes.num_rows)

    def _gated(self, gate: str, up: str) -> Linear:
        """Rows of gates and ups alternate by eight; of two formats or scales, gates come first."""
        size = self._tensors[f"{gate}.weight"].shape[0]
        order = operand_order(padded(size))
        names = [f"{gate}.weight", f"{up}.weight"]
        biases = [self._bias(gate), self._bias(up)]
        scales = [self._own_scale(gate), self._own_scale(up)]
        if self._format(gate) == self._format(up) and scales[0] == scales[1]:
            gates = _with_padding(order, size, 2 * size)
            ups = torch.where(gates < size, gates + size, 2 * size)
            rows = torch.stack([gates.view(-1, 8), ups.view(-1, 8)], dim=1).reshape(-1)
            bias = None
            if biases[0] is not None:
                both = torch.cat([*biases, biases[0].new_zeros(1)])
                bias = both[rows.to(both.device)]
            planes = self._planes(names, rows)
            segment = Segment(planes, 0, bias, scales[0])
            return Linear((segment,), planes.num_rows, 1, is_gated=True)
        rows = _with_padding(order, size)
        segments = []
        for index, name in enumerate(names):
            bias = biases[index]
            if bias is not None:
                bias = torch.cat([bias, bias.new_zeros(1)])[rows.to(bias.device)]
            planes, first_row = self._planes([name], rows), index * len(rows)
            segments.append(Segment(planes, first_row, bias, scales[index]))
        return Linear(tuple(segments), 2 * len(rows), 1)

    # ---- tensors

    def _format(self, name: str) -> str:
        return self._matrix(f"{name}.weight").format.name

    def _own_scale(self, name: str) -> float:
        """What the linear's output is multiplied by besides."""
        if f"{name}.scale" not in self._tensors:
            return 1.0
        return float(self._floats(f"{name}.scale").flatten()[0])

    def _matrix(self, name: str) -> Tensor:
        """Where it is in F32, in F16."""
        tensor = self._tensors[name]
        if tensor.format.name != "F32":
            return tensor
        halves = tensor.to_float32().astype(np.float16).view(np.uint8).ravel()
        return Tensor(name, tensor.shape, format_named("F16", name), halves)

    def _planes(self, names: Sequence[str], rows: Array | None = None) -> Planes:
        """Matrices of one format, one below the other; or `rows` of these and a row of zeros."""
        tensors = [self._matrix(name) for name in names]
        columns = tensors[0].shape[1]
        raw = [self._raw(tensor).view(tensor.shape[0], -1) for tensor in tensors]
        if rows is not None:
            raw.append(torch.zeros_like(raw[0][:1]))
        whole = raw[0] if len(raw) == 1 else torch.cat(raw)
        if rows is not None:
            whole = whole[rows.to(whole.device)]
        return reorder(tensors[0].format.name, whole.reshape(-1), len(whole), columns)

    def _raw(self, tensor: Tensor) -> Array:
        return torch.from_numpy(tensor.data).to(self._device)

    def _floats(self, name: str) -> Array:
        return torch.from_numpy(self._tensors[name].to_float32()).to(self._device)

    def _bias(self, name: str) -> Array | None:
        return self._floats(f"{name}.bias") if f"{name}.bias" in self._tensors else None

    def _norm(self, name: str) -> Array:
        """Weights of hidden vectors, in operand order, zeros after their ends."""
        weights = self._floats(name)
        *rows, size = weights.shape
        whole = torch.zeros((*rows, padded(size)), device=self._device)
        whole[..., :size] = weights
        return to_operand_order(whole).contiguous()


class TernaryLoader(Loader):
    """The same for BitNet models: ternary matrices of the layers, and norms before projections."""

    def _layer(self, prefix: str, layer: Layer) -> LayerWeights:
        weights = super()._layer(prefix, layer)
        if layer.attention.output_norm is None or not self._has_mixer(prefix, layer):
            return weights
        return replace(weights, sub_norm=self._norm(f"{prefix}attn_sub_norm.weight"))

    def _feed_forward(self, prefix: str, part: Dense | Experts) -> DenseWeights | ExpertWeights:
        if isinstance(part, Experts):
            return ExpertLoader(self._tensors, self._device).load(part, prefix)
        return self._dense(prefix, part)

    def _dense(self, prefix: str, part: Dense, suffix: str = "") -> DenseWeights:
        weights = super()._dense(prefix, part, suffix)
        if part.inner_norm is None:
            return weights
        return replace(weights, sub_norm=self._norm(f"{prefix}ffn_sub_norm.weight"))

    def _joined(self, names: Sequence[str]) -> Linear:
        return self._ternary([(name, None) for name in names])

    def _hidden(self, name: str) -> Linear:
        return self._ternary([(name, self._in_operand_order(name))])

    def _gated(self, gate: str, up: str) -> Linear:
        """All gates, then all values."""
        return self._ternary([(name, self._in_operand_order(name)) for name in (gate, up)])

    def _in_operand_order(self, name: str) -> Array:
        size = self._tensors[f"{name}.weight"].shape[0]
        return _with_padding(operand_order(padded(size)), size)

    def _ternary(self, parts: Sequence[tuple[str, Array | None]]) -> Linear:
        """One GEMM of several matrices, each in the order of its rows; a segment for each run of
        matrices of one form."""
        matrices = [pack(self._tensors[f"{name}.weight"], self._device) for name, _ in parts]
        ordered = [
            matrix if rows is None else in_order(matrix, rows)
            for matrix, (_, rows) in zip(matrices, parts, strict=True)
        ]
        segments: list[Segment] = []
        first_row = 0
        for _, run in groupby(ordered, key=lambda matrix: matrix.block_scales is None):
            planes = planes_of(list(run))
            segments.append(Segment(planes, first_row, None))
            first_row += planes.num_rows
        scales = tuple(
            float(np.float32(matrix.scale) * np.float32(self._own_scale(name)))
            for matrix, (name, _) in zip(matrices, parts, strict=True)
        )
        blocks = segments[0].planes.num_blocks
        splits = num_splits(first_row, blocks, _MIN_TERNARY_SPLIT_BLOCKS)
        return Linear(tuple(segments), first_row, splits, scales=scales)


def load_weights(spec: ModelSpec, tensors: Mapping[str, Tensor], device: str) -> ModelWeights:
    is_ternary = is_ternary_model(spec, tensors)
    return (TernaryLoader if is_ternary else Loader)(spec, tensors, device).load()


def _projected(part: Attention) -> tuple[str, ...]:
    """What a layer's attention makes of its input, in one GEMM: queries, keys and values of its
    own, and last the gate of what it leaves; latent attention what these are made of."""
    if part.latent is not None:
        return "q" if part.latent.query_rank is None else "q_a", "kv_a_mqa"
    gate = ("gate",) if part.has_output_gate else ()
    if part.kv_layer is not None:
        return ("q", *gate)
    return ("q", "k", *gate) if part.has_key_values else ("q", "k", "v", *gate)


def _with_padding(rows: Array, size: int, zero_row: int | None = None) -> Array:
    """Rows past the last are the row of zeros."""
    return torch.where(rows < size, rows, size if zero_row is None else zero_row)


def _linear(segments: Sequence[Segment], num_rows: int) -> Linear:
    splits = num_splits(num_rows, segments[0].planes.num_blocks)
    return Linear(tuple(segments), num_rows, splits)
