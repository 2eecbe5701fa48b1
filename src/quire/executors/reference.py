"""ReferenceExecutor: numpy float32, a row at a time; what all other executors are tested against.

The Decoder is the mathematics of a ModelSpec, written plainly. A row of it is one token at one
position. It is computed alone, in arrays whose shapes depend on the spec and its position only:
products are matrix times vector, because a matrix product may add in another order for another
number of rows. So a row's bits are the same in any batch, in any chunk, and when it is computed
again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.clock import Clock
from quire.core.errors import RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, TokenLogprob, Want
from quire.executors.base import BLOCK_SIZE, model_capacity
from quire.executors.sampler import sample, score
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor
from quire.loader.tensor import Tensor
from quire.model.loading import Model
from quire.model.spec import Activation, ModelSpec, layer_shapes, takes_bytes_by_token

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.intp]

_ALIGNMENT = 64  # bytes
# Few enough that BLAS keeps a product on one thread: its sums may change with their number, and on
# a busy machine its threads wait for each other far longer than they compute.
_WEIGHTS_AT_ONCE = 1 << 18


class KVBlocks:
    """Keys and values of every layer in blocks; a slot is the index of one token in them."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.keys: Floats = np.zeros(shape, np.float32)
        self.values: Floats = np.zeros(shape, np.float32)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def slots(self, block_table: Sequence[int], end: int) -> Slots:
        """The slots of positions 0 to `end` of the sequence that has this table."""
        blocks = np.array(block_table[: -(-end // self.block_size)], dtype=np.intp)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()[:end]

    def write(self, layer: int, slot: int, key: Floats, value: Floats) -> None:
        block, offset = divmod(slot, self.block_size)
        self.keys[layer, block, offset] = key
        self.values[layer, block, offset] = value

    def read(self, layer: int, slots: Slots) -> tuple[Floats, Floats]:
        """Keys and values at these slots alone: [context, kv_heads, head_dim] each."""
        return _gather(self.keys[layer], slots), _gather(self.values[layer], slots)


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


@dataclass(slots=True)
class Row:
    """One token: its hidden state, and what it attends to."""

    state: Floats  # [hidden]
    slots: Slots  # of every position up to its own, [position + 1]
    cosines: Floats  # [rope dims / 2]
    sines: Floats

    @property
    def slot(self) -> int:
        return int(self.slots[-1])

    def seen(self, window: int | None) -> Slots:
        """The slots it attends to: its own and those before it, within the window."""
        return self.slots if window is None else self.slots[-window:]


class Decoder:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.embedding = _decoded(tensors["token_embd.weight"])
        self._output_norm = _decoded(tensors["output_norm.weight"])
        head = self.embedding if spec.tied_head else _decoded(tensors["output.weight"])
        self._head = Linear(head)
        self._layers = [_Layer(spec, tensors, index) for index in range(spec.num_layers)]
        self._frequencies = spec.rope.frequencies()

    @property
    def weight_bytes(self) -> int:
        tied = 0 if self.spec.tied_head else self._head.weight.nbytes
        layers = sum(layer.weight_bytes for layer in self._layers)
        return self.embedding.nbytes + self._output_norm.nbytes + tied + layers

    def row(self, token: int, slots: Slots) -> Row:
        """The token at the last of these slots."""
        angles = (len(slots) - 1) * self._frequencies
        magnitude = self.spec.rope.magnitude
        return Row(
            state=self.embedding[token].copy(),
            slots=slots,
            cosines=(np.cos(angles) * magnitude).astype(np.float32),
            sines=(np.sin(angles) * magnitude).astype(np.float32),
        )

    def run(self, rows: Sequence[Row], blocks: KVBlocks, checkpoint: Callable[[], None]) -> None:
        """Take all rows through all layers, calling `checkpoint` before each.

        Layers are the outer loop, so that a matrix is fetched from memory once for all rows. All
        keys of a layer are written before any is read: rows of one chunk see those before them.
        """
        for layer in self._layers:
            checkpoint()
            queries = [layer.project(row, blocks) for row in rows]
            for row, query in zip(rows, queries, strict=True):
                row.state = row.state + layer.attend(row, query, blocks)
            for row in rows:
                row.state = row.state + layer.feed_forward(row.state)

    def final_state(self, row: Row) -> Floats:
        """The state after the last norm: what is pooled, and what logits are computed from."""
        return rms_norm(row.state, self._output_norm, self.spec.norm_epsilon)

    def logits(self, row: Row) -> Floats:
        return soft_capped(self._head(self.final_state(row)), self.spec.logit_soft_cap)


class _Layer:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], index: int) -> None:
        self._spec = spec
        self._index = index
        self._scale = np.float32(spec.head_dim**-0.5)
        arrays = {name: _decoded(tensors[f"blk.{index}.{name}"]) for name in layer_shapes(spec)}
        self.weight_bytes = sum(array.nbytes for array in arrays.values())
        self._norms: dict[str, Floats] = {}
        self._linears: dict[str, Linear] = {}
        for full_name, array in arrays.items():
            name = full_name.removesuffix(".weight")
            if name.endswith("_norm"):
                self._norms[name] = array
            elif name != full_name:
                extras = arrays.get(f"{name}.bias"), arrays.get(f"{name}.scale")
                is_rounded = takes_bytes_by_token(spec, tensors[f"blk.{index}.{full_name}"].format)
                weight, unit_scale = _units(array) if is_rounded else (array, None)
                self._linears[name] = Linear(weight, *extras, unit_scale)

    def project(self, row: Row, blocks: KVBlocks) -> Floats:
        """Write the row's key and value; its query, [heads, head_dim]."""
        spec = self._spec
        x = self._norm("attn_norm", row.state)
        query = self._linears["attn_q"](x).reshape(spec.num_heads, spec.head_dim)
        key = self._linears["attn_k"](x).reshape(spec.num_kv_heads, spec.head_dim)
        value = self._linears["attn_v"](x).reshape(spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            query, key = self._norm("attn_q_norm", query), self._norm("attn_k_norm", key)
        blocks.write(self._index, row.slot, self._with_rope(key, row), value)
        return self._with_rope(query, row)

    def attend(self, row: Row, query: Floats, blocks: KVBlocks) -> Floats:
        spec = self._spec
        keys, values = blocks.read(self._index, row.seen(spec.windows[self._index]))
        # Query heads of one group share a key head: [kv_heads, group, head_dim].
        grouped = query.reshape(spec.num_kv_heads, -1, spec.head_dim)
        scores = np.matmul(grouped, keys.transpose(1, 2, 0)) * self._scale
        scores = soft_capped(scores, spec.attention_soft_cap)
        output = np.matmul(softmax(scores), values.transpose(1, 0, 2)).ravel()
        if spec.sub_norms:
            output = self._norm("attn_sub_norm", output)
        return self._linears["attn_output"](output)

    def feed_forward(self, state: Floats) -> Floats:
        x = self._norm("ffn_norm", state)
        gate = _ACTIVATIONS[self._spec.activation](self._linears["ffn_gate"](x))
        product = gate * self._linears["ffn_up"](x)
        if self._spec.sub_norms:
            product = self._norm("ffn_sub_norm", product)
        return self._linears["ffn_down"](product)

    def _norm(self, name: str, x: Floats) -> Floats:
        return rms_norm(x, self._norms[name], self._spec.norm_epsilon)

    def _with_rope(self, heads: Floats, row: Row) -> Floats:
        return apply_rope(heads, row.cosines, row.sines, self._spec.rope.interleaved)


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Over the last axis."""
    mean = np.float32(np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float64))
    normed: Floats = x * (np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))) * weight
    return normed


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


def softmax(scores: Floats) -> Floats:
    """Over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _silu(x: Floats) -> Floats:
    gated: Floats = np.divide(x, np.exp(-x) + np.float32(1.0))
    return gated


def _relu2(x: Floats) -> Floats:
    return np.square(np.maximum(x, np.float32(0.0)))


_ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = {
    Activation.SILU: _silu,
    Activation.RELU2: _relu2,
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
    tokens = layer.reshape(-1, *layer.shape[2:])
    gathered = _aligned((len(slots), *tokens.shape[1:]))
    return np.take(tokens, slots, axis=0, out=gathered, mode="clip")  # "raise" would copy twice


# ---- the executor


class _Chunk(NamedTuple):
    """A sequence's new tokens, as rows of the decoder."""

    plan: SequencePlan
    rows: tuple[Row, ...]


class ReferenceExecutor(ThreadedExecutor):
    """Slow, plain and right. Weights are unpacked to float32 on construction."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_batch_size: int = 64,
        max_step_tokens: int = 512,
        clock: Clock | None = None,
    ) -> None:
        capacity = model_capacity(
            model.spec, num_blocks, max_batch_size, max_step_tokens, block_size
        )
        self._decoder = Decoder(model.spec, model.tensors)
        self._blocks = KVBlocks(model.spec, num_blocks, block_size)
        super().__init__(
            capacity,
            "quire-reference",
            kernels=["numpy float32, one row at a time"],
            clock=clock,
        )

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": self._decoder.weight_bytes, "kv": self._blocks.num_bytes}

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        with np.errstate(all="ignore"):  # what is not finite is found in its row
            for copy in plan.copies:
                self._blocks.copy(copy.source, copy.target)
            chunks = [self._chunk(sequence) for sequence in plan.sequences]
            rows = [row for chunk in chunks if isinstance(chunk, _Chunk) for row in chunk.rows]
            self._decoder.run(rows, self._blocks, flag.check)
            return RowResults(tuple(self._result(chunk) for chunk in chunks))

    # ---- one sequence

    def _chunk(self, plan: SequencePlan) -> _Chunk | SequenceResult:
        """The sequence's rows, or its fault."""
        try:
            self._check_row(plan, plan.end)
        except RowFaultError as error:
            return SequenceResult(plan.sequence_id, fault=str(error))
        slots = self._blocks.slots(plan.block_table, plan.end)
        positions = enumerate(plan.tokens, plan.start)
        return _Chunk(plan, tuple(self._decoder.row(t, slots[: p + 1]) for p, t in positions))

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
            raise RowFaultError("the hidden state is not finite")
        result = SequenceResult(plan.sequence_id, prompt_logprobs=self._prompt_scores(chunk))
        match plan.want:
            case Want.NOTHING:
                return result
            case Want.SAMPLE:
                if plan.sampling is None:
                    raise RowFaultError("a sample was wanted without saying how")
                extras = plan.completion_position, plan.history, plan.allowed
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
        num_top = (plan.sampling.params.prompt_logprobs or 0) if plan.sampling is not None else 0
        return tuple(
            score(self._logits(row), target, num_top)
            for row, target in zip(chunk.rows, plan.prompt_targets, strict=False)
        )  # a prompt's last token has no target

    def _logits(self, row: Row) -> Floats:
        logits = self._decoder.logits(row)
        if not np.isfinite(logits).all():
            raise RowFaultError("the logits are not finite")
        return logits
