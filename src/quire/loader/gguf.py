"""GGUFFile: reads GGUF, versions 2 and 3, little endian, in one file or in parts.

    "GGUF" | version | number of tensors | number of fields | fields | tensor infos | pad | tensors

Files are not trusted. Everything they claim is checked against their length before it is used,
so a file can be refused but cannot make the reader allocate or touch what is not there.
"""

import math
import re
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.metadata import Lazy, Metadata
from quire.loader.ollama import as_llama_cpp
from quire.loader.reading import DISK, Cursor, FileBytes, Files, Region
from quire.loader.tensor import Tensor, packed_size
from quire.quant.formats import Format, format_of_ggml_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 16_384  # the largest sound files have some two thousand
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_PARTS = 512  # each is an open file; the largest models in use have some two hundred
_SMALLEST_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8


class GGUFFile:
    """An open GGUF model: its metadata, decoded on access, and its tensors, read on access.

    Use it as a context manager or call close(). Tensors stay valid: the file is closed with the
    last of them.
    """

    def __init__(self, path: str | Path, files: Files = DISK) -> None:
        self.path = Path(path)
        first = _read_part(self.path, files)
        parts = [first, *_read_other_parts(first, files)]
        self.metadata = first.metadata
        self.tensors: dict[str, Tensor] = {}
        for part in parts:
            self._add_tensors(part)
        if len(parts) > 1:
            expected = first.metadata.integer("split.tensors.count")
            if len(self.tensors) != expected:
                raise first.metadata.error(
                    "split.tensors.count",
                    f"is {expected}, but the {len(parts)} parts hold {len(self.tensors)} tensors",
                )
        self.metadata, self.tensors = as_llama_cpp(self.metadata, self.tensors)
        self.parts = tuple(part.path for part in parts)
        self.file_bytes = sum(part.file_bytes for part in parts)

    def _add_tensors(self, part: "_Part") -> None:
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise ModelFileError(f"{part.path.name}: tensor {name!r} is in another part too")
            self.tensors[name] = tensor

    def close(self) -> None:
        """Release the file."""
        self.metadata = Metadata(self.path.name, {})
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a model that may have several."""

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]
    file_bytes: int


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int  # from where the tensors begin
    nbytes: int


def _read_part(path: Path, files: Files) -> _Part:
    file = files.open(path)
    cursor = Cursor(file, path.name)
    num_tensors, num_fields = _read_preamble(cursor)
    metadata = read_metadata(cursor, num_fields)
    infos = _read_tensor_infos(cursor, num_tensors)
    alignment = _read_alignment(metadata)
    begin = -(-cursor.position // alignment) * alignment
    _check_offsets(cursor, infos, begin, alignment)
    tensors = {info.name: _tensor(info, file, begin) for info in infos}
    return _Part(path, metadata, tensors, file.size)


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    """Check what kind of file it is; the numbers of tensors and of metadata fields."""
    start = cursor.advance(4, "GGUF's magic")
    magic = bytes(cursor.data[start : start + 4])
    if magic != MAGIC:
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.unsigned_32("the version")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{cursor.source}: {_explain_version(version)}")
    num_tensors = cursor.unsigned_64("the number of tensors")
    return num_tensors, cursor.unsigned_64("the number of metadata fields")


def _explain_version(version: int) -> str:
    [swapped] = struct.unpack("<I", struct.pack(">I", version))
    if swapped in VERSIONS:
        return "the file is big endian; quire reads little endian: convert it"
    return f"GGUF version {version}; quire reads 2 and 3: convert the model with a current tool"


def _read_tensor_infos(cursor: Cursor, count: int) -> list[_TensorInfo]:
    cursor.check_count(count, _SMALLEST_TENSOR_INFO, "the list of tensors")
    if count > MAX_TENSORS:
        raise cursor.error(f"the file has {count} tensors, more than {MAX_TENSORS}")
    infos: dict[str, _TensorInfo] = {}
    for index in range(count):
        info = _read_tensor_info(cursor, index)
        if info.name in infos:
            raise cursor.error(f"tensor {info.name!r} appears twice")
        infos[info.name] = info
    return list(infos.values())


def _read_tensor_info(cursor: Cursor, index: int) -> _TensorInfo:
    name = cursor.name(MAX_TENSOR_NAME_BYTES, f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dimensions = cursor.unsigned_32(f"the number of dimensions of {what}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} must have 1 to {MAX_DIMENSIONS} axes, got {num_dimensions}")
    dimensions = [cursor.unsigned_64(f"the shape of {what}") for _ in range(num_dimensions)]
    block_format = format_of_ggml_type(cursor.unsigned_32(f"the type of {what}"), name)
    offset = cursor.unsigned_64(f"the offset of {what}")
    shape = tuple(reversed(dimensions))  # GGUF names the contiguous axis first
    nbytes = _checked_size(cursor, what, shape, block_format)
    return _TensorInfo(name, shape, block_format, offset, nbytes)


def _checked_size(cursor: Cursor, what: str, shape: tuple[int, ...], block_format: Format) -> int:
    if shape[-1] % block_format.block_size:
        raise cursor.error(
            f"{what} has rows of {shape[-1]} weights, which do not fill {block_format.name}'s "
            f"blocks of {block_format.block_size}"
        )
    nbytes = packed_size(block_format, math.prod(shape))  # Python's integers do not overflow
    if not 0 < nbytes <= cursor.length:
        raise cursor.error(
            f"{what} of shape {shape} takes {nbytes} bytes, and the file has {cursor.length}: "
            "it is truncated or broken, fetch it again"
        )
    return nbytes


def _read_alignment(metadata: Metadata) -> int:
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT, low=1)
    if alignment & (alignment - 1):
        raise metadata.error("general.alignment", f"must be a power of two, got {alignment}")
    return alignment


def _check_offsets(cursor: Cursor, infos: list[_TensorInfo], begin: int, alignment: int) -> None:
    """Tensors must be aligned, inside the file, and disjoint. Behind a ternary one there is padding
    alone: BitNet's tools write it so, and nothing else tells one type from another."""
    free_from = 0
    ternary = None  # the tensor before, if it is one
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset % alignment:
            raise cursor.error(
                f"tensor {info.name!r} is at offset {info.offset}, no multiple of the alignment "
                f"{alignment}"
            )
        if info.offset < free_from:
            raise cursor.error(f"tensor {info.name!r} overlaps the tensor before it")
        if ternary is not None and info.offset - free_from >= alignment:
            raise cursor.error(
                f"tensor {ternary.name!r} takes {ternary.nbytes} bytes as {ternary.format.name}, "
                f"and the file has {info.offset - ternary.offset} of it: it is of another type "
                "than the file says, or the file is broken"
            )
        ternary = info if info.format.is_ternary else None
        free_from = info.offset + info.nbytes
        if begin + free_from > cursor.length:
            raise cursor.error(
                f"tensor {info.name!r} ends at byte {begin + free_from}, but the file has "
                f"{cursor.length}: it is truncated or broken, fetch it again"
            )


