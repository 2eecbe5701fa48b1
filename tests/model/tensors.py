"""Tensors out of plain arrays, for specs that have no file."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.loader.tensor import Tensor
from quire.quant.formats import format_named


def tensor(name: str, weights: npt.ArrayLike) -> Tensor:
    array = np.asarray(weights, np.float32)
    return Tensor(name, array.shape, format_named("F32", name), array.ravel().view(np.uint8))


def zeros(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    return {name: tensor(name, np.zeros(shape)) for name, shape in shapes.items()}
