"""What holds a connection: trickles, floods, silence, readers that do not read, odd requests."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.cli.program import environment
from tests.server.processes import serving
from tests.server.raw import exchange, head, read_all, status_of
from tests.server.servers import (
    NAME,
    PATIENCE_S,
    PacedExecutor,
    RunningServer,
    fake_server,
    wait_until,
)
from tests.server.test_streams import completion_bytes, events

from quire.server.connections import Connections, address_group
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing, digest_of

KEY = "k" * 20
JSON = "Content-Type: application/json"
BODY = b'{"prompt": "hi"}'
ENDLESS = "Content-Length: 1000000000"


@pytest.fixture(scope="module")
def short(text_model: Path) -> Iterator[RunningServer]:
    """Deadlines of fractions of a second."""
    deadlines: dict[str, Any] = {
        "linger_timeout_s": 0.3,
        "unread_timeout_s": 0.5,
        "header_timeout_s": 2.0,
    }
    with fake_server(text_model, max_body_bytes=100_000, **deadlines) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def is_closed_while_it_trickles(connection: socket.socket) -> bool:
    """Send a byte now and then until the server has closed."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            connection.sendall(b"x")
        except OSError:
            return True
        time.sleep(0.02)
    return False


# ---- what is answered before it was read


@pytest.mark.parametrize(
    ("status", "start"),
    [
        (200, head("/health", ENDLESS, method="GET")),
        (200, head("/health", "Transfer-Encoding: chunked", method="GET") + b"fffffff\r\n"),
        (200, head("/health", "Content-Length: 100", method="GET")),
        (404, head("/nowhere", ENDLESS, method="GET")),
        (405, head("/health", ENDLESS, method="PUT")),
        (413, head("/tokenize", JSON, ENDLESS)),
        (415, head("/tokenize", ENDLESS)),
        (403, head("/tokenize", JSON, ENDLESS).replace(b"127.0.0.1", b"evil.example.com")),
        (400, head("/tokenize", JSON, "Transfer-Encoding: chunked") + b"oops\r\n"),
        (431, head("/tokenize", *[f"X-{number}: y" for number in range(300)])),
    ],
)
def test_what_follows_an_answer_holds_no_connection(
    short: RunningServer, status: int, start: bytes
) -> None:
    with connect(short) as connection:
        connection.sendall(start)
        assert status_of(connection.recv(1 << 16)) == status
        assert is_closed_while_it_trickles(connection)
    wait_until(lambda: short.service.connections.num_open == 0)


def test_a_wrong_key_holds_no_connection(text_model: Path) -> None:
    ring = KeyRing([ApiKey("a", digest_of(KEY))])
    with (
        fake_server(text_model, keys=ring, linger_timeout_s=0.3) as server,
        connect(server) as connection,
    ):
        connection.sendall(head("/v1/completions", JSON, ENDLESS))
        assert status_of(connection.recv(1 << 16)) == 401
        assert is_closed_while_it_trickles(connection)


def test_a_flood_after_an_answer_is_cut_by_its_size(text_model: Path) -> None:
    with fake_server(text_model, max_body_bytes=100_000, linger_timeout_s=600) as server:
        with connect(server) as connection:
            connection.sendall(head("/health", ENDLESS, method="GET"))
            with pytest.raises(OSError):
                while True:
                    connection.sendall(b"x" * 100_000)
        assert server.service.connections.cut["linger"] == 1


def test_a_short_body_that_comes_late_keeps_its_connection(fake: RunningServer) -> None:
    with connect(fake) as connection:
        connection.sendall(head("/health", "Content-Length: 5", method="GET"))
        assert b"connection: close" not in connection.recv(1 << 16)
        connection.sendall(b"hello" + head("/ready", method="GET"))
        assert b'{"status":"ready"}' in connection.recv(1 << 16)


