"""AnswerStore: responses that clients can name later, and the answers of idempotency keys.

In SQLite, each by the API key that owns it: in a file of the state folder, which survives restarts
and is shared by all processes of a server, or in memory. Both kinds are bounded by count, bytes and
age. Where a bound is reached, the API key that holds most loses its oldest: storing more pushes out
one's own.
"""

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.server.database import Database, sync_path

DATABASE = "answers.sqlite"
MEMORY = Path(":memory:")
Item = dict[str, Any]  # an item of a conversation, as its JSON
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
LIVE = ("queued", "in_progress")
_PURGE_S = 60.0  # between two looks for what has expired
_ROW_BYTES = 256  # counted for each, beside its contents

_SCHEMA = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL, status TEXT NOT NULL, seed INTEGER NOT NULL,
    earlier BLOB NOT NULL, input BLOB NOT NULL, body BLOB NOT NULL, request BLOB NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX responses_by_owner ON responses (owner, bytes);
CREATE INDEX responses_by_status ON responses (status);
CREATE TABLE events (
    response TEXT NOT NULL, first INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (response, first)
) WITHOUT ROWID;
CREATE TABLE keyed_answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, key TEXT NOT NULL,
    digest TEXT NOT NULL, name TEXT NOT NULL, created_at INTEGER NOT NULL,
    seed INTEGER NOT NULL, status INTEGER, headers TEXT, body BLOB, bytes INTEGER NOT NULL,
    UNIQUE (owner, key)
);
CREATE INDEX keyed_by_owner ON keyed_answers (owner, bytes);
CREATE INDEX keyed_by_age ON keyed_answers (created_at)
"""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Of all API keys together."""

    max_responses: int = 1000  # 0: none is stored
    max_response_bytes: int = 64 << 20
    max_response_age_s: float = 30 * 86400.0
    max_keyed: int = 10_000
    max_keyed_bytes: int = 64 << 20
    max_keyed_age_s: float = 86400.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`earlier` and `input` are lists of items: the conversation before, and what followed it.
    `events`: those of its stream, where there was one. `request` and `seed`: of one that is made in
    the background, what makes it again."""

    id: str
    earlier: bytes
    input: bytes
    body: bytes  # the response, with the items of its output
    events: bytes = b""
    status: Status = "completed"
    created_at: int = 0
    seed: int = 0
    request: bytes = b""

    @property
    def num_bytes(self) -> int:
        sized = (self.earlier, self.input, self.body, self.request)
        return _ROW_BYTES + sum(map(len, sized))

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    @property
    def is_background(self) -> bool:
        return bool(self.request)

    def conversation(self) -> list[Item]:
        """What a response that follows begins with."""
        output: list[Item] = json.loads(self.body)["output"]
        return [*json.loads(self.earlier), *json.loads(self.input), *output]


@dataclass(frozen=True, slots=True)
class KeyedAnswer:
    """What an idempotency key stands for: a body, and all that its answer has besides that body.
    `body` is None until the answer is whole, and where it was not kept."""

    digest: str  # of the request
    name: str  # that its id is made of
    created_at: int
    seed: int
    status: int | None = None
    headers: list[tuple[str, str]] | None = None
    body: bytes | None = None


class AnswerStore(Database):
    """Opened at its first use; `folder` is None for one in memory."""

    version = 1
    schema = _SCHEMA
    contents = "stored responses and answers"
    synchronous = "NORMAL"  # a power cut may lose the last ones, a crash none
    overwrites = "ON"

    def __init__(
        self,
        folder: Path | None = None,
        limits: AnswerLimits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(MEMORY if folder is None else folder / DATABASE)
        self._limits = limits or AnswerLimits()
        self._now = now
        self._purged_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether responses are stored at all."""
        return self._limits.max_responses > 0

    @property
    def is_used(self) -> bool:
        """Whether anything may be in it; it is not opened to know."""
        if self._database is not None or self.path == MEMORY:
            return self._database is not None
        try:
            return self.path.exists()
        except OSError:  # whoever opens it learns why
            return True

    def check(self) -> None:
        """Raises StoreError where it cannot be used."""
        self._query("SELECT 1")

    def sync(self) -> None:
        """What was stored survives a power cut, too, when this returns."""
        if self.path == MEMORY:
            return
        log = self.path.with_name(f"{self.path.name}-wal")
        with self._failures():
            for path in (log, self.path, self.path.parent):
                with suppress(FileNotFoundError):  # a log that was written back is removed
                    sync_path(path)

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            if self.path != MEMORY:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.path.touch(0o600)
            self._database = self._connect()
        return self._database

    # ---- responses

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep a response; False where it is larger than the whole store."""
        events = zlib.compress(response.events, 1) if response.events else b""
        num_bytes = response.num_bytes + len(events)
        if not self.is_open or num_bytes > self._limits.max_response_bytes:
            return False
        with self._transaction() as database:
            database.execute("DELETE FROM responses WHERE id = ?", (response.id,))
            database.execute(
                "INSERT INTO responses (owner, id, created_at, status, seed, earlier, input, body, "
                "request, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(owner, response.id, response.created_at or int(self._now())),
                    *(response.status, response.seed, response.earlier, response.input),
                    *(response.body, response.request, num_bytes),
                ),
            )
            if events:
                row = (response.id, 0, events)
                database.execute("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", row)
            self._drop_responses(database)
        return True

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Without its events."""
        rows = self._query(
            "SELECT id, earlier, input, body, x'' AS events, status, created_at, seed, request "
            "FROM responses WHERE owner = ? AND id = ? AND created_at > ?",
            *(owner, response_id, self._oldest_response),
        )
        return StoredResponse(*rows[0]) if rows else None

    def events(self, response_id: str, first: int) -> list[tuple[int, bytes]]:
        """Of a response that was found: runs of events, each with the number of its first, from the
        run on that has this one."""
        rows = self._query(
            "SELECT first, data FROM events WHERE response = ? AND first >= COALESCE((SELECT "
            "MAX(first) FROM events WHERE response = ? AND first <= ?), 0) ORDER BY first",
            *(response_id, response_id, first),
        )
        return [(row["first"], zlib.decompress(row["data"])) for row in rows]

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._transaction() as database:
            found = database.execute(
                "DELETE FROM responses WHERE owner = ? AND id = ? AND created_at > ?",
                (owner, response_id, self._oldest_response),
            )
            if found.rowcount == 1:
                database.execute("DELETE FROM events WHERE response = ?", (response_id,))
            return found.rowcount == 1

    @property
    def _oldest_response(self) -> int:
        return int(self._now() - self._limits.max_response_age_s)

    def _drop_responses(self, database: sqlite3.Connection) -> None:
        """What is over, and more than the limits allow; never one that is still being made."""
        limits = self._limits
        dropped = _shrink(database, "responses", limits.max_responses, limits.max_response_bytes)
        if self._is_time_to_purge():
            oldest = (self._oldest_response,)
            over = "SELECT number FROM responses WHERE created_at <= ?"
            dropped += [row["number"] for row in database.execute(over, oldest).fetchall()]
        for number in dropped:
            database.execute(
                "DELETE FROM events WHERE response = (SELECT id FROM responses WHERE number = ?)",
                (number,),
            )
            database.execute("DELETE FROM responses WHERE number = ?", (number,))

    def _is_time_to_purge(self) -> bool:
        now = self._now()
        is_time = now - self._purged_at >= _PURGE_S
        if is_time:
            self._purged_at = now
        return is_time

    # ---- responses that are made in the background

    def live(self) -> list[tuple[str, str]]:
        """Owners and ids of those that have not ended, the oldest first."""
        rows = self._query(
            "SELECT owner, id FROM responses WHERE status IN ('queued', 'in_progress') "
            "ORDER BY number"
        )
        return [(row["owner"], row["id"]) for row in rows]

    def begin_response(self, owner: str, response_id: str, body: bytes) -> bool:
        """It is being made, from its first event on; False where it was cancelled or deleted."""
        with self._transaction() as database:
            begun = database.execute(
                "UPDATE responses SET status = 'in_progress', body = ?, bytes = bytes - COALESCE("
                "(SELECT SUM(LENGTH(data)) FROM events WHERE response = ?), 0) WHERE owner = ? "
                "AND id = ? AND status IN ('queued', 'in_progress')",
                (body, response_id, owner, response_id),
            )
            database.execute("DELETE FROM events WHERE response = ?", (response_id,))
            return begun.rowcount == 1

    def add_events(self, response_id: str, first: int, events: bytes) -> bool:
        """More events of one that is being made; False where it was cancelled or deleted."""
        with self._transaction() as database:
            data = zlib.compress(events, 1)
            found = database.execute(
                "UPDATE responses SET bytes = bytes + ? WHERE id = ? AND status = 'in_progress'",
                (len(data), response_id),
            )
            if found.rowcount == 1:
                row = (response_id, first, data)
                database.execute("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", row)
            return found.rowcount == 1

    def end_response(
        self, owner: str, response_id: str, status: Status, body: bytes, first: int, events: bytes
    ) -> bool:
        """It has ended, with these last events; False where it had, or was deleted."""
        with self._transaction() as database:
            data = zlib.compress(events, 1) if events else b""
            ended = database.execute(
                "UPDATE responses SET status = ?, body = ?, "
                "bytes = bytes + ? - LENGTH(body) WHERE owner = ? AND id = ? AND "
                "status IN ('queued', 'in_progress')",
                (status, body, len(body) + len(data), owner, response_id),
            )
            if ended.rowcount == 1 and data:
                row = (response_id, first, data)
                database.execute("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", row)
            self._drop_responses(database)
            return ended.rowcount == 1

    # ---- idempotency keys

    def begin_keyed(self, owner: str, key: str, new: KeyedAnswer) -> KeyedAnswer:
        """What the key stands for, which is `new` where it is the first."""
        oldest = int(self._now() - self._limits.max_keyed_age_s)
        with self._transaction() as database:
            database.execute("DELETE FROM keyed_answers WHERE created_at <= ?", (oldest,))
            rows = database.execute(
                "SELECT digest, name, created_at, seed, status, headers, body "
                "FROM keyed_answers WHERE owner = ? AND key = ?",
                (owner, key),
            ).fetchall()
            if rows:
                return _keyed_of(rows[0])
            database.execute(
                "INSERT INTO keyed_answers (owner, key, digest, name, created_at, seed, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (owner, key, new.digest, new.name, new.created_at, new.seed, _ROW_BYTES),
            )
            self._drop_keyed(database)
            return new

    def end_keyed(self, owner: str, key: str, answer: KeyedAnswer) -> None:
        """Its answer is whole. One that is larger than the whole store is not kept: it would be
        computed again."""
        body = answer.body or b""
        limits = self._limits
        num_bytes = _ROW_BYTES + len(body)
        if num_bytes > limits.max_keyed_bytes:
            return
        with self._transaction() as database:
            database.execute(
                "UPDATE keyed_answers SET status = ?, headers = ?, body = ?, bytes = ? "
                "WHERE owner = ? AND key = ? AND name = ?",
                (
                    *(answer.status, json.dumps(answer.headers), body, num_bytes),
                    *(owner, key, answer.name),
                ),
            )
            self._drop_keyed(database)

    def _drop_keyed(self, database: sqlite3.Connection) -> None:
        limits = self._limits
        for number in _shrink(database, "keyed_answers", limits.max_keyed, limits.max_keyed_bytes):
            database.execute("DELETE FROM keyed_answers WHERE number = ?", (number,))

    def counts(self) -> dict[str, int]:
        """Rows of each table, for figures and tests."""
        tables = ("responses", "events", "keyed_answers")
        return {name: self._query(f"SELECT COUNT(*) FROM {name}")[0][0] for name in tables}


