"""Keys are read again on SIGHUP, and nobody who is being served notices."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.processes import serving
from tests.server.servers import NAME, PacedExecutor, RunningServer, fake_server, wait_until

from quire.core.errors import ConfigError
from quire.server import read_keys
from quire.server.keys import KeyChanges, KeyRing
from quire.server.usage_file import FILE_NAME


def secret(name: str) -> str:
    return f"{name}-0123456789abcdef"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret(name)}"}


def table(name: str, **fields: Any) -> str:
    lines = [f"[keys.{name}]", f'key = "{secret(name)}"']
    return "\n".join([*lines, *(f"{field} = {json.dumps(v)}" for field, v in fields.items()), ""])


ADMIN = table("root", scopes=["admin"])


class Keys:
    """A file of keys, and the server that uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server: RunningServer

    def write(self, *tables: str) -> None:
        self.path.write_text("".join([*tables, ADMIN]))

    def reload(self) -> KeyChanges:
        reloading = self.server.service.reload_keys()
        return asyncio.run_coroutine_threadsafe(reloading, self.server.loop).result()

    def status(self, name: str) -> int:
        body = {"prompt": [[1, 2]], "max_tokens": 4, "ignore_eos": True}
        return self.server.post("/v1/completions", body, bearer(name)).status


@pytest.fixture
def keys(text_model: Path, tmp_path: Path) -> Iterator[Keys]:
    made = Keys(tmp_path / "keys.toml")
    made.write(table("alice", weight=2.0), table("bob"))
    ring = read_keys(made.path, {})
    executor = PacedExecutor(num_blocks=1024)
    with fake_server(text_model, executor, keys=ring, state_folder=tmp_path / "state") as server:
        made.server = server
        yield made


def test_new_keys_are_let_in_and_old_ones_no_longer(keys: Keys) -> None:
    keys.write(table("alice", weight=3.0), table("carol"))
    changes = keys.reload()
    assert (changes.added, changes.removed, changes.changed) == (["carol"], ["bob"], ["alice"])
    assert [keys.status(name) for name in ("alice", "bob", "carol")] == [200, 401, 200]


