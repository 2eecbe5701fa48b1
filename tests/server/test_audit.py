"""The audit log: what is written, that nothing is lost in silence, and that floods stay small."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import quire
from tests.server.servers import NAME, fake_server, settings_of

from quire.core.errors import ConfigError
from quire.core.hash_chain import GENESIS, MAX_LINE_BYTES, verify
from quire.server import read_keys
from quire.server.audit import REPEATS_S, AuditLog, open_audit_log, settings_digest
from quire.server.keys import ApiKey, KeyRing, KeyScope, digest_of

SECRET = b"a secret of some length"


class Now:
    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def unstarted(path: Path, now: Now, **options: Any) -> AuditLog:
    """A log whose thread is the test."""
    return AuditLog(path, now=now, start=False, **options)


def records(path: Path) -> list[dict[str, Any]]:
    assert verify([path]).is_sound
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path) -> list[str]:
    return [record["event"] for record in records(path)]


def test_events_are_lines_of_a_chain(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("start", version="1")
    log.record("stop")
    assert log.write()
    first, second = records(path)
    assert (first["seq"], first["event"], first["version"]) == (1, "start", "1")
    assert first["time"] == "2027-01-15T08:00:00.000+00:00"
    assert log.head == (2, second["hash"])
    assert path.stat().st_mode & 0o777 == 0o600
    log.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_chain_goes_on_after_a_restart(path: Path, now: Now, secret: bytes | None) -> None:
    for _ in range(3):
        log = unstarted(path, now, secret=secret)
        log.record("start")
        log.write()
        log.close()
    assert verify([path], secret).last_seq == 3


def test_a_line_that_a_crash_cut_off_is_taken_out_and_told(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("start")
    log.write()
    log.close()
    whole = path.read_bytes()
    for rest in (b"{", b'{"alg":"sha256","event":"x'):
        path.write_bytes(whole + rest)
        log = unstarted(path, now)
        log.write()
        log.close()
        assert records(path)[-1]["bytes"] == len(rest)
        assert events(path) == ["start", "tail_cut"]
    path.write_bytes(b"{")
    log = unstarted(path, now)
    log.write()
    log.close()
    assert events(path) == ["tail_cut"]


def test_a_log_whose_end_was_changed_is_not_continued(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("start", name="a")
    log.write()
    log.close()
    sound = path.read_bytes()
    for content in (
        sound.replace(b'"a"', b'"b"'),
        b"some other file\n",
        b"x" * (3 * MAX_LINE_BYTES),
        sound + b"\n",
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is no audit log|cannot be continued"):
            unstarted(path, now)
        assert path.read_bytes() == content, "nothing is done to it"
    path.write_bytes(sound)
    with pytest.raises(ConfigError, match="hashed by 'sha256', not by hmac-sha256"):
        unstarted(path, now, secret=SECRET)
    unstarted(path, now).close()


def test_a_log_has_one_writer(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    with pytest.raises(ConfigError, match="another server writes to"):
        unstarted(path, now)
    log.close()
    unstarted(path, now).close()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/x")])
def test_what_is_no_file_is_refused(path: Path, now: Now, make: Any) -> None:
    make(path)
    with pytest.raises(ConfigError, match=r"cannot open|is no file"):
        unstarted(path, now)


class FullDisk:
    """Takes so many bytes and no more, as a disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr("quire.server.audit.os.write", self.write)

    def write(self, descriptor: int, content: bytes) -> int:
        taken = content[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        return self._write(descriptor, taken)


def test_a_full_disk_loses_nothing_that_fits_the_queue(
    path: Path, now: Now, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = unstarted(path, now)
    log.record("start")
    log.write()
    disk = FullDisk(monkeypatch, room=500)
    for number in range(5):
        log.record("event", number=number)
    with caplog.at_level("ERROR", "quire.server"):
        assert not log.write()
        assert not log.write()
    assert caplog.text.count("audit_unwritten") == 1, "reported once"
    assert events(path) == ["start"], "what was written in part is undone"
    disk.room = 1 << 20
    assert log.write()
    assert [record.get("number") for record in records(path)] == [None, 0, 1, 2, 3, 4]
    assert log.num_dropped == 0
    log.close()


def test_what_does_not_fit_the_queue_is_counted_in_the_chain(
    path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = unstarted(path, now, max_queued=3)
    disk = FullDisk(monkeypatch, room=0)
    for number in range(10):
        log.record("event", number=number)
        log.write()
    assert log.num_dropped == 7
    disk.room = 1 << 20
    log.write()
    log.record("event", number=10)
    log.write()
    assert events(path) == ["event", "event", "event", "gap", "event"]
    assert records(path)[3]["lost"] == 7
    assert verify([path]).num_lost_events == 7
    log.close()


def test_a_gap_stands_where_the_events_are_missing(
    path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.audit._MAX_BATCH", 1)
    log = unstarted(path, now, max_queued=2)
    disk = FullDisk(monkeypatch, room=0)
    for number in range(5):
        log.record("event", number=number)
    disk.room = 400  # for one line
    assert not log.write()
    log.record("event", number=5)
    disk.room = 1 << 20
    assert log.write()
    found = [record.get("number", record["event"]) for record in records(path)]
    assert found == [0, 1, "gap", 5]
    log.close()


def test_a_write_that_cannot_be_undone_is_undone_later(
    path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = unstarted(path, now)
    log.record("start")
    log.write()
    disk = FullDisk(monkeypatch, room=20)
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr("quire.server.audit.os.ftruncate", broken)
        log.record("stop")
        assert not log.write()
    assert not path.read_bytes().endswith(b"\n")
    disk.room = 1 << 20
    assert log.write()
    assert events(path) == ["start", "stop"]
    log.close()


def test_an_fsync_that_fails_writes_nothing_twice(
    path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = unstarted(path, now)
    with monkeypatch.context() as patch:

        def broken(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr("quire.server.audit.os.fsync", broken)
        log.record("start")
        assert not log.write()
    assert log.write()
    assert events(path) == ["start"]
    log.close()


def test_a_flood_is_two_lines_a_minute(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    for _ in range(1000):
        log.record_repeated("authentication_failed", {"client": "10.0.0.1"}, {"path": "/x"})
        log.write()
    assert events(path) == ["authentication_failed"]
    now.seconds += REPEATS_S
    log.write()
    first, second = records(path)
    assert (first["client"], first["path"]) == ("10.0.0.1", "/x")
    assert (second["client"], second["more"], second["in_s"]) == ("10.0.0.1", 999, 60)
    now.seconds += 10 * REPEATS_S
    log.write()
    assert len(records(path)) == 2, "and nothing when nothing comes"
    log.close()


def test_a_flood_from_everywhere_is_bounded_too(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    for number in range(1000):
        group = {"client": f"10.0.{number // 256}.{number % 256}"}
        log.record_repeated("authentication_failed", group, {}, max_groups=16)
    log.record_repeated("scope_refused", {"key": "a"}, {}, max_groups=16)
    log.write()
    assert len(records(path)) == 18, "sixteen, all others as one, and that of another kind"
    now.seconds += REPEATS_S
    log.write()
    assert records(path)[-1]["client"] == "others"
    assert records(path)[-1]["more"] == 1000 - 17
    log.close()


def test_what_was_counted_is_told_at_the_end(path: Path) -> None:
    log = AuditLog(path)
    for _ in range(5):
        log.record_repeated("scope_refused", {"key": "a"}, {})
    log.close()
    assert events(path) == ["scope_refused", "scope_refused", "stop"]
    assert records(path)[1]["more"] == 4


def test_a_log_that_was_moved_goes_on_in_a_new_file(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("start")
    log.write()
    log.reopen()
    log.write()
    assert events(path) == ["start"], "it was not moved"
    old = path.with_suffix(".old")
    path.rename(old)
    log.record("before")
    log.write()
    log.reopen()
    log.record("after")
    log.write()
    log.close()
    assert events(old) == ["start", "before", "rotated"]
    assert events(path) == ["continued", "after"]
    assert verify([old, path]).last_seq == 5
    run = quire("audit", old, path)
    assert run.code == 0
    assert "OK: 5 lines" in run.out


def test_a_file_in_the_place_of_the_moved_one_is_left_alone(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("start")
    log.write()
    old = path.with_suffix(".old")
    path.rename(old)
    path.write_text("somebody's\n")
    log.reopen()
    log.record("stop")
    log.write()
    log.close()
    assert path.read_text() == "somebody's\n"
    assert events(old) == ["start", "stop"]


def test_a_file_emptied_in_place_goes_on_behind_its_copy(path: Path, now: Now) -> None:
    """As logrotate does with copytruncate."""
    log = unstarted(path, now)
    log.record("start")
    log.write()
    old = path.with_suffix(".old")
    old.write_bytes(path.read_bytes())
    os.truncate(path, 0)
    log.record("stop")
    log.write()
    log.close()
    assert verify([old, path]).last_seq == 2


def test_names_cannot_forge_lines(path: Path, now: Now) -> None:
    log = unstarted(path, now)
    log.record("request", path='/x"}\n{"event": "start"', key="\u2028\x1b[2J" * 1000)
    log.write()
    log.close()
    [record] = records(path)
    assert record["path"].endswith('"start"')
    assert len(record["key"]) == 500
    assert path.read_bytes().isascii()


def test_the_digest_of_the_settings_knows_every_one_of_them() -> None:
    def ring(**fields: Any) -> KeyRing:
        return KeyRing([ApiKey("a", digest_of("a" * 20), **fields)])

    variants = [
        settings_of(),
        settings_of(max_body_bytes=5),
        settings_of(keys=ring()),
        settings_of(keys=ring(scopes=frozenset(KeyScope))),
    ]
    assert len({settings_digest(settings) for settings in variants}) == len(variants)
    assert settings_digest(settings_of()) == settings_digest(settings_of())


# ---- a server


def secret(name: str) -> str:
    return f"{name}-0123456789abcdef"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret(name)}"}


ASK = {"prompt": [[1, 2]], "max_tokens": 4, "ignore_eos": True}


def test_a_server_writes_what_matters(text_model: Path, path: Path) -> None:
    ring = KeyRing(
        [
            ApiKey("alice", digest_of(secret("alice")), tokens_per_minute=6),
            ApiKey("old", digest_of(secret("old")), expires=1.0),
            ApiKey("root", digest_of(secret("root")), scopes=frozenset({KeyScope.ADMIN})),
        ]
    )
    with fake_server(text_model, keys=ring, audit_log=path) as server:
        assert server.get("/v1/models").status == 401
        for _ in range(20):
            assert server.get("/v1/models", bearer("nobody")).status in (401, 429)
        assert server.get("/v1/models", bearer("old")).status in (401, 429)
        assert server.get("/metrics", bearer("alice")).status == 403
        assert server.post("/v1/completions", ASK, bearer("alice")).status == 200
        assert server.post("/v1/completions", ASK, bearer("alice")).status == 429
        assert server.get("/admin/keys", bearer("root")).status == 200
        audit = server.get("/v1/stats", bearer("root")).json["audit"]
    assert audit["num_dropped"] == 0
    found = records(path)
    assert (found[0]["event"], found[-1]["event"]) == ("start", "stop")
    assert found[0]["settings"] == settings_digest(server.service.settings)
    kinds = {record["event"] for record in found}
    assert kinds == {
        *("start", "stop", "authentication_failed", "scope_refused", "quota_refused", "admin"),
    }
    [scope] = [record for record in found if record["event"] == "scope_refused"]
    assert (scope["key"], scope["path"]) == ("alice", "/metrics")
    [quota] = [record for record in found if record["event"] == "quota_refused"]
    assert (quota["key"], quota["code"]) == ("alice", "rate_limit_exceeded")
    failed = [record for record in found if record["event"] == "authentication_failed"]
    assert "old" in {record["key"] for record in failed}
    assert sum(1 + record.get("more", 0) - ("more" in record) for record in failed) == 22
    assert secret("nobody").encode() not in path.read_bytes()
    assert audit["hash"] in {GENESIS, *(record["hash"] for record in found)}


def test_requests_are_written_when_asked_for(text_model: Path, path: Path) -> None:
    ring = KeyRing([ApiKey("alice", digest_of(secret("alice")))])
    with fake_server(text_model, keys=ring, audit_log=path, audit_requests=True) as server:
        headers = {**bearer("alice"), "x-request-id": "mine"}
        assert server.post("/v1/completions", ASK, headers).status == 200
        assert server.get("/v1/models").status == 401
        assert server.get("/health").status == 200
        assert server.get("/nowhere" + "x" * 5000, bearer("alice")).status == 404
    asked, lost = [record for record in records(path) if record["event"] == "request"]
    assert asked["request_id"] == "mine"
    assert (asked["key"], asked["path"], asked["status"]) == ("alice", "/v1/completions", 200)
    assert (asked["prompt_tokens"], asked["completion_tokens"]) == (2, 4)
    assert (lost["status"], len(lost["path"])) == (404, 500)


def test_reloads_are_written(text_model: Path, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    root = f'[keys.root]\nkey = "{secret("root")}"\nscopes = ["admin"]\n'
    file.write_text(root)
    with fake_server(text_model, keys=read_keys(file, {}), audit_log=path) as server:
        file.write_text(f'{root}[keys.new]\nkey = "{secret("new")}"\n')
        assert server.post("/admin/reload", {}, bearer("root")).status == 200
        file.write_text("broken")
        assert server.post("/admin/reload", {}, bearer("root")).status == 409
    assert events(path) == ["start", "keys_reloaded", "admin", "keys_refused", "admin", "stop"]
    assert records(path)[1]["added"] == ["new"]


def test_paths_that_only_look_like_an_administrators_are_not_written(
    text_model: Path, path: Path
) -> None:
    ring = KeyRing([ApiKey("alice", digest_of(secret("alice")))])
    with fake_server(text_model, keys=ring, audit_log=path) as server:
        for number in range(20):
            assert server.get(f"/admin/{number}", bearer("alice")).status == 404
            assert server.get("/admin/keys", bearer("alice")).status == 403
    assert events(path) == ["start", "scope_refused", "scope_refused", "stop"]


def test_without_keys_acts_of_administrators_are_counted(text_model: Path, path: Path) -> None:
    with fake_server(text_model, audit_log=path) as server:
        for _ in range(20):
            assert server.get("/admin/keys").status == 200
    assert events(path) == ["start", "admin", "admin", "stop"]
    assert records(path)[2]["more"] == 19


def test_options_that_need_a_log_say_so(tmp_path: Path) -> None:
    for options in ({"audit_requests": True}, {"audit_key": tmp_path / "key"}):
        with pytest.raises(ConfigError, match="need --audit-log"):
            open_audit_log(settings_of(**options))


def test_a_log_that_cannot_be_written_is_said_at_the_start(
    text_model: Path, tmp_path: Path
) -> None:
    run = quire("serve", text_model, "--audit-log", tmp_path / "none" / "log", "--port", "0")
    assert run.code == 1
    assert "cannot open" in run.err
    assert NAME not in run.out
