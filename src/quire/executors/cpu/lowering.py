"""Lowers a ModelSpec and its tensors to a native decoder: weights packed, stages listed once; and
says beforehand what memory that takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.errors import UnsupportedModelError
from quire.executors.cpu.native import native
from quire.loader.tensor import Tensor
from quire.model.spec import Activation, ModelSpec, check_lowered, takes_bytes_by_token

_NO_VECTOR = -1
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
            ffn_size=spec.ffn_size,
            vocabulary_size=spec.vocabulary_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rope_dims=spec.rope.dims,
            rope_interleaved=spec.rope.interleaved,
            norm_epsilon=spec.norm_epsilon,
            gate={Activation.SILU: 0, Activation.RELU2: 1}[spec.activation],
            attention_soft_cap=spec.attention_soft_cap,
            logit_soft_cap=spec.logit_soft_cap,
            windows=[window or 0 for window in spec.windows],
            unit=unit,
            num_threads=threads.count,
            may_spin=threads.may_spin,
        )

    def add_layer(self, layer: int) -> None:
        spec, stage = self._spec, self.decoder.add_stage
        qkv = self._matrices([f"blk.{layer}.attn_{name}" for name in "qkv"])
        stage("norm_and_quantise", norm=self._norm(layer, "attn_norm"), matrices=qkv)
        stage("project_qkv", matrices=qkv)
        stage(
            "rope_and_store",
            layer=layer,
            query_norm=self._norm(layer, "attn_q_norm") if spec.qk_norm else _NO_VECTOR,
            key_norm=self._norm(layer, "attn_k_norm") if spec.qk_norm else _NO_VECTOR,
        )
        stage("attend", layer=layer)
        output = self._matrices([f"blk.{layer}.attn_output"])
        self._add_sub_norm(layer, "attention_output", "attn_sub_norm", output)
        stage("project_and_add", matrices=output)
        gate_and_up = self._matrices([f"blk.{layer}.ffn_gate", f"blk.{layer}.ffn_up"])
        stage("norm_and_quantise", norm=self._norm(layer, "ffn_norm"), matrices=gate_and_up)
        self._add_feed_forward(layer, gate_and_up)

    def _add_sub_norm(self, layer: int, source: str, norm: str, matrices: list[int]) -> None:
        """Quantise `source` for a projection, after BitNet's norm where the model has it."""
        index = self._norm(layer, norm) if self._spec.sub_norms else _NO_VECTOR
        self.decoder.add_stage("norm_and_quantise", input=source, norm=index, matrices=matrices)

    def _add_feed_forward(self, layer: int, gate_and_up: list[int]) -> None:
        """Gate, up and down; the gate quantises what it writes where no norm comes between."""
        down = self._matrices([f"blk.{layer}.ffn_down"])
        written_as = self._gated_format(down[0])
        self.decoder.add_stage("gate_and_up", matrices=gate_and_up, quantised=written_as)
        if written_as == "floats":
            self._add_sub_norm(layer, "gated", "ffn_sub_norm", down)
        self.decoder.add_stage("project_and_add", matrices=down)

    def _gated_format(self, down: int) -> str:
        """The format that a gate writes for the GEMM with `down`. With blocks a task is 256
        outputs, and each thread needs some of them."""
        activations = self.decoder.activation_format(down)
        too_few = self._spec.ffn_size < 4 * native.activation_block_size * self._num_threads
        if (
            self._spec.sub_norms
            or activations == "per_token"
            or (activations == "blocks" and too_few)
        ):
            return "floats"
        return activations

    def add_embedding_and_head(self) -> None:
        embedding = self._matrices(["token_embd"])[0]
        tied = self._spec.tied_head
        self.decoder.set_embedding_and_head(
            embedding=embedding,
            output_norm=self._vector("output_norm.weight"),
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

    def _norm(self, layer: int, name: str) -> int:
        return self._vector(f"blk.{layer}.{name}.weight")

    def _vector(self, name: str) -> int:
        return self.decoder.add_vector(self._tensors[name].to_float32())


# ---- memory, known before a weight is packed


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The weights as the kernels keep them, to the byte."""
    return sum(
        native.packed_bytes(tensor.format.name, *tensor.shape)
        if len(tensor.shape) == 2
        else _FLOAT_BYTES * tensor.num_weights
        for tensor in tensors.values()
    )


def kv_bytes_per_token(spec: ModelSpec, is_int8: bool) -> int:
    if not is_int8:
        return 2 * spec.num_kv_elements
    return spec.num_kv_elements + 2 * spec.num_layers * spec.num_kv_heads * _KV_SCALE_BYTES


def workspace_bytes(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    num_rows: int,
    num_positions: int,
    num_threads: int = 1,
) -> int:
    """About what steps of so many rows, one of which samples, work in; rope tables included."""
    widest = max(spec.hidden_size, spec.ffn_size, spec.num_heads * spec.head_dim)
    projected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    bytes_per_row = _FLOAT_BYTES * (spec.hidden_size + 2 * projected + spec.ffn_size)
    for activations, _ in _activation_formats(tensors):
        size, num_bytes = native.activation_record(activations)
        bytes_per_row += 2 * (widest // size | 1) * num_bytes
    tables = num_positions * spec.rope.dims
    scratch = num_threads * native.thread_scratch_floats(spec.head_dim)
    floats = tables + spec.vocabulary_size + scratch
    return num_rows * bytes_per_row + _FLOAT_BYTES * floats


def _activation_formats(tensors: Mapping[str, Tensor]) -> set[tuple[str, bool]]:
    """The formats that activations are kept in; True: also for a residual pass."""
    found = set()
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            activations = native.activation_format(tensor.format.name)
            found.add((activations, False))
            if name.endswith(f"{RESIDUAL_PASS}.weight") and activations != "floats":
                found.add((activations, True))
    return found
