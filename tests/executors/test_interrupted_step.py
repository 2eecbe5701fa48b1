"""A step that nobody waits for any more is told to stop."""

import threading

import pytest

from quire.core.plan import StepPlan, StepResult
from quire.executors.worker import CancelFlag, StepWorker


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_wait_raises_the_steps_cancel_flag(
    interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def run(plan: StepPlan, flag: CancelFlag) -> StepResult:
        is_over.wait(30)
        return StepResult(plan.step_id, 0.0, 0.0, ())

    worker = StepWorker(run, "test")
    ticket = worker.submit(StepPlan(1, ()))

    def interrupted(timeout: float | None = None) -> StepResult:
        raise interrupt

    monkeypatch.setattr(ticket.future, "result", interrupted)
    with pytest.raises(interrupt):
        worker.collect(ticket)
    is_over.set()
    worker.close()
    with pytest.raises(Exception, match="cancelled"):
        ticket.flag.check()
