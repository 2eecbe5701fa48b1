"""SafetensorsFolder: reads a Hugging Face folder of safetensors, whole or in shards.

The safetensors library opens each file first and refuses a header that lies: sizes that do not fit
the shapes, overlaps, holes, ends past the file. What it found sound is then mapped here, because it
hands out numpy arrays only, and numpy has no bfloat16.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from safetensors import SafetensorError, safe_open

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.json_files import parse_json_object, read_json_object
from quire.loader.mapping import Bytes, map_file
from quire.loader.metadata import Metadata
from quire.loader.names import from_hugging_face
from quire.loader.tensor import Tensor
from quire.quant.formats import format_named

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = ("F32", "F16", "BF16")
MAX_HEADER_BYTES = 16 << 20
MAX_INDEX_BYTES = 4 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 16_384  # in one file
_LENGTH_BYTES = 8


class SafetensorsFolder:
    """An open folder: its configuration, and its tensors under our names, memory-mapped.

    Use it as a context manager or call close(). Tensors taken before stay valid: a mapping goes
    when the last of its tensors does.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = Metadata(CONFIG, read_json_object(self.path / CONFIG, MAX_CONFIG_BYTES))
        self.tensors: dict[str, Tensor] = {}
        self.file_bytes = 0
        for shard, expected in _shards(self.path).items():
            data = map_file(shard)
            self.file_bytes += data.nbytes
            self._add_tensors(shard, data, expected)

    def _add_tensors(self, shard: Path, data: Bytes, expected: set[str] | None) -> None:
        places = _read_header(shard, data)
        if expected is not None and expected != places.keys():
            odd = min(expected ^ places.keys())
            where = "only in the index" if odd in expected else "not in the index"
            raise ModelFileError(f"{shard.name} and {INDEX} disagree: tensor {odd!r} is {where}")
        for tensor in _tensors(places, data):
            if tensor.name in self.tensors:
                raise ModelFileError(f"{shard.name}: tensor {tensor.name!r} stands there twice")
            self.tensors[tensor.name] = tensor

    @property
    def tokenizer_path(self) -> Path | None:
        return self._beside("tokenizer.json")

    @property
    def tokenizer_config_path(self) -> Path | None:
        return self._beside("tokenizer_config.json")

    @property
    def generation_config_path(self) -> Path | None:
        return self._beside("generation_config.json")

    @property
    def chat_template_path(self) -> Path | None:
        return self._beside("chat_template.jinja")

    def _beside(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() else None

    def close(self) -> None:
        """Let go of the files."""
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


class _Place(NamedTuple):
    """Where a tensor lies in its file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, each with the tensors the index says it holds (None: no index)."""
    if (folder / WHOLE).exists():
        return {folder / WHOLE: None}
    weight_map = Metadata(INDEX, read_json_object(folder / INDEX, MAX_INDEX_BYTES)).section(
        "weight_map"
    )
    shards: dict[Path, set[str] | None] = {}
    for tensor in weight_map:
        shard = folder / _plain_name(weight_map.text(tensor), tensor)
        names = shards.setdefault(shard, set())
        assert names is not None
        names.add(tensor)
    if not shards:
        raise ModelFileError(f"{INDEX}: weight_map lists no tensors")
    return shards


def _plain_name(shard: str, tensor: str) -> str:
    """A shard's name, which must not lead out of the folder."""
    if not shard.endswith(".safetensors") or any(mark in shard for mark in "/\\:\0"):
        raise ModelFileError(
            f"{INDEX} puts tensor {tensor!r} into {shard!r}, which is not the name of a "
            ".safetensors file in its folder"
        )
    return shard


def _read_header(path: Path, data: Bytes) -> dict[str, _Place]:
    """Where a file's tensors are, after the library has found its header sound."""
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if data.nbytes < _LENGTH_BYTES or length > data.nbytes - _LENGTH_BYTES:
        raise ModelFileError(
            f"{path.name} is not a safetensors file, or it is truncated: its header should have "
            f"{length} bytes, and the file has {data.nbytes}"
        )
    if length > MAX_HEADER_BYTES:
        raise ModelFileError(
            f"{path.name}: the header has {length} bytes, more than {MAX_HEADER_BYTES}"
        )
    _check_with_library(path)
    begin = _LENGTH_BYTES + length
    header = parse_json_object(data[_LENGTH_BYTES:begin].tobytes(), f"the header of {path.name}")
    header.pop("__metadata__", None)
    fields = Metadata(f"the header of {path.name}", header)
    return {name: _place(fields.section(name), begin, data.nbytes) for name in fields}


def _check_with_library(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy") as opened:
            count = len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path.name} is not a sound safetensors file: {error}") from error
    if count > MAX_TENSORS:
        raise ModelFileError(f"{path.name} has {count} tensors, more than {MAX_TENSORS}")


def _place(entry: Metadata, begin: int, file_bytes: int) -> _Place:
    """Read an entry of the header. The library has checked it; this holds whatever its version."""
    offsets = entry.integers("data_offsets")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= file_bytes - begin:
        raise entry.error("data_offsets", f"must lie within the file, got {offsets}")
    return _Place(
        entry.text("dtype"), entry.integers("shape"), begin + offsets[0], begin + offsets[1]
    )


def _tensors(places: dict[str, _Place], data: Bytes) -> Iterator[Tensor]:
    for name, place in places.items():
        ours = from_hugging_face(name)
        if ours is None:
            continue
        if place.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} has type {place.dtype}; of safetensors quire runs "
                f"{', '.join(DTYPES)}"
            )
        if place.start == place.stop:
            raise ModelFileError(f"tensor {name!r} of shape {place.shape} is empty")
        block_format = format_named(place.dtype, name)
        yield Tensor(ours, place.shape, block_format, data[place.start : place.stop])
