"""Several processes' requests in one worker, each with a channel of its own."""

import asyncio
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.worker.test_recovery import FAULTY, OPTIONS, POISON, remote, run

from quire.core.errors import WorkerCrashError
from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.worker import RemoteLLM
from quire.worker.attached import Attacher
from quire.worker.launch import COMMAND
from quire.worker.turns import Turns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


class OthersHere:
    """The others of one of several clients on the same event loop."""

    def __init__(self, turns: Turns, name: int) -> None:
        self._turns, self._name = turns, name
        turns.enter(name)

    async def has_only_suspects(self, num_suspects: int, *, has_probed: bool) -> bool:
        return await self._turns.report(self._name, num_suspects, has_probed=has_probed)

    async def take_turn(self) -> None:
        await self._turns.take(self._name)

    def end_turn(self) -> None:
        self._turns.end(self._name)


@asynccontextmanager
async def attached(
    model: Path, folder: Path, count: int, command: Sequence[str] = COMMAND
) -> AsyncIterator[tuple[RemoteLLM, list[RemoteLLM]]]:
    """Whoever starts workers, and models over the same ones."""
    path = str(folder / "worker")
    turns = Turns()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with remote(model, command, listener=listener) as owner:
            clients = [
                await asyncio.to_thread(
                    lambda name=name: RemoteLLM.attach(  # type: ignore[misc]
                        model,
                        OPTIONS,
                        Attacher(path),
                        prefix=f"{name}-",
                        others=OthersHere(turns, name),
                    )
                )
                for name in range(count)
            ]
            for client in clients:
                await client.open()
            try:
                yield owner, clients
            finally:
                for client in clients:
                    await client.close()


def asked(count: int, max_tokens: int = 40) -> list[tuple[list[int], SamplingParams]]:
    never = {POISON: -100.0}
    return [
        (
            [*range(100, 110 + n)],
            SamplingParams(max_tokens=max_tokens, seed=n, logit_bias=never, ignore_eos=True),
        )
        for n in range(count)
    ]


def test_each_channel_gets_the_tokens_of_its_own_requests(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with remote(model) as llm:
            expected = await asyncio.gather(*(llm.generate(*each) for each in asked(6)))
        async with attached(model, tmp_path, 3) as (_, clients):
            outputs = await asyncio.gather(
                *(clients[n % 3].generate(*each) for n, each in enumerate(asked(6)))
            )
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.completions == wanted.completions

    run(main())


def test_a_channel_that_ends_takes_its_own_requests_with_it(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with attached(model, tmp_path, 2) as (owner, [one, other]):
            [(prompt, params), second] = asked(2, 400)
            # Several completions, so that it cannot have ended before its channel does.
            going = asyncio.ensure_future(one.generate(prompt, replace(params, n=8)))
            staying = await other.submit(*second)
            while (await owner.snapshot()).num_running < 2:
                await asyncio.sleep(0.01)
            await one.close()
            assert isinstance((await asyncio.gather(going, return_exceptions=True))[0], Exception)
            while (await owner.snapshot()).num_running > 1:
                await asyncio.sleep(0.01)
            assert (await staying.output()).error is None

    run(main())


def test_requests_of_all_channels_go_on_in_the_next_worker(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire")

    async def main() -> None:
        async with remote(model) as llm:
            expected = await asyncio.gather(*(llm.generate(*each) for each in asked(4, 200)))
        async with attached(model, tmp_path, 2) as (owner, clients):
            working = [
                asyncio.ensure_future(clients[n % 2].generate(*each))
                for n, each in enumerate(asked(4, 200))
            ]
            while (await owner.snapshot()).num_running < 4 and not any(w.done() for w in working):
                await asyncio.sleep(0.01)
            os.kill(owner.worker_pid, signal.SIGKILL)
            outputs = await asyncio.gather(*working)
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.completions == wanted.completions

    run(main())
    events = Counter(getattr(record, "event", None) for record in caplog.records)
    assert (events["worker_died"], events["worker_restarted"]) == (1, 1), "one process says so"
    assert (events["channel_lost"], events["channel_restored"]) == (2, 2)


def test_the_request_that_kills_workers_is_found_among_those_of_all_channels(
    model: Path, tmp_path: Path
) -> None:
    """One request in the other process: without a word between them it would be blamed as well,
    as it was there, alone of its process, at each crash."""

    async def main() -> None:
        async with attached(model, tmp_path, 2, (*FAULTY, "die", str(POISON))) as (_, [one, other]):
            [innocent] = asked(1)
            poisoned = asyncio.ensure_future(one.generate([1, 2, POISON, 4], max_tokens=5))
            output = asyncio.ensure_future(other.generate(*innocent))
            with pytest.raises(WorkerCrashError, match="the likely cause"):
                await poisoned
            assert isinstance(await output, RequestOutput)

    run(main())


def test_a_process_is_alone_with_its_suspects_where_no_other_had_any() -> None:
    async def main() -> None:
        turns = Turns()
        for name in (1, 2):
            turns.enter(name)
        both = asyncio.gather(
            turns.report(1, 1, has_probed=False), turns.report(2, 0, has_probed=False)
        )
        assert list(await both) == [True, False]
        both = asyncio.gather(
            turns.report(1, 1, has_probed=False), turns.report(2, 0, has_probed=True)
        )
        assert list(await both) == [False, False]
        alone = asyncio.ensure_future(turns.report(1, 1, has_probed=False))
        await asyncio.sleep(0)
        turns.leave(2)
        assert await alone

    run(main())


def test_one_process_at_a_time_runs_a_suspect_apart() -> None:
    async def main() -> None:
        turns = Turns()
        await turns.take(1)
        waiting = asyncio.ensure_future(turns.take(2))
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.end(2)  # not its turn
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.leave(1)
        await waiting

    run(main())
