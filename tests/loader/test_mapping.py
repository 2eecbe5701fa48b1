"""Mapped files: read where needed, and let go of where not needed any more."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.loader.mapping import Bytes, map_file, release

NUM_PAGES = 2048


def resident_pages(path: Path) -> int:
    """Of a mapped file, the pages that are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    [size] = [
        next(line for line in lines if line.startswith("Rss:")).split()[1]
        for mapping in lines
        if mapping.endswith(str(path))
    ]
    return int(size) * 1024 // mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_released_leave_memory_and_come_back_when_read(tmp_path: Path) -> None:
    content = os.urandom(NUM_PAGES * mmap.PAGESIZE)
    path = tmp_path / "file"
    path.write_bytes(content)
    data = map_file(path)
    assert data.tobytes() == content
    assert resident_pages(path) > NUM_PAGES // 2 + 2
    part = data[100:-100].reshape(-1, 4)[: 1 << 20].reshape(-1)  # a view of views, within pages
    release(part)
    assert resident_pages(path) <= NUM_PAGES // 2 + 2
    assert data.tobytes() == content


@pytest.mark.parametrize("data", [np.zeros(5, np.uint8), np.frombuffer(b"abc", np.uint8)])
def test_arrays_of_no_file_are_left_alone(data: Bytes) -> None:
    kept = data.tobytes()
    release(data)
    assert data.tobytes() == kept


def test_less_than_a_page_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    data = map_file(tmp_path / "file")
    release(data)
    release(data[1:1])
    assert data.tobytes() == b"abc"
