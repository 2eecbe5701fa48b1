"""SafetensorsFolder: reads a Hugging Face folder of safetensors, whole or in shards.

    length of the header | header, JSON: by name type, shape and offsets | tensors, without a gap

The library of that name is not used: it maps files, and a mapped file that shrinks kills the
process. A header must keep the same rules (tests compare the two): sizes fit the shapes, tensors
follow each other without overlap or hole, and the last ends with the file.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.metadata import Metadata
from quire.loader.reading import (
    DISK,
    FileBytes,
    Files,
    Region,
    parse_json_object,
    read_capped,
    read_json_object,
)
from quire.loader.tensor import Tensor
from quire.quant.formats import RAW_FORMATS, Format, format_named

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = ("F32", "F16", "BF16")
_READ = (*DTYPES, *RAW_FORMATS)  # the latter hold quantised weights
MAX_HEADER_BYTES = 16 << 20
MAX_INDEX_BYTES = 32 << 20  # a mixture with a scale for each matrix lists 140,000 tensors
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 65_536  # in one file; a quantised expert has up to twelve
MAX_DIMENSIONS = 8  # weights have one or two
MAX_SHARDS = 512  # each is an open file; the largest models in use have some two hundred
_MAX_OBJECTS = 2 * MAX_TENSORS  # braces in a header; text under __metadata__ may hold some too
_LENGTH_BYTES = 8


class SafetensorsFolder:
    """An open folder: its configuration, and its tensors under our names, read on access.

    Use it as a context manager or call close(). Tensors stay valid: a file is closed with the last
    of its tensors.
    """

    def __init__(self, path: str | Path, files: Files = DISK) -> None:
        self.path = Path(path)
        self._files = files
        # With nulls, which `config` leaves out.
        self.whole_config = read_json_object(self.path / CONFIG, MAX_CONFIG_BYTES, files)
        self.config = Metadata(CONFIG, self.whole_config)
        self.tensors: dict[str, Tensor] = {}
        self.file_bytes = 0
        for shard, expected in _shards(self.path, files).items():
            file = files.open(shard)
            self.file_bytes += file.size
            self._add_tensors(shard, file, expected)

    def _add_tensors(self, shard: Path, file: FileBytes, expected: set[str] | None) -> None:
        entries = _read_header(shard, file)
        if expected is not None and expected != entries.keys():
            odd = min(expected ^ entries.keys())
            where = "only in the index" if odd in expected else "not in the index"
            raise ModelFileError(f"{shard.name} and {INDEX} disagree: tensor {odd!r} is {where}")
        for tensor in _tensors(entries, file):
            if tensor.name in self.tensors:
                raise ModelFileError(f"{shard.name}: tensor {tensor.name!r} appears twice")
            self.tensors[tensor.name] = tensor

    def read_beside(self, name: str, limit: int) -> bytes | None:
        """The content of another file of the folder, of at most `limit` bytes, if it is there."""
        path = self.path / name
        return read_capped(path, limit, self._files) if self._files.has(path) else None

    def close(self) -> None:
        """Release the files."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Entry(NamedTuple):
    """A tensor in the header: its type, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _shards(folder: Path, files: Files) -> dict[Path, set[str] | None]:
    """The files of a folder, each with the tensors the index says it holds (None: no index)."""
    if WHOLE in files.names(folder):
        return {folder / WHOLE: None}
    index = read_json_object(folder / INDEX, MAX_INDEX_BYTES, files)
    weight_map = Metadata(INDEX, index).section("weight_map")
    shards: dict[Path, set[str] | None] = {}
    for tensor in weight_map:
        shard = folder / _plain_name(weight_map.text(tensor), tensor)
        names = shards.setdefault(shard, set())
        assert names is not None
        names.add(tensor)
    if not shards:
        raise ModelFileError(f"{INDEX}: weight_map lists no tensors")
    if len(shards) > MAX_SHARDS:
        raise ModelFileError(f"{INDEX} names {len(shards)} files, more than {MAX_SHARDS}")
    return shards


def _plain_name(shard: str, tensor: str) -> str:
    """A shard's name, which must not lead out of the folder."""
    if not shard.endswith(".safetensors") or any(mark in shard for mark in "/\\:\0"):
        raise ModelFileError(
            f"{INDEX} puts tensor {tensor!r} into {shard!r}, which is not the name of a "
            ".safetensors file in its folder"
        )
    return shard