def test_at_64_descriptors_others_are_still_served(text_model: Path) -> None:
    """A hundred connections that each send a byte now and then, and come back when closed."""
    shell = f'ulimit -n 64; exec {sys.executable} -m quire.cli serve "$@"'
    command = ["sh", "-c", shell, "sh"]
    small = ("--device", "reference", "--kv-memory", "4MiB")
    with serving(text_model, *small, command=command) as server:
        is_over = threading.Event()
        starts = (
            head("/health", ENDLESS, method="GET"),
            b"GET /health HTTP/1.1\r\nX: ",
            head("/tokenize", JSON, "Content-Length: 1000"),
            b"",
        )

        def hold(start: bytes) -> None:
            while not is_over.is_set():
                try:
                    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
                        connection.sendall(start)
                        while not is_over.is_set():
                            connection.sendall(b"x" if start else b"")
                            time.sleep(0.1)
                except OSError:
                    time.sleep(0.1)

        threads = [threading.Thread(target=hold, args=[starts[i % 4]]) for i in range(100)]
        for thread in threads:
            thread.start()
        try:
            statuses = []
            for _ in range(20):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request("POST", "/tokenize", BODY, {"Content-Type": "application/json"})
                statuses.append(connection.getresponse().status)
                connection.close()
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert statuses == [200] * 20


# ---- a body over the limit is answered, and the answer can be read


def too_large(chunked: bool) -> Any:
    """Over the limit of 4 MiB, and more than the system's buffers take."""
    parts = [b'{"prompt": "', *[b"x" * 1_000_000] * 12, b'"}']
    return iter(parts) if chunked else b"".join(parts)


@pytest.mark.parametrize("chunked", [False, True])
def test_http_client_reads_the_413(fake: RunningServer, chunked: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", fake.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/tokenize", too_large(chunked), headers, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_httpx_reads_the_413(fake: RunningServer, chunked: bool) -> None:
    with httpx2.Client(timeout=PATIENCE_S) as client:
        answer = client.post(
            f"{fake.url}/tokenize",
            content=too_large(chunked),
            headers={"Content-Type": "application/json"},
        )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_the_openai_client_reads_the_413(fake: RunningServer) -> None:
    with fake.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=NAME, prompt="x" * 12_000_000)
    assert caught.value.status_code == 413
    assert caught.value.code == "body_too_large"


@pytest.mark.parametrize("header", ["Expect:", "Expect: 100-continue"])
@pytest.mark.parametrize("chunked", [False, True])
def test_curl_reads_the_413(
    fake: RunningServer, tmp_path: Path, chunked: bool, header: str
) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(too_large(chunked=False))
    encoding = ["-H", "Transfer-Encoding: chunked"] if chunked else []
    command = ["curl", "-sS", "-w", "\n%{http_code}", "-H", JSON, "-H", header, *encoding]
    command += ["--data-binary", f"@{file}", f"{fake.url}/tokenize"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), check=False
    )
    body, _, status = run.stdout.rpartition("\n")
    assert (run.returncode, status) == (0, "413"), run.stderr
    assert json.loads(body)["error"]["code"] == "body_too_large"


# ---- clients that do not read


