"""ModelFolder: the models of a folder, each file or folder in it that holds one."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.loader import safetensors
from quire.server.model_service import ModelSource

_LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")
_FIRST_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?=[-._])", re.I)

Signature = tuple[tuple[str, int, int], ...]  # names, sizes and times of a model's files


class Changes(NamedTuple):
    come: list[Path]  # models that were not there, or not like this
    gone: list[Path]


class ModelFolder:
    """`make`: the source of a model in it."""

    def __init__(self, path: Path, make: Callable[[Path], ModelSource]) -> None:
        if not path.is_dir():
            raise ConfigError(f"--models {path}: there is no such folder")
        self.path = path
        self.make = make
        self._taken: dict[Path, Signature] = {}  # as they were when they came
        self._seen: dict[Path, Signature] = {}  # at the last look

    def look(self, *, at_once: bool = False) -> Changes:
        """What has changed since the last look. A file comes when it was the same at two looks:
        before that it may be being copied; `at_once`: when it is there."""
        signatures = {path: signature_of(path) for path in self.models().values()}
        gone = [path for path in self._taken if path not in signatures]
        come = []
        for path, signature in signatures.items():
            is_whole = at_once or self._seen.get(path) == signature
            if is_whole and self._taken.get(path) != signature:
                self._taken[path] = signature
                come.append(path)
        for path in gone:
            del self._taken[path]
        self._seen = signatures
        return Changes(come, gone)

    def models(self) -> dict[str, Path]:
        """By name: GGUF files, the first parts of split ones, and folders of safetensors; in the
        folder itself and in folders of it."""
        found: dict[str, Path] = {}
        for path in self._candidates():
            found.setdefault(path.name, path)
        return dict(sorted(found.items()))

    def _candidates(self) -> Iterator[Path]:
        yield from _files(self.path)
        for folder in sorted(_folders(self.path)):
            with suppress(PermissionError):  # the others are served
                yield from [folder] if _is_safetensors(folder) else _files(folder)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.gguf") if _is_model(path))


def _folders(path: Path) -> Iterator[Path]:
    return (inner for inner in path.iterdir() if inner.is_dir() and inner.name[0] != ".")


def _is_safetensors(folder: Path) -> bool:
    return (folder / safetensors.CONFIG).is_file() and any(
        (folder / name).is_file() for name in (safetensors.WHOLE, safetensors.INDEX)
    )


def _is_model(path: Path) -> bool:
    is_named = not _LATER_PART.search(path.name) and not _NO_MODEL.search(path.name)
    return is_named and path.is_file()


def signature_of(path: Path) -> Signature:
    """Changes when a model's files do."""
    files = sorted(path.iterdir()) if path.is_dir() else _parts(path)
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _parts(path: Path) -> list[Path]:
    """The files of a model that may be split; those that are there."""
    first = _FIRST_PART.search(path.name)
    if first is None:
        return [path]
    stem = path.name[: first.start()]
    names = (f"{stem}-{part:05d}-of-{first[1]}.gguf" for part in range(1, int(first[1]) + 1))
    return [path.with_name(name) for name in names]
