"""The asyncio front, in real time: streams, backpressure, leaving, draining, the engine's bugs."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from tests.engine.simulated import solo, tokens_of
from tests.engine.toys import greedy

from quire.core.config import EngineConfig
from quire.core.errors import (
    DeadlineError,
    ExecutorError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
    RowFaultError,
)
from quire.core.plan import StepPlan, StepResult
from quire.core.request import Ended, Piece, Request, RequestOutput, Status
from quire.engine import Engine
from quire.engine.aio import AsyncEngine, Stream
from quire.engine.stats import Health
from quire.executors.fake import FakeExecutor, Faults

T = TypeVar("T")
PATIENCE_S = 120.0  # a guard against waiting for ever; nothing is measured


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


class Gated(FakeExecutor):
    """Collects as many steps as it is allowed, then waits until it is allowed more."""

    def __init__(self, **options: Any) -> None:
        super().__init__(keep_plans=True, **options)
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self._is_waiting = threading.Event()

    def collect(self, ticket: Any, timeout_s: float | None = None) -> StepResult:
        self._is_waiting.set()
        assert self._is_open or self._allowed.acquire(timeout=PATIENCE_S)
        return super().collect(ticket, timeout_s)

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release()

    async def waiting(self) -> None:
        """Until the engine's thread waits for a step, and so hears no commands."""
        await asyncio.to_thread(self._is_waiting.wait, PATIENCE_S)


def front(executor: FakeExecutor | None = None, **settings: Any) -> AsyncEngine:
    return AsyncEngine(Engine(executor or FakeExecutor(), EngineConfig(**settings)))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def on_thread(engine: AsyncEngine, look: Callable[[], T]) -> T:
    """What the engine's own thread sees between two steps."""
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[T] = loop.create_future()
    engine.post(lambda: loop.call_soon_threadsafe(seen.set_result, look()))
    return await seen


async def usage(engine: AsyncEngine) -> float:
    return await on_thread(engine, lambda: engine.engine.snapshot().kv_usage)


async def pieces_of(stream: Stream) -> list[Piece]:
    return [piece async for piece in stream]


