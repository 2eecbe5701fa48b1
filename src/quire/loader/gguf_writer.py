"""write_gguf: writes GGUF, version 3, little endian; one file, whole or not at all."""

import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError
from quire.loader.gguf import DEFAULT_ALIGNMENT, MAGIC, NUMBER_TYPES
from quire.loader.reading import Bytes
from quire.quant.formats import Format

VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64 = 4, 5, 6, 7, 8, 9, 10, 11

Scalar = str | int | float | bool
Field = Scalar | Sequence[Scalar] | npt.NDArray[np.generic]  # an array keeps its type
_BY_TYPE = {dtype: number for number, dtype in NUMBER_TYPES.items()}


class Writable(Protocol):
    """A tensor to write."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...  # rows first
    @property
    def format(self) -> Format: ...
    @property
    def nbytes(self) -> int: ...
    def pieces(self) -> Iterator[Bytes]:
        """Its bytes in order, asked for once, when they are written."""


# Called with how many bytes of tensors are written, and the tensor at work.
Progress = Callable[[int, str], None]


def write_gguf(
    path: str | Path,
    fields: Mapping[str, Field],
    tensors: Sequence[Writable],
    progress: Progress | None = None,
) -> None:
    """Write a model. Fields become the smallest type that other readers expect of such a value."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                _write(file, fields, tensors, progress)
            os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ModelFileError(f"cannot write {target}: {error.strerror or error}") from error


def _write(
    file: BinaryIO,
    fields: Mapping[str, Field],
    tensors: Sequence[Writable],
    progress: Progress | None,
) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(fields)))
    for key, value in fields.items():
        file.write(_string(key) + _field(key, value))
    offset = 0
    for tensor in tensors:
        file.write(_tensor_info(tensor, offset))
        offset += _aligned(tensor.nbytes)
    file.write(bytes(_aligned(file.tell()) - file.tell()))
    done = 0
    for tensor in tensors:
        begun = done
        for piece in tensor.pieces():
            done += file.write(piece.data)
            if progress is not None:
                progress(done, tensor.name)
        assert done - begun == tensor.nbytes, f"{tensor.name}: {done - begun} of {tensor.nbytes}"
        file.write(bytes(_aligned(tensor.nbytes) - tensor.nbytes))


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _tensor_info(tensor: Writable, offset: int) -> bytes:
    axes = tuple(reversed(tensor.shape))  # GGUF names the contiguous axis first
    info = _string(tensor.name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
    return info + struct.pack("<IQ", tensor.format.ggml_type, offset)


def _field(key: str, value: Field) -> bytes:
    if isinstance(value, str | int | float):
        kind = _kind(key, value)
        return struct.pack("<I", kind) + _packed(kind, value)
    if isinstance(value, np.ndarray):
        kind = _BY_TYPE[value.dtype.newbyteorder("<")]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + value.tobytes()
    kinds = {_kind(key, item) for item in value}
    if len(kinds) != 1:
        raise ModelFileError(f"field {key!r} must be a list of values of one type, got {value!r}")
    [kind] = kinds
    items = b"".join(_packed(kind, item) for item in value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items


def _kind(key: str, value: Scalar) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, str):
        return _STRING
    if isinstance(value, float):
        return _FLOAT32
    for kind, bits, low in ((_UINT32, 32, 0), (_INT32, 31, -(1 << 31)), (_UINT64, 64, 0)):
        if low <= value < 1 << bits:
            return kind
    if -(1 << 63) <= value < 0:
        return _INT64
    raise ModelFileError(f"field {key!r} is {value}, which takes more than 64 bits")


def _packed(kind: int, value: Scalar) -> bytes:
    if isinstance(value, str):
        return _string(value)
    codes = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _UINT64: "Q", _INT64: "q"}
    return struct.pack(f"<{codes[kind]}", value)


def _string(text: str) -> bytes:
    raw = text.encode(errors="surrogateescape")  # as the reader keeps tokens that are no UTF-8
    return struct.pack("<Q", len(raw)) + raw
