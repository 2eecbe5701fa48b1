"""Safetensors files that are cut, mutated, or built to lie."""

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.loader.hostile import memory_at_most, survives, tracing
from tests.loader.safetensors_bytes import file_bytes, with_header, write_folder

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.safetensors import SafetensorsFolder

MUTATIONS = 2000
NAMES = ("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight")


def sound() -> bytes:
    return file_bytes({name: np.ones((4, 8), np.float32) for name in NAMES}, "BF16")


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, sound())
    with tracing():
        for length in reversed(range(len(sound()))):
            os.truncate(tmp_path / "model.safetensors", length)
            with pytest.raises(ModelFileError, match=r"truncated|empty|sound"):
                SafetensorsFolder(tmp_path)


def test_random_mutations_give_typed_errors_or_open(tmp_path: Path) -> None:
    generator = random.Random(3)
    original = sound()
    folder = write_folder(tmp_path, original)
    opened = 0
    with tracing():
        for _ in range(MUTATIONS):
            content = bytearray(original)
            for _ in range(generator.randint(1, 3)):
                at = generator.randrange(len(content) if generator.random() < 0.3 else 300)
                content[at : at + 1] = generator.choice(
                    (generator.randbytes(1), b'"', b"0", b"9", b"[", b"", b"-", b"e", b"\\u0000")
                )
            (folder / "model.safetensors").write_bytes(content)
            opened += survives(SafetensorsFolder, folder, limit=100_000)
    assert MUTATIONS // 50 < opened < MUTATIONS // 2  # the test saw both outcomes


NAME = NAMES[0]
LIES: dict[str, tuple[object, str]] = {
    "an end past the file": ({NAME: entry("F32", [8], [0, 32])}, "not a sound safetensors file"),
    "a start after the end": ({NAME: entry("F32", [4], [16, 0])}, "not a sound safetensors file"),
    "a hole": ({NAME: entry("F32", [2], [8, 16])}, "not a sound safetensors file"),
    "an overlap": (
        {NAMES[0]: entry("F32", [4], [0, 16]), NAMES[1]: entry("F32", [2], [8, 16])},
        "not a sound safetensors file",
    ),
    "a shape that is too small": ({NAME: entry("F32", [3], [0, 16])}, "not a sound"),
    "a shape that overflows": ({NAME: entry("F32", [2**62, 2**62], [0, 16])}, "not a sound"),
    "a negative shape": ({NAME: entry("F32", [-4], [0, 16])}, "shape must be up to 8"),
    "a type in numbers": ({NAME: entry(7, [4], [0, 16])}, "dtype must be a string, got 7"),
    "an unknown type": ({NAME: entry("F33", [4], [0, 16])}, "has type F33; of safetensors"),
    "three offsets": ({NAME: entry("F32", [4], [0, 8, 16])}, "data_offsets must be where"),
    "a shape of many axes": ({NAME: entry("F32", [1] * 9, [0, 16])}, "shape must be up to 8"),
    "a negative place": ({NAME: entry("F32", [4], [-16, 0])}, "is at bytes"),
    "an end before the file's": ({NAME: entry("F32", [2], [0, 8])}, "end at byte"),
    "a list": ([1, 2], r"must begin with '\{', not with b'\['"),
    "notes that are no text": ({"__metadata__": {"a": 1}}, "__metadata__ must be"),
    "no header": ({}, "not a sound"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(tmp_path: Path, lie: str) -> None:
    header, message = LIES[lie]
    content = with_header(json.dumps(header).encode(), bytes(16))
    errors = (ModelFileError, UnsupportedModelError)
    with pytest.raises(errors, match=message), memory_at_most(100_000):
        SafetensorsFolder(write_folder(tmp_path, content))


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    for length in (3, 2**31, 2**63, 2**64 - 1):
        folder = write_folder(tmp_path, with_header(b"{}", length=length))
        with pytest.raises(ModelFileError, match=f"should have {length} bytes"):
            SafetensorsFolder(folder)


def test_a_header_past_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, struct.pack("<Q", (16 << 20) + 1))
    os.truncate(folder / "model.safetensors", 17 << 20)
    with pytest.raises(ModelFileError, match="more than 16777216"), memory_at_most(100_000):
        SafetensorsFolder(folder)


def test_many_tiny_tensors_do_not_multiply_in_memory(tmp_path: Path) -> None:
    header = {f"t{at}": entry("F32", [0], [0, 0]) for at in range(70_000)}
    folder = write_folder(tmp_path, with_header(json.dumps(header).encode()))
    size = (folder / "model.safetensors").stat().st_size
    with pytest.raises(ModelFileError, match="70000 tensors"), memory_at_most(12 * size):
        SafetensorsFolder(folder)  # parsed; what is too much even for that is refused before it is
    folder = write_folder(tmp_path, with_header(b"{" * 140_000 + b"}" * 140_000))
    with pytest.raises(ModelFileError, match="more than 131072 objects"), memory_at_most(800_000):
        SafetensorsFolder(folder)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("F32", [4], [0, 16]))
    header = f'{{"{NAME}": {one}, "{NAME}": {one}}}'.encode()
    with pytest.raises(ModelFileError, match=r"twice|duplicate"):
        SafetensorsFolder(write_folder(tmp_path, with_header(header, bytes(16))))


numbers = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63, 2**64, -(2**63)]))
entries = st.builds(
    entry,
    st.sampled_from(["F32", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "F4", "x", 1, None]),
    st.one_of(st.lists(numbers, max_size=4), st.just("x")),
    st.one_of(st.lists(numbers, max_size=3), st.just({})),
)
headers = st.dictionaries(
    st.one_of(st.sampled_from([*NAMES, "__metadata__"]), st.text(max_size=5)),
    st.one_of(entries, st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
    max_size=4,
)


@given(headers, st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_headers_of_any_shape_give_typed_errors_or_open(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "folder"
    write_folder(folder, with_header(json.dumps(header).encode(), data))
    survives(SafetensorsFolder, folder, limit=100_000)


@given(headers, st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_what_opens_is_sound_for_the_safetensors_library_too(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], data: bytes
) -> None:
    """It is not used to read, but its rules are the format's."""
    folder = tmp_path_factory.getbasetemp() / "both"
    write_folder(folder, with_header(json.dumps(header).encode(), data))
    try:
        SafetensorsFolder(folder)
    except (ModelFileError, UnsupportedModelError):
        return
    with safe_open(folder / "model.safetensors", framework="numpy") as opened:
        assert set(opened.keys()) == header.keys() - {"__metadata__"}
