"""Layers that keep a state: their memory, and how they are launched (kernels/states.py)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import triton

from quire.core.errors import UnsupportedModelError
from quire.executors.cuda.kernels import gates, states
from quire.executors.cuda.planes import GATED_DIVISOR, Array, padded
from quire.model.spec import ModelSpec
from quire.model.states import StateKind, StateMixer

# A program of the recurrence has so many numbers of a matrix in the registers of one warp.
_NUMBERS = 1024
_PART_KEYS = 16  # of a matrix's row, which four lanes have side by side
_STAGES = 6  # of its loads
MAX_KEY_DIM = _NUMBERS
MAX_SPAN = 1 << 15  # numbers that are normed together
MAX_HEADS = 1 << 12
_CHANNELS = 1024  # of a program of the convolution
_SPAN_NUMBERS = 1024  # of a program that gates, where spans are shorter


@dataclass(frozen=True, slots=True, eq=False)
class StateWeights:
    """What a layer has beside its matrices; float32, None where its kind has none."""

    taps: Array  # [kernel, channels]
    bias: Array | None
    a: Array | None = None
    dt: Array | None = None
    d: Array | None = None
    norm: Array | None = None

    @property
    def num_bytes(self) -> int:
        arrays = (self.taps, self.bias, self.a, self.dt, self.d, self.norm)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """A layer's share of the slots, float32."""

    kept: Array  # [slot, kernel - 1, channels]
    matrices: Array  # [slot, head, value, key]


