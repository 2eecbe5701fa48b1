"""Builds safetensors files and folders, honest or not."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Weights = Mapping[str, npt.NDArray[np.float32]]


def packed(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Weights as a file holds them; the gguf package rounds to bfloat16."""
    kind = gguf.GGMLQuantizationType[dtype]
    return np.ascontiguousarray(gguf.quants.quantize(values, kind)).tobytes()


def with_header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def file_bytes(weights: Weights, dtype: str = "F32") -> bytes:
    """A sound file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        raw = packed(values, dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    return with_header(json.dumps(header).encode(), data)


def write_folder(folder: Path, content: bytes, config: str = "{}") -> Path:
    """A folder whose one file has this content."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def write_shards(folder: Path, shards: Mapping[str, Weights]) -> Path:
    """A folder of several files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    weight_map: dict[str, str] = {}
    for file_name, weights in shards.items():
        (folder / file_name).write_bytes(file_bytes(weights))
        weight_map |= dict.fromkeys(weights, file_name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
