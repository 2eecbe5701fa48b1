"""A state folder that cannot be used: said when the server starts, in words."""

import asyncio
import errno
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import fails
from tests.server.processes import serving
from tests.server.servers import fake_server
from tests.worker.test_server import SMALL, ask

from quire.core.errors import ConfigError
from quire.server.answers.store import DATABASE as ANSWERS
from quire.server.control import control_socket, running_servers, socket_folder
from quire.server.jobs.store import DATABASE as JOBS
from quire.server.state_folder import check_state_folder
from quire.server.usage_file import UsageFile


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_state_folder(tmp_path / "state" / "quire", is_named=True)
    assert list((tmp_path / "state" / "quire").iterdir()) == []


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/state", "/proc/quire"])
def test_a_named_folder_that_cannot_be_written_is_refused(
    text_model: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    state = place.format(folder=tmp_path)
    said = fails("serve", text_model, *SMALL, "--state", state)
    assert f"--state {state} cannot be written: " in said and "name another folder" in said


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Have the system refuse a call: tests run as root, whom modes do not stop."""

    def refused(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"quire.server.state_folder.os.{call}", refused)


def logged(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [getattr(r, "fields", {}) for r in caplog.records if r.message == "state_unavailable"]


def test_a_read_only_folder_is_refused_if_it_was_named_and_else_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, "open", errno.EROFS)
        with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
            check_state_folder(tmp_path, is_named=True)
        with caplog.at_level(logging.ERROR):
            check_state_folder(tmp_path, is_named=False)
    [fields] = logged(caplog)
    assert fields["error"] == "Read-only file system" and "503" in fields["consequence"]


def test_a_folder_that_becomes_read_only_does_not_keep_the_server_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control socket cannot be removed then. The next look at the folder finds it dead."""

    async def run() -> None:
        async with control_socket(tmp_path, refused):
            assert running_servers(tmp_path) == [os.getpid()]
            refuse(monkeypatch, "unlink", errno.EROFS)

    async def refused(*_: object) -> str:
        raise AssertionError

    asyncio.run(run())
    assert running_servers(tmp_path) == []
    monkeypatch.undo()
    assert list(socket_folder(tmp_path).iterdir()) != []
    assert running_servers(tmp_path) == []
    assert list(socket_folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_logged_and_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        refuse(patch, call, errno.ENOSPC)
        check_state_folder(tmp_path, is_named=True)
    [fields] = logged(caplog)
    assert fields["error"] == "No space left on device"
    assert "until there is room" in fields["consequence"]
    assert list(tmp_path.iterdir()) == []


def test_databases_of_a_newer_version_are_named_at_the_start(
    text_model: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / ANSWERS, tmp_path / "jobs" / JOBS]
    paths[1].parent.mkdir()
    for path in paths:
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
    before = [path.read_bytes() for path in paths]
    log = tmp_path / "log"
    with serving(text_model, *SMALL, "--state", tmp_path, log=log) as server:
        status, _ = ask(server, "/v1/completions", {"prompt": "one", "max_tokens": 2})
        assert status == 200
        lines = log.read_text().splitlines()
        said = [json.loads(each) for each in lines if "written by a newer quire" in each]
        events = {each["event"] for each in said}
        assert events == {"jobs_unavailable", "answers_unavailable"}
    assert "Traceback" not in log.read_text()
    assert [path.read_bytes() for path in paths] == before


def test_quotas_of_a_newer_version_are_refused_and_left_alone(tmp_path: Path) -> None:
    file = UsageFile(tmp_path)
    file.path.write_text('{"version": 9, "day": "2026-01-01", "spent": []}')
    before = file.path.read_bytes()
    with pytest.raises(ConfigError, match=r"quotas\.json was written by a newer quire"):
        file.open("2026-01-01")
    assert file.path.read_bytes() == before


@contextmanager
def unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of another user, as the system would have it but for root."""
    exists = Path.exists

    def refused(path: Path) -> bool:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return exists(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refused)
        yield


def test_a_folder_of_another_user_is_named_and_the_server_starts(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with unreadable(state, monkeypatch), fake_server(text_model, state_folder=state) as server:
        assert server.post("/v1/completions", {"prompt": "one", "max_tokens": 2}).status == 200
        sweeping = server.service.background._sweeping
        assert sweeping is not None and not sweeping.done()
