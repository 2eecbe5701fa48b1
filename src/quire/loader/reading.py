"""How a model's files come into memory: read piece by piece into buffers, never mapped.

Whoever touches a page of a mapped file that has shrunk is killed (SIGBUS). A read comes back short,
and that can be said.
"""

import json
import os
import stat
import struct
import weakref
from copy import copy
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError

Bytes = npt.NDArray[np.uint8]

MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies in use take some twenty million
_FIRST_READ = 1 << 16  # bytes; twice as many each time that more are needed

_UNSIGNED_32 = struct.Struct("<I")
_UNSIGNED_64 = struct.Struct("<Q")


class FileBytes(Protocol):
    """The bytes of one file."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from `start` to `stop`, both within the size, in a new buffer."""


class Files(Protocol):
    """Where a model's files come from. What cannot be read is a ModelFileError."""

    def open(self, path: Path) -> FileBytes: ...

    def has(self, path: Path) -> bool:
        """Whether there is a regular file of this name."""

    def is_folder(self, path: Path) -> bool: ...

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted."""


class Region(NamedTuple):
    """A part of a file that is read when it is asked for."""

    file: FileBytes
    start: int
    nbytes: int

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes by their offsets in the region."""
        return self.file.read(self.start + start, self.start + stop)


class OpenFile:
    """A regular file that is open for reading, closed with the last reference.

    A file that changes between two reads would give parts of two models, so that is refused: its
    size and its time of modification must not change.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file")
        self.size = status.st_size
        self._modified = status.st_mtime_ns

    def read(self, start: int, stop: int) -> Bytes:
        assert 0 <= start <= stop <= self.size, f"bytes {start} to {stop} of {self.size}"
        content = np.empty(stop - start, np.uint8)
        try:
            is_whole = self._fill(content, start)
            self._check_unchanged()
        except OSError as error:
            raise _unreadable(self._path, error) from error
        if not is_whole:
            raise self._changed(f"ended before byte {stop}")
        return content

    def _fill(self, content: Bytes, start: int) -> bool:
        """Read until the buffer is full; False where the file ends before that."""
        rest = content.data
        while len(rest):
            count = os.preadv(self._descriptor, [rest], start)  # may read less than asked
            if count == 0:
                return False
            rest, start = rest[count:], start + count
        return True

    def _check_unchanged(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_size < self.size:
            raise self._changed(f"shrank from {self.size} to {status.st_size} bytes")
        if status.st_size != self.size or status.st_mtime_ns != self._modified:
            raise self._changed("was written to")

    def _changed(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path} {what} while it was being read: let whatever writes it come to its end, "
            "and load it again"
        )


class DiskFiles:
    """Files of the file system."""

    def open(self, path: Path) -> OpenFile:
        try:
            # Non-blocking: the path may be a pipe without a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise _unreadable(path, error) from error
        return OpenFile(path, descriptor)

    def has(self, path: Path) -> bool:
        return os.path.isfile(path)  # unlike Path.is_file, never raises

    def is_folder(self, path: Path) -> bool:
        return os.path.isdir(path)

    def names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError as error:
            raise _unreadable(folder, error) from error


DISK = DiskFiles()


def read_capped(path: Path, limit: int, files: Files = DISK) -> bytes:
    """A file's content; an error if it is longer than `limit`."""
    file = files.open(path)
    if file.size > limit:
        raise ModelFileError(f"{path} has {file.size} bytes; quire reads at most {limit} of it")
    return file.read(0, file.size).tobytes()


def _unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ModelFileError(f"cannot read {path}: {reason}")


# ---- JSON beside a model


def read_json_object(path: Path, limit: int, files: Files = DISK) -> dict[str, object]:
    """The object in a JSON file of at most `limit` bytes."""
    return parse_json_object(read_capped(path, limit, files), path.name)


def parse_json_object(content: bytes, source: str) -> dict[str, object]:
    """The object in a JSON text; duplicate keys are refused."""
    try:
        value = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and huge numbers
        raise ModelFileError(f"{source} does not hold sound JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{source} must hold a JSON object, not {type(value).__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        left = dict.fromkeys(fields)
        twice = next(name for name, _ in pairs if left.pop(name, True) is not None)
        raise ValueError(f"key {twice!r:.100} appears twice")
    return fields


# ---- binary headers


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
