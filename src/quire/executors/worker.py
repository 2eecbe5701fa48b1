"""StepWorker: runs an executor's steps in order on a thread of their own.

It is what makes a plain function of a plan two-phase: the engine plans on while the thread
computes, a step that takes too long is reported instead of waited for, and its cancel flag is
within reach.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from quire.core.errors import StepCancelledError, StepTimeoutError
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


class StepWorker:
    """The two phases of an executor whose steps are one function; such executors inherit them."""

    def __init__(self, run: RunStep, name: str) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, plan: StepPlan) -> StepTicket:
        flag = CancelFlag()
        return StepTicket(plan.step_id, flag, self._threads.submit(self._start, plan, flag))

    def _start(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        flag.check()
        return self._run(plan, flag)

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
        self._threads.shutdown(wait=False, cancel_futures=True)
