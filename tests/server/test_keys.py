"""Who is let in: keys from files and the environment, on every route but two."""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from tests.server.servers import NAME, PacedExecutor, Reply, RunningServer, fake_server, settings_of

from quire.core.errors import ConfigError
from quire.server import ServerSettings, read_keys
from quire.server.app import create_routes
from quire.server.errors import ApiError
from quire.server.keys import ROUTES, Access, ApiKey, KeyRing, KeyScope, RequiredScope, digest_of
from quire.server.page import PAGE_FILES
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


def never(_: object) -> object:
    raise AssertionError


class VirtualNow:
    """A clock that stands until it is set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def routes() -> list[tuple[str, str]]:
    """Every route of the application, by method and path."""

    app = create_routes(Service(settings_of(), never))  # type: ignore[arg-type]
    assert isinstance(app, FastAPI)
    found = [
        (method, route.path.replace("{name:path}", NAME))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]
    assert len(found) >= 12
    return [*found, ("GET", "/openapi.json")]


def message_of(reply: Reply, path: str, code: str, kind: str) -> str:
    """What an error says, in the shape of its API: Anthropic's have a type in the place of a code,
    Ollama's are texts."""
    error: Any = reply.error
    if path.startswith("/api/"):
        assert isinstance(error, str)
        return error
    if path.startswith("/v1/messages"):
        assert error["type"] == kind
    else:
        assert error["code"] == code
    return str(error["message"])


@pytest.mark.parametrize(("method", "path"), [*routes(), ("GET", "/nowhere"), ("POST", "/v1")])
def test_every_route_but_health_and_readiness_wants_a_key(
    locked: RunningServer, method: str, path: str
) -> None:
    body: object = {} if method == "POST" else None
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ALICE}"}):
        reply = locked.send(method, path, body, headers)
        if path in ("/health", "/ready", "/ping"):
            assert reply.status == 200
        else:
            assert reply.status == 401, f"{method} {path}"
            assert message_of(reply, path, "invalid_api_key", "authentication_error")
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


def test_digests_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("quire.server.keys.hmac.compare_digest", compare)
    ring = KeyRing([ApiKey(name, digest_of(name * 20)) for name in "abc"])
    found = ring.find("a" * 20)
    assert found is not None
    assert found.name == "a"
    assert ring.find("nobody") is None
    assert ring.find("") is None
    assert len(compared) == 3, "also where nothing was found, and no scan of all the keys"
    assert all(len(one) == len(other) == 32 for one, other in compared), "digests, not keys"


def test_a_digest_that_merely_hashes_alike_opens_nothing() -> None:
    ring = KeyRing([ApiKey("zero", bytes(32))])  # the digest that stands for none found
    assert ring.find("nobody") is None


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
        (f'[keys.a]\nkey = "{ALICE}"\nscopes = []', "must be a list of inference, stats, admin"),
        (f'[keys.a]\nkey = "{ALICE}"\nscopes = "stats"', "scopes must be a list"),
        (f'[keys.a]\nkey = "{ALICE}"\nscopes = ["root"]', "scopes must be a list"),
        (f'[keys.a]\nkey = "{ALICE}"\nscopes = [["stats"]]', "scopes must be a list"),
        (f'[keys.a]\nkey = "{ALICE}"\nexpires = "2027-01-01"', "without quotes"),
        (f'[keys.a]\nkey = "{ALICE}"\nexpires = 2027', "expires must be a date"),
        (f'[keys.a]\nkey = "{ALICE}"\nexpires = 08:00:00', "expires must be a date"),
        (f'[keys.a]\nkey = "{ALICE}"\ntokens_per_day = 0', "tokens_per_day must be an integer"),
        (f'[keys.a]\nkey = "{ALICE}"\ntokens_per_minute = 1e6', "tokens_per_minute must be"),
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


# ---- scopes and expiry


def with_scopes(name: str, *scopes: KeyScope, **fields: Any) -> ApiKey:
    return ApiKey(name, digest_of(secret(name)), scopes=frozenset(scopes), **fields)


def secret(name: str) -> str:
    return f"{name}-0123456789abcdef"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret(name)}"}


@pytest.fixture(scope="module")
def scoped(text_model: Path) -> Iterator[RunningServer]:
    """A key for each scope, named so."""
    ring = KeyRing(with_scopes(scope.value, scope) for scope in KeyScope)
    with fake_server(text_model, keys=ring) as server:
        yield server


ALLOWED = {  # of the keys above, by what a route wants
    RequiredScope.NO_KEY: {"inference", "stats", "admin"},
    RequiredScope.ANY_KEY: {"inference", "stats", "admin"},
    RequiredScope.INFERENCE: {"inference"},
    RequiredScope.STATS: {"stats", "admin"},
    RequiredScope.ADMIN: {"admin"},
}