def tokens(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


# ---- results


def test_generate_gives_the_whole_output() -> None:
    async def main() -> None:
        engine = front()
        output = await engine.generate([1, 2, 3], greedy(8))
        assert output.status is Status.FINISHED
        assert tokens_of(output) == solo([1, 2, 3], greedy(8))
        await engine.close()

    run(main())


def test_a_stream_gives_the_tokens_one_by_one() -> None:
    async def main() -> None:
        engine = front()
        stream = await engine.submit([1, 2, 3], greedy(8))
        pieces = await pieces_of(stream)
        assert [len(piece.token_ids) for piece in pieces] == [1] * 8
        assert [tokens(pieces)] == solo([1, 2, 3], greedy(8))
        assert (await stream.output()).token_ids == tokens(pieces)
        await engine.close()

    run(main())


def test_concurrent_requests_get_their_own_results() -> None:
    async def main() -> None:
        engine = front(max_batch_size=8)
        prompts = [[i, i + 1] for i in range(40)]
        outputs = await asyncio.gather(*[engine.generate(p, greedy(10)) for p in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert tokens_of(output) == solo(prompt, greedy(10))
        await engine.close()

    run(main())


def test_requests_from_several_event_loops_share_the_engine() -> None:
    engine = front()
    results: dict[int, list[list[int]]] = {}

    def caller(first: int) -> None:
        output = run(engine.generate([first], greedy(20)))
        results[first] = tokens_of(output)

    threads = [threading.Thread(target=caller, args=[first]) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == {first: solo([first], greedy(20)) for first in range(6)}
    run(engine.close())


def test_the_arrivals_of_one_turn_meet_in_one_batch_time_after_time() -> None:
    async def main() -> None:
        executor = FakeExecutor(keep_plans=True)
        engine = front(executor)
        for _ in range(30):  # again as soon as the results are there: the thread may not be asleep
            executor.plans.clear()
            await asyncio.gather(*[engine.generate([i], greedy(2)) for i in range(6)])
            assert [len(plan.sequences) for plan in executor.plans] == [6, 6]
        await engine.close()

    run(main())


def test_the_engine_does_not_start_before_a_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        executor = FakeExecutor(keep_plans=True)
        engine = front(executor)
        sleep = engine._sleep

        def sleep_late() -> None:
            """Goes to sleep, once, only when the first arrival of the turn is in."""
            monkeypatch.setattr(engine, "_sleep", sleep)
            while not engine._inbox:
                time.sleep(0.001)
            sleep()

        async def after_a_while(first: int) -> None:
            time.sleep(0.02)  # blocks the event loop: the turn goes on
            await engine.generate([first], greedy(1))

        monkeypatch.setattr(engine, "_sleep", sleep_late)
        engine.post(lambda: None)
        await asyncio.gather(*[after_a_while(first) for first in range(3)])
        assert [len(plan.sequences) for plan in executor.plans] == [3]
        await engine.close()

    run(main())


# ---- backpressure


def test_a_stream_nobody_reads_pauses_its_request_until_it_is_read() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor, max_unread_tokens=8)
        stream = await engine.submit([1, 2], greedy(100))
        executor.allow(20)
        await until(lambda: stream._is_paused)
        executor.open()
        other = await engine.generate([3], greedy(50))  # the engine is free for others
        assert other.status is Status.FINISHED
        assert await on_thread(engine, lambda: len(engine.engine._scheduler.parked)) == 1
        assert await usage(engine) == 0.0
        assert 8 < len(stream._pieces) < 30, "it stands still"
        assert [tokens(await pieces_of(stream))] == solo([1, 2], greedy(100))
        assert (await stream.output()).metrics.num_preemptions >= 1
        await engine.close()

    run(main())


def test_waiting_for_the_output_needs_no_reading() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor, max_unread_tokens=4)
        stream = await engine.submit([1, 2], greedy(60))
        executor.allow(10)
        await until(lambda: stream._is_paused)
        executor.open()
        output = await stream.output()
        assert tokens_of(output) == solo([1, 2], greedy(60))
        await engine.close()

    run(main())


def test_without_a_stream_nothing_piles_up() -> None:
    async def main() -> None:
        engine = front(max_unread_tokens=1)
        handle = await engine.submit([1], greedy(50), stream=False)
        output = await handle.output()
        assert len(output.token_ids) == 50
        assert output.metrics.num_preemptions == 0
        await engine.close()

    run(main())


# ---- leaving


def test_leaving_a_stream_early_cancels_its_request_and_frees_its_blocks() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        stream = await engine.submit([1, 2, 3], greedy(50))
        executor.allow(1)
        async for _ in stream:
            break
        await until(lambda: bool(engine._inbox) or not engine.engine._lifecycle.live)
        executor.open()
        output = await stream.output()
        assert output.status is Status.CANCELLED
        assert isinstance(output.error, RequestCancelledError)
        assert 1 <= len(output.token_ids) < 10
        assert await usage(engine) == 0.0
        await engine.close()

    run(main())


def test_a_reader_that_is_cancelled_cancels_its_request() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        stream = await engine.submit([1], greedy(100))
        reader = asyncio.create_task(pieces_of(stream))
        waiter = asyncio.create_task(engine.generate([2], greedy(5)))
        await executor.waiting()
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        executor.open()
        assert (await stream.output()).status is Status.CANCELLED
        assert (await waiter).status is Status.FINISHED
        await engine.close()

    run(main())


def test_a_caller_that_goes_away_before_it_is_accepted_leaves_nothing_behind() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        first = asyncio.create_task(engine.generate([1], greedy(5)))
        await executor.waiting()  # the engine's thread is busy: nobody accepts
        second = asyncio.create_task(engine.generate([2], greedy(5)))
        await asyncio.sleep(0.01)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        executor.open()
        assert (await first).status is Status.FINISHED
        assert (await engine.generate([3], greedy(5))).status is Status.FINISHED
        assert not await on_thread(engine, lambda: engine.engine.has_work)
        assert not engine._streams
        await engine.close()

    run(main())


def test_random_disconnects_leak_no_block() -> None:
    async def one(engine: AsyncEngine, number: int) -> None:
        stream = await engine.submit([number % 50, number % 7], greedy(30))
        left = 0
        async for _ in stream:
            left += 1
            if left > number % 31:
                break

    async def main() -> None:
        engine = front(FakeExecutor(num_blocks=20, block_size=4), max_batch_size=8)
        for start in range(0, 200, 20):
            await asyncio.gather(*[one(engine, start + i) for i in range(20)])
        await until(lambda: not engine.engine.has_work)
        assert await usage(engine) == 0.0
        await on_thread(engine, engine.engine.check_integrity)
        assert not engine._streams
        await engine.close()

    run(main())


def test_cancelling_an_ended_stream_does_nothing() -> None:
    async def main() -> None:
        engine = front()
        stream = await engine.submit([1], greedy(2))
        output = await stream.output()
        stream.cancel()
        assert output.status is Status.FINISHED
        assert await stream.output() is output
        await engine.close()

    run(main())


# ---- errors


def test_a_refusal_is_raised_to_its_caller_alone() -> None:
    async def main() -> None:
        engine = front()
        good, bad = await asyncio.gather(
            engine.generate([1], greedy(3)),
            engine.generate([], greedy(3)),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestError)
        assert not isinstance(good, BaseException)
        assert good.status is Status.FINISHED
        await engine.close()

    run(main())


def test_a_full_queue_is_told_to_the_caller() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor, max_batch_size=1, max_queue_requests=2, plan_ahead=False)
        first = asyncio.create_task(engine.generate([0], greedy(3)))
        await executor.waiting()
        rest = [asyncio.create_task(engine.generate([i], greedy(3))) for i in range(1, 5)]
        await asyncio.sleep(0.01)
        executor.open()
        results = await asyncio.gather(first, *rest, return_exceptions=True)
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert len(refused) == 2
        assert all(error.retry_after_s > 0 for error in refused)
        await engine.close()

    run(main())


def test_a_fault_is_raised_to_its_reader_after_the_pieces_before_it() -> None:
    async def main() -> None:
        faults = Faults(nan=lambda row: row.sequence_id == 1 and row.completion_position == 4)
        engine = front(FakeExecutor(faults=faults))
        doomed = await engine.submit([1], greedy(10))
        sound = await engine.submit([2], greedy(10))
        seen: list[int] = []
        with pytest.raises(RowFaultError):
            async for piece in doomed:
                seen += piece.token_ids
        assert seen == solo([1], greedy(10))[0][:4]
        assert [tokens(await pieces_of(sound))] == solo([2], greedy(10))
        await engine.close()

    run(main())


def test_a_deadline_passes_while_the_engine_has_nothing_else_to_do() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        stream = await engine.submit([1], greedy(100), timeout_s=0.2)
        engine.post(lambda: engine.engine.pause(stream.request.id))
        executor.open()
        assert isinstance((await stream.output()).error, DeadlineError)
        await engine.close()

    run(main())


def test_a_request_counts_as_arrived_when_it_is_submitted_not_when_a_step_ends() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        running = asyncio.create_task(engine.generate([1], greedy(5)))
        await executor.waiting()
        submitting = asyncio.create_task(engine.submit([2], greedy(1)))
        await asyncio.sleep(0)  # it is submitted; the engine's thread waits for a step
        submitted_by = engine.engine.clock.now()
        executor.open()
        stream = await submitting
        assert stream.request.metrics.arrived_at <= submitted_by
        await stream.output()
        await running
        await engine.close()

    run(main())


# ---- the end


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        running = asyncio.create_task(engine.generate([1], greedy(20)))
        await executor.waiting()
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        executor.open()
        await draining
        assert (await running).status is Status.FINISHED
        with pytest.raises(OverloadedError, match="draining"):
            await engine.generate([2], greedy(1))
        await engine.close()

    run(main())


def test_what_is_left_when_the_time_to_drain_is_over_is_cancelled() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor, max_unread_tokens=2)
        unread = await engine.submit([1], greedy(100))
        executor.allow(5)
        await until(lambda: unread._is_paused)
        executor.open()
        await engine.drain(timeout_s=0.05)
        assert (await unread.output()).status is Status.CANCELLED
        with pytest.raises(ExecutorError, match="closed"):
            await engine.generate([2], greedy(1))

    run(main())


