"""A model's fingerprint: the same for a copy, another one for other weights."""

import shutil
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model

from quire.core.errors import ModelFileError
from quire.llm.assembly import read_text
from quire.llm.devices import Options
from quire.model.fingerprint import fingerprint_of


def changed(path: Path, at: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + 65536] = bytes(byte ^ 1 for byte in data[at : at + 65536])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["two.gguf", "sha256-ab12", "two.v2"])
def test_copies_have_the_fingerprint_and_other_weights_another(tmp_path: Path, name: str) -> None:
    """Whatever a file is called."""
    model = write_text_model(tmp_path / ("one.gguf" if name == "two.gguf" else "one"))
    found = fingerprint_of(model)
    copy = tmp_path / "elsewhere" / name
    copy.parent.mkdir()
    shutil.copy(model, copy)
    assert fingerprint_of(copy) == found
    size = copy.stat().st_size
    for at in (size // 2, size - 65536):  # weights, not what the head says of them
        shutil.copy(model, copy)
        assert fingerprint_of(changed(copy, at)) != found, at


def test_files_of_a_folder_and_parts_of_a_model_count(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 10)
    before = fingerprint_of(folder)
    (folder / "README.md").write_text("of no weight")
    assert fingerprint_of(folder) == before
    (folder / "config.json").write_text("[]")
    assert fingerprint_of(folder) != before
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    whole = fingerprint_of(first)
    second.write_bytes(b"3")
    assert fingerprint_of(first) != whole


def test_settings_that_answers_depend_on_are_in_it(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "one.gguf")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    plain = Options(device="reference")
    others = [
        Options(device="reference", chat_template=template),
        Options(device="reference", chat_template=False),
        Options(device="reference", kv_cache_dtype="f16"),
    ]
    found = {read_text(model, options).fingerprint for options in (plain, plain, *others)}
    assert len(found) == 4


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.mkdir()
    (model / "part.gguf").mkdir()
    with pytest.raises(ModelFileError, match=r"part\.gguf"):
        fingerprint_of(model)
