"""The store ended at any commit: one answer a line, and files synced before rows name them."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.server.database import StoreError
from quire.server.jobs import jobs as jobs_module
from quire.server.jobs import runner as runner_module
from quire.server.jobs.jobs import JobNeeds, Jobs
from quire.server.jobs.lines import LineAnswerer
from quire.server.jobs.runner import JobRunner, _FailedError
from quire.server.jobs.store import (
    Batch,
    BatchProblem,
    JobLimits,
    JobStore,
    NewBatch,
    Result,
    StoredFile,
    _insert_file,
)

CHAT = "/v1/chat/completions"
NUM_LINES = 10


def line(number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": str(number)}]}
    return json.dumps({"custom_id": f"r{number}", "url": CHAT, "body": body}).encode() + b"\n"


def opened(folder: Path) -> JobStore:
    store = JobStore(folder)
    store.open()
    return store


def new_batch(store: JobStore) -> Batch:
    file = store.add_file("", "in.jsonl", [line(number) for number in range(NUM_LINES)])
    made = store.add_batch("", NewBatch(CHAT, file.id, "24h", 86_400))
    assert made is not None
    return made


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Every third line is refused."""
    await asyncio.sleep(0)
    body = json.loads((await receive())["body"])
    said = body["messages"][0]["content"]
    status = 400 if int(said) % 3 == 2 else 200
    reply = {"said": said, "seed": body["seed"], "error": {"code": "x"}}
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(reply).encode()})


def work(store: JobStore, batch: Batch, is_over: Any) -> None:
    """Work the batch off until then."""

    async def run() -> None:
        runner = runner_of(store)
        runner.start()
        while not is_over():
            await asyncio.sleep(0.001)
        await runner.stop()

    asyncio.run(run())


def _any_model(_: str | None) -> None:
    pass


def finish(folder: Path, batch: Batch) -> tuple[Batch, list[Any], list[Any]]:
    """What comes of it when nothing more happens: the batch, its answers and its errors."""
    store = opened(folder)
    try:
        work(store, batch, lambda: not found(store, batch).is_live)
        done = found(store, batch)
        names = {path.name for path in (folder / "files").iterdir()}
        known = store.files("", after=None, limit=99, newest_first=True, purpose=None)
        assert known is not None
        assert names == {file.id for file in known.data}, "no file is left over, and none lost"
        return done, contents(store, done.output_file_id), contents(store, done.error_file_id)
    finally:
        store.close()


def found(store: JobStore, batch: Batch) -> Batch:
    now = store.batch("", batch.id)
    assert now is not None
    return now


def contents(store: JobStore, file_id: str | None) -> list[Any]:
    assert file_id is not None
    lines = [json.loads(each) for each in store.path_of(file_id).read_bytes().splitlines()]
    return [(each["custom_id"], each["response"]["body"]) for each in lines]


class Dying:
    """Ends a store, as a kill would its process: with its `last` transaction, before that is
    committed or after. What is tried later fails."""

    def __init__(self, store: JobStore, last: int, *, before: bool) -> None:
        self._transaction = store._transaction
        self._last = last
        self._before = before
        self._num_begun = 0
        self.is_dead = False

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if self.is_dead:
            raise StoreError("dead")
        self._num_begun += 1
        is_last = self._num_begun == self._last
        with self._transaction() as database:
            yield database
            if is_last and self._before:
                self.is_dead = True
                raise StoreError("dead")
        self.is_dead = self.is_dead or is_last