def test_draining_twice_or_after_closing_returns() -> None:
    async def main() -> None:
        engine = front()
        await engine.generate([1], greedy(2))
        await asyncio.gather(engine.drain(), engine.drain())
        await engine.drain()
        await engine.close()
        await engine.drain()

    run(main())


def test_closing_ends_every_request_and_the_executor() -> None:
    async def main() -> None:
        executor = Gated()
        engine = front(executor, max_batch_size=2)
        tasks = [asyncio.create_task(engine.generate([i], greedy(50))) for i in range(5)]
        stream = await asyncio.wait_for(engine.submit([9], greedy(50)), PATIENCE_S)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.01)
        executor.open()
        await closing
        outputs = await asyncio.gather(*tasks)
        assert {output.status for output in outputs} == {Status.CANCELLED}
        assert (await stream.output()).status is Status.CANCELLED
        assert executor.is_closed
        await engine.close()  # again: nothing happens

    run(main())


def test_closing_an_engine_that_never_ran_closes_its_executor() -> None:
    executor = FakeExecutor()
    run(front(executor).close())
    assert executor.is_closed


def test_a_bug_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = front(FakeExecutor())
        step = engine.engine.step
        calls = 0

        def broken() -> Any:
            nonlocal calls
            calls += 1
            if calls > 3:
                raise ZeroDivisionError("a bug")
            return step()

        monkeypatch.setattr(engine.engine, "step", broken)
        outputs = await asyncio.gather(*[engine.generate([i], greedy(50)) for i in range(5)])
        for output in outputs:
            assert output.status is Status.FAILED
            assert isinstance(output.error, ExecutorError)
            assert "ZeroDivisionError" in str(output.error)
        with pytest.raises(ExecutorError):
            await engine.generate([1], greedy(1))
        await engine.close()

    run(main())


