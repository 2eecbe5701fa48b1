"""ReferenceExecutor: numpy float32, a row at a time; what all other executors are tested against.

The Decoder is the mathematics of a ModelSpec, written plainly. A row of it is one token at one
position. It is computed alone, in arrays whose shapes depend on the spec and its position only:
products are matrix times vector, because a matrix product may add in another order for another
number of rows. So a row's bits are the same in any batch, in any chunk, and when it is computed
again.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.clock import Clock
from quire.core.errors import RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, TokenLogprob, Want
from quire.core.progress import WEIGHTS, reported
from quire.executors.base import (
    BLOCK_SIZE,
    HIDDEN_NOT_FINITE,
    LOGITS_NOT_FINITE,
    NO_SAMPLING,
    model_capacity,
)
from quire.executors.sampler import sample, score
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor
from quire.loader.tensor import Tensor
from quire.model.kv_layout import KVLayout, one_group
from quire.model.loading import Model
from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Latent,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    PositionScale,
    Router,
    Scoring,
    layer_shapes,
    takes_bytes_by_token,
)
from quire.model.states import StateKind, StateMixer

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.intp]
KVPrecision = Literal["float32", "float16", "bfloat16", "int8", "fp8"]

INT8_MAX, E4M3_MAX = 127.0, 448.0  # the largest codes of keys and values in bytes
_SMALLEST_QUANTISED = np.float32(1e-35)
_UNIT_EPSILON = 1e-6  # of vectors that are made one long

_ALIGNMENT = 64  # bytes
# Few enough that BLAS keeps a product on one thread: its sums may change with their number, and on
# a busy machine its threads wait for each other far longer than they compute.
_WEIGHTS_AT_ONCE = 1 << 18


class States:
    """The states of sequences, in numbered slots: of each layer that keeps one."""

    def __init__(self, spec: ModelSpec, num_states: int) -> None:
        self._layers = {
            layer: np.zeros((num_states, part.num_elements), np.float32)
            for layer, part in spec.states.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._layers.values())

    def read(self, layer: int, slot: int) -> Floats:
        """A copy; zeros before the first token."""
        array = self._layers[layer]
        return np.zeros(array.shape[1], np.float32) if slot < 0 else array[slot].copy()

    def write(self, layer: int, slot: int, state: Floats) -> None:
        self._layers[layer][slot] = state


class KVBlocks:
    """Keys and values of every layer in blocks; a slot is the index of one token in them.

    Latent attention has one key a token, and its values are the first part of it.

    They are floats; those of a cache in halves or bytes (`precision`) are rounded when they are
    written.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        precision: KVPrecision = "float32",
    ) -> None:
        self.block_size = block_size
        self.groups = layout.groups  # of each layer
        self._rounded = _ROUNDING[precision]
        self._memory: list[Floats] = []  # [blocks, numbers], of keys and of values of each slot
        self.keys = self._layers(spec, layout, num_blocks, lambda part: _kv_shapes(part)[0])
        self.values = self._layers(spec, layout, num_blocks, lambda part: _kv_shapes(part)[1])

    def _layers(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        num_blocks: int,
        shape_of: Callable[[Attention], tuple[int, int]],
    ) -> dict[int, Floats]:
        """The blocks of each layer in its slot: [blocks, block_size, kv_heads, head_dim] each."""
        sizes = layout.slot_sizes(spec, lambda part: math.prod(shape_of(part)))
        slots = [np.zeros((num_blocks, self.block_size * size), np.float32) for size in sizes]
        self._memory += slots
        layers = {}
        for layer, part in spec.attentions.items():
            shape = shape_of(part)
            own = slots[layout.slots[layer]][:, : self.block_size * math.prod(shape)]
            layers[layer] = own.reshape(num_blocks, self.block_size, *shape)
        return layers

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._memory)

    def copy(self, source: int, target: int) -> None:
        for array in self._memory:
            array[target] = array[source]

    def slots(self, block_table: Sequence[int], end: int) -> Slots:
        """The slots of positions 0 to `end` of the sequence that has this table."""
        blocks = np.array(block_table[: -(-end // self.block_size)], dtype=np.intp)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()[:end]

    def write(self, layer: int, slot: int, key: Floats, value: Floats) -> None:
        block, offset = divmod(slot, self.block_size)
        self.keys[layer][block, offset] = self._rounded(key)
        self.values[layer][block, offset] = self._rounded(value)

    def read(self, layer: int, slots: Slots) -> tuple[Floats, Floats]:
        """Keys and values at these slots alone: [context, kv_heads, head_dim] each."""
        return _gather(self.keys[layer], slots), _gather(self.values[layer], slots)


def _kv_shapes(part: Attention) -> tuple[tuple[int, int], tuple[int, int]]:
    """What one token leaves in the cache: of keys and of values."""
    if part.kv_layer is not None:
        return (0, 0), (0, 0)
    if part.latent is not None:
        return (1, part.latent.kv_rank + part.latent.rope_dims), (0, 0)
    return (part.num_kv_heads, part.head_dim), (part.num_kv_heads, part.value_dim)


class Cache(NamedTuple):
    """What sequences keep."""

    blocks: KVBlocks
    states: States


def kv_token_bytes(spec: ModelSpec, layout: KVLayout) -> int:
    """Bytes of one token in a block: the slots of a group."""
    keys = layout.token_size(spec, lambda part: math.prod(_kv_shapes(part)[0]))
    values = layout.token_size(spec, lambda part: math.prod(_kv_shapes(part)[1]))
    return 4 * (keys + values)


class Linear(NamedTuple):
    """weight · x, times the scale, plus the bias: for one vector.

    BitNet's matrices take activations of one byte with one scale for the vector, as they are
    trained. Where all weights of the matrix share their scale, that product is a sum of integers
    below 2^24, so exact in any order.
    """

    weight: Floats  # [out, in]; ternary: in units of unit_scale
    bias: Floats | None = None
    scale: Floats | None = None  # [1]
    unit_scale: np.float32 | None = None  # None: not ternary

    def __call__(self, x: Floats) -> Floats:
        if self.unit_scale is None:
            product = self._dot(_aligned_copy(x))
        else:
            codes, per_unit = quantised_by_token(x)
            product = self._dot(codes) / per_unit * self.unit_scale
        if self.scale is not None:
            product = product * self.scale
        return product if self.bias is None else product + self.bias

    def _dot(self, x: Floats) -> Floats:
        product: Floats = np.empty(len(self.weight), np.float32)
        step = max(1, _WEIGHTS_AT_ONCE // len(x))
        for start in range(0, len(product), step):
            np.dot(self.weight[start : start + step], x, out=product[start : start + step])
        return product


def quantised_by_token(x: Floats) -> tuple[Floats, np.float32]:
    """A vector as integers from -128 to 127, and how many of them make 1."""
    per_unit = np.float32(127.0 / max(1e-5, float(np.max(np.abs(x)))))
    # Half away from zero: bitnet.cpp rounds a product that was not rounded to a float before, so
    # that few of its products are exactly half.
    sizes = np.floor(np.abs(x * per_unit) + np.float64(0.5))
    codes = np.clip(np.copysign(sizes, x), -128, 127)
    return _aligned_copy(codes.astype(np.float32)), per_unit


class Angles(NamedTuple):
    """By which a position rotates the pairs of a head: [rope dims / 2] each."""

    cosines: Floats
    sines: Floats


@dataclass(slots=True)
class Row:
    """One token: its hidden state, and what it attends to."""

    state: Floats  # [hidden]
    slots: tuple[Slots, ...]  # of each group: of every position up to its own, [position + 1]
    angles: tuple[Angles, ...]  # one for each of the spec's ropes
    states: tuple[int, ...] = ()  # slots: of the state before it, and of that after it
    layer_inputs: Floats | None = None  # [layers, size]

    @property
    def position(self) -> int:
        return len(self.slots[0]) - 1

    def slot(self, group: int) -> int:
        return int(self.slots[group][-1])

    def seen(self, part: Attention, group: int) -> Slots:
        """The slots it attends to: its own and those before it, within window or chunk."""
        slots = self.slots[group]
        if part.window is None:
            return slots
        if part.is_chunked:
            return slots[self.position // part.window * part.window :]
        return slots[-part.window :]


class Decoder:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        norms = [f"{x}_norm.{y}" for x in ("output", "token_embd") for y in ("weight", "bias")]
        weights = _Weights(spec, tensors, "", norms)
        self._embedding_norm = weights.norm("token_embd_norm", spec.embedding_norm)
        self.embedding = _decoded(tensors["token_embd.weight"])
        self._embedding_scale = np.float32(spec.embedding_scale)
        positions = tensors.get("position_embd.weight")
        self._positions = None if positions is None else _decoded(positions)
        self._output_norm = weights.norm("output_norm", spec.output_norm)
        head = self.embedding if spec.tied_head else _decoded(tensors["output.weight"])
        bias = _decoded(tensors["output.bias"]) if spec.head_bias else None
        self._head = Linear(head, bias)
        indices = reported(WEIGHTS, range(spec.num_layers))
        self._layers = [_Layer(spec, tensors, index) for index in indices]
        self._layer_inputs = None if spec.layer_inputs is None else _LayerInputs(spec, tensors)
        self._ropes = [(rope.frequencies(), rope.magnitude) for rope in spec.ropes]
        self._small_bytes = weights.num_bytes

    @property
    def weight_bytes(self) -> int:
        tied = 0 if self.spec.tied_head else self._head.weight.nbytes
        tied += 0 if self._head.bias is None else self._head.bias.nbytes
        layers = sum(layer.weight_bytes for layer in self._layers)
        inputs = 0 if self._layer_inputs is None else self._layer_inputs.weight_bytes
        positions = 0 if self._positions is None else self._positions.nbytes
        return self.embedding.nbytes + positions + self._small_bytes + tied + layers + inputs

    def row(self, token: int, slots: tuple[Slots, ...], states: tuple[int, ...] = ()) -> Row:
        """The token at the last of these slots of each group."""
        state = self.embedding[token].copy()
        if self.spec.embedding_scale != 1.0:
            state *= self._embedding_scale
        if self._positions is not None:
            state += self._positions[len(slots[0]) - 1]
        state = self._embedding_norm(state)
        row = Row(state, slots, tuple(self._angles(len(slots[0]) - 1)), states)
        if self._layer_inputs is not None:
            row.layer_inputs = self._layer_inputs(token, state)
        return row

    def _angles(self, position: int) -> Iterator[Angles]:
        for frequencies, magnitude in self._ropes:
            angles = position * frequencies
            yield Angles(
                (np.cos(angles) * magnitude).astype(np.float32),
                (np.sin(angles) * magnitude).astype(np.float32),
            )

    def run(self, rows: Sequence[Row], cache: "Cache", checkpoint: Callable[[], None]) -> None:
        """Take all rows through all layers, calling `checkpoint` before each.

        Layers are the outer loop, so that a matrix is fetched from memory once for all rows. All
        keys of a layer are written before any is read: rows of one chunk see those before them.
        """
        for layer in self._layers:
            checkpoint()
            layer.run(rows, cache)

    def final_state(self, row: Row) -> Floats:
        """The state after the last norm: what is pooled, and what logits are computed from."""
        return self._output_norm(row.state)

    def logits(self, row: Row) -> Floats:
        logits = self._head(self.final_state(row))
        if self.spec.logit_scale != 1.0:
            logits = logits * np.float32(self.spec.logit_scale)
        return soft_capped(logits, self.spec.logit_soft_cap)


NormFunction = Callable[[Floats], Floats]


class _Weights:
    """The decoded tensors under one prefix, as parts of a layer ask for them."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], prefix: str, names: Iterable[str]
    ) -> None:
        self._spec = spec
        self._arrays = {
            name: _decoded(tensors[prefix + name]) for name in names if prefix + name in tensors
        }
        self._formats = {name: tensors[prefix + name].format for name in self._arrays}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def array(self, name: str) -> Floats:
        return self._arrays[name]

    def get(self, name: str) -> Floats | None:
        return self._arrays.get(name)

    def linear(self, name: str, *, has_scale: bool = True) -> Linear:
        array = self._arrays[f"{name}.weight"]
        scale = self.get(f"{name}.scale") if has_scale else None
        extras = self.get(f"{name}.bias"), scale
        is_rounded = takes_bytes_by_token(self._spec, self._formats[f"{name}.weight"])
        weight, unit_scale = _units(array) if is_rounded else (array, None)
        return Linear(weight, *extras, unit_scale)

    def linears(self, name: str) -> list[Linear]:
        """Of a tensor that stacks several: one for each expert, or each head."""
        bias = self.get(f"{name}.bias")
        stacked = self._arrays[f"{name}.weight"]
        return [
            Linear(_aligned_copy(weight), None if bias is None else bias[index])
            for index, weight in enumerate(stacked)
        ]

    def norm(self, name: str, norm: Norm | None) -> NormFunction:
        """The norm as a function; where there is none, of what it is given."""
        if norm is None:
            return lambda x: x
        weight, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        if norm.kind is NormKind.LAYER:
            return lambda x: layer_norm(x, weight, bias, norm.epsilon)
        return lambda x: rms_norm(x, weight, norm.epsilon)


class _LayerInputs:
    """The vectors that gemma4's layers get of a token."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        assert spec.layer_inputs is not None
        names = ("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm")
        weights = _Weights(spec, tensors, "", [f"{name}.weight" for name in names])
        self.weight_bytes = weights.num_bytes
        self._size = spec.layer_inputs.size
        self._embedding = weights.array("per_layer_token_embd.weight")
        self._projection = weights.linear("per_layer_model_proj")
        self._projection_scale = np.float32(spec.hidden_size**-0.5)
        self._norm = weights.norm("per_layer_proj_norm", spec.layer_inputs.norm)

    def __call__(self, token: int, state: Floats) -> Floats:
        own = self._embedding[token].reshape(-1, self._size) * np.float32(self._size**0.5)
        projected = self._projection(state) * self._projection_scale
        both: Floats = self._norm(projected.reshape(-1, self._size)) + own
        return both * np.float32(0.5**0.5)


class _Layer:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], index: int) -> None:
        layer = self._layer = spec.layers[index]
        weights = _Weights(spec, tensors, f"blk.{index}.", layer_shapes(spec, index))
        self.weight_bytes = weights.num_bytes
        self._mixers = _mixers(spec, index, weights)
        feed = layer.feed_forward
        self._feed_forward = None if feed is None else _feed_forward(feed, weights)
        self._mixer_norm = weights.norm("attn_norm", layer.mixer_norm)
        self._mixer_output_norm = weights.norm("post_attention_norm", layer.mixer_output_norm)
        self._feed_norm = weights.norm("ffn_norm", layer.feed_forward_norm)
        self._feed_output_norm = weights.norm("post_ffw_norm", layer.feed_forward_output_norm)
        self._index, self._inputs = index, spec.layer_inputs
        if self._inputs is not None:
            self._input_gate, self._input = weights.linear("inp_gate"), weights.linear("proj")
            self._input_norm = weights.norm("post_norm", self._inputs.norm)
        self._output_scale = weights.get("layer_output_scale.weight")

    def run(self, rows: Sequence[Row], cache: "Cache") -> None:
        if self._mixers:
            self._mix(rows, cache)
        for row in rows:
            if self._feed_forward is not None and not self._layer.is_parallel:
                made = self._feed_forward(self._feed_norm(row.state), row.state)
                row.state = row.state + self._scaled(self._feed_output_norm(made))
            self._finish(row)

    def _mix(self, rows: Sequence[Row], cache: "Cache") -> None:
        """And the feed-forward, where it is beside."""
        normed = [self._mixer_norm(row.state) for row in rows]
        made = [mixer.run(rows, normed, cache) for mixer in self._mixers]
        for row, x, parts in zip(rows, normed, zip(*made, strict=True), strict=True):
            mixed = self._mixer_output_norm(sum(parts[1:], parts[0]))
            if self._feed_forward is not None and self._layer.is_parallel:
                own = x if self._layer.feed_forward_norm is None else self._feed_norm(row.state)
                mixed = mixed + self._feed_output_norm(self._feed_forward(own, row.state))
            row.state = row.state + self._scaled(mixed)

    def _finish(self, row: Row) -> None:
        if self._inputs is not None:
            assert row.layer_inputs is not None
            gate = _ACTIVATIONS[self._inputs.activation](self._input_gate(row.state))
            made = self._input(gate * row.layer_inputs[self._index])
            row.state = row.state + self._input_norm(made)
        if self._output_scale is not None:
            row.state = row.state * self._output_scale

    def _scaled(self, x: Floats) -> Floats:
        scale = self._layer.residual_scale
        return x if scale == 1.0 else x * np.float32(scale)


def _mixers(spec: ModelSpec, index: int, weights: _Weights) -> "list[_Attention | _Convolution]":
    layer = spec.layers[index]
    found: list[_Attention | _Convolution] = []
    if isinstance(layer.mixer, Attention):
        kind = _Attention if layer.mixer.latent is None else _LatentAttention
        found.append(kind(spec, index, weights))
    if layer.state is not None:
        kinds = {StateKind.CONVOLUTION: _Convolution, StateKind.MAMBA_1: _Selective}
        state = kinds.get(layer.state.kind, _Recurrence)
        found.append(state(layer.state, index, weights))
    return found


class _Convolution:
    """A short convolution of one layer, and what multiplies it before and after."""

    def __init__(self, part: StateMixer, index: int, weights: _Weights) -> None:
        self._part, self._index = part, index
        self._input, self._output = weights.linear("ssm_in"), weights.linear("ssm_out")
        self._taps = _aligned_copy(weights.array("ssm_conv1d.weight").T)  # [kernel, channels]
        self._bias = weights.get("ssm_conv1d.bias")

    def run(
        self, rows: Sequence[Row], normed: Sequence[Floats], cache: "Cache"
    ) -> Iterator[Floats]:
        """What each row makes of its input; the states after them are written. The rows of a
        sequence follow each other, and each begins with the state that the one before it left."""
        for row, x in zip(rows, normed, strict=True):
            source, target = row.states
            state = cache.states.read(self._index, source)
            yield self._step(x, state)
            cache.states.write(self._index, target, state)

    def _step(self, x: Floats, state: Floats) -> Floats:
        """One token: its output, and the state after it in the place of the state before it."""
        before, after, own = np.split(self._input(x), 3)
        return self._output(after * self._convolved(before * own, state))

    def _convolved(self, inputs: Floats, state: Floats) -> Floats:
        """The sum over the last tokens in their order, this one last; it joins the state."""
        part = self._part
        past = state[: part.num_convolved].reshape(part.kernel - 1, part.num_channels)
        total: Floats = np.zeros(part.num_channels, np.float32)
        for tap, seen in zip(self._taps, (*past, inputs), strict=True):
            total = total + tap * seen
        past[:-1], past[-1] = past[1:].copy(), inputs
        return total if self._bias is None else total + self._bias


class _Recurrence(_Convolution):
    """Gated DeltaNet or Mamba 2 of one layer."""

    def __init__(self, part: StateMixer, index: int, weights: _Weights) -> None:
        super().__init__(part, index, weights)
        self._is_delta_net = part.kind is StateKind.DELTA_NET
        self._gate, self._alpha = weights.linear("ssm_gate"), weights.linear("ssm_alpha")
        self._beta = weights.linear("ssm_beta") if self._is_delta_net else None
        self._a, self._dt = weights.array("ssm_a.weight"), weights.array("ssm_dt.bias")
        self._d = weights.get("ssm_d.weight")
        self._norm = weights.get("ssm_norm.weight")

    def _step(self, x: Floats, state: Floats) -> Floats:
        part = self._part
        convolved = _silu(self._convolved(self._input(x), state))
        query_at, key_at, value_at = part.channel_offsets
        queries, keys = (
            convolved[start : start + part.group_size].reshape(part.num_groups, part.key_dim)
            for start in (query_at, key_at)
        )
        values = convolved[value_at : value_at + part.output_size].reshape(part.num_heads, -1)
        steps = _softplus(self._alpha(x) + self._dt)
        decays = np.exp(self._a * steps)
        if self._beta is not None:
            queries, keys = _unit(queries) * np.float32(part.key_dim**-0.5), _unit(keys)
            steps = _sigmoid(self._beta(x))
        matrices = state[part.num_convolved :].reshape(-1, part.key_dim, part.value_dim)
        heads = np.empty((part.num_heads, part.value_dim), np.float32)
        for head in range(part.num_heads):
            group, matrix = part.group_of(head), matrices[head]
            matrix *= decays[head]
            value = values[head]
            if self._is_delta_net:
                value = value - _row_sum(matrix, keys[group])
            matrix += np.outer(keys[group], value * steps[head])
            heads[head] = _row_sum(matrix, queries[group])
            if self._d is not None:
                heads[head] += self._d[head] * values[head]
        return self._output(self._gated(heads, self._gate(x)))

    def _gated(self, heads: Floats, gate: Floats) -> Floats:
        """DeltaNet's heads are normed each, then gated; Mamba's are gated, then normed by group."""
        part = self._part
        if self._norm is None:
            return heads.ravel() * _silu(gate)
        if self._is_delta_net:
            return rms_norm(heads, self._norm, part.norm_epsilon).ravel() * _silu(gate)
        groups = (heads.ravel() * _silu(gate)).reshape(part.num_groups, -1)
        return rms_norm(groups, None, part.norm_epsilon).ravel() * self._norm


class _Selective(_Convolution):
    """Mamba 1 of one layer."""

    def __init__(self, part: StateMixer, index: int, weights: _Weights) -> None:
        super().__init__(part, index, weights)
        self._gate, self._made = weights.linear("ssm_gate"), weights.linear("ssm_x")
        self._alpha = weights.linear("ssm_dt")
        self._a = _aligned_copy(weights.array("ssm_a.weight").T)  # [keys, values]
        self._d = weights.array("ssm_d.weight")
        self._norms = [weights.get(f"ssm_{x}_norm.weight") for x in ("dt", "b", "c")]

    def _step(self, x: Floats, state: Floats) -> Floats:
        part = self._part
        values = _silu(self._convolved(self._input(x), state))
        made = self._made(values)
        ends = (part.step_rank, part.step_rank + part.key_dim)
        low, keys, queries = (
            self._normed(vector, weight)
            for vector, weight in zip(np.split(made, ends), self._norms, strict=True)
        )
        steps = _softplus(self._alpha(low))
        matrix = state[part.num_convolved :].reshape(part.key_dim, part.value_dim)
        matrix *= np.exp(self._a * steps)
        matrix += np.outer(keys, values * steps)
        left = _row_sum(matrix, queries) + self._d * values
        return self._output(left * _silu(self._gate(x)))

    def _normed(self, vector: Floats, weight: Floats | None) -> Floats:
        part = self._part
        return rms_norm(vector, weight, part.norm_epsilon) if part.has_step_norms else vector


def _row_sum(matrix: Floats, factors: Floats) -> Floats:
    """The sum of a matrix's rows, each times its factor, in their order."""
    total: Floats = np.add.reduce(matrix * factors[:, None], axis=0)
    return total


def _unit(vectors: Floats) -> Floats:
    """Of length 1 each."""
    squares = np.float32(np.sum(np.square(vectors), axis=-1, keepdims=True, dtype=np.float64))
    scaled: Floats = vectors * (np.float32(1.0) / np.sqrt(squares + np.float32(_UNIT_EPSILON)))
    return scaled


def _softplus(x: Floats) -> Floats:
    made: Floats = np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, np.float32(20.0)))))
    return made


