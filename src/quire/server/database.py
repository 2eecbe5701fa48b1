"""Database: an SQLite file of the state folder: opened, checked and used by several threads and
processes.

It is in WAL mode: readers do not wait for writers. A file that is damaged or of a newer quire is
refused and left as it is.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from quire.core.errors import QuireError

_BUSY_S = 10.0


class StoreError(QuireError):
    """A store cannot be used, and why."""


class Database:
    """Methods may be called on any thread, each is one transaction; never on an event loop."""

    version: ClassVar[int]  # of the tables
    schema: ClassVar[str]  # the statements that make them
    contents: ClassVar[str]  # what it holds, for messages: "jobs"
    synchronous: ClassVar[str] = "FULL"  # what was committed survives a power cut
    overwrites: ClassVar[str] = "OFF"  # what is deleted, with zeros

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(made)
        except BaseException:
            made.close()
            raise
        return made

    def _prepare(self, made: sqlite3.Connection) -> None:
        made.row_factory = sqlite3.Row
        version = _version_of(made)
        if version > self.version:
            raise StoreError(
                f"{self.path} was written by a newer quire (version {version} of its tables; this "
                f"one knows {self.version}): use that, or another folder by --state"
            )
        found = made.execute("PRAGMA quick_check").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        if version == 0:
            self._check_new()
        made.execute("PRAGMA journal_mode = WAL")
        made.execute(f"PRAGMA synchronous = {self.synchronous}")
        made.execute(f"PRAGMA secure_delete = {self.overwrites}")
        if version == 0:
            self._create(made)

    def _create(self, made: sqlite3.Connection) -> None:
        """The tables, unless another process has made them meanwhile."""
        made.execute("BEGIN IMMEDIATE")
        if _version_of(made) == 0:
            for statement in self.schema.split(";"):
                made.execute(statement)
            made.execute(f"PRAGMA user_version = {self.version}")
        made.execute("COMMIT")

    def _check_new(self) -> None:
        """Raise a StoreError where a file without tables cannot be right."""

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        is_damaged = isinstance(error, sqlite3.DatabaseError)
        if is_damaged and not isinstance(error, sqlite3.OperationalError):
            return StoreError(
                f"{self.path} cannot be read ({error}): put a copy of it in its place, or move "
                f"{self.path.parent} away to begin without its {self.contents}"
            )
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return StoreError(f"cannot write to {self.path.parent}: {reason or error}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures():
            database = self._opened()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def _query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock, self._failures():
            return self._opened().execute(statement, values).fetchall()

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(f"the store of {self.contents} is closed")
        return self._database


def sync_path(path: Path) -> None:
    """Have a file, or a folder's names, on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version_of(database: sqlite3.Connection) -> int:
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    return version
