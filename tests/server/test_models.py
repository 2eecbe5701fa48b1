"""Several models in one server: chosen by a request, loaded on demand, within a budget."""

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.cli.program import fails, quire
from tests.llm.text_models import write_text_model
from tests.server.processes import serving
from tests.server.servers import PATIENCE_S, RunningServer, running, settings_of, wait_until

from quire.core.errors import ConfigError, ExecutorError
from quire.llm import OnlineModel
from quire.llm.assembly import MemoryNeed
from quire.llm.devices import Options
from quire.server import folder_watch
from quire.server import residency as residency_module
from quire.server.control import Reload
from quire.server.dialects.ollama_body import keep_seconds
from quire.server.errors import ApiError
from quire.server.jobs import lines as lines_module
from quire.server.model_folder import ModelFolder
from quire.server.model_service import ModelService, ModelSource, Replacement, State
from quire.server.residency import Residency
from quire.worker import RemoteLLM

OPTIONS = Options(device="reference", kv_memory="8MiB", max_batch_size=8)
NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_models(tmp_path_factory.mktemp("models"))


def three_models(folder: Path) -> Path:
    """Three models whose texts differ."""
    for name, word in zip(NAMES, ("red", "greenish", "blueberries"), strict=True):
        write_text_model(folder / name, words=(word,))
    return folder


def source_of(path: Path, load: Callable[..., OnlineModel] = RemoteLLM.load) -> ModelSource:
    return ModelSource((path.name,), partial(load, str(path), OPTIONS), str(path), OPTIONS)


@contextmanager
def serving_all(
    folder: Path, residency: Residency | None = None, **given: Any
) -> Iterator[RunningServer]:
    """A server of all models; `given`: sources by name, instead of the usual ones."""
    sources = [given.pop(name, source_of(folder / name)) for name in NAMES]
    settings = settings_of(model_names=sources[0].names, **given.pop("settings", {}))
    with running(settings, sources, residency=residency or Residency(), **given) as server:
        server.wait_until(lambda: server.service.is_ready)
        yield server


def room_for(folder: Path, count: int) -> Residency:
    need = source_of(folder / NAMES[0]).need()
    return Residency(count * need.num_bytes + 1000)


def complete(server: RunningServer, model: str | None, **fields: Any) -> str:
    body = {"prompt": "one two", "max_tokens": 8, "seed": 1, "ignore_eos": True, **fields}
    reply = server.post("/v1/completions", body if model is None else {**body, "model": model})
    assert reply.status == 200, reply.body
    assert reply.json["model"] == (model or NAMES[0])
    text: str = reply.json["choices"][0]["text"]
    return text


def model_named(server: RunningServer, name: str) -> ModelService:
    return server.service.model_of(name)


def is_loaded(server: RunningServer, name: str) -> bool:
    return model_named(server, name).loaded is not None


def loaded_names(server: RunningServer) -> list[str]:
    return [name for name in NAMES if is_loaded(server, name)]


