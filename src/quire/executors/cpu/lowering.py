"""Lowers a ModelSpec and its tensors to a native decoder: weights packed, stages listed once; and
says beforehand what memory that takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.errors import UnsupportedModelError
from quire.executors.cpu.experts import (
    ExpertLowering,
    record_bytes,
    router_bytes,
    slot_bytes,
)
from quire.executors.cpu.native import native
from quire.loader.tensor import Tensor
from quire.model.spec import (
    Attention,
    Dense,
    Experts,
    ModelSpec,
    Norm,
    check_lowered,
    takes_bytes_by_token,
)

_NO_VECTOR = -1
_NO_ROPE = -1
# The projection that is multiplied twice: with the quantised activations, and with the quantised
# residual of that rounding. Of all projections that of values loses the most accuracy to
# rounded activations, and it is a small part of the work.
RESIDUAL_PASS = "attn_v"

_FLOAT_BYTES = 4
_KV_SCALE_BYTES = 4  # of int8 keys or values, for each token and kv head


@dataclass(frozen=True, slots=True)
class Threads:
    count: int
    may_spin: bool  # whether waiting threads may spin


def lower(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: Threads,
    *,
    unit: str = "",
    per_token_scale: bool = True,
) -> "native.Decoder":
    """Pack every tensor and list the stages of a step.

    `unit` names the instruction set ("": the best there is). `per_token_scale`: activations of a
    BitNet model's ternary GEMMs have one scale a token, as it was trained; else one for each group
    of 32.
    """
    check_lowered(spec, "cpu")
    try:
        lowering = _Lowering(spec, tensors, threads, unit, per_token_scale)
        for layer in range(spec.num_layers):
            lowering.add_layer(layer)
        lowering.add_embedding_and_head()
    except (ValueError, OverflowError) as error:  # native code checks what it is given once more
        raise UnsupportedModelError(f"the CPU kernels cannot hold this model: {error}") from error
    return lowering.decoder


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        threads: Threads,
        unit: str,
        per_token_scale: bool,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self._num_threads = threads.count
        self._per_token_scale = per_token_scale
        self.decoder = native.make_decoder(
            hidden_size=spec.hidden_size,
            vocabulary_size=spec.vocabulary_size,
            logit_soft_cap=spec.logit_soft_cap,
            unit=unit,
            num_threads=threads.count,
            may_spin=threads.may_spin,
        )
        for rope in spec.ropes:
            self.decoder.add_rope(rope.dims, rope.interleaved)

    def add_layer(self, index: int) -> None:
        layer, prefix = self._spec.layers[index], f"blk.{index}."
        self._add_shape(layer.mixer)
        self._add_attention(index, prefix, layer.mixer, layer.mixer_norm)
        if isinstance(layer.feed_forward, Dense):
            self._add_feed_forward(prefix, layer.feed_forward, layer.feed_forward_norm)
        else:
            self._add_experts(prefix, layer.feed_forward, layer.feed_forward_norm)

    def _add_shape(self, part: Attention) -> None:
        # Rounded twice, in single precision: the kernels' own convention, on which bits depend.
        usual_scale = np.float32(1.0) / np.sqrt(np.float32(part.head_dim))
        self.decoder.add_layer(
            num_heads=part.num_heads,
            num_kv_heads=part.num_kv_heads,
            head_dim=part.head_dim,
            value_dim=part.value_dim,
            rope=_NO_ROPE if part.rope is None else self._spec.ropes.index(part.rope),
            window=part.window or 0,
            scale=float(usual_scale) if part.has_usual_scale else part.scale,
            soft_cap=part.soft_cap,
        )

    def _add_attention(self, index: int, prefix: str, part: Attention, norm: Norm | None) -> None:
        stage = self.decoder.add_stage
        qkv = self._matrices([f"{prefix}attn_{name}" for name in "qkv"])
        stage("norm_and_quantise", norm=self._norm(f"{prefix}attn_norm", norm), matrices=qkv)
        stage("project", matrices=qkv)
        head_norm = None if part.qk_norm is None else part.qk_norm.norm
        stage(
            "rope_and_store",
            layer=index,
            query_norm=self._norm(f"{prefix}attn_q_norm", head_norm),
            key_norm=self._norm(f"{prefix}attn_k_norm", head_norm),
        )
        stage("attend", layer=index)
        output = self._matrices([f"{prefix}attn_output"])
        output_norm = self._norm(f"{prefix}attn_sub_norm", part.output_norm)
        stage("norm_and_quantise", input="attention_output", norm=output_norm, matrices=output)
        stage("project_and_add", matrices=output)

    def _add_feed_forward(self, prefix: str, part: Dense, norm: Norm | None) -> None:
        """Gate, up and down; the gate quantises what it writes where no norm comes between."""
        stage = self.decoder.add_stage
        gate_and_up = self._matrices([f"{prefix}ffn_gate", f"{prefix}ffn_up"])
        before = self._norm(f"{prefix}ffn_norm", norm)
        stage("norm_and_quantise", norm=before, matrices=gate_and_up)
        down = self._matrices([f"{prefix}ffn_down"])
        written_as = self._gated_format(part, down[0])
        stage("gate_and_up", matrices=gate_and_up, gate=part.activation, quantised=written_as)
        if written_as == "floats":
            inner = self._norm(f"{prefix}ffn_sub_norm", part.inner_norm)
            stage("norm_and_quantise", input="gated", norm=inner, matrices=down)
        stage("project_and_add", matrices=down)

    def _add_experts(self, prefix: str, part: Experts, norm: Norm | None) -> None:
        stage, lowered = self.decoder.add_stage, ExpertLowering(self.decoder, self._tensors, prefix)
        index = lowered.add(part)
        before = self._norm(f"{prefix}ffn_norm", norm)
        matrices = [lowered.router, lowered.gate, lowered.up]
        stage("norm_and_quantise", norm=before, matrices=matrices)
        stage("route", experts=index)
        stage("expert_gate_and_up", experts=index)
        stage("expert_down", experts=index, output="hidden")

    def _gated_format(self, part: Dense, down: int) -> str:
        """The format that a gate writes for the GEMM with `down`. With blocks a task is 256
        outputs, and each thread needs some of them."""
        activations = self.decoder.activation_format(down)
        too_few = part.size < 4 * native.activation_block_size * self._num_threads
        if (
            part.inner_norm is not None
            or activations == "per_token"
            or (activations == "blocks" and too_few)
        ):
            return "floats"
        return activations

    def add_embedding_and_head(self) -> None:
        embedding = self._matrices(["token_embd"])[0]
        tied = self._spec.tied_head
        output_norm = self._norm("output_norm", self._spec.output_norm)
        assert output_norm is not None
        self.decoder.set_embedding_and_head(
            embedding=embedding,
            output_norm=output_norm,
            head=embedding if tied else self._matrices(["output"])[0],
        )

    def _matrices(self, names: list[str]) -> list[int]:
        """The matrices of one stage. One scale a token only where all of them are ternary."""
        formats = [self._tensors[f"{name}.weight"].format for name in names]
        per_token = self._per_token_scale and all(
            takes_bytes_by_token(self._spec, known) for known in formats
        )
        return [self._matrix(name, per_token) for name in names]

    def _matrix(self, name: str, per_token_scale: bool) -> int:
        """Read and pack a matrix; the bytes of the file are not needed after that."""
        tensor = self._tensors[f"{name}.weight"]
        out_size, in_size = tensor.shape
        return self.decoder.add_matrix(
            tensor.format.name,
            tensor.blocks,
            out_size,
            in_size,
            per_token_scale=per_token_scale,
            residual_pass=name.endswith(RESIDUAL_PASS),
            scale=tensor.scale * self._scale(name),
            bias=self._bias(name),
        )

    def _scale(self, name: str) -> float:
        tensor = self._tensors.get(f"{name}.scale")
        return 1.0 if tensor is None else float(tensor.to_float32()[0])

    def _bias(self, name: str) -> int:
        full = f"{name}.bias"
        return self._vector(full) if full in self._tensors else _NO_VECTOR

    def _norm(self, name: str, norm: Norm | None) -> "native.Norm | None":
        if norm is None:
            return None
        return native.Norm(weight=self._vector(f"{name}.weight"), epsilon=norm.epsilon)

    def _vector(self, name: str) -> int:
        return self.decoder.add_vector(self._tensors[name].to_float32())


# ---- memory, known before a weight is packed


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The weights as the kernels keep them, to the byte."""
    return sum(_packed_bytes(name, tensor, tensors) for name, tensor in tensors.items())


