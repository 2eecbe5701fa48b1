"""UsageFile: the tokens that each key used today, in a file that outlives the process.

Several processes may share a folder: each adds what it counted to what the file says, under a lock,
and learns what the others added. The file is replaced as a whole: a crash leaves the old one or the
new one.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.server.logs import log

FILE_NAME = "quotas.json"
_LOCK_NAME = "quotas.lock"
_VERSION = 1
_MAX_BYTES = 64 << 20
_LONGEST_WAIT_S = 2.0  # for another process that is writing


class _State(NamedTuple):
    """What the file holds."""

    day: str
    used: dict[str, int]  # tokens by key


class UsageFile:
    """In `folder`, which is made where it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._folder = folder

    def open(self, day: str) -> dict[str, int]:
        """What the file says of a day; a ConfigError where it could not be written later."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self.add(day, {})
        except OSError as error:
            raise ConfigError(
                f"cannot keep the day's quotas in {self._folder}: {error.strerror or error}; "
                "name another folder by --state"
            ) from error

    def add(self, day: str, tokens: Mapping[str, int]) -> dict[str, int]:
        """Add tokens to keys' figures of a day, and get all figures of it. Raises OSError."""
        with self._locked():
            found = self._read()
            used = found.used if found.day == day else {}
            for name, count in tokens.items():
                used[name] = max(0, used.get(name, 0) + count)
            self._write(_State(day, used))
            return used

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A lock of its own: the file itself is replaced."""
        descriptor = os.open(
            self._folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> _State:
        """What the file holds; nothing where it is not there, or not one of ours."""
        nothing = _State("", {})
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return nothing
        try:
            return _checked(content)
        except (ValueError, RecursionError) as error:
            aside = self.path.with_suffix(".broken")
            os.replace(self.path, aside)
            log(
                "quota_state_broken",
                logging.WARNING,
                file=str(self.path),
                error=str(error),
                moved_to=str(aside),
                consequence="the day's quotas start anew",
            )
            return nothing

    def _write(self, state: _State) -> None:
        content = {"version": _VERSION, "day": state.day, "used": state.used}
        draft = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(draft, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(content).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        with suppress(OSError):  # the file is in place; this makes the rename durable
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _checked(content: bytes) -> _State:
    """The state; a ValueError where it is malformed, an OSError where a newer quire wrote it: that
    stays as it is."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is longer than {_MAX_BYTES} bytes")
    state = json.loads(content)
    version = state.get("version") if isinstance(state, dict) else None
    if isinstance(version, int) and version > _VERSION:
        raise OSError(
            f"{FILE_NAME} was written by a newer quire (version {version}; this one knows "
            f"{_VERSION})"
        )
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    used = state.get("used")
    if not isinstance(state.get("day"), str) or not isinstance(used, dict):
        raise ValueError("it has no day, or nothing used on it")
    for count in used.values():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError("what was used is no number of tokens")
    return _State(state["day"], used)


def default_folder(environment: Mapping[str, str]) -> Path | None:
    """Where state belongs: what systemd names, else what the XDG base directories say. None where
    the user has no home."""
    if named := environment.get("STATE_DIRECTORY"):
        return Path(named.partition(":")[0])
    if named := environment.get("XDG_STATE_HOME"):
        return Path(named) / "quire"
    try:
        return Path.home() / ".local" / "state" / "quire"
    except RuntimeError:
        return None