def _keyed_of(row: sqlite3.Row) -> KeyedAnswer:
    given: dict[str, Any] = dict(row)
    if given["headers"] is not None:
        given["headers"] = [(name, value) for name, value in json.loads(given["headers"])]
    return KeyedAnswer(**given)


def _shrink(database: sqlite3.Connection, table: str, max_rows: int, max_bytes: int) -> list[int]:
    """Which rows go so that the limits hold: again and again the oldest of whoever holds most. Each
    owner's rows are looked at once, however many go."""
    held = database.execute(
        f"SELECT owner, COUNT(*) AS num, SUM(bytes) AS size FROM {table} GROUP BY owner"
    ).fetchall()
    num = sum(row["num"] for row in held)
    sizes: dict[str, int] = {row["owner"]: row["size"] for row in held}
    size = sum(sizes.values())
    oldest: dict[str, Iterator[sqlite3.Row]] = {}
    dropped: list[int] = []
    while sizes and (num > max_rows or size > max_bytes):
        owner = max(sizes, key=lambda each: sizes[each])
        if owner not in oldest:
            oldest[owner] = iter(_ended_rows(database, table, owner))
        row = next(oldest[owner], None)
        if row is None:
            del sizes[owner]  # all others of its rows are still being made
            continue
        dropped.append(row["number"])
        num, size = num - 1, size - row["bytes"]
        sizes[owner] -= row["bytes"]
    return dropped


def _ended_rows(database: sqlite3.Connection, table: str, owner: str) -> list[sqlite3.Row]:
    """The oldest first."""
    ended = "status NOT IN ('queued', 'in_progress')" if table == "responses" else "TRUE"
    return database.execute(
        f"SELECT number, bytes FROM {table} WHERE owner = ? AND {ended} ORDER BY number", (owner,)
    ).fetchall()