class OpenStream:
    """A completion that is being streamed and read a line at a time."""

    def __init__(self, server: RunningServer, model: str, **fields: Any) -> None:
        self.connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = {"prompt": "one two", "seed": 1, "ignore_eos": True, "stream": True, **fields}
        self.connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "model": model}),
            {"Content-Type": "application/json"},
        )

    def first(self) -> str:
        self._answer = self.connection.getresponse()
        return self.next()

    def next(self) -> str:
        for line in self._answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                return "".join(choice["text"] for choice in choices)
        return ""

    def rest(self) -> str:
        text = ""
        for line in self._answer:
            if line.startswith(b"data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        self.connection.close()
        return text


class Gate:
    """Loads a model when it is told to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.is_open = threading.Event()

    def load(self, *args: Any) -> OnlineModel:
        self.has_begun.set()
        assert self.is_open.wait(PATIENCE_S)
        return RemoteLLM.load(*args)


def answered(work: Callable[[], Any]) -> "tuple[threading.Thread, list[Any]]":
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


# ---- choosing


def test_a_request_gets_the_model_that_it_names_as_if_that_were_alone(folder: Path) -> None:
    alone = {}
    for name in NAMES:
        source = source_of(folder / name)
        with running(settings_of(model_names=(name,)), source.load) as server:
            server.wait_until(lambda: server.service.is_ready)
            alone[name] = complete(server, name)
    assert len(set(alone.values())) == 3
    with serving_all(folder) as server:
        for name in (*NAMES, *reversed(NAMES)):
            assert complete(server, name) == alone[name]
        assert complete(server, None) == alone["red"]


def test_nothing_is_loaded_before_it_is_asked_for(folder: Path) -> None:
    with serving_all(folder) as server:
        listed = server.get("/v1/models").json["data"]
        assert [card["id"] for card in listed] == list(NAMES)
        assert {card["max_model_len"] for card in listed} == {512}
        assert server.get("/v1/models/green").json["id"] == "green"
        assert loaded_names(server) == []
        complete(server, "green")
        assert loaded_names(server) == ["green"]
        states = {each["name"]: each["status"] for each in server.get("/v1/stats").json["models"]}
        assert states == {"red": "unloaded", "green": "ready", "blue": "unloaded"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "yellow", "prompt": "x"}, 404, "model"),
        ({"model": 5, "prompt": "x"}, 400, "model"),
        (b"{no json", 400, None),
        (b'{"model": "red", "prompt": "' + b"x" * 9000 + b'"', 400, "prompt"),
        (b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", 400, "prompt" + 64 * "[0]"),
        (b'{"model": "\xff", "prompt": "x"}', 400, None),
        (b'{"model": "\\ud800", "prompt": "x"}', 404, "model"),
        (b'{"model": "green", "prompt": "x", "model": "red"}', 400, "model"),
        ({"model": "red", "prompt": "x", "max_tokens": -2}, 400, "max_tokens"),
    ],
)
def test_nothing_is_loaded_for_a_body_that_is_wrong(
    folder: Path, body: Any, status: int, param: str | None
) -> None:
    with serving_all(folder) as server:
        reply = server.post("/v1/completions", body)
        assert (reply.status, reply.error["param"]) == (status, param)
        assert loaded_names(server) == []
        if status == 404:
            assert "'red', 'green', 'blue'" in reply.error["message"]


def test_a_large_body_is_for_the_model_that_it_names(folder: Path) -> None:
    with serving_all(folder) as server:
        body = json.dumps({"model": "blue", "prompt": "one", "max_tokens": 2}).encode()
        reply = server.post("/v1/completions", b" " * 9000 + body)
        assert (reply.status, reply.json["model"]) == (200, "blue")
        assert loaded_names(server) == ["blue"]


def test_a_model_is_shown_by_the_older_field_as_well(folder: Path) -> None:
    with serving_all(folder) as server:
        reply = server.post("/api/show", {"name": "green:latest"})
        assert (reply.status, reply.json["modelfile"]) == (200, "FROM green\n")


def test_a_body_is_refused_with_a_503_before_the_models_were_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    need = source_of(folder / "red").need()

    def wait(_: ModelSource) -> MemoryNeed:
        assert goes_on.wait(PATIENCE_S)
        return need

    monkeypatch.setattr(ModelSource, "need", wait)
    sources = [source_of(folder / name) for name in NAMES]
    with running(settings_of(), sources, residency=Residency()) as server:
        reply = server.post("/v1/completions", {"prompt": 5})
        goes_on.set()
        assert (reply.status, reply.error["code"]) == (503, "loading")
        server.wait_until(lambda: server.service.is_ready)


def test_every_dialect_chooses(folder: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    with serving_all(folder) as server:
        for path, body in (
            ("/v1/chat/completions", {"messages": message, "max_tokens": 2}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            ("/v1/messages", {"messages": message, "max_tokens": 2}),
            ("/api/chat", {"messages": message, "stream": False, "options": {"num_predict": 2}}),
            ("/v1/embeddings", {"input": "hi"}),
        ):
            reply = server.post(path, {**body, "model": "green"})
            assert reply.status == 200, (path, reply.body)
            assert reply.json["model"] == "green", path
            assert server.post(path, {**body, "model": "yellow"}).status == 404, path
        tagged = server.post("/api/chat", {"model": "green:latest", "messages": message})
        assert tagged.status == 200
        assert loaded_names(server) == ["green"]
        assert [m["name"] for m in server.get("/api/tags").json["models"]] == list(NAMES)
        assert [m["name"] for m in server.get("/api/ps").json["models"]] == ["green"]
        assert server.get("/props?model=blue").status == 200
        assert server.get("/props?models=blue").error["param"] == "models"
        assert loaded_names(server) == ["green", "blue"]


# ---- the budget


def test_the_model_that_was_used_least_recently_makes_room(folder: Path) -> None:
    with serving_all(folder, room_for(folder, 2)) as server:
        for name in ("red", "green", "red", "blue"):
            complete(server, name)
        assert loaded_names(server) == ["red", "blue"]
        complete(server, "green")
        assert loaded_names(server) == ["green", "blue"]


def test_loaded_models_never_take_more_than_the_budget(folder: Path) -> None:
    residency = room_for(folder, 2)
    with serving_all(folder, residency) as server:
        most = 0
        workers: set[int] = set()

        def look() -> None:
            nonlocal most
            while not ended.is_set():
                most = max(most, sum(m.need.num_bytes for m in residency.loaded if m.need))
                workers.update(alive())
                time.sleep(0.001)

        def alive() -> list[int]:
            found = [
                m.loaded.worker_pid for m in residency.loaded if isinstance(m.loaded, RemoteLLM)
            ]
            now = [pid for pid in workers | set(found) if os.path.exists(f"/proc/{pid}")]
            assert len(now) <= 2, "more workers than the budget has room for"
            return now

        ended = threading.Event()
        looking, problems = answered(look)
        threads = [
            answered(lambda name=name: [complete(server, name) for _ in range(3)])  # type: ignore[misc]
            for name in NAMES
        ]
        for thread, texts in threads:
            thread.join(PATIENCE_S)
            assert len(set(texts[0])) == 1
        ended.set()
        looking.join(PATIENCE_S)
        assert problems == [None], "the look failed"
        budget = residency.budget_of("reference")
        assert budget is not None and 0 < most <= budget


def test_nobody_makes_room_for_a_model_that_would_not_fit_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = source_of(folder / "red").need()
    sizes = {"red": need.num_bytes, "green": 3 * need.num_bytes, "blue": need.num_bytes}
    monkeypatch.setattr(
        ModelSource, "need", lambda self: need._replace(num_bytes=sizes[self.names[0]])
    )
    with serving_all(folder, Residency(2 * need.num_bytes)) as server:
        complete(server, "red")
        stream = OpenStream(server, "blue", max_tokens=300)
        stream.first()
        reply = server.post("/v1/completions", {"model": "green", "prompt": "x"})
        assert (reply.status, reply.error["code"]) == (503, "model_too_large")
        assert "--model-memory" in reply.error["message"]
        assert loaded_names(server) == ["red", "blue"]
        assert server.service.residency is not None
        assert server.service.residency.has(model_named(server, "blue"))
        stream.rest()


def test_memory_that_others_took_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has less than the budget when the second is to be loaded."""
    source = source_of(folder / "green")
    small = source.need()._replace(available=1000)
    monkeypatch.setattr(ModelSource, "need", lambda self: small)
    with serving_all(folder, Residency(1 << 40)) as server:
        reply = server.post("/v1/completions", {"model": "green", "prompt": "x"})
        assert (reply.status, reply.error["code"]) == (503, "model_too_large")


def test_who_comes_while_a_worker_ends_waits_for_its_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither loaded nor idle, and what it takes comes back by itself."""
    path = tmp_path / "red"
    shutil.copy(folder / "red", path)
    residency = room_for(folder, 1)
    begun, may_end = threading.Event(), threading.Event()
    close = RemoteLLM.close

    async def close_later(self: RemoteLLM) -> None:
        begun.set()
        await asyncio.to_thread(may_end.wait, PATIENCE_S)
        await close(self)

    with serving_all(folder, residency, red=source_of(path)) as server:
        complete(server, "red")
        server.wait_until(lambda: model_named(server, "red").is_idle)
        monkeypatch.setattr(RemoteLLM, "close", close_later)
        shutil.copy(folder / "blue", tmp_path / "other")
        (tmp_path / "other").replace(path)
        thread, _ = answered(lambda: replace_red(server, replacement_of(path)))
        assert begun.wait(PATIENCE_S)
        green = model_named(server, "green")
        waiting, texts = answered(lambda: complete(server, "green"))
        server.wait_until(lambda: is_looked_at(residency, green) or not waiting.is_alive())
        may_end.set()
        waiting.join(PATIENCE_S)
        thread.join(PATIENCE_S)
        assert len(texts) == 1


def is_looked_at(residency: Residency, model: ModelService) -> bool:
    """Whether it is known that there was no room for it."""
    wanted = residency._wanted.get(model)
    return wanted is not None and wanted.predicted_at > 0


# ---- while others are busy


def test_a_stream_goes_on_while_another_model_is_loaded(folder: Path) -> None:
    gate = Gate()
    with serving_all(folder, green=source_of(folder / "green", gate.load)) as server:
        expected = complete(server, "red", max_tokens=200)
        stream = OpenStream(server, "red", max_tokens=200)
        text = stream.first()
        loading, texts = answered(lambda: complete(server, "green"))
        assert gate.has_begun.wait(PATIENCE_S)
        assert text + stream.rest() == expected
        assert complete(server, "red", max_tokens=200) == expected  # new requests as well
        assert not gate.is_open.is_set() and not texts
        gate.is_open.set()
        loading.join(PATIENCE_S)
        assert texts


def test_a_busy_model_is_not_unloaded_and_takes_no_more_until_the_other_had_its_turn(
    folder: Path,
) -> None:
    with serving_all(folder, room_for(folder, 1)) as server:
        expected = complete(server, "red", max_tokens=300)
        stream = OpenStream(server, "red", max_tokens=300)
        text = stream.first()
        model = model_named(server, "red")
        llm = model.loaded
        waiting, _ = answered(lambda: complete(server, "green"))
        residency = server.service.residency
        assert residency is not None
        server.wait_until(lambda: not residency.has(model))
        late, texts = answered(lambda: complete(server, "red", max_tokens=300))
        assert model.loaded is llm, "a busy model was unloaded"
        assert text + stream.rest() == expected
        waiting.join(PATIENCE_S)
        late.join(PATIENCE_S)
        assert texts == [expected]
        assert model.loaded is not llm, "green had no turn before"


def test_a_model_is_not_kept_out_by_one_that_is_always_busy(folder: Path) -> None:
    with serving_all(folder, room_for(folder, 1)) as server:
        is_over = threading.Event()

        def keep_busy() -> int:
            count = 0
            while not is_over.is_set():
                complete(server, "red", max_tokens=40)
                count += 1
            return count

        busy = [answered(keep_busy) for _ in range(3)]
        server.wait_until(lambda: is_loaded(server, "red"))
        for _ in range(2):
            complete(server, "green")
        is_over.set()
        for thread, counts in busy:
            thread.join(PATIENCE_S)
            assert counts[0] > 1


def test_a_model_takes_no_request_from_the_moment_it_is_unloaded(folder: Path) -> None:
    """Not even one that comes before its worker is told to end, which would end the request."""

    async def has_after_one_iteration(residency: Residency, model: ModelService) -> bool:
        unloading = asyncio.ensure_future(residency._unload(model, "a test"))
        await asyncio.sleep(0)
        assert not unloading.done()
        has = residency.has(model)
        await unloading
        return has

    with serving_all(folder) as server:
        complete(server, "red")
        residency, model = server.service.residency, model_named(server, "red")
        assert residency is not None and residency.has(model)
        looking = has_after_one_iteration(residency, model)
        assert not asyncio.run_coroutine_threadsafe(looking, server.loop).result(PATIENCE_S)
        complete(server, "red")


def test_a_worker_that_is_killed_while_it_loads_is_replaced_and_nobody_is_refused(
    folder: Path,
) -> None:
    attempts: list[int] = []

    def load(*args: Any) -> OnlineModel:
        attempts.append(1)
        if len(attempts) == 1:
            raise ExecutorError("the worker ended while it loaded the model: signal 9")
        return RemoteLLM.load(*args)

    with serving_all(folder, red=source_of(folder / "red", load)) as server:
        assert complete(server, "red")
    assert len(attempts) == 2


class _AtOnce:
    """asyncio, where what runs on a thread has ended before anything else runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def to_thread(self, work: Callable[[], Any]) -> Any:
        return work()


def test_who_waited_has_a_turn_before_the_next_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quickly the next is looked at."""
    need = source_of(folder / "red").need()
    monkeypatch.setattr(ModelSource, "need", lambda _: need)
    monkeypatch.setattr(residency_module, "asyncio", _AtOnce())
    loads: list[str] = []
    residency = room_for(folder, 1)

    def all_wait() -> bool:
        return sum(wanted.num_calls for wanted in list(residency._wanted.values())) == 12

    def load(path: str, *args: Any) -> OnlineModel:
        loads.append(Path(path).name)
        if len(loads) == 1:
            wait_until(all_wait)
        return RemoteLLM.load(path, *args)

    sources = {name: source_of(folder / name, load) for name in NAMES}
    with serving_all(folder, residency, **sources) as server:
        threads = [answered(partial(complete, server, name)) for name in NAMES for _ in range(4)]
        for thread, texts in threads:
            thread.join(PATIENCE_S)
            assert texts
        assert len(loads) == 3, "models were unloaded before anybody had used them"


def begin_batch(client: openai.OpenAI, model: str, num_lines: int, max_tokens: int) -> str:
    """The id of a batch of completions."""
    body = {"model": model, "prompt": "one", "max_tokens": max_tokens, "ignore_eos": True}
    line = {"url": "/v1/completions", "method": "POST", "body": body}
    lines = [json.dumps({**line, "custom_id": str(number)}) for number in range(num_lines)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return batch.id


def counts_of(client: openai.OpenAI, batch: str) -> tuple[str, int, int]:
    """A batch's status, and how many lines were answered and how many by an error."""
    found = client.batches.retrieve(batch)
    assert found.request_counts is not None
    return found.status, found.request_counts.completed, found.request_counts.failed


def test_jobs_do_not_drive_a_busy_model_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"state_folder": tmp_path}
    with serving_all(folder, room_for(folder, 1), settings=settings) as server:
        stream = OpenStream(server, "red", max_tokens=300)
        text = stream.first()
        client = server.client()
        batch = begin_batch(client, "green", num_lines=1, max_tokens=2)
        residency = server.service.residency
        assert residency is not None
        green = model_named(server, "green")
        server.wait_until(lambda: green in residency._wanted)
        for _ in range(20):  # red takes requests all the while
            complete(server, "red")
        assert residency.has(model_named(server, "red"))
        text += stream.rest()
        red = model_named(server, "red")
        server.wait_until(lambda: red.is_idle)
        time.sleep(0.5)
        assert red.loaded is not None, "it fell idle only now"
        monkeypatch.setattr(residency_module, "_IDLE_FOR_JOBS_S", 0.0)
        server.wait_until(lambda: counts_of(client, batch) == ("completed", 1, 0))


