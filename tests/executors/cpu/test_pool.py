"""The thread pool: every task once, stages in order, failures that reach the caller, no hangs."""

import os
import threading
import time
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.executors.cpu.native import native

# ConditionPool has the same methods.
Kind: TypeAlias = "type[native.FutexPool]"
KINDS = [kind for kind in ("FutexPool", "ConditionPool") if hasattr(native, kind)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = getattr(native, request.param)
    return found


@given(
    num_threads=st.integers(1, 4),
    may_spin=st.booleans(),
    num_tasks=st.integers(0, 100),
    chunk=st.integers(1, 120) | st.just(2**31 - 1),
    name=st.sampled_from(KINDS),
)
def test_every_task_runs_once_in_the_same_chunks(
    num_threads: int, may_spin: bool, num_tasks: int, chunk: int, name: str
) -> None:
    pool = getattr(native, name)(num_threads, may_spin)
    expected = [(at, min(at + chunk, num_tasks)) for at in range(0, num_tasks, chunk)]
    for _ in range(3):
        trace = pool.trace(num_tasks, chunk)
        assert [(begin, end) for begin, end, _ in trace] == expected
        assert all(0 <= thread < num_threads for _, _, thread in trace)


@pytest.mark.parametrize("may_spin", [True, False])
@pytest.mark.parametrize(("num_stages", "rest"), [(3000, 0), (40, 200)])
def test_stages_wait_for_each_other_with_any_number_of_threads(
    kind: Kind, may_spin: bool, num_stages: int, rest: int
) -> None:
    alone = kind(1).run_stages(num_stages, 23, 2)
    for num_threads in (2, 3, 5):
        assert kind(num_threads, may_spin).run_stages(num_stages, 23, 2, rest) == alone


@pytest.mark.parametrize("may_spin", [True, False])
def test_all_threads_take_part(kind: Kind, may_spin: bool) -> None:
    assert kind(3, may_spin).count_threads(wait_milliseconds=10_000) == 3


@pytest.mark.parametrize("may_spin", [True, False])
def test_a_thread_that_is_done_steals_from_the_ends_of_others(kind: Kind, may_spin: bool) -> None:
    pool = kind(2, may_spin)
    for _ in range(50):
        ran = pool.trace_stealing(10, wait_milliseconds=60_000)
        assert ran == [[0], [5, 6, 7, 8, 9, 4, 3, 2, 1]]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("may_spin", [True, False])
def test_the_earliest_failure_reaches_the_caller_and_the_pool_lives_on(
    kind: Kind, num_threads: int, may_spin: bool
) -> None:
    pool = kind(num_threads, may_spin)
    for _ in range(50):
        with pytest.raises(RuntimeError, match=r"^task 5$"):
            pool.fail(40, [5, 6, 30, 39])
        pool.fail(40, [])
        assert len(pool.trace(10, 1)) == 10


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_nested_stage_is_refused(kind: Kind, num_threads: int) -> None:
    pool = kind(num_threads)
    with pytest.raises(RuntimeError, match="running another stage"):
        pool.run_nested()
    assert len(pool.trace(4, 1)) == 4


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_pool_needs_a_thread(kind: Kind, num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 thread, got {num_threads}"):
        kind(num_threads)


@pytest.mark.parametrize(("num_tasks", "chunk"), [(-1, 1), (4, 0)])
def test_a_stage_of_impossible_size_is_refused(kind: Kind, num_tasks: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_tasks} and {chunk}"):
        kind(2).trace(num_tasks, chunk)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no list of threads here")
def test_a_pool_takes_its_threads_with_it(kind: Kind) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()
    pools = [kind(4, may_spin) for may_spin in (True, False)]
    pools[0].run_stages(5, 20, 1)
    own = threads() - before
    assert len(own) == 6
    del pools
    deadline = time.monotonic() + 60  # the system may list a thread a moment after it has ended
    while threads() & own and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not threads() & own


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no cores to bind to here")
def test_only_workers_of_a_pinned_pool_are_bound(kind: Kind) -> None:
    usable = os.sched_getaffinity(0)
    before = {int(task) for task in os.listdir("/proc/self/task")}
    pool = kind(len(usable), pin=True)
    assert pool.count_threads(wait_milliseconds=10_000) == len(usable)
    workers = {int(task) for task in os.listdir("/proc/self/task")} - before
    bound = sorted((os.sched_getaffinity(worker) for worker in workers), key=min)
    assert bound == [{core} for core in sorted(usable)[1:]]
    assert os.sched_getaffinity(0) == usable


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_gets_an_error_and_can_make_a_pool_of_its_own(kind: Kind) -> None:
    pool = kind(2)
    pool.trace(8, 1)
    time.sleep(0.05)  # so that the worker is asleep: destroying what it sleeps on is the hard case
    child = os.fork()
    if child == 0:
        status = 1
        try:
            pool.trace(8, 1)
        except RuntimeError as error:
            status = 0 if "does not outlive fork" in str(error) else 2
        if len(kind(2).trace(8, 1)) != 8:
            status = 3
        del pool  # must not wait for threads that do not exist
        os._exit(status)
    timer = threading.Timer(30.0, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert status == 0
    assert len(pool.trace(8, 1)) == 8