class _Attention:
    """Attention of one layer, a row at a time."""

    def __init__(self, spec: ModelSpec, index: int, weights: _Weights) -> None:
        part = self._part = spec.layers[index].attention
        self._index = index
        self._kv_layer = index if part.kv_layer is None else part.kv_layer
        self._rope_index = None if part.rope is None else spec.ropes.index(part.rope)
        self._scale = np.float32(part.scale)
        self._output = weights.linear("attn_output")
        self._slopes = np.array(part.alibi_slopes, np.float32)
        self._sinks = weights.get("attn_sinks.weight")
        self._output_norm = weights.norm("attn_sub_norm", part.output_norm)
        self._gate = weights.linear("attn_gate") if part.has_output_gate else None
        self._load(weights)

    def run(
        self, rows: Sequence[Row], normed: Sequence[Floats], cache: "Cache"
    ) -> Iterator[Floats]:
        """What each row makes of what it sees, once all keys and values are written."""
        pairs = list(zip(rows, normed, strict=True))
        queries = [self.project(row, x, cache.blocks) for row, x in pairs]
        for (row, x), query in zip(pairs, queries, strict=True):
            heads = self.attend(row, query, cache.blocks)
            if self._gate is not None:
                heads = heads * _sigmoid(self._gate(x))
            yield self._output(self._output_norm(heads))

    def _load(self, weights: _Weights) -> None:
        part = self._part
        norm = None if part.qk_norm is None else part.qk_norm.norm
        self._query = weights.linear("attn_q")
        self._query_norm = weights.norm("attn_q_norm", norm)
        if part.kv_layer is None:
            self._key = weights.linear("attn_k")
            self._value = self._key if part.has_key_values else weights.linear("attn_v")
            self._key_norm = weights.norm("attn_k_norm", norm)
            self._value_norm = weights.norm("attn_v_norm", part.value_norm)

    def project(self, row: Row, x: Floats, blocks: KVBlocks) -> Floats:
        """Write the row's key and value; its query, [heads, head_dim]."""
        part = self._part
        query = self._turned(self._query(x), part.num_heads, self._query_norm, row)
        if part.kv_layer is None:
            key = self._turned(self._key(x), part.num_kv_heads, self._key_norm, row)
            value = self._value(x).reshape(part.num_kv_heads, part.value_dim)
            slot = row.slot(blocks.groups[self._index])
            blocks.write(self._index, slot, key, self._value_norm(value))
        if part.position_scale is not None:
            query = query * position_scale(part.position_scale, row.position)
        return query

    def attend(self, row: Row, query: Floats, blocks: KVBlocks) -> Floats:
        """What all heads leave of what the row sees."""
        part = self._part
        seen = row.seen(part, blocks.groups[self._kv_layer])
        keys, values = blocks.read(self._kv_layer, seen)
        # Query heads of one group share a kv head: [kv_heads, group, head_dim].
        grouped = query.reshape(part.num_kv_heads, -1, part.head_dim)
        scores = np.matmul(grouped, keys.transpose(1, 2, 0)) * self._scale
        scores = soft_capped(scores, part.soft_cap)
        if part.alibi:
            distances = np.arange(1 - len(seen), 1, dtype=np.float32)
            scores = scores + self._slopes.reshape(part.num_kv_heads, -1, 1) * distances
        sinks = None if self._sinks is None else self._sinks.reshape(part.num_kv_heads, -1, 1)
        heads: Floats = np.matmul(softmax(scores, sinks), values.transpose(1, 0, 2))
        return heads.ravel()

    def _turned(self, projected: Floats, num_heads: int, norm: NormFunction, row: Row) -> Floats:
        """Queries or keys by head, normed and with rope."""
        part = self._part
        is_after = part.qk_norm is not None and part.qk_norm.is_after_rope
        is_whole = part.qk_norm is not None and part.qk_norm.span is NormSpan.PROJECTION
        if is_whole:
            projected = norm(projected)
        heads = projected.reshape(num_heads, part.head_dim)
        if not is_after and not is_whole:
            heads = norm(heads)
        heads = self._with_rope(heads, row)
        return norm(heads) if is_after else heads

    def _with_rope(self, heads: Floats, row: Row) -> Floats:
        if self._rope_index is None or self._part.rope is None:
            return heads
        return apply_rope(heads, *row.angles[self._rope_index], self._part.rope.interleaved)


