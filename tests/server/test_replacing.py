"""`quire reload` with several API processes: all go to the new worker, and no stream ends."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import PATIENCE_S
from tests.server.test_processes import TEXT, Client, two_processes, wait_until
from tests.worker.test_recovery import read_stream, run, seen, undisturbed
from tests.worker.test_reload import ASKED, LONG, UNREAD, reading, reload, remote_of, without_room
from tests.worker.test_server import _text_of

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.llm import OnlineModel
from quire.llm.devices import Options
from quire.server import model_service
from quire.server.model_service import Replacement
from quire.server.processes import messages as wire
from quire.server.processes.replacing import Followers, NextWorker, WorkerSockets
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.worker import RemoteLLM
from quire.worker.attached import Attacher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With another vocabulary: the same tokens are other texts."""
    folder = tmp_path_factory.mktemp("others")
    return write_text_model(folder / "other.gguf", words=("gravity", "apple", "tree"))


class Alone:
    """The other processes, as one that has none asks for them."""

    async def has_only_suspects(self, num_suspects: int, *, has_probed: bool) -> bool:
        return True

    async def take_turn(self) -> None:
        pass

    def end_turn(self) -> None:
        pass


class InProcess:
    """An API process on this event loop."""

    def __init__(
        self, name: str, load: wire.Load, told: Callable[["InProcess", str], None]
    ) -> None:
        self._prefix = name
        self._told = told
        self._numbers = itertools.count()
        self._answers: dict[int, wire.Done] = {}
        settings = ServerSettings(model_names=tuple(load.names), drain_timeout_s=PATIENCE_S)
        self.service = Service(settings, partial(self._attach, load, False))
        self.next_worker = NextWorker(self.service, self._attach, self._tell)
        self.next_worker.begin(load)
        self.fails = False

    def _attach(
        self, load: wire.Load, continues: bool, on_stuck: Callable[[], None]
    ) -> OnlineModel:
        if self.fails:
            raise ConfigError("no file descriptors")
        return RemoteLLM.attach(
            load.path,
            Options(**load.options),
            Attacher(load.socket, continues=continues),
            on_stuck,
            prefix=self._prefix,
            others=Alone(),
        )

    def _tell(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Done):
            self._answers[notice.call] = notice
        elif isinstance(notice, wire.Retired):
            self._told(self, notice.socket)

    async def ask(self, make: Callable[[int], wire.Prepare | wire.Switch]) -> wire.Done | None:
        asked = make(next(self._numbers))
        if isinstance(asked, wire.Prepare):
            await self.next_worker.prepare(asked)
        else:
            self.next_worker.switch(asked)
        return self._answers.pop(asked.call)

    def tell(self, news: wire.News) -> None:
        assert news == wire.Forget()
        self.forgetting = asyncio.ensure_future(self.next_worker.forget())


class Whole:
    """A supervisor's part of reloading, and two processes."""

    def __init__(self, folder: Path) -> None:
        self.sockets = WorkerSockets(str(folder))
        self.processes: list[InProcess] = []
        self.followers = Followers(lambda: self.processes, self.sockets)

    async def open(self, model: Path) -> None:
        listener = self.sockets.next()[1]
        settings = ServerSettings(model_names=(model.name,), drain_timeout_s=PATIENCE_S)
        load = partial(RemoteLLM.load, model, UNREAD, listener=listener)
        self.service = Service(settings, load)
        self.service.elsewhere = self.followers
        self.service.on_retired = self.followers.on_retired
        await self.service.open()
        self.followers.begin(remote_of(self.service), (model.name,), UNREAD)
        for name in ("first-", "second-"):
            await self.add(name)

    async def add(self, name: str) -> InProcess:
        assert self.followers.load is not None
        process = InProcess(name, self.followers.load, self.followers.retired)
        self.processes.append(process)
        await process.service.open()
        return process

    async def reload(self, model: Path, options: Options = UNREAD) -> tuple[str, list[str]]:
        load = partial(RemoteLLM.load, model, options, listener=self.sockets.next()[1])
        wanted = Replacement((model.name,), str(model), None, options, load)
        said: list[str] = []
        return await self.service.replace_model(wanted, said.append), said

    async def close(self) -> None:
        for each in (*(process.service for process in self.processes), self.service):
            await each.drain()
        self.sockets.close_all()


@asynccontextmanager
async def whole(folder: Path, model: Path) -> AsyncIterator[Whole]:
    found = Whole(folder)
    await found.open(model)
    try:
        yield found
    finally:
        await found.close()


