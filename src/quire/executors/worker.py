"""StepWorker: runs an executor's steps in order on a thread of their own.

It is what makes a plain function of a plan two-phase: the engine plans on while the thread
computes, a step that takes too long is reported instead of waited for, and its cancel flag is
within reach.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    QuireError,
    StepCancelledError,
    StepTimeoutError,
)
from quire.core.plan import StepPlan, StepResult


@dataclass(slots=True)
class CancelFlag:
    """Raised by cancel(); the step looks at it between layers."""

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
    """The two phases of an executor whose steps are one function; such executors inherit them.

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
        """Drop the steps that have not begun; the one that runs may end."""
        self._is_closed = True
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                item[2].future.cancel()
        self._queue.put(None)


@contextmanager
def step_errors(step_id: int) -> Iterator[None]:
    """Whatever else than an error of ours is raised by a plan that makes no sense, or by a lack of
    memory, as an ExecutorError of that step."""
    try:
        yield
    except QuireError:
        raise
    except MemoryError as error:
        raise ExecutorMemoryError(f"step {step_id} found no memory: {error}") from error
    except Exception as error:
        kind = type(error).__name__
        raise ExecutorError(f"step {step_id} cannot be computed: {kind}: {error}") from error


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