def _read_header(path: Path, file: FileBytes) -> dict[str, _Entry]:
    """Where a file's tensors are, once its header was found sound."""
    length = int.from_bytes(file.read(0, min(_LENGTH_BYTES, file.size)).tobytes(), "little")
    begin = _LENGTH_BYTES + length
    if begin > file.size:
        raise ModelFileError(
            f"{path.name} is not a safetensors file, or it is truncated: its header should have "
            f"{length} bytes, and the file has {file.size}"
        )
    if length > MAX_HEADER_BYTES:
        raise ModelFileError(
            f"{path.name}: the header has {length} bytes, more than {MAX_HEADER_BYTES}"
        )
    content = file.read(_LENGTH_BYTES, begin).tobytes()
    fields = _parse_header(content, f"the header of {path.name}")
    entries = {name: _entry(fields.section(name), begin) for name in fields}
    _check_offsets(path, entries, begin, file.size)
    return entries


def _parse_header(content: bytes, source: str) -> Metadata:
    if not content.startswith(b"{"):
        raise ModelFileError(f"{source} must begin with '{{', not with {content[:1]!r}")
    if content.count(b"{") > _MAX_OBJECTS:  # before they are made
        raise ModelFileError(f"{source} has more than {_MAX_OBJECTS} objects")
    header = parse_json_object(content, source)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ModelFileError(f"{source}: __metadata__ must be an object of strings")
    if len(header) > MAX_TENSORS:
        raise ModelFileError(f"{source} has {len(header)} tensors, more than {MAX_TENSORS}")
    return Metadata(source, header)


def _entry(fields: Metadata, begin: int) -> _Entry:
    """An entry of the header; its offsets are not checked yet."""
    shape, offsets = fields.integers("shape"), fields.integers("data_offsets")
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise fields.error("shape", f"must be up to {MAX_DIMENSIONS} sizes, got {shape[:9]}")
    if len(offsets) != 2:
        raise fields.error("data_offsets", f"must be where it starts and ends, got {offsets[:9]}")
    return _Entry(fields.text("dtype"), shape, begin + offsets[0], begin + offsets[1])


def _check_offsets(path: Path, entries: dict[str, _Entry], begin: int, file_bytes: int) -> None:
    """Tensors must be of their shape's size and fill the file, one after the other."""
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end or entry.stop < entry.start:
            raise ModelFileError(
                f"{path.name} is not a sound safetensors file: tensor {name!r} is at bytes "
                f"{entry.start} to {entry.stop}, and the one before it ends at {end}"
            )
        end = entry.stop
        if entry.dtype in _READ:
            block_format = _format(entry.dtype, name)
            nbytes = math.prod(entry.shape) * block_format.block_bytes  # integers do not overflow
            if nbytes != entry.stop - entry.start:
                raise ModelFileError(
                    f"{path.name} is not a sound safetensors file: tensor {name!r} of shape "
                    f"{entry.shape} takes {nbytes} bytes, not {entry.stop - entry.start}"
                )
    if end != file_bytes:
        raise ModelFileError(
            f"{path.name} is not a sound safetensors file, or it is truncated: its tensors end at "
            f"byte {end}, and the file has {file_bytes}"
        )


def _tensors(entries: dict[str, _Entry], file: FileBytes) -> Iterator[Tensor]:
    for name, entry in entries.items():
        if entry.dtype not in _READ:
            raise UnsupportedModelError(
                f"tensor {name!r} has type {entry.dtype:.20}; of safetensors quire runs "
                f"{', '.join(DTYPES)}, and what quantised checkpoints hold: "
                f"{', '.join(RAW_FORMATS)}"
            )
        if entry.start == entry.stop:
            raise ModelFileError(f"tensor {name!r} of shape {entry.shape} is empty")
        region = Region(file, entry.start, entry.stop - entry.start)
        yield Tensor(name, entry.shape, _format(entry.dtype, name), region)


def _format(dtype: str, tensor: str) -> Format:
    return RAW_FORMATS.get(dtype) or format_named(dtype, tensor)
