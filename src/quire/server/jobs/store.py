"""JobStore: files of requests and batches, in SQLite and on disk, by the key that owns them.

An answer is in the database before it counts, under the number of its line: however often a crash
makes a line begin again, it is answered once. When all lines are, the answers are written to files
of their own, and in one transaction the batch gets these files and leaves its answers. Files that
no row names are what a crash left of one that was being written; they go when the store is opened.
"""

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import QuireError, RequestError
from quire.server.database import Database, StoreError, sync_path
from quire.server.jobs.files import num_lines_of
from quire.server.logs import log

SCHEMA_VERSION = 1
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files
LIVE = ("validating", "in_progress", "finalizing", "cancelling")
DATABASE = "jobs.sqlite"
_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
_SCHEMA = f"""
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER, digest TEXT NOT NULL
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    status TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    input_digest TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    keep_s INTEGER, model TEXT, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    {" ".join(f"{name} INTEGER," for name in _TIMES)}
    num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0, errors TEXT, output_file_id TEXT, error_file_id TEXT
);
CREATE TABLE results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_good INTEGER NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID
"""


class QuotaError(QuireError):
    """A key has as much as it may."""


class InUseError(QuireError):
    """A file that a batch still reads."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one key may have."""

    max_bytes: int = 1 << 30  # of files
    max_batches: int = 16  # that have not ended
    max_lines: int = 200_000  # of these, not answered


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None
    digest: str