def test_who_leaves_has_nothing_loaded(folder: Path) -> None:
    with serving_all(folder, room_for(folder, 1)) as server:
        stream = OpenStream(server, "red", max_tokens=400)
        stream.first()
        waiting = OpenStream(server, "green", max_tokens=2)
        residency = server.service.residency
        assert residency is not None
        server.wait_until(lambda: bool(residency._wanted))
        waiting.connection.close()
        server.wait_until(lambda: not residency._wanted)
        server.wait_until(lambda: residency.has(model_named(server, "red")))
        stream.rest()
        assert loaded_names(server) == ["red"]


# ---- when nobody uses them


def test_a_model_that_nobody_uses_is_unloaded(folder: Path) -> None:
    with serving_all(folder, Residency(idle_s=0.2)) as server:
        expected = complete(server, "red")
        server.wait_until(lambda: not is_loaded(server, "red"))
        stats = server.get("/v1/stats").json
        assert (stats["status"], stats["model"]) == ("unloaded", "red")
        assert stats["own"]["completion_tokens"] == 8
        assert server.get("/v1/stats?model=yellow").status == 404
        assert complete(server, "red") == expected


def test_a_stream_that_is_not_read_keeps_its_model(folder: Path) -> None:
    with serving_all(folder, Residency(idle_s=0.2)) as server:
        stream = OpenStream(server, "red", max_tokens=450)
        text = stream.first()
        llm = model_named(server, "red").loaded
        assert isinstance(llm, RemoteLLM)
        is_kept = True
        while llm.num_live:
            assert is_kept, "while the request had not ended"
            is_kept = model_named(server, "red").loaded is llm
            time.sleep(0.05)
        text += stream.rest()
        assert text == complete(server, "red", max_tokens=450)


