"""Models with matrices in bfloat16 for those in float32, so that executors without float32 weights
run them. Learned positions stay in float32, as GGUF files have them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from quire.loader.tensor import Tensor
from quire.model.loading import Model, load_model
from quire.quant.formats import format_named


def load_in_bfloat(path: Path) -> Model:
    model = load_model(path)
    tensors = {
        name: _in_bfloat(tensor) if _is_matrix(tensor) else tensor
        for name, tensor in model.tensors.items()
    }
    return replace(model, tensors=tensors)


def _is_matrix(tensor: Tensor) -> bool:
    is_other = tensor.name == "position_embd.weight" or not tensor.name.endswith(".weight")
    return len(tensor.shape) > 1 and tensor.format.name == "F32" and not is_other


def _in_bfloat(tensor: Tensor) -> Tensor:
    bits = tensor.to_float32().reshape(-1).view(np.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1)  # to even
    data = (nearest >> 16).astype("<u2").view(np.uint8)
    return Tensor(tensor.name, tensor.shape, format_named("BF16", tensor.name), data)
