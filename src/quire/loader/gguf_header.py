"""GGUF's header: a cursor that never reads past the file's end, and the typed key-value pairs that
it reads; arrays and strings are decoded on access.
"""

import struct
from copy import copy
from functools import partial

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError
from quire.loader.metadata import Lazy, Metadata
from quire.loader.reading import FileBytes

MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies in use take some twenty million
_FIRST_READ = 1 << 16  # bytes; twice as many each time that more are needed

_UNSIGNED_32 = struct.Struct("<I")
_UNSIGNED_64 = struct.Struct("<Q")


class Cursor:
    """A position in a file's bytes. What a file claims is checked against what is left of it.

    `data` holds the file up to where the cursor has been, and somewhat further. It grows as the
    cursor advances, so no view of it may be kept while the header is being read.
    """

    def __init__(self, file: FileBytes, source: str) -> None:
        self.length = file.size
        self.source = source  # the file, as errors call it
        self.position = 0
        self._file = file
        self._load(min(self.length, _FIRST_READ))

    @property
    def remaining(self) -> int:
        return self.length - self.position

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {message}")

    def at(self, position: int) -> "Cursor":
        """Another cursor over the same bytes, at a position where this one has been."""
        other = copy(self)
        other.position = position
        return other

    def advance(self, count: int, what: str) -> int:
        """Step over so many bytes and return where they start."""
        start, end = self.position, self.position + count
        if end > self.length:
            raise self.error(
                f"{what} takes {count} bytes at byte {start}, but the file ends after "
                f"{self.remaining}: it is truncated or broken, fetch it again"
            )
        if end > len(self.data):
            if end > MAX_HEADER_BYTES:
                raise self.error(
                    f"{what} ends at byte {end}, and quire reads at most {MAX_HEADER_BYTES} bytes "
                    "before the tensors"
                )
            self._load(min(self.length, max(end, 2 * len(self.data))))
        self.position = end
        return start

    def _load(self, end: int) -> None:
        """Read the bytes up to `end`; the old buffer is freed first."""
        self.data = memoryview(b"")
        content = self._file.read(0, end)
        content.flags.writeable = False
        self.data = content.data

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Refuse a count of items that cannot fit, each taking at least `smallest` bytes."""
        if count > self.remaining // smallest:
            raise self.error(
                f"{what} says it has {count} items, but only {self.remaining} bytes are left of "
                "the file: it is truncated or broken, fetch it again"
            )

    def unsigned_32(self, what: str) -> int:
        start = self.advance(4, what)
        value: int = _UNSIGNED_32.unpack_from(self.data, start)[0]
        return value

    def unsigned_64(self, what: str) -> int:
        start = self.advance(8, what)
        value: int = _UNSIGNED_64.unpack_from(self.data, start)[0]
        return value

    def name(self, limit: int, what: str) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes, not empty."""
        length = self.unsigned_64(f"the length of {what}")
        if not 1 <= length <= limit:
            raise self.error(f"{what} must have 1 to {limit} bytes, got {length}")
        start = self.advance(length, what)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raw = bytes(self.data[start : start + length])
            raise self.error(f"{what} is not valid UTF-8: {raw[:64]!r}") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Step over length-prefixed strings: a vocabulary has 10⁵, so the loop is minimal."""
        self.check_count(count, _UNSIGNED_64.size, what)
        data, position, unpack = self.data, self.position, _UNSIGNED_64.unpack_from
        for _ in range(count):
            if position + 8 > len(data):  # not loaded yet, or past the end of the file
                self.advance(position + 8 - self.position, what)
                data = self.data
            position += 8 + unpack(data, position)[0]
        self.advance(position - self.position, what)


# ---- metadata


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