def test_a_stream_of_a_key_that_is_gone_goes_on(keys: Keys) -> None:
    keys.server.executor.step_s = 0.005
    with keys.server.client(secret("alice")) as client:
        stream = client.completions.create(
            model=NAME,
            prompt=[1, 2, 3],
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        chunks = iter(stream)
        first = next(chunks)
        keys.write(table("carol"))
        keys.reload()
        assert keys.status("alice") == 401, "while its stream is running"
        assert keys.server.engine.snapshot().running_by_key.get("alice") == 1
        rest = list(chunks)
    ids = [choice.token_ids for chunk in (first, *rest) for choice in chunk.choices]  # type: ignore[attr-defined]
    assert sum(map(len, filter(None, ids))) == 60
    assert rest[-1].choices[0].finish_reason == "length"


def test_an_expiry_that_is_now_past_leaves_what_runs_alone(keys: Keys) -> None:
    keys.path.write_text(f"{table('alice')}expires = 2001-01-01\n{ADMIN}")
    keys.reload()
    reply = keys.server.get("/v1/models", bearer("alice"))
    assert (reply.status, reply.error["code"]) == (401, "expired_api_key")


def test_weights_reach_the_engine(keys: Keys) -> None:
    weight = keys.server.engine._scheduler._shares._weight
    assert (weight("alice"), weight("bob")) == (2.0, 1.0)
    keys.write(table("alice"), table("bob", weight=7.0))
    keys.reload()
    wait_until(lambda: (weight("alice"), weight("bob")) == (1.0, 7.0))


def test_what_was_used_stays_used(keys: Keys) -> None:
    keys.write(table("alice", tokens_per_day=100, max_concurrent=1))
    keys.reload()
    assert keys.status("alice") == 200
    alice = keys.server.service.access.ring.find(secret("alice"))
    wait_until(lambda: keys.server.service.quotas.usage_of(alice).today == 6)
    keys.write(table("alice", tokens_per_day=11))
    keys.reload()
    reply = keys.server.get("/v1/stats", bearer("alice"))
    assert reply.json["own"]["tokens_per_day"]["left"] == 5
    assert keys.status("alice") == 429
    keys.write()
    keys.reload()
    keys.write(table("alice", tokens_per_day=11))
    keys.reload()
    assert keys.status("alice") == 429, "nor does leaving and coming back help"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[keys.alice",
        b"\xff\xfe\x00",
        b"[keys.alice]\nkey = 'short'",
        b"[keys.alice]\nkey = 'alice-0123456789abcdef'\nlimit = 1",
        None,
    ],
)
def test_a_file_that_cannot_be_used_leaves_the_keys_as_they_were(
    keys: Keys, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys.path.unlink()
    if content is not None:
        keys.path.write_bytes(content)
    with caplog.at_level("ERROR", "quire.server"), pytest.raises(ConfigError):
        keys.reload()
    assert "reload_failed" in caplog.text
    assert [keys.status(name) for name in ("alice", "bob", "carol")] == [200, 200, 401]


def test_a_state_that_cannot_be_kept_leaves_the_keys_as_they_were(
    keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("no folder")
    keys.write(table("carol", tokens_per_day=5))
    with pytest.raises(ConfigError, match="cannot keep the day's quotas"):
        keys.reload()
    assert [keys.status(name) for name in ("alice", "carol")] == [200, 401]


def test_many_hangups_are_few_readings(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    service = keys.server.service
    readings: list[KeyChanges] = []
    replace = service.access.replace

    def counted(ring: KeyRing) -> KeyChanges:
        readings.append(replace(ring))
        return readings[-1]

    monkeypatch.setattr(service.access, "replace", counted)
    [reload] = service.reloads

    def storm() -> None:
        for _ in range(1000):
            reload()

    keys.write(table("carol"))
    keys.server.loop.call_soon_threadsafe(storm)
    wait_until(lambda: keys.status("carol") == 200)
    keys.write(table("dave"))
    keys.server.loop.call_soon_threadsafe(reload)
    wait_until(lambda: keys.status("dave") == 200)
    assert len(readings) == 2


def test_an_administrator_reloads_by_http(keys: Keys) -> None:
    keys.write(table("alice"), table("carol", scopes=["inference", "stats"], tokens_per_day=5))
    server = keys.server
    assert server.post("/admin/reload", {}, bearer("alice")).status == 403
    assert keys.status("carol") == 401
    reply = server.post("/admin/reload", {}, bearer("root"))
    assert reply.json == {"added": ["carol"], "removed": ["bob"], "changed": ["alice"]}
    listed = server.get("/admin/keys", bearer("root"))
    assert secret("carol").encode() not in listed.body
    [carol] = [card for card in listed.json["data"] if card["name"] == "carol"]
    assert carol["scopes"] == ["inference", "stats"]
    assert carol["tokens_per_day"] == 5
    keys.path.write_text("nonsense")
    reply = server.post("/admin/reload", {}, bearer("root"))
    assert (reply.status, reply.error["code"]) == (409, "keys_unusable")
    assert keys.status("alice") == 200


def test_without_a_file_there_is_nothing_to_reload(fake: RunningServer) -> None:
    reply = fake.post("/admin/reload", {})
    assert (reply.status, reply.error["code"]) == (409, "no_key_file")
    assert fake.get("/admin/keys").json["data"] == []


def test_a_process_reads_its_keys_on_sighup(text_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice"))
    options = ("--device", "reference", "--api-keys", path, "--state", tmp_path)
    with serving(text_model, *options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret("alice")) as client:
            stream = client.completions.create(
                model=text_model.name,
                prompt="The sea is",
                max_tokens=60,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = iter(stream)
            first = next(chunks)  # it may have all of them, where the machine is busy
            path.write_text(table("bob"))
            server.signal(signal.SIGHUP)
            wait_until(lambda: can_list_models(server.url, "bob"))
            assert not can_list_models(server.url, "alice")
            assert [first, *chunks][-1].choices[0].finish_reason == "length"
        path.write_text("broken")
        server.signal(signal.SIGHUP)
        path.unlink()
        server.signal(signal.SIGHUP)
        assert can_list_models(server.url, "bob")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "keys_reloaded" in server.errors()


def test_the_day_outlives_a_process_that_is_killed(text_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", tokens_per_day=1000))
    options = ("--device", "reference", "--api-keys", path, "--state", tmp_path / "state")
    with serving(text_model, *options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret("alice")) as client:
            asked = client.completions.create(
                model=text_model.name,
                prompt=[1, 2, 3],
                max_tokens=7,
                extra_body={"ignore_eos": True},
            )
        assert asked.usage is not None
        used = asked.usage.total_tokens
        wait_until(lambda: used_by_file(tmp_path / "state" / FILE_NAME) == {"alice": used})
        server.signal(signal.SIGKILL)
        server.wait()
    with serving(text_model, *options) as server:
        ask = urllib.request.Request(f"{server.url}/v1/stats", headers=bearer("alice"))
        with urllib.request.urlopen(ask) as answer:
            own = json.load(answer)["own"]
    assert (own["tokens_today"], own["completion_tokens"]) == (used, 0)
    assert own["tokens_per_day"]["left"] == 1000 - used


def used_by_file(path: Path) -> object:
    return json.loads(path.read_text())["used"]


def can_list_models(url: str, name: str) -> bool:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret(name), max_retries=0) as client:
        try:
            return bool(client.models.list().data)
        except openai.AuthenticationError:
            return False
