"""As much of a torch as the worker needs, on numpy, for tests."""

from contextlib import nullcontext
from typing import Any

import numpy as np

__version__ = "0.0"
_threads = 0


class Tensor(np.ndarray):
    def argmax(self, axis: Any = None, keepdim: bool = False) -> Any:  # type: ignore[override]
        return np.asarray(self).argmax(axis, keepdims=keepdim).view(Tensor)


def tensor(values: Any, device: str) -> Any:
    assert device == "cpu"
    return np.array(values).view(Tensor)


def set_num_threads(threads: int) -> None:
    global _threads
    _threads = threads


def get_num_threads() -> int:
    return _threads


def inference_mode() -> Any:
    return nullcontext()
