"""Model files that change, shrink or end while they are read, and paths that lead to no file."""

import os
from pathlib import Path

import pytest

from quire.core.errors import ModelFileError
from quire.loader.reading import DISK, OpenFile, Region, read_capped

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def opened(path: Path) -> OpenFile:
    """Open, with a time of modification long past: clocks of file systems tick slowly."""
    os.utime(path, ns=(10**18, 10**18))
    return DISK.open(path)


def test_bytes_are_read_where_they_are_asked_for(path: Path) -> None:
    file = opened(path)
    assert file.size == len(CONTENT)
    assert file.read(100, 5000).tobytes() == CONTENT[100:5000]
    assert file.read(file.size, file.size).tobytes() == b""
    assert Region(file, 1000, 50).read(10, 20).tobytes() == CONTENT[1010:1020]


def test_a_read_that_the_system_cuts_short_is_taken_up_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:7]], at))
    assert opened(path).read(3, 1000).tobytes() == CONTENT[3:1000]


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (len(CONTENT) - 10, len(CONTENT))])
def test_a_file_that_shrinks_is_refused_even_where_the_bytes_are_still_there(
    path: Path, start: int, stop: int
) -> None:
    file = opened(path)
    os.truncate(path, 100)
    with pytest.raises(ModelFileError, match=r"file shrank from 16384 to 100 bytes while"):
        file.read(start, stop)


def test_a_file_that_ends_early_although_its_size_says_otherwise_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems do."""
    file = opened(path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ModelFileError, match=r"file ended before byte 20 while it was being read"):
        file.read(10, 20)


def test_a_file_that_grows_or_is_written_to_is_refused(path: Path) -> None:
    file = opened(path)
    with path.open("ab") as appended:
        appended.write(b"more")
    with pytest.raises(ModelFileError, match=r"was written to while it was being read"):
        file.read(0, 10)
    file = opened(path)
    with path.open("r+b") as changed:
        changed.write(b"another")
    with pytest.raises(ModelFileError, match=r"was written to while it was being read"):
        file.read(0, 10)


def test_a_file_that_another_takes_the_place_of_is_read_to_its_end(path: Path) -> None:
    """As whoever writes models well does it: the old one stays whole for those who have it open."""
    file = opened(path)
    (path.parent / "new").write_bytes(b"new")
    (path.parent / "new").rename(path)
    assert file.read(0, file.size).tobytes() == CONTENT


def test_an_error_of_the_disk_is_a_typed_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    file = opened(path)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=r"cannot read .*file: Input/output error"):
        file.read(0, 1)


def test_descriptors_are_closed_with_the_last_who_holds_the_file(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = Region(opened(path), 0, 5)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del region
    for wrong in (path.parent, Path("/dev/null")):
        with pytest.raises(ModelFileError, match="is not a regular file"):
            DISK.open(wrong)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(ModelFileError, match="Permission denied"):
        DISK.open(path)


def test_small_files_are_held_to_their_limit(path: Path) -> None:
    assert read_capped(path, len(CONTENT)) == CONTENT
    with pytest.raises(ModelFileError, match="has 16384 bytes; quire reads at most 16383 of it"):
        read_capped(path, len(CONTENT) - 1)
