"""MemoryFiles: a model's files in memory, for readers that are to read many of them a second."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.core.errors import ModelFileError
from quire.loader.reading import Bytes


class MemoryFile:
    """A file's bytes. Whoever reads past them has not checked what the file claims."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)

    def read(self, start: int, stop: int) -> Bytes:
        assert 0 <= start <= stop <= self.size, f"bytes {start} to {stop} of {self.size}"
        return np.frombuffer(bytearray(self._content[start:stop]), np.uint8)


class MemoryFiles:
    """Files by name in one folder, `model`, which is the path of a model that is a folder."""

    FOLDER = Path("model")

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def open(self, path: Path) -> MemoryFile:
        if not self.has(path):
            raise ModelFileError(f"cannot read {path}: No such file or directory")
        return MemoryFile(self._contents[path.name])

    def has(self, path: Path) -> bool:
        return path.parent == self.FOLDER and path.name in self._contents

    def is_folder(self, path: Path) -> bool:
        return path == self.FOLDER

    def names(self, folder: Path) -> list[str]:
        return sorted(self._contents) if folder == self.FOLDER else []
