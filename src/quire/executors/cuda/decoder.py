"""Decoder: a step's kernels in order, over buffers that never move, so that graphs can replay them.

A step is two parts: the body takes every token through all layers, the head makes logits of some
rows and the likeliest token of each.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.attention import SPLIT, Attended, Layer, TokenTiles, attention_for
from quire.executors.cuda.kernels import layers
from quire.executors.cuda.kernels import products as product_kernels
from quire.executors.cuda.planes import Array, padded
from quire.executors.cuda.products import Products, factors, plane_pointers
from quire.executors.cuda.weights import LayerWeights, Linear, ModelWeights
from quire.model.spec import ModelSpec

_HEADS_AT_ONCE = 8  # of a token, in one program
_ARGMAX_BLOCK = 8192
_NORM_COLUMNS = 128  # a warp, up to 32 warps
_POSITIONS_AT_ONCE = 1 << 16
_TOKENS_THAT_FILL = 512  # and more fill the GPU with the tiles of any product


@dataclass(frozen=True, slots=True, eq=False)
class BodyInput:
    """What the body reads about its tokens, int32; padding has slot -1 and count 0."""

    fields: Array  # [9, tokens], see below
    tables: Array  # block tables, one after the other

    @property
    def tokens(self) -> Array:
        return self.fields[0]

    @property
    def sources(self) -> Array:
        """Places among the samples, or -1."""
        return self.fields[1]

    @property
    def positions(self) -> Array:
        return self.fields[2]

    @property
    def slots(self) -> Array:
        """Places in the cache."""
        return self.fields[3]

    @property
    def tiles(self) -> TokenTiles:
        return TokenTiles(*self.fields[4:])


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What a graph of the body is captured for. `num_parts`: parts of the context, each with a
    program of its own; 0: one program does all parts."""

    num_tokens: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step there will be."""

    num_tokens: int
    num_rows: int  # with logits
    parts_apart_tokens: int  # steps of so few tokens compute the parts of the context apart
    max_context: int
    invariant: bool = True

    @property
    def max_parts(self) -> int:
        return -(-self.max_context // SPLIT)


class KVBlocks:
    """Keys and values of all layers: [layer, block, kv head, slot, head_dim], bfloat16."""

    def __init__(self, spec: ModelSpec, num_blocks: int, device: str) -> None:
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        self.keys = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.values = torch.empty(shape, dtype=torch.bfloat16, device=device)

    @property
    def num_bytes(self) -> int:
        return 2 * int(self.keys.numel()) * 2

    def copy(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


def kv_block_bytes(spec: ModelSpec) -> int:
    return spec.num_kv_elements * BLOCK_SIZE * 2


class Decoder:
    """Runs the kernels of one model. `samples` is where sampled tokens stay on the device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        products: Products,
        limits: Limits,
        samples: Array,
        device: str,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._products = products
        self._limits = limits
        self._samples = samples
        self._device = device
        self._is_gpu = device != "cpu"
        self._chained = self._is_gpu and torch.cuda.get_device_capability(device)[0] >= 9
        self.hidden = padded(spec.hidden_size)
        self._make_buffers()
        self._make_angles()

    def tokens_a_tile(self, shape: BodyShape) -> int:
        """Tokens of one sequence that an attention program takes."""
        return self._attention.tokens_a_tile(shape.num_tokens, shape.num_parts)

    # ---- buffers

    def _make_buffers(self) -> None:
        spec, limits = self._spec, self._limits
        tokens, rows = limits.num_tokens, limits.num_rows
        half = torch.float16
        self.state = self._zeros((tokens, self.hidden), torch.float32)
        self.normed = self._zeros((tokens, self.hidden), half)
        self.mixed = self._zeros((tokens, padded(spec.query_size)), half)
        self.queries = self._zeros((tokens, spec.num_heads, spec.head_dim), torch.bfloat16)
        self.gated = self._zeros((tokens, padded(spec.ffn_size)), half)
        linears = [
            x for layer in self._weights.layers for x in (layer.qkv, layer.output, layer.down)
        ]
        most = max(linear.num_parts * linear.num_rows for linear in linears)
        self._sums = self._zeros((most * tokens,), torch.float32)
        gates = [layer.gate_up for layer in self._weights.layers]
        self._gate_sums = None
        if any(self._products.needs_gate_sums(gate) for gate in gates):
            self._gate_sums = self._zeros((1, tokens, gates[0].num_rows), torch.float32)
        self._attention = attention_for(
            spec,
            parts_apart_tokens=limits.parts_apart_tokens,
            max_parts=limits.max_parts,
            max_rows=limits.num_rows,
            block_size=BLOCK_SIZE,
            chain=self._chain(),
            device=self._device,
        )
        self.head_rows = self._zeros((rows, self.hidden), half)
        self.logits = self._zeros((rows, spec.vocabulary_size), torch.float32)
        chunks = -(-spec.vocabulary_size // _ARGMAX_BLOCK)
        self._best = self._zeros((rows, chunks), torch.float32)
        self._where = self._zeros((rows, chunks), torch.int32)
        self._wrong = self._zeros((rows, chunks), torch.int32)
        # What the host waits for, in one piece.
        self.outcome = self._zeros((2 * rows + tokens,), torch.int32)
        self.answers = self.outcome[: 2 * rows].view(rows, 2)
        self.finite = self.outcome[2 * rows :]

    def _zeros(self, shape: tuple[int, ...], kind: object) -> Array:
        return torch.zeros(shape, dtype=kind, device=self._device)

    def _make_angles(self) -> None:
        """A few positions at a time: a table in float64 for all of them could be large."""
        rope, most = self._spec.rope, self._limits.max_context
        frequencies = rope.frequencies()
        self._cosines, self._sines = (
            self._zeros((most, len(frequencies)), torch.float32) for _ in range(2)
        )
        for start in range(0, most, _POSITIONS_AT_ONCE):
            end = min(most, start + _POSITIONS_AT_ONCE)
            angles = np.arange(start, end)[:, None] * frequencies
            for table, turned in ((self._cosines, np.cos), (self._sines, np.sin)):
                values = (turned(angles) * rope.magnitude).astype(np.float32)
                table[start:end] = torch.from_numpy(values)

    # ---- the body

    def run_body(self, shape: BodyShape, given: BodyInput, blocks: KVBlocks) -> None:
        """All tokens through all layers; the normed states are in `normed`, `finite` says of which
        tokens they are finite."""
        count = shape.num_tokens
        self._embed(count, given)
        parts: Linear | None = None
        for index, layer in enumerate(self._weights.layers):
            self._norm(count, layer.attention_norm, parts)
            self._attend(shape, given, blocks, index, layer)
            self._multiply(layer.output, self.mixed, count)
            self._norm(count, layer.feed_forward_norm, layer.output)
            self._products.multiply_gated(
                layer.gate_up, self.normed, self._gate_sums, self.gated, count
            )
            self._multiply(layer.down, self.gated, count)
            parts = layer.down
        self._norm(count, self._weights.output_norm, parts, is_last=True)

    def _embed(self, count: int, given: BodyInput) -> None:
        planes = self._weights.embedding
        product_kernels.embed[(count, planes.num_blocks)](
            given.tokens,
            given.sources,
            self._samples,
            self.state,
            plane_pointers(planes),
            planes.num_rows,
            planes.num_blocks,
            factors(planes),
            FORMAT=planes.layout,
            num_warps=4,
            **self._chain(),
        )

    def _chain(self) -> dict[str, bool]:
        """Start a kernel while the one before it ends; it waits for that one's results itself."""
        if not self._is_gpu:
            return {"PDL": False}
        return {"PDL": self._chained, "launch_pdl": self._chained}

    def _parts_of(self, linear: Linear, count: int) -> int:
        """In how many parts a product is summed. Where a row's bits may depend on its batch, large
        steps need no parts to fill the GPU, and spare adding them."""
        if self._limits.invariant or count < _TOKENS_THAT_FILL:
            return linear.num_parts
        return 1

    def _multiply(self, linear: Linear, tokens: Array, count: int) -> None:
        """A product's parts, into `_sums`: [part, token, row]."""
        parts, room = self._parts_of(linear, count), self._limits.num_tokens
        size = parts * room * linear.num_rows
        sums = self._sums[:size].view(parts, room, linear.num_rows)
        self._products.multiply(linear, tokens, sums, count)

    def _norm(
        self, count: int, weight: Array, parts: Linear | None, *, is_last: bool = False
    ) -> None:
        layers.add_and_norm[(count,)](
            self.state,
            self._sums,
            weight,
            self.normed,
            self.finite,
            self.hidden,
            self._spec.hidden_size,
            self._spec.norm_epsilon,
            self._limits.num_tokens * self.hidden,
            PARTS=0 if parts is None else self._parts_of(parts, count),
            BLOCK=_power_of_two(self.hidden),
            FINITE=is_last,
            num_warps=min(32, max(1, _power_of_two(self.hidden) // _NORM_COLUMNS)),
            **self._chain(),
        )

    def _attend(
        self,
        shape: BodyShape,
        given: BodyInput,
        blocks: KVBlocks,
        index: int,
        layer: LayerWeights,
    ) -> None:
        count = shape.num_tokens
        self._multiply(layer.qkv, self.normed, count)
        self._turn(count, given, blocks, index, layer)
        self._attention.attend(
            Attended(self.queries, given.tables, given.tiles, self.mixed),
            Layer(blocks.keys[index], blocks.values[index], self._spec.windows[index]),
            shape.num_parts,
        )

    def _turn(
        self, count: int, given: BodyInput, blocks: KVBlocks, index: int, layer: LayerWeights
    ) -> None:
        spec = self._spec
        heads = spec.num_heads + 2 * spec.num_kv_heads
        layers.turn_and_store[(count, -(-heads // _HEADS_AT_ONCE))](
            self._sums,
            given.positions,
            given.slots,
            self._cosines,
            self._sines,
            self._cosines if layer.query_norm is None else layer.query_norm,
            self._cosines if layer.key_norm is None else layer.key_norm,
            self.queries,
            blocks.keys[index],
            blocks.values[index],
            self._limits.num_tokens * layer.qkv.num_rows,
            layer.qkv.num_rows,
            spec.norm_epsilon,
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            ROPE_DIMS=spec.rope.dims,
            INTERLEAVED=spec.rope.interleaved,
            NORMED=spec.qk_norm,
            BLOCK_SIZE=BLOCK_SIZE,
            PARTS=self._parts_of(layer.qkv, count),
            HEADS=_HEADS_AT_ONCE,
            PAIRS=_power_of_two(spec.head_dim // 2),
            num_warps=4,
            **self._chain(),
        )

    # ---- the head

    def run_head(self, count: int, rows: Array, slots: Array) -> None:
        """Logits of these rows of `normed`, and the likeliest token of each: into `answers`
        (token, whether its logits are finite), and into the samples where its slot is not -1."""
        self.run_logits(count, rows)
        vocabulary = self._spec.vocabulary_size
        chunks = self._best.shape[1]
        layers.best_of_chunk[(count, chunks)](
            self.logits,
            self._best,
            self._where,
            self._wrong,
            vocabulary,
            vocabulary,
            BLOCK=_ARGMAX_BLOCK,
            num_warps=8,
            **self._chain(),
        )
        layers.best_of_row[(count,)](
            self._best,
            self._where,
            self._wrong,
            slots,
            self._samples,
            self.answers,
            chunks,
            BLOCK=_power_of_two(chunks),
            num_warps=1,
            **self._chain(),
        )

    def run_logits(self, count: int, rows: Array) -> None:
        """Logits of these rows of `normed`, into `logits`."""
        layers.take_rows[(count, -(-self.hidden // 1024))](
            self.normed,
            rows,
            self.head_rows,
            self.hidden,
            BLOCK=1024,
            num_warps=4,
            **self._chain(),
        )
        head = self._weights.head
        self._products.multiply(head, self.head_rows, self.logits[None], count)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
