"""Requests that a web page makes somebody's browser send: Host, Origin, forms, CORS."""

from pathlib import Path

import pytest
from tests.server.raw import exchange, head, status_of
from tests.server.servers import RunningServer, fake_server

from quire.core.errors import ConfigError
from quire.server import ServerSettings

PAGE = "https://app.example.com"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:9", "10.0.0.7", "[fe80::1]"]
)
def test_addresses_and_localhost_are_welcome(fake: RunningServer, host: str) -> None:
    assert fake.get("/health", {"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example.com", "evil.example.com:8000", "localhost.evil.com"]
)
def test_a_name_that_was_rebound_is_refused(fake: RunningServer, host: str) -> None:
    reply = fake.get("/v1/models", {"Host": host})
    assert reply.status == 403
    assert reply.error["code"] == "host_not_allowed"
    assert "--allowed-host" in reply.error["message"]


@pytest.mark.parametrize("host", ["a@localhost", "localhost/x", "[::1", "localhost:port", ""])
def test_a_malformed_host_is_refused(fake: RunningServer, host: str) -> None:
    assert fake.get("/health", {"Host": host}).status in (400, 403)


def test_there_is_one_host_exactly(fake: RunningServer) -> None:
    twice = head("/health", "Host: localhost", "Connection: close", method="GET")
    assert status_of(exchange(fake.port, twice)) == 400
    none = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(fake.port, none)) == 400


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "file://"])
def test_pages_of_other_sites_are_refused(fake: RunningServer, origin: str) -> None:
    reply = fake.post("/tokenize", {"prompt": "hi"}, {"Origin": origin})
    assert reply.status == 403
    assert reply.error["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in reply.headers


def test_a_page_of_the_server_itself_is_welcome(fake: RunningServer) -> None:
    headers = {"Origin": fake.url}
    assert fake.post("/tokenize", {"prompt": "hi"}, headers).status == 200


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""]
)
def test_what_a_form_can_post_is_refused(fake: RunningServer, kind: str) -> None:
    reply = fake.post("/tokenize", b'{"prompt": "hi"}', {"Content-Type": kind})
    assert reply.status == 415
    assert reply.error["code"] == "content_type"


def test_cors_is_off_unless_a_page_is_named(fake: RunningServer, text_model: Path) -> None:
    ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    assert fake.send("OPTIONS", "/v1/completions", headers=ask).status == 403
    with fake_server(text_model, cors_origins=(PAGE,)) as server:
        preflight = server.send("OPTIONS", "/v1/completions", headers=ask)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        reply = server.post("/tokenize", {"prompt": "hi"}, {"Origin": PAGE})
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        other = {**ask, "Origin": "https://other.example.com"}
        assert server.send("OPTIONS", "/v1/completions", headers=other).status == 403


def test_a_name_can_be_allowed(text_model: Path) -> None:
    with fake_server(text_model, allowed_hosts=("quire.example.com",)) as server:
        assert server.get("/health", {"Host": "quire.example.com:80"}).status == 200
        assert server.get("/health", {"Host": "other.example.com"}).status == 403


@pytest.mark.parametrize("origin", ["*", "https://*", "example.com", "https://a/b", "ftp://a"])
def test_an_origin_that_cannot_be_one_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="CORS origin"):
        ServerSettings(cors_origins=(origin,))