class BatchProblem(NamedTuple):
    """What is wrong with a batch, as its `errors` say it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None = None
    keep_s: int | None = None  # its files


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    owner: str
    status: str
    endpoint: str
    input_file_id: str
    input_digest: str
    completion_window: str
    metadata: dict[str, str] | None
    keep_s: int | None
    model: str | None
    created_at: int
    expires_at: int
    num_lines: int
    num_completed: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    errors: list[BatchProblem] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    @property
    def has_begun(self) -> bool:
        """Whether its file was found to be good."""
        return "in_progress_at" in self.times

    def as_made(self) -> "Batch":
        """As it was before anything was done for it."""
        return replace(
            self,
            status="validating",
            model=None,
            num_completed=0,
            num_failed=0,
            output_file_id=None,
            error_file_id=None,
            errors=[],
            times={},
        )


class Result(NamedTuple):
    line: int
    is_good: bool
    answer: bytes  # with its newline


class Page(NamedTuple):
    data: list[Any]
    has_more: bool


class JobStore(Database):
    """In `folder`."""

    version = SCHEMA_VERSION
    schema = _SCHEMA
    contents = "jobs"

    def __init__(
        self,
        folder: Path,
        limits: JobLimits | None = None,
        server: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """`server`: what other processes of the same server call themselves, too."""
        super().__init__(folder / DATABASE)
        self._files = folder / "files"
        self._limits = limits or JobLimits()
        self._server = server
        self._now = now
        self._folder_lock: int | None = None

    # ---- opening

    def open(self) -> None:
        """Raises StoreError where it cannot be used, or is another server's."""
        with self._failures():
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.take_folder()
            try:
                self._database = self._connect()
            except BaseException:
                self.close()
                raise
            if self.is_owner:
                self._drop_leftovers()

    @property
    def is_owner(self) -> bool:
        """Whether this process works the batches off: there is one at a time."""
        return self._folder_lock is not None

    def take_folder(self) -> bool:
        """Become the owner; False where another process of this server is. Raises StoreError where
        that is another server's."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path.with_name("jobs.lock"), flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace")
            os.close(descriptor)
            if self._server and holder == self._server:
                return False
            raise StoreError(
                f"another server ({holder}) works off the jobs in {self.path.parent}; give this "
                "one a folder of its own by --state"
            ) from None
        name = self._server.encode()
        os.pwrite(descriptor, name, 0)  # before what is left is cut off: others read it at any time
        os.ftruncate(descriptor, len(name))
        self._folder_lock = descriptor
        return True

    def _check_new(self) -> None:
        """Files without the database that names them are not a crash's leftovers."""
        if any(self._files.iterdir()):
            raise StoreError(
                f"{self.path} is gone, and its files are not: put a copy of it in its place, or "
                f"move {self.path.parent} away to begin without its jobs"
            )

    def _drop_leftovers(self) -> None:
        """In one transaction: other processes may be writing files, which then cannot become rows
        before these have gone."""
        with self._transaction():
            known = {row["id"] for row in self._query("SELECT id FROM files")}
            for path in self._files.iterdir():
                if path.name not in known:
                    self._drop_content(path.name)

    def close(self) -> None:
        with self._lock:
            super().close()
            if self._folder_lock is not None:
                os.close(self._folder_lock)
                self._folder_lock = None

    # ---- files

    def path_of(self, file_id: str) -> Path:
        return self._files / file_id

    def add_file(
        self,
        owner: str,
        filename: str,
        parts: Iterable[bytes],
        keep_s: int | None = None,
        name: str | None = None,
    ) -> StoredFile:
        """Keep an uploaded file; QuotaError where the key's files would be too large together.
        `name`: its id; where there is a file with that id, it is this one."""
        if name is not None:
            rows = self._query("SELECT * FROM files WHERE id = ? AND owner = ?", name, owner)
            if rows:
                return _file_of(rows[0])
        with self._failures():
            written = self._write(owner, filename, INPUT, parts, keep_s, name)
        try:
            with self._transaction() as database:
                self._check_bytes(owner, written.bytes)
                self._check_there(written)
                _insert_file(database, written)
        except BaseException:
            self.path_of(written.id).unlink(missing_ok=True)
            raise
        return written

    def _check_there(self, written: StoredFile) -> None:
        if not self.path_of(written.id).exists():  # a process that became the owner dropped it
            raise StoreError(f"{written.filename} was lost while it was written: send it again")

    def _check_bytes(self, owner: str, more: int) -> None:
        used = self._query("SELECT SUM(bytes) AS n FROM files WHERE owner = ?", owner)[0]["n"] or 0
        if used + more > self._limits.max_bytes:
            raise QuotaError(
                f"the key's files have {used:,} bytes and this one {more:,}; together they may "
                f"have {self._limits.max_bytes:,}: delete some first"
            )

    def _write(
        self,
        owner: str,
        filename: str,
        purpose: str,
        parts: Iterable[bytes],
        keep_s: int | None,
        name: str | None = None,
    ) -> StoredFile:
        """A whole file on disk that no row names yet."""
        name = name or f"file-{uuid.uuid4().hex}"
        path = self.path_of(name)
        path.unlink(missing_ok=True)  # what a crash left of the same one
        digest = hashlib.sha256()
        size = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    size += len(part)
                file.flush()
                os.fsync(file.fileno())
            sync_path(self._files)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        now = int(self._now())
        expires = None if keep_s is None else now + keep_s
        return StoredFile(name, owner, purpose, filename, size, now, expires, digest.hexdigest())

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        rows = self._query("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        return None if not rows else self._unexpired(_file_of(rows[0]))

    def _unexpired(self, found: StoredFile) -> StoredFile | None:
        is_over = found.expires_at is not None and self._now() >= found.expires_at
        return None if is_over else found

    def files(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> Page | None:
        """None where `after` is no file of the key's."""
        where = "AND (? IS NULL OR purpose = ?) AND (expires_at IS NULL OR expires_at > ?)"
        values = (purpose, purpose, int(self._now()))
        page = self._page("files", owner, after, limit, newest_first, where, values)
        return None if page is None else Page([_file_of(row) for row in page.data], page.has_more)

    def delete_file(self, owner: str, file_id: str) -> bool:
        """False where there is none; InUseError while a batch reads it."""
        with self._transaction() as database:
            if self.file(owner, file_id) is None:
                return False
            self._check_unused(file_id)
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._drop_content(file_id)
        return True

    def _drop_content(self, file_id: str) -> None:
        """Of a file that no row names any more: what cannot be removed now is a leftover, which
        goes when the store is opened next."""
        try:
            self.path_of(file_id).unlink(missing_ok=True)
        except OSError as error:
            log("file_not_removed", logging.ERROR, file=file_id, error=str(error))

    def _check_unused(self, file_id: str) -> None:
        for row in self._query("SELECT id, status FROM batches WHERE input_file_id = ?", file_id):
            if row["status"] in LIVE:
                raise InUseError(f"{row['id']} reads {file_id}; cancel it first")

    def drop_expired(self) -> None:
        """Files whose time is over, unless a batch still reads them."""
        over = self._query(
            "SELECT id FROM files WHERE expires_at IS NOT NULL AND expires_at <= ?",
            int(self._now()),
        )
        for row in over:
            with suppress(InUseError):
                with self._transaction() as database:
                    self._check_unused(row["id"])
                    database.execute("DELETE FROM files WHERE id = ?", (row["id"],))
                self._drop_content(row["id"])

    # ---- batches

    def add_batch(self, owner: str, new: NewBatch, name: str | None = None) -> Batch | None:
        """None where there is no such file; QuotaError where the key has too much to do. `name`:
        its id; where there is a batch with that id, it is this one, as it was made."""
        if name is not None and (made := self.batch(owner, name)) is not None:
            return made.as_made()
        if (given := self.file(owner, new.input_file_id)) is None or given.purpose != INPUT:
            return None
        num_lines = self._num_lines(given.id)
        with self._transaction() as database:
            if self.file(owner, given.id) is None:  # deleted meanwhile
                return None
            self._check_queued(owner, num_lines)
            name = name or f"batch_{uuid.uuid4().hex}"
            now = int(self._now())
            database.execute(
                "INSERT INTO batches (id, owner, status, endpoint, input_file_id, input_digest, "
                "completion_window, metadata, keep_s, created_at, expires_at, num_lines) "
                "VALUES (?, ?, 'validating', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(name, owner, new.endpoint, new.input_file_id, given.digest),
                    *(new.completion_window, json.dumps(new.metadata), new.keep_s),
                    *(now, now + new.window_s, num_lines),
                ),
            )
        return self.batch(owner, name)

    def _num_lines(self, file_id: str) -> int:
        """0 where it cannot be read: the batch then fails, which says why."""
        try:
            return num_lines_of(self.path_of(file_id))
        except (RequestError, OSError):
            return 0

    def _check_queued(self, owner: str, num_lines: int) -> None:
        live = [batch for batch in self.live_batches() if batch.owner == owner]
        limits = self._limits
        if len(live) >= limits.max_batches:
            raise QuotaError(
                f"the key has {len(live)} batches that have not ended; it may have "
                f"{limits.max_batches}"
            )
        left = sum(batch.num_lines - batch.num_completed - batch.num_failed for batch in live)
        if left + num_lines > limits.max_lines:
            raise QuotaError(
                f"{left:,} lines of the key's batches wait and this one has {num_lines:,}; "
                f"together they may have {limits.max_lines:,}"
            )

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        rows = self._query("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return _batch_of(rows[0]) if rows else None

    def batches(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool
    ) -> Page | None:
        """None where `after` is no batch of the key's."""
        page = self._page("batches", owner, after, limit, newest_first, "", ())
        return None if page is None else Page([_batch_of(row) for row in page.data], page.has_more)

    def _page(
        self,
        table: str,
        owner: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        where: str,
        values: tuple[object, ...],
    ) -> Page | None:
        place = 0 if not newest_first else 1 << 62
        if after is not None:
            rows = self._query(
                f"SELECT number FROM {table} WHERE id = ? AND owner = ?", after, owner
            )
            if not rows:
                return None
            place = rows[0]["number"]
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        found = self._query(
            f"SELECT * FROM {table} WHERE owner = ? AND number {sign} ? {where} "
            f"ORDER BY number {order} LIMIT ?",
            *(owner, place, *values, limit + 1),
        )
        return Page(found[:limit], len(found) > limit)

    def live_batches(self) -> list[Batch]:
        """Of all keys, the oldest first."""
        marks = ", ".join("?" * len(LIVE))
        rows = self._query(
            f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number", *LIVE
        )
        return [_batch_of(row) for row in rows]

    def move(self, batch_id: str, status: str, *before: str) -> bool:
        """To another status, if it has one of these; whether it had."""
        marks = ", ".join("?" * len(before))
        with self._transaction() as database:
            moved = database.execute(
                f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? AND status IN "
                f"({marks})",
                (status, int(self._now()), batch_id, *before),
            )
            return moved.rowcount == 1

    def begin(self, batch_id: str, num_lines: int, model: str | None) -> bool:
        """Its file was checked: it has so many lines."""
        with self._transaction() as database:
            begun = database.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, num_lines = ?, "
                "model = ? WHERE id = ? AND status = 'validating'",
                (int(self._now()), num_lines, model, batch_id),
            )
            return begun.rowcount == 1

    def answered(self, batch_id: str) -> set[int]:
        """The lines that have an answer."""
        rows = self._query("SELECT line FROM results WHERE batch = ?", batch_id)
        return {row["line"] for row in rows}

    def add_results(self, batch_id: str, results: Iterable[Result]) -> None:
        """Keep answers; a line that has one keeps the one it has."""
        with self._transaction() as database:
            for result in results:
                added = database.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (batch_id, *result)
                )
                column = "num_completed" if result.is_good else "num_failed"
                if added.rowcount == 1:
                    database.execute(
                        f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,)
                    )

    def finish(
        self, batch: Batch, status: str, unanswered: Iterable[Result], errors: list[BatchProblem]
    ) -> None:
        """End a batch: its answers become files. `unanswered`: errors of lines without answers.
        One whose file was not found to be good has no lines."""
        with self._failures():
            good = self._write_answers(batch, True, ())
            bad = self._write_answers(batch, False, unanswered)
        try:
            with self._transaction() as database:
                for made in (good, bad):
                    if made is not None:
                        _insert_file(database, made)
                database.execute(
                    f"UPDATE batches SET status = ?, {status}_at = ?, errors = ?, "
                    "num_lines = IIF(in_progress_at IS NULL, 0, num_lines), "
                    "num_failed = IIF(in_progress_at IS NULL, 0, num_lines - num_completed), "
                    "output_file_id = ?, error_file_id = ? WHERE id = ?",
                    (
                        *(status, int(self._now()), json.dumps(errors)),
                        *(made and made.id for made in (good, bad)),
                        batch.id,
                    ),
                )
                database.execute("DELETE FROM results WHERE batch = ?", (batch.id,))
        except BaseException:
            for made in (good, bad):
                if made is not None:
                    self.path_of(made.id).unlink(missing_ok=True)
            raise

    def _write_answers(self, batch: Batch, good: bool, more: Iterable[Result]) -> StoredFile | None:
        parts = _merged(self._answers(batch.id, good), more)
        first = next(parts, None)
        if first is None:
            return None
        name = f"{batch.id}_{'output' if good else 'error'}.jsonl"

        def whole() -> Iterator[bytes]:
            yield first
            yield from parts

        return self._write(batch.owner, name, OUTPUT, whole(), batch.keep_s)

    def _answers(self, batch_id: str, good: bool) -> Iterator[Result]:
        """In order of lines, some at a time."""
        last = -1
        while True:
            rows = self._query(
                "SELECT line, is_good, answer FROM results WHERE batch = ? AND is_good = ? AND "
                "line > ? ORDER BY line LIMIT 256",
                *(batch_id, good, last),
            )
            if not rows:
                return
            for row in rows:
                yield Result(row["line"], bool(row["is_good"]), row["answer"])
            last = rows[-1]["line"]


