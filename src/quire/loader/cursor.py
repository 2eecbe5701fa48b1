"""Cursor: reads a binary header front to back and never past its end."""

import struct

from quire.core.errors import ModelFileError

_UNSIGNED_32 = struct.Struct("<I")
_UNSIGNED_64 = struct.Struct("<Q")


class Cursor:
    """A position in a file's bytes. Whatever a file claims is held against what is left of it."""

    def __init__(self, data: memoryview, source: str) -> None:
        self.data = data
        self.length = len(data)
        self.source = source  # the file, as errors call it
        self.position = 0

    @property
    def remaining(self) -> int:
        return self.length - self.position

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {message}")

    def advance(self, count: int, what: str) -> int:
        """Step over so many bytes and return where they start."""
        start, end = self.position, self.position + count
        if end > self.length:
            raise self.error(
                f"{what} takes {count} bytes at byte {start}, but the file ends after "
                f"{self.remaining}: it is truncated or broken, fetch it again"
            )
        self.position = end
        return start

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Refuse a count of items that cannot fit, each taking at least `smallest` bytes."""
        if count > self.remaining // smallest:
            raise self.error(
                f"{what} says it has {count} items, but only {self.remaining} bytes are left of "
                "the file: it is truncated or broken, fetch it again"
            )

    def unsigned_32(self, what: str) -> int:
        value: int = _UNSIGNED_32.unpack_from(self.data, self.advance(4, what))[0]
        return value

    def unsigned_64(self, what: str) -> int:
        value: int = _UNSIGNED_64.unpack_from(self.data, self.advance(8, what))[0]
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
        """Step over length-prefixed strings: a vocabulary has 10⁵, so the loop is kept bare.

        A lie about a length takes the position past the end, where the next read or the check after
        the loop catches it.
        """
        data, position, unpack = self.data, self.position, _UNSIGNED_64.unpack_from
        self.check_count(count, _UNSIGNED_64.size, what)
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):  # past the end, or past what an address can be
            position = self.length + 1
        self.advance(position - self.position, what)
