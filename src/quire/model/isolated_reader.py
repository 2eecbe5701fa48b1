"""The process in which a model file is read first: one that may do nothing but that.

`quire.model.isolated` starts it. It opens the model's files, gives up its privileges, and reads
header, spec and tokenizer as whoever loads the model will. Standard output gets two lines of JSON:
what of the lockdown is in force, and the outcome. The chat template is not compiled here: that is
never done but in a process of its own.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.core.lockdown import lock_down
from quire.loader.gguf import MAX_PARTS
from quire.loader.reading import DISK, FileBytes, Files
from quire.loader.safetensors import MAX_SHARDS
from quire.model.loading import end_token_ids, load_model, read_tokenizer

ENTRY = f"{__name__}:read"
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf", re.ASCII)
_MAX_FILES = max(MAX_PARTS, MAX_SHARDS) + 8
_MESSAGE_LENGTH = 4000


class OpenedFiles:
    """The files of one model, opened before privileges are given up; no other can be opened."""

    def __init__(self, path: Path) -> None:
        self._model = path
        self._is_folder = DISK.is_folder(path)
        self._folder = path if self._is_folder else path.parent
        self._names: list[str] = []
        self._error: ModelFileError | None = None
        self._opened: dict[Path, FileBytes | ModelFileError] = {}
        try:
            self._names = DISK.names(self._folder)
        except ModelFileError as error:
            self._error = error
        paths = [path, *(self._folder / name for name in self._names if self._belongs(name))]
        for one in list(dict.fromkeys(paths))[:_MAX_FILES]:
            try:
                self._opened[one] = DISK.open(one)
            except ModelFileError as error:
                self._opened[one] = error

    def _belongs(self, name: str) -> bool:
        if self._is_folder:
            return name.endswith((".safetensors", ".json", ".jinja"))
        own, other = _PART.fullmatch(self._model.name), _PART.fullmatch(name)
        return own is not None and other is not None and own[1] == other[1]

    def open(self, path: Path) -> FileBytes:
        found = self._opened.get(path)
        if found is None:
            raise ModelFileError(f"cannot read {path}: No such file or directory")
        if isinstance(found, ModelFileError):
            raise found
        return found

    def has(self, path: Path) -> bool:
        found = self._opened.get(path)
        return found is not None and not isinstance(found, ModelFileError)

    def is_folder(self, path: Path) -> bool:
        return self._is_folder and path == self._model

    def names(self, folder: Path) -> list[str]:
        if self._error is not None:
            raise self._error
        return self._names if folder == self._folder else []


def read(path: Path, files: Files) -> None:
    """Read header, spec and tokenizer; raises what is wrong with them."""
    with load_model(path, files) as model:
        for rope in model.spec.ropes:
            rope.frequencies()
        tokenizer = read_tokenizer(model)
        end_token_ids(model, tokenizer)
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode("a b\n"))


def main(request: Mapping[str, Any]) -> None:
    """Answer one request; its fields are those that `quire.model.isolated` writes."""
    reader = _function(request["entry"])
    path = Path(request["path"])
    files = OpenedFiles(path)
    _warm_up()
    _say({"in_force": lock_down(*request["limits"])})
    _say(_outcome(reader, path, files))


def _function(entry: str) -> Callable[[Path, Files], None]:
    module, _, name = entry.partition(":")
    function: Callable[[Path, Files], None] = getattr(importlib.import_module(module), name)
    return function


def _warm_up() -> None:
    """Make Python load what it loads late while files can be opened."""
    for codec in ("ascii", "latin-1", "utf-8", "utf-8-sig", "utf-16", "utf-32"):
        b"".decode(codec)
    str(b"\xff", "utf-8", "surrogateescape")
    repr(ModelFileError("x"))


def _outcome(reader: Callable[[Path, Files], None], path: Path, files: Files) -> dict[str, str]:
    try:
        reader(path, files)
    except UnsupportedModelError as error:
        return {"refusal": "unsupported", "message": str(error)[:_MESSAGE_LENGTH]}
    except ModelFileError as error:
        return {"refusal": "broken", "message": str(error)[:_MESSAGE_LENGTH]}
    except MemoryError:
        return {"failure": "memory"}
    except Exception as error:  # a bug, maybe triggered by a hostile file
        return {"failure": f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH]}
    return {}


def _say(line: Mapping[str, object]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")
