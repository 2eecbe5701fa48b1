"""Decoder: a step's kernels in order, over buffers that never move, so that graphs can replay them.

A step is a body and a head: the body takes every token through all layers, the head computes logits
of some rows and the likeliest token of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton

from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda import attention as attentions
from quire.executors.cuda.attention import (
    SPLIT_SIZE,
    AttentionInput,
    LayerAttention,
    LayerCache,
    attention_for,
)
from quire.executors.cuda.expert_weights import ExpertWeights
from quire.executors.cuda.experts import ExpertRunner
from quire.executors.cuda.gemm import Gemm, factors, plane_pointers
from quire.executors.cuda.kernels import gates, layers, ternary
from quire.executors.cuda.kernels import gemm as gemm_kernels
from quire.executors.cuda.kernels.attention import TokenTiles
from quire.executors.cuda.kernels.latent import LatentShape, Rotation
from quire.executors.cuda.kernels.states import Chunks
from quire.executors.cuda.latent import LatentInput, LatentRunner, latent_groups, latent_shape
from quire.executors.cuda.planes import GATED_DIVISOR, Array, Planes, operand_order, padded
from quire.executors.cuda.states import LayerState, StateRunner, States, StateWeights
from quire.executors.cuda.weights import (
    BesideExperts,
    DenseWeights,
    LayerWeights,
    Linear,
    ModelWeights,
    NormWeights,
)
from quire.model.kv_layout import KVLayout
from quire.model.rope import Rope
from quire.model.spec import Activation, Attention, ModelSpec, NormKind
from quire.model.states import StateMixer

KVType = Literal["auto", "int8", "fp8"]  # auto: as exact as the model's other numbers

_BYTE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # fp8: the bits of an e4m3
_ROPE_HEADS = 8  # of a token, in one program
_ARGMAX_BLOCK = 8192
_SCALED_COLUMNS = 1024  # of a gated vector, at once
_GATE_BLOCK = 1024  # of what attention leaves, in one program
# Of a model without attention: its blocks hold nothing, and are numbered for prefixes alone.
_BARE_BLOCK_BYTES = 256 * BLOCK_SIZE
_NORM_COLUMNS = 128  # a warp, up to 32 warps
_TOKENS_THAT_FILL = 512  # and more fill the GPU with the tiles of any GEMM
_TOKENS_THAT_FILL_TERNARY = 128


class BodyField(IntEnum):
    """The first rows of BodyInput.fields. Those of tiles come last, in the order of TokenTiles.
    SLOT and TILE_TABLE are the first group's; each further group has a row of both behind these.
    Of models that keep states the rows of StateField come last."""

    TOKEN = 0
    SOURCE = 1  # index into the samples, or -1: the token is in TOKEN
    POSITION = 2
    SLOT = 3  # index into the cache: block * block size + position in the block; padding: -1
    TILE_ROW = 4
    TILE_COUNT = 5  # padding: 0
    TILE_POSITION = 6
    TILE_TABLE = 7
    TILE_START = 8


class StateField(IntEnum):
    """In the order of Chunks."""

    SEQUENCE = 0
    ROW = 1
    COUNT = 2
    SOURCE = 3
    TARGET = 4


@dataclass(frozen=True, slots=True, eq=False)
class BodyInput:
    """What the body reads about its tokens, int32."""

    fields: Array  # [num_fields(groups, has_states), tokens]
    tables: Array  # block tables of all groups, one after the other

    def slots(self, group: int) -> Array:
        """Where a group's layers keep the tokens."""
        return self.fields[group_field(BodyField.SLOT, group)]

    def tiles(self, group: int) -> TokenTiles:
        first = TokenTiles(*self.fields[BodyField.TILE_ROW : len(BodyField)])
        return first._replace(tables=self.fields[group_field(BodyField.TILE_TABLE, group)])

    @property
    def chunks(self) -> Chunks:
        """Of a model that keeps states."""
        return Chunks(*self.fields[-len(StateField) :])


def num_fields(num_groups: int, *, has_states: bool = False) -> int:
    return len(BodyField) + 2 * (num_groups - 1) + has_states * len(StateField)


def group_field(field: BodyField, group: int) -> int:
    """The row of a group's SLOT or TILE_TABLE."""
    return num_fields(group) + (field is BodyField.TILE_TABLE) if group else field


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What a graph of the body is captured for. `num_splits`: splits of the context, each with a
    program of its own; 0: one program computes all splits."""

    num_tokens: int
    num_splits: int


@dataclass(frozen=True, slots=True, eq=False)
class RopeTables:
    """By position, float32."""

    cosines: Array  # [positions, rope dims / 2]
    sines: Array


@dataclass(frozen=True, slots=True, eq=False)
class LoweredAttention:
    """A layer's attention as its launches take it."""

    group: int  # whose block tables it reads
    slot: int  # of its keys and values in a block
    weights: LayerWeights
    rope: RopeTables
    query_scales: Array | None  # by position, float32
    rope_shape: layers.RopeShape
    latent_shape: LatentShape | None
    options: LayerAttention
    attend: attentions.Attention
    output_size: int  # numbers that it leaves for the output projection
    epsilon: float  # of the norms of queries and keys
    has_output_gate: bool  # on what it leaves


@dataclass(frozen=True, slots=True, eq=False)
class LoweredState:
    """A layer's state as its launches take it."""

    part: StateMixer
    weights: StateWeights
    input: Linear  # what it takes of a token, and gates
    output: Linear
    slots: LayerState


@dataclass(frozen=True, slots=True, eq=False)
class LoweredLayer:
    """A layer as its launches take it: what it mixes with, if anything, and its weights."""

    index: int
    weights: LayerWeights
    attention: LoweredAttention | None
    state: LoweredState | None
    is_parallel: bool
    residual_scale: float


