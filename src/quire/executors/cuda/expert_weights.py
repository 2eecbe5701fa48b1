"""The weights of a mixture of experts on the device: experts stacked in planes, and the router."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.core.errors import UnsupportedModelError
from quire.executors.cuda.planes import (
    BLOCK,
    DELTA_ROWS,
    LARGEST_POWER,
    Array,
    Planes,
    operand_order,
    padded,
    reorder_stack,
    to_operand_order,
)
from quire.loader.tensor import Tensor
from quire.model.spec import Experts

ROUTER_MATRIX = "ffn_gate_inp.weight"  # any format: it is decoded when it is loaded
MAX_EXPERTS = 512  # whose scores a warp holds
MAX_USED = 32
MAX_GROUPS = 16
MAX_GROUP_BEST = 4


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A matrix of each expert, one below the other."""

    planes: Planes
    rows_per_expert: int  # with padding
    used_rows: int  # of an expert: those after them are padding
    bias: Array | None  # float32 [experts * rows_per_expert]
    num_columns: int  # without padding

    @property
    def ends_in_half(self) -> bool:
        """Whether the second half of the last block of columns is padding."""
        return 0 < self.num_columns % BLOCK <= BLOCK // 2


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """float32 as the sum of two float16 matrices times 2**exponent: [experts, columns]."""

    high: Array
    low: Array
    exponent: int
    bias: Array | None
    choice_bias: Array | None
    factors: Array | None = None  # of each expert's weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    part: Experts
    router: RouterWeights
    gate_up: Stack  # eight gates, then their eight values, and so on; or values alone
    down: Stack

    @property
    def num_bytes(self) -> int:
        planes = self.gate_up.planes.num_bytes + self.down.planes.num_bytes
        return int(planes + 4 * self.router.high.numel())

    @property
    def formats(self) -> tuple[str, ...]:
        return self.gate_up.planes.format, self.down.planes.format


def check_experts(part: Experts, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Refuse what no kernel computes, before anything is moved."""
    router = part.router
    bounds = {
        "num_experts": (part.count, MAX_EXPERTS),
        "experts used": (part.num_used, MAX_USED),
        "groups of experts": (router.num_groups, MAX_GROUPS),
        "experts that make a group's score": (router.num_group_best, MAX_GROUP_BEST),
    }
    for what, (value, limit) in bounds.items():
        if value > limit:
            raise UnsupportedModelError(
                f"{what} is {value}, but the CUDA executor runs at most {limit}: use device='cpu'"
            )
    names = [f"{prefix}ffn_{x}_exps.weight" for x in ("gate", "up")]
    gate, up = (tensors[x].format.name if x in tensors else "" for x in names)
    if part.is_gated and gate != up:
        raise UnsupportedModelError(
            f"{prefix}ffn_gate_exps.weight has format {gate} and {prefix}ffn_up_exps.weight {up}: "
            "the CUDA executor runs experts whose gates and values have one format: use "
            "device='cpu', or a file of another mix"
        )


class ExpertLoader:
    """Moves a layer's experts to the device, a stack at a time, and reorders them there."""

    def __init__(self, tensors: Mapping[str, Tensor], device: str) -> None:
        self._tensors = tensors
        self._device = device

    def load(self, part: Experts, prefix: str) -> ExpertWeights:
        return ExpertWeights(
            part, self._router(part, prefix), self._gate_up(part, prefix), self._down(prefix)
        )

    def _router(self, part: Experts, prefix: str) -> RouterWeights:
        weights = self._floats(f"{prefix}{ROUTER_MATRIX}")
        factors = None
        if part.router.input_norm is not None:
            scale = self._floats(f"{prefix}ffn_gate_inp.scale")
            weights = weights * (scale * len(scale) ** -0.5)
            factors = self._floats(f"{prefix}ffn_down_exps.scale")
        whole = torch.zeros((len(weights), padded(weights.shape[1])), device=self._device)
        whole[:, : weights.shape[1]] = weights
        largest = float(whole.abs().max())
        exponent = 0
        if 0.0 < largest < float("inf"):
            exponent = int(torch.frexp(whole.abs().max()).exponent) - LARGEST_POWER
        scaled = to_operand_order(whole) * 2.0**-exponent
        high = scaled.to(torch.float16)
        low = (scaled - high.float()).to(torch.float16)
        bias, choice_bias = (
            self._optional(f"{prefix}{x}.bias") for x in ("ffn_gate_inp", "exp_probs_b")
        )
        halves = (high.contiguous(), low.contiguous())
        return RouterWeights(*halves, exponent, bias, choice_bias, factors)

    def _gate_up(self, part: Experts, prefix: str) -> Stack:
        size = part.size
        order = operand_order(padded(size))
        if not part.is_gated:
            name = f"{prefix}ffn_up_exps"
            return self._stack([name], torch.where(order < size, order, size), size)
        gates = torch.where(order < size, order, 2 * size)
        ups = torch.where(gates < size, gates + size, 2 * size)
        rows = torch.stack([gates.view(-1, 8), ups.view(-1, 8)], dim=1).reshape(-1)
        names = [f"{prefix}ffn_{x}_exps" for x in ("gate", "up")]
        return self._stack(names, rows, 2 * size)

    def _down(self, prefix: str) -> Stack:
        name = f"{prefix}ffn_down_exps"
        hidden = self._tensors[f"{name}.weight"].shape[1]
        order = operand_order(padded(hidden))
        return self._stack([name], torch.where(order < hidden, order, hidden), hidden)

    def _stack(self, names: list[str], rows: Array, zero_row: int) -> Stack:
        """`rows` of what the names stack; `zero_row` is that of padding."""
        used_rows = int(torch.nonzero(rows != zero_row).max()) + 1
        tensors = [self._tensors[f"{name}.weight"] for name in names]
        assert len(rows) % DELTA_ROWS == 0
        raws = [
            torch.from_numpy(x.data).to(self._device).view(x.shape[0], x.shape[1], -1)
            for x in tensors
        ]
        rows = rows.to(self._device)
        planes = reorder_stack(tensors[0].format.name, raws, rows, tensors[0].shape[2])
        del raws
        biases = [self._optional(f"{name}.bias") for name in names]
        bias = None
        if biases[0] is not None:
            zeros = biases[0].new_zeros((len(biases[0]), 1))
            bias = torch.cat([*biases, zeros], dim=1)[:, rows].reshape(-1).contiguous()
        return Stack(planes, len(rows), used_rows, bias, tensors[0].shape[2])

    def _floats(self, name: str) -> Array:
        return torch.from_numpy(self._tensors[name].to_float32()).to(self._device)

    def _optional(self, name: str) -> Array | None:
        return self._floats(name) if name in self._tensors else None
