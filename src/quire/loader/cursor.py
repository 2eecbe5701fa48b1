"""Cursor: reads a binary header front to back and never past its end."""

import struct
from copy import copy

from quire.core.errors import ModelFileError
from quire.loader.reading import FileBytes

MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies in use take some twenty million
_FIRST_READ = 1 << 16  # bytes; twice as many each time that more are needed

_UNSIGNED_32 = struct.Struct("<I")
_UNSIGNED_64 = struct.Struct("<Q")


class Cursor:
    """A position in a file's bytes. Whatever a file claims is held against what is left of it.

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
        """Another cursor over the same bytes, at a place where this one has been."""
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
        """Have the bytes up to `end` in memory, and nothing else meanwhile."""
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
        """Step over length-prefixed strings: a vocabulary has 10⁵, so the loop is kept bare."""
        self.check_count(count, _UNSIGNED_64.size, what)
        data, position, unpack = self.data, self.position, _UNSIGNED_64.unpack_from
        for _ in range(count):
            if position + 8 > len(data):  # not loaded yet, or past the end of the file
                self.advance(position + 8 - self.position, what)
                data = self.data
            position += 8 + unpack(data, position)[0]
        self.advance(position - self.position, what)
