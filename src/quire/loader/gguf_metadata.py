"""How GGUF stores metadata: typed key-value pairs; arrays and strings are decoded on access."""

import struct
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.loader.cursor import Cursor
from quire.loader.metadata import Lazy, Metadata

# Fixed-size value types by GGUF's number; numpy's names give their size and meaning.
_NUMBERS = {
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
            raise cursor.error(f"metadata field {key!r} stands there twice")
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
    if value_type not in _NUMBERS:
        raise cursor.error(f"{what} has value type {value_type}, which GGUF does not know")
    return _NUMBERS[value_type]


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
    return _numbers(cursor, _NUMBERS[element_type], count, what)


def _decode_strings(cursor: Cursor, count: int) -> list[str]:
    """Strings in arrays are tokens, and tokens in the wild may be parts of characters: bytes that
    are not UTF-8 become lone surrogates, from which str.encode("utf-8", "surrogateescape") makes
    the very bytes again."""
    data, position = cursor.data, cursor.position
    unpack = struct.Struct("<Q").unpack_from
    strings = []
    for _ in range(count):
        start = position + 8
        position = start + unpack(data, position)[0]
        strings.append(str(data[start:position], "utf-8", "surrogateescape"))
    cursor.position = position
    return strings
