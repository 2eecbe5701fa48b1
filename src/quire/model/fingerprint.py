"""A model's fingerprint: a short text that is the same for copies of its files, and another one
for other weights, without reading all of them.

Of each file it takes the name's suffix, the size, the head and pages spread evenly over the rest.
Weights that were trained further differ in nearly every page; a file of which a few bytes were
changed may keep its fingerprint.
"""

import hashlib
import os
from pathlib import Path

from quire.core.errors import ModelFileError
from quire.model.isolated import FileState, identity_of

_SUFFIXES = {".gguf", ".safetensors", ".json", ".model", ".jinja", ".txt"}
_HEAD_BYTES = 256 << 10
_NUM_PAGES = 64
_PAGE_BYTES = 4096


def fingerprint_of(path: Path, *settings: object) -> str:
    """Of the model at `path`, with settings that its answers depend on; 32 hexadecimal digits."""
    digest = hashlib.sha256(repr(settings).encode())
    for file, _, _, size, _ in model_files(path) or ():
        suffix = Path(file).suffix
        digest.update(f"\0{suffix if suffix in _SUFFIXES else ''} {size}\0".encode())
        _add_samples(digest, file, size)
    return digest.hexdigest()[:32]


def model_files(path: Path) -> tuple[FileState, ...] | None:
    """The files that a model is read from, as they are now; None where they cannot be looked at.
    The one at `path` itself may be called anything, as those in Ollama's cache are."""
    found = identity_of(path)
    if found is None:
        return None
    return tuple(one for one in found if Path(one[0]).suffix in _SUFFIXES or Path(one[0]) == path)


def _add_samples(digest: "hashlib._Hash", file: str, size: int) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digest.update(os.pread(descriptor, _HEAD_BYTES, 0))
            rest = max(0, size - _HEAD_BYTES)
            for page in range(_NUM_PAGES if rest else 0):
                at = _HEAD_BYTES + rest * page // _NUM_PAGES
                digest.update(os.pread(descriptor, _PAGE_BYTES, at))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelFileError(f"{file}: {error.strerror or error}") from None