def answered(path: str) -> tuple[int, ...]:
    """The statuses of a request without content by a key that may send it."""
    if path.startswith(("/v1/files", "/v1/batches")):  # without a folder for them
        return 400, 415, 503
    return (404,) if "{response_id}" in path else (200, 400, 409)


@pytest.mark.parametrize(("method", "path"), routes())
def test_a_route_is_for_keys_with_its_scope(scoped: RunningServer, method: str, path: str) -> None:
    required = ROUTES[path.replace(f"/{NAME}", "/{name:path}")]
    for scope in KeyScope:
        reply = scoped.send(method, path, {} if method == "POST" else None, bearer(scope.value))
        if scope.value in ALLOWED[required]:
            assert reply.status in answered(path), f"{scope} {path}"
        else:
            assert reply.status == 403, f"{scope} {path}"
            message = message_of(reply, path, "insufficient_scope", "permission_error")
            assert f"the scope '{required.value}'" in message


GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "keys-and-limits.md"


@pytest.mark.parametrize("scope", KeyScope)
def test_the_scopes_of_the_routes_are_as_the_guide_says(scope: KeyScope) -> None:
    """Its table has every route that needs the scope, and routes for every key where they show
    more with it."""
    [row] = re.findall(rf"^\| `{scope.value}` \| (.*) \|$", GUIDE.read_text(), re.M)
    named = set(re.findall(r"`(/[^`]*)`", row))
    needed = {path for path, required in ROUTES.items() if required.value is scope}
    assert needed
    assert needed <= named
    assert all(ROUTES[path] is RequiredScope.ANY_KEY for path in named - needed)


def test_only_health_readiness_and_the_page_need_no_key() -> None:
    open_paths = {path for path, required in ROUTES.items() if required is RequiredScope.NO_KEY}
    assert open_paths == {"/health", "/ready", "/ping", *PAGE_FILES}


def test_a_route_that_names_no_scope_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {path: required for path, required in ROUTES.items() if path != "/detokenize"}
    monkeypatch.setattr("quire.server.keys.ROUTES", fewer)
    with pytest.raises(AssertionError, match="/detokenize is not in the table"):
        create_routes(Service(settings_of(), never))  # type: ignore[arg-type]


def test_a_path_written_otherwise_is_no_way_around_a_scope(scoped: RunningServer) -> None:
    for path in ("/metrics/", "/%6detrics", "//metrics", "/metrics?x=1", "/METRICS", "/./metrics"):
        reply = scoped.get(path, bearer("inference"))
        assert reply.status in (307, 403, 404), path
        assert b"quire:" not in reply.body


def test_scopes_and_expiry_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
[keys.plain]
key = "{secret("plain")}"
[keys.all]
key = "{secret("all")}"
scopes = ["inference", "stats", "admin"]
expires = 2027-01-01
tokens_per_minute = 1000
tokens_per_day = 5_000
[keys.zoned]
key = "{secret("zoned")}"
expires = 2027-01-01T02:00:00+02:00
[keys.local]
key = "{secret("local")}"
expires = 2027-01-01T08:00:00
"""
    )
    keys = {key.name: key for key in read_keys(path, {})}
    assert keys["plain"].scopes == {KeyScope.INFERENCE}
    assert keys["plain"].expires is None
    assert keys["all"].scopes == set(KeyScope)
    assert (keys["all"].tokens_per_minute, keys["all"].tokens_per_day) == (1000, 5000)
    new_year = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert keys["all"].expires == keys["zoned"].expires == new_year
    assert keys["local"].expires == new_year + 8 * 3600, "UTC unless it says otherwise"


def test_the_key_of_the_environment_reads_totals_too() -> None:
    [key] = read_keys(None, {"QUIRE_API_KEY": ALICE})
    assert key.scopes == {KeyScope.INFERENCE, KeyScope.STATS}


def test_a_name_is_used_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.default]\nkey = "{ALICE}"')
    with pytest.raises(ConfigError, match="two keys with the name 'default'"):
        read_keys(path, {"QUIRE_API_KEY": BOB})


def test_a_key_expires_at_its_time() -> None:
    clock = VirtualNow(99.9)
    key = with_scopes("old", KeyScope.INFERENCE, expires=100.0)
    access = Access(KeyRing([key]), clock)
    access.check(access.key_of(f"Bearer {secret('old')}"), "/v1/completions")
    clock.now = 100.0
    with pytest.raises(ApiError, match="'old' has expired") as caught:
        access.check(access.key_of(f"Bearer {secret('old')}"), "/v1/completions")
    assert (caught.value.status, caught.value.code) == (401, "expired_api_key")


def test_a_server_refuses_an_expired_key_on_every_route(text_model: Path) -> None:
    ring = KeyRing([with_scopes("old", *KeyScope, expires=1.0), with_scopes("new", *KeyScope)])
    with fake_server(text_model, keys=ring) as server:
        for method, path in routes():
            body: object = {} if method == "POST" else None
            reply = server.send(method, path, body, bearer("old"))
            assert reply.status == (200 if path in ("/health", "/ready", "/ping") else 401), path
            if reply.status == 401:
                message = message_of(reply, path, "expired_api_key", "authentication_error")
                assert "has expired" in message
                assert reply.headers["www-authenticate"] == "Bearer"
            reply = server.send(method, path, body, bearer("new"))
            assert reply.status in answered(path), path


def test_ten_thousand_keys_are_not_searched_one_by_one() -> None:
    ring = KeyRing(ApiKey(f"k{number}", digest_of(f"{number}" * 20)) for number in range(10_000))
    compared = 0

    def compare(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return one == other

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.server.keys.hmac.compare_digest", compare)
        found = ring.find("9999" * 20)
    assert found is not None
    assert (found.name, compared) == ("k9999", 1)


# ---- whose figures a key sees


@pytest.fixture
def busy(text_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server with a long answer of alice's on its way, and one of bob's that has ended."""
    ring = KeyRing(
        [
            with_scopes("alice", KeyScope.INFERENCE, tokens_per_minute=600, tokens_per_day=5000),
            with_scopes("bob", KeyScope.INFERENCE),
            with_scopes("watcher", KeyScope.STATS),
            with_scopes("root", KeyScope.ADMIN),
        ]
    )
    executor = PacedExecutor(num_blocks=1024)
    with fake_server(text_model, executor, keys=ring, state_folder=tmp_path) as server:
        body = {"prompt": [[1, 2, 3]], "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", body, bearer("bob")).status == 200
        executor.step_s = 0.01
        long = {**body, "max_tokens": 400}
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(server.post, "/v1/completions", long, bearer("alice"))
            server.wait_until(lambda: server.engine.snapshot().num_running == 1)
            yield server
            executor.step_s = 0.0
            assert asking.result().status == 200