def test_a_command_that_fails_leaves_nobody_waiting() -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        executor = Gated()
        engine = front(executor)
        task = asyncio.create_task(engine.generate([1], greedy(50)))
        await executor.waiting()
        engine.post(broken)
        executor.open()
        assert (await task).status is Status.FAILED
        await engine.close()

    run(main())


class Deaf(FakeExecutor):
    """Hangs, in no time at all, and heeds nothing."""

    def submit(self, plan: StepPlan) -> Any:
        self.faults = Faults(hangs=lambda _: True, heeds_cancel=False)
        return super().submit(plan)


def test_an_executor_that_does_not_answer_is_reported_once() -> None:
    async def main() -> None:
        reports: list[Health] = []
        inner = Engine(Deaf(), EngineConfig(step_timeout_s=1.0, step_grace_s=1.0))
        engine = AsyncEngine(inner, on_stuck=lambda: reports.append(inner.health))
        outputs = await asyncio.gather(*[engine.generate([i], greedy(5)) for i in range(3)])
        assert {output.status for output in outputs} == {Status.FAILED}
        assert all("did not answer" in str(output.error) for output in outputs)
        await until(lambda: bool(reports))
        with pytest.raises(ExecutorError, match="restart"):
            await engine.generate([1], greedy(1))
        await engine.close()
        assert reports == [Health.STUCK]

    run(main())


def test_a_closed_event_loop_does_not_stop_the_others() -> None:
    executor = Gated()
    engine = front(executor)

    async def abandon() -> None:
        await engine.submit([1], greedy(30))

    run(abandon())
    executor.open()
    output = run(engine.generate([2], greedy(5)))
    assert tokens_of(output) == solo([2], greedy(5))
    run(engine.close())


def test_pieces_gather_while_nobody_takes_them() -> None:
    async def main() -> None:
        executor = Gated()
        engine = AsyncEngine(Engine(executor, EngineConfig(plan_ahead=False)))
        stream = await engine.submit([1, 2, 3], greedy(6))
        executor.allow(1)
        assert len(await stream.take()) == 1
        executor.allow(3)
        gathered: list[Piece] = []
        while len(gathered) < 3:
            gathered += await stream.take(stream.loop.time() + 0.05)
        assert len(gathered) == 3
        executor.open()
        while pieces := await stream.take(stream.loop.time() + 60):  # the end cuts it short
            gathered += pieces
        assert [piece.token_ids[0] for piece in gathered] == solo([1, 2, 3], greedy(6))[0][1:]
        assert (await stream.output()).status is Status.FINISHED
        await engine.close()

    run(main())


def test_taking_resumes_a_paused_request() -> None:
    async def main() -> None:
        config = EngineConfig(max_unread_tokens=4)
        engine = AsyncEngine(Engine(FakeExecutor(), config))
        stream = await engine.submit([1, 2, 3], greedy(1500))
        while not engine.engine.snapshot().num_waiting:
            await asyncio.sleep(0.001)
        tokens: list[int] = []
        while pieces := await stream.take():
            tokens += [token for piece in pieces for token in piece.token_ids]
        assert tokens == solo([1, 2, 3], greedy(1500))[0]
        await engine.close()

    run(main())


# ---- the engine's thread


