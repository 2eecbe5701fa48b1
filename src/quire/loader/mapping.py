"""How files come into memory: mapped read-only, so that opening costs nothing."""

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError

Bytes = npt.NDArray[np.uint8]


def map_file(path: Path) -> Bytes:
    """A file's bytes as a read-only array. The mapping lives as long as any view of it does."""
    with _open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ModelFileError(f"{path} is empty")
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _unreadable(path, error) from error
    return np.frombuffer(mapped, dtype=np.uint8)


def release(data: Bytes) -> None:
    """Let go of the memory behind a part of a mapped file, where the system can: whoever reads it
    again has it read from the file. Does nothing for arrays that are not of a mapped file."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    whole = data
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    mapped = whole.base.obj if isinstance(whole.base, memoryview) else None
    if not isinstance(mapped, mmap.mmap):
        return
    start = data.ctypes.data - whole.ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that others share stay
    length = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def read_capped(path: Path, limit: int) -> bytes:
    """A small file's content, or an error if it is larger than such a file can sensibly be."""
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelFileError(f"{path} has {size} bytes; quire reads at most {limit} of it")
        try:
            return file.read(size)
        except OSError as error:
            raise _unreadable(path, error) from error


def _open_regular(path: Path) -> BinaryIO:
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115  # the caller closes it
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelFileError(f"{path} is not a regular file")
    return file


def _unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ModelFileError(f"cannot read {path}: {reason}")


def _open_without_waiting(path: str, flags: int) -> int:
    """Open without hanging where the path is a pipe that nobody writes to."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
