"""A worker that dies: every request goes on, bit for bit, and what kills workers is refused."""

import asyncio
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from tests.llm.text_models import write_text_model

from quire.core.errors import (
    DeadlineError,
    ExecutorError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
    WorkerCrashError,
)
from quire.core.request import BACKGROUND, Piece, RequestOutput, Status
from quire.core.sampling import Constraint, SamplingParams
from quire.engine.stats import Snapshot
from quire.llm import AsyncLLM
from quire.llm.assembly import assemble
from quire.llm.chats import ChatOptions
from quire.llm.devices import Options
from quire.worker import RemoteLLM
from quire.worker import messages as wire
from quire.worker import remote as remote_module
from quire.worker.channel import Channel, FrameReader, frame
from quire.worker.launch import COMMAND, ModelLauncher, WorkerProcess
from quire.worker.process import WorkerEngine

PATIENCE_S = 120.0
OPTIONS = Options(device="reference", kv_memory="8MiB")
FAULTY = (sys.executable, "-m", "tests.worker.faulty_worker")
POISON = 77


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@asynccontextmanager
async def remote(
    model: Path,
    command: Sequence[str] = COMMAND,
    on_stuck: Callable[[], None] | None = None,
    **options: Any,
) -> AsyncIterator[RemoteLLM]:
    llm = await asyncio.to_thread(
        lambda: RemoteLLM.load(model, OPTIONS, on_stuck, command=command, **options)
    )
    await llm.open()
    try:
        yield llm
    finally:
        await llm.close()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def mixed(count: int, max_tokens: int) -> list[tuple[str, SamplingParams]]:
    """Greedy, sampled, several, scored, constrained, with penalties and with stop strings."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 7, "top_p": 0.9},
        {"seed": 8, "n": 3, "logprobs": 2},
        {"seed": 9, "logprobs": 3, "frequency_penalty": 0.7},
        {"seed": 10, "structured": Constraint.regex("[ab ]{20,60}c"), "ignore_eos": False},
        {"seed": 11, "stop": (" t", "er"), "min_tokens": 9},
        {"seed": 12, "dry_multiplier": 0.8, "repetition_penalty": 1.1},
        {"seed": 13, "prompt_logprobs": 1},
    ]
    found = []
    for number in range(count):
        kind = {"max_tokens": max_tokens, "ignore_eos": True, **kinds[number % len(kinds)]}
        found.append((f"the {number}th text of many", SamplingParams(**kind)))
    return found


async def read_stream(
    llm: Any, prompt: str, params: SamplingParams, is_read: Callable[[], None]
) -> tuple[list[Piece], RequestOutput]:
    stream = await llm.submit(prompt, params)
    pieces: list[Piece] = []
    while new := await stream.take():
        pieces += new
        is_read()
    return pieces, await stream.output()


def seen(answer: tuple[list[Piece], RequestOutput]) -> object:
    """All that a reader gets, but times and names."""
    pieces, output = answer
    told: dict[int, list[Any]] = {}
    for piece in pieces:
        token_ids, text, scores, _ = told.setdefault(piece.completion_index, [[], "", [], None])
        told[piece.completion_index] = [
            [*token_ids, *piece.token_ids],
            text + piece.text,
            [*scores, *piece.logprobs],
            piece.finish_reason,
        ]
    return told, output.completions, output.status, output.prompt_logprobs, output.prompt_token_ids


async def undisturbed(model: Path, asked: list[tuple[str, SamplingParams]]) -> list[object]:
    options = {"device": "reference", "kv_memory": "8MiB"}
    async with AsyncLLM(model, **options) as llm:  # type: ignore[arg-type]
        work = [read_stream(llm, *each, lambda: None) for each in asked]
        return [seen(answer) for answer in await asyncio.gather(*work)]


async def disturbed(
    llm: RemoteLLM,
    asked: list[tuple[str, SamplingParams]],
    moments: Sequence[int],
    pauses: "Pauses | None" = None,
) -> tuple[list[object], int]:
    """Answers, while the worker is killed each time that so many further tokens were read."""
    left, signals, num_killed = list(moments), [signal.SIGKILL, signal.SIGSEGV], 0
    count = last_killed = 0

    def is_read() -> None:
        nonlocal count, last_killed, num_killed
        count += 1
        if pauses is not None:
            pauses.is_read()
        # Tokens of a dead worker are read until its channel's end is noticed.
        is_alive = llm.worker_pid != last_killed and not llm._engine.is_recovering
        if left and count >= left[0] and is_alive:
            last_killed = llm.worker_pid
            count = 0
            left.pop(0)
            if pauses is not None:
                pauses.killed()
            os.kill(llm.worker_pid, signals[num_killed % 2])
            num_killed += 1

    work = [read_stream(llm, *each, is_read) for each in asked]
    return [seen(answer) for answer in await asyncio.gather(*work)], num_killed


def test_no_token_is_lost_doubled_or_changed_when_workers_are_killed(model: Path) -> None:
    async def main() -> None:
        asked = mixed(12, 100)
        draw = random.Random(4)
        expected = await undisturbed(model, asked)
        async with remote(model) as llm:
            moments = [draw.randrange(1, 200) for _ in range(4)]
            answers, num_killed = await disturbed(llm, asked, moments)
            assert num_killed == llm.num_restarts == 4
            for (_, params), answer, wanted in zip(asked, answers, expected, strict=True):
                assert answer == wanted, params

    run(main())


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "minLength": 30, "maxLength": 60}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


class Pauses(logging.Handler):
    """What readers waited for a killed worker, in parts: until it was noticed and what is not the
    other parts, loading the model, and computing live contexts again up to a token."""

    def __init__(self, llm: RemoteLLM) -> None:
        super().__init__()
        self._llm = llm
        self._killed_at = self._back_at = 0.0
        self.parts: list[tuple[float, float, float]] = []

    def killed(self) -> None:
        self._killed_at = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "worker_restarted":
            self._back_at = time.monotonic()

    def is_read(self) -> None:
        if not self._back_at:
            return
        loading = self._llm._engine._load_s
        overhead = self._back_at - self._killed_at - loading
        self.parts.append((overhead, loading, time.monotonic() - self._back_at))
        self._back_at = 0.0


def with_tools(llm: Any, asked: list[tuple[Any, SamplingParams]]) -> list[tuple[Any, Any]]:
    """The same, with a call that must come in every eighth place."""
    options = ChatOptions(tools=[TOOL], tool_choice="required")
    for place in range(6, len(asked), 8):
        prepared = llm.prompts.read_chat(f"What is at {place}?", options)
        params = prepared.turn.params(SamplingParams(seed=place, max_tokens=120))
        asked[place] = list(prepared.tokens[-40:]), params  # the whole fills the tiny context
    return asked


@pytest.mark.long
def test_a_hundred_workers_are_killed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        draw = random.Random(19)
        num_killed, parts = 0, []
        async with remote(model) as llm:
            asked = with_tools(llm, mixed(32, 150))
            expected = await undisturbed(model, asked)
            while num_killed < 100:
                pauses = Pauses(llm)
                remote_module._log.addHandler(pauses)
                moments = [draw.randrange(20, 200) for _ in range(100 - num_killed)]
                answers, killed = await disturbed(llm, asked, moments, pauses)
                remote_module._log.removeHandler(pauses)
                for (_, params), answer, wanted in zip(asked, answers, expected, strict=True):
                    assert answer == wanted, params
                num_killed += killed
                parts += pauses.parts
                assert killed > 10
            assert llm.num_restarts == num_killed == 100
        with capsys.disabled():
            print(f"\n{num_killed} workers were killed under 32 streams; {len(parts)} pauses, in s")
            columns = zip(*parts, strict=True)
            for name, column in zip(("overhead", "loading", "computing"), columns, strict=True):
                ordered = sorted(column)
                print(f"{name}: median {median(ordered):.3f}, longest {ordered[-1]:.3f}")

    asyncio.run(main())


def test_a_request_that_kills_workers_is_refused_and_the_others_finish(model: Path) -> None:
    async def main() -> None:
        never = {POISON: -100.0}
        asked = [
            ([*range(100, 110 + n)], SamplingParams(max_tokens=40, seed=n, logit_bias=never))
            for n in range(6)
        ]
        async with remote(model) as llm:
            expected = await asyncio.gather(*(llm.generate(*each) for each in asked))
        async with remote(model, (*FAULTY, "die", str(POISON))) as llm:
            others = [asyncio.ensure_future(llm.generate(*each)) for each in asked]
            with pytest.raises(WorkerCrashError, match="the likely cause"):
                await llm.generate([1, 2, POISON, 4], max_tokens=5)
            outputs = await asyncio.gather(*others, return_exceptions=True)
            assert 2 <= llm.num_restarts <= 8  # by who else was running at each crash
            for output, wanted in zip(outputs, expected, strict=True):
                assert isinstance(output, RequestOutput), output
                assert output.completions == wanted.completions

    run(main())


def test_a_worker_that_hangs_is_killed_and_its_requests_go_on(model: Path) -> None:
    async def main() -> None:
        command = (*FAULTY, "stop", str(POISON))
        async with remote(model, command, hang_s=1.0) as llm:
            with pytest.raises(WorkerCrashError):
                await llm.generate([1, POISON], max_tokens=2)
            assert (await llm.generate([1, 2], max_tokens=2)).status is Status.FINISHED

    run(main())


def test_a_server_that_did_not_run_takes_no_worker_for_hung(model: Path) -> None:
    async def main() -> None:
        async with remote(model, hang_s=3.0) as llm:
            await llm.generate("a text", SamplingParams(max_tokens=2))
            time.sleep(4.0)  # as if the process had been stopped
            await asyncio.sleep(1.0)
            output = await llm.generate("a text", SamplingParams(max_tokens=2))
            assert output.status is Status.FINISHED
            assert llm.num_restarts == 0

    run(main())


def test_an_engine_that_fails_ends_its_worker_and_not_its_requests(model: Path) -> None:
    async def main() -> None:
        async with remote(model, (*FAULTY, "raise", str(POISON))) as llm:
            with pytest.raises((WorkerCrashError, ExecutorError)):
                await llm.generate([1, POISON], max_tokens=2)
            assert (await llm.generate([1, 2], max_tokens=2)).status is Status.FINISHED

    run(main())


def test_requests_that_come_while_no_worker_runs_wait_for_the_next(model: Path) -> None:
    async def main() -> None:
        async with remote(model) as llm:
            wanted = await llm.generate([5, 6], max_tokens=3, temperature=0.0)
            os.kill(llm.worker_pid, signal.SIGKILL)
            given = await llm.generate([5, 6], max_tokens=3, temperature=0.0)
            assert given.token_ids == wanted.token_ids
            assert (await llm.snapshot()).stats.num_steps > 0
            assert llm.num_restarts == 1

    run(main())


def test_a_cancelled_request_does_not_come_back(model: Path) -> None:
    async def main() -> None:
        async with remote(model) as llm:
            stream = await llm.submit([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
            await stream.take()
            os.kill(llm.worker_pid, signal.SIGKILL)
            stream.cancel()
            output = await stream.output()
            assert isinstance(output.error, RequestCancelledError)
            await llm.generate([1], max_tokens=1)
            assert (await llm.snapshot()).num_running == 0

    run(main())


async def drain_and_close(llm: RemoteLLM) -> None:
    """As a server that ends."""
    await llm.drain(PATIENCE_S)
    await llm.close()


@pytest.mark.parametrize("kind", [{}, {"structured": Constraint.regex("[ab ]{40,60}c")}])
def test_a_drain_that_comes_while_no_worker_runs_lets_requests_finish(
    model: Path, kind: dict[str, Any]
) -> None:
    asked = [("a text", SamplingParams(max_tokens=60, temperature=0.0, **kind))]

    async def work() -> None:
        async with remote(model) as llm:
            stream = await llm.submit(*asked[0])
            first = await stream.take()
            os.kill(llm.worker_pid, signal.SIGKILL)
            draining = asyncio.ensure_future(drain_and_close(llm))
            pieces = list(first)
            while new := await stream.take():
                pieces += new
            answer = seen((pieces, await stream.output()))
            await draining
            assert [answer] == await undisturbed(model, asked)

    run(work())


@pytest.mark.parametrize("kind", [{}, {"structured": Constraint.regex("[ab ]{200,300}c")}])
def test_a_request_that_is_cancelled_as_it_is_sent_ends(model: Path, kind: dict[str, Any]) -> None:
    async def work() -> None:
        async with remote(model) as llm:
            params = SamplingParams(max_tokens=400, ignore_eos=True, **kind)
            engine = llm._engine
            submitting = asyncio.ensure_future(engine.submit([1, 2, 3], params))
            await asyncio.sleep(0)  # it is sent, and not yet answered
            [record] = engine._records.values()
            record.stream.cancel()
            stream = await submitting
            output = await stream.output()
            assert output.status is Status.CANCELLED
            assert sum(len(each.token_ids) for each in output.completions) < 400

    run(work())


def test_signals_for_the_group_of_processes_leave_the_worker_alone(model: Path) -> None:
    async def work() -> None:
        async with remote(model) as llm:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                os.kill(llm.worker_pid, number)
            output = await llm.generate("a text", SamplingParams(max_tokens=30))
            assert output.status is Status.FINISHED
            assert llm.num_restarts == 0

    run(work())


def test_what_cannot_be_written_as_a_message_is_refused_and_not_kept(model: Path) -> None:
    async def work() -> None:
        async with remote(model) as llm:
            schema = Constraint.json({"const": "\ud800"})
            with pytest.raises(RequestError, match="cannot be written"):
                await llm._engine.prepare(SamplingParams(structured=schema))
            with pytest.raises(RequestError, match="cannot be written"):
                await llm._engine.submit([2**70])
            os.kill(llm.worker_pid, signal.SIGKILL)
            output = await llm.generate("a text", SamplingParams(max_tokens=5))
            assert output.status is Status.FINISHED
            assert llm.num_restarts == 1

    run(work())


def test_nothing_of_the_folder_it_starts_in_is_imported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "selectors.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        async with remote(model) as llm:
            output = await llm.generate("a text", SamplingParams(max_tokens=2))
            assert output.status is Status.FINISHED

    run(work())


def test_without_its_file_no_worker_comes_back_and_everybody_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "MAX_FAILED_STARTS", 2)
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(model.read_bytes())
    stuck: list[bool] = []

    async def main() -> None:
        async with remote(copied, on_stuck=lambda: stuck.append(True)) as llm:
            stream = await llm.submit([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
            copied.unlink()
            os.kill(llm.worker_pid, signal.SIGKILL)
            output = await stream.output()
            assert "no worker could be started" in str(output.error)
            with pytest.raises(ExecutorError, match="no worker"):
                await llm.generate([1], max_tokens=1)

    run(main())
    assert stuck == [True]


@pytest.mark.parametrize("has_request", [True, False])
def test_a_drain_ends_where_no_worker_comes_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_request: bool
) -> None:
    monkeypatch.setattr(remote_module, "MAX_FAILED_STARTS", 1)
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(model.read_bytes())

    async def main() -> None:
        async with remote(copied) as llm:
            if has_request:
                stream = await llm.submit([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
            copied.unlink()
            os.kill(llm.worker_pid, signal.SIGSTOP)  # so that it does not answer the drain
            draining = asyncio.ensure_future(llm.drain(None))
            await asyncio.sleep(0)
            os.kill(llm.worker_pid, signal.SIGKILL)
            await draining
            assert llm.num_restarts == 0
            if has_request:
                assert "no worker could be started" in str((await stream.output()).error)

    run(main())


def test_workers_that_die_of_themselves_end_the_server_with_their_last_words(model: Path) -> None:
    stuck: list[bool] = []

    async def work() -> None:
        command = (*FAULTY, "idle", "")
        async with remote(model, command, on_stuck=lambda: stuck.append(True)) as llm:
            while llm.failure is None:
                await asyncio.sleep(0.05)
            with pytest.raises(ExecutorError, match=r"3 workers in a row.*my last words"):
                await llm.generate([1], max_tokens=1)
            assert llm.num_restarts == 2

    run(work())
    assert stuck == [True]


def test_a_request_whose_constraint_kills_workers_is_refused_and_the_others_finish(
    model: Path,
) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
    asked = [(f"text {number}", params) for number in range(3)]

    async def work() -> None:
        expected = await undisturbed(model, asked)
        async with remote(model, (*FAULTY, "prepare", "poison")) as llm:
            others = asyncio.gather(*(read_stream(llm, *each, lambda: None) for each in asked))
            poisoned = SamplingParams(structured=Constraint.regex("poison"), max_tokens=9)
            with pytest.raises(WorkerCrashError, match="the likely cause"):
                await llm.generate("a text", poisoned)
            assert [seen(answer) for answer in await others] == expected

    run(work())


@pytest.mark.parametrize(
    "kind", [{"stop": (" t", "er", "a")}, {"stop_token_ids": [*range(90, 190)]}]
)
def test_how_a_finished_completion_ended_outlives_the_worker(
    model: Path, kind: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=200, n=5, seed=3, ignore_eos=True, logprobs=1, **kind)

    async def work() -> None:
        [expected] = await undisturbed(model, [("a text", params)])
        async with remote(model) as llm:
            stream = await llm.submit("a text", params)
            pieces: list[Piece] = []
            while new := await stream.take():
                pieces += new
                if llm.num_restarts == 0 and any(piece.finish_reason for piece in new):
                    os.kill(llm.worker_pid, signal.SIGKILL)
                    while llm.num_restarts == 0:
                        await asyncio.sleep(0.01)
            output = await stream.output()
            assert llm.num_restarts == 1
            assert seen((pieces, output)) == expected
            told = {p.completion_index: p for p in pieces if p.finish_reason is not None}
            for completion in output.completions:
                piece = told[completion.index]
                assert piece.stop_reason == completion.stop_reason
                assert piece.is_stop_token_left_out == completion.is_stop_token_left_out

    run(work())


@pytest.mark.parametrize("name", ["served.gguf", "served"])
def test_a_file_that_was_replaced_is_not_taken_for_the_old_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(remote_module, "MAX_FAILED_STARTS", 1)
    served, other = tmp_path / name, tmp_path / "other"
    served.write_bytes(model.read_bytes())
    other.write_bytes(model.read_bytes())

    async def work() -> None:
        async with remote(served) as llm:
            stream = await llm.submit([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
            await stream.take()
            other.replace(served)
            os.kill(llm.worker_pid, signal.SIGKILL)
            output = await stream.output()
            assert f"{name} has changed since the server loaded it" in str(output.error)

    run(work())


def test_a_new_worker_has_the_sizes_of_the_first(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Options] = []
    load = WorkerProcess.load

    def noted(worker: WorkerProcess, path: Path, options: Options) -> Any:
        given.append(options)
        return load(worker, path, options)

    monkeypatch.setattr(WorkerProcess, "load", noted)
    launcher = ModelLauncher(model, Options(device="auto", threads=1))
    first, facts = launcher.start()
    second, again = launcher.start()
    first.end(0.0)
    second.end(0.0)
    assert facts == again
    assert facts.device in ("cpu", "reference")
    assert (given[0].device, given[0].kv_memory) == ("auto", None)
    assert (given[1].device, given[1].kv_memory) == (facts.device, facts.kv_bytes)
    assert facts.kv_bytes > 0


def test_closing_does_not_wait_for_a_worker_that_loads(model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with remote(model, (*FAULTY, "slow", str(tmp_path / "marker"))) as llm:
            os.kill(llm.worker_pid, signal.SIGKILL)
            while llm._engine._launcher._loading is None:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)

    run(work())


def test_deadlines_and_limits_of_the_queue_hold_while_no_worker_runs(
    model: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, engine={"max_queue_requests": 2})

    async def work() -> None:
        command = (*FAULTY, "slow", str(tmp_path / "marker"))
        load = partial(RemoteLLM.load, model, options, command=command)
        llm = await asyncio.to_thread(load)
        await llm.open()
        running = await llm.submit([5], SamplingParams(max_tokens=400), timeout_s=1.0)
        await running.take()
        os.kill(llm.worker_pid, signal.SIGKILL)
        while not llm.is_recovering:
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(llm.submit([n], timeout_s=0.2)) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="the queue holds 2 requests"):
            await llm.submit([3])
        for late in waiting:
            with pytest.raises(DeadlineError, match="ran out of time"):
                await late
        output = await running.output()
        assert output.status is Status.EXPIRED
        assert llm.is_recovering
        await llm.close()

    run(work())


def test_background_requests_wait_for_a_worker_without_the_usual_deadline(
    model: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, engine={"timeout_s": 0.3})

    async def work() -> None:
        command = (*FAULTY, "slow", str(tmp_path / "marker"))
        load = partial(RemoteLLM.load, model, options, command=command)
        llm = await asyncio.to_thread(load)
        await llm.open()
        os.kill(llm.worker_pid, signal.SIGKILL)
        while not llm.is_recovering:
            await asyncio.sleep(0.01)
        behind = asyncio.ensure_future(llm.submit([1], priority=BACKGROUND))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match="ran out of time"):
            await llm.submit([2])
        assert llm.is_recovering
        assert not behind.done()
        await llm.close()
        behind.cancel()

    run(work())


def test_a_worker_that_is_not_understood_while_it_loads_is_ended(model: Path) -> None:
    script = "import socket, sys, time; connection = socket.socket(fileno=int(sys.argv[1])); "
    script += r"connection.sendall(bytes([1, 0, 0, 0, 255])); time.sleep(10_000)"
    worker = WorkerProcess((sys.executable, "-c", script))
    with pytest.raises(msgspec.MsgspecError):
        worker.load(model, OPTIONS)
    assert worker._process.poll() is not None


def test_figures_are_made_by_the_thread_whose_they_are(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    worker = WorkerEngine(assemble(model, OPTIONS), channel)
    made_by: list[str] = []
    snapshot = worker.engine.snapshot

    def noted() -> Snapshot:
        made_by.append(threading.current_thread().name)
        return snapshot()

    monkeypatch.setattr(worker.engine, "snapshot", noted)
    worker.receive([wire.encode(wire.AskSnapshot(7))], channel)
    ours.settimeout(PATIENCE_S)
    [content] = FrameReader().feed(ours.recv(1 << 20))
    answer = wire.read_report(content)
    assert isinstance(answer, wire.Answer) and answer.call == 7 and answer.snapshot is not None
    assert made_by == ["quire-engine"]


def test_errors_keep_their_type_and_what_they_say(model: Path) -> None:
    async def main() -> None:
        async with remote(model) as llm:
            with pytest.raises(RequestError, match="vocabulary") as caught:
                await llm.generate([10**6], max_tokens=1)
            assert caught.value.param == "prompt"
            with pytest.raises(RequestError) as caught:
                await asyncio.to_thread(
                    llm.prepare_grammar, SamplingParams(structured=Constraint.regex("("))
                )
            assert caught.value.param == "structured"
            await llm.drain(10.0)
            with pytest.raises(OverloadedError, match="draining"):
                await llm.generate([1], max_tokens=1)

    run(main())


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\x92\xa6Cancel\x05", b"\x92\xa6Unlink\xa1x", b"cos\nsystem\n"]
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.read_command(content)
    with pytest.raises(msgspec.MsgspecError):
        wire.read_report(content)


def test_messages_arrive_whole_however_the_socket_cuts_them() -> None:
    sent = [b"", b"a", bytes(70_000), b"last"]
    content = b"".join(map(frame, sent))
    for size in (1, 3, 4096, len(content)):
        reader, found = FrameReader(), []
        for start in range(0, len(content), size):
            found += reader.feed(content[start : start + size])
        assert found == sent
