"""The state folder when a server starts: what is wrong with it is said then, not by the first
request that needs it."""

import errno
import logging
import os
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.logs import log

_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CONSEQUENCE = (
    "files, batches, idempotency keys and responses that are to be stored get a 503; all other "
    "requests are answered"
)


def check_state_folder(folder: Path, *, is_named: bool) -> None:
    """Write to it. A ConfigError where the user named it and it can never be written; what may pass
    (a full disk), and a usual folder that is not there for this user, is in the log alone."""
    try:
        _write_to(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        if is_named and error.errno not in _FULL:
            raise ConfigError(
                f"--state {folder} cannot be written: {reason}; name another folder"
            ) from error
        is_full = error.errno in _FULL
        said = f"{_CONSEQUENCE}, until there is room" if is_full else _CONSEQUENCE
        about = {"folder": str(folder), "error": reason, "consequence": said}
        log("state_unavailable", logging.ERROR, **about)


def _write_to(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = folder / f"probe.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(probe, flags, 0o600)
    try:
        os.write(descriptor, bytes(_PROBE_BYTES))
        os.fsync(descriptor)  # some file systems find out here that there is no room
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
