"""MaskThreads: compute grammar masks while a step's layers are computed.

Masks that are promised while a step is planned are computed when it is submitted: in one call by
llguidance's own threads (MaskPool), which need no GIL. Those that follow a token of the step before
are computed as soon as it is known, while the engine's thread waits for that call. How long each
one took is unknown then, so those of a call that took long are computed alone the next time, by a
few threads of ours. A grammar whose masks take long has them computed by a thread of low priority,
and has no row in a step until its mask is there: the step's other rows would wait for it.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.core.lazy_event import LazyEvent

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_THREADS = min(4, os.cpu_count() or 1)
# Below two there is no pool: on few processors masks one by one disturb the step's layers less.
NUM_POOL_THREADS = min(8, (os.cpu_count() or 1) // 2)
STACK_BYTES = 64 << 20  # several times what the checker's process has
SLOW_S = 0.004  # of processor time
_SHARE = 32  # masks that are not worth waking another thread for
_NICENESS = 10


class Mask:
    """A PendingMask: the bits of one grammar's next tokens, or b"" with the failure."""

    __slots__ = ("_bits", "_compute", "_done", "failure", "finish", "matcher", "seconds")

    def __init__(
        self,
        compute: Callable[[], bytes],
        matcher: "LLMatcher | None" = None,
        finish: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """With a matcher it may be computed in one call with others, instead of by `compute`: then
        `finish` makes the mask of the matcher's bits."""
        self._compute = compute
        self.matcher = matcher
        self.finish = finish
        self._bits = b""
        self._done = LazyEvent()
        self.failure: str | None = None
        # Of processor time: on a busy machine quick masks take long, too. None: of those that were
        # computed with it some took long.
        self.seconds: float | None = 0.0

    def done_with(self, event: LazyEvent) -> None:
        """It is there once the event is set."""
        self._done = event

    def compute(self) -> None:
        self.compute_alone()
        self._done.set()

    def compute_alone(self) -> None:
        """Make it and measure it; it does not count as done yet."""
        started = time.thread_time()
        try:
            self._bits = self._compute()
        except BaseException as error:  # also a panic in Rust, which is no Exception
            self._failed(error)
        self.seconds = time.thread_time() - started

    def make_of(self, bits: bytes, seconds: float | None) -> None:
        """Make it of its matcher's bits; it does not count as done yet."""
        try:
            self._bits = self.finish(bits)
        except BaseException as error:
            self._failed(error)
        self.seconds = seconds

    def _failed(self, error: BaseException) -> None:
        self.failure = str(error) or type(error).__name__
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise error

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> bytes:
        self._done.wait()
        return self._bits


class MaskPool:
    """llguidance's threads, for masks of so many tokens."""

    def __init__(self, vocabulary_size: int, num_threads: int) -> None:
        from llguidance import LLExecutor  # the package may be missing

        with _rust_threads_of(STACK_BYTES):
            self._executor = LLExecutor(num_threads)
        self._num_words = -(-vocabulary_size // 32)
        self._buffers = threading.local()

    def compute(self, masks: Sequence[Mask]) -> None:
        """Make them all, which have matchers, in one call while the GIL is free."""
        bits = self._buffer(len(masks))
        matchers = [(mask.matcher, row) for row, mask in enumerate(masks) if mask.matcher]
        started = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            matchers, bits.ctypes.data, self._num_words * bits.itemsize, len(bits)
        )
        seconds = 0.0 if time.perf_counter() - started <= SLOW_S else None
        for mask, row in zip(masks, bits, strict=False):
            mask.make_of(row.tobytes(), seconds)

    def _buffer(self, num_rows: int) -> npt.NDArray[np.int32]:
        """Of the thread that calls."""
        kept: npt.NDArray[np.int32] | None = getattr(self._buffers, "bits", None)
        if kept is None or len(kept) < num_rows:
            kept = self._buffers.bits = np.empty((num_rows, self._num_words), np.int32)
        return kept


_Job = Callable[[], None]
_Queue = SimpleQueue[_Job | None]  # None: nothing more comes


class MaskThreads:
    """Used from the engine's thread alone."""

    def __init__(self) -> None:
        self.pool: MaskPool | None = None  # without it, each mask is computed alone
        self._promised: list[Mask] = []
        self._shared: list[Mask] = []  # promised, for one call
        self._shared_done = LazyEvent()
        self._queue: _Queue | None = None
        self._slow_queue: _Queue | None = None

    def promise(self, mask: Mask) -> None:
        """Compute it from the next start() on."""
        if self.pool is None or mask.matcher is None:
            self._promised.append(mask)
        else:
            mask.done_with(self._shared_done)
            self._shared.append(mask)

    def start(self, *, at_once: bool = False) -> None:
        """`at_once`: make those of one call before it returns. A thread of ours would wait for
        the GIL before that call and after it, while this one goes on."""
        if not self._promised and not self._shared:
            return
        if self._queue is None:
            self._queue = _started(self, NUM_THREADS, "quire-masks")
        if self._shared and self.pool is not None:
            done, self._shared_done = self._shared_done, LazyEvent()
            shared, self._shared = self._shared, []
            if not at_once:
                self._queue.put(partial(_compute_together, self.pool, shared, done))
            else:
                _compute_now(self.pool, shared, done, self._queue)
        masks, self._promised = self._promised, []
        share = max(_SHARE, -(-len(masks) // NUM_THREADS))
        for first in range(0, len(masks), share):
            self._queue.put(partial(_compute_each, masks[first : first + share]))

    def start_slow(self, mask: Mask) -> None:
        """Compute it at once, at low priority, after the other slow ones."""
        if self._slow_queue is None:
            self._slow_queue = _started(self, 1, "quire-slow-masks", _lower_priority)
        self._slow_queue.put(mask.compute)


def _compute_each(masks: Sequence[Mask]) -> None:
    for mask in masks:
        mask.compute()


def _compute_together(pool: MaskPool, masks: Sequence[Mask], done: LazyEvent) -> None:
    try:
        if len(masks) == 1:
            masks[0].compute_alone()  # which says how long it took
        else:
            pool.compute(masks)
        done.set()
    except BaseException:  # a panic in Rust is no Exception
        _compute_alone(masks, done)


def _compute_now(pool: MaskPool, masks: Sequence[Mask], done: LazyEvent, queue: _Queue) -> None:
    """Where the call fails a thread computes each alone: this one's stack may be small."""
    try:
        pool.compute(masks)
        done.set()
    except BaseException as error:  # a panic in Rust is no Exception
        queue.put(partial(_compute_alone, masks, done))
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise


def _compute_alone(masks: Sequence[Mask], done: LazyEvent) -> None:
    for mask in masks:
        mask.compute_alone()
    done.set()


def _is_main_thread() -> bool:
    """Which Ctrl-C interrupts."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _rust_threads_of(stack_bytes: int) -> Iterator[None]:
    """Threads that Rust starts have this stack; a library asks once, when it starts its first."""
    with _stack_lock:
        previous = os.environ.get("RUST_MIN_STACK")
        os.environ["RUST_MIN_STACK"] = str(stack_bytes)
        try:
            yield
        finally:
            del os.environ["RUST_MIN_STACK"]
            if previous is not None:
                os.environ["RUST_MIN_STACK"] = previous


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
    while (job := queue.get()) is not None:
        job()
        del job  # keep nothing alive while there is nothing to do