class _LatentAttention(_Attention):
    """The key's matrix is applied to the query and the value's to the attention output, so that
    the cache's vectors are used as they are."""

    def _load(self, weights: _Weights) -> None:
        part, latent = self._part, _latent(self._part)
        self._is_split = latent.query_rank is not None
        self._query_a = weights.linear("attn_q_a") if self._is_split else None
        self._query_norm = weights.norm("attn_q_a_norm", latent.norm)
        self._query = weights.linear("attn_q_b" if self._is_split else "attn_q")
        self._key_value = weights.linear("attn_kv_a_mqa")
        self._key_norm = weights.norm("attn_kv_a_norm", latent.norm)
        self._key_heads = weights.linears("attn_k_b")  # [kv_rank, head_dim - rope_dims] each
        self._value_heads = weights.linears("attn_v_b")  # [value_dim, kv_rank] each
        self._plain_dims = part.head_dim - latent.rope_dims

    def project(self, row: Row, x: Floats, blocks: KVBlocks) -> Floats:
        """Write the row's vector and its rotated key; its query against these, [heads, ...]."""
        part, latent = self._part, _latent(self._part)
        if self._query_a is not None:
            query = self._query(self._query_norm(self._query_a(x)))
        else:
            query = self._query(x)
        heads = query.reshape(part.num_heads, part.head_dim)
        rotated = self._with_rope(heads[:, self._plain_dims :], row)
        made = self._key_value(x)
        key = self._with_rope(made[None, latent.kv_rank :], row)
        vector = self._key_norm(made[: latent.kv_rank])
        whole = np.concatenate([vector[None], key], axis=1)
        slot = row.slot(blocks.groups[self._index])
        blocks.write(self._index, slot, whole, np.empty((0, 0), np.float32))
        plain = [
            linear(head)
            for linear, head in zip(self._key_heads, heads[:, : self._plain_dims], strict=True)
        ]
        query = np.concatenate([np.stack(plain), rotated], axis=1)
        if part.position_scale is not None:
            query = query * position_scale(part.position_scale, row.position)
        return query

    def attend(self, row: Row, query: Floats, blocks: KVBlocks) -> Floats:
        part, latent = self._part, _latent(self._part)
        seen = row.seen(part, blocks.groups[self._index])
        keys = blocks.read(self._index, seen)[0][:, 0]  # [context, kv_rank + rope_dims]
        scores = np.matmul(_aligned_copy(query), keys.T) * self._scale
        shares = softmax(soft_capped(scores, part.soft_cap))
        vectors = np.matmul(shares, _aligned_copy(keys[:, : latent.kv_rank]))
        heads = [linear(vector) for linear, vector in zip(self._value_heads, vectors, strict=True)]
        return np.concatenate(heads)


