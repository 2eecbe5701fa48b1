"""`quire serve --api-processes 2`: limits, figures, audit log and stored responses are those of the
whole server, and a process that dies takes its own connections with it and no more."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import quire
from tests.llm.text_models import write_text_model
from tests.server.processes import ServeProcess, serving
from tests.server.servers import PATIENCE_S
from tests.worker.test_server import worker_of

from quire.llm.devices import Options
from quire.server.connections import read_networks
from quire.server.keys import ApiKey, KeyRing, KeyScope
from quire.server.processes.setup import Setup
from quire.server.settings import ServerSettings

SMALL = ("--device", "reference", "--kv-memory", "8MiB", "--api-processes", "2")
TEXT = "/v1/completions"
SHORT = {"prompt": "x", "max_tokens": 10, "ignore_eos": True, "seed": 1}
LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "seed": 4, "stream": True}


def secret(name: str) -> str:
    return f"{name}-secret-of-a-test"


KEYS = {
    "admin": 'scopes = ["inference", "stats", "admin"]',
    "single": "max_concurrent = 1",
    "minute": "tokens_per_minute = 30",
    "day": "tokens_per_day = 30",
    "gone": "",
}


def write_keys(path: Path, names: list[str]) -> Path:
    tables = [f'[keys.{name}]\nkey = "{secret(name)}"\n{KEYS[name]}\n' for name in names]
    path.write_text("\n".join(tables))
    return path


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


class Client:
    """A connection to one of the API processes."""

    def __init__(self, port: int) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.ask("GET", "/health")

    @property
    def socket(self) -> socket.socket:
        assert self.connection.sock is not None
        return self.connection.sock

    def send(self, method: str, path: str, body: object = None, key: str = "", **more: str) -> None:
        headers = {"Content-Type": "application/json", **more}
        if key:
            headers["Authorization"] = f"Bearer {secret(key)}"
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)

    def ask(
        self, method: str, path: str, body: object = None, key: str = "", **more: str
    ) -> Answer:
        self.send(method, path, body, key, **more)
        answer = self.connection.getresponse()
        content = answer.read()
        is_json = "json" in (answer.getheader("content-type") or "")
        return Answer(answer.status, json.loads(content) if is_json else content.decode())

    def begin(self, key: str = "", **more: str) -> None:
        """A request whose body does not come: it is open until `close`."""
        self.connection.putrequest("POST", TEXT)
        headers = {"Content-Type": "application/json", "Content-Length": "9", **more}
        if key:
            headers["Authorization"] = f"Bearer {secret(key)}"
        for name, value in headers.items():
            self.connection.putheader(name, value)
        self.connection.endheaders()

    def close(self) -> None:
        self.connection.close()


def owner_of(client: Client, pids: list[int]) -> int:
    """The process that has the other end of a connection."""
    port = f":{client.socket.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{line[9]}]" for line in lines if line[2].endswith(port)}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.islink(descriptor) and os.readlink(descriptor) in inodes:
                return pid
    raise AssertionError("nobody has it")


def command_of(pid: int) -> bytes:
    """Nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass
class Servers:
    server: ServeProcess
    log: Path
    kept: ExitStack

    def pids(self) -> list[int]:
        """Of the API processes."""
        found = []
        for task in Path(f"/proc/{self.server.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended meanwhile
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return [pid for pid in sorted(found) if b"quire.server.processes" in command_of(pid)]

    def client(self, pid: int) -> Client:
        """A new connection to one of the processes: the system chooses, so others are tried."""
        for _ in range(200):
            client = Client(self.server.port)
            if owner_of(client, self.pids()) == pid:
                self.kept.callback(client.close)
                return client
            client.close()
        raise AssertionError(f"no connection came to {pid}")

    def both(self) -> tuple[Client, Client]:
        first, second = self.pids()
        return self.client(first), self.client(second)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def two_processes(folder: Path, model: Path, *options: str | Path) -> Iterator[Servers]:
    log = folder / "log"
    with serving(model, *SMALL, *options, log=log) as server, ExitStack() as kept:
        yield Servers(server, log, kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("shared")
    keys = write_keys(folder / "keys.toml", list(KEYS))
    options = ("--state", folder / "state", "--audit-log", folder / "audit", "--audit-requests")
    proxies = ("--trusted-proxies", "127.0.0.1", "--max-connections-per-address", "1")
    with two_processes(folder, model, "--api-keys", keys, *options, *proxies) as servers:
        yield servers


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def held(servers: Servers, pid: int, other: Client, key: str, **more: str) -> Client:
    """A request that is open in one process, and that the other process knows of."""
    while True:
        client = servers.client(pid)
        client.begin(key, **more)
        while not select.select([client.socket], [], [], 0)[0]:  # else it was refused itself
            if other.ask("POST", TEXT, SHORT, key, **more).status == 429:
                return client


def sample(client: Client, name: str, key: str = "admin") -> float:
    """The sum of a metric over its labels."""
    lines = client.ask("GET", "/metrics", key=key).body.splitlines()
    found = [line for line in lines if line.startswith(f"quire:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_a_key_has_its_requests_at_a_time_in_all_processes_together(shared: Servers) -> None:
    first, second = shared.pids()
    other = shared.client(second)
    one = held(shared, first, other, "single")
    refused = other.ask("POST", TEXT, SHORT, "single")
    assert refused.code == "concurrency_limit"
    one.close()
    wait_until(lambda: other.ask("POST", TEXT, SHORT, "single").status == 200)


@pytest.mark.parametrize("key", ["minute", "day"])
def test_a_key_has_its_tokens_in_all_processes_together(shared: Servers, key: str) -> None:
    one, other = shared.both()
    assert [one.ask("POST", TEXT, SHORT, key).status for _ in range(2)] == [200, 200]
    refused = other.ask("POST", TEXT, SHORT, key)
    assert refused.status == 429 and "has 8 left" in refused.body["error"]["message"]
    figures = other.ask("GET", "/v1/stats", key=key).body["own"]
    assert figures["prompt_tokens"] == 2 and figures["completion_tokens"] == 20


def test_an_address_has_its_connections_in_all_processes_together(shared: Servers) -> None:
    first, second = shared.pids()
    other = shared.client(second)
    given = {"X-Forwarded-For": "203.0.113.7"}
    one = held(shared, first, other, "gone", **given)
    assert other.ask("POST", TEXT, SHORT, "gone", **given).code == "too_many_connections"
    another = {"X-Forwarded-For": "203.0.113.8"}
    assert other.ask("POST", TEXT, SHORT, "gone", **another).status == 200
    one.close()
    wait_until(lambda: other.ask("POST", TEXT, SHORT, "gone", **given).status == 200)


def test_metrics_and_figures_are_those_of_all_processes(shared: Servers) -> None:
    one, other = shared.both()
    before = sample(one, "requests_rejected_total")
    tokens = sample(one, "key_generation_tokens_total")
    for client in (one, other):
        assert client.ask("POST", TEXT, {"nonsense": 1}, "admin").status == 400
        assert client.ask("POST", TEXT, SHORT, "admin").status == 200
    for client in (one, other):
        assert sample(client, "requests_rejected_total") == before + 2
        assert sample(client, "key_generation_tokens_total") == tokens + 20
        assert sample(client, "connections") >= 2
        assert client.ask("GET", "/v1/stats", key="admin").body["keys"]["admin"]


def test_a_response_that_one_process_stored_is_found_and_deleted_by_the_other(
    shared: Servers,
) -> None:
    one, other = shared.both()
    body = {"input": "hello", "max_output_tokens": 4}
    made = one.ask("POST", "/v1/responses", body, "admin").body
    path = f"/v1/responses/{made['id']}"
    assert other.ask("GET", path, key="admin").body == made
    assert other.ask("GET", path, key="gone").status == 404
    follows = {**body, "previous_response_id": made["id"]}
    assert other.ask("POST", "/v1/responses", follows, "admin").status == 200
    assert other.ask("DELETE", path, key="admin").status == 200
    assert one.ask("GET", path, key="admin").status == 404


def test_keys_that_are_read_again_are_those_of_all_processes(shared: Servers) -> None:
    one, other = shared.both()
    path = next(shared.log.parent.glob("keys.toml"))
    write_keys(path, [name for name in KEYS if name != "gone"])
    try:
        changed = one.ask("POST", "/admin/reload", {}, "admin")
        assert changed.body["removed"] == ["gone"]
        assert [client.ask("GET", "/v1/models", key="gone").status for client in (one, other)] == [
            401,
            401,
        ]
        path.write_text("no keys")
        assert other.ask("POST", "/admin/reload", {}, "admin").status == 409
    finally:
        write_keys(path, list(KEYS))
    shared.server.signal(signal.SIGHUP)
    wait_until(lambda: other.ask("GET", "/v1/models", key="gone").status == 200)
    wait_until(lambda: one.ask("GET", "/v1/models", key="gone").status == 200)


def test_the_audit_log_has_the_events_of_all_processes_in_one_chain(shared: Servers) -> None:
    ids = ["audited-one", "audited-other"]
    for client, name in zip(shared.both(), ids, strict=True):
        assert client.ask("GET", "/v1/models", key="admin", **{"x-request-id": name}).status == 200
    path = shared.log.parent / "audit"
    wait_until(lambda: all(name in path.read_text() for name in ids))
    checked = quire("audit", path)
    assert checked.code == 0, checked.err
    num_lines = len(path.read_text().splitlines())  # before: others may follow at any time
    head = shared.both()[0].ask("GET", "/v1/stats", key="admin").body["audit"]
    assert head["seq"] >= num_lines


def test_a_process_that_dies_is_replaced_and_gives_back_what_it_held(shared: Servers) -> None:
    doomed, kept = shared.pids()
    other = shared.client(kept)
    whole = other.ask("POST", TEXT, LONG, "admin").body
    restarts = sample(other, "api_process_restarts_total")
    held(shared, doomed, other, "single")
    streaming = shared.client(doomed)
    streaming.send("POST", TEXT, {**LONG, "prompt": "another"}, "admin")
    streaming.connection.getresponse().read(100)
    watching = shared.client(kept)
    watching.send("POST", TEXT, LONG, "admin")
    answer = watching.connection.getresponse()
    begun = answer.read(300)
    os.kill(doomed, signal.SIGKILL)
    assert text_of((begun + answer.read()).decode()) == text_of(whole)
    wait_until(lambda: other.ask("POST", TEXT, SHORT, "single").status == 200)
    wait_until(lambda: len(shared.pids()) == 2 and doomed not in shared.pids())
    fresh = shared.client(next(pid for pid in shared.pids() if pid != kept))
    assert fresh.ask("POST", TEXT, SHORT, "admin").status == 200
    assert sample(fresh, "api_process_restarts_total") == restarts + 1
    wait_until(lambda: sample(other, "num_requests_running") == 0)
    assert any(event["event"] == "api_process_died" for event in shared.events())


def test_a_stream_whose_process_died_is_resumed_by_another(shared: Servers) -> None:
    doomed, kept = shared.pids()
    other = shared.client(kept)
    body = {**LONG, "temperature": 1.0, "seed": None}
    client = shared.client(doomed)
    client.send("POST", TEXT, body, "admin", **{"x-quire-resume": "1"})
    begun = client.connection.getresponse().read(3000).decode()
    os.kill(doomed, signal.SIGKILL)
    begun = begun[: begun.rindex("\n\n") + 2]  # whole events
    last = begun.rpartition("id: ")[2].partition("\n")[0]
    rest = other.ask("POST", TEXT, body, "admin", **{"Last-Event-ID": last}).body
    first = begun.partition("id: ")[2].partition("\n")[0].rpartition("/")[0] + "/x"
    whole = other.ask("POST", TEXT, body, "admin", **{"Last-Event-ID": first}).body
    assert text_of(begun + rest) == text_of(whole)
    wait_until(lambda: len(shared.pids()) == 2 and doomed not in shared.pids())


def test_streams_of_all_processes_go_on_when_the_worker_is_killed(shared: Servers) -> None:
    clients = shared.both()
    whole = text_of(clients[0].ask("POST", TEXT, LONG, "admin").body)
    answers = []
    for client in clients:
        client.send("POST", TEXT, LONG, "admin")
        answers.append(client.connection.getresponse())
    begun = [answer.read(300) for answer in answers]
    os.kill(worker_of(shared.server), signal.SIGKILL)
    for first, answer in zip(begun, answers, strict=True):
        assert text_of((first + answer.read()).decode()) == whole
    wait_until(lambda: sample(clients[1], "worker_restarts_total") == 1)


def test_a_new_connection_takes_the_place_of_an_idle_one_of_another_process(
    tmp_path: Path, model: Path
) -> None:
    with two_processes(tmp_path, model, "--max-connections", "3") as servers:
        first, second = servers.pids()
        idle = [servers.client(first) for _ in range(3)]
        newer = servers.client(second)
        assert newer.ask("POST", TEXT, SHORT).status == 200
        wait_until(lambda: sample(newer, "connections", "") <= 3)
        assert idle[0].socket.recv(1) == b"", "the longest idle one was closed"
        servers.server.signal(signal.SIGTERM)
        assert servers.server.wait() == 0


def test_all_processes_drain_before_the_server_ends(tmp_path: Path, model: Path) -> None:
    with two_processes(tmp_path, model) as servers:
        answers = []
        for client in servers.both():
            client.send("POST", TEXT, LONG)
            answers.append(client.connection.getresponse())
        begun = [answer.read(50) for answer in answers]
        servers.server.signal(signal.SIGTERM)
        texts = [
            text_of((one + rest.read()).decode()) for one, rest in zip(begun, answers, strict=True)
        ]
        assert texts[0] == texts[1]
        assert servers.server.wait() == 0


def text_of(stream: str) -> str:
    frames = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "data: [DONE]" in stream
    return "".join(choice["text"] for frame in frames for choice in frame["choices"])


def test_several_processes_need_a_worker(model: Path) -> None:
    refused = quire("serve", model, "--api-processes", "2", "--no-worker")
    assert refused.code == 1 and "--no-worker" in refused.err


def test_a_model_that_cannot_be_loaded_is_said_once(model: Path) -> None:
    refused = quire("serve", model, *SMALL, "--kv-memory", "64KiB", "--port", "0")
    assert refused.code == 1 and "kv_memory" in refused.err
    assert "api_process" not in refused.err and "executor did not answer" not in refused.err


@pytest.mark.parametrize("count", ["0", "65"])
def test_the_number_of_processes_is_bounded(model: Path, count: str) -> None:
    refused = quire("serve", model, "--api-processes", count)
    assert refused.code == 1 and "from 1 to 64" in refused.err


def test_a_port_that_another_server_has_is_refused(tmp_path: Path, model: Path) -> None:
    with two_processes(tmp_path, model) as servers:
        refused = quire("serve", model, *SMALL, "--port", str(servers.server.port))
        assert refused.code == 1 and "cannot listen" in refused.err


def test_a_process_gets_every_setting() -> None:
    keys = KeyRing([ApiKey("a", b"1" * 32, scopes=frozenset({KeyScope.ADMIN}), expires=2e9)])
    settings = ServerSettings(
        keys=keys,
        trusted_proxies=read_networks(["10.0.0.0/8", "::1"]),
        tls_cert=Path("/certificate"),
        model_names=("one", "two"),
        cors_origins=("https://page.example",),
    )
    options = Options(engine={"key_weights": {"a": 2.0}})
    setup = Setup(1, 2, settings, options, "json", "info", has_key_file=True)
    found = Setup.decode(setup.encode())
    assert list(found.settings.keys) == list(keys)
    assert replace(found, settings=replace(found.settings, keys=keys)) == setup
