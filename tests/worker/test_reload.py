"""`quire reload`: another worker, with other settings or other weights, and no stream ends."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import COMMAND as PROGRAM
from tests.cli.program import environment
from tests.llm.text_models import write_text_model
from tests.server.processes import serving
from tests.server.servers import PATIENCE_S
from tests.worker.test_recovery import OPTIONS, mixed, read_stream, run, seen, undisturbed
from tests.worker.test_server import SMALL, TEXT, _text_of, ask, worker_of

from quire.core.errors import ConfigError
from quire.core.request import Piece
from quire.core.sampling import SamplingParams
from quire.engine.aio import Stream
from quire.llm import OnlineModel
from quire.llm.assembly import MemoryNeed, predict_memory
from quire.llm.devices import Options
from quire.server import model_service
from quire.server.model_service import Replacement
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.worker import RemoteLLM

LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=3)
ASKED = [("a text", LONG)]
UNREAD = replace(OPTIONS, engine={"max_unread_tokens": 8})  # what nobody reads does not end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With another vocabulary: the same tokens are other texts."""
    folder = tmp_path_factory.mktemp("others")
    return write_text_model(folder / "other.gguf", words=("gravity", "apple", "tree"))


def wanted(model: Path, options: Options = UNREAD) -> Replacement:
    load = partial(RemoteLLM.load, model, options)
    return Replacement((model.name,), str(model), None, options, load)


@asynccontextmanager
async def service_of(model: Path) -> AsyncIterator[Service]:
    settings = ServerSettings(model_names=(model.name,), drain_timeout_s=PATIENCE_S)
    service = Service(settings, partial(RemoteLLM.load, model, UNREAD))
    await service.open()
    try:
        yield service
    finally:
        await service.drain()


def remote_of(service: Service) -> RemoteLLM:
    assert isinstance(service.llm, RemoteLLM)
    return service.llm


async def _paused(
    llm: OnlineModel, prompt: str, params: SamplingParams
) -> tuple[Stream, list[Piece]]:
    """A stream that has begun and that nobody reads. On a busy machine it may end before the worker
    hears of that: then it is asked for again, a few times, because a short one ends in any case."""
    for _ in range(4):
        stream = await llm.submit(prompt, params)
        pieces, num_unread = await stream.take(), -1
        while stream._output is None and num_unread != stream._num_unread:
            num_unread = stream._num_unread
            await asyncio.sleep(0.1)
        if stream._output is None:
            break
    return stream, pieces


@asynccontextmanager
async def reading(
    llm: OnlineModel, asked: list[tuple[str, SamplingParams]], expected: list[object]
) -> AsyncIterator[None]:
    """Streams that have begun before the block and are not read in it, so that none ends there.
    What they say must be as if nothing had happened."""
    begun = [await _paused(llm, *each) for each in asked]
    yield
    for (stream, pieces), wanted in zip(begun, expected, strict=True):
        while new := await stream.take():
            pieces += new
        assert seen((pieces, await stream.output())) == wanted


