"""Real servers on real ports, in a thread of the test's process, so that tests can look inside."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import uvloop
from tests.llm.text_models import END

from quire.core.plan import SequencePlan, StepResult, allows
from quire.engine import Engine
from quire.executors.fake import FakeExecutor
from quire.llm import AsyncLLM
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import Options
from quire.server.runner import make_server, read_certificate
from quire.server.service import Service
from quire.server.settings import ServerSettings

PATIENCE_S = 120.0  # a guard against waiting for ever; nothing is measured
NAME = "tiny-text"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class RunningServer:
    """A server that listens, and what is behind it."""

    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    executor: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self._llm._engine.engine

    @property
    def _llm(self) -> AsyncLLM:
        llm = self.service.loaded
        assert isinstance(llm, AsyncLLM)
        return llm

    def client(self, key: str = "none at all", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S, max_retries=0, **options
        )

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One exchange; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        sent = {**self.headers, **(headers or {})}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return self.send("POST", path, body, headers)

    def chat(self, **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": QUESTION, **fields})

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        wait_until(is_reached)

    def wait_until_idle(self) -> None:
        """Until the engine has nothing left, with its books in order and every block free."""
        self.wait_until(lambda: self._on_engines_thread(self._is_idle))

    def _on_engines_thread(self, look: Callable[[], bool]) -> bool:
        """What the engine's own thread sees between two steps."""
        seen: Future[bool] = Future()
        self._llm._engine.post(lambda: _fulfil(seen, look))
        return seen.result(PATIENCE_S)

    def _is_idle(self) -> bool:
        if self.engine.has_work:
            return False
        self.engine.check_integrity()
        assert self.engine.snapshot().kv_usage == 0
        return True


QUESTION = [{"role": "user", "content": "Hello there"}]


def _fulfil(seen: "Future[bool]", look: Callable[[], bool]) -> None:
    try:
        seen.set_result(look())
    except Exception as error:
        seen.set_exception(error)


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < deadline, "never reached"
        time.sleep(0.005)


class PacedExecutor(FakeExecutor):
    """The hash model in real time: a step takes `step_s`."""

    def __init__(self, step_s: float = 0.0, **options: Any) -> None:
        super().__init__(**{"vocabulary_size": 512, "max_context": 512, **options})
        self.step_s = step_s

    def collect(self, ticket: Any, timeout_s: float | None = None) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        return super().collect(ticket, timeout_s)


class ScriptedExecutor(PacedExecutor):
    """Every completion is `script`, then the end; a mask that forbids a token of it gets another.
    `end`: the model's end token."""

    def __init__(self, script: list[int] | None = None, *, end: int = END, **options: Any) -> None:
        super().__init__(**{"max_context": 16384, "num_blocks": 4096, **options})
        self.script = script or []
        self.end = end

    def _choose(self, row: SequencePlan, digest: int) -> int | None:
        position = row.completion_position
        token = self.script[position] if position < len(self.script) else self.end
        mask = row.mask()
        if mask is None or allows(mask, token):
            return token
        if allows(mask, self.end):
            return self.end
        return super()._choose(row, digest)


@contextmanager
def running(
    settings: ServerSettings, load: Any, executor: Any = None, **options: Any
) -> Iterator[RunningServer]:
    """Serve until the block ends; nothing is mocked but signals. `load`, `options`: Service's."""
    listener = socket.create_server(("127.0.0.1", 0))
    started: dict[str, Any] = {}
    has_started = threading.Event()

    async def main() -> None:
        service = Service(settings, load, **options)
        server = make_server(service, read_certificate(settings))
        started.update(service=service, loop=asyncio.get_running_loop(), server=server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        has_started.set()
        await service.open()
        await serving

    def work() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert has_started.wait(PATIENCE_S)
    service = started["service"]
    try:
        wait_until(lambda: started["server"].started)
        yield RunningServer(listener.getsockname()[1], service, started["loop"], executor)
    finally:
        asyncio.run_coroutine_threadsafe(service.drain(), started["loop"])
        asyncio.run_coroutine_threadsafe(service.drain(), started["loop"])
        started["server"].should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server does not end"


def free_port() -> int:
    """One that was free just now, for servers that cannot say which they took."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def settings_of(**options: Any) -> ServerSettings:
    return ServerSettings(**{"model_names": (NAME,), "drain_timeout_s": 5.0, **options})


@contextmanager
def model_server(
    model: Path, options: Options | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """A real model on the reference executor."""
    chosen = options or Options(device="reference", kv_memory="4MiB", max_batch_size=32)

    def load(on_stuck: Callable[[], None]) -> AsyncLLM:
        return AsyncLLM.of(assemble(model, chosen), on_stuck)

    with running(settings_of(**settings), load) as server:
        server.wait_until(lambda: server.service.is_ready)
        yield server


def fake_assembly(model: Path, executor: Any, **engine: Any) -> Assembly:
    """The tiny model's tokenizer over another executor."""
    batch = engine.pop("max_batch_size", 64)
    options = Options(device="reference", kv_memory="4MiB", max_batch_size=batch, engine=engine)
    assembly = assemble(model, replace(options, max_batch_size=1, engine={}))
    assembly.executor.close()
    return replace(assembly, executor=executor, options=options)


@contextmanager
def fake_server(
    model: Path,
    executor: FakeExecutor | None = None,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """The hash model behind a real server."""
    chosen = executor or PacedExecutor(num_blocks=1024)
    made = settings_of(**settings)
    given = {"key_weights": made.keys.weights, "max_step_tokens": 512, **(engine or {})}

    def load(on_stuck: Callable[[], None]) -> AsyncLLM:
        return AsyncLLM.of(fake_assembly(model, chosen, **given), on_stuck)

    with running(made, load, chosen) as server:
        server.wait_until(lambda: server.service.is_ready)
        yield server
