"""What a request may weigh and how long it may take to come; what a key may ask for."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.server.raw import exchange, head, read_all, status_of
from tests.server.servers import (
    PATIENCE_S,
    PacedExecutor,
    RunningServer,
    fake_server,
    wait_until,
)

from quire.core.errors import RequestCancelledError, StepTimeoutError
from quire.server.errors import ApiError, as_api_error
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.model_service import State
from quire.server.quotas import RequestLimits

KEY = "k" * 20
JSON = "Content-Type: application/json"


def test_a_large_body_is_refused_before_it_is_read(fake: RunningServer) -> None:
    limit = fake.service.settings.max_body_bytes
    answer = exchange(fake.port, head("/tokenize", JSON, f"Content-Length: {limit + 1}"))
    assert status_of(answer) == 413
    assert b"body_too_large" in answer


def test_a_body_without_a_length_is_counted(text_model: Path) -> None:
    with fake_server(text_model, max_body_bytes=1000) as server:
        chunk = b"200\r\n" + b"x" * 512 + b"\r\n"
        start = head("/tokenize", JSON, "Transfer-Encoding: chunked")
        assert status_of(exchange(server.port, start, *[chunk] * 50)) == 413
        assert server.post("/tokenize", {"prompt": "x" * 900}).status == 400, "over the context"
        assert server.post("/tokenize", {"prompt": "hi"}).status == 200


def test_a_body_that_does_not_come_is_given_up(text_model: Path) -> None:
    with fake_server(text_model, body_timeout_s=0.2) as server:
        start = head("/tokenize", JSON, "Content-Length: 100")
        assert status_of(exchange(server.port, start, b'{"prompt"')) == 408


def test_bodies_together_have_a_limit(text_model: Path) -> None:
    with fake_server(text_model, max_buffered_bytes=100_000, body_timeout_s=60) as server:
        start = head("/tokenize", JSON, "Content-Length: 90001")
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as slow:
            slow.sendall(start + b"x" * 90_000)
            wait_until(lambda: server.post("/tokenize", {"prompt": "y" * 50_000}).status == 503)
        wait_until(lambda: server.post("/tokenize", {"prompt": "hi"}).status == 200)


def test_large_headers_are_refused(fake: RunningServer) -> None:
    many = [f"X-Filler-{number}: {'x' * 1000}" for number in range(100)]
    assert status_of(exchange(fake.port, head("/health", *many, method="GET"))) == 431
    long = head("/health?" + "x" * 100_000, method="GET")
    assert status_of(exchange(fake.port, long)) == 431
    endless = [b"GET /health HTTP/1.1\r\nX-Endless: ", *[b"x" * 4096] * 40]
    assert status_of(exchange(fake.port, *endless)) == 431
    assert fake.get("/health").status == 200


def test_trailers_are_headers_too(fake: RunningServer) -> None:
    lines = (JSON, "Transfer-Encoding: chunked", "Connection: close")
    start = head("/tokenize", *lines) + b"2\r\n{}\r\n0\r\n"
    answer = exchange(fake.port, start, *[b"X-Trailer: " + b"x" * 4000 + b"\r\n"] * 40)
    assert status_of(answer) == 431
    few = exchange(fake.port, start + b"X: y\r\n\r\n")
    assert status_of(few) == 400, "its body has no prompt"


def test_headers_that_do_not_come_are_given_up(text_model: Path) -> None:
    with fake_server(text_model, header_timeout_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as silent:
            assert read_all(silent) == b"", "a connection without a request is closed"
        drops = [b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 20]
        assert status_of(exchange(server.port, *drops, pause_s=0.05)) == 408
    with fake_server(text_model, header_timeout_s=2.0) as server:
        twice = b"".join([head("/health", method="GET")] * 2)
        second = exchange(server.port, twice, b"GET /hea", pause_s=0.02)
        assert second.count(b"200 OK") == 2
        assert b"408 Request Timeout" in second, "also the later ones of a connection"


def test_a_connection_may_rest_between_requests(text_model: Path) -> None:
    with fake_server(text_model, header_timeout_s=2.0, keep_alive_s=600.0) as server:
        ask = head("/health", method="GET")
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as kept:
            for rest_s in (2.5, 0.0):
                kept.sendall(ask)
                assert b"200 OK" in kept.recv(1 << 16)
                time.sleep(rest_s)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"[" * 100_000,
        b'{"prompt": ' * 1000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"1" * 5000,
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "max_tokens": 1e999}',
        b'{"prompt": "hi", "seed": ' + b"9" * 4000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
def test_a_body_that_is_nonsense_is_a_400(fake: RunningServer, path: str, body: bytes) -> None:
    reply = fake.post(path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert fake.post("/tokenize", {"prompt": "hi"}).status == 200


def test_the_number_of_prompts_is_bounded(fake: RunningServer) -> None:
    reply = fake.post("/v1/completions", {"prompt": ["x"] * 257})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_what_another_process_would_answer_says_when_to_come_back(text_model: Path) -> None:
    cut = as_api_error(RequestCancelledError("r"), (), is_draining=True)
    hung = as_api_error(StepTimeoutError("the step"), (), is_draining=False)
    for error in (cut, hung):
        assert error.status == 503
        assert dict(error.headers)["retry-after"] == "5"
    with fake_server(text_model) as server:
        server.service.first.state = State.STUCK
        reply = server.post("/v1/completions", {"prompt": "hi"})
        assert (reply.status, reply.error["code"]) == (503, "stuck")
        assert reply.headers["retry-after"] == "5"
        server.service.first.state = State.READY


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_an_encoded_body_is_a_415(fake: RunningServer, encoding: str) -> None:
    reply = fake.post("/tokenize", b"\x1f\x8b", {"Content-Encoding": encoding})
    assert (reply.status, reply.error["code"]) == (415, "content_encoding")
    plain = fake.post("/tokenize", {"prompt": "hi"}, {"Content-Encoding": "identity"})
    assert plain.status == 200


# ---- keys


def test_a_key_has_so_many_requests_open_and_no_more(text_model: Path) -> None:
    ring = KeyRing([ApiKey("few", digest_of(KEY), max_concurrent=2)])
    executor = PacedExecutor(step_s=0.1)
    with fake_server(text_model, executor, keys=ring) as server:
        server.headers["Authorization"] = f"Bearer {KEY}"
        body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}
        statuses: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: statuses.append(server.post("/v1/completions", body).status)
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(statuses) == 4)  # the others have come while two were running
        executor.step_s = 0.0
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200, 200, 429, 429, 429, 429]
        assert server.post("/v1/completions", body).status == 200, "places come free again"


def test_a_key_that_leaves_gives_its_place_back(text_model: Path) -> None:
    ring = KeyRing([ApiKey("one", digest_of(KEY), max_concurrent=1)])
    with fake_server(text_model, PacedExecutor(step_s=0.1), keys=ring) as server:
        server.headers["Authorization"] = f"Bearer {KEY}"
        asked = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        lines = (JSON, f"Content-Length: {len(body)}", f"Authorization: Bearer {KEY}")
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as leaving:
            leaving.sendall(head("/v1/completions", *lines) + body)
            assert leaving.recv(100).startswith(b"HTTP/1.1 200")
            assert server.post("/tokenize", {"prompt": "hi"}).status == 429
        wait_until(lambda: server.post("/tokenize", {"prompt": "hi"}).status == 200)


def test_a_rate_is_kept_and_its_refusal_says_when() -> None:
    now = 0.0
    limits = RequestLimits(lambda: now)
    key = ApiKey("a", b"", requests_per_minute=60)
    other = ApiKey("b", b"", requests_per_minute=60)
    for _ in range(10):  # ten seconds' worth at once
        limits.enter(key)
        limits.leave(key)
    with pytest.raises(ApiError) as caught:
        limits.enter(key)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert dict(caught.value.headers) == {"retry-after": "1", "retry-after-ms": "1000"}
    limits.enter(other)
    now = 0.99
    with pytest.raises(ApiError, match="more than 60 prompts a minute"):
        limits.enter(key)
    now = 1.0
    limits.enter(key)


def test_a_concurrency_refusal_says_when_a_place_comes_free() -> None:
    now = 0.0
    limits = RequestLimits(lambda: now)
    key = ApiKey("a", b"", max_concurrent=4)
    for _ in range(4):
        limits.enter(key)
    for number in range(1, 41):  # one ends each half second, and another takes its place
        now = number / 2
        limits.leave(key)
        limits.enter(key)
    with pytest.raises(ApiError, match="has 4 requests open; its limit is 4") as caught:
        limits.enter(key)
    assert caught.value.retry_after_s == pytest.approx(0.5, rel=0.05)