def _latent(part: Attention) -> Latent:
    assert part.latent is not None
    return part.latent


FeedForward = Callable[[Floats, Floats], Floats]  # of a row's normed state and its state


def _feed_forward(part: Dense | Experts, weights: _Weights) -> FeedForward:
    return _Dense(part, weights) if isinstance(part, Dense) else _Experts(part, weights)


class _Dense:
    def __init__(self, part: Dense, weights: _Weights, suffix: str = "") -> None:
        self._activation = part.activation
        self._numbers = weights.get("ffn_xielu.weight")
        self._gate = weights.linear(f"ffn_gate{suffix}") if part.is_gated else None
        self._up = weights.linear(f"ffn_up{suffix}")
        self._down = weights.linear(f"ffn_down{suffix}")
        self._inner_norm = weights.norm("ffn_sub_norm", part.inner_norm)

    def __call__(self, x: Floats, _state: Floats | None = None) -> Floats:
        if self._numbers is not None:
            product = xielu(self._up(x), self._numbers)
        elif self._gate is None:
            product = _ACTIVATIONS[self._activation](self._up(x))
        else:
            product = gated(self._activation, self._gate(x), self._up(x))
        return self._down(self._inner_norm(product))


class _Experts:
    """A row's sum runs over its experts in ascending order."""

    def __init__(self, part: Experts, weights: _Weights) -> None:
        self._part = part
        self._router = weights.linear("ffn_gate_inp", has_scale=part.router.input_norm is None)
        self._choice_bias = weights.get("exp_probs_b.bias")
        self._up, self._down = (weights.linears(f"ffn_{x}_exps") for x in ("up", "down"))
        self._gate = weights.linears("ffn_gate_exps") if part.is_gated else None
        names = [] if part.latent_size is None else ["ffn_latent_down", "ffn_latent_up"]
        self._latent = [weights.linear(name) for name in names]
        self._shared = None if part.shared is None else _Dense(part.shared, weights, "_shexp")
        gate = weights.get("ffn_gate_inp_shexp.weight")
        self._shared_gate = None if gate is None else Linear(gate[None])
        self._scales = weights.get("ffn_gate_inp.scale"), weights.get("ffn_down_exps.scale")
        self._router_norm = weights.norm("", part.router.input_norm)
        self._beside = None if part.beside is None else _Dense(part.beside, weights)
        self._beside_norm = weights.norm("post_ffw_norm_1", part.beside_norm)
        self._input_norm = weights.norm("pre_ffw_norm_2", part.beside_norm)
        self._output_norm = weights.norm("post_ffw_norm_2", part.beside_norm)

    def __call__(self, x: Floats, state: Floats) -> Floats:
        if self._beside is None:
            return self._routed(x, x)
        made = self._output_norm(self._routed(self._input_norm(state), state))
        return self._beside_norm(self._beside(x)) + made

    def _logits(self, seen: Floats) -> Floats:
        scale = self._scales[0]
        if scale is None:
            return self._router(seen)
        return self._router(self._router_norm(seen) * scale * np.float32(len(seen) ** -0.5))

    def _routed(self, x: Floats, seen: Floats) -> Floats:
        """What the experts make of `x`; the router looks at `seen`."""
        part = self._part
        chosen, shares = route(part, self._logits(seen), self._choice_bias)
        if self._scales[1] is not None:
            shares = shares * self._scales[1][chosen]
        taken = self._latent[0](x) if self._latent else x
        total = np.zeros(len(taken), np.float32)
        for expert, share in zip(chosen, shares, strict=True):
            entering = taken * share if part.router.weighs_input else taken
            product = self._up[expert](entering)
            if self._gate is None:
                product = _ACTIVATIONS[part.activation](product)
            else:
                product = gated(part.activation, self._gate[expert](entering), product)
            made = self._down[expert](product)
            total = total + (made if part.router.weighs_input else made * share)
        total = self._latent[1](total) if self._latent else total
        if self._shared is None:
            return total
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = shared * _sigmoid(self._shared_gate(x))
        return total + shared


