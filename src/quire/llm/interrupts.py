"""InterruptibleExecutor: a step that nobody waits for any more is told to stop."""

from collections.abc import Mapping

from quire.core.plan import Capacity, StepPlan, StepResult
from quire.executors.protocol import Executor, Ticket


class InterruptibleExecutor:
    """Any executor; where waiting for a step is interrupted, as by Ctrl-C, the step is cancelled.

    Without it the step would run on, and the next one, or the end of the program, wait for it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def is_warm(self) -> bool:
        return self._executor.is_warm

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return self._executor.memory_bytes

    def warm_up(self) -> None:
        self._executor.warm_up()

    def submit(self, plan: StepPlan) -> Ticket:
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket, timeout_s: float | None = None) -> StepResult:
        try:
            return self._executor.collect(ticket, timeout_s)
        except Exception:
            raise
        except BaseException:
            self._executor.cancel(ticket)
            raise

    def cancel(self, ticket: Ticket) -> None:
        self._executor.cancel(ticket)

    def close(self) -> None:
        self._executor.close()