def test_ollama_says_how_long_a_model_stays(folder: Path) -> None:
    with serving_all(folder) as server:
        body = {"model": "red", "prompt": "hi", "stream": False, "options": {"num_predict": 1}}
        assert server.post("/api/generate", {**body, "keep_alive": "1h30m"}).status == 200
        [card] = server.get("/api/ps").json["models"]
        assert model_named(server, "red").keep_s == 5400
        assert not card["expires_at"].startswith("2318")
        reply = server.post("/api/generate", {"model": "red", "keep_alive": 0})
        assert reply.json["done_reason"] == "unload"
        server.wait_until(lambda: not is_loaded(server, "red"))
        wrong = server.post("/api/generate", {**body, "keep_alive": "soon"})
        assert wrong.status == 400 and "keep_alive" in wrong.json["error"]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_model_is_not_loaded_to_be_unloaded(folder: Path, path: str) -> None:
    """As `ollama stop` asks for it."""
    loads: list[str] = []

    def load(path: str, *args: Any) -> OnlineModel:
        loads.append(path)
        return RemoteLLM.load(path, *args)

    with serving_all(folder, red=source_of(folder / "red", load)) as server:
        reply = server.post(path, {"model": "red", "keep_alive": 0})
        assert (reply.status, reply.json["done_reason"]) == (200, "unload")
        assert loads == []
        assert server.post(path, {"model": "yellow", "keep_alive": 0}).status == 404
        complete(server, "red")  # which is not held against the next one
        time.sleep(0.3)
        assert is_loaded(server, "red") and len(loads) == 1


def test_models_that_are_always_loaded_are_not_stopped(folder: Path) -> None:
    sources = [source_of(folder / name) for name in ("red", "green")]
    with running(settings_of(model_names=("red",)), sources) as server:
        server.wait_until(lambda: server.service.is_ready)
        reply = server.post("/api/generate", {"model": "green", "keep_alive": 0})
        assert reply.status == 400 and "end the server to unload it" in reply.json["error"]


def test_a_model_that_is_stopped_while_it_is_loaded_goes_after_its_requests(folder: Path) -> None:
    gate = Gate()
    with serving_all(folder, green=source_of(folder / "green", gate.load)) as server:
        loading, texts = answered(lambda: complete(server, "green"))
        assert gate.has_begun.wait(PATIENCE_S)
        stop = {"model": "green", "keep_alive": 0}
        assert server.post("/api/generate", stop).json["done_reason"] == "unload"
        gate.is_open.set()
        loading.join(PATIENCE_S)
        assert texts
        server.wait_until(lambda: not is_loaded(server, "green"))


def test_a_long_keep_alive_is_refused_without_searching_it() -> None:
    """Searching so many digits would hold the interpreter, and every stream, for minutes."""
    with pytest.raises(ApiError, match="keep_alive must be seconds or a duration"):
        keep_seconds("1" * 2_000_000 + "x")


# ---- when something fails


def test_a_model_that_cannot_be_loaded_is_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency_module, "_FAILED_S", 1.0)
    path = tmp_path / "green"
    shutil.copy(folder / "green", path)
    with serving_all(folder, green=source_of(path)) as server:
        path.write_bytes(b"GGUF and nothing else")
        reply = server.post("/v1/completions", {"model": "green", "prompt": "x"})
        assert (reply.status, reply.error["code"]) == (503, "model_not_loaded")
        assert "green cannot be loaded" in reply.error["message"]
        again = server.post("/v1/completions", {"model": "green", "prompt": "x"})
        assert again.error == reply.error
        complete(server, "red")
        shutil.copy(folder / "green", path)
        server.wait_until(
            lambda: server.post("/v1/completions", {"model": "green", "prompt": "x"}).status == 200
        )


def test_a_model_whose_loading_meets_a_bug_is_refused_and_the_others_go_on(folder: Path) -> None:
    def load(*_: Any) -> OnlineModel:
        raise RuntimeError("secret")

    with serving_all(folder, green=source_of(folder / "green", load)) as server:
        reply = server.post("/v1/completions", {"model": "green", "prompt": "x"})
        assert (reply.status, reply.error["code"]) == (503, "model_not_loaded")
        assert "secret" not in reply.error["message"]
        complete(server, "red")


def test_a_crash_of_one_models_worker_changes_no_stream(folder: Path) -> None:
    with serving_all(folder) as server:
        expected = {name: complete(server, name, max_tokens=200) for name in ("red", "green")}
        streams = {name: OpenStream(server, name, max_tokens=200) for name in expected}
        texts = {name: stream.first() for name, stream in streams.items()}
        llm = model_named(server, "red").loaded
        assert isinstance(llm, RemoteLLM)
        os.kill(llm.worker_pid, signal.SIGKILL)
        for name, stream in streams.items():
            assert texts[name] + stream.rest() == expected[name]
        metrics = server.get("/metrics").body.decode()
        assert 'quire:generation_tokens_total{model_name="green"}' in metrics
        assert 'quire:model_loaded{model_name="blue"} 0' in metrics
        assert metrics.count("# TYPE quire:generation_tokens_total") == 1


def test_restarts_are_counted_when_their_model_is_unloaded_too(folder: Path) -> None:
    with serving_all(folder, room_for(folder, 1)) as server:
        complete(server, "red")
        llm = model_named(server, "red").loaded
        assert isinstance(llm, RemoteLLM)
        os.kill(llm.worker_pid, signal.SIGKILL)
        server.wait_until(lambda: server.service.num_worker_restarts == 1)
        complete(server, "green")
        assert not is_loaded(server, "red")
        assert (
            'quire:worker_restarts_total{model_name="red"} 1'
            in server.get("/metrics").body.decode()
        )


def test_a_model_that_is_stuck_is_loaded_again_and_the_others_go_on(folder: Path) -> None:
    with serving_all(folder) as server:
        expected = complete(server, "red")
        complete(server, "green")
        red = model_named(server, "red")
        llm = red.loaded
        red._on_stuck([llm] if llm is not None else [])
        server.wait_until(lambda: red.loaded is not llm)
        assert complete(server, "red") == expected
        assert server.service.is_ready and is_loaded(server, "green")


def lose(server: RunningServer, name: str) -> None:
    """Have a model fail for good, as it does after workers that cannot be started."""
    llm = model_named(server, name).loaded
    assert isinstance(llm, RemoteLLM)
    server.loop.call_soon_threadsafe(llm.fail, ExecutorError("no worker could be started"))