def route(part: Experts, logits: Floats, choice_bias: Floats | None = None) -> tuple[Slots, Floats]:
    """The experts of a token in ascending order, and their weights. Of experts that are equally
    good the first is chosen."""
    router = part.router
    if router.scoring is Scoring.SPARSE_MIXER:
        return _mixed_sparsely(router, logits)
    scores = softmax(logits) if router.scoring is Scoring.SOFTMAX else _sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if router.num_groups > 1:
        choice = _in_best_groups(router, choice)
    best = np.argsort(-choice, kind="stable")[: part.num_used]
    chosen = np.sort(best)
    shares = scores[chosen]
    if router.normalises:
        shares = shares / shares.sum()
    return chosen, shares * np.float32(router.scale)


def _mixed_sparsely(router: Router, logits: Floats) -> tuple[Slots, Floats]:
    first, second = np.argsort(-logits, kind="stable")[:2]
    others = logits.copy()
    others[first] = -np.inf
    shares = {first: _share_among_near(logits, first), second: _share_among_near(others, second)}
    chosen = np.sort(np.array([first, second]))
    return chosen, np.array([shares[expert] for expert in chosen]) * np.float32(router.scale)


def _share_among_near(scores: Floats, expert: np.intp) -> np.float32:
    """Of a softmax over the scores near the expert's, which is the highest."""
    highest = scores[expert]
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = (highest - scores) / np.maximum(np.abs(scores), highest)
    near = np.isfinite(scores) & ~(distances > np.float32(0.02))
    return np.float32(1.0 / np.exp(scores[near] - highest).sum())


