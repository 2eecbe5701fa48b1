"""Builds GGUF files piece by piece, so that tests can make each piece lie."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def number(value_type: int, value: float) -> bytes:
    return struct.pack("<" + CODES[value_type], value)


def array(element_type: int, elements: Sequence[bytes], count: int | None = None) -> bytes:
    claimed = len(elements) if count is None else count
    return struct.pack("<IQ", element_type, claimed) + b"".join(elements)


def pair(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def unsigned(key: str, value: int, value_type: int = U32) -> bytes:
    return pair(key, value_type, number(value_type, value))


def tensor_info(
    name: str | bytes, dimensions: Sequence[int], ggml_type: int = 0, offset: int = 0
) -> bytes:
    axes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + axes + struct.pack("<IQ", ggml_type, offset)


@dataclass(frozen=True)
class Parts:
    """The parts of a file; the counts tell the truth unless given."""

    fields: Sequence[bytes] = ()
    tensors: Sequence[bytes] = ()
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    num_fields: int | None = None
    num_tensors: int | None = None
    alignment: int = field(default=32, kw_only=True)

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_fields = len(self.fields) if self.num_fields is None else self.num_fields
        header = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_fields)
        header += b"".join(self.fields) + b"".join(self.tensors)
        return header + bytes(-len(header) % self.alignment) + self.data
