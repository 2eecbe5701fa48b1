"""The cache's memory comes ahead of its use, from a thread that never stands in the way."""

import gc
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable

import pytest
from tests.executors.cpu.running import opened
from tests.executors.reference.plans import logits, row
from tests.fixture_files import fixture_file

PATH = fixture_file("tiny/Q4_0.gguf")
PROMPT = tuple(range(5, 30))
MIB = 1 << 20


def _can_touch() -> bool:
    """Whether the system knows MADV_POPULATE_WRITE: Linux does since 5.14."""
    if platform.system() != "Linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)
        except OSError:
            return False
    return True


pytestmark = pytest.mark.skipif(not _can_touch(), reason="this system gives no memory ahead")


def eventually(is_true: Callable[[], bool]) -> bool:
    """The thread runs when no other does, which on a busy machine is seldom."""
    deadline = time.monotonic() + 300
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def blocks_in(num_bytes: int) -> int:
    with opened(PATH, num_blocks=1) as executor:
        return num_bytes // executor.memory_bytes["kv"]


def test_memory_comes_some_way_ahead_of_the_blocks_in_use() -> None:
    num_blocks, ahead = blocks_in(64 * MIB), 16 * MIB
    gc.collect()  # so that nothing goes in the meantime
    before = resident_bytes()
    with opened(PATH, num_blocks=num_blocks, touched_ahead=ahead) as executor:
        whole = executor.memory_bytes["kv"]
        assert eventually(lambda: executor.touched_bytes >= ahead)
        assert executor.touched_bytes < whole / 2
        assert resident_bytes() - before >= ahead / 2
        logits(executor, row(PROMPT, (0, num_blocks // 2)))
        assert eventually(lambda: executor.touched_bytes >= whole / 2 + ahead / 2)
        logits(executor, row(PROMPT, (num_blocks - 1, 0)))
        assert eventually(lambda: executor.touched_bytes == whole)
        assert resident_bytes() - before >= whole * 3 / 4


def test_what_is_touched_keeps_its_contents() -> None:
    num_blocks = blocks_in(32 * MIB)
    table = (num_blocks - 1, num_blocks - 2)
    with opened(PATH, num_blocks=num_blocks, touched_ahead=0) as executor:
        expected = logits(executor, row(PROMPT, table)), executor.cache_block(0, table[0])
        assert executor.touched_bytes == 0
    with opened(PATH, num_blocks=num_blocks, touched_ahead=MIB) as executor:
        found = logits(executor, row(PROMPT, table))
        assert eventually(lambda: executor.touched_bytes == executor.memory_bytes["kv"])
        assert found.tobytes() == expected[0].tobytes()
        assert executor.cache_block(0, table[0]) == expected[1]


def test_an_executor_that_goes_early_takes_its_thread_with_it() -> None:
    num_blocks = blocks_in(256 * MIB)
    before = set(os.listdir("/proc/self/task"))

    def new_threads() -> set[str]:
        return set(os.listdir("/proc/self/task")) - before

    with opened(PATH, num_blocks=num_blocks):
        assert len(new_threads()) == 2  # one computes, one touches
    assert eventually(lambda: not new_threads())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_can_drop_the_executor() -> None:
    with opened(PATH, num_blocks=blocks_in(64 * MIB)) as executor:
        child = os.fork()
        if child == 0:
            try:
                executor._decoder = None
            finally:
                os._exit(0)
        timer = threading.Timer(60.0, os.kill, (child, 9))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        assert status == 0
        assert eventually(lambda: executor.touched_bytes > 0)
