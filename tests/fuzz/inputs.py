"""What the fuzzers feed the readers: how bytes become a model on disk, and inputs to start from."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.loader import gguf_bytes as build
from tests.loader.hostile import survives
from tests.loader.safetensors_bytes import file_bytes, with_header

from quire.loader.gguf import GGUFFile
from quire.loader.safetensors import SafetensorsFolder

Feed = Callable[[Path, bytes], None]
_SLACK = 200_000  # what readers allocate on any file, however small


def feed_gguf(folder: Path, content: bytes) -> None:
    """Open the bytes as the first of two parts; the second is sound."""
    (folder / "m-00001-of-00002.gguf").write_bytes(content)
    second = folder / "m-00002-of-00002.gguf"
    if not second.exists():
        second.write_bytes(_part(1))
    survives(GGUFFile, folder / "m-00001-of-00002.gguf", 2 * len(content) + _SLACK)


def feed_safetensors(folder: Path, content: bytes) -> None:
    """Open a folder in which the bytes are, as the first of them says, one of its files."""
    for name, sound in _SOUND_FILES.items():
        (folder / name).write_bytes(sound)
    kind, rest = content[:1], content[1:]
    if kind == b"F":
        (folder / "model.safetensors").write_bytes(rest)
    elif kind == b"H":  # a header with its true length, and data after it
        header, _, data = rest.partition(b"\0")
        (folder / "model.safetensors").write_bytes(with_header(header, data))
    elif kind == b"C":
        (folder / "config.json").write_bytes(rest)
    else:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_bytes(rest)
    survives(SafetensorsFolder, folder, 30 * len(content) + _SLACK)  # JSON grows in memory


def gguf_seeds() -> list[bytes]:
    strings = [build.string("token"), build.string(b"\xff"), build.string("")]
    nested = build.array(build.ARRAY, [build.array(build.U8, [b"\1"]), build.array(8, strings)])
    fields = [
        *(build.pair(f"k{kind}", kind, build.number(kind, 1)) for kind in build.CODES),
        build.pair("general.name", build.STRING, build.string("name")),
        build.pair("tokens", build.ARRAY, build.array(build.STRING, strings)),
        build.pair("flags", build.ARRAY, build.array(build.BOOL, [b"\0", b"\1"])),
        build.pair("nested", build.ARRAY, nested),
        build.unsigned("general.alignment", 64),
    ]
    infos = [
        build.tensor_info("token_embd.weight", [32, 2], 2, 0),
        build.tensor_info("output_norm.weight", [4], 0, 64),
        build.tensor_info("output.weight", [256, 1], 12, 128),
        build.tensor_info("deep", [2, 2, 2, 2], 1, 320),
    ]
    whole = build.Parts(fields, infos, bytes(352), alignment=64)
    return [whole.build(), _part(0), build.Parts(version=2).build()]


def _part(number: int) -> bytes:
    fields = [
        build.unsigned("split.no", number, build.U16),
        build.unsigned("split.count", 2, build.U16),
        build.unsigned("split.tensors.count", 2, build.I32),
    ]
    info = build.tensor_info(f"part{number}", [1])
    return build.Parts(fields, [info], struct.pack("<f", 1)).build()


def safetensors_seeds() -> list[bytes]:
    names = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    entries = {
        name: {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8 * at, 8 * at + 8]}
        for at, name in enumerate(names)
    }
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    return [
        b"F" + _SOUND_FILES["model.safetensors"],
        b"H" + json.dumps(entries).encode() + b"\0" + bytes(16),
        b"H" + json.dumps({"__metadata__": {"a": "b"}}).encode(),
        b"C" + json.dumps({"model_type": "llama", "n": [1, 2.5, None, True, {}]}).encode(),
        b"I" + json.dumps(index).encode(),
    ]


_WEIGHTS = {"model.norm.weight": np.ones(2, np.float32)}
_SOUND_FILES = {
    "config.json": b"{}",
    "model.safetensors": file_bytes(_WEIGHTS),
    "a.safetensors": file_bytes(_WEIGHTS),
}
