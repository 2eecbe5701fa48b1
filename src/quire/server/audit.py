"""AuditLog: what matters to security, one line an event, in a hash chain that `quire audit` checks.

Events are queued and written by a thread of its own, so that a slow disk blocks nobody. No loss
goes unrecorded: where the disk does not take events and the queue is full, a line `gap` says how
many are missing as soon as it can be written. Events that anybody can cause as often as they like
are written once and then counted: one line for the first, one a minute for all that followed.
"""

import fcntl
import hashlib
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.core.errors import ConfigError
from quire.core.hash_chain import (
    MAX_LINE_BYTES,
    BrokenLineError,
    Chain,
    read_line,
    read_secret,
)
from quire.server.calls import Call
from quire.server.keys import RequiredScope, required_scope
from quire.server.logs import LOGGER, log
from quire.server.settings import ServerSettings

REPEATS_S = 60.0  # how long events of a kind are counted together
MAX_QUEUED = 10_000
_MAX_BATCH = 1000  # events written at once
_RETRY_S = 1.0
_LONGEST_TEXT = 500  # characters of a field

_QUOTA_CODES = (
    *("rate_limit_exceeded", "concurrency_limit"),
    *("insufficient_quota", "request_exceeds_quota"),
)

Fields = Mapping[str, object]


@dataclass(slots=True)
class _Repeats:
    since: float
    group: Fields
    count: int = 0  # without the first, which was written


class AuditHead(NamedTuple):
    """Number and hash of the last line that is on the disk; events that could not be taken."""

    seq: int
    hash: str
    num_dropped: int


class AuditSink(Protocol):
    """Takes events: an AuditLog, or the way to one in another process."""

    def record(self, event: str, **about: object) -> None: ...

    def record_repeated(
        self, event: str, group: Fields, about: Fields, *, max_groups: int = 256
    ) -> None: ...

    def reopen(self) -> None: ...

    def close(self, timeout_s: float = 5.0, **about: object) -> None: ...