def _tensor(info: _TensorInfo, file: FileBytes, begin: int) -> Tensor:
    region = Region(file, begin + info.offset, info.nbytes)
    return Tensor(info.name, info.shape, info.format, region)


def _read_other_parts(first: _Part, files: Files) -> list[_Part]:
    """The further parts of a split model, from the folder of the first."""
    count = first.metadata.integer("split.count", 1, low=0, high=MAX_PARTS)
    if count <= 1:
        return []
    prefix = _check_first_part(first, count)
    parts = []
    for number in range(1, count):
        path = first.path.with_name(_part_name(prefix, number, count))
        if not files.has(path):
            raise ModelFileError(
                f"{first.path.name} is the first of {count} parts, but {path.name} is not beside "
                "it: fetch all parts into one folder"
            )
        part = _read_part(path, files)
        found = (part.metadata.integer("split.no"), part.metadata.integer("split.count"))
        if found != (number, count):
            raise ModelFileError(
                f"{path.name}: split.no and split.count must be {number} and {count}, got "
                f"{found[0]} and {found[1]}"
            )
        parts.append(part)
    return parts


def _check_first_part(first: _Part, count: int) -> str:
    """Check that the first part was given; the common prefix of the parts' names."""
    number = first.metadata.integer("split.no", low=0, high=count - 1)
    named = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.gguf", first.path.name, re.ASCII)
    prefix = named[1] if named else first.path.stem
    if number != 0:
        raise ModelFileError(
            f"{first.path.name} is part {number + 1} of {count}: open the first, "
            f"{_part_name(prefix, 0, count)}"
        )
    if first.path.name != _part_name(prefix, 0, count):
        raise ModelFileError(
            f"{first.path.name} is the first of {count} parts, so it must be named "
            f"{_part_name(prefix, 0, count)} for the others to be found"
        )
    return prefix


def _part_name(prefix: str, number: int, count: int) -> str:
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


# ---- fields: typed key-value pairs; arrays and strings are decoded on access


# Fixed-size value types by GGUF's number; numpy's names give their size and meaning.
NUMBER_TYPES = {
    number: np.dtype(name)
    for number, name in (
        *((0, "u1"), (1, "i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"), (6, "<f4")),
        *((7, "?"), (10, "<u8"), (11, "<i8"), (12, "<f8")),
    )
}
_BOOLEAN, _STRING, _ARRAY = 7, 8, 9

