"""The KV cache is faulted in ahead of its use, by a thread of the lowest priority."""

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.executors.cpu.running import opened
from tests.executors.reference.plans import logits, row
from tests.fixture_files import fixture_file

from quire.executors.cpu.executor import CpuExecutor

PATH = fixture_file("tiny/Q4_0.gguf")
PROMPT = tuple(range(5, 30))
MIB = 1 << 20


def _can_prefault() -> bool:
    """Whether the system knows MADV_POPULATE_WRITE: Linux does since 5.14."""
    if platform.system() != "Linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)
        except OSError:
            return False
    return True


pytestmark = pytest.mark.skipif(not _can_prefault(), reason="this system cannot prefault")


@contextmanager
def prefaulting(num_blocks: int, ahead: int) -> Iterator[CpuExecutor]:
    """An executor whose thread works on a busy machine too; the usual one would hardly do so."""
    with opened(PATH, num_blocks=num_blocks, prefault_bytes=0) as executor:
        executor._decoder.allocate_cache(num_blocks, False, ahead, low_priority=False)
        yield executor


def eventually(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def resident_bytes(executor: CpuExecutor) -> int:
    """Of the cache, what is in memory."""
    address = ctypes.c_void_p(executor._decoder.cache_address)
    if executor._decoder.cache_address % mmap.PAGESIZE:
        pytest.skip("under the address sanitizer memory comes from the C library")
    num_pages = executor.memory_bytes["kv"] // mmap.PAGESIZE
    pages = bytearray(num_pages)
    seen = (ctypes.c_ubyte * num_pages).from_buffer(pages)
    size = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(address, size, seen) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def new_threads(before: set[str]) -> set[str]:
    return set(os.listdir("/proc/self/task")) - before


def blocks_in(num_bytes: int) -> int:
    with opened(PATH, num_blocks=1, prefault_bytes=0) as executor:
        return num_bytes // executor.memory_bytes["kv"]


def test_memory_comes_some_way_ahead_of_the_blocks_in_use() -> None:
    whole, ahead = 16 * MIB, 4 * MIB
    num_blocks = blocks_in(whole)
    with prefaulting(num_blocks, ahead) as executor:
        assert executor.memory_bytes["kv"] == whole
        assert eventually(lambda: executor.prefaulted_bytes >= ahead)
        assert executor.prefaulted_bytes == ahead
        assert ahead / 2 <= resident_bytes(executor) <= whole / 2
        logits(executor, row(PROMPT, (0, num_blocks // 2 - 1)))
        assert eventually(lambda: executor.prefaulted_bytes >= whole / 2 + ahead)
        assert executor.prefaulted_bytes == whole / 2 + ahead
        logits(executor, row(PROMPT, (num_blocks - 1, 0)))
        assert eventually(lambda: executor.prefaulted_bytes == whole)
        assert resident_bytes(executor) >= whole * 3 / 4


def test_prefaulted_memory_keeps_its_contents() -> None:
    num_blocks = blocks_in(16 * MIB)
    table = (num_blocks - 1, num_blocks - 2)
    with opened(PATH, num_blocks=num_blocks, prefault_bytes=0) as executor:
        expected = logits(executor, row(PROMPT, table)), executor.cache_block(0, table[0])
        assert executor.prefaulted_bytes == 0
        assert resident_bytes(executor) < executor.memory_bytes["kv"]
    with prefaulting(num_blocks, MIB) as executor:
        found = logits(executor, row(PROMPT, table))
        assert eventually(lambda: executor.prefaulted_bytes == executor.memory_bytes["kv"])
        assert found.tobytes() == expected[0].tobytes()
        assert executor.cache_block(0, table[0]) == expected[1]


def test_an_executor_that_goes_early_takes_its_thread_with_it() -> None:
    num_blocks = blocks_in(256 * MIB)
    before = set(os.listdir("/proc/self/task"))
    with prefaulting(num_blocks, 256 * MIB):
        assert len(new_threads(before)) == 2  # one computes, one prefaults
    assert eventually(lambda: not new_threads(before))


def test_the_thread_has_the_lowest_priority() -> None:
    before = set(os.listdir("/proc/self/task"))

    def niceness() -> list[int]:
        return sorted(
            os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in new_threads(before)
        )

    with opened(PATH):
        assert eventually(lambda: niceness() == [os.getpriority(os.PRIO_PROCESS, 0), 19])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_can_drop_the_executor() -> None:
    with prefaulting(blocks_in(16 * MIB), 16 * MIB) as executor:
        child = os.fork()
        if child == 0:
            try:
                del executor._decoder
            finally:
                os._exit(0)
        timer = threading.Timer(60.0, os.kill, (child, 9))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        assert status == 0
        assert eventually(lambda: executor.prefaulted_bytes > 0)