def unread_connection(server: RunningServer) -> socket.socket:
    """One whose own buffer is as small as the system allows."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    return connection


def test_who_never_reads_is_let_go_of(short: RunningServer) -> None:
    """Page after page asked for and none taken: the answers fill every buffer on the way."""
    ask = head("/openapi.json", method="GET")
    before = short.service.connections.cut.total()
    with unread_connection(short) as connection:

        def ask_again() -> bool:
            with suppress(OSError):
                connection.sendall(ask)
            return short.service.connections.cut.total() > before

        wait_until(ask_again)
    wait_until(lambda: short.service.connections.num_open == 0)


def test_a_stream_that_nobody_reads_ends(text_model: Path) -> None:
    executor = PacedExecutor(num_blocks=2048, max_context=20_000)
    with fake_server(text_model, executor, unread_timeout_s=0.5) as server:
        with unread_connection(server) as connection:
            connection.sendall(completion_bytes(8_000, logprobs=20))
            wait_until(lambda: server.service.connections.cut["unread"] == 1)
        wait_until(lambda: server.service.connections.num_open == 0)
        server.wait_until_idle()


# ---- an answer is never written into


@pytest.mark.parametrize(
    "more",
    [b"GET /hea", b"\0", b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 80_000],
)
def test_what_comes_during_a_stream_is_not_answered_within_it(
    text_model: Path, more: bytes
) -> None:
    executor = PacedExecutor(step_s=0.02)
    kept = completion_bytes(60).replace(b"Connection: close\r\n", b"")
    with (
        fake_server(text_model, executor, header_timeout_s=0.2) as server,
        connect(server) as connection,
    ):
        connection.sendall(kept)
        answer = connection.recv(1)
        connection.sendall(more)
        answer += read_all(connection)
    assert answer.count(b"HTTP/1.1") == 1
    *_, last, done = events(answer)
    assert '"finish_reason": "length"' in last
    assert done == "data: [DONE]"


def test_half_a_head_behind_a_whole_request_is_given_up(text_model: Path) -> None:
    with fake_server(text_model, header_timeout_s=0.3, keep_alive_s=3600.0) as server:
        answer = exchange(server.port, head("/health", method="GET") + b"GET /hea")
        assert answer.count(b"200 OK") == 1
        assert answer.count(b"408 Request Timeout") == 1


def test_a_line_break_behind_an_answer_is_the_start_of_a_head(text_model: Path) -> None:
    with (
        fake_server(text_model, header_timeout_s=0.3, keep_alive_s=3600.0) as server,
        connect(server) as connection,
    ):
        connection.sendall(head("/health", method="GET"))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        response.read()
        connection.sendall(b"\r\n")
        assert status_of(read_all(connection)) == 408


def test_requests_before_a_broken_one_are_answered(fake: RunningServer) -> None:
    ask = head("/health", method="GET")
    answer = exchange(fake.port, ask + ask + b"\0garbage")
    assert answer.count(b"200 OK") == 2
    assert b"HTTP/1.1 400" not in answer


def test_a_flood_of_pipelined_requests_is_bounded(fake: RunningServer) -> None:
    answer = exchange(fake.port, head("/health", method="GET") * 5000)
    assert 1 <= answer.count(b"200 OK") <= 10
    assert answer.count(b"connection: close") == 1
    assert fake.get("/health").status == 200


def test_who_leaves_with_requests_pipelined_ends_the_first(text_model: Path) -> None:
    with fake_server(text_model, PacedExecutor(step_s=0.05)) as server:
        with connect(server) as connection:
            asked = completion_bytes(400).replace(b"Connection: close\r\n", b"")
            connection.sendall(asked + head("/health", method="GET"))
            assert connection.recv(1)
        server.wait_until_idle()
        [(reason, count)] = server.engine.snapshot().stats.requests_ended.items()
        assert (reason, count) == ("cancelled", 1)


# ---- requests that others might read differently


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 16", "Content-Length: 16"),
        ("Content-Length: 16", "Content-Length: 2"),
        ("Content-Length: 16, 16",),
        ("Content-Length: 16", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 16"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Content-Length: -1",),
        ("Content-Length: +16",),
        ("Content-Length: 99999999999999999999999",),
        ("Content-Length: 16", "X: a\0b"),
        ("Content-Length: 16", "X\0: a"),
        ("Content-Length: 16", "X: a\nY: b"),
        ("Content-Length: 16", "X: a\rY: b"),
        ("Content-Length: 16", "X: a\r\n b"),
    ],
)
def test_an_ambiguous_request_is_refused_and_its_connection_closed(
    fake: RunningServer, lines: tuple[str, ...]
) -> None:
    body = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"
    smuggled = head("/health", method="GET")
    answer = exchange(fake.port, head("/tokenize", JSON, *lines) + body + smuggled)
    assert status_of(answer) in (400, 501)
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "http"


@pytest.mark.parametrize("chunk", [b"fffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n", b"2;a\nb\r\n"])
def test_a_broken_chunk_is_a_400(fake: RunningServer, chunk: bytes) -> None:
    start = head("/tokenize", JSON, "Transfer-Encoding: chunked")
    assert status_of(exchange(fake.port, start + chunk)) == 400


def test_bare_line_feeds_are_refused(fake: RunningServer) -> None:
    ask = head("/health", method="GET").replace(b"\r\n", b"\n")
    assert status_of(exchange(fake.port, ask)) == 400


def test_a_body_in_crumbs_is_refused(fake: RunningServer) -> None:
    start = head("/tokenize", JSON, "Transfer-Encoding: chunked")
    assert status_of(exchange(fake.port, start + b"1\r\nx\r\n" * 40_000)) == 413
    few = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    whole = head("/tokenize", JSON, "Transfer-Encoding: chunked", "Connection: close") + few
    assert status_of(exchange(fake.port, whole)) == 200


def test_a_chunk_extension_without_an_end_is_given_up(text_model: Path) -> None:
    with (
        fake_server(text_model, body_timeout_s=0.3, linger_timeout_s=0.3) as server,
        connect(server) as connection,
    ):
        start = head("/tokenize", JSON, "Transfer-Encoding: chunked")
        connection.sendall(start + b"5;ext=")
        assert is_closed_while_it_trickles(connection)


@pytest.mark.parametrize("wish", ["websocket", "h2c"])
def test_a_wish_for_another_protocol_is_left_unheard(fake: RunningServer, wish: str) -> None:
    """With its body: Java's client wishes for h2c whenever it posts."""
    lines = (JSON, "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {wish}", "HTTP2-Settings: AA")
    ask = head("/tokenize", *lines, f"Content-Length: {len(BODY)}") + BODY
    last = head("/health", "Connection: close", method="GET")
    answer = exchange(fake.port, ask, ask[:40], ask[40:], last, pause_s=0.02)
    assert answer.count(b"200 OK") == 3
    assert answer.count(b'"tokens"') == 2


