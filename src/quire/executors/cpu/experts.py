"""Lowers a routed feed-forward: its router as floats, its experts' matrices stacked and packed a
few at a time, so that no second copy of them is held."""

from collections.abc import Mapping

import numpy as np

from quire.executors.cpu.native import native
from quire.loader.tensor import Tensor
from quire.model.spec import Experts, ModelSpec

_NO_VECTOR = -1
_NO_MATRIX = -1
_PACKED_AT_ONCE = 64 << 20  # bytes of the file that are read before they are packed
_FLOAT_BYTES = 4
ROUTER, SHARED_GATE = "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"


class ExpertLowering:
    """The experts of one layer; `prefix` is that of its tensors."""

    def __init__(
        self, decoder: "native.Decoder", tensors: Mapping[str, Tensor], prefix: str
    ) -> None:
        self._decoder = decoder
        self._tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        self.router = self._add_router()
        has_gate = "ffn_gate_exps.weight" in self._tensors
        self.gate = self._add_stack("ffn_gate_exps") if has_gate else _NO_MATRIX
        self.up, self.down = (self._add_stack(f"ffn_{name}_exps") for name in ("up", "down"))

    @property
    def first(self) -> list[int]:
        """What experts multiply their input with."""
        return [self.up] if self.gate == _NO_MATRIX else [self.gate, self.up]

    def add(self, part: Experts) -> int:
        """The index of the experts in the decoder."""
        router = part.router
        return self._decoder.add_experts(
            router=self.router,
            gate=self.gate,
            up=self.up,
            down=self.down,
            count=part.count,
            num_used=part.num_used,
            scoring=router.scoring,
            normalises=router.normalises,
            scale=router.scale,
            num_groups=router.num_groups,
            num_used_groups=router.num_used_groups,
            num_group_best=router.num_group_best,
            weighs_input=router.weighs_input,
            has_shared_gate=part.has_shared_gate,
            choice_bias=self._vector("exp_probs_b.bias"),
            factors=self._vector("ffn_down_exps.scale"),
            activation=part.activation,
        )

    def router_norm(self, part: Experts) -> "native.Norm | None":
        """Gemma 4's, of what its router sees: its weights have the scale of a score in them."""
        norm, scale = part.router.input_norm, self._tensors.get("ffn_gate_inp.scale")
        if norm is None or scale is None:
            return None
        weights = scale.to_float32()
        weights = weights * np.float32(len(weights) ** -0.5)
        return native.Norm(norm.epsilon, self._decoder.add_vector(weights))

    def _add_router(self) -> int:
        """A row for each expert, then one for the shared expert's gate. They are floats: a router
        is small, and rounded activations would choose other experts."""
        rows, bias = self._tensors[ROUTER].to_float32(), self._tensors.get("ffn_gate_inp.bias")
        biases = None if bias is None else bias.to_float32()
        if SHARED_GATE in self._tensors:
            rows = np.concatenate([rows, self._tensors[SHARED_GATE].to_float32()[None]])
            biases = None if biases is None else np.append(biases, np.float32(0.0))
        return self._decoder.add_matrix(
            "F32",
            np.ascontiguousarray(rows).reshape(-1).view(np.uint8),
            len(rows),
            rows.shape[1],
            bias=_NO_VECTOR if biases is None else self._decoder.add_vector(biases),
        )

    def _add_stack(self, name: str) -> int:
        tensor = self._tensors[f"{name}.weight"]
        count, out_size, in_size = tensor.shape
        stack = self._decoder.add_stack(
            tensor.format.name,
            count,
            out_size,
            in_size,
            scale=tensor.scale,
            bias=self._vector(f"{name}.bias"),
        )
        at_once = max(1, _PACKED_AT_ONCE * count // tensor.nbytes)
        for first in range(0, count, at_once):
            last = min(count, first + at_once)
            blocks = tensor.row_blocks(first, last)
            self._decoder.pack_stacked(stack, tensor.format.name, blocks, first, last - first)
        return stack

    def _vector(self, name: str) -> int:
        if name not in self._tensors:
            return _NO_VECTOR
        return self._decoder.add_vector(self._tensors[name].to_float32().reshape(-1))


# ---- memory, known before a weight is packed


def router_bytes(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> int | None:
    """The bytes of a router, or of what is kept in it, once packed; None for other tensors."""
    if name.endswith(SHARED_GATE):
        return 0
    if not name.endswith(ROUTER):
        return None
    count, in_size = tensor.shape
    has_shared_gate = name.removesuffix(ROUTER) + SHARED_GATE in tensors
    return native.packed_bytes("F32", count + has_shared_gate, in_size)


def record_bytes(activations: str, size: int) -> int:
    """So many activations of one token, in records of this format."""
    in_record, num_bytes = native.activation_record(activations)
    return int((size // in_record | 1) * num_bytes)


def slot_bytes(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> int:
    """What routed layers work in, for each token of a step: its scores, and for each of its experts
    the input and what the gate gives, quantised."""
    largest = 0
    for index, layer in enumerate(spec.layers):
        part = layer.feed_forward
        if isinstance(part, Experts):
            formats = {
                name: native.activation_format(
                    tensors[f"blk.{index}.ffn_{name}_exps.weight"].format.name
                )
                for name in ("gate", "up", "down")
                if part.is_gated or name != "gate"
            }
            inputs = {known for name, known in formats.items() if name != "down"}
            width = part.latent_size or spec.hidden_size
            slot = sum(record_bytes(known, width) for known in inputs)
            slot += record_bytes(formats["down"], part.size)
            own = part.num_used * slot + _FLOAT_BYTES * part.count
            largest = max(largest, own)
    return largest