class States:
    """The states of sequences in numbered slots, of every layer that keeps one."""

    def __init__(self, parts: Mapping[int, StateMixer], num_slots: int, device: str) -> None:
        def zeros(*shape: int) -> Array:
            return torch.zeros((num_slots, *shape), dtype=torch.float32, device=device)

        self.layers = {
            layer: LayerState(
                zeros(part.kernel - 1, part.num_channels),
                zeros(part.num_heads, part.value_dim, part.key_dim),
            )
            for layer, part in parts.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(x.kept.nbytes + x.matrices.nbytes for x in self.layers.values())


def check_states(spec: ModelSpec) -> None:
    """Refuse sizes that no kernel has."""
    for index, part in spec.states.items():
        bounds = {
            "key_dim": (part.key_dim, MAX_KEY_DIM),
            "heads": (part.num_heads, MAX_HEADS),
            "numbers that are normed together": (_norm_span(part), MAX_SPAN),
        }
        for what, (value, limit) in bounds.items():
            if value > limit:
                raise UnsupportedModelError(
                    f"the state of layer {index} has {what} of {value}, but the CUDA executor "
                    f"runs at most {limit}: use device='cpu'"
                )


def num_projected(part: StateMixer) -> int:
    """Rows of the GEMM that makes a layer's inputs and gates."""
    return sum(rows for name, (rows, _) in part.matrices(1).items() if name != "ssm_out")


def output_divisor(part: StateMixer) -> float:
    """What the output projection takes is divided by it: a product of three numbers of any size, as
    of a gated feed-forward; what heads leave was normed."""
    return GATED_DIVISOR if part.kind is StateKind.CONVOLUTION else 1.0


def _norm_span(part: StateMixer) -> int:
    if part.kind is StateKind.CONVOLUTION:
        return 1
    is_of_heads = part.kind is StateKind.DELTA_NET or not part.has_norm
    return part.value_dim if is_of_heads else part.output_size // part.num_groups


class StateRunner:
    """Runs any layer that keeps a state, over buffers that never move."""

    def __init__(
        self,
        parts: Iterable[StateMixer],
        max_tokens: int,
        max_sequences: int,
        launch_options: dict[str, bool],
        device: str,
    ) -> None:
        self._max_sequences = max_sequences
        # Sums are rounded alike wherever a kernel is compiled.
        self._options = {"enable_fp_fusion": False, **launch_options}
        every = tuple(parts)
        with_heads = [part for part in every if part.kind is not StateKind.CONVOLUTION]

        def zeros(size: int, kind: object = torch.float32) -> Array:
            return torch.zeros((max_tokens, size), dtype=kind, device=device)

        # By their sizes: what a row has behind them stays zero.
        sizes = {part.output_size for part in every}
        self._outputs = {size: zeros(padded(size), torch.float16) for size in sizes}
        self._vectors = {
            part: states.HeadVectors(
                zeros(part.num_channels), zeros(part.num_heads), zeros(part.num_heads)
            )
            for part in dict.fromkeys(with_heads)
        }

    def run(
        self,
        part: StateMixer,
        weights: StateWeights,
        state: LayerState,
        sums: gates.Sums,
        num_splits: int,
        chunks: states.Chunks,
    ) -> Array:
        """From what the GEMM of the layer's inputs left to what its output projection takes. The
        chunks are of as many tokens as they have entries."""
        out = self._outputs[part.output_size]
        convolution = states.Convolution(weights.taps, weights.bias, state.kept)
        if part.kind is StateKind.CONVOLUTION:
            self._convolve_alone(part, convolution, sums, num_splits, chunks, out)
        else:
            self._convolve_heads(part, weights, convolution, sums, num_splits, chunks)
            self._recur(part, weights, state, chunks)
            self._gate(part, weights, sums, num_splits, len(chunks.sequences), out)
        return out

    def _convolve_alone(
        self,
        part: StateMixer,
        convolution: states.Convolution,
        sums: gates.Sums,
        num_splits: int,
        chunks: states.Chunks,
        out: Array,
    ) -> None:
        block = min(_CHANNELS, int(triton.next_power_of_2(part.num_channels)))
        grid = (len(chunks.sequences), -(-part.num_channels // block))
        states.convolve_alone[grid](
            sums,
            chunks,
            convolution,
            out,
            out.stride(0),
            1.0 / output_divisor(part),
            SHAPE=_shape(part),
            SPLITS=num_splits,
            BLOCK=block,
            num_warps=4,
            **self._options,
        )

    def _convolve_heads(
        self,
        part: StateMixer,
        weights: StateWeights,
        convolution: states.Convolution,
        sums: gates.Sums,
        num_splits: int,
        chunks: states.Chunks,
    ) -> None:
        dims = int(triton.next_power_of_2(max(part.key_dim, part.value_dim)))
        vectors = max(1, _CHANNELS // dims)
        num_vectors = 2 * part.num_groups + part.num_heads
        states.convolve_heads[(len(chunks.sequences), -(-num_vectors // vectors) + 1)](
            sums,
            chunks,
            convolution,
            states.HeadWeights(weights.a, weights.dt),
            self._vectors[part],
            part.key_dim**-0.5,
            SHAPE=_shape(part),
            SPLITS=num_splits,
            VECTORS=vectors,
            DIMS=dims,
            HEADS=triton.next_power_of_2(part.num_heads),
            num_warps=4,
            **self._options,
        )

    def _recur(
        self, part: StateMixer, weights: StateWeights, state: LayerState, chunks: states.Chunks
    ) -> None:
        keys = int(triton.next_power_of_2(part.key_dim))
        values = min(_NUMBERS // keys, int(triton.next_power_of_2(part.value_dim)))
        in_part = min(keys, _PART_KEYS)
        num_chunks = min(len(chunks.sequences), self._max_sequences)
        states.recur[(-(-part.value_dim // values), part.num_heads, num_chunks)](
            self._vectors[part],
            chunks,
            state.matrices,
            weights.d,
            SHAPE=_shape(part),
            PARTS=keys // in_part,
            VALUES=values,
            KEYS=in_part,
            STAGES=_STAGES,
            num_warps=1,
            **self._options,
        )

    def _gate(
        self,
        part: StateMixer,
        weights: StateWeights,
        sums: gates.Sums,
        num_splits: int,
        count: int,
        out: Array,
    ) -> None:
        span = _norm_span(part)
        block = int(triton.next_power_of_2(span))
        spans = max(1, _SPAN_NUMBERS // block)
        num_spans = part.output_size // span
        channels = self._vectors[part].channels
        gates.gate_heads[(count, -(-num_spans // spans))](
            channels[:, part.channel_offsets[2] :],
            sums,
            weights.norm,
            out,
            part.num_channels,
            channels.stride(0),
            out.stride(0),
            part.norm_epsilon,
            SPAN=span,
            NUM_SPANS=num_spans,
            SPANS=spans,
            BLOCK=block,
            NORM_FIRST=part.kind is StateKind.DELTA_NET,
            SPLITS=num_splits,
            num_warps=max(4, min(32, block // 256)),
            **self._options,
        )


def _shape(part: StateMixer) -> states.StateShape:
    query_at, key_at, value_at = part.channel_offsets
    alpha_at = part.num_channels + part.output_size
    return states.StateShape(
        kernel=part.kernel,
        num_channels=part.num_channels,
        num_heads=part.num_heads,
        num_groups=part.num_groups,
        key_dim=part.key_dim,
        value_dim=part.value_dim,
        is_delta_net=part.kind is StateKind.DELTA_NET,
        is_tiled=part.is_tiled,
        query_at=query_at,
        key_at=key_at,
        value_at=value_at,
        alpha_at=alpha_at,
        beta_at=alpha_at + part.num_heads,
    )
