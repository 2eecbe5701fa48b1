"""StepWorker: steps in order on one thread, timeouts, cancel flags, closing."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from quire.core.errors import ExecutorError, StepCancelledError, StepTimeoutError
from quire.core.plan import StepPlan, StepResult
from quire.executors.worker import CancelFlag, StepWorker

PATIENCE_S = 120.0


class Steps:
    """Steps that wait for a gate and then raise or end as set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self.ran: list[int] = []
        self.error: Exception | None = None
        self.threads: set[str] = set()

    def run(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        self.has_begun.set()
        while not self.gate.wait(0.001):
            flag.check()
        self.ran.append(plan.step_id)
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return StepResult(plan.step_id, 0.0, 0.0, ())


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.gate.set()  # whatever happened: no thread stays behind


@pytest.fixture
def worker(steps: Steps) -> Iterator[StepWorker]:
    worker = StepWorker(steps.run, "worker-test")
    yield worker
    steps.gate.set()
    worker.close()


def test_steps_run_in_order_on_one_thread_of_their_own(steps: Steps, worker: StepWorker) -> None:
    tickets = [worker.submit(StepPlan(number, ())) for number in range(5)]
    steps.gate.set()
    results = [worker.collect(ticket, PATIENCE_S) for ticket in tickets]
    assert [result.step_id for result in results] == steps.ran == [0, 1, 2, 3, 4]
    assert len(steps.threads) == 1
    assert threading.current_thread().name not in steps.threads


def test_a_step_that_is_not_done_in_time_can_be_asked_for_again(
    steps: Steps, worker: StepWorker
) -> None:
    ticket = worker.submit(StepPlan(7, ()))
    with pytest.raises(StepTimeoutError, match=r"step 7 took over 0\.01 s"):
        worker.collect(ticket, 0.01)
    steps.gate.set()
    assert worker.collect(ticket, PATIENCE_S).step_id == 7


def test_a_running_step_heeds_its_flag(steps: Steps, worker: StepWorker) -> None:
    ticket = worker.submit(StepPlan(1, ()))
    assert steps.has_begun.wait(PATIENCE_S)
    worker.cancel(ticket)
    with pytest.raises(StepCancelledError):
        worker.collect(ticket, PATIENCE_S)
    assert steps.ran == []


def test_a_step_cancelled_before_its_turn_does_not_begin(steps: Steps, worker: StepWorker) -> None:
    first = worker.submit(StepPlan(1, ()))
    second = worker.submit(StepPlan(2, ()))
    worker.cancel(second)
    steps.gate.set()
    worker.collect(first, PATIENCE_S)
    with pytest.raises(StepCancelledError):
        worker.collect(second, PATIENCE_S)
    assert steps.ran == [1]


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("of its own")])
def test_what_a_step_raises_is_raised_by_collect(
    steps: Steps, worker: StepWorker, error: Exception
) -> None:
    steps.error = error
    steps.gate.set()
    ticket = worker.submit(StepPlan(1, ()))
    with pytest.raises(type(error)) as caught:
        worker.collect(ticket, PATIENCE_S)
    assert caught.value is error


def test_a_result_that_comes_at_the_moment_of_the_timeout_is_given(
    steps: Steps, worker: StepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = worker.submit(StepPlan(3, ()))
    ask = ticket.future.result

    def late(timeout: float | None = None) -> StepResult:
        """Times out, but the step is done before anybody looks."""
        monkeypatch.setattr(ticket.future, "result", ask)
        steps.gate.set()
        ask(PATIENCE_S)
        raise TimeoutError

    monkeypatch.setattr(ticket.future, "result", late)
    assert worker.collect(ticket, 0.01).step_id == 3


def test_closing_drops_the_steps_that_have_not_begun(steps: Steps, worker: StepWorker) -> None:
    first = worker.submit(StepPlan(1, ()))
    second = worker.submit(StepPlan(2, ()))
    assert steps.has_begun.wait(PATIENCE_S)
    worker.close()
    steps.gate.set()
    assert worker.collect(first, PATIENCE_S).step_id == 1
    with pytest.raises(StepCancelledError):
        worker.collect(second, PATIENCE_S)


def test_a_step_that_never_ends_does_not_keep_the_process() -> None:
    program = (
        "import threading\n"
        "from quire.core.plan import StepPlan\n"
        "from quire.executors.worker import StepWorker\n"
        "worker = StepWorker(lambda *_: threading.Event().wait(), 'hangs')\n"
        "worker.submit(StepPlan(1, ()))\n"
        "print('the end')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "the end\n")


def test_the_thread_ends_with_a_worker_that_nobody_closed() -> None:
    worker = StepWorker(lambda plan, _: StepResult(plan.step_id, 0.0, 0.0, ()), "forgotten")
    worker.collect(worker.submit(StepPlan(1, ())), PATIENCE_S)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "forgotten"]
    del worker
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_closed_worker_takes_no_more_steps(worker: StepWorker) -> None:
    worker.close()
    with pytest.raises(ExecutorError, match="closed"):
        worker.submit(StepPlan(1, ()))


def test_a_closed_worker_lets_go_of_what_its_steps_ran_on() -> None:
    """At once: weights are no small thing to leave to the garbage collector."""

    class Owner:
        def __init__(self) -> None:
            self.worker = StepWorker(self.run, "owned")

        def run(self, plan: StepPlan, _: CancelFlag) -> StepResult:
            return StepResult(plan.step_id, 0.0, 0.0, ())

    owner = Owner()
    owner.worker.collect(owner.worker.submit(StepPlan(1, ())), PATIENCE_S)
    owner.worker.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "owned"]
    thread.join(PATIENCE_S)
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_a_step_that_asks_to_leave_the_program_is_an_error_of_the_step() -> None:
    def leave(plan: StepPlan, flag: CancelFlag) -> StepResult:
        raise SystemExit(3)

    worker = StepWorker(leave, "leaves")
    with pytest.raises(ExecutorError, match="SystemExit"):
        worker.collect(worker.submit(StepPlan(1, ())), PATIENCE_S)
    worker.close()


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