def _in_best_groups(router: Router, choice: Floats) -> Floats:
    """Minus infinity for the experts of other groups."""
    groups = choice.reshape(router.num_groups, -1)
    quality = np.sort(groups, axis=1)[:, -router.num_group_best :].sum(axis=1)
    best = np.argsort(-quality, kind="stable")[: router.num_used_groups]
    kept = np.full_like(groups, -np.inf)
    kept[best] = groups[best]
    return kept.ravel()


def position_scale(scale: PositionScale, position: int) -> np.float32:
    steps = (position + scale.offset) // scale.length
    return np.float32(1.0 + scale.factor * math.log(1 + steps))


def rms_norm(x: Floats, weight: Floats | None, epsilon: float) -> Floats:
    """Over the last axis."""
    mean = np.float32(np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float64))
    normed: Floats = x * (np.float32(1.0) / np.sqrt(mean + np.float32(epsilon)))
    return normed if weight is None else normed * weight


def layer_norm(x: Floats, weight: Floats | None, bias: Floats | None, epsilon: float) -> Floats:
    """Over the last axis."""
    centred = x - np.float32(np.mean(x, axis=-1, keepdims=True, dtype=np.float64))
    normed = rms_norm(centred, weight, epsilon)
    return normed if bias is None else normed + bias


