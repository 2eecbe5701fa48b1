"""Who is let in: keys from files and the environment, on every route but two."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from tests.server.servers import NAME, RunningServer, fake_server, settings_of

from quire.core.errors import ConfigError
from quire.server import ServerSettings, read_keys
from quire.server.app import create_app
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.service import Service

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"""
[keys.alice]
key = "{ALICE}"
weight = 2.0
requests_per_minute = 600
max_concurrent = 16

[keys.bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
"""


@pytest.fixture(scope="module")
def locked(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(FILE)
    with fake_server(text_model, keys=read_keys(path, {})) as server:
        yield server


def routes() -> list[tuple[str, str]]:
    """Every route of the application, by method and path."""

    def never(_: object) -> object:
        raise AssertionError

    app = create_app(Service(settings_of(), never))._app  # type: ignore[arg-type]
    assert isinstance(app, FastAPI)
    found = [
        (method, route.path.replace("{name:path}", NAME))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]
    assert len(found) >= 12
    return [*found, ("GET", "/openapi.json")]


@pytest.mark.parametrize(("method", "path"), [*routes(), ("GET", "/nowhere"), ("POST", "/v1")])
def test_every_route_but_health_and_readiness_wants_a_key(
    locked: RunningServer, method: str, path: str
) -> None:
    body: object = {} if method == "POST" else None
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ALICE}"}):
        reply = locked.send(method, path, body, headers)
        if path in ("/health", "/ready"):
            assert reply.status == 200
        else:
            assert reply.status == 401, f"{method} {path}"
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
    assert locked.send(method, path, body, {"Authorization": f"Bearer {BOB}"}).status != 401


def test_a_preflight_that_no_page_sent_wants_a_key_too(locked: RunningServer) -> None:
    ask = {"Access-Control-Request-Method": "POST"}
    assert locked.send("OPTIONS", "/v1/completions", headers=ask).status == 401


def test_the_openai_client_is_told_so(locked: RunningServer) -> None:
    with locked.client(BOB) as client:
        assert client.models.list().data[0].id == NAME
    with locked.client("sk-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("quire.server.keys.hmac.compare_digest", compare)
    ring = KeyRing([ApiKey(name, digest_of(name * 20)) for name in "abc"])
    found = ring.find("a" * 20)
    assert found is not None
    assert found.name == "a"
    assert len(compared) == 3, "the first match does not end the search"
    assert all(len(one) == len(other) == 32 for one, other in compared), "digests, not keys"
    assert ring.find("nobody") is None
    assert ring.find("") is None


def test_without_keys_any_authorization_is_ignored(fake: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Bearer anything"}, {"Authorization": "nonsense"}):
        assert fake.get("/v1/models", headers).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
def test_without_keys_it_listens_on_loopback_alone(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, no_auth=True).host == host
    ring = KeyRing([ApiKey("a", digest_of("a" * 20))])
    assert ServerSettings(host=host, keys=ring).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert ServerSettings(host=host).host == host


def test_keys_come_from_the_environment_too(tmp_path: Path) -> None:
    ring = read_keys(None, {"QUIRE_API_KEY": ALICE})
    found = ring.find(ALICE)
    assert found is not None
    assert found.name == "default"
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    assert len(read_keys(path, {"QUIRE_API_KEY": "another-0123456789"})) == 3
    with pytest.raises(ConfigError, match="'alice' and 'default' are the same"):
        read_keys(path, {"QUIRE_API_KEY": ALICE})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("[keys]", "has no keys"),
        ("keys = 5", "has no keys"),
        ("[other]\nx = 1", "'other' is unknown"),
        ("[keys.a]", "needs either key or sha256"),
        ('[keys.a]\nkey = "short"', "at least 16 characters"),
        ('[keys.a]\nkey = "with blanks in between"', "without blanks"),
        ('[keys.a]\nsha256 = "abc"', "64 hexadecimal digits"),
        (f'[keys.a]\nkey = "{ALICE}"\nweight = 0', "weight must be from 0.01 to 100"),
        (f'[keys.a]\nkey = "{ALICE}"\nweight = true', "weight must be from 0.01 to 100"),
        (f'[keys.a]\nkey = "{ALICE}"\nmax_concurrent = 0', "max_concurrent must be"),
        (f'[keys.a]\nkey = "{ALICE}"\nrequests_per_minute = nan', "requests_per_minute must be"),
        (f'[keys.a]\nkey = "{ALICE}"\nlimit = 5', "has no 'limit'"),
        (f'[keys."a b"]\nkey = "{ALICE}"', "a name is up to 64 letters"),
        ("[keys.a", "is no TOML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(path, {})
    assert ALICE not in str(caught.value), "a key is never repeated"


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none.toml", os.environ)


def test_prefixes_are_not_shared_between_keys(locked: RunningServer) -> None:
    prompt = list(range(3, 103))

    def cached(key: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        reply = locked.post("/v1/completions", body, {"Authorization": f"Bearer {key}"})
        found: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(ALICE) == 0
    assert cached(ALICE) > 90
    assert cached(BOB) == 0, "another key must not learn what was asked before"