MAX_KEYS = 4096  # sound files have below a hundred
MAX_KEY_BYTES = 1024
MAX_ARRAY_DEPTH = 4
MAX_INNER_ARRAYS = 65_536  # in one field; sound files have none
_SMALLEST_FIELD = 8 + 1 + 4 + 1  # length, one letter of a key, type, one byte of value
_SMALLEST_ARRAY = 4 + 8  # element type, count


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` pairs; strings and arrays are checked and left where they are."""
    cursor.check_count(count, _SMALLEST_FIELD, "the metadata")
    if count > MAX_KEYS:
        raise cursor.error(f"the metadata has {count} fields, more than {MAX_KEYS}")
    fields: dict[str, object] = {}
    for index in range(count):
        key = cursor.name(MAX_KEY_BYTES, f"the key of metadata field {index}")
        if key in fields:
            raise cursor.error(f"metadata field {key!r} appears twice")
        fields[key] = _read_value(cursor, key)
    return Metadata(cursor.source, fields)


def _read_value(cursor: Cursor, key: str) -> object:
    value_type = cursor.unsigned_32(f"the type of metadata field {key!r}")
    what = f"metadata field {key!r}"
    if value_type == _STRING:
        length = cursor.unsigned_64(f"the length of {what}")
        start = cursor.advance(length, what)
        return Lazy(partial(_decode_string, cursor, what, start, length))
    if value_type == _ARRAY:
        start = cursor.position
        _skip_array(cursor, what, depth=1, left=MAX_INNER_ARRAYS)
        return Lazy(partial(_decode_array, cursor, what, start))
    dtype = _number_type(cursor, value_type, what)
    return _numbers(cursor, dtype, 1, what).item()


def _number_type(cursor: Cursor, value_type: int, what: str) -> np.dtype[np.generic]:
    if value_type not in NUMBER_TYPES:
        raise cursor.error(f"{what} has value type {value_type}, which GGUF does not know")
    return NUMBER_TYPES[value_type]


def _numbers(
    cursor: Cursor, dtype: np.dtype[np.generic], count: int, what: str
) -> npt.NDArray[np.generic]:
    """A read-only view of `count` numbers at the cursor."""
    start = cursor.advance(count * dtype.itemsize, what)
    numbers = np.frombuffer(cursor.data, dtype, count, start)
    if dtype == np.bool_ and numbers.view(np.uint8).max(initial=0) > 1:
        raise cursor.error(f"{what} must be true or false: bytes of 0 and 1")
    return numbers


def _skip_array(cursor: Cursor, what: str, depth: int, left: int) -> int:
    """Step over an array; how many more arrays the field may hold after it."""
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.error(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    element_type = cursor.unsigned_32(f"the element type of {what}")
    count = cursor.unsigned_64(f"the length of {what}")
    if element_type == _STRING:
        cursor.skip_strings(count, what)
    elif element_type == _ARRAY:
        cursor.check_count(count, _SMALLEST_ARRAY, what)
        if count > left:
            raise cursor.error(f"{what} holds more than {MAX_INNER_ARRAYS} arrays")
        left -= count
        for _ in range(count):
            left = _skip_array(cursor, what, depth + 1, left)
    else:
        dtype = _number_type(cursor, element_type, what)
        _numbers(cursor, dtype, count, what)
    return left


def _decode_string(cursor: Cursor, what: str, start: int, length: int) -> str:
    try:
        return str(cursor.data[start : start + length], "utf-8")
    except UnicodeDecodeError as error:
        raise cursor.error(f"{what} is not valid UTF-8 at its byte {error.start}") from None


def _decode_array(header: Cursor, what: str, start: int) -> object:
    """Decode an array that was stepped over, and so was checked, when the file was opened."""
    return _decode_elements(header.at(start), what)


def _decode_elements(cursor: Cursor, what: str) -> object:
    start = cursor.advance(_SMALLEST_ARRAY, what)
    element_type, count = struct.unpack_from("<IQ", cursor.data, start)
    if element_type == _STRING:
        return tuple(_decode_strings(cursor, count))
    if element_type == _ARRAY:
        return tuple(_decode_elements(cursor, what) for _ in range(count))
    return _numbers(cursor, NUMBER_TYPES[element_type], count, what)


def _decode_strings(cursor: Cursor, count: int) -> list[str]:
    """Strings in arrays are tokens, which may be parts of characters: bytes that are not UTF-8
    become lone surrogates, which str.encode("utf-8", "surrogateescape") turns back."""
    data, position = cursor.data, cursor.position
    unpack = struct.Struct("<Q").unpack_from
    strings = []
    for _ in range(count):
        start = position + 8
        position = start + unpack(data, position)[0]
        strings.append(str(data[start:position], "utf-8", "surrogateescape"))
    cursor.position = position
    return strings
