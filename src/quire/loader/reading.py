"""How a model's files come into memory: read piece by piece into buffers, never mapped.

Whoever touches a page of a mapped file that has shrunk is killed (SIGBUS). A read comes back short,
and that can be said.
"""

import json
import os
import stat
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError

Bytes = npt.NDArray[np.uint8]


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