def apply_rope(heads: Floats, cosines: Floats, sines: Floats, interleaved: bool) -> Floats:
    """Rotate the first 2 * len(cosines) dimensions of each head by their angles."""
    dims = 2 * len(cosines)
    if interleaved:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    else:
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
    rotated = heads.copy()
    rotated[:, first] = heads[:, first] * cosines - heads[:, second] * sines
    rotated[:, second] = heads[:, first] * sines + heads[:, second] * cosines
    return rotated


def soft_capped(x: Floats, cap: float) -> Floats:
    """Squeezed between -cap and cap; a cap of 0 is none."""
    return x if cap == 0.0 else np.float32(cap) * np.tanh(x / np.float32(cap))


def softmax(scores: Floats, sinks: Floats | None = None) -> Floats:
    """Over the last axis; a sink takes its share away."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    powers = np.exp(scores - highest)
    total = powers.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    shares: Floats = powers / total
    return shares


def _sigmoid(x: Floats) -> Floats:
    return np.float32(1.0) / (np.exp(-x) + np.float32(1.0))


def _silu(x: Floats) -> Floats:
    made: Floats = np.divide(x, np.exp(-x) + np.float32(1.0))
    return made


def _gelu(x: Floats) -> Floats:
    inner = x * np.float32(math.sqrt(0.5))
    erf = np.array([math.erf(value) for value in inner.tolist()], np.float32)
    made: Floats = np.float32(0.5) * x * (np.float32(1.0) + erf)
    return made


def _gelu_tanh(x: Floats) -> Floats:
    inner = (x + x * x * x * np.float32(0.044715)) * np.float32(math.sqrt(2 / math.pi))
    tanh: Floats = np.tanh(inner, dtype=np.float32)
    return np.float32(0.5) * x * (np.float32(1.0) + tanh)


def _relu2(x: Floats) -> Floats:
    return np.square(np.maximum(x, np.float32(0.0)))


def xielu(x: Floats, numbers: Floats) -> Floats:
    alpha, other_alpha, beta, epsilon = numbers
    with np.errstate(over="ignore"):
        below = (np.expm1(np.minimum(x, epsilon)) - x) * other_alpha
    made: Floats = np.where(x > 0, alpha * x * x, below) + beta * x
    return made


_ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU2: _relu2,
}
_CLAMP, _SLOPE = np.float32(7.0), np.float32(1.702)


def gated(activation: Activation, gate: Floats, up: Floats) -> Floats:
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = np.minimum(gate, _CLAMP), np.clip(up, -_CLAMP, _CLAMP)
        return gate * _sigmoid(gate * _SLOPE) * (up + np.float32(1.0))
    return _ACTIVATIONS[activation](gate) * up


def _to_float16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _to_bfloat16(x: Floats) -> Floats:
    """The nearest bfloat16, of two the even one; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nearest: Floats = (upper << np.uint32(16)).view(np.float32)
    return np.where(np.isnan(x), x, nearest)


def _to_bytes(x: Floats, largest_code: float, rounded: Callable[[Floats], Floats]) -> Floats:
    """Codes of one byte times a scale, one for each head's vector; NaN where a vector is not
    finite. Vectors too small for the scale's inverse become 0."""
    if x.size == 0:
        return x
    largest = np.abs(x).max(axis=-1, keepdims=True)
    divisor: Floats = np.where(largest < _SMALLEST_QUANTISED, np.float32(np.inf), largest)
    inverse: Floats = np.float32(largest_code) / divisor
    codes = rounded(x * inverse)
    scale = largest / np.float32(largest_code)
    return np.where(np.isfinite(largest), codes * scale, np.float32(np.nan))


def _to_e4m3(x: Floats) -> Floats:
    """The nearest number of three mantissa bits, of two the even one, within 2^-6 to 448 or in
    units of 2^-9."""
    exponents = np.maximum(np.frexp(x)[1], -5)
    units = np.ldexp(np.float32(1.0), exponents - 4)
    nearest: Floats = np.rint(x / units) * units
    return np.clip(nearest, -E4M3_MAX, E4M3_MAX)


# By the precision of keys and values: what is kept of them.
_ROUNDING: Mapping[KVPrecision, Callable[[Floats], Floats]] = {
    "float32": lambda x: x,
    "float16": _to_float16,
    "bfloat16": _to_bfloat16,
    "int8": lambda x: _to_bytes(x, INT8_MAX, np.rint),
    "fp8": lambda x: _to_bytes(x, E4M3_MAX, _to_e4m3),
}


