"""No key fills the pool: queues take turns, are bounded, and drop cancelled work."""

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from tests.server.servers import PATIENCE_S

from quire.server.errors import ApiError
from quire.server.work_pool import PoolLimits, WorkPool


class Blocking:
    """Work that a test lets end, one by one, and that tells when it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._permits = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        assert self._permits.acquire(timeout=PATIENCE_S)
        return name

    def release(self, count: int = 1) -> None:
        self._permits.release(count)


def on_loop(test: Callable[[Blocking], Awaitable[None]]) -> None:
    async def main() -> None:
        work = Blocking()
        try:
            await asyncio.wait_for(test(work), PATIENCE_S)
        finally:
            work.release(10_000)

    asyncio.run(main())


async def until(is_reached: Callable[[], bool]) -> None:
    while not is_reached():
        await asyncio.sleep(0.001)


def test_a_key_runs_on_half_of_the_threads() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=4))
        mine = [pool.submit("a", partial(work, f"a{n}")) for n in range(20)]
        await until(lambda: len(work.begun) == 2)
        assert (pool.num_running, pool.num_waiting) == (2, 18)
        other = pool.submit("b", lambda: "b")
        assert await other == "b", "while all of the first key's work stands still"
        assert work.begun == ["a0", "a1"]
        work.release(20)
        assert await asyncio.gather(*mine) == [f"a{n}" for n in range(20)]
        assert (pool.num_running, pool.num_waiting) == (0, 0)

    on_loop(test)


def test_queues_take_turns() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=1))
        jobs = [pool.submit("x", partial(work, "x"))]
        jobs += [
            pool.submit(key, partial(work, f"{key}{n}"))
            for key, count in (("a", 4), ("b", 2), ("c", 1))
            for n in range(count)
        ]
        work.release(len(jobs))
        await asyncio.gather(*jobs)
        assert work.begun == ["x", "a0", "b0", "c0", "a1", "b1", "a2", "a3"]

    on_loop(test)


def test_a_queue_is_bounded_and_says_when_to_retry() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=2, max_waiting=3))
        jobs = [pool.submit("a", partial(work, "a")) for _ in range(4)]
        with pytest.raises(ApiError, match="3 requests") as caught:
            pool.submit("a", partial(work, "a"))
        assert caught.value.status == 429
        assert int(dict(caught.value.headers)["retry-after"]) >= 1
        assert await pool.submit("b", lambda: "b") == "b"
        work.release(4)
        await asyncio.gather(*jobs)
        assert await pool.submit("a", lambda: "again") == "again"

    on_loop(test)


def test_a_queue_is_bounded_by_the_bytes_of_its_bodies() -> None:
    async def test(work: Blocking) -> None:
        limits = PoolLimits(num_threads=2, max_waiting_bytes=100, max_total_bytes=150)
        pool = WorkPool(limits)
        jobs = [pool.submit("a", partial(work, "a"), size) for size in (500, 60, 40)]
        with pytest.raises(ApiError, match=r"2 requests \(100 bytes\)"):
            pool.submit("a", partial(work, "a"), 1)
        jobs += [pool.submit("b", partial(work, "b"), size) for size in (10, 50)]
        with pytest.raises(ApiError):
            pool.submit("c", partial(work, "c"), 1)  # of all keys together
        work.release(5)
        await asyncio.gather(*jobs)
        assert await pool.submit("c", lambda: "c", 1000) == "c", "one alone always may"

    on_loop(test)


def test_cancelled_work_leaves_the_queue() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=2, max_waiting=2, max_waiting_bytes=10))
        running = pool.submit("a", partial(work, "running"))
        leaving = pool.submit("a", partial(work, "leaving"), 6)
        staying = pool.submit("a", partial(work, "staying"), 4)
        leaving.cancel()
        await until(lambda: pool.num_waiting == 1)
        late = pool.submit("a", partial(work, "late"), 6)  # there is room again
        work.release(3)
        found = await asyncio.gather(running, staying, late)
        assert list(found) == ["running", "staying", "late"]
        assert "leaving" not in work.begun

    on_loop(test)


def test_who_leaves_while_it_runs_blocks_nothing() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=2))
        running = pool.submit("a", partial(work, "running"))
        await until(lambda: work.begun == ["running"])
        running.cancel()
        following = pool.submit("a", partial(work, "following"))
        work.release(2)
        assert await following == "following"
        assert pool.num_running == 0

    on_loop(test)


def test_nobody_waits_for_ever() -> None:
    async def test(work: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=2, max_wait_s=0.01))
        running = pool.submit("a", partial(work, "running"))
        with pytest.raises(ApiError, match=r"not read within 0\.01 s") as caught:
            await pool.submit("a", partial(work, "waiting"))
        assert (caught.value.status, caught.value.retry_after_s) == (503, 0.01)
        assert pool.num_waiting == 0
        work.release()
        assert await running == "running", "what has begun is let end"
        assert work.begun == ["running"]

    on_loop(test)


def test_an_error_is_its_jobs_alone() -> None:
    async def test(_: Blocking) -> None:
        pool = WorkPool(PoolLimits(num_threads=2))

        def fail() -> None:
            raise ApiError(400, "no")

        with pytest.raises(ApiError, match="no"):
            await pool.submit("a", fail)
        assert await pool.submit("a", lambda: 1) == 1

    on_loop(test)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_work_gives_way_to_the_threads_that_compute() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def test(_work: Blocking) -> None:
        before = niceness()
        pool = WorkPool(PoolLimits(num_threads=1))
        assert await pool.submit("a", niceness) >= 10
        assert niceness() == before, "of the pool's threads alone"

    on_loop(test)
