"""Whatever is asked of whatever path: a small answer in OpenAI's shape, and never a failure."""

import json
import logging
import re
from pathlib import Path

import pytest
from tests.server.raw import exchange, status_of
from tests.server.servers import RunningServer, fake_server

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
GETS = ("/health", "/ready", "/v1/models", "/metrics", "/v1/stats", "/docs", "/openapi.json")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def ask(server: RunningServer, method: str, target: bytes) -> bytes:
    lines = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return exchange(
        server.port, method.encode() + b" " + target + b" HTTP/1.1\r\n" + lines + b"\r\n"
    )


@pytest.mark.parametrize("path", [*POSTS, *GETS])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_a_path_does_not_have_is_a_405_that_says_which(
    fake: RunningServer, path: str, method: str
) -> None:
    answer = ask(fake, method, path.encode())
    wanted = "POST" if path in POSTS else "GET"
    if method == wanted or (method, path) == ("HEAD", "/openapi.json"):
        assert status_of(answer) in (200, 400)
        return
    assert status_of(answer) == 405
    [allowed] = re.findall(rb"\r\nallow: ([^\r]*)", answer, re.IGNORECASE)
    assert wanted in allowed.decode().split(", ")
    if method == "HEAD":
        assert body_of(answer) == b""
    else:
        assert "is not for" in json.loads(body_of(answer))["error"]["message"]


@pytest.mark.parametrize(
    "target",
    [
        b"/v1",
        b"/static",
        b"/static/..%2fpage.py",
        b"/static/../page.py",
        b"/nothing/here",
        b"/" + b"x" * 60_000,
        b"/v1/models/" + b"x" * 60_000,
        b"/v1/models/%00%ff%20%2F..%2f",
        b"/v1/models/..%2f..%2fetc%2fpasswd",
        b"/%2e%2e/%2e%2e/etc/passwd",
        b"/../../etc/passwd",
        b"//v1//models",
        b"/V1/MODELS",
        b"/v1/models;x=y",
        b"/%f0%9f%92%a9",
        b"/%ff%fe",
        b"/v1/models/%ed%a0%80",
        b"/v1/chat/completions%00",
        b"/%",
        b"/%zz?%zz=%zz",
        b"/nothing?" + b"a=b&" * 10_000,
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_path_that_is_not_there_is_a_small_404(
    fake: RunningServer, method: str, target: bytes
) -> None:
    answer = ask(fake, method, target)
    assert status_of(answer) in (404, 405)
    assert len(answer) < 2000
    error = json.loads(body_of(answer))["error"]
    assert error["type"] == "invalid_request_error"


def test_a_slash_too_many_leads_to_the_path_without_it(fake: RunningServer) -> None:
    for target in (b"/health/", b"/docs/" + b"%2f" * 5000):
        answer = ask(fake, "GET", target)
        assert status_of(answer) == 307
        assert re.search(rb"\r\nlocation: http://127\.0\.0\.1/(health|docs)\r", answer)
        assert len(answer) < 2000


def test_a_query_is_nothing_to_a_path(fake: RunningServer) -> None:
    for query in ("?", "?a=b", "?" + "a=b&" * 1000, "?%ff=%00"):
        assert fake.get("/health" + query).status == 200
        assert fake.post("/tokenize" + query, {"prompt": "hi"}).status == 200


def test_what_a_path_looks_like_does_not_fill_the_log(
    text_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(text_model) as server:
        logger = logging.getLogger("quire.server")
        caplog.set_level("INFO", logger.name)
        monkeypatch.setattr(logger, "propagate", True)
        server.get("/" + "x" * 50_000)
        server.wait_until(lambda: bool(caplog.records))
    paths = [getattr(record, "fields", {}).get("path", "") for record in caplog.records]
    assert any(path.startswith("/xxx") for path in paths)
    assert max(map(len, paths)) <= 200
