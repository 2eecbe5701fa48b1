"""Logs: one line a call and one an event, as JSON or for a person to read."""

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]
LOGGER = logging.getLogger("quire.server")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)  # escapes line breaks: nobody can forge a second line


class PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        told = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
        line = f"{_timestamp(record)} {record.levelname.lower()} {record.getMessage()} {told}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line.rstrip()


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def set_up_logs(form: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Send the server's lines, and uvicorn's warnings, to one place."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else PlainLines())
    for name, threshold in (("quire.server", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(threshold)
        logger.propagate = False


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, extra={"fields": fields})