@pytest.mark.parametrize("path", ["/metrics", "/v1/stats?model=red"])
def test_figures_are_given_where_a_model_is_lost_that_was_asked_for_its_own(
    folder: Path, path: str
) -> None:
    with serving_all(folder) as server:
        complete(server, "red")
        llm = model_named(server, "red").loaded
        assert isinstance(llm, RemoteLLM)
        os.kill(llm.worker_pid, signal.SIGSTOP)
        thread, replies = answered(lambda: server.get(path))
        server.wait_until(lambda: bool(llm._engine._calls))
        lose(server, "red")
        thread.join(PATIENCE_S)
        os.kill(llm.worker_pid, signal.SIGCONT)
        assert replies[0].status == 200, replies[0].body


def test_lines_whose_model_is_lost_are_answered_when_it_is_loaded_again(
    folder: Path, tmp_path: Path
) -> None:
    with serving_all(folder, settings={"state_folder": tmp_path}) as server:
        client = server.client()
        batch = begin_batch(client, "red", num_lines=3, max_tokens=300)
        red = model_named(server, "red")
        server.wait_until(lambda: isinstance(red.loaded, RemoteLLM) and red.loaded.num_live == 3)
        lose(server, "red")
        server.wait_until(lambda: counts_of(client, batch)[0] == "completed")
        assert counts_of(client, batch) == ("completed", 3, 0)
        assert server.service.num_losses == 1


def test_a_background_response_whose_model_is_lost_is_made_when_it_is_loaded_again(
    folder: Path,
) -> None:
    with serving_all(folder) as server:
        body = {"model": "red", "input": "hi", "background": True, "max_output_tokens": 300}
        name = server.post("/v1/responses", body).json["id"]
        red = model_named(server, "red")
        server.wait_until(lambda: isinstance(red.loaded, RemoteLLM) and red.loaded.num_live == 1)
        lose(server, "red")
        path = f"/v1/responses/{name}"
        live = ("queued", "in_progress")
        server.wait_until(lambda: server.get(path).json["status"] not in live)
        ended = server.get(path).json
        assert ended["status"] in ("completed", "incomplete"), ended


def test_lines_whose_model_is_lost_again_and_again_get_an_error_at_last(
    folder: Path, tmp_path: Path
) -> None:
    def load(path: str, options: Options, on_stuck: Callable[[], None]) -> OnlineModel:
        made = RemoteLLM.load(path, options, on_stuck)
        submit = made.submit

        async def lost(*args: Any, **options: Any) -> Any:
            stream = await submit(*args, **options)
            made.fail(ExecutorError("no worker could be started"))
            return stream

        made.submit = lost  # type: ignore[method-assign]
        return made

    source = source_of(folder / "red", load)
    with serving_all(folder, settings={"state_folder": tmp_path}, red=source) as server:
        client = server.client()
        batch = begin_batch(client, "red", num_lines=1, max_tokens=300)
        server.wait_until(lambda: counts_of(client, batch)[0] == "completed")
        assert counts_of(client, batch) == ("completed", 0, 1)
        assert server.service.num_losses == lines_module._MAX_LOSSES


def test_a_model_that_fails_while_it_is_opened_is_loaded_again(folder: Path) -> None:
    made: list[RemoteLLM] = []

    def load(path: str, options: Options, on_stuck: Callable[[], None]) -> OnlineModel:
        llm = RemoteLLM.load(path, options, on_stuck)
        made.append(llm)
        open_ = llm.open

        async def open_and_fail() -> None:
            await open_()
            llm.fail(ExecutorError("no worker could be started"))

        if len(made) == 1:
            llm.open = open_and_fail  # type: ignore[method-assign]
        return llm

    with serving_all(folder, red=source_of(folder / "red", load)) as server:
        first = server.post("/v1/completions", {"model": "red", "prompt": "x"})
        assert first.status >= 500
        server.wait_until(lambda: model_named(server, "red").loaded is not made[0])
        complete(server, "red")
        assert len(made) == 2


def test_a_server_that_ends_has_a_model_unloaded_that_it_began_to(folder: Path) -> None:
    residency = Residency()
    with serving_all(folder, residency) as server:
        complete(server, "red")
        llm = model_named(server, "red").loaded
        assert isinstance(llm, RemoteLLM)
        close, has_begun, goes_on = llm.close, threading.Event(), threading.Event()

        async def close_slowly() -> None:
            has_begun.set()
            await asyncio.to_thread(goes_on.wait, PATIENCE_S)
            await close()

        llm.close = close_slowly  # type: ignore[method-assign]
        residency.idle_s = 0.0
        server.loop.call_soon_threadsafe(residency.look)
        assert has_begun.wait(PATIENCE_S)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
        time.sleep(0.2)
        goes_on.set()
        draining.result(PATIENCE_S)
        assert not os.path.exists(f"/proc/{llm.worker_pid}")


def test_a_server_that_ends_refuses_who_waits_for_a_model(folder: Path) -> None:
    gate = Gate()
    with serving_all(folder, green=source_of(folder / "green", gate.load)) as server:
        body = {"model": "green", "prompt": "x"}
        waiting, replies = answered(lambda: server.post("/v1/completions", body))
        assert gate.has_begun.wait(PATIENCE_S)
        asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
        waiting.join(PATIENCE_S)
        assert (replies[0].status, replies[0].error["code"]) == (503, "drain")
        gate.is_open.set()


def test_a_server_that_ends_looks_at_no_further_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = source_of(folder / "red").need()
    looks: list[str] = []
    goes_on = threading.Event()

    def look(source: ModelSource) -> MemoryNeed:
        looks.append(source.names[0])
        assert goes_on.wait(PATIENCE_S)
        return need

    monkeypatch.setattr(ModelSource, "need", look)
    sources = [source_of(folder / name) for name in NAMES]
    with running(settings_of(), sources, residency=Residency()) as server:
        server.wait_until(lambda: bool(looks))
        asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop).result(PATIENCE_S)
        goes_on.set()
    assert looks == ["red"]


def test_a_model_that_is_stuck_before_it_is_open_is_not_ready(folder: Path) -> None:
    def load(on_stuck: Callable[[], None]) -> OnlineModel:
        on_stuck()
        return RemoteLLM.load(str(folder / "red"), OPTIONS, on_stuck)

    with running(settings_of(model_names=("red",)), load) as server:
        server.wait_until(lambda: server.service.loaded is not None)
        llm = server.service.loaded
        assert isinstance(llm, RemoteLLM)
        time.sleep(0.1)
        assert server.service.state is State.STUCK
        llm.kill()


# ---- a folder


def test_models_come_and_go_with_the_files_of_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_watch, "_LOOK_S", 0.05)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "red", tmp_path / name)
    (tmp_path / "mmproj-b.gguf").write_bytes(b"no model")
    (tmp_path / "notes.txt").write_text("no model")
    models = ModelFolder(tmp_path, source_of)
    sources = [source_of(path) for path in models.look(at_once=True).come]

    def names() -> list[str]:
        return [card["id"] for card in server.get("/v1/models").json["data"]]

    settings = settings_of(model_names=sources[0].names)
    with running(settings, sources, residency=Residency(), folder=models) as server:
        server.wait_until(lambda: server.service.is_ready)
        assert names() == ["a.gguf", "b.gguf"]
        (tmp_path / "wrong.gguf").write_bytes(b"GGUF")
        inner = tmp_path / "inner"
        inner.mkdir()
        shutil.copy(folder / "green", inner / "c.gguf")
        server.wait_until(lambda: names() == ["a.gguf", "b.gguf", "c.gguf"])
        complete(server, "c.gguf")
        (tmp_path / "b.gguf").unlink()
        server.wait_until(lambda: names() == ["a.gguf", "c.gguf"])
        assert server.post("/v1/completions", {"model": "b.gguf", "prompt": "x"}).status == 404


