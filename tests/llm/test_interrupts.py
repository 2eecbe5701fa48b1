"""A step that nobody waits for any more is told to stop."""

from typing import Any, cast

import pytest

from quire.core.errors import StepTimeoutError
from quire.executors.protocol import Executor
from quire.llm.interrupts import InterruptibleExecutor


class Waiting:
    """An executor whose steps end in an exception, and that knows what was cancelled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.cancelled: list[Any] = []

    def collect(self, ticket: Any, timeout_s: float | None = None) -> Any:
        raise self.error

    def cancel(self, ticket: Any) -> None:
        self.cancelled.append(ticket)


@pytest.mark.parametrize(
    ("error", "cancelled"),
    [(KeyboardInterrupt(), ["ticket"]), (SystemExit(), ["ticket"]), (StepTimeoutError(), [])],
)
def test_an_interrupt_cancels_the_step_and_an_error_does_not(
    error: BaseException, cancelled: list[str]
) -> None:
    inner = Waiting(error)
    executor = InterruptibleExecutor(cast(Executor, inner))
    with pytest.raises(type(error)):
        executor.collect("ticket")
    assert inner.cancelled == cancelled