def _merged(answers: Iterator[Result], more: Iterable[Result]) -> Iterator[bytes]:
    """The bytes of both, by line."""
    others = iter(more)
    left, right = next(answers, None), next(others, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left.line < right.line):
            assert left is not None
            yield left.answer
            left = next(answers, None)
        else:
            yield right.answer
            right = next(others, None)


def _insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    database.execute(
        "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, expires_at, digest) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(file.id, file.owner, file.purpose, file.filename, file.bytes),
            *(file.created_at, file.expires_at, file.digest),
        ),
    )


def _file_of(row: sqlite3.Row) -> StoredFile:
    return StoredFile(*tuple(row)[1:])


def _batch_of(row: sqlite3.Row) -> Batch:
    plain = (
        *("id", "owner", "status", "endpoint", "input_file_id", "input_digest"),
        *("completion_window", "keep_s", "model", "created_at", "expires_at", "num_lines"),
        *("num_completed", "num_failed", "output_file_id", "error_file_id"),
    )
    return Batch(
        **{name: row[name] for name in plain},
        metadata=json.loads(row["metadata"]),
        errors=[BatchProblem(*problem) for problem in json.loads(row["errors"] or "[]")],
        times={name: row[name] for name in _TIMES if row[name] is not None},
    )


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_jobs(folder: Path) -> bool:
    """Whether a server kept jobs here; a StoreError where that cannot be seen."""
    try:
        return (folder / DATABASE).exists()
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from None
