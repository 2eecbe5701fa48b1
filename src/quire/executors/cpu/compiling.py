"""From a ModelSpec and its tensors to a native decoder: weights packed, stages listed once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.errors import UnsupportedModelError
from quire.executors.cpu.native import native_module
from quire.loader.tensor import Tensor
from quire.model.spec import Activation, ModelSpec

_NO_VECTOR = -1
_POSITIONS_AT_ONCE = 4096
_BLOCK = 256  # activations that share a scale where K-quants are multiplied
_TERNARY = ("TQ1_0", "TQ2_0")
# Rounding what values are made of costs more accuracy than any other product's rounding, and they
# are a small part of the work: this one is multiplied with what rounding left, too.
REFINED = "attn_v"


@dataclass(frozen=True, slots=True)
class Threads:
    count: int
    may_spin: bool  # whether waiting threads may burn their cores


def compile_decoder(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: Threads,
    *,
    unit: str = "",
    whole_rows: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Any:
    """Pack every tensor and list the stages of a step.

    `unit` names the instruction set ("": the best there is). `whole_rows`: activations of a BitNet
    model's ternary products have one scale a row, as it was trained; else one for each group of 32.
    """
    try:
        compiler = _Compiler(spec, tensors, threads, unit, whole_rows)
        for layer in range(spec.num_layers):
            compiler.add_layer(layer)
            if tell is not None:
                tell(f"packing weights: layer {layer + 1} of {spec.num_layers}")
        compiler.add_ends()
    except (ValueError, OverflowError) as error:  # native code checks what it is given once more
        raise UnsupportedModelError(f"the CPU kernels cannot hold this model: {error}") from error
    return compiler.decoder


class _Compiler:
    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        threads: Threads,
        unit: str,
        whole_rows: bool,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self._native = native_module()
        self._num_threads = threads.count
        self._whole_rows = whole_rows and spec.sub_norms  # which only BitNet models have
        self.decoder = self._native.make_decoder(
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
        names = [f"blk.{layer}.attn_{part}" for part in "qkv"]
        qkv = self._matrices(names)
        stage("prepare", norm=self._norm(layer, "attn_norm"), matrices=qkv)
        stage("project", matrices=qkv)
        has_norms = spec.qk_norm
        stage(
            "turn",
            layer=layer,
            query_norm=self._norm(layer, "attn_q_norm") if has_norms else _NO_VECTOR,
            key_norm=self._norm(layer, "attn_k_norm") if has_norms else _NO_VECTOR,
        )
        stage("attend", layer=layer)
        self._add_output(layer, "mixed", "attn_sub_norm", "attn_output")
        gate_and_up = self._matrices([f"blk.{layer}.ffn_gate", f"blk.{layer}.ffn_up"])
        stage("prepare", norm=self._norm(layer, "ffn_norm"), matrices=gate_and_up)
        self._add_gated(layer, gate_and_up)

    def _add_output(self, layer: int, place: str, norm: str, name: str) -> None:
        """A product that is added to the state, of what lies in `place`."""
        matrices = self._matrices([f"blk.{layer}.{name}"])
        self._add_prepared(layer, place, norm, matrices)
        self.decoder.add_stage("add", matrices=matrices)

    def _add_prepared(self, layer: int, place: str, norm: str, matrices: list[int]) -> None:
        index = self._norm(layer, norm) if self._spec.sub_norms else _NO_VECTOR
        self.decoder.add_stage("prepare", input=place, norm=index, matrices=matrices)

    def _add_gated(self, layer: int, gate_and_up: list[int]) -> None:
        """The feed-forward product; quantised as it is made where nothing stands between."""
        down = self._matrices([f"blk.{layer}.ffn_down"])
        form = self._quantised(down[0])
        self.decoder.add_stage("gate", matrices=gate_and_up, quantised=form)
        if form == "floats":
            self._add_prepared(layer, "gated", "ffn_sub_norm", down)
        self.decoder.add_stage("add", matrices=down)

    def _quantised(self, down: int) -> str:
        """In what form a gate may write for the product `down`; with blocks a task is 256 rows, and
        each thread needs some of them."""
        form: str = self.decoder.form_of(down)
        too_few = self._spec.ffn_size < 4 * _BLOCK * self._num_threads
        if self._spec.sub_norms or form == "row" or (form == "blocks" and too_few):
            return "floats"
        return form

    def add_ends(self) -> None:
        embedding = self._matrices(["token_embd"])[0]
        tied = self._spec.tied_head
        self.decoder.set_ends(
            embedding=embedding,
            output_norm=self._vector("output_norm.weight"),
            head=embedding if tied else self._matrices(["output"])[0],
        )

    def _matrices(self, names: list[str]) -> list[int]:
        """The matrices of one product. One scale a row only where all of them are ternary."""
        formats = [self._tensors[f"{name}.weight"].format.name for name in names]
        whole = self._whole_rows and all(name in _TERNARY for name in formats)
        return [self._matrix(name, whole) for name in names]

    def _matrix(self, name: str, whole_rows: bool) -> int:
        """Read, packed, and not needed any more as it was."""
        tensor = self._tensors[f"{name}.weight"]
        index: int = self.decoder.add_matrix(
            tensor.format.name,
            tensor.data,
            *tensor.shape,
            whole_rows=whole_rows,
            refined=name.endswith(REFINED),
            scale=self._scale(name),
            bias=self._bias(name),
        )
        return index

    def _scale(self, name: str) -> float:
        tensor = self._tensors.get(f"{name}.scale")
        return 1.0 if tensor is None else float(tensor.to_float32()[0])

    def _bias(self, name: str) -> int:
        full = f"{name}.bias"
        return self._vector(full) if full in self._tensors else _NO_VECTOR

    def _norm(self, layer: int, name: str) -> int:
        return self._vector(f"blk.{layer}.{name}.weight")

    def _vector(self, name: str) -> int:
        index: int = self.decoder.add_vector(self._tensors[name].to_float32())
        return index


def rope_tables(
    spec: ModelSpec, num_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of positions 0 to `num_positions`, [positions * dims / 2] each."""
    frequencies, magnitude = spec.rope.frequencies(), spec.rope.magnitude
    cosines = np.empty((num_positions, len(frequencies)), np.float32)
    sines = np.empty_like(cosines)
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):  # doubles take more room than tables
        stop = min(start + _POSITIONS_AT_ONCE, num_positions)
        angles = np.arange(start, stop)[:, None] * frequencies
        cosines[start:stop] = np.cos(angles) * magnitude
        sines[start:stop] = np.sin(angles) * magnitude
    return cosines.ravel(), sines.ravel()