def test_requests_go_on_in_a_worker_with_other_settings(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        asked = mixed(8, 120)
        expected = await undisturbed(model, asked)
        async with service_of(model) as service:
            old = remote_of(service)
            async with reading(old, asked, expected):
                said: list[str] = []
                options = replace(UNREAD, max_batch_size=4, kv_memory="4MiB")
                done = await service.replace_model(wanted(model, options), said.append)
                assert "requests go on in the new worker" in done and " 0 requests" not in done
                assert "beside the old one" in said[0]
                new = remote_of(service)
                assert new is not old and new.max_batch_size == 4 and new.num_restarts == 0
                late = await old.generate("late", SamplingParams(max_tokens=3, ignore_eos=True))
                assert late.token_ids  # it came for the old one

    run(work())
    assert "worker_restarted" not in {getattr(record, "event", None) for record in caplog.records}


def test_requests_of_old_weights_finish_with_them(model: Path, other: Path) -> None:
    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        [new_text] = await undisturbed(other, ASKED)
        assert new_text != expected
        async with service_of(model) as service, reading(service.llm, ASKED, [expected]):
            done = await service.replace_model(wanted(other), lambda _: None)
            assert "1 requests finish with the old weights" in done
            assert service.name == "other.gguf"
            answer = await read_stream(remote_of(service), "a text", LONG, lambda: None)
            assert seen(answer) == new_text

    run(work())


def test_a_model_that_was_replaced_is_closed_once_its_requests_have_ended(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_service, "_RETIRED_AFTER_S", 0.1)

    async def work() -> None:
        async with service_of(model) as service:
            old = remote_of(service)
            worker = Path(f"/proc/{old.worker_pid}")
            stream = await old.submit("a text", LONG)
            await stream.take()
            await service.replace_model(wanted(other), lambda _: None)
            assert (await stream.output()).error is None
            while worker.exists():
                await asyncio.sleep(0.05)
            assert (
                await remote_of(service).generate(
                    "a", SamplingParams(max_tokens=2, ignore_eos=True)
                )
            ).token_ids

    run(work())


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(model: str | Path, options: Options) -> MemoryNeed:
        return predict_memory(model, options)._replace(available=1000)

    monkeypatch.setattr(model_service, "predict_memory", predicted)


def test_without_room_for_both_the_new_worker_comes_after_the_old_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with service_of(model) as service, reading(service.llm, ASKED, [expected]):
            said: list[str] = []
            done = await service.replace_model(wanted(model), said.append)
            assert "after the old one" in said[0]
            assert "1 requests go on in the new worker" in done

    run(work())


def test_where_the_new_worker_fails_the_old_one_comes_back_with_its_requests(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)

    def fail(_: object) -> RemoteLLM:
        raise ConfigError("no such luck")

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with service_of(model) as service, reading(service.llm, ASKED, [expected]):
            old = service.llm
            with pytest.raises(ConfigError, match="no such luck"):
                await service.replace_model(replace(wanted(model), load=fail), lambda _: None)
            assert service.llm is old

    run(work())


def test_other_weights_without_room_for_both_are_refused(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)

    async def work() -> None:
        async with service_of(model) as service:
            old = service.llm
            with pytest.raises(ConfigError, match="does not fit beside the model that is served"):
                await service.replace_model(wanted(other), lambda _: None)
            assert service.llm is old

    run(work())


def test_a_server_that_ends_drains_the_models_that_were_replaced(model: Path, other: Path) -> None:
    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with service_of(model) as service, reading(service.llm, ASKED, [expected]):
            await service.replace_model(wanted(other), lambda _: None)
            draining = asyncio.ensure_future(service.drain())
        await draining

    run(work())


@pytest.mark.parametrize("has_room", [True, False])
def test_a_server_that_ends_while_it_reloads_lets_its_streams_finish(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    if not has_room:
        without_room(monkeypatch)
    has_begun, may_load = threading.Event(), threading.Event()

    def load(*args: Any) -> RemoteLLM:
        has_begun.set()
        assert may_load.wait(PATIENCE_S)
        return RemoteLLM.load(model, UNREAD, *args)

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        async with service_of(model) as service:
            old = remote_of(service)
            worker = Path(f"/proc/{old.worker_pid}")
            async with reading(old, ASKED, [expected]):
                replacing = service.replace_model(replace(wanted(model), load=load), print)
                reloading = asyncio.ensure_future(replacing)
                await asyncio.to_thread(has_begun.wait, PATIENCE_S)
                draining = asyncio.ensure_future(service.drain())
                while old._engine._drained is None:
                    await asyncio.sleep(0.01)
                may_load.set()
                assert "1 requests go on in the new worker" in await reloading
                while worker.exists():
                    await asyncio.sleep(0.01)
                assert not draining.done()
                new = service.loaded
                assert isinstance(new, RemoteLLM)
            async with asyncio.timeout(PATIENCE_S / 2):  # well before its own deadline
                await draining
            assert not Path(f"/proc/{new.worker_pid}").exists()

    run(work())


def test_requests_go_on_in_a_worker_that_dies_before_it_takes_them(model: Path) -> None:
    async def opened() -> RemoteLLM:
        llm = await asyncio.to_thread(RemoteLLM.load, model, UNREAD)
        await llm.open()
        return llm

    async def work() -> None:
        [expected] = await undisturbed(model, ASKED)
        old, new = await opened(), await opened()
        async with reading(old, ASKED, [expected]):
            os.kill(new.worker_pid, signal.SIGKILL)
            while not new.is_recovering:
                await asyncio.sleep(0.01)
            assert new.take_over(old)
            await old.end_worker()
        await new.close()

    run(work())


# ---- the command


def reload(state: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, "reload", "--state", str(state), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(None),
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_command_reloads_while_a_stream_is_open(
    model: Path, other: Path, tmp_path: Path
) -> None:
    state = tmp_path / ("a long name of a folder " * 6)  # longer than a socket's name may be
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 300, "seed": 4, "stream": True}
    body["ignore_eos"] = True
    config = tmp_path / "small.toml"
    config.write_text("[engine]\nmax_batch_size = 3\n")
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(bytes(1000))
    with serving(model, *SMALL, "--state", state) as server:
        [path] = (state / "control").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        whole = ask(server, TEXT, body)[1]
        first = worker_of(server)
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        begun = answer.read(300)
        failed = reload(state, garbage)
        assert failed.returncode == 1 and "garbage.gguf" in failed.stderr
        assert "Traceback" not in failed.stderr
        done = reload(state, "--config", config)
        assert done.returncode == 0, done.stderr
        assert "text.gguf is served as text.gguf" in done.stdout
        text = (begun + answer.read()).decode()
        connection.close()
        assert _text_of(text) == _text_of(whole)
        assert not Path(f"/proc/{first}").exists() or worker_of(server) != first
        assert reload(state, other).returncode == 0
        assert '"id":"other.gguf"' in ask(server, "/v1/models")[1]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()
    gone = reload(state)
    assert gone.returncode == 1 and "no server that can reload runs" in gone.stderr


def test_a_server_without_a_worker_says_that_it_cannot_reload(model: Path, tmp_path: Path) -> None:
    with serving(model, *SMALL, "--no-worker", "--state", tmp_path):
        refused = reload(tmp_path)
        assert refused.returncode == 1 and "--no-worker" in refused.stderr


def test_what_is_no_command_is_answered_with_an_error(model: Path, tmp_path: Path) -> None:
    with serving(model, *SMALL, "--state", tmp_path) as server:
        for content in (b"", b"{}{}\n", b'{"model": 3}\n', b'{"unlink": "/"}\n', b"x" * 100_000):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / "control" / f"{server.process.pid}.sock"))
                connection.settimeout(PATIENCE_S)
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                assert b'"error"' in connection.makefile("rb").readline()
        assert ask(server, "/ready")[0] == 200


def test_a_stream_of_weights_that_were_replaced_under_their_name_is_not_resumed(
    model: Path, tmp_path: Path
) -> None:
    data, other, state = model.read_bytes(), tmp_path / "other.gguf", tmp_path / "state"
    other.write_bytes(data[: -len(data) // 4] + bytes(b ^ 1 for b in data[-len(data) // 4 :]))
    body = {"prompt": "a text", "max_tokens": 8, "stream": True, "seed": 1}
    with serving(model, *SMALL, "--state", state, "--served-model-name", "same") as server:
        _, begun = ask(server, TEXT, body, {"x-quire-resume": "1"})
        resumed = {"Last-Event-ID": begun.partition("\n")[0].removeprefix("id: ")}
        assert "[DONE]" in ask(server, TEXT, body, resumed)[1]
        assert reload(state).returncode == 0  # to the same weights
        assert "[DONE]" in ask(server, TEXT, body, resumed)[1]
        assert reload(state, other).returncode == 0
        refused = json.loads(ask(server, TEXT, body, resumed)[1])["error"]
        assert refused["code"] == "resume_mismatch"
        assert "replaced under the same name" in refused["message"]
