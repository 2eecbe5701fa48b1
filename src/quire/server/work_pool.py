"""WorkPool: threads for what would block the event loop; no key can take all of them.

Reading bodies, rendering templates, tokenising and writing large answers are done here. Each key
has a queue; queues take turns, and a key runs on half of the threads at most, so that a thread
comes free for the others as soon as their turn comes. Queues are bounded by the number of requests
and by the bytes of their bodies.
"""

import asyncio
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.engine.stats import CompletionRate
from quire.server.errors import ApiError

T = TypeVar("T")
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class PoolLimits:
    num_threads: int = max(2, min(4, os.cpu_count() or 1))  # they share one interpreter
    max_waiting: int = 2048  # of a key; more than the engine's own queue takes
    max_waiting_bytes: int = 32 << 20  # of a key
    max_total_bytes: int = 128 << 20
    max_wait_s: float = 30.0  # in the queue

    @property
    def max_running(self) -> int:
        """Of a key at a time."""
        return max(1, self.num_threads // 2)


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    size: int
    done: "asyncio.Future[Any]"
    is_waiting: bool = True
    deadline: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Queue:
    jobs: deque[_Job] = field(default_factory=deque)
    size: int = 0
    completion_rate: CompletionRate = field(default_factory=CompletionRate)


def _lower_priority() -> None:
    """Raise the niceness of this thread, where the system has one for threads: reading a long body
    must not slow down the threads that compute steps."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class WorkPool:
    """Used from one event loop; its state is that loop's alone."""

    def __init__(
        self, limits: PoolLimits | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or PoolLimits()
        self._now = now
        self._threads = ThreadPoolExecutor(
            self._limits.num_threads, "quire-request", initializer=_lower_priority
        )
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # with jobs; the next one first
        self._running: Counter[str] = Counter()
        self._total_bytes = 0

    @property
    def num_running(self) -> int:
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.jobs) for queue in self._queues.values())

    def submit(self, key: str, work: Callable[[], T], size: int = 0) -> "asyncio.Future[T]":
        """Have a key's work done; `size`: the bytes it holds while it waits.

        Raises a 429 where the key's queue is full. Cancelling the future removes the work from the
        queue; work that a thread has begun is finished and its result dropped.
        """
        queue = self._queues.get(key) or _Queue()
        self._check(queue, size)
        loop = asyncio.get_running_loop()
        job = _Job(work, size, loop.create_future())
        if not queue.jobs:
            queue.completion_rate.busy_from(self._now())
        queue.jobs.append(job)
        queue.size += size
        self._queues.setdefault(key, queue)
        self._total_bytes += size
        self._start()
        if job.is_waiting:
            job.deadline = loop.call_later(self._limits.max_wait_s, self._on_timeout, job)
            job.done.add_done_callback(lambda _: self._remove(key, job))
        return job.done

    def _check(self, queue: _Queue, size: int) -> None:
        limits = self._limits
        is_full = (
            len(queue.jobs) >= limits.max_waiting
            or (queue.jobs and queue.size + size > limits.max_waiting_bytes)
            or (self._total_bytes and self._total_bytes + size > limits.max_total_bytes)
        )
        if is_full:
            raise ApiError(
                429,
                f"{len(queue.jobs)} requests ({queue.size} bytes) of this key wait to be read",
                code="overloaded",
                retry_after_s=max(0.05, queue.completion_rate.interval_s(self._now())),
            )

    def _start(self) -> None:
        """Give free threads to the queues in turn."""
        while self.num_running < self._limits.num_threads:
            key = next((key for key in self._queues if self._may_run(key)), None)
            if key is None:
                return
            queue = self._queues[key]
            job = self._take(key, queue)
            self._running[key] += 1
            self._run(key, queue, job)

    def _may_run(self, key: str) -> bool:
        return self._running[key] < self._limits.max_running

    def _take(self, key: str, queue: _Queue) -> _Job:
        job = queue.jobs.popleft()
        self._dequeue(key, queue, job)
        if queue.jobs:
            self._queues.move_to_end(key)
        return job

    def _dequeue(self, key: str, queue: _Queue, job: _Job) -> None:
        """Take a job out of the counts of its queue."""
        job.is_waiting = False
        if job.deadline is not None:
            job.deadline.cancel()
        queue.size -= job.size
        self._total_bytes -= job.size
        if not queue.jobs:
            del self._queues[key]

    def _run(self, key: str, queue: _Queue, job: _Job) -> None:
        loop = job.done.get_loop()
        working = loop.run_in_executor(self._threads, job.work)

        def ended(result: "asyncio.Future[Any]") -> None:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            queue.completion_rate.completed(self._now())
            error = result.exception()
            if job.done.done():
                pass  # its client went away
            elif error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
            self._start()

        working.add_done_callback(ended)

    def _remove(self, key: str, job: _Job) -> None:
        """Take a job that was cancelled, or timed out, out of its queue."""
        if job.is_waiting:
            queue = self._queues[key]
            queue.jobs.remove(job)
            self._dequeue(key, queue, job)

    def _on_timeout(self, job: _Job) -> None:
        if not job.done.done():
            waited_s = self._limits.max_wait_s
            job.done.set_exception(
                ApiError(
                    503,
                    f"the request was not read within {waited_s:g} s: this key sends too much",
                    code="overloaded",
                    retry_after_s=waited_s,
                )
            )

    def close(self) -> None:
        """Take no more work; running work is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
