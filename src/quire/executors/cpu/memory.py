"""What the CPU executor takes, known before a weight is packed."""

from collections.abc import Mapping

from quire.executors.cpu.native import native_module
from quire.loader.tensor import Tensor
from quire.model.spec import ModelSpec

_FLOAT_BYTES = 4
_GROUP_SIZE, _GROUP_BYTES = 32, 64  # activations as bytes, with their scale and sums
_SCALE_BYTES = 4  # of int8 keys or values, for each token and head


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The weights as the kernels keep them, to the byte."""
    packed_bytes = native_module().packed_bytes
    return sum(
        packed_bytes(tensor.format.name, *tensor.shape)
        if len(tensor.shape) == 2
        else _FLOAT_BYTES * tensor.num_weights
        for tensor in tensors.values()
    )


def kv_bytes_per_token(spec: ModelSpec, is_int8: bool) -> int:
    if not is_int8:
        return 2 * spec.num_kv_elements
    return spec.num_kv_elements + 2 * spec.num_layers * spec.num_kv_heads * _SCALE_BYTES


def workspace_bytes(
    spec: ModelSpec, tensors: Mapping[str, Tensor], num_rows: int, num_positions: int
) -> int:
    """About what steps of so many rows, one of which samples, work in; rotations included."""
    widest = max(spec.hidden_size, spec.ffn_size, spec.num_heads * spec.head_dim)
    projected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    has_floats = any(t.format.is_float and len(t.shape) == 2 for t in tensors.values())
    floats_a_row = spec.hidden_size + 2 * projected + spec.ffn_size + 2 * widest * has_floats
    bytes_a_row = _FLOAT_BYTES * floats_a_row + 2 * widest // _GROUP_SIZE * _GROUP_BYTES
    rotations = num_positions * spec.rope.dims
    return num_rows * bytes_a_row + _FLOAT_BYTES * (rotations + spec.vocabulary_size)
