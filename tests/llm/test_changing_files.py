"""Model files that are cut, written to or replaced while a model is loaded from them."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixture_files import FIXTURES, fixture_file

from quire.core.errors import ModelFileError
from quire.executors.cpu import has_native_module
from quire.executors.reference import ReferenceExecutor
from quire.llm.assembly import assemble
from quire.llm.devices import CpuDevice, Options
from quire.loader.reading import DISK, DiskFiles, OpenFile
from quire.model.loading import Model, load_model, read_tokenizer

EXECUTORS: dict[str, Callable[[Model], object]] = {
    "reference": lambda model: ReferenceExecutor(model, num_blocks=4),
    "cpu": lambda model: CpuDevice().make_executor(model, 4, Options(threads=1)),
}
KINDS = ("gguf", "safetensors")
each = pytest.mark.parametrize("executor", EXECUTORS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model of one's own: its path, and the file that holds its tensors."""
    if kind == "gguf":
        path = Path(shutil.copy(fixture_file("tiny/Q4_0.gguf"), folder / "model.gguf"))
        return path, path
    path = Path(shutil.copytree(FIXTURES / "families" / "llama", folder / "model"))
    return path, path / "model.safetensors"


class _Counted(OpenFile):
    """Something happens to the file before one of its reads."""

    def __init__(self, path: Path, files: "FilesThatChange") -> None:
        super().__init__(path, os.open(path, os.O_RDONLY))
        self._files = files

    def read(self, start: int, stop: int) -> "object":  # type: ignore[override]
        self._files.num_reads += 1
        if self._files.num_reads == self._files.at:
            self._files.change()
        return super().read(start, stop)


class FilesThatChange(DiskFiles):
    def __init__(self, at: int, change: Callable[[], object]) -> None:
        self.at, self.change, self.num_reads = at, change, 0

    def open(self, path: Path) -> OpenFile:
        return _Counted(path, self)


def load(path: Path, executor: str, files: DiskFiles = DISK) -> None:
    if executor == "cpu" and not has_native_module():
        pytest.skip("the native module is not built")
    with load_model(path, files) as model:
        EXECUTORS[executor](model)


@every_kind
@each
def test_a_file_cut_before_any_of_its_reads_is_a_typed_error(
    tmp_path: Path, kind: str, executor: str
) -> None:
    path, file = model_of(kind, tmp_path)
    content = file.read_bytes()
    counted = FilesThatChange(0, lambda: None)
    load(path, executor, counted)
    assert counted.num_reads > 10
    for at in range(2, counted.num_reads + 1):  # the first is of the magic, or of config.json
        file.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"(shrank|truncated|ended|has \d+ bytes)"):
            load(path, executor, FilesThatChange(at, lambda: os.truncate(file, len(content) // 3)))


@every_kind
@each
def test_a_file_that_is_written_to_is_a_typed_error(
    tmp_path: Path, kind: str, executor: str
) -> None:
    path, file = model_of(kind, tmp_path)
    os.utime(file, ns=(10**18, 10**18))

    def write() -> None:
        with file.open("r+b") as opened:
            opened.seek(-4, os.SEEK_END)
            opened.write(b"more")

    with pytest.raises(ModelFileError, match="was written to while it was being read"):
        load(path, executor, FilesThatChange(20, write))


@every_kind
@each
def test_a_file_that_is_replaced_or_removed_is_read_to_its_end(
    tmp_path: Path, kind: str, executor: str
) -> None:
    path, file = model_of(kind, tmp_path)
    load(path, executor, FilesThatChange(20, file.unlink))


_CUT_IN_A_PROCESS = """
import os, sys
from pathlib import Path
from quire.core.errors import ModelFileError
from tests.llm.test_changing_files import EXECUTORS
from quire.model.loading import load_model

path, file, executor = sys.argv[1:]
with load_model(path) as model:
    os.truncate(file, 5000)
    try:
        EXECUTORS[executor](model)
    except ModelFileError as error:
        print("alive:", error)
"""


@every_kind
@each
def test_a_process_outlives_the_file_that_it_loads(
    tmp_path: Path, kind: str, executor: str
) -> None:
    """With a mapped file it would die of SIGBUS."""
    path, file = model_of(kind, tmp_path)
    command = [sys.executable, "-c", _CUT_IN_A_PROCESS, str(path), str(file), executor]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done
    assert "alive: " in done.stdout
    assert "shrank from" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_shrinks_at_any_moment_is_loaded_or_refused(tmp_path: Path, kind: str) -> None:
    """Cut and mended by another thread meanwhile; whichever comes of it, this process lives."""
    path, file = model_of(kind, tmp_path)
    content = file.read_bytes()
    stopped = threading.Event()

    def disturb() -> None:
        while not stopped.is_set():
            os.truncate(file, len(content) // 2)
            file.write_bytes(content)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(30):
            try:
                load(path, "reference")
            except ModelFileError as error:
                assert str(error)
    finally:
        stopped.set()
        thread.join()


def test_nothing_of_the_file_is_needed_once_the_model_is_loaded(tmp_path: Path) -> None:
    path, _ = model_of("gguf", tmp_path)
    assembly = assemble(path, Options(device="reference", kv_memory="1MiB", max_batch_size=1))
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [link for link in held if link.startswith(str(tmp_path))]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assembly.executor.close()


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_folder, _pipe, _device])
def test_a_folder_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path, file = model_of("safetensors", tmp_path)
    file.unlink()
    make(file)
    with pytest.raises(ModelFileError, match="is not a regular file"):
        load_model(path)


def test_a_tokenizer_that_is_a_pipe_is_as_good_as_none(tmp_path: Path) -> None:
    path, _ = model_of("safetensors", tmp_path)
    os.mkfifo(path / "tokenizer.json")
    with load_model(path) as model:
        assert read_tokenizer(model) is None


def test_a_sparse_giant_is_refused_without_reading_it(tmp_path: Path) -> None:
    path, _ = model_of("gguf", tmp_path)
    os.truncate(path, 1 << 40)
    with load_model(path) as model:  # what is behind the tensors is nobody's
        assert model.file_bytes == 1 << 40
    folder, file = model_of("safetensors", tmp_path)
    os.truncate(file, 1 << 40)
    with pytest.raises(ModelFileError, match=r"its tensors end at byte \d+, and the file has"):
        load_model(folder)
