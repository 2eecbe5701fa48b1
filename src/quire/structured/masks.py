"""MaskThreads: compute grammar masks while a step's layers are computed.

Masks that are promised while a step is planned are computed when it is submitted: in one call by
llguidance's own threads (MaskPool), which need no GIL. Those that follow a token of the step before
are begun as soon as it is known: a step's time depends on them, so the engine's thread waits until
that call runs, and plans the next step meanwhile. How long each one took is unknown then, so those
of a call that took long are computed alone the next time, by a few threads of ours. A grammar whose
masks take long has them computed by a thread of low priority, and has no row in a step until its
mask is there: the step's other rows would wait for it.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.core.lazy_event import LazyEvent
from quire.core.plan import MaskRow

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_THREADS = min(4, os.cpu_count() or 1)
# Below two there is no pool: on few processors masks one by one disturb the step's layers less.
NUM_POOL_THREADS = min(4, (os.cpu_count() or 1) // 2)  # waking more takes longer than they save
STACK_BYTES = 64 << 20  # several times what the checker's process has
SLOW_S = 0.004  # of processor time
_USUAL_S = 0.00005  # of a mask among many, and of waiting for the GIL when they are there
_SHARE = 32  # masks that are not worth waking another thread for
_NICENESS = 10
_CALLS_AT_ONCE = 2  # of new rows, and of rows that follow
_CALLS_REMEMBERED = 4  # two steps may be under way, each with masks of two calls
_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is


class Mask:
    """A PendingMask: the bits of one grammar's next tokens, or b"" with the failure."""

    __slots__ = (
        "__weakref__",
        "_bits",
        "_compute",
        "_done",
        "_place",
        "failure",
        "finish",
        "matcher",
        "only",
        "seconds",
    )

    def __init__(
        self,
        compute: Callable[[], bytes],
        matcher: "LLMatcher | None" = None,
        finish: Callable[[bytes], bytes] = bytes,
        done: LazyEvent | None = None,
    ) -> None:
        """With a matcher it is computed in one call with others, instead of by `compute`, and there
        once `done` is set. `finish` makes the mask of the matcher's bits; it changes none where
        these allow no end token."""
        self._compute = compute
        self.matcher = matcher
        self.only: int | None = None  # the token that it allows, where it is known beforehand
        self.finish = finish
        self._bits = b""
        self._place: MaskRow | None = None  # where it is, instead of _bits
        self._done = LazyEvent() if done is None else done
        self.failure: str | None = None
        # Of processor time: on a busy machine quick masks take long, too. None: of those that were
        # computed with it some took long.
        self.seconds: float | None = 0.0

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

    def make_of(self, bits: bytes) -> None:
        """Make it of its matcher's bits; it does not count as done yet."""
        try:
            self._bits = self.finish(bits)
        except BaseException as error:
            self._failed(error)

    def made_at(self, place: MaskRow) -> None:
        """It is there as it is to be; it does not count as done yet."""
        self._place = place

    def _failed(self, error: BaseException) -> None:
        self.failure = str(error) or type(error).__name__
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise error

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def result(self) -> bytes:
        self._done.wait()
        place = self._place
        return self._bits if place is None else _copied(place)

    def keep_copy(self) -> None:
        """Keep none of those that were computed with it."""
        if self._place is not None:
            self._bits = _copied(self._place)
            self._place = None

    def row(self) -> MaskRow | None:
        self._done.wait()
        return self._place


