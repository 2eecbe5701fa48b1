"""WorkPool: threads for what would hold up the event loop, which no key can fill.

Reading bodies, rendering templates, tokenising and writing large answers are done here. Each key
has a line of its own; the lines take turns, and a key runs on a part of the threads at most, so
that a thread comes free for the others as soon as their turn comes. Lines are bounded by number and
by the bytes of the bodies in them.
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
    max_wait_s: float = 30.0  # in line

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
class _Line:
    jobs: deque[_Job] = field(default_factory=deque)
    size: int = 0
    completion_rate: CompletionRate = field(default_factory=CompletionRate)


def _give_way() -> None:
    """Let the threads that compute steps go before this one, where the system has priorities of
    threads: a body that takes long must not make everybody's steps longer."""
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
            self._limits.num_threads, "quire-request", initializer=_give_way
        )
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # that have jobs; the next one first
        self._running: Counter[str] = Counter()
        self._total_bytes = 0

    @property
    def num_running(self) -> int:
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(line.jobs) for line in self._lines.values())

    def submit(self, key: str, work: Callable[[], T], size: int = 0) -> "asyncio.Future[T]":
        """Have a key's work done; `size`: the bytes it holds while it waits.

        Raises a 429 where the key's line is full. Cancelling the future takes the work out of the
        line; work that a thread has begun is finished, for nobody.
        """
        line = self._lines.get(key) or _Line()
        self._check(line, size)
        loop = asyncio.get_running_loop()
        job = _Job(work, size, loop.create_future())
        if not line.jobs:
            line.completion_rate.busy_from(self._now())
        line.jobs.append(job)
        line.size += size
        self._lines.setdefault(key, line)
        self._total_bytes += size
        self._start()
        if job.is_waiting:
            job.deadline = loop.call_later(self._limits.max_wait_s, self._give_up, job)
            job.done.add_done_callback(lambda _: self._leave(key, job))
        return job.done

    def _check(self, line: _Line, size: int) -> None:
        limits = self._limits
        is_full = (
            len(line.jobs) >= limits.max_waiting
            or (line.jobs and line.size + size > limits.max_waiting_bytes)
            or (self._total_bytes and self._total_bytes + size > limits.max_total_bytes)
        )
        if is_full:
            raise ApiError(
                429,
                f"{len(line.jobs)} requests ({line.size} bytes) of this key wait to be read",
                code="overloaded",
                retry_after_s=max(0.05, line.completion_rate.interval_s(self._now())),
            )

    def _start(self) -> None:
        """Give free threads to the lines in turn."""
        while self.num_running < self._limits.num_threads:
            key = next((key for key in self._lines if self._may_run(key)), None)
            if key is None:
                return
            line = self._lines[key]
            job = self._take(key, line)
            self._running[key] += 1
            self._run(key, line, job)

    def _may_run(self, key: str) -> bool:
        return self._running[key] < self._limits.max_running

    def _take(self, key: str, line: _Line) -> _Job:
        job = line.jobs.popleft()
        self._forget(key, line, job)
        if line.jobs:
            self._lines.move_to_end(key)
        return job

    def _forget(self, key: str, line: _Line, job: _Job) -> None:
        """Book a job out of its line."""
        job.is_waiting = False
        if job.deadline is not None:
            job.deadline.cancel()
        line.size -= job.size
        self._total_bytes -= job.size
        if not line.jobs:
            del self._lines[key]

    def _run(self, key: str, line: _Line, job: _Job) -> None:
        loop = job.done.get_loop()
        working = loop.run_in_executor(self._threads, job.work)

        def ended(result: "asyncio.Future[Any]") -> None:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            line.completion_rate.completed(self._now())
            error = result.exception()
            if job.done.done():
                pass  # its client went away
            elif error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
            self._start()

        working.add_done_callback(ended)

    def _leave(self, key: str, job: _Job) -> None:
        """A job that was cancelled, or gave up, stands in line no more."""
        if job.is_waiting:
            line = self._lines[key]
            line.jobs.remove(job)
            self._forget(key, line, job)

    def _give_up(self, job: _Job) -> None:
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
        """Take no more work; what runs is left to end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