def _units(weights: Floats) -> tuple[Floats, np.float32]:
    """Ternary weights in units of the scale that they share, or of 1 where they share none."""
    scales = np.unique(np.abs(weights[weights != 0]))
    if len(scales) != 1:
        return weights, np.float32(1.0)
    return _aligned_copy(np.sign(weights)), scales[0]


def _decoded(tensor: Tensor) -> Floats:
    return _aligned_copy(tensor.to_float32())


def _aligned(shape: tuple[int, ...]) -> Floats:
    """An array at a fixed alignment: BLAS may sum differently at another."""
    size = math.prod(shape) * 4
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(np.float32).reshape(shape)


def _aligned_copy(x: Floats) -> Floats:
    copy = _aligned(x.shape)
    copy[...] = x
    return copy


def _gather(layer: Floats, slots: Slots) -> Floats:
    """The tokens at these slots of one layer's blocks: [slots, kv_heads, head_dim]."""
    if not layer.flags.c_contiguous:  # its slot holds more for other layers
        return _aligned_copy(layer[slots // layer.shape[1], slots % layer.shape[1]])
    tokens = layer.reshape(layer.shape[0] * layer.shape[1], *layer.shape[2:])
    gathered = _aligned((len(slots), *tokens.shape[1:]))
    return np.take(tokens, slots, axis=0, out=gathered, mode="clip")  # "raise" would copy twice


# ---- the executor


class _Chunk(NamedTuple):
    """A sequence's new tokens, as rows of the decoder."""

    plan: SequencePlan
    rows: tuple[Row, ...]


class ReferenceExecutor(ThreadedExecutor):
    """Slow, plain and right. Weights are unpacked to float32 on construction.

    `kv_precision`: float32, or that of another executor's KV cache to be compared with. It
    takes as much memory as float32. `layout`: of the KV cache; None: one block table for all
    layers. `num_states`: slots for the states of sequences, of models that keep any; None: a few.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_batch_size: int = 64,
        max_step_tokens: int = 512,
        kv_precision: KVPrecision = "float32",
        layout: KVLayout | None = None,
        num_states: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        layout = layout or one_group(model.spec)
        num_states = model.spec.num_state_slots(num_states)
        capacity = model_capacity(
            model.spec,
            num_blocks,
            max_batch_size,
            max_step_tokens,
            block_size,
            layout.windows,
            num_states,
        )
        self._decoder = Decoder(model.spec, model.tensors)
        self._blocks = KVBlocks(model.spec, layout, num_blocks, block_size, kv_precision)
        self._cache = Cache(self._blocks, States(model.spec, num_states))
        super().__init__(
            capacity,
            "quire-reference",
            kernels=["numpy float32, one row at a time"],
            clock=clock,
        )

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        kept = self._blocks.num_bytes + self._cache.states.num_bytes
        return {"weights": self._decoder.weight_bytes, "kv": kept}

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        with np.errstate(all="ignore"):  # what is not finite is found in its row
            for copy in plan.copies:
                self._blocks.copy(copy.source, copy.target)
            chunks = [self._chunk(sequence) for sequence in plan.sequences]
            rows = [row for chunk in chunks if isinstance(chunk, _Chunk) for row in chunk.rows]
            self._decoder.run(rows, self._cache, flag.check)
            return RowResults(tuple(self._result(chunk) for chunk in chunks))

    # ---- one sequence

    def _chunk(self, plan: SequencePlan) -> _Chunk | SequenceResult:
        """The sequence's rows, or its fault."""
        try:
            self._check_row(plan, plan.end)
        except RowFaultError as error:
            return SequenceResult(plan.sequence_id, fault=str(error))
        tables = (plan.block_table, *plan.other_tables)
        slots = [self._blocks.slots(table, plan.end) for table in tables]
        rows = []
        states = plan.states
        for position, token in enumerate(plan.tokens, plan.start):
            seen = tuple(of_group[: position + 1] for of_group in slots)
            rows.append(self._decoder.row(token, seen, states))
            states = states[1:] * 2  # those after the first go on where the one before them ended
        return _Chunk(plan, tuple(rows))

    def _result(self, chunk: _Chunk | SequenceResult) -> SequenceResult:
        if isinstance(chunk, SequenceResult):
            return chunk
        try:
            return self._computed(chunk)
        except RowFaultError as error:
            return SequenceResult(chunk.plan.sequence_id, fault=str(error))

    def _computed(self, chunk: _Chunk) -> SequenceResult:
        plan, rows = chunk
        if not all(np.isfinite(row.state).all() for row in rows):
            raise RowFaultError(HIDDEN_NOT_FINITE)
        result = SequenceResult(plan.sequence_id, prompt_logprobs=self._prompt_scores(chunk))
        match plan.want:
            case Want.NOTHING:
                return result
            case Want.SAMPLE:
                assert plan.sampling is not None, NO_SAMPLING
                extras = plan.completion_position, plan.history, plan.mask()
                choice = sample(self._logits(rows[-1]), plan.sampling, *extras)
                return result._replace(token=choice.token, logprob=choice.logprob)
            case Want.LOGITS:
                return result._replace(logits=np.stack([self._logits(row) for row in rows]))
            case Want.POOLED:
                return result._replace(pooled=self._decoder.final_state(rows[-1]))
            case other:
                raise RowFaultError(f"there is no such want as {other!r}")

    def _prompt_scores(self, chunk: _Chunk) -> tuple[TokenLogprob, ...]:
        plan = chunk.plan
        return tuple(
            score(self._logits(row), target, plan.num_target_logprobs)
            for row, target in zip(chunk.rows, plan.prompt_targets, strict=False)
        )  # a prompt's last token has no target

    def _logits(self, row: Row) -> Floats:
        logits = self._decoder.logits(row)
        if not np.isfinite(logits).all():
            raise RowFaultError(LOGITS_NOT_FINITE)
        return logits
