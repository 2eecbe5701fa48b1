"""MaskThreads: compute grammar masks while a step's layers are computed.

Masks that are promised while a step is planned are divided among a few threads when it is
submitted. A grammar whose masks take long has them computed by a thread of low priority, and has no
row in a step until its mask is there: the step's other rows would wait for it.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

NUM_THREADS = min(4, os.cpu_count() or 1)
STACK_BYTES = 64 << 20  # several times what the checker's process has
SLOW_S = 0.004  # of processor time
_SHARE = 32  # masks that are not worth waking another thread for
_NICENESS = 10


class Mask:
    """A PendingMask: the bits of one grammar's next tokens, or b"" with the failure."""

    __slots__ = ("_bits", "_compute", "_done", "failure", "seconds")

    def __init__(self, compute: Callable[[], bytes]) -> None:
        self._compute = compute
        self._bits = b""
        self._done = threading.Event()
        self.failure: str | None = None
        self.seconds = 0.0  # of processor time: on a busy machine quick masks take long, too

    def compute(self) -> None:
        started = time.thread_time()
        try:
            self._bits = self._compute()
        except BaseException as error:  # also a panic in Rust, which is no Exception
            self.failure = str(error) or type(error).__name__
        self.seconds = time.thread_time() - started
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> bytes:
        self._done.wait()
        return self._bits


_Queue = SimpleQueue[Sequence[Mask] | None]  # None: nothing more comes


class MaskThreads:
    """Used from the engine's thread alone."""

    def __init__(self) -> None:
        self._promised: list[Mask] = []
        self._queue: _Queue | None = None
        self._slow_queue: _Queue | None = None

    def promise(self, mask: Mask) -> None:
        """Compute it from the next start() on."""
        self._promised.append(mask)

    def start(self) -> None:
        masks, self._promised = self._promised, []
        if not masks:
            return
        if self._queue is None:
            self._queue = _started(self, NUM_THREADS, "quire-masks")
        share = max(_SHARE, -(-len(masks) // NUM_THREADS))
        for first in range(0, len(masks), share):
            self._queue.put(masks[first : first + share])

    def start_slow(self, mask: Mask) -> None:
        """Compute it at once, at low priority, after the other slow ones."""
        if self._slow_queue is None:
            self._slow_queue = _started(self, 1, "quire-slow-masks", _lower_priority)
        self._slow_queue.put([mask])


def on_large_stack(target: Callable[..., None], *args: object, name: str) -> threading.Thread:
    """A started daemon thread with room for what the checker's process let pass."""
    with _stack_lock:
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=target, args=args, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(previous)
    return thread


_stack_lock = threading.Lock()


def _started(
    owner: MaskThreads, count: int, name: str, prepare: Callable[[], None] | None = None
) -> _Queue:
    """The queue of so many threads, which end with their owner."""
    queue: _Queue = SimpleQueue()
    for _ in range(count):
        weakref.finalize(owner, queue.put, None)
        on_large_stack(_work, queue, prepare, name=name)
    return queue


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _work(queue: _Queue, prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    while (masks := queue.get()) is not None:
        for mask in masks:
            mask.compute()
        del masks  # keep nothing alive while there is nothing to do