def bytes_of(only: int) -> bytes:
    """A mask that allows one token; what it lacks is not allowed."""
    return bytes(only // 8) + bytes([1 << only % 8])


def _copied(place: MaskRow) -> bytes:
    found: bytes = place.bits[place.row].tobytes()
    return found


class MaskPool:
    """llguidance's threads, for masks of so many tokens."""

    def __init__(
        self, vocabulary_size: int, end_token_ids: Sequence[int], num_threads: int
    ) -> None:
        from llguidance import LLExecutor  # the package may be missing

        with _rust_threads_of(STACK_BYTES):
            self._executor = LLExecutor(num_threads)
        self._num_words = -(-vocabulary_size // 32)
        ends = [divmod(token, 8) for token in end_token_ids if token < vocabulary_size]
        self._end_bytes = np.array([byte for byte, _ in ends], np.intp)
        self._end_bits = np.array([1 << bit for _, bit in ends], np.uint8)
        self._earlier: deque[list[weakref.ref[Mask]]] = deque()  # of the last calls

    def compute(self, masks: Sequence[Mask], on_call: Callable[[], object] = bool) -> None:
        """Make them all, which have matchers, in one call while the GIL is free; `on_call` right
        before it."""
        bits = np.empty((len(masks), self._num_words), np.int32)
        matchers = [(mask.matcher, row) for row, mask in enumerate(masks) if mask.matcher]
        if len(matchers) < len(masks):
            self._allow_only(bits, masks)
        on_call()
        started = time.perf_counter()
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                matchers, bits.ctypes.data, self._num_words * bits.itemsize, len(bits)
            )
        is_slow = time.perf_counter() - started > SLOW_S + len(matchers) * _USUAL_S
        ends = bits.view(np.uint8)[:, self._end_bytes] & self._end_bits
        may_end: list[bool] = np.asarray(ends.any(axis=1)).tolist()
        for matcher, row in matchers:
            mask = masks[row]
            if may_end[row] or matcher.is_error():
                mask.make_of(bits[row].tobytes())
            else:
                mask.made_at(_new_tuple(MaskRow, (bits, row)))
            if is_slow:
                mask.seconds = None
        self._remember(masks)

    def _allow_only(self, bits: npt.NDArray[np.int32], masks: Sequence[Mask]) -> None:
        """Make those of which the only token is known."""
        known = [(mask, row, mask.only) for row, mask in enumerate(masks) if mask.only is not None]
        rows, tokens = [row for _, row, _ in known], np.array([only for *_, only in known])
        bits[rows] = 0
        bits.view(np.uint32)[rows, tokens // 32] = np.uint32(1) << (tokens % 32).astype(np.uint32)
        for mask, row, _ in known:
            mask.made_at(_new_tuple(MaskRow, (bits, row)))

    def _remember(self, masks: Sequence[Mask]) -> None:
        """Most are used before the next call. One that is not (its sequence was pre-empted or
        paused) does not keep the memory of all that were computed with it."""
        self._earlier.append([weakref.ref(mask) for mask in masks])
        if len(self._earlier) > _CALLS_REMEMBERED:
            for reference in self._earlier.popleft():
                mask = reference()
                if mask is not None:
                    mask.keep_copy()


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
        self._calls: _Queue | None = None
        self._slow_queue: _Queue | None = None

    def promise(self, mask: Mask) -> None:
        """Compute it from the next start() on."""
        self._promised.append(mask)

    def share(
        self, compute: Callable[[], bytes], matcher: "LLMatcher", finish: Callable[[bytes], bytes]
    ) -> Mask:
        """Promise a mask that is computed in one call with others where there is a pool."""
        if self.pool is None:
            mask = Mask(compute)
            self._promised.append(mask)
        else:
            mask = Mask(compute, matcher, finish, self._shared_done)
            self._shared.append(mask)
        return mask

    def share_forced(self, only: int) -> bytes | Mask:
        """The mask that allows a token alone, made beside those of the same call."""
        if self.pool is None:
            return bytes_of(only)
        mask = Mask(partial(bytes_of, only), done=self._shared_done)
        mask.only = only
        self._shared.append(mask)
        return mask

    def start(self, *, at_once: bool = False) -> None:
        """`at_once`: the call for those of one call runs when this returns. Else a thread would
        wait for the GIL before it, for as long as this one goes on."""
        if self._shared and self.pool is not None:
            if self._calls is None:
                self._calls = _started(self, _CALLS_AT_ONCE, "quire-mask-calls")
            done, self._shared_done = self._shared_done, LazyEvent()
            shared, self._shared = self._shared, []
            runs = threading.Event()
            call = partial(_compute_together, self.pool, shared, done, runs)
            if all(mask.matcher is None for mask in shared):
                call()
            else:
                self._calls.put(call)
            if at_once:
                runs.wait()
        if not self._promised:
            return
        if self._queue is None:
            self._queue = _started(self, NUM_THREADS, "quire-masks")
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


def _compute_together(
    pool: MaskPool, masks: Sequence[Mask], done: LazyEvent, runs: threading.Event
) -> None:
    """`runs` is set as soon as most of the work needs no GIL."""
    try:
        if len(masks) == 1:
            runs.set()
            masks[0].compute_alone()  # which says how long it took
        else:
            pool.compute(masks, runs.set)
    except BaseException as error:  # a panic in Rust is no Exception
        runs.set()
        for mask in masks:
            mask.compute_alone()
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise
    finally:
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