def test_a_whole_urls_host_goes_before_the_header(fake: RunningServer) -> None:
    def ask(url: str) -> int:
        return status_of(exchange(fake.port, head(url, "Connection: close", method="GET")))

    assert ask("http://localhost/health") == 200
    assert ask("http://evil.example.com/health") == 403
    assert ask("http://evil.example.com") == 400


def test_http_1_0_gets_an_answer_without_chunks(fake: RunningServer) -> None:
    ask = completion_bytes(4).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = exchange(fake.port, ask)
    assert b"transfer-encoding" not in answer
    body = answer.partition(b"\r\n\r\n")[2]
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


# ---- how many


def test_a_connection_too_many_is_told_when_to_come_back(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.05)
    with fake_server(text_model, executor, max_connections=2) as server:
        with connect(server) as first, connect(server) as second:
            for busy in (first, second):
                busy.sendall(completion_bytes(400))
                assert busy.recv(1)
            refused = server.get("/health")
            assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "1"
            for _ in range(40):  # those that are refused do not add up
                connect(server).close()
        wait_until(lambda: server.service.connections.num_open == 0)
        assert server.get("/health").status == 200
        assert 'limit="connections"' in server.get("/metrics").body.decode()


def test_idle_connections_give_way(text_model: Path) -> None:
    with fake_server(text_model, max_connections=4) as server:
        idle = [connect(server) for _ in range(4)]
        idle[0].sendall(head("/health", method="GET"))
        assert idle[0].recv(1)
        for _ in range(10):
            assert server.get("/health").status == 200
        for connection in idle:
            connection.close()


class Client:
    def __init__(self) -> None:
        self.has_left = False

    def close_now(self) -> None:
        self.has_left = True


def test_an_address_has_its_share_and_loopback_all() -> None:
    connections = Connections(16)
    clients = [Client() for _ in range(20)]
    groups = [connections.enter(client, "10.0.0.1") for client in clients[:8]]
    with pytest.raises(ApiError) as caught:
        connections.enter(clients[8], "10.0.0.1")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    connections.leave(clients[8], None)
    assert connections.num_open == 8
    connections.leave(clients[0], groups[0])
    connections.enter(clients[0], "10.0.0.1")
    for client in clients[9:17]:
        assert connections.enter(client, "127.0.0.1") is None
    assert connections.num_open == 16
    assert not any(client.has_left for client in clients)
    connections.enter(clients[17], "::1")
    assert clients[1].has_left, "the longest idle"


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.9", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("", None),
    ],
)
def test_limits_are_by_address_or_subscriber(address: str, group: str | None) -> None:
    assert address_group(address) == group


def test_nothing_is_left_over(text_model: Path) -> None:
    """Descriptors after two hundred connections of every odd kind are those from before."""
    with fake_server(text_model, linger_timeout_s=0.2, header_timeout_s=0.2) as server:
        wait_until(lambda: server.get("/health").status == 200)
        wait_until(lambda: server.service.connections.num_open == 0)
        before = len(os.listdir("/proc/self/fd"))
        kinds = [
            b"",
            b"GET /hea",
            b"\0\0",
            head("/health", ENDLESS, method="GET") + b"x" * 1000,
            head("/health", method="GET") * 30,
            head("/tokenize", JSON, "Content-Length: 100") + b"{",
        ]
        held = []
        for number in range(200):
            held.append(connect(server))
            held[-1].sendall(kinds[number % len(kinds)])
            if number % 3:
                held.pop().close()
        for connection in held:
            connection.close()
        wait_until(lambda: server.service.connections.num_open == 0)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        connections = server.service.connections
        assert not connections._idle
        assert not connections._lingering
        assert not connections._refused