def test_a_broken_file_of_a_folder_is_refused_with_what_is_wrong_until_it_is_mended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "red", tmp_path / "a.gguf")
    for name in ("b.gguf", "c.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    def status(name: str) -> int:
        return server.post("/v1/completions", {"model": name, "prompt": "x"}).status

    with serving_folder(tmp_path, monkeypatch) as server:
        assert served_names(server) == ["a.gguf"]
        reply = server.post("/v1/completions", {"model": "b.gguf", "prompt": "x"})
        assert (reply.status, reply.error["code"]) == (503, "model_not_loaded")
        assert "b.gguf cannot be loaded: " in reply.error["message"]
        assert "truncated" in reply.error["message"]
        shutil.copy(folder / "green", tmp_path / "b.gguf")
        (tmp_path / "c.gguf").unlink()
        server.wait_until(lambda: status("b.gguf") == 200)
        server.wait_until(lambda: status("c.gguf") == 404)


@contextmanager
def serving_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch, *named: ModelSource, make: Any = None
) -> Iterator[RunningServer]:
    """A server of what is in a folder, which is looked at often, besides models by name."""
    monkeypatch.setattr(folder_watch, "_LOOK_S", 0.05)
    models = ModelFolder(path, make or source_of)
    taken = {source.names[0] for source in named}
    found = [path for path in models.look(at_once=True).come if path.name not in taken]
    sources = [*named, *map(models.make, found)]
    settings = settings_of(model_names=sources[0].names)
    with running(settings, sources, residency=Residency(), folder=models) as server:
        server.wait_until(lambda: server.service.is_ready)
        yield server


def served_names(server: RunningServer) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json["data"]]


def test_a_model_that_is_loaded_goes_with_its_file_when_its_stream_has_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "red", tmp_path / name)
    with serving_folder(tmp_path, monkeypatch) as server:
        expected = complete_of(server, "b.gguf")
        stream = OpenStream(server, "b.gguf", max_tokens=300)
        text = stream.first()
        llm = model_named(server, "b.gguf").loaded
        assert isinstance(llm, RemoteLLM)
        (tmp_path / "b.gguf").unlink()
        server.wait_until(lambda: served_names(server) == ["a.gguf"])
        assert text + stream.rest() == expected
        server.wait_until(lambda: not os.path.exists(f"/proc/{llm.worker_pid}"))
        assert server.service.residency is not None
        server.wait_until(lambda: len(server.service.residency._models) == 1)  # type: ignore[union-attr]


def complete_of(server: RunningServer, model: str) -> str:
    body = {"model": model, "prompt": "one two", "max_tokens": 300, "seed": 1, "ignore_eos": True}
    text: str = server.post("/v1/completions", body).json["choices"][0]["text"]
    return text


