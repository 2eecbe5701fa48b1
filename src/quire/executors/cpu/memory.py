"""What the CPU executor takes, known before a weight is packed."""

from collections.abc import Mapping

from quire.executors.cpu.compiling import REFINED
from quire.executors.cpu.native import native_module
from quire.loader.tensor import Tensor
from quire.model.spec import ModelSpec

_FLOAT_BYTES = 4
# Activations as the kernels take them: how many lie in a record, and the bytes of it.
_RECORDS = {"groups": (32, 64), "blocks": (256, 320), "floats": (1, _FLOAT_BYTES)}
_SCALE_BYTES = 4  # of int8 keys or values, for each token and head
# What each thread works in, in floats: results of a product, and queries that attend together.
_PRODUCT_SCRATCH = 256 * (32 + 256 + 16)
_QUERIES_PACKED = 128 + 8


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
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    num_rows: int,
    num_positions: int,
    num_threads: int = 1,
) -> int:
    """About what steps of so many rows, one of which samples, work in; rotations included."""
    widest = max(spec.hidden_size, spec.ffn_size, spec.num_heads * spec.head_dim)
    projected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    floats_a_row = spec.hidden_size + 2 * projected + spec.ffn_size
    bytes_a_row = _FLOAT_BYTES * floats_a_row
    for form, _ in _forms(tensors):
        size, num_bytes = _RECORDS[form]
        bytes_a_row += 2 * (widest // size | 1) * num_bytes
    rotations = num_positions * spec.rope.dims
    a_thread = _PRODUCT_SCRATCH + _QUERIES_PACKED * -(-spec.head_dim // 16) * 16
    floats = rotations + spec.vocabulary_size + num_threads * a_thread
    return num_rows * bytes_a_row + _FLOAT_BYTES * floats


def _forms(tensors: Mapping[str, Tensor]) -> set[tuple[str, bool]]:
    """The forms in which activations are kept, and those of what rounding left of them."""
    form_of = native_module().form_of
    found = set()
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            form = form_of(tensor.format.name)
            found.add((form, False))
            if name.endswith(f"{REFINED}.weight") and form != "floats":
                found.add((form, True))
    return found