class Wake(threading.Event):
    """Notes how long it was to be waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        return True


@pytest.mark.parametrize(
    ("wake_at", "timeouts"),
    [(None, []), (7.25, [0.25]), (6.0, [0.0]), (float("inf"), [None])],
)
def test_the_thread_sleeps_until_the_time_that_the_engine_names(
    wake_at: float | None, timeouts: list[float | None]
) -> None:
    clock = SimpleNamespace(now=lambda: 7.0)
    config = SimpleNamespace(max_unread_tokens=8)
    engine: Any = SimpleNamespace(config=config, clock=clock, wake_at=wake_at)
    thread = AsyncEngine(engine)
    thread._wake = Wake()
    thread._wake.set()
    thread._sleep()
    assert thread._wake.timeouts == timeouts
    assert not thread._wake.is_set()


def test_a_stream_pauses_above_the_limit_and_resumes_at_half_of_it() -> None:
    async def main() -> None:
        calls: list[str] = []
        owner: Any = SimpleNamespace(
            max_unread_tokens=8,
            pause=lambda stream: calls.append(f"pause {stream.request.id}"),
            resume=lambda stream: calls.append(f"resume {stream.request.id}"),
        )
        stream = Stream(owner, asyncio.get_running_loop())
        stream.accepted(cast(Request, SimpleNamespace(id="x")))
        states = []
        for _ in range(10):
            stream.receive(Piece("x", 0, (1,), "", (), None))
            states.append(list(calls))
        assert states == [[]] * 8 + [["pause x"]] * 2, "once, above eight"
        states = []
        for _ in range(10):
            await stream._next()
            states.append(list(calls))
        assert states == [["pause x"]] * 5 + [["pause x", "resume x"]] * 5, "once, at four"
        for number in range(5):
            stream.receive(Piece("x", 0, (number, number), "", (), None))
        assert calls == ["pause x", "resume x", "pause x"], "tokens count, not pieces"

    run(main())


def test_the_engines_thread_does_not_keep_the_process_alive() -> None:
    async def main() -> None:
        engine = front()
        await engine.generate([1], greedy(1))
        assert engine._thread is not None
        assert engine._thread.daemon
        await engine.close()

    run(main())


def test_pieces_gather_until_the_time_that_take_names_or_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        owner: Any = SimpleNamespace(max_unread_tokens=99, cancel=lambda stream: None)

        def begun() -> Stream:
            stream = Stream(owner, loop)
            stream.receive(Piece("x", 0, (1,), "", (), None))
            return stream

        def second(stream: Stream) -> None:
            stream.receive(Piece("x", 0, (2,), "", (), None))

        stream = begun()
        loop.call_later(0.02, second, stream)
        assert len(await stream.take(loop.time() + 0.5)) == 2
        assert stream._num_unread == 0
        stream = begun()
        loop.call_later(0.02, second, stream)
        assert len(await stream.take(loop.time() - 1.0)) == 1, "that time is past"
        stream = begun()
        ended = cast(RequestOutput, SimpleNamespace(error=None))
        loop.call_later(0.02, stream.receive, Ended("x", ended))
        started = loop.time()
        assert len(await stream.take(started + PATIENCE_S)) == 1
        assert loop.time() - started < PATIENCE_S / 2, "it does not wait for what has ended"

    run(main())


def test_a_caller_that_left_cancels_its_request_if_the_engine_took_it() -> None:
    cancelled: list[str] = []
    config = SimpleNamespace(max_unread_tokens=8)
    engine: Any = SimpleNamespace(config=config, cancel=cancelled.append)
    front_end = AsyncEngine(engine)
    pending, refused, given_up, taken = [Future[Request]() for _ in range(4)]
    refused.set_exception(RequestError("no"))
    given_up.cancel()
    taken.set_result(cast(Request, SimpleNamespace(id="mine")))
    for accepted in (refused, given_up, taken):
        front_end._cancel_if_accepted(accepted)
    assert cancelled == ["mine"]
    front_end._cancel_if_accepted(pending)
    assert cancelled == ["mine"]


def test_who_waits_for_the_whole_output_gets_no_pieces() -> None:
    async def main() -> None:
        engine = front()
        add_request = engine.engine.add_request
        asked = []

        def noted(*arguments: Any, **options: Any) -> Request:
            asked.append(options["stream"])
            return add_request(*arguments, **options)

        engine.engine.add_request = noted  # type: ignore[method-assign]
        await engine.generate([1], greedy(2))
        await (await engine.submit([1], greedy(2))).output()
        assert asked == [False, True]
        await engine.close()

    run(main())