def test_a_model_whose_file_goes_while_it_is_loaded_leaves_no_worker(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "red", tmp_path / name)
    gate = Gate()
    loaded: list[OnlineModel] = []

    def load(*args: Any) -> OnlineModel:
        loaded.append(gate.load(*args))
        (tmp_path / "b.gguf").unlink()
        time.sleep(0.5)  # some looks
        return loaded[0]

    with serving_folder(tmp_path, monkeypatch, make=partial(source_of, load=load)) as server:
        gate.is_open.set()
        body = {"model": "b.gguf", "prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body).status == 200
        server.wait_until(lambda: served_names(server) == ["a.gguf"])
        assert isinstance(loaded[0], RemoteLLM)
        pid = loaded[0].worker_pid
        server.wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_file_that_goes_takes_no_model_with_it_that_was_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    models = tmp_path / "models"
    for path in (own, models):
        path.mkdir()
        shutil.copy(folder / "red", path / "a.gguf")
    shutil.copy(folder / "red", models / "b.gguf")
    shutil.copy(folder / "red", models / "c.gguf")
    with serving_folder(models, monkeypatch, source_of(own / "a.gguf")) as server:
        (models / "a.gguf").unlink()
        (models / "b.gguf").unlink()
        server.wait_until(lambda: "b.gguf" not in served_names(server))
        assert served_names(server) == ["a.gguf", "c.gguf"]


def test_who_looks_through_the_models_on_a_thread_sees_all_that_stay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the lines of a batch are checked, while a file goes."""
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        shutil.copy(folder / "red", tmp_path / name)
    with serving_folder(tmp_path, monkeypatch) as server:
        looking = iter(server.service.models)
        found = [next(looking).name]
        (tmp_path / "a.gguf").unlink()
        server.wait_until(lambda: served_names(server) == ["b.gguf", "c.gguf"])
        found += [model.name for model in looking]
        assert found == ["a.gguf", "b.gguf", "c.gguf"]


def test_a_look_that_fails_is_not_the_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "red", tmp_path / "a.gguf")

    def make(path: Path) -> ModelSource:
        if path.name == "b.gguf":
            raise ConfigError("the configuration has gone")
        if path.name == "c.gguf":
            raise RuntimeError("a bug")
        return source_of(path)

    with serving_folder(tmp_path, monkeypatch, make=make) as server:
        for name in ("b.gguf", "c.gguf"):
            shutil.copy(folder / "red", tmp_path / name)
            time.sleep(0.3)
        shutil.copy(folder / "red", tmp_path / "d.gguf")
        server.wait_until(lambda: served_names(server) == ["a.gguf", "d.gguf"])


def test_a_file_that_fails_keeps_none_out_that_came_with_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "red", tmp_path / "a.gguf")

    def make(path: Path) -> ModelSource:
        if path.name == "b.gguf":
            raise RuntimeError("a bug")
        return source_of(path)

    looks: list[Any] = []
    look = ModelFolder.look

    def look_together(models: ModelFolder, at_once: bool = False) -> Any:
        found = look(models, at_once=at_once)
        looks.append(found)
        return found

    with serving_folder(tmp_path, monkeypatch, make=make) as server:
        monkeypatch.setattr(ModelFolder, "look", look_together)
        new = tmp_path / ".new"
        new.mkdir()
        for name in ("b.gguf", "c.gguf"):
            shutil.copy(folder / "red", new / name)
        new.rename(tmp_path / "new")
        server.wait_until(lambda: served_names(server) == ["a.gguf", "c.gguf"])
        assert max(len(found.come) for found in looks) == 2, "they came together"


def test_files_that_went_are_forgotten(folder: Path) -> None:
    with serving_all(folder) as server:
        residency = server.service.residency
        assert residency is not None
        gone = {folder / "red", folder / "green", folder / "blue", folder / "never-served"}
        left = folder_watch._remove(server.service, residency, gone)
        assert [model.name for model in server.service.models] == ["blue"]
        assert left == {folder / "blue"}, "the last model goes when there is another one"


def test_a_split_model_comes_when_its_last_part_is_there(tmp_path: Path) -> None:
    models = ModelFolder(tmp_path, source_of)
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(b"GGUF")
    assert models.look().come == []
    assert models.look().come == [first]  # without its other part it is left out
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"GGUF")
    assert models.look().come == []
    assert models.look().come == [first]


def test_a_model_that_is_moved_within_the_folder_comes_again(tmp_path: Path) -> None:
    models = ModelFolder(tmp_path, source_of)
    before, after = tmp_path / "a.gguf", tmp_path / "inner" / "a.gguf"
    before.write_bytes(b"GGUF")
    assert models.look(at_once=True).come == [before]
    after.parent.mkdir()
    before.rename(after)
    assert models.look().gone == [before]
    assert models.look().come == [after]


def test_a_folder_that_may_not_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, file = tmp_path / "closed", tmp_path / "open" / "a.gguf"
    for path in (closed, file.parent):
        path.mkdir()
    file.write_bytes(b"GGUF")
    is_file = Path.is_file

    def refuse(path: Path) -> bool:  # as the system does, but for root
        if path.parent == closed:
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert ModelFolder(tmp_path, source_of).look(at_once=True).come == [file]


def test_a_file_that_is_still_copied_does_not_come_yet(folder: Path, tmp_path: Path) -> None:
    models = ModelFolder(tmp_path, source_of)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GG")
    assert models.look().come == []
    path.write_bytes(b"GGUF")
    assert models.look().come == []
    assert models.look().come == [path]
    assert models.look().come == []
    path.unlink()
    assert models.look().gone == [path]


# ---- other options


def test_what_a_reload_changed_is_counted_and_the_old_worker_keeps_nobody_out(
    folder: Path,
) -> None:
    with serving_all(folder, room_for(folder, 1)) as server:
        complete(server, "red")
        red = model_named(server, "red")
        before = red.need
        options = replace(OPTIONS, kv_memory="4MiB")
        replace_red(server, replacement_of(folder / "red", options))
        assert before is not None and red.need is not None
        assert red.need.num_bytes == before.num_bytes - (4 << 20)
        assert red._retiring
        assert server.loop is not None and red.is_idle, "the one that was replaced counts as use"
        old = [llm for llm in red._retiring if isinstance(llm, RemoteLLM)]
        complete(server, "green")
        assert not any(os.path.exists(f"/proc/{llm.worker_pid}") for llm in old)


def replacement_of(
    path: Path, options: Options = OPTIONS, load: Callable[..., OnlineModel] = RemoteLLM.load
) -> Replacement:
    return Replacement(("red",), str(path), None, options, partial(load, str(path), options))


def replace_red(server: RunningServer, wanted: Replacement) -> list[str]:
    """What was said of it."""
    said: list[str] = []
    replacing = model_named(server, "red").replace(wanted, said.append)
    said.append(asyncio.run_coroutine_threadsafe(replacing, server.loop).result(PATIENCE_S))
    return said


def test_a_second_copy_stays_within_the_budget(folder: Path) -> None:
    """It is loaded when the first has ended."""
    residency = room_for(folder, 2)
    with serving_all(folder, residency) as server:
        expected = complete(server, "red", max_tokens=300)
        complete(server, "green")
        stream = OpenStream(server, "red", max_tokens=300)
        text = stream.first()
        old = model_named(server, "red").loaded
        assert isinstance(old, RemoteLLM)
        were_two: list[bool] = []

        def load(*args: Any) -> OnlineModel:
            were_two.append(os.path.exists(f"/proc/{old.worker_pid}"))
            return RemoteLLM.load(*args)

        said = replace_red(server, replacement_of(folder / "red", load=load))
        assert "after the old one" in said[0] and "models may take" in said[0]
        assert were_two == [False]
        assert text + stream.rest() == expected
        assert loaded_names(server) == ["red", "green"]
        with pytest.raises(ConfigError, match="does not fit into --model-memory"):
            replace_red(server, replacement_of(folder / "red", replace(OPTIONS, kv_memory="1GiB")))


def test_with_room_in_the_budget_a_copy_is_loaded_beside_and_counts(folder: Path) -> None:
    gate = Gate()
    residency = room_for(folder, 2)
    with serving_all(folder, residency) as server:
        complete(server, "red")
        said: list[str] = []
        wanted = replacement_of(folder / "red", load=gate.load)
        replacing = asyncio.run_coroutine_threadsafe(
            model_named(server, "red").replace(wanted, said.append), server.loop
        )
        assert gate.has_begun.wait(PATIENCE_S)
        assert "beside the old one" in said[0]
        waiting, texts = answered(lambda: complete(server, "green"))
        server.wait_until(lambda: model_named(server, "green") in residency._wanted)
        time.sleep(0.5)  # some looks
        assert not is_loaded(server, "green") and not texts
        gate.is_open.set()
        replacing.result(PATIENCE_S)
        waiting.join(PATIENCE_S)
        assert texts


def test_old_weights_count_until_their_last_request_has_ended(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "red"
    shutil.copy(folder / "red", path)
    with serving_all(folder, room_for(folder, 2), red=source_of(path)) as server:
        expected = complete(server, "red", max_tokens=450)
        stream = OpenStream(server, "red", max_tokens=450)
        text = stream.first()
        other = tmp_path / "other"
        shutil.copy(folder / "blue", other)
        other.replace(path)
        old = model_named(server, "red").loaded
        assert isinstance(old, RemoteLLM)
        assert "finish with the old weights" in replace_red(server, replacement_of(path))[-1]
        complete(server, "green")
        assert not os.path.exists(f"/proc/{old.worker_pid}"), "three workers in room for two"
        assert text + stream.rest() == expected


def test_weights_that_do_not_fit_beside_others_wait_for_the_next_request(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "red"
    shutil.copy(folder / "red", path)
    with serving_all(folder, room_for(folder, 1), red=source_of(path)) as server:
        expected = complete(server, "red", max_tokens=300)
        other = tmp_path / "other"
        shutil.copy(folder / "blue", other)
        other.replace(path)
        with (
            model_named(server, "red").answering(),
            pytest.raises(ConfigError, match="does not fit beside"),
        ):
            replace_red(server, replacement_of(path))
        assert complete(server, "red", max_tokens=300) == expected
        server.wait_until(lambda: model_named(server, "red").is_idle)
        assert "by its next request" in replace_red(server, replacement_of(path))[-1]
        assert loaded_names(server) == []
        assert complete(server, "red", max_tokens=300) != expected


def test_a_model_that_is_lost_while_it_is_loaded_anew_leaves_no_worker(folder: Path) -> None:
    gate = Gate()
    made: list[OnlineModel] = []

    def load(*args: Any) -> OnlineModel:
        made.append(gate.load(*args))
        return made[0]

    with serving_all(folder) as server:
        expected = complete(server, "red")
        red = model_named(server, "red")
        replacing = asyncio.run_coroutine_threadsafe(
            red.replace(replacement_of(folder / "red", load=load), lambda _: None), server.loop
        )
        assert gate.has_begun.wait(PATIENCE_S)
        lose(server, "red")
        server.wait_until(lambda: red.state is State.UNLOADED)
        gate.is_open.set()
        with pytest.raises(ConfigError, match="was lost while"):
            replacing.result(PATIENCE_S)
        assert isinstance(made[0], RemoteLLM)
        assert not os.path.exists(f"/proc/{made[0].worker_pid}")
        assert complete(server, "red") == expected


def test_a_reload_reaches_a_model_that_is_being_loaded(folder: Path) -> None:
    gate = Gate()
    other = replace(OPTIONS, max_batch_size=4)

    def make(model: str | None, config: str | None) -> Replacement:
        assert model is not None
        load = partial(RemoteLLM.load, model, other)
        return Replacement((Path(model).name,), model, None, other, load)

    red = source_of(folder / "red", gate.load)
    with serving_all(folder, red=red, replace=make) as server:
        thread, texts = answered(lambda: complete(server, "red"))
        assert gate.has_begun.wait(PATIENCE_S)
        reloading = asyncio.run_coroutine_threadsafe(
            server.service._do_reload(Reload(), lambda _: None), server.loop
        )
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(PATIENCE_S)
        gate.is_open.set()
        assert "1 of 3 models" in reloading.result(PATIENCE_S)
        thread.join(PATIENCE_S)
        assert len(texts) == 1
        llm = model_named(server, "red").loaded
        assert llm is not None and llm.max_batch_size == 4


def test_a_reload_goes_on_after_a_model_that_refuses_it(folder: Path) -> None:
    other = replace(OPTIONS, max_batch_size=4)

    def make(model: str | None, config: str | None) -> Replacement:
        assert model is not None
        load = partial(refuse if Path(model).name == "red" else RemoteLLM.load, model, other)
        return Replacement((Path(model).name,), model, None, other, load)

    def refuse(*_: Any) -> OnlineModel:
        raise ConfigError("not like this")

    with serving_all(folder, replace=make) as server:
        for name in ("red", "green"):
            complete(server, name)
        reloading = server.service._do_reload(Reload(), lambda _: None)
        with pytest.raises(ConfigError, match=r"^1 of 3 .*; red is as it was: not like this$"):
            asyncio.run_coroutine_threadsafe(reloading, server.loop).result(PATIENCE_S)
        sizes = []
        for name in ("red", "green"):
            llm = model_named(server, name).loaded
            assert llm is not None
            sizes.append(llm.max_batch_size)
        assert sizes == [8, 4]
        assert model_named(server, "blue").source.options == other


def test_a_configuration_that_cannot_be_read_changes_nothing_for_models_that_come(
    folder: Path,
) -> None:
    def make(model: str | None, config: str | None) -> Replacement:
        raise ConfigError(f"{config} cannot be read")

    with serving_all(folder, replace=make) as server:
        reloading = server.service._do_reload(Reload(config="wrong.toml"), lambda _: None)
        with pytest.raises(ConfigError, match=r"wrong.toml cannot be read"):
            asyncio.run_coroutine_threadsafe(reloading, server.loop).result(PATIENCE_S)
        assert server.service.new_model(source_of(folder / "red")).source.options == OPTIONS


# ---- the command


SMALL = ("--device", "reference", "--kv-memory", "8MiB")


def test_quire_serve_takes_several_models(folder: Path, tmp_path: Path) -> None:
    state = ("--state", tmp_path)
    with serving(folder / "red", *SMALL, f"other={folder / 'green'}", *state) as server:
        assert "red, other" in server.greeting
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("GET", "/v1/models")
        data = json.load(connection.getresponse())["data"]
        assert [card["id"] for card in data] == ["red", "other"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{red}", "{red}"), "two models are called red: say NAME=MODEL"),
        (("{red}", "{green}", "--no-worker"), "--no-worker is for a server of one model"),
        (("{red}", "no-such-file.gguf"), "no-such-file.gguf is neither a file or folder nor"),
        (("{red}", "x="), "expected MODEL or NAME=MODEL"),
        (("--models", "{red}"), "there is no such folder"),
        (("--models", "{empty}"), "there is no GGUF file in it"),
        (("{red}", "--idle-timeout", "-1"), "--idle-timeout must be 0 or more"),
        (("{red}", "--model-memory", "0"), "--model-memory must be above 0"),
        (("{red}", "{green}", "--model-memory", "much"), "--model-memory must be bytes or text"),
        (
            ("{red}", "{green}", "--served-model-name", "x"),
            "--served-model-name is there 1 times for 2 models",
        ),
    ],
)
def test_what_is_wrong_with_several_models_is_said_at_once(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    places = {"red": folder / "red", "green": folder / "green", "empty": tmp_path}
    assert said in fails("serve", *(each.format(**places) for each in arguments), *SMALL)


def test_a_server_whose_memory_no_model_fits_does_not_start(folder: Path, tmp_path: Path) -> None:
    memory = ("--model-memory", "1KiB", "--port", "0", "--state", tmp_path)
    run = quire("serve", folder / "red", folder / "green", *memory, *SMALL)
    assert run.code == 1
    assert "quire: --model-memory is 1.0 KiB, and red alone, of all models the" in run.err


def test_a_folder_in_which_no_model_can_be_served_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "broken.gguf").write_bytes(b"no model")
    run = quire("serve", "--models", models, "--port", "0", "--state", tmp_path, *SMALL)
    assert run.code == 1
    assert "model_left_out" in run.err and "broken.gguf is no model" in run.err
    assert run.err.splitlines()[-1].startswith("quire: there is no model that can be served")
    assert "Traceback" not in run.err


def test_an_unknown_option_behind_a_second_model_is_refused(folder: Path) -> None:
    run = quire("serve", folder / "red", "--port", "0", folder / "green", "--no-such")
    assert run.code == 2 and "--no-such" in run.err


def test_quire_reload_loads_what_is_loaded_anew(folder: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(folder, models)
    state = tmp_path / "state"
    red, green = models / "red", models / "green"
    with serving(red, green, *SMALL, "--state", state) as server:

        def text() -> str:
            connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            body = {"model": "red", "prompt": "one", "max_tokens": 4, "seed": 1}
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            found: str = json.load(connection.getresponse())["choices"][0]["text"]
            return found

        before = text()
        shutil.copy(folder / "blue", red)
        assert text() == before, "the worker has what it loaded"
        run = quire("reload", "--state", state)
        assert run.code == 0, run.err
        assert "1 of 2 models were loaded" in run.out
        assert text() != before
        assert "several models" in fails("reload", folder / "blue", "--state", state)
