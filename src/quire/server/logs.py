"""Logs: one line a call and one an event, as JSON or for a person to read, never waited for.

Lines go through bounded queues to threads that write them: a reader that stalls, a full disk or a
closed terminal cost lines, which are counted, and never the server's time.
"""

import atexit
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]
LOGGER = logging.getLogger("quire.server")
MAX_QUEUED_BYTES = 4 << 20
MAX_EXIT_S = 1.0  # for each destination, to write the queued lines at exit
_BATCH_BYTES = 64 << 10  # lines that are written together


class LineWriter:
    """A bounded queue of lines and the thread that writes them; counts those it had to drop.

    `announce` makes a line that reports drops; it is written before the first line after them. A
    descriptor is written to directly: a thread that hangs in the system holds none of Python's
    locks, so the process can still end.
    """

    def __init__(
        self, write: Callable[[bytes], int], announce: Callable[[int], bytes] | None = None
    ) -> None:
        self.num_dropped = 0
        self._write = write
        self._announce = announce
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # queued or being written
        self._num_announced = 0
        self._is_mid_line = False  # an error left half a line
        self._is_closed = False
        self._changed = threading.Condition()  # re-entrant: a finaliser may log inside put()
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Queue whole lines; they are dropped where the queue is full."""
        with self._changed:
            if self._is_closed or self._num_bytes + len(line) > MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="log-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written, at most `timeout_s`; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, timeout_s)

    def close(self, timeout_s: float = MAX_EXIT_S) -> None:
        """Write what is queued, at most for `timeout_s`, and take nothing more."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (lines := self._next()) is not None:
            self._write_all(lines)
            with self._changed:
                self._num_bytes -= sum(map(len, lines))
                self._changed.notify_all()

    def _next(self) -> list[bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if self._is_closed:
                return None
            lines = []
            size = 0
            while self._lines and size < _BATCH_BYTES:
                lines.append(self._lines.popleft())
                size += len(lines[-1])
            return lines

    def _write_all(self, lines: list[bytes]) -> None:
        missed = self.num_dropped - self._num_announced
        before = b"\n" if self._is_mid_line else b""
        if missed and self._announce is not None:
            before += self._announce(missed)
        content = before + b"".join(lines)
        written = 0
        try:
            while written < len(content):
                written += self._write(content[written:] if written else content)
            self._num_announced += missed
        except (OSError, ValueError):  # no reader, no space, no file any more
            self._count_unwritten(lines, written - len(before))
        if written:
            self._is_mid_line = not content[:written].endswith(b"\n")

    def _count_unwritten(self, lines: list[bytes], written: int) -> None:
        """Count the lines that are not wholly among the bytes that were written."""
        ends = accumulate(map(len, lines))
        with self._changed:
            self.num_dropped += sum(end > written for end in ends)


class QueuedStream(io.TextIOBase):
    """Standard output or error whose writes never block and never fail."""

    def __init__(self, writer: LineWriter, descriptor: int) -> None:
        self._writer = writer
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._unfinished = ""  # a line without its end

    def write(self, text: str) -> int:
        with self._lock:
            self._unfinished += text
            if "\n" in text or len(self._unfinished) > _BATCH_BYTES:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._unfinished = self._unfinished, ""
            if text:
                self._writer.put(text.encode("utf-8", "replace"))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False


class LineHandler(logging.Handler):
    def __init__(self, writer: LineWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(formatter)

    def createLock(self) -> None:  # noqa: N802
        self.lock = None  # the queue has its own

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.writer.num_dropped += 1  # a record that cannot be formatted


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = _contents(record)
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "event": event,
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # escapes line breaks: no field can forge a line


class PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = _contents(record)
        listed = " ".join(
            f"{name}={json.dumps(value, default=str)}" for name, value in fields.items()
        )
        line = f"{_timestamp(record)} {record.levelname.lower()} {event} {listed}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line.rstrip()


def _contents(record: logging.LogRecord) -> tuple[str, Mapping[str, object]]:
    """A record's event and fields. The engine's records have a message for people besides, as they
    are also read without a server."""
    fields: Mapping[str, object] = getattr(record, "fields", {})
    event: str | None = getattr(record, "event", None)
    if event is None:
        return record.getMessage(), fields
    return event, {"message": record.getMessage(), **fields}


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def set_up_logs(form: LogFormat, level: str, stream: TextIO | None = None) -> LineWriter:
    """Send the server's lines and the libraries' warnings to one writer."""
    formatter = JsonLines() if form == "json" else PlainLines()

    def announce(count: int) -> bytes:
        fields = {"fields": {"lines": count}}
        record = LOGGER.makeRecord(
            LOGGER.name, logging.WARNING, "", 0, "log_lines_dropped", (), None, extra=fields
        )
        return formatter.format(record).encode() + b"\n"

    target = stream or sys.stderr
    descriptor = _descriptor_of(target)
    if descriptor is None:
        writer = LineWriter(lambda content: target.write(content.decode("utf-8")), announce)
    else:
        writer = LineWriter(partial(_write_to, descriptor), announce)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        old.writer.close()
        root.removeHandler(old)
    root.addHandler(LineHandler(writer, formatter))
    LOGGER.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")
    return writer


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _write_to(descriptor: int, content: bytes) -> int:
    while True:
        try:
            return os.write(descriptor, content)
        except BlockingIOError:  # the descriptor was inherited as non-blocking
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()


def take_over_standard_streams(log_writer: LineWriter) -> None:
    """From here on printing cannot block the process, nor its exit.

    What libraries print on standard error goes through the log's queue; standard output has a
    queue of its own, so that neither's reader blocks the other.
    """
    outputs = LineWriter(partial(_write_to, 1))
    sys.stdout = QueuedStream(outputs, 1)
    sys.stderr = QueuedStream(log_writer, 2)
    logging.captureWarnings(True)
    atexit.register(outputs.close)
    atexit.register(log_writer.close)


def num_dropped_lines() -> int:
    """Log lines that were dropped."""
    handlers = logging.getLogger().handlers
    return sum(
        handler.writer.num_dropped for handler in handlers if isinstance(handler, LineHandler)
    )


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"fields": fields})
