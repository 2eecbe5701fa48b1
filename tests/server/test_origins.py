"""Requests that a web page makes somebody's browser send: Host, Origin, forms, CORS."""

from pathlib import Path

import pytest
from tests.server.raw import exchange, head, status_of
from tests.server.servers import RunningServer, fake_server

from quire.core.errors import ConfigError
from quire.server import ServerSettings
from quire.server.errors import ApiError
from quire.server.origins import check_origin, cors_headers

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


@pytest.mark.parametrize(
    "origin",
    [
        *(PAGE, "null", "file://", "http://localhost.evil.com", "http://127.0.0.1.evil.com"),
        *("http://localhost@evil.com", "chrome-extension://localhost", "http://10.0.0.7:8000"),
        *("http://localhost:1/x", "localhost:1"),
    ],
)
def test_pages_of_other_sites_are_refused(fake: RunningServer, origin: str) -> None:
    reply = fake.post("/tokenize", {"prompt": "hi"}, {"Origin": origin})
    assert reply.status == 403
    assert reply.error["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in reply.headers


def test_a_page_of_the_server_itself_is_welcome(fake: RunningServer) -> None:
    headers = {"Origin": fake.url}
    assert fake.post("/tokenize", {"prompt": "hi"}, headers).status == 200


@pytest.mark.parametrize("origin", ["http://localhost:1", "https://127.0.0.1", "http://[::1]:9"])
def test_a_web_app_on_this_machine_may_use_a_server_on_loopback(
    fake: RunningServer, text_model: Path, origin: str
) -> None:
    reply = fake.post("/tokenize", {"prompt": "hi"}, {"Origin": origin})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert fake.send("OPTIONS", "/v1/completions", headers=ask).status == 204
    # Its Host must be right all the same: a name that was rebound is no localhost.
    rebound = {"Origin": origin, "Host": "evil.example.com"}
    assert fake.post("/tokenize", {"prompt": "hi"}, rebound).status == 403


def test_a_web_app_on_its_users_machine_may_not_use_a_server_elsewhere() -> None:
    headers = [(b"host", b"10.0.0.7"), (b"origin", b"http://localhost:1")]
    beyond = ServerSettings(host="0.0.0.0", no_auth=True)
    assert cors_headers(headers, beyond) == []
    with pytest.raises(ApiError, match="--cors-origin"):
        check_origin(headers, beyond)
    check_origin(headers, ServerSettings())


def test_a_preflight_admits_the_headers_of_known_clients_alone(fake: RunningServer) -> None:
    known = [
        *("authorization", "x-api-key", "x-stainless-retry-count", "anthropic-version"),
        *("openai-organization", "anthropic-dangerous-direct-browser-access", "content-type"),
    ]
    others = ["x-forwarded-for", "cookie", "x-stainless-a: b", *map(str, range(99))]
    asked = ",".join((*known, *others))
    ask = {
        "Origin": "http://localhost:1",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked.upper(),
    }
    reply = fake.send("OPTIONS", "/v1/chat/completions", headers=ask)
    assert reply.status == 204
    allowed = set(reply.headers["access-control-allow-headers"].split(", "))
    assert allowed == {*known, "x-request-id"}


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


def test_names_are_the_same_in_any_case(text_model: Path) -> None:
    with fake_server(text_model, allowed_hosts=("LLM.Example.com",)) as server:
        assert server.get("/health", {"Host": "llm.example.COM"}).status == 200
        assert server.get("/health", {"Host": "example.com"}).status == 403


@pytest.mark.parametrize("host", ["a b", "", "llm.example.com:80", "a,b", "https://a"])
def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="expected a name such as llm"):
        ServerSettings(allowed_hosts=(host,))
    ServerSettings(allowed_hosts=("*", "llm-1.example.com", "localhost"))


@pytest.mark.parametrize("origin", ["*", "https://*", "example.com", "https://a/b", "ftp://a"])
def test_an_origin_that_cannot_be_one_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="CORS origin"):
        ServerSettings(cors_origins=(origin,))
