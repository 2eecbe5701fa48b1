"""ThreadedExecutor and StepWorker: steps run in order on a thread of their own.

The thread makes a plain function of a plan two-phase: the engine plans on while the thread
computes, a step that takes too long is reported instead of waited for, and it can be cancelled.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple

from quire.core.clock import Clock
from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    QuireError,
    RowFaultError,
    StepCancelledError,
    StepTimeoutError,
)
from quire.core.plan import Capacity, SequenceResult, StepPlan, StepResult
from quire.executors.base import ExecutorBase, StepSamples


@dataclass(slots=True)
class CancelFlag:
    """Raised by cancel(); executors check it where a step can stop: between layers or stages."""

    _event: threading.Event = field(default_factory=threading.Event)

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raise StepCancelledError if somebody wants the step to stop."""
        if self._event.is_set():
            raise StepCancelledError("the step was cancelled")


@dataclass(slots=True)
class StepTicket:
    step_id: int
    flag: CancelFlag
    future: Future[StepResult]


RunStep = Callable[[StepPlan, CancelFlag], StepResult]


_Queue = SimpleQueue[tuple[RunStep, StepPlan, StepTicket] | None]  # None: nothing more comes


class StepWorker:
    """Submit, collect and cancel for steps that are one function.

    The thread is a daemon, unlike a pool's: a step that never ends must not keep the process.
    """

    def __init__(self, run: RunStep, name: str) -> None:
        self._run = run
        self._queue: _Queue = SimpleQueue()
        self._is_closed = False
        weakref.finalize(self, self._queue.put, None)  # the thread ends with its owner
        threading.Thread(target=_work, args=[self._queue], name=name, daemon=True).start()

    def submit(self, plan: StepPlan) -> StepTicket:
        if self._is_closed:
            raise ExecutorError("the executor is closed")
        ticket = StepTicket(plan.step_id, CancelFlag(), Future())
        self._queue.put((self._run, plan, ticket))
        return ticket

    def collect(self, ticket: StepTicket, timeout_s: float | None = None) -> StepResult:
        try:
            return ticket.future.result(timeout_s)
        except CancelledError as error:
            raise StepCancelledError(f"step {ticket.step_id} was cancelled") from error
        except FutureTimeoutError as error:
            if ticket.future.done():  # this very moment, or with a TimeoutError of its own
                return ticket.future.result()
            message = f"step {ticket.step_id} took over {timeout_s} s"
            raise StepTimeoutError(message) from error
        except (KeyboardInterrupt, SystemExit):
            ticket.flag.set()  # nobody waits for it any more: the next step should not either
            raise

    def cancel(self, ticket: StepTicket) -> None:
        ticket.flag.set()

    def close(self) -> None:
        """Drop the steps that have not begun; the one that runs may end.

        The step's function goes, too: it is the owner's method, and in that cycle a model's weights
        would stay until the garbage collector comes by.
        """
        self._is_closed = True
        self._run = _closed
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                item[2].future.cancel()
        self._queue.put(None)


class RowResults(NamedTuple):
    """What a step's rows gave, in the plan's order."""

    sequences: tuple[SequenceResult, ...]
    padding_tokens: int = 0


@contextmanager
def step_errors(step_id: int) -> Iterator[None]:
    """Raise what is not a QuireError, such as a lack of memory, as an ExecutorError of the step."""
    try:
        yield
    except QuireError:
        raise
    except MemoryError as error:
        raise ExecutorMemoryError(f"step {step_id} found no memory: {error}") from error
    except Exception as error:
        kind = type(error).__name__
        raise ExecutorError(f"step {step_id} cannot be computed: {kind}: {error}") from error


def _closed(*_: object) -> StepResult:
    raise ExecutorError("the executor is closed")


def _work(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        _run_step(*item)
        del item  # keep nothing alive while there is nothing to do


def _run_step(run: RunStep, plan: StepPlan, ticket: StepTicket) -> None:
    try:
        ticket.flag.check()
        result = run(plan, ticket.flag)
    except Exception as error:
        ticket.future.set_exception(error)
    except BaseException as error:  # such as SystemExit: it ends the step, not the engine's thread
        ticket.future.set_exception(ExecutorError(f"the step raised {error!r}"))
    else:
        ticket.future.set_result(result)


class ThreadedExecutor(ExecutorBase, ABC):
    """An executor whose steps are `_run`, called on a StepWorker's thread."""

    def __init__(
        self,
        capacity: Capacity,
        thread_name: str,
        *,
        kernels: Sequence[str] = (),
        fallback: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts the thread: to be called once `_run` can be."""
        super().__init__(capacity, kernels=kernels, fallback=fallback, clock=clock)
        self._samples = StepSamples()
        self._worker = StepWorker(self._compute, thread_name)

    def submit(self, plan: StepPlan) -> StepTicket:
        return self._worker.submit(plan)

    def collect(self, ticket: StepTicket, timeout_s: float | None = None) -> StepResult:
        return self._worker.collect(ticket, timeout_s)

    def cancel(self, ticket: StepTicket) -> None:
        self._worker.cancel(ticket)

    def close(self) -> None:
        super().close()
        self._worker.close()

    @abstractmethod
    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        """Compute a step in which no row follows another step any more."""

    def _step_errors(self, step_id: int, /) -> AbstractContextManager[None]:
        return step_errors(step_id)

    def _compute(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        with self._step_errors(plan.step_id):
            started_at = self._clock.now()
            self._check_copies(plan)
            faults: dict[int, SequenceResult] = {}  # by index in the plan
            rows = []
            for index, row in enumerate(plan.sequences):
                try:
                    rows.append(self._samples.resolved(row))
                except RowFaultError as error:
                    faults[index] = SequenceResult(row.sequence_id, fault=str(error))
            results, padding = self._run(StepPlan(plan.step_id, tuple(rows), plan.copies), flag)
            if faults:
                others = iter(results)
                indices = range(len(plan.sequences))
                results = tuple(faults.get(index) or next(others) for index in indices)
            self._samples.remember(plan.step_id, results)
            elapsed = self._clock.now() - started_at
            return StepResult(plan.step_id, started_at, elapsed, results, padding)
