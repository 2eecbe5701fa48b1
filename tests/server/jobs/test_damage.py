"""What is wrong with the folder of jobs: a clear state each time, and nothing lost."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.server.jobs.test_batches import (
    CHAT,
    answers,
    begin,
    line,
    slow_server,
    upload,
    wait,
)
from tests.server.servers import RunningServer, fake_server

from quire.server.jobs.store import DATABASE, SCHEMA_VERSION, JobStore

LINES = [line(number) for number in range(40)]


def finished(model: Path, state: Path) -> Batch:
    """A batch that an earlier server kept."""
    with fake_server(model, state_folder=state) as server, server.client() as client:
        return wait(client, begin(client, LINES[:4]))


def interrupted(model: Path, state: Path) -> Batch:
    """A batch that an earlier server has answered a part of."""
    with slow_server(model, state) as server, server.client() as client:
        made = begin(client, LINES)
        return wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)


def num_done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def input_path(state: Path, batch: Batch) -> Path:
    return state / "jobs" / "files" / batch.input_file_id


# ---- the database and the folder


def refused(server: RunningServer) -> str:
    """The message of /v1/files and /v1/batches, which are unavailable; other requests are not."""
    with server.client() as client:
        messages = set()
        for ask in (client.files.list, client.batches.list, lambda: upload(client, LINES)):
            with pytest.raises(openai.InternalServerError) as found:
                ask()
            assert (found.value.status_code, found.value.code) == (503, "jobs_unavailable")
            messages.add(found.value.message)
        assert server.chat().status == 200
    (message,) = messages
    return message


def damage(path: Path) -> None:
    """The page of results, which nothing reads while a server starts."""
    content = path.read_bytes()
    with closing(sqlite3.connect(path)) as database:
        root = "SELECT rootpage FROM sqlite_master WHERE name = 'results'"
        (page,) = database.execute(root).fetchone()
    path.write_bytes(content[: (page - 1) * 4096] + b"\xa5" * 4096 + content[page * 4096 :])


@pytest.mark.parametrize("spoil", [damage, lambda path: path.write_bytes(b"no database" * 500)])
def test_a_database_that_cannot_be_read_is_refused_and_left_alone(
    text_model: Path, tmp_path: Path, spoil: Any
) -> None:
    finished(text_model, tmp_path)
    path = tmp_path / "jobs" / DATABASE
    spoil(path)
    spoilt = path.read_bytes()
    files = sorted((tmp_path / "jobs" / "files").iterdir())
    with fake_server(text_model, state_folder=tmp_path) as server:
        message = refused(server)
        assert f"{path} cannot be read" in message
        assert f"or move {path.parent} away" in message
        assert path.read_bytes() == spoilt
        path.unlink()
        assert f"{path} is gone, and its files are not" in refused(server)
        assert sorted((tmp_path / "jobs" / "files").iterdir()) == files  # for a repaired one
        (tmp_path / "jobs").rename(tmp_path / "spoilt")  # as the message has it, without a restart
        with server.client() as client:
            assert list(client.batches.list()) == []
            assert wait(client, begin(client, LINES[:1])).status == "completed"


def test_a_database_of_a_newer_version_is_refused_and_left_alone(
    text_model: Path, tmp_path: Path
) -> None:
    done = finished(text_model, tmp_path)
    path = tmp_path / "jobs" / DATABASE
    set_version(path, SCHEMA_VERSION + 1)
    with fake_server(text_model, state_folder=tmp_path) as server:
        message = refused(server)
        assert f"written by a newer quire (version {SCHEMA_VERSION + 1} of its tables" in message
        set_version(path, SCHEMA_VERSION)
        with server.client() as client:
            assert len(answers(client, client.batches.retrieve(done.id).output_file_id)) == 4


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")


def test_a_folder_that_another_server_works_off_is_refused(
    text_model: Path, tmp_path: Path
) -> None:
    other = JobStore(tmp_path / "jobs", server="pid 1 elsewhere")
    other.open()
    with fake_server(text_model, state_folder=tmp_path) as server:
        message = refused(server)
        assert "another server (pid 1 elsewhere) works off the jobs in" in message
        assert "--state" in message
        other.close()
        with server.client() as client:
            assert wait(client, begin(client, LINES[:1])).status == "completed"


def test_processes_of_one_server_share_the_folder_and_one_works_it_off(tmp_path: Path) -> None:
    first, second = (JobStore(tmp_path, server="pid 7") for _ in range(2))
    first.open()
    second.open()
    assert (first.is_owner, second.is_owner, second.take_folder()) == (True, False, False)
    first.close()
    assert second.take_folder() and second.is_owner
    second.close()


# ---- inputs


def check_failed(client: openai.OpenAI, batch: Batch, code: str) -> None:
    """It has failed for this reason, with the answers that it had, and no line of another file."""
    done = wait(client, batch)
    assert done.status == "failed"
    assert done.errors is not None and done.errors.data is not None
    assert [error.code for error in done.errors.data] == [code]
    found = answers(client, done.output_file_id)
    assert len(found) == num_done(done) >= num_done(batch) >= 2
    assert {each["custom_id"] for each in found} <= {each["custom_id"] for each in LINES}
    assert done.error_file_id is None
    assert done.request_counts is not None
    assert done.request_counts.failed == len(LINES) - len(found)


def change(path: Path) -> None:
    """Its lines are requests of others, in as many bytes."""
    path.write_bytes(path.read_bytes().replace(b'"custom_id": "r', b'"custom_id": "x'))


DAMAGES = pytest.mark.parametrize(
    ("spoil", "code"), [(Path.unlink, "input_missing"), (change, "input_changed")]
)


@DAMAGES
def test_an_input_that_is_not_what_it_was_fails_the_batch_after_a_restart(
    text_model: Path, tmp_path: Path, spoil: Any, code: str
) -> None:
    made = interrupted(text_model, tmp_path)
    spoil(input_path(tmp_path, made))
    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        check_failed(client, made, code)
        assert wait(client, begin(client, LINES[:2])).status == "completed"  # others go on


@DAMAGES
def test_an_input_that_is_spoilt_while_it_is_read_fails_the_batch(
    text_model: Path, tmp_path: Path, spoil: Any, code: str
) -> None:
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        made = begin(client, LINES[:12])
        wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)
        spoil(input_path(tmp_path, made))
        done = wait(client, made)
        assert done.status == "failed"
        assert done.errors is not None and done.errors.data is not None
        assert [error.code for error in done.errors.data] == [code]


@DAMAGES
def test_an_input_that_is_spoilt_before_a_batch_is_made_fails_it(
    text_model: Path, tmp_path: Path, spoil: Any, code: str
) -> None:
    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        name = upload(client, LINES)
        spoil(tmp_path / "jobs" / "files" / name)
        done = wait(
            client,
            client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h"),
        )
        assert done.status == "failed"
        assert done.errors is not None and done.errors.data is not None
        assert [error.code for error in done.errors.data] == [code]
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 0, "completed": 0, "failed": 0}


# ---- a full disk


class FullDisk:
    """Writes of one kind fail while it is full, as SQLite and the system have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.is_full = True
        self.num_refused = 0
        in_database = sqlite3.OperationalError("database or disk is full")
        in_file = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = in_database if method == "add_results" else in_file
        self.reason = str(error) if method == "add_results" else os.strerror(errno.ENOSPC)
        work = getattr(JobStore, method)

        def write(store: JobStore, *given: Any) -> Any:
            if not self.is_full:
                return work(store, *given)
            self.num_refused += 1
            with store._failures():
                raise error

        monkeypatch.setattr(JobStore, method, write)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the runner logs of its waits: names and errors."""
    found: list[tuple[str, str]] = []

    def log(name: str, *_: object, **fields: object) -> None:
        if name != "batch":
            found.append((name, str(fields.get("error", ""))))

    monkeypatch.setattr("quire.server.jobs.runner.log", log)
    monkeypatch.setattr("quire.server.jobs.runner._RETRY_S", 0.02)
    return found


@pytest.mark.parametrize("written", ["answers", "files"])
def test_a_full_disk_makes_a_job_wait_and_loses_nothing(
    text_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[str, str]],
    written: str,
) -> None:
    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        name = upload(client, LINES)
        disk = FullDisk(monkeypatch, "add_results" if written == "answers" else "_write")
        made = client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        server.wait_until(lambda: disk.num_refused >= 3)
        waiting = client.batches.retrieve(made.id)
        assert waiting.status == ("in_progress" if written == "answers" else "finalizing")
        assert num_done(waiting) == (0 if written == "answers" else len(LINES))
        assert events[0][0] == "jobs_wait"
        assert f"cannot write to {tmp_path / 'jobs'}: {disk.reason}" == events[0][1]
        disk.is_full = False
        done = wait(client, made)
        assert (done.status, num_done(done)) == ("completed", len(LINES))
        found = [answer["custom_id"] for answer in answers(client, done.output_file_id)]
        assert found == [each["custom_id"] for each in LINES]
        assert ("jobs_go_on", "") in events
        kept = {path.name for path in (tmp_path / "jobs" / "files").iterdir()}
        assert kept == {file.id for file in client.files.list()}


def test_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        monkeypatch.setattr("quire.server.jobs.store.sync_path", sync)
        with pytest.raises(openai.InternalServerError, match="No space left") as found:
            upload(client, LINES)
        assert found.value.status_code == 503
        assert list((tmp_path / "jobs" / "files").iterdir()) == []


# ---- the bound on lines


def test_a_batch_with_more_lines_than_the_key_may_have_is_refused(
    text_model: Path, tmp_path: Path
) -> None:
    with slow_server(text_model, tmp_path, max_job_lines=50) as server, server.client() as client:
        many = upload(client, [line(number) for number in range(51)])
        fits = upload(client, LINES)
        with pytest.raises(openai.RateLimitError, match="this one has 51; together they may"):
            client.batches.create(input_file_id=many, endpoint=CHAT, completion_window="24h")
        first = client.batches.create(input_file_id=fits, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.RateLimitError, match="lines of the key's batches wait and"):
            client.batches.create(input_file_id=fits, endpoint=CHAT, completion_window="24h")
        client.batches.cancel(first.id)
        wait(client, first)
        assert begin(client, LINES).status in ("validating", "in_progress")