class Added(NamedTuple):
    """What a half of a layer left in `_sums`; the next norm adds it to the hidden states."""

    num_splits: int  # [split, token, column], added in order
    linear: Linear | None = None  # what made it, where one linear did
    norm: NormWeights | None = None  # of it, before it is added
    scale: float = 1.0  # of it, after that norm
    state_scale: float = 1.0  # of the hidden states, after it is added


@dataclass(frozen=True, slots=True, eq=False)
class _TernarySource:
    """What a launch of `norm_and_quantize` reads."""

    kind: int
    pointers: ternary.Source


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step there will be."""

    num_tokens: int
    num_rows: int  # with logits
    max_split_tokens: int  # steps of so few tokens give splits of the context their own programs
    max_context: int
    num_states: int = 0  # slots for states
    invariant: bool = True
    takes_hidden: bool = False  # the body begins with `given`, not with an embedding
    # The body is the last feed-forward; run_feed_forward has the others.
    only_feed_forwards: bool = False

    @property
    def max_splits(self) -> int:
        return -(-self.max_context // SPLIT_SIZE)


def block_width(spec: ModelSpec) -> int:
    """Numbers that a slot of a block has for the keys of a position, and as many for its values:
    those of the layer with most, in whole heads of every layer. Of latent attention those of its
    vectors, without values; 0 where no layer attends."""
    latents = [part.latent for part in spec.attentions.values() if part.latent is not None]
    if latents:
        return max(latent.kv_rank + latent.rope_dims for latent in latents)
    parts = spec.attentions.values()
    unit = math.lcm(*(part.head_dim for part in parts))
    return -(-max((part.kv_size for part in parts), default=0) // unit) * unit


def kv_block_bytes(spec: ModelSpec, layout: KVLayout, *, is_8bit: bool) -> int:
    """What a block takes."""
    width = block_width(spec)
    if not spec.attentions:
        return _BARE_BLOCK_BYTES
    if spec.attention.latent is not None:
        return layout.num_slots * BLOCK_SIZE * 2 * width
    scales = 4 * sum({width // part.head_dim for part in spec.attentions.values()})
    return layout.num_slots * BLOCK_SIZE * 2 * (width + scales if is_8bit else 2 * width)


class KVBlocks:
    """Keys and values: [slot of the layout, block, kv head, position, head_dim] as the first layers
    have them; layers of other heads have the same memory in their own shape. Scales of those of one
    byte: [slot of the layout, block, kv head, 2, position], by the heads that a block has room for.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        num_blocks: int,
        device: str,
        kv_dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        width = block_width(spec)
        parts = spec.attentions.values()
        room = {part.head_dim: width // part.head_dim for part in parts if part.latent is None}
        first = spec.head_dim if room else max(1, width)
        place = (layout.num_slots, num_blocks)
        shape = (*place, width // first, BLOCK_SIZE, first)
        self.keys = torch.empty(shape, dtype=kv_dtype, device=device)
        # Those of latent attention are among its keys.
        self.values = self.keys[..., :0]
        if room:
            self.values = torch.empty(shape, dtype=kv_dtype, device=device)
        self._scales: dict[int, Array] = {}
        if kv_dtype.itemsize == 1:
            for heads in room.values():
                shape = (*place, heads, 2, BLOCK_SIZE)
                self._scales[heads] = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def scales(self) -> Array | None:
        """Of the first kind of layers."""
        return next(iter(self._scales.values()), None)

    @property
    def arrays(self) -> list[Array]:
        return [self.keys, self.values, *self._scales.values()]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def copy(self, source: int, target: int) -> None:
        for array in self.arrays:
            array[:, target] = array[:, source]

    def layer(self, slot: int, head_dim: int) -> LayerCache:
        """With keys of that size."""
        if not self.values.numel():
            return LayerCache(self.keys[slot], self.keys[slot])
        shape = (self.num_blocks, -1, BLOCK_SIZE, head_dim)
        keys, values = self.keys[slot].view(shape), self.values[slot].view(shape)
        scales = self._scales[keys.shape[1]][slot] if self._scales else None
        return LayerCache(keys, values, scales)


class Decoder:
    """Runs the kernels of one model. `samples` is where sampled tokens stay on the device."""

    _HALF_DTYPE: torch.dtype = torch.bfloat16  # of a cache that is not in bytes
    _QUERY_DTYPE: torch.dtype = torch.bfloat16
    _ROUNDED_EMBEDDING = True

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        gemm: Gemm,
        limits: Limits,
        samples: Array,
        device: str,
        layout: KVLayout,
        kv_type: KVType = "auto",
    ) -> None:
        self._spec = spec
        self._layout = layout
        self.kv_dtype: torch.dtype = _BYTE_DTYPES.get(kv_type, self._HALF_DTYPE)
        self._weights = weights
        self._gemm = gemm
        self._limits = limits
        self._samples = samples
        self._device = device
        self._is_gpu = device != "cpu"
        capability = torch.cuda.get_device_capability(device)[0] if self._is_gpu else 0
        self._has_dependent_launch = capability >= 9
        self._padded_hidden = padded(spec.hidden_size)
        self.states = States(spec.states, limits.num_states, device)
        self._make_buffers()
        self._layers = self._lowered()
        # One layer of each kind: they launch every kernel that all layers launch.
        kinds = {self._kind(index): layer for index, layer in enumerate(self._layers)}
        self.layer_kinds = tuple(kinds.values())

    def _kind(self, index: int) -> object:
        """What a layer's kernels are compiled for."""
        weights = self._weights.layers[index]
        feed = weights.feed_forward
        linears = [
            (
                linear.num_rows,
                linear.num_splits,
                part.first_row,
                part.planes.format,
                part.bias is None,
            )
            for linear in weights.linears
            for part in linear.segments
        ]
        experts = feed.formats if isinstance(feed, ExpertWeights) else ()
        return self._spec.layers[index], tuple(linears), tuple(experts)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def fallback(self) -> str | None:
        """Why slower attention than usual runs; known once it is compiled."""
        return next((x.fallback for x in self._attentions.values() if x.fallback), None)

    def tokens_per_tile(self, shape: BodyShape) -> int:
        """Tokens of one sequence that attention has in a tile."""
        kinds = tuple(self._attentions.values())
        return attentions.common_tile(kinds, shape.num_tokens, shape.num_splits)

    # ---- buffers

    def _make_buffers(self) -> None:
        spec, limits = self._spec, self._limits
        tokens, rows = limits.num_tokens, limits.num_rows
        half = torch.float16
        self.hidden = self._zeros((tokens, self._padded_hidden), torch.float32)
        self.normed = self._zeros((tokens, self._padded_hidden), half)
        # Hidden states of the layers before, in natural order.
        given = tokens if limits.takes_hidden else 0
        self.given = self._zeros((given, self._padded_hidden), torch.float32)
        self._hidden_order = operand_order(self._padded_hidden).to(self._device)
        # Those after a feed-forward alone, in natural order.
        returned = tokens if limits.only_feed_forwards else 0
        self.returned = self._zeros((returned, self._padded_hidden), torch.float32)
        self._natural_order = torch.argsort(self._hidden_order)
        parts = spec.attentions.values()
        most = max((_query_width(part) for part in parts), default=0)
        self._queries = self._zeros((tokens * most,), self._QUERY_DTYPE)
        self._make_activations()
        kinds = {_heads(part) for part in parts}
        buffers = attentions.split_buffers(
            kinds, limits.max_split_tokens, limits.max_splits, self._device
        )
        self._attentions = {
            kind: attention_for(
                kind,
                max_split_tokens=limits.max_split_tokens,
                max_splits=limits.max_splits,
                max_sequences=limits.num_rows,
                block_size=BLOCK_SIZE,
                launch_options=self._launch_options(),
                device=self._device,
                query_dtype=self._QUERY_DTYPE,
                kv_dtype=self.kv_dtype,
                is_plain=kind.is_plain,
                latent_rope_dims=kind.latent_rope_dims,
                buffers=buffers,
            )
            for kind in kinds
        }
        self._latents = self._new_latents()
        self.head_rows = self._zeros((rows, self._padded_hidden), half)
        self.logits = self._zeros((rows, spec.vocabulary_size), torch.float32)
        chunks = -(-spec.vocabulary_size // _ARGMAX_BLOCK)
        self._best = layers.ChunkBest(
            self._zeros((rows, chunks), torch.float32),
            self._zeros((rows, chunks), torch.int32),
            self._zeros((rows, chunks), torch.int32),
        )
        # What the host waits for, in one piece: (token, status) of rows, a flag of tokens.
        self.step_results = self._zeros((2 * rows + tokens,), torch.int32)
        self.sampled = self.step_results[: 2 * rows].view(rows, 2)
        self.finite = self.step_results[2 * rows :]

    def _make_activations(self) -> None:
        """What GEMMs read and write."""
        spec, tokens = self._spec, self._limits.num_tokens
        self._activations = self.normed
        # What one kind of heads leaves beside its columns would be another's padding.
        self._attended = {
            size: self._zeros((tokens, padded(size)), torch.float16)
            for size in {_output_size(part) for part in spec.attentions.values()}
        }
        self.gated = self._zeros((tokens, padded(spec.ffn_size)), torch.float16)
        self._state_runner = StateRunner(
            spec.states.values(),
            tokens,
            self._limits.num_rows,
            self._launch_options(),
            self._device,
        )
        held = self._weights.layers
        self._make_input_buffers(tokens)
        dense = [feed for layer in held for feed in layer.denses]
        parts = [experts.part for experts in self._weights.experts]
        linears = [linear for layer in held for linear in layer.others]
        if self._weights.inputs is not None:
            linears.append(self._weights.inputs.projection)
        most = max([linear.num_splits * linear.num_rows for linear in linears], default=0)
        splits = [x for layer in held for x in (self._num_sums(layer), self._num_mixed(layer))]
        most = max([most, *(count * self._padded_hidden for count in splits)])
        if any(layer.is_parallel for layer in spec.layers):  # both halves leave theirs
            most *= 2
        self._sums = self._zeros((most * tokens,), torch.float32)
        self._experts: ExpertRunner | None = None
        if parts:
            options, width = self._launch_options(), self._padded_hidden
            self._experts = ExpertRunner(parts, width, tokens, self._gemm, options, self._device)
        gates = [feed.gate_up for feed in dense if self._gemm.needs_gate_sums(feed.gate_up)]
        most = max((gate.num_rows for gate in gates), default=0)
        self._gate_sums = self._zeros((most * tokens,), torch.float32)

    def _new_latents(self) -> LatentRunner | None:
        """Of models with latent attention."""
        shapes = [latent_shape(part) for part in self._spec.attentions.values()]
        known = [shape for shape in shapes if shape is not None]
        if not known:
            return None

        def multiply(linear: Linear, tokens: Array, count: int) -> int:
            return self._multiply(linear, tokens, count).num_splits

        tokens, options = self._limits.num_tokens, self._launch_options()
        memory = (self._sums, self._queries)
        return LatentRunner(known, tokens, multiply, *memory, options, self._device)

    def _make_input_buffers(self, tokens: int) -> None:
        """What layers get of each token, of models whose layers get any."""
        spec, part = self._spec, self._spec.layer_inputs
        self._unit_norm = NormWeights(epsilon=spec.norm_epsilon, kind=NormKind.RMS.value)
        if any(layer.beside is not None for layer in self._weights.layers):
            self._routed = self._zeros((tokens, self._padded_hidden), torch.float16)
        if part is None:
            return
        every, width = spec.num_layers * part.size, padded(part.size)
        self._embedded = self._zeros((tokens, padded(every)), torch.float32)
        self._inputs = self._zeros((tokens, spec.num_layers, width), torch.float32)
        self._gated_inputs = self._zeros((tokens, width), torch.float16)

    def _num_sums(self, layer: LayerWeights) -> int:
        """Splits that a layer's feed-forward leaves."""
        feed = layer.feed_forward
        used = feed.part.num_used if isinstance(feed, ExpertWeights) else 0
        return used + sum(dense.down.num_splits for dense in layer.denses)

    def _num_mixed(self, layer: LayerWeights) -> int:
        """Splits that its attention and its state leave."""
        linears = (layer.output, layer.state_output)
        return sum(linear.num_splits for linear in linears if linear is not None)

    def _zeros(self, shape: tuple[int, ...], kind: object) -> Array:
        return torch.zeros(shape, dtype=kind, device=self._device)

    def _lowered(self) -> tuple[LoweredLayer, ...]:
        lowered = self._lowered_attentions()
        return tuple(
            LoweredLayer(
                index=index,
                weights=weights,
                attention=lowered.get(index),
                state=self._lowered_state(index),
                is_parallel=layer.is_parallel,
                residual_scale=layer.residual_scale,
            )
            for index, (layer, weights) in enumerate(
                zip(self._spec.layers, self._weights.layers, strict=True)
            )
        )

    def _lowered_attentions(self) -> dict[int, LoweredAttention]:
        """By layer. Layers that have a rope share its tables."""
        spec, only = self._spec, self._limits.only_feed_forwards
        mixers = {*spec.attentions.values()}
        ropes = {x: self._rope_tables(None if only else x) for x in {x.rope for x in mixers}}
        scales = {x: None if only else self._query_scales(x) for x in mixers}
        slopes = {x: self._slopes(x) for x in mixers}
        lowered = {}
        for index, part in spec.attentions.items():
            weights = self._weights.layers[index]
            options = LayerAttention(
                *(part.scale, part.window, part.soft_cap, weights.sinks),
                *(slopes[part], part.is_chunked),
            )
            lowered[index] = LoweredAttention(
                group=self._layout.groups[index],
                slot=self._layout.slots[index],
                weights=weights,
                rope=ropes[part.rope],
                query_scales=scales[part],
                rope_shape=_rope_shape(part, block_width(spec)),
                latent_shape=latent_shape(part),
                options=options,
                attend=self._attentions[_heads(part)],
                output_size=_output_size(part),
                epsilon=_norm_epsilon(part),
                has_output_gate=part.has_output_gate,
            )
        return lowered

    def _lowered_state(self, index: int) -> LoweredState | None:
        held = self._weights.layers[index]
        if held.state is None:
            return None
        assert held.state_input is not None and held.state_output is not None
        return LoweredState(
            part=self._spec.states[index],
            weights=held.state,
            input=held.state_input,
            output=held.state_output,
            slots=self.states.layers[index],
        )

    def _query_scales(self, part: Attention) -> Array | None:
        if part.position_scale is None:
            return None
        scale = part.position_scale
        steps = (np.arange(self._limits.max_context) + scale.offset) // scale.length
        scales = (1.0 + scale.factor * np.log(1 + steps)).astype(np.float32)
        return torch.from_numpy(scales).to(self._device)

    def _slopes(self, part: Attention) -> Array | None:
        if not part.alibi:
            return None
        slopes = np.array(part.alibi_slopes) * math.log2(math.e)
        return torch.from_numpy(slopes.astype(np.float32)).to(self._device)

    def _rope_tables(self, rope: Rope | None) -> RopeTables:
        if rope is None:
            return RopeTables(self._sums, self._sums)  # not read
        tables = rope.tables(self._limits.max_context)
        return RopeTables(*(torch.from_numpy(table).to(self._device) for table in tables))

    # ---- the body

    def run_body(
        self,
        shape: BodyShape,
        body: BodyInput,
        blocks: KVBlocks,
        through: Sequence[LoweredLayer] | None = None,
    ) -> None:
        """All tokens through all layers; the normed hidden states are in `normed`, `finite` says of
        which tokens they are finite. `through`: these layers instead, to warm up."""
        count = shape.num_tokens
        if self._limits.only_feed_forwards:
            for layer in self._layers[-1:] if through is None else through:
                self._feed(count, layer)
            return
        if self._limits.takes_hidden:
            self._take_given(count)
        else:
            self._embed(count, body)
            self._make_layer_inputs(count, body)
        added: Added | None = None
        for layer in self._layers if through is None else through:
            added = self._run_layer(shape, body, blocks, layer, added)
        self._norm(count, self._weights.output_norm, added, is_last=True)

    def _run_layer(
        self,
        shape: BodyShape,
        body: BodyInput,
        blocks: KVBlocks,
        layer: LoweredLayer,
        added: Added | None,
    ) -> Added:
        """Both halves, or the one that there is. `added`: what the layer before left."""
        count, weights, scale = shape.num_tokens, layer.weights, layer.residual_scale
        if layer.attention is not None or layer.state is not None:
            self._norm(count, weights.mixer_norm, added)
            added = self._mix(shape, body, blocks, layer)
            added = added._replace(norm=weights.mixer_output_norm, scale=scale)
        if weights.feed_forward is not None:
            after = 0
            if not layer.is_parallel:
                self._norm(count, weights.feed_forward_norm, added)
            else:
                assert added is not None
                after = added.num_splits
                if weights.feed_forward_norm is not None:  # of what attention took, too
                    self._norm(count, weights.feed_forward_norm, None)
            fed = self._feed_forward(count, weights, after)
            added = fed._replace(norm=weights.feed_forward_output_norm, scale=scale)
        assert added is not None
        return self._finish(count, layer, added)

    def _mix(
        self, shape: BodyShape, body: BodyInput, blocks: KVBlocks, layer: LoweredLayer
    ) -> Added:
        """Attention, a state, or both: one after the other in `_sums`."""
        count, attention, state = shape.num_tokens, layer.attention, layer.state
        mixed = None if state is None else self._carry_state(count, body, state)
        added = Added(0)
        if attention is not None:
            self._attend(shape, body, blocks, attention)
            added = self._project(count, attention)
        if state is None or mixed is None:
            return added
        return self._multiply(state.output, mixed, count, added.num_splits)

    def run_feed_forward(self, count: int, index: int) -> None:
        """One layer's feed-forward alone, from `given` to `returned`."""
        self._feed(count, self._layers[index])
        torch.index_select(self.hidden[:count], 1, self._natural_order, out=self.returned[:count])

    def _feed(self, count: int, layer: LoweredLayer) -> None:
        """From `given` to hidden states, which the model's last norm makes `normed` of."""
        self._take_given(count)
        weights = layer.weights
        self._norm(count, weights.feed_forward_norm, None)
        fed = self._feed_forward(count, weights)
        added = fed._replace(norm=weights.feed_forward_output_norm, scale=layer.residual_scale)
        added = self._finish(count, layer, added)
        self._norm(count, self._weights.output_norm, added, is_last=True)

    def _finish(self, count: int, layer: LoweredLayer, added: Added) -> Added:
        """What comes after both halves. `added`: what is still to be added to the hidden states."""
        inputs = layer.weights.inputs
        if inputs is not None:
            self._norm(count, self._unit_norm, added)
            made = self._multiply(inputs.gate, self.normed, count)
            self._gate_input(count, layer.index, made)
            added = self._multiply(inputs.output, self._gated_inputs, count)
            added = added._replace(norm=inputs.norm)
        return added._replace(state_scale=layer.weights.output_scale)

    def _take_given(self, count: int) -> None:
        torch.index_select(self.given[:count], 1, self._hidden_order, out=self.hidden[:count])

    def _project(self, count: int, layer: LoweredAttention) -> Added:
        """The output projection of attention."""
        assert layer.weights.output is not None
        attended = self._attended[layer.output_size]
        return self._multiply(layer.weights.output, attended, count)

    def _feed_forward(self, count: int, layer: LayerWeights, after: int = 0) -> Added:
        """The feed-forward of `normed`; the first `after` splits of `_sums` stay."""
        feed = layer.feed_forward
        assert feed is not None
        if not isinstance(feed, ExpertWeights):
            return self._dense(count, feed, after)
        assert self._experts is not None
        if layer.beside is not None:
            return self._beside(count, feed, layer.beside)
        slots = (after + feed.part.num_used, self._limits.num_tokens, self._padded_hidden)
        sums = self._sums[: math.prod(slots)].view(slots)
        self._experts.run(feed, self.normed, sums[after:], count)
        if layer.shared is None:
            return Added(len(sums))
        return self._dense(count, layer.shared.feed, len(sums), layer.shared.gate)

    def _beside(self, count: int, experts: ExpertWeights, beside: BesideExperts) -> Added:
        """A dense feed-forward of `normed`, and experts of the hidden states behind a norm of their
        own, which the router sees behind one without weights."""
        assert self._experts is not None
        splits = self._dense(count, beside.feed, 0).num_splits
        self._norm(count, beside.input_norm, None)
        self._norm(count, beside.router_norm, None, out=self._routed)
        slots = (splits + experts.part.num_used, self._limits.num_tokens, self._padded_hidden)
        sums = self._sums[: math.prod(slots)].view(slots)
        self._experts.run(experts, self.normed, sums[splits:], count, self._routed)
        layers.add_normed[(count,)](
            sums,
            self._padded_hidden,
            self._spec.hidden_size,
            sums.stride(0),
            beside.output_norm.output,
            beside.expert_output_norm.output,
            DENSE_SPLITS=splits,
            SPLITS=len(sums),
            **self._norm_options(),
        )
        return Added(1)

    def _dense(
        self, count: int, feed: DenseWeights, after: int, gate: Array | None = None
    ) -> Added:
        """`gate`: weights of a token's factor, the sigmoid of their product with `normed`."""
        gates = feed.gate_up
        shape = (1, self._limits.num_tokens, gates.num_rows)
        sums = None
        if self._gemm.needs_gate_sums(gates):
            sums = self._gate_sums[: math.prod(shape)].view(shape)
        self._gemm.multiply_gated(gates, self.normed, sums, self.gated, count)
        if gate is not None:
            layers.scale_by_gate[(count,)](
                self.gated,
                self.normed,
                gate,
                self.gated.stride(0),
                self._padded_hidden,
                BLOCK=triton.next_power_of_2(self._padded_hidden),
                COLUMNS=_SCALED_COLUMNS,
                num_warps=8,
                **self._launch_options(),
            )
        return self._multiply(feed.down, self.gated, count, after)

    def _embed(self, count: int, body: BodyInput) -> None:
        planes = self._weights.embedding
        assert planes is not None
        vectors, learned = self._weights.positions, None
        if vectors is not None:
            learned = gemm_kernels.LearnedPositions(body.fields[BodyField.POSITION], vectors)
        self._look_up(count, body, planes, self.hidden, self._spec.embedding_scale, learned)
        norm = self._weights.embedding_norm
        if norm is not None:
            layers.norm_hidden[(count,)](
                self.hidden,
                norm.weight,
                norm.bias,
                self._padded_hidden,
                self._spec.hidden_size,
                norm.epsilon,
                NORM=norm.kind,
                **self._norm_options(),
            )

    def _look_up(
        self,
        count: int,
        body: BodyInput,
        planes: Planes,
        out: Array,
        scale: float,
        learned: gemm_kernels.LearnedPositions | None = None,
    ) -> None:
        gemm_kernels.embed[(count, planes.num_blocks)](
            body.fields[BodyField.TOKEN],
            body.fields[BodyField.SOURCE],
            self._samples,
            out,
            plane_pointers(planes),
            planes.num_rows,
            planes.num_blocks,
            factors(planes, scale),
            learned,
            FORMAT=planes.layout,
            ROUNDED=self._ROUNDED_EMBEDDING,
            num_warps=4,
            **self._launch_options(),
        )

    def _make_layer_inputs(self, count: int, body: BodyInput) -> None:
        """What every layer gets of each token, of its embedded vector."""
        part, weights = self._spec.layer_inputs, self._weights.inputs
        if part is None:
            return
        assert weights is not None
        self._look_up(count, body, weights.embedding, self._embedded, part.size**0.5)
        self._norm(count, None, None)
        made = self._multiply(weights.projection, self.normed, count)
        layers.make_layer_inputs[(count, self._spec.num_layers)](
            self._sums,
            self._embedded,
            weights.norm,
            self._inputs,
            part.size,
            self._inputs.shape[2],
            self._limits.num_tokens * weights.projection.num_rows,
            weights.projection.num_rows,
            self._embedded.shape[1],
            self._spec.hidden_size**-0.5,
            part.norm.epsilon,
            SPLITS=made.num_splits,
            BLOCK=triton.next_power_of_2(part.size),
            num_warps=4,
            **self._launch_options(),
        )

    def _gate_input(self, count: int, index: int, made: Added) -> None:
        """A layer's input of each token times its gate, whose GEMM was given `_unit_norm`."""
        part = self._spec.layer_inputs
        assert part is not None
        width = self._inputs.shape[2]
        layers.gate_layer_input[(count,)](
            self.hidden,
            self._sums,
            self._inputs[:, index],
            self._gated_inputs,
            self._padded_hidden,
            self._spec.hidden_size,
            width,
            self._inputs.stride(0),
            self._limits.num_tokens * width,
            self._unit_norm.epsilon,
            1 / GATED_DIVISOR,
            SPLITS=made.num_splits,
            ACTIVATION=part.activation.value,
            INPUTS=triton.next_power_of_2(width),
            **self._norm_options(),
        )

    def _carry_state(self, count: int, body: BodyInput, state: LoweredState) -> Array:
        """What the output projection of a state takes."""
        made = self._multiply(state.input, self._activations, count)
        sums = self._sums_of(state.input)
        return self._state_runner.run(
            state.part, state.weights, state.slots, sums, made.num_splits, body.chunks
        )

    def _gate_attention(self, count: int, layer: LoweredAttention, num_splits: int) -> None:
        """The gate's rows are the last of the GEMM that made queries, keys and values."""
        qkv = layer.weights.qkv
        assert qkv is not None
        size, attended = layer.output_size, self._attended[layer.output_size]
        gates.gate_attention[(count, -(-size // _GATE_BLOCK))](
            attended,
            self._sums_of(qkv),
            qkv.num_rows - size,
            size,
            attended.stride(0),
            SPLITS=num_splits,
            BLOCK=_GATE_BLOCK,
            enable_fp_fusion=False,
            **self._launch_options(),
        )

    def _sums_of(self, linear: Linear) -> gates.Sums:
        stride = self._limits.num_tokens * linear.num_rows
        return gates.Sums(self._sums, stride, linear.num_rows)

    def _launch_options(self) -> dict[str, bool]:
        """Programmatic dependent launch: a kernel starts while the previous one ends, and waits for
        its results itself."""
        if not self._is_gpu:
            return {"PDL": False}
        return {"PDL": self._has_dependent_launch, "launch_pdl": self._has_dependent_launch}

    def _num_splits(self, linear: Linear, count: int) -> int:
        """Splits of a GEMM's columns. Where a row's bits may depend on its batch, large steps
        need no splits to fill the GPU, and save adding them."""
        if self._limits.invariant or count < _TOKENS_THAT_FILL:
            return linear.num_splits
        return 1

    def _multiply(self, linear: Linear, tokens: Array, count: int, after: int = 0) -> Added:
        """A GEMM, into `_sums`: [split, token, row], behind the first `after` splits."""
        splits = self._num_splits(linear, count)
        # Behind others the reader would add them in another order.
        adds = splits > 1 and after == 0 and self._gemm.adds_splits(linear, count)
        splits = 1 if adds else after + splits
        shape = (splits, self._limits.num_tokens, linear.num_rows)
        sums = self._sums[: math.prod(shape)].view(shape)
        if adds:
            self._gemm.multiply_added(linear, tokens, sums[0], count)
        else:
            self._gemm.multiply(linear, tokens, sums[after:], count)
        return Added(splits, linear)

    def _norm(
        self,
        count: int,
        norm: NormWeights | None,
        added: Added | None,
        *,
        is_last: bool = False,
        out: Array | None = None,
    ) -> None:
        """Add what a half of a layer made to the hidden states, and norm them, into `normed` or
        `out`."""
        norm = norm or NormWeights()
        after = None if added is None else added.norm
        scale = 1.0 if added is None else added.scale
        layers.add_and_norm[(count,)](
            self.hidden,
            self._sums,
            norm.weight,
            self.normed if out is None else out,
            self.finite,
            self._padded_hidden,
            self._spec.hidden_size,
            norm.epsilon,
            self._limits.num_tokens * self._padded_hidden,
            norm.bias,
            None if after is None else after.output,
            None if scale == 1.0 else scale,
            None if added is None or added.state_scale == 1.0 else added.state_scale,
            SPLITS=0 if added is None else added.num_splits,
            NORM=norm.kind,
            OUTPUT_NORM="" if after is None else after.kind,
            STORE_FINITE=is_last,
            **self._norm_options(),
        )

    def _norm_options(self) -> dict[str, int | bool]:
        """Of a launch with a program for each token's hidden state."""
        block = int(triton.next_power_of_2(self._padded_hidden))
        num_warps = min(32, max(1, block // _NORM_COLUMNS))
        return {"BLOCK": block, "num_warps": num_warps, **self._launch_options()}

    def _attend(
        self, shape: BodyShape, body: BodyInput, blocks: KVBlocks, layer: LoweredAttention
    ) -> None:
        cache = blocks.layer(layer.slot, layer.rope_shape.head_dim)
        qkv = layer.weights.qkv
        assert qkv is not None
        if layer.latent_shape is not None:
            self._attend_latents(shape, body, cache, layer, layer.latent_shape)
            return
        made = self._multiply(qkv, self._activations, shape.num_tokens)
        self._rope(shape.num_tokens, body, cache, layer, qkv, made.num_splits)
        given = AttentionInput(
            self._queries_of(layer),
            body.tables,
            body.tiles(layer.group),
            self._attended[layer.output_size],
            self.tokens_per_tile(shape),
        )
        layer.attend.attend(given, cache, layer.options, shape.num_splits)
        if layer.has_output_gate:
            self._gate_attention(shape.num_tokens, layer, made.num_splits)

    def _attend_latents(
        self,
        shape: BodyShape,
        body: BodyInput,
        cache: LayerCache,
        layer: LoweredAttention,
        latent: LatentShape,
    ) -> None:
        """Queries against what the cache keeps, attention to it, and each head's values of that."""
        runner, weights, linear = self._latents, layer.weights.latent, layer.weights.qkv
        assert runner is not None and weights is not None and linear is not None
        count, positions = shape.num_tokens, body.fields[BodyField.POSITION]
        rope = Rotation(positions, layer.rope.cosines, layer.rope.sines)
        slots = body.slots(layer.group)
        given = LatentInput(
            *(linear, weights, rope, slots, cache.keys, layer.query_scales, layer.epsilon)
        )
        queries = runner.make_queries(latent, given, self._activations, count)
        tiles, tile_tokens = body.tiles(layer.group), self.tokens_per_tile(shape)
        seen = AttentionInput(queries, body.tables, tiles, runner.mixed(latent), tile_tokens)
        layer.attend.attend(seen, cache, layer.options, shape.num_splits)
        runner.make_values(latent, weights, self._attended[layer.output_size], count)

    def _queries_of(self, layer: LoweredAttention) -> Array:
        tokens, shape = self._limits.num_tokens, layer.rope_shape
        queries = self._queries[: tokens * shape.query_size]
        return queries.view(tokens, shape.num_heads, shape.head_dim)

    def _rope(
        self,
        count: int,
        body: BodyInput,
        cache: LayerCache,
        layer: LoweredAttention,
        qkv: Linear,
        num_splits: int,
    ) -> None:
        rope, weights = layer.rope, layer.weights
        heads = layer.rope_shape.num_heads + 2 * layer.rope_shape.num_kv_heads
        layers.rope_and_store[(count, -(-heads // _ROPE_HEADS))](
            self._sums,
            body.fields[BodyField.POSITION],
            body.slots(layer.group),
            rope.cosines,
            rope.sines,
            layers.HeadNorms(weights.query_norm, weights.key_norm),
            layers.QueryKeyValue(self._queries_of(layer), cache.keys, cache.values, cache.scales),
            self._ternary_sums(qkv, rope),
            self._limits.num_tokens * qkv.num_rows,
            qkv.num_rows,
            layer.epsilon,
            layer.query_scales,
            SHAPE=layer.rope_shape,
            SPLITS=num_splits,
            TERNARY=qkv.is_ternary,
            num_warps=4,
            **self._launch_options(),
        )

    def _ternary_sums(self, qkv: Linear, rope: RopeTables) -> layers.TernarySums:
        del qkv
        return layers.TernarySums(rope.cosines, 1.0, 1.0, 1.0)  # not read

    # ---- the head

    def run_head(self, count: int, rows: Array, slots: Array) -> None:
        """Logits of these rows of `normed`, and the likeliest token of each: into `sampled`
        (token, status), and into the samples where its slot is not -1."""
        self.run_logits(count, rows)
        vocabulary = self._spec.vocabulary_size
        chunks = self._best.logits.shape[1]
        layers.best_of_chunk[(count, chunks)](
            self.logits,
            self._best,
            vocabulary,
            vocabulary,
            BLOCK=_ARGMAX_BLOCK,
            num_warps=8,
            **self._launch_options(),
        )
        layers.best_of_row[(count,)](
            self._best,
            slots,
            self._samples,
            self.sampled,
            chunks,
            BLOCK=triton.next_power_of_2(chunks),
            num_warps=1,
            **self._launch_options(),
        )

    def run_logits(self, count: int, rows: Array) -> None:
        """Logits of these rows of `normed`, into `logits`."""
        layers.take_rows[(count, -(-self._padded_hidden // 1024))](
            self.normed,
            rows,
            self.head_rows,
            self._padded_hidden,
            BLOCK=1024,
            num_warps=4,
            **self._launch_options(),
        )
        head, width, cap = self._weights.head, self.logits.shape[1], self._spec.logit_soft_cap
        self._gemm.multiply(head, self.head_rows, self.logits[None], count)
        if cap:
            layers.cap_logits[(count, -(-width // _ARGMAX_BLOCK))](
                self.logits,
                cap,
                width,
                BLOCK=_ARGMAX_BLOCK,
                num_warps=8,
                **self._launch_options(),
            )


class TernaryDecoder(Decoder):
    """The same for BitNet models: the layers' GEMMs take int8 activations with one scale a token,
    which the norm before them makes (see kernels/ternary.py)."""

    # What is rounded to a half becomes other int8 codes: with queries and softmax weights in halves
    # logits had an error of 2e-4 to 4e-4, which a reference with the same cache does not have.
    _HALF_DTYPE = torch.float16
    _QUERY_DTYPE = torch.float32
    _ROUNDED_EMBEDDING = False

    def _make_activations(self) -> None:
        spec, tokens = self._spec, self._limits.num_tokens
        query, ffn = padded(spec.query_size), padded(spec.ffn_size)
        self._activations = self._zeros((tokens, self._padded_hidden), torch.int8)
        self._attended = {spec.query_size: self._zeros((tokens, query), torch.float32)}
        self._attention_codes = self._zeros((tokens, query), torch.int8)
        self._gated_codes = self._zeros((tokens, ffn), torch.int8)
        self._units = self._zeros((tokens,), torch.float32)
        most = max(
            linear.num_splits * linear.num_rows
            for layer in self._weights.layers
            for linear in layer.linears
        )
        self._sums = self._zeros((most * tokens,), torch.float32)

    def _num_splits(self, linear: Linear, count: int) -> int:
        """Sums of integers are the same in any splits: large steps need none."""
        if linear.sums_integers and count > _TOKENS_THAT_FILL_TERNARY:
            return 1
        return super()._num_splits(linear, count)

    def _norm(
        self,
        count: int,
        norm: NormWeights | None,
        added: Added | None,
        *,
        is_last: bool = False,
        out: Array | None = None,
    ) -> None:
        assert norm is not None and out is None
        linear = None if added is None else added.linear
        self._quantize(
            count,
            self._source(ternary.VECTORS if added is None else ternary.SUMS, self.hidden, linear),
            norm.weight,
            self._activations,
            self._spec.hidden_size,
            linear,
            is_last=is_last,
        )

    def _project(self, count: int, layer: LoweredAttention) -> Added:
        weights, size = layer.weights, self._spec.query_size
        assert weights.output is not None
        source = self._source(ternary.VECTORS, self._attended[size], None)
        codes = self._attention_codes
        self._quantize(count, source, weights.sub_norm, codes, size, None)
        return self._multiply(weights.output, codes, count)

    def _dense(
        self, count: int, feed: DenseWeights, after: int, gate: Array | None = None
    ) -> Added:
        del after, gate
        self._multiply(feed.gate_up, self._activations, count)
        source = self._source(ternary.GATED, self.hidden, feed.gate_up)
        codes = self._gated_codes
        self._quantize(count, source, feed.sub_norm, codes, self._spec.ffn_size, feed.gate_up)
        return self._multiply(feed.down, codes, count)

    def _ternary_sums(self, qkv: Linear, rope: RopeTables) -> layers.TernarySums:
        del rope
        return layers.TernarySums(self._units, *qkv.scales)

    def _source(self, kind: int, vectors: Array, linear: Linear | None) -> _TernarySource:
        scales = (1.0,) if linear is None else linear.scales
        rows = 0 if linear is None else linear.num_rows
        stride = self._limits.num_tokens * rows
        source = ternary.Source(vectors, self._sums, stride, scales[0], scales[-1])
        return _TernarySource(kind, source)

    def _quantize(
        self,
        count: int,
        source: _TernarySource,
        weight: Array | None,
        codes: Array,
        size: int,
        linear: Linear | None,
        *,
        is_last: bool = False,
    ) -> None:
        """From the source to codes and units; after the last layer to `normed`."""
        width = padded(size)
        block = int(triton.next_power_of_2(width))
        ternary.norm_and_quantize[(count,)](
            source.pointers,
            self._units if weight is None else weight,
            ternary.Target(codes, self._units, self.normed, self.finite),
            width,
            size,
            self._spec.norm_epsilon,
            SOURCE=source.kind,
            SPLITS=1 if linear is None else self._num_splits(linear, count),
            SQUARED_RELU=self._spec.activation is Activation.RELU2,
            NORM=weight is not None,
            OUTPUT_HALVES=is_last,
            BLOCK=block,
            num_warps=min(32, max(1, block // _NORM_COLUMNS)),
            **self._launch_options(),
        )


class _Heads(NamedTuple):
    """What layers have in common that share attention's launches."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_plain: bool  # they have what the plain kernel alone computes
    latent_rope_dims: int = 0


def _heads(part: Attention) -> _Heads:
    latent = part.latent
    if latent is not None:
        groups = latent_groups(part.num_heads)
        return _Heads(part.num_heads, groups, latent.kv_rank, True, latent.rope_dims)
    is_plain = part.alibi != 0.0 or part.is_chunked
    return _Heads(part.num_heads, part.num_kv_heads, part.head_dim, is_plain)


def _query_width(part: Attention) -> int:
    """Numbers of a token's queries as attention takes them."""
    shape = latent_shape(part)
    return part.query_size if shape is None else shape.num_heads * shape.key_dim


def _output_size(part: Attention) -> int:
    return part.num_heads * part.value_dim


def _norm_epsilon(part: Attention) -> float:
    if part.latent is not None:
        return part.latent.norm.epsilon
    return 0.0 if part.qk_norm is None else part.qk_norm.norm.epsilon


def _rope_shape(part: Attention, width: int) -> layers.RopeShape:
    """`width`: of a block, for each position."""
    rope, norm = part.rope, part.qk_norm
    return layers.RopeShape(
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads if part.kv_layer is None else 0,
        head_dim=part.head_dim,
        rope_dims=0 if rope is None else rope.dims,
        is_interleaved=rope is not None and rope.interleaved,
        norm="" if norm is None else norm.span.value,
        is_layer_norm=norm is not None and norm.norm.kind is NormKind.LAYER,
        is_norm_after_rope=norm is not None and norm.is_after_rope,
        norms_values=part.value_norm is not None,
        has_key_values=part.has_key_values,
        block_size=BLOCK_SIZE,
        block_heads=width // part.head_dim,
        heads=_ROPE_HEADS,
        pairs=triton.next_power_of_2(part.head_dim // 2),
    )


def decoder_for(weights: ModelWeights) -> type[Decoder]:
    return TernaryDecoder if weights.is_ternary else Decoder