def test_a_key_sees_its_own_figures_and_no_others(busy: RunningServer) -> None:
    alice = busy.get("/v1/stats", bearer("alice")).json
    assert alice.keys() == {"status", "model", "models", "uptime_s", "key", "own"}
    assert alice["key"] == "alice"
    assert (alice["own"]["num_running"], alice["own"]["num_waiting"]) == (1, 0)
    assert alice["own"]["tokens_today"] == 403, "the most that what runs can use"
    assert alice["own"]["tokens_per_day"]["left"] == 5000 - 403
    assert 600 - 403 <= alice["own"]["tokens_per_minute"]["left"] < 600
    assert 0 < alice["own"]["tokens_per_day"]["resets_in_s"] <= 86_400
    bob = busy.get("/v1/stats", bearer("bob"))
    assert b"alice" not in bob.body
    assert bob.json["own"] == {
        "num_running": 0,
        "num_waiting": 0,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "tokens_today": 7,
        "tokens_per_minute": None,
        "tokens_per_day": None,
    }


@pytest.mark.parametrize("name", ["watcher", "root"])
def test_totals_are_for_keys_with_the_scope(busy: RunningServer, name: str) -> None:
    stats = busy.get("/v1/stats", bearer(name)).json
    assert stats["num_running"] == 1
    assert stats["keys"]["alice"]["num_running"] == 1
    assert stats["keys"]["bob"]["completion_tokens"] == 4
    text = busy.get("/metrics", bearer(name)).body.decode()
    assert f'quire:key_generation_tokens_total{{model_name="{NAME}",key="bob"}} 4' in text
    assert f'quire:key_prompt_tokens_total{{model_name="{NAME}",key="bob"}} 3' in text


def test_without_keys_everybody_sees_the_totals(fake: RunningServer) -> None:
    stats = fake.get("/v1/stats").json
    assert (stats["key"], stats["keys"]) == (None, {})
    assert stats["num_steps"] >= 0
    assert 'key="' not in fake.get("/metrics").body.decode()


@pytest.mark.parametrize("header", ["x-api-key", "api-key", "Authorization"])
def test_a_key_may_come_in_the_headers_of_other_apis(locked: RunningServer, header: str) -> None:
    def status(value: str, **more: str) -> int:
        return locked.get("/v1/models", {header: value, **more}).status

    bearer = "Bearer " if header == "Authorization" else ""
    assert status(bearer + ALICE) == 200
    assert status(bearer + ALICE[:-1]) == 401
    assert status("") == 401
    if not bearer:  # one key counts: a wrong one cannot be tried beside a right one
        assert status(ALICE, Authorization=f"Bearer {BOB}x") == 401
