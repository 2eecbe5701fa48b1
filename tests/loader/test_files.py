"""open_model_file on everything a user may give it."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.fixture_files import fixture_file
from tests.loader.safetensors_bytes import file_bytes, write_folder

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.files import open_model_file
from quire.loader.gguf import GGUFFile
from quire.loader.safetensors import SafetensorsFolder

SOUND = file_bytes({"model.norm.weight": np.ones(2, np.float32)})


def test_a_gguf_file_is_opened_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.of-mine"
    path.write_bytes(fixture_file("tiny/Q4_0.gguf").read_bytes())
    assert isinstance(open_model_file(str(path)), GGUFFile)


def test_a_safetensors_folder_is_opened(tmp_path: Path) -> None:
    assert isinstance(open_model_file(write_folder(tmp_path, SOUND)), SafetensorsFolder)


@pytest.mark.parametrize(
    ("path", "message"),
    [("no/such/file.gguf", "No such file"), ("x" * 5000, "name too long"), ("a\0b", "null")],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_model_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"", "is empty"),
        ("model.gguf", b"GG", r"begins with b'GG', and a GGUF file with b'GGUF'"),
        ("model.txt", b"Once upon", r"is no model that quire reads: it begins with b'Once'"),
        ("model.safetensors", SOUND, "give its folder, which holds config.json too"),
        ("model.safetensors.index.json", b"{}", "give its folder"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        open_model_file(tmp_path / name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.zip"])
def test_pickles_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4....")
    with pytest.raises(UnsupportedModelError, match=r"runs whatever code is in it.*safetensors"):
        open_model_file(tmp_path / name)


def test_a_folder_of_pickles_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4....")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model.bin is a pickle"):
        open_model_file(tmp_path)


def test_a_pickle_beside_safetensors_does_no_harm(tmp_path: Path) -> None:
    (write_folder(tmp_path, SOUND) / "training_args.bin").write_bytes(b"PK\3\4....")
    assert isinstance(open_model_file(tmp_path), SafetensorsFolder)


def test_a_folder_without_a_model_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no model: quire looks for model.safetensors"):
        open_model_file(tmp_path)


def test_a_folder_of_gguf_files_says_to_give_a_file(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelFileError, match=r"is a folder: give a file of it, such as a.gguf"):
        open_model_file(tmp_path)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    with pytest.raises(ModelFileError, match=r"has no config.json"):
        open_model_file(tmp_path)


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            open_model_file(tmp_path / "model.gguf")
        except ModelFileError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert len(errors) == 1
    assert "is not a regular file" in str(errors[0])