class AuditLog:
    """Continues the chain of an existing file. `record` never blocks."""

    def __init__(
        self,
        path: Path,
        secret: bytes | None = None,
        *,
        now: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
        start: bool = True,
    ) -> None:
        self._path = path
        self._now = now
        self._max_queued = max_queued
        self._queue: deque[Fields] = deque()
        self._repeats: dict[tuple[object, ...], _Repeats] = {}
        self._num_lost = 0  # events, since the last gap line
        self._wake = threading.Condition()  # guards all of the above
        self.num_dropped = 0
        self._wants_reopening = False
        self._is_closed = False
        self._failure: str | None = None  # why the last attempt to write failed
        self._cut_to: int | None = None  # truncate to this size before the next write
        self._file = _open_file(path)
        try:
            self._chain = self._read_tail(secret)
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._run, name="quire-audit", daemon=True)
        if start:
            self._thread.start()

    # ---- from any thread

    def record(self, event: str, **about: object) -> None:
        """Queue an event; long texts are truncated."""
        with self._wake:
            self._enqueue(event, about)
            self._wake.notify()

    def record_repeated(
        self, event: str, group: Fields, about: Fields, *, max_groups: int = 256
    ) -> None:
        """Queue an event that may be frequent: the first of its group is written, the others are
        counted. Beyond `max_groups` at a time, all others are one group."""
        with self._wake:
            found = self._repeats.get((event, *group.values()))
            if found is None and sum(key[0] == event for key in self._repeats) >= max_groups:
                group = dict.fromkeys(group, "others")
                found = self._repeats.get((event, *group.values()))
            if found is not None:
                found.count += 1
                return
            self._repeats[event, *group.values()] = _Repeats(self._now(), dict(group))
            self._enqueue(event, {**group, **about})
            self._wake.notify()

    def reopen(self) -> None:
        """Continue in a new file if the old one was renamed (log rotation)."""
        with self._wake:
            self._wants_reopening = True
            self._wake.notify()

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last line that is on the disk."""
        return self._chain.seq, self._chain.last

    def close(self, timeout_s: float = 5.0, **about: object) -> None:
        """Write what is queued and a last line, at most for `timeout_s`."""
        with self._wake:
            self._close_repeats(at_end=True)
            self._enqueue("stop", about)
            self._is_closed = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._file)

    def _enqueue(self, event: str, about: Fields) -> None:
        if len(self._queue) >= self._max_queued:
            self._num_lost += 1
            self.num_dropped += 1
            return
        self._record_gap()
        self._queue.append(self._record_of(event, about))

    def _record_of(self, event: str, about: Fields) -> Fields:
        moment = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        return {"time": moment, "event": event, **_cut(about)}

    def _record_gap(self) -> None:
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            self._enqueue("gap", {"lost": lost})

    # ---- on the writer's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._queue and not self._is_closed and not self._wants_reopening:
                    self._wake.wait(_RETRY_S)
                is_closed = self._is_closed
            is_written = self.write()
            if is_closed:
                if not is_written:
                    log("audit_lost", logging.ERROR, events=len(self._queue) + self._num_lost)
                return
            if not is_written:
                time.sleep(_RETRY_S)

    def write(self) -> bool:
        """Write all that is queued; False where that failed."""
        try:
            self._close_repeats()
            self._reopen_where_moved()
            while batch := self._batch():
                self._append(batch)
                with self._wake:
                    for _ in batch:
                        self._queue.popleft()
        except OSError as error:
            self._report(str(error.strerror or error))
            return False
        except Exception:  # a bug: log it, and try again
            LOGGER.exception("audit_failed")
            return False
        self._report(None)
        return True

    def _close_repeats(self, *, at_end: bool = False) -> None:
        """Close the groups whose time is over, or all of them."""
        now = self._now()
        with self._wake:
            for key, found in list(self._repeats.items()):
                if now - found.since < REPEATS_S and not at_end:
                    continue
                del self._repeats[key]
                if found.count:
                    about = {**found.group, "more": found.count, "in_s": round(now - found.since)}
                    self._enqueue(str(key[0]), about)

    def _batch(self) -> list[Fields]:
        """The next events; they stay queued until they are written."""
        with self._wake:
            if not self._queue:
                self._record_gap()
            return [self._queue[index] for index in range(min(_MAX_BATCH, len(self._queue)))]

    def _append(self, records: list[Fields]) -> None:
        """All of them on the disk, or none."""
        chain = replace(self._chain)
        self._write_all(b"".join(chain.append(record) for record in records))
        self._chain = chain

    def _write_all(self, content: bytes) -> None:
        if self._cut_to is not None:
            os.ftruncate(self._file, self._cut_to)
            self._cut_to = None
        size = os.fstat(self._file).st_size
        try:
            while content:
                content = content[os.write(self._file, content) :]
            os.fsync(self._file)
        except OSError:
            self._cut_to = size
            with suppress(OSError):
                os.ftruncate(self._file, size)
                self._cut_to = None
            raise

    def _reopen_where_moved(self) -> None:
        if not self._wants_reopening:
            return
        if not _is_at(self._path, self._file):
            try:
                descriptor = _open_file(self._path)
            except ConfigError as error:
                log("audit_not_moved", logging.ERROR, error=str(error))
                return
            if os.fstat(descriptor).st_size:
                log("audit_not_moved", logging.ERROR, error="another file is in its place")
                os.close(descriptor)
            else:
                self._move_to(descriptor)
        self._wants_reopening = False

    def _move_to(self, descriptor: int) -> None:
        """End the old file with a line `rotated`; the chain goes on in the new one."""
        try:
            self._append([self._record_of("rotated", {})])
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._file)
        self._file = descriptor
        with self._wake:
            self._queue.appendleft(self._record_of("continued", {}))

    def _read_tail(self, secret: bytes | None) -> Chain:
        """The end of the chain in the file. A partial last line, left by a crash, is removed, and
        the next line records that."""
        size = os.fstat(self._file).st_size
        start = max(0, size - 2 * MAX_LINE_BYTES)
        tail = os.pread(self._file, size - start, start)
        whole, _, rest = tail.rpartition(b"\n")
        if rest and (whole or size <= MAX_LINE_BYTES):
            os.ftruncate(self._file, size - len(rest))
            self._enqueue("tail_cut", {"bytes": len(rest), "sha256": _digest(rest)})
        elif rest:
            raise ConfigError(f"{self._path} is no audit log: it has no lines at its end")
        if not whole:
            return Chain(secret)
        try:
            last = read_line(whole.rpartition(b"\n")[2] + b"\n", secret)
        except BrokenLineError as error:
            raise ConfigError(
                f"{self._path} cannot be continued: its last line is not sound: {error} "
                "(`quire audit` tells more; move the file away to begin another)"
            ) from None
        return Chain(secret, last.seq, last.hash)

    def _report(self, failure: str | None) -> None:
        """Log when writing begins to fail, and when it works again."""
        if failure is not None and failure != self._failure:
            log("audit_unwritten", logging.ERROR, error=failure, file=str(self._path))
        elif failure is None and self._failure is not None:
            log("audit_written")
        self._failure = failure


def open_audit_log(settings: ServerSettings) -> AuditLog | None:
    """The log that the settings name, or none; raises a ConfigError."""
    if settings.audit_log is None:
        if settings.audit_key is not None or settings.audit_requests:
            raise ConfigError("--audit-key and --audit-requests need --audit-log FILE")
        return None
    secret = None if settings.audit_key is None else read_secret(settings.audit_key)
    return AuditLog(settings.audit_log, secret)


def record_call(audit: AuditSink, call: Call, *, every_request: bool) -> None:
    """Record an ended call if it matters to security; never its contents."""
    client = {"client": call.client or ""}
    about = {"request_id": call.id, "path": call.path}
    name = None if call.key is None else call.key.name
    if call.status == 401 or call.error == "too_many_failed_keys":
        audit.record_repeated(
            "authentication_failed",
            {"code": call.error, "key": name, **client},
            about,
            max_groups=16,  # the client chooses the address
        )
        return
    if call.error == "insufficient_scope":
        audit.record_repeated("scope_refused", {"key": name, "path": call.path}, client)
    elif call.error in _QUOTA_CODES:
        group = {"key": name, "code": call.error}
        audit.record_repeated("quota_refused", group, {**about, **client})
    elif required_scope(call.path) is RequiredScope.ADMIN and name is not None:
        audit.record("admin", key=name, status=call.status, **about, **client)
    elif (
        required_scope(call.path) is RequiredScope.ADMIN
    ):  # without keys anybody is an administrator
        audit.record_repeated("admin", {"key": None, "path": call.path}, client)
    if every_request and required_scope(call.path) is not RequiredScope.NO_KEY:
        tokens = {
            field: count
            for field, count in call.summary().items()
            if field in ("prompt_tokens", "completion_tokens", "error", "field")
        }
        audit.record(
            "request", key=name, method=call.method, status=call.status, **about, **client, **tokens
        )


def settings_digest(settings: ServerSettings) -> str:
    """A hash of all settings, keys included: two starts with the same one had the same settings."""
    values = [
        f"{field.name}={getattr(settings, field.name)!r}"
        for field in fields(settings)
        if field.name != "keys"
    ]
    for key in settings.keys:
        own = [(field.name, getattr(key, field.name)) for field in fields(key)]
        values.append(repr([(name, sorted(v) if name == "scopes" else v) for name, v in own]))
    return _digest("\n".join(values).encode("utf-8", "surrogatepass"))


def _open_file(path: Path) -> int:
    """Open and lock: one process writes."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror or error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is no file: an audit log is one")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another server writes to {path}: give each its own") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _cut(about: Fields) -> Fields:
    return {
        name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in about.items()
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
