"""A BitNet decoder with one activation scale a token, its ternary GEMMs done by numpy.

The GEMMs are the point: integer sums of ternary codes and bytes, scaled in one fixed order. What
lies between them (norms, rope, attention, gates) comes from the native row kernels, which have
tests of their own, so that the logits can be compared bit for bit.
"""

from typing import Any

import numpy as np
from tests.executors.cpu.blocks import Floats, Matrix, activations, gemm

from quire.executors.cpu.native import native
from quire.loader.tensor import Tensor
from quire.model.loading import Model

_BLOCK = 256  # ternary weights that share a scale
_GROUP = 32  # whose sum is scaled and added at once


class EmulatedBitNet:
    def __init__(self, model: Model, unit: str, num_tokens: int) -> None:
        self._spec = model.spec
        self._tensors = model.tensors
        self._unit = unit
        self._angles = model.spec.rope.tables(num_tokens)
        blocks = np.arange(-(-num_tokens // 16), dtype=np.int32)
        self._caches = [
            native.Cache(
                unit,
                num_heads=self._spec.num_heads,
                num_kv_heads=self._spec.num_kv_heads,
                head_dim=self._spec.head_dim,
                block_table=blocks,
                scale=float(np.float32(1) / np.sqrt(np.float32(self._spec.head_dim))),
            )
            for _ in range(self._spec.num_layers)
        ]

    def logits(self, token: int, position: int) -> Floats:
        """The logits after a token; positions come in order."""
        state = self._tensors["token_embd.weight"].rows_float32(token, token + 1)[0].copy()
        for layer in range(self._spec.num_layers):
            state += self._attention(layer, self._norm(state, f"blk.{layer}.attn_norm"), position)
            state += self._feed_forward(layer, self._norm(state, f"blk.{layer}.ffn_norm"))
        return self._head(self._norm(state, "output_norm"))

    def _attention(self, layer: int, x: Floats, position: int) -> Floats:
        codes = self._bytes(x)
        query, key, value = (self._product(f"blk.{layer}.attn_{name}", *codes) for name in "qkv")
        for heads in (query, key):
            angles = [table[position] for table in self._angles]
            interleaved = self._spec.rope.interleaved
            native.rope(self._unit, heads, self._spec.head_dim, interleaved, *angles)
        cache, output = self._caches[layer], np.empty_like(query)
        cache.store(position, key, value)
        cache.attend(position, 1, query, output)
        output = self._norm(output, f"blk.{layer}.attn_sub_norm")
        return self._product(f"blk.{layer}.attn_output", *self._bytes(output))

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        codes = self._bytes(x)
        gate, up = (self._product(f"blk.{layer}.ffn_{name}", *codes) for name in ("gate", "up"))
        gated = np.empty_like(gate)
        native.gate(self._unit, self._spec.activation, gate, up, gated)
        gated = self._norm(gated, f"blk.{layer}.ffn_sub_norm")
        return self._product(f"blk.{layer}.ffn_down", *self._bytes(gated))

    def _norm(self, x: Floats, name: str) -> Floats:
        out = np.empty_like(x)
        weight = self._tensors[f"{name}.weight"].to_float32()
        native.rms_norm(self._unit, x, weight, self._spec.norm_epsilon, out)
        return out

    def _bytes(self, x: Floats) -> tuple[np.ndarray[Any, Any], np.float32]:
        """Codes from -127 to 127 and the one scale of the row, plainly."""
        largest = np.abs(x).max()
        sizes = np.floor(np.abs(x * (np.float32(127) / largest)).astype(np.float64) + 0.5)
        return np.copysign(sizes, x).astype(np.int64), np.float32(largest / np.float32(127))

    def _product(self, name: str, codes: np.ndarray[Any, Any], scale: np.float32) -> Floats:
        weights, scales = ternary(self._tensors[f"{name}.weight"])  # [rows, in], [rows, in / 256]
        sums = (weights * codes).reshape(len(weights), -1, _GROUP).sum(axis=2)
        total = np.zeros(len(weights), np.float32)
        for group in range(sums.shape[1]):
            # In double precision product and sum are exact: one rounding, as in a fused add.
            scaled = sums[:, group] * scales[:, group * _GROUP // _BLOCK].astype(np.float64)
            total = (total + scaled).astype(np.float32)
        return total * scale

    def _head(self, x: Floats) -> Floats:
        """Not ternary: its products are tested for themselves."""
        tensor = self._tensors["token_embd.weight"]
        rows, size = tensor.shape
        matrix = Matrix(tensor.format.name, rows, size, tensor.data.reshape(rows, -1))
        packed = matrix.packed()
        columns = activations(x[None], packed, unit=self._unit)
        return np.asarray(gemm(self._unit, packed, columns, rows)[0])


def ternary(tensor: Tensor) -> tuple[np.ndarray[Any, Any], Floats]:
    """A ternary matrix as its codes (-1, 0, 1) and its blocks' scales."""
    rows, size = tensor.shape
    blocks = tensor.data.reshape(rows, size // _BLOCK, -1)
    halves = np.ascontiguousarray(blocks[..., -2:])
    scales = halves.view(np.float16)[..., 0].astype(np.float32)
    weights = tensor.to_float32().reshape(rows, -1, _BLOCK)
    return np.rint(weights / scales[..., None]).astype(np.int64).reshape(rows, size), scales