@pytest.mark.parametrize("before", [True, False])
def test_whichever_commit_is_the_last_one_the_answers_are_the_same(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.jobs.runner._RETRY_S", 0.01)
    store = opened(tmp_path / "whole")
    made = new_batch(store)
    store.close()
    whole, good, bad = finish(tmp_path / "whole", made)
    assert sorted(name for name, _ in (*good, *bad)) == sorted(f"r{n}" for n in range(NUM_LINES))
    last = 0
    has_ended = False
    while not has_ended:
        last += 1
        folder = tmp_path / f"{last}"
        store = opened(folder)
        made = new_batch(store)
        dying = Dying(store, last, before=before)
        monkeypatch.setattr(store, "_transaction", dying.transaction)
        work(store, made, lambda: dying.is_dead or not found(store, made).is_live)  # noqa: B023
        has_ended = not found(store, made).is_live
        store.close()
        done, *both = finish(folder, made)
        assert both == [good, bad], f"commit {last}"
        counts = (done.num_lines, done.num_completed, done.num_failed)
        assert counts == (whole.num_lines, whole.num_completed, whole.num_failed), f"commit {last}"
    assert last > 4, "checked, answered, finalizing, ended"


def test_a_line_keeps_its_first_answer(tmp_path: Path) -> None:
    store = opened(tmp_path)
    made = new_batch(store)
    store.begin(made.id, NUM_LINES, None)
    store.add_results(made.id, [Result(1, True, b"first\n"), Result(2, False, b"two\n")])
    store.add_results(made.id, [Result(1, False, b"again\n"), Result(1, True, b"again\n")])
    kept = found(store, made)
    assert (kept.num_completed, kept.num_failed) == (1, 1)
    assert [each.answer for good in (True, False) for each in store._answers(made.id, good)] == [
        b"first\n",
        b"two\n",
    ]
    store.close()


def test_a_file_is_on_disk_before_a_row_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses its power has rows of files that are empty. So with the answers,
    which go when the batch ends."""
    store = opened(tmp_path)
    made = new_batch(store)
    store.begin(made.id, NUM_LINES, None)
    store.add_results(made.id, [Result(1, True, b"answer\n")])
    events: list[str] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name[:5])
        sync(descriptor)

    def insert(database: Any, file: StoredFile) -> None:
        events.append("row")
        _insert_file(database, file)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("quire.server.jobs.store._insert_file", insert)
    store.add_file("", "more", [b"{}\n"])
    assert events == ["file-", "files", "row"]
    events.clear()
    store.finish(made, "completed", [], [])
    assert events == ["file-", "files", "row"]
    store.close()


def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (row,) = store._query("PRAGMA synchronous")
    assert tuple(row) == (2,), "FULL: the log is synced with every commit"
    (row,) = store._query("PRAGMA journal_mode")
    assert tuple(row) == ("wal",)
    store.close()


# ---- made once


def test_a_file_and_a_batch_with_a_name_are_made_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.path_of("file-x").write_bytes(b"what a crash left")
    one, two = (store.add_file("", "in.jsonl", [line(1)], name="file-x") for _ in range(2))
    assert one == two and store.path_of("file-x").read_bytes() == line(1)
    new = NewBatch(CHAT, "file-x", "24h", 86_400)
    first = store.add_batch("", new, "batch_x")
    assert store.begin("batch_x", 1, "tiny")
    store.add_results("batch_x", [Result(1, True, b"{}\n")])
    assert store.add_batch("", new, "batch_x") == first, "as it was made"
    listed = store.batches("", after=None, limit=9, newest_first=True)
    assert listed is not None and len(listed.data) == 1
    assert store.add_batch("another", new, "batch_x") is None
    store.close()


def test_a_file_that_another_process_is_writing_is_not_lost_silently(tmp_path: Path) -> None:
    """Such as one that becomes the owner meanwhile, and drops what crashes left."""
    store, owner = opened(tmp_path), JobStore(tmp_path)

    def parts() -> Iterator[bytes]:
        yield line(1)
        store._folder_lock, lock = None, store._folder_lock
        assert lock is not None
        os.close(lock)  # as where this process was not the owner
        owner.open()
        assert owner.is_owner

    with pytest.raises(StoreError, match="send it again"):
        store.add_file("", "in.jsonl", parts())
    assert store._query("SELECT * FROM files") == []
    kept = store.add_file("", "in.jsonl", [line(1)])
    owner._drop_leftovers()
    assert store.path_of(kept.id).read_bytes() == line(1)
    owner.close()
    store.close()


# ---- what fails on the way


def runner_of(store: JobStore) -> JobRunner:
    return JobRunner(store, LineAnswerer(app, lambda _: None), lambda _: None, _any_model, 2)


def test_a_look_at_batches_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    batches = [new_batch(store) for _ in range(2)]  # of one key, the second after the first
    looks: list[None] = []

    def fail_first() -> None:
        looks.append(None)
        if len(looks) == 1:
            raise RuntimeError("a bug")

    monkeypatch.setattr(store, "drop_expired", fail_first)
    deadline = time.monotonic() + 30.0
    work(
        store,
        batches[1],
        lambda: not found(store, batches[1]).is_live or time.monotonic() > deadline,
    )
    assert found(store, batches[1]).status == "completed"
    store.close()


def test_answers_that_came_with_what_ends_a_batch_are_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch = new_batch(store)

    async def answered() -> Result:
        return Result(3, True, b"{}\n")

    async def failed() -> Result:
        raise _FailedError(BatchProblem("key_revoked", "it is gone"))

    async def keep() -> None:
        tasks = {asyncio.create_task(each) for each in (answered(), failed())}
        await asyncio.wait(tasks)
        with pytest.raises(_FailedError, match="it is gone"):
            await runner_of(store)._keep_some(batch, tasks)

    asyncio.run(keep())
    assert store.answered(batch.id) == {3}
    store.close()


def test_lines_are_read_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on passes over all lines that have answers."""
    store = opened(tmp_path)
    batch = new_batch(store)
    readers: set[int] = set()

    def lines_of(path: Path) -> Iterator[bytes]:
        for each in path.read_bytes().splitlines(keepends=True):
            readers.add(threading.get_ident())
            yield each

    monkeypatch.setattr(runner_module, "lines_of", lines_of)
    work(store, batch, lambda: not found(store, batch).is_live)
    assert found(store, batch).status == "completed"
    assert readers and threading.get_ident() not in readers
    store.close()


def test_a_file_that_cannot_be_removed_is_deleted_and_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    kept = store.add_file("", "in.jsonl", [line(1)])
    over = store.add_file("", "in.jsonl", [line(1)], keep_s=-1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("a file system that was made read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert store.delete_file("", kept.id)
        store.drop_expired()
    assert store._query("SELECT * FROM files") == []
    store.close()
    store = opened(tmp_path)
    assert not store.path_of(kept.id).exists() and not store.path_of(over.id).exists()
    store.close()


def test_who_holds_the_folder_can_be_read_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the server would else take it for another server's."""
    before, after = JobStore(tmp_path, server="pid 12345"), JobStore(tmp_path, server="pid 7")
    before.open()
    before.close()
    cut, seen = os.ftruncate, []

    def look(descriptor: int, length: int) -> None:
        seen.append(os.pread(descriptor, 256, 0))
        cut(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", look)
    after.open()
    assert [each[:5] for each in seen] == [b"pid 7"]
    assert (tmp_path / "jobs.lock").read_bytes() == b"pid 7"
    after.close()


def test_a_process_goes_on_trying_to_take_the_jobs_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_TAKE_OVER_S", 0.0)
    tries: list[BaseException | bool] = [StoreError("another server's"), OSError("gone"), True]

    class Store:
        is_owner = False

        def take_folder(self) -> bool:
            made = tries.pop(0)
            if isinstance(made, BaseException):
                raise made
            return made

    started: list[object] = []
    jobs = Jobs(tmp_path, JobLimits(), JobNeeds(lambda _: None, _any_model, lambda: 1), "pid 7")
    monkeypatch.setattr(jobs, "_start_runner", started.append)
    asyncio.run(jobs._take_over(Store()))  # type: ignore[arg-type]
    assert len(started) == 1 and tries == []