def test_requests_of_all_processes_go_on_in_a_worker_with_other_settings(
    model: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with whole(tmp_path, model) as servers:
            first, second = servers.processes
            pid = remote_of(servers.service).worker_pid
            async with (
                reading(first.service.llm, ASKED, [expected]),
                reading(second.service.llm, ASKED, [expected]),
            ):
                done, said = await servers.reload(model, replace(UNREAD, max_batch_size=4))
                assert "2 requests go on in the new worker" in done
                assert "beside the old one" in said[0]
                assert [each.service.llm.max_batch_size for each in servers.processes] == [4, 4]
                assert remote_of(servers.service).worker_pid != pid
                while Path(f"/proc/{pid}").exists():
                    await asyncio.sleep(0.02)
            late = await servers.add("third-")
            found = await read_stream(remote_of(late.service), *ASKED[0], lambda: None)
            assert seen(found) == expected

    run(work())


def test_requests_of_old_weights_finish_with_them_in_every_process(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_service, "_RETIRED_AFTER_S", 0.1)

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        [new_text] = await undisturbed(other, ASKED)
        async with whole(tmp_path, model) as servers:
            first, second = servers.processes
            old = Path(f"/proc/{remote_of(servers.service).worker_pid}")
            async with reading(first.service.llm, ASKED, [expected]):
                done, _ = await servers.reload(other)
                assert "1 requests finish with the old weights" in done
                for process in servers.processes:
                    assert process.service.name == "other.gguf"
                    found = await read_stream(
                        remote_of(process.service), "a text", LONG, lambda: None
                    )
                    assert seen(found) == new_text
                await asyncio.sleep(1.0)  # many times what an unused worker is kept for
                assert old.exists(), "a process has requests there"
            while old.exists():
                await asyncio.sleep(0.02)
            wait = [each for each in tmp_path.iterdir() if each.name == "worker-1"]
            while wait and wait[0].exists():
                await asyncio.sleep(0.02)
            assert [each.name for each in tmp_path.iterdir()] == ["worker-2"]
            assert (
                await second.service.llm.generate(
                    "a", SamplingParams(max_tokens=2, ignore_eos=True)
                )
            ).token_ids

    run(work())


def test_without_room_for_both_the_new_worker_comes_after_the_old_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with whole(tmp_path, model) as servers:
            first, second = servers.processes
            async with (
                reading(first.service.llm, ASKED, [expected]),
                reading(second.service.llm, ASKED, [expected]),
            ):
                done, said = await servers.reload(model)
                assert "after the old one" in said[0]
                assert "2 requests go on in the new worker" in done

    run(work())


def test_where_one_process_cannot_use_the_new_worker_none_does(
    model: Path, other: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with whole(tmp_path, model) as servers:
            first, second = servers.processes
            services = [servers.service, *(each.service for each in servers.processes)]
            before = [each.llm for each in services]
            second.fails = True
            async with reading(first.service.llm, ASKED, [expected]):
                with pytest.raises(ConfigError, match="no file descriptors"):
                    await servers.reload(other)
                assert [each.llm for each in services] == before
                assert first.next_worker._prepared is None
            second.fails = False
            assert "is served as other.gguf" in (await servers.reload(other))[0]

    run(work())


def test_a_process_that_comes_or_goes_meanwhile_is_reckoned_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with whole(tmp_path, model) as servers:
            second = servers.processes[1]
            ask = second.ask

            async def dies(make: Callable[[int], Any]) -> None:
                await ask(make)
                servers.processes.remove(second)
                await servers.add("another-")

            monkeypatch.setattr(second, "ask", dies)
            done, _ = await servers.reload(model, replace(UNREAD, max_batch_size=4))
            assert "is served" in done
            assert [each.service.llm.max_batch_size for each in servers.processes] == [4, 4]
            await second.next_worker.forget()
            await second.service.drain()

    run(work())


# ---- the command


def begin(client: Client, body: dict[str, Any]) -> tuple[HTTPResponse, bytes]:
    client.send("POST", TEXT, body)
    answer = client.connection.getresponse()
    return answer, answer.read(300)


def test_the_command_reloads_while_every_process_streams(
    model: Path, other: Path, tmp_path: Path
) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "seed": 4, "stream": True}
    state = tmp_path / "state"
    config = tmp_path / "small.toml"
    config.write_text("[engine]\nmax_batch_size = 3\n")
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(bytes(1000))
    with two_processes(tmp_path, model, "--state", state) as servers:
        clients = servers.both()
        whole_text = _text_of(clients[0].ask("POST", TEXT, body).body)
        begun = [begin(client, body) for client in clients]
        failed = reload(state, garbage)
        assert failed.returncode == 1 and "garbage.gguf" in failed.stderr
        done = reload(state, "--config", config)
        assert done.returncode == 0, done.stderr
        for answer, head in begun:
            assert _text_of((head + answer.read()).decode()) == whole_text
        assert reload(state, other).returncode == 0
        for client in clients:
            [card] = client.ask("GET", "/v1/models").body["data"]
            assert card["id"] == "other.gguf"
        victim = servers.pids()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(servers.pids()) == 2 and victim not in servers.pids())
        for client in servers.both():
            assert client.ask("POST", TEXT, {**body, "stream": False}).status == 200
            assert client.ask("GET", "/v1/models").body["data"][0]["id"] == "other.gguf"
