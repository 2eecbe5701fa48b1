"""An openvino for tests: the tensors that requests are made of."""

from typing import Any


class Tensor:
    def __init__(self, array: Any) -> None:
        assert array.ndim == 2
        assert array.dtype == "int64"
        self.data = array