def _packed_bytes(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> int:
    router = router_bytes(name, tensor, tensors)
    if router is not None:
        return router
    if len(tensor.shape) < 2:
        return _FLOAT_BYTES * tensor.num_weights
    *stacked, out_size, in_size = tensor.shape
    return math.prod(stacked) * native.packed_bytes(tensor.format.name, out_size, in_size)


def kv_bytes_per_token(spec: ModelSpec, is_int8: bool) -> int:
    if not is_int8:
        return 2 * spec.num_kv_elements
    num_scales = sum(2 * layer.mixer.num_kv_heads for layer in spec.layers)
    return spec.num_kv_elements + num_scales * _KV_SCALE_BYTES


def workspace_bytes(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    num_rows: int,
    num_positions: int,
    num_threads: int = 1,
) -> int:
    """About what steps of so many rows, one of which samples, work in; rope tables included."""
    mixers = {layer.mixer for layer in spec.layers}
    projected = max(_projected_size(part) for part in mixers)
    attended = max(part.num_heads * part.value_dim for part in mixers)
    widest = max(spec.hidden_size, spec.ffn_size, attended)
    floats_per_row = spec.hidden_size + projected + attended + spec.ffn_size
    bytes_per_row = _FLOAT_BYTES * floats_per_row
    for activations, _ in _activation_formats(tensors):
        bytes_per_row += 2 * record_bytes(activations, widest)
    bytes_per_row += slot_bytes(spec, tensors)
    tables = num_positions * sum(rope.dims for rope in spec.ropes)
    heads = max(part.head_dim for part in mixers), max(part.value_dim for part in mixers)
    scratch = num_threads * native.thread_scratch_floats(*heads)
    floats = tables + spec.vocabulary_size + scratch
    return num_rows * bytes_per_row + _FLOAT_BYTES * floats


def _projected_size(part: Attention) -> int:
    """Queries, keys and values of one row."""
    return part.query_size + part.kv_size + part.num_kv_heads * part.value_dim


def _activation_formats(tensors: Mapping[str, Tensor]) -> set[tuple[str, bool]]:
    """The formats that activations are kept in; True: also for a residual pass."""
    found = set()
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1:
            activations = native.activation_format(tensor.format.name)
            found.add((activations, False))
            if name.endswith(f"{RESIDUAL_PASS}.weight") and activations != "floats":
                found.add((activations, True))
    return found
