"""A file of lines answered into another, in the same order, by a model in this process.

The output has a line for every line of the input, at its place, so that what is missing after a
crash is what comes after its last whole line: a second run goes on there. Lines in flight, and
answers that wait for a line before them, are bounded; so is memory, whatever the files' lengths.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire.core.errors import ConfigError, RequestError
from quire.server.jobs.lines import (
    BatchLine,
    LineAnswerer,
    LineError,
    answer_line,
    error_line,
    read_line,
)

MAX_LINE_BYTES = 64 << 20
MAX_JOB_LINE_BYTES = 4 << 20  # of a server, as bodies of requests usually
_MAX_ANSWER_BYTES = 256 << 20
_WINDOW_BYTES = 256 << 20  # of lines in flight and answers that wait
_MIN_WINDOW = 1024  # lines
_ID, _ID_LENGTH = "batch_req_", len("batch_req_") + 32
_HEAD = b'{"id": "'  # of every line of an output
_SYNC_S = 1.0  # at most so much is computed again after the machine lost its power


@dataclass(slots=True)
class Progress:
    """Lines and tokens so far."""

    num_lines: int = 0  # of the output, earlier runs' too
    num_earlier: int = 0  # that earlier runs answered
    num_failed: int = 0  # of this run: answered by an error
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Task(NamedTuple):
    answering: "asyncio.Task[_Result]"
    size: int


class _Result(NamedTuple):
    line: bytes
    is_good: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0


# ---- what earlier runs left


class Output:
    """The file of answers. What a crash or a full disk leaves of it is whole lines, and at most the
    beginning of one."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = size  # of whole lines

    def write(self, line: bytes) -> None:
        """With the system when this returns: a killed process loses nothing of it."""
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise self._lost(error) from None
        self._size += len(line)

    def sync(self) -> None:
        """On disk when this returns."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {error.strerror}. Its lines stay: once there is "
            "room, the same command goes on behind them"
        )


@contextmanager
def open_output(path: Path, lines: Iterator[bytes], restart: bool) -> Iterator[tuple[Output, int]]:
    """The output at its end, and how many lines it has; these are taken from `lines`. A line that
    was cut off is dropped. Refused where another run writes it, or it answers another input."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as written:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is no file: a run could not go on behind what it has")
        try:
            fcntl.flock(written, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path}: another `quire batch` is writing it") from None
        if restart:
            os.ftruncate(descriptor, 0)
        num_done, size = _whole_lines(path, written, lines)
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
        yield Output(path, descriptor, size), num_done


def _whole_lines(path: Path, written: BinaryIO, lines: Iterator[bytes]) -> tuple[int, int]:
    """How many whole lines an output has, and their bytes."""
    num_done = size = 0
    while (line := written.readline(_MAX_ANSWER_BYTES)).endswith(b"\n"):
        num_done += 1
        _check_same(path, num_done, line, next(lines, None))
        size += len(line)
    if len(line) == _MAX_ANSWER_BYTES:
        raise _foreign(path, num_done + 1)
    return num_done, size


def line_id(number: int, line: bytes) -> str:
    """The id of a line's answer: made of the line, so that an output says what it answers."""
    return f"{_ID}{hashlib.sha256(b'%d %b' % (number, line.strip())).hexdigest()[:32]}"


def _check_same(path: Path, number: int, written: bytes, line: bytes | None) -> None:
    """That a line of the output answers the input's; the whole output is looked at before a run
    goes on, so nothing of it is parsed."""
    found = written[len(_HEAD) : len(_HEAD) + _ID_LENGTH].decode("ascii", "replace")
    if not written.startswith(_HEAD) or not found.startswith(_ID) or b"\0" in written:
        raise _foreign(path, number)
    if line is None or line_id(number, line) != found:
        what = "has no such line" if line is None else f"has another line {number} now"
        raise ConfigError(
            f"{path}: line {number} answers {_custom_id_of(written)!r:.100}, and the input {what}: "
            "name another output, or say --restart to write it anew"
        )


def _foreign(path: Path, number: int) -> ConfigError:
    return ConfigError(
        f"{path}: line {number} is no line that `quire batch` wrote; name another output, or say "
        "--restart to write it anew"
    )


def _custom_id_of(written: bytes) -> object:
    try:
        return json.loads(written)["custom_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


# ---- the run


class FileRun:
    """One run over a file. `on_progress` is called after every line."""

    def __init__(
        self,
        answerer: LineAnswerer,
        max_batch_size: int,
        endpoint: str | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.progress = Progress()
        self._answerer = answerer
        self._endpoint = endpoint
        self._on_progress = on_progress
        self._window = max(_MIN_WINDOW, 16 * max_batch_size)
        self._slots = asyncio.Semaphore(2 * max_batch_size)
        self._tasks: deque[_Task] = deque()
        self._num_bytes = 0
        self._synced_at = time.monotonic()

    async def run(self, lines: Iterator[bytes], output: Output, num_done: int) -> None:
        """Answer the lines, of which `num_done` were taken, to the end of `output`."""
        progress = self.progress
        progress.num_lines = progress.num_earlier = num_done
        try:
            for number, data in zip(count(num_done + 1), lines, strict=False):
                task = asyncio.create_task(self._answer(number, data))
                self._tasks.append(_Task(task, len(data)))
                self._num_bytes += len(data)
                while len(self._tasks) >= self._window or self._num_bytes > _WINDOW_BYTES:
                    await self._write_first(output)
                if self._tasks[0].answering.done():
                    await self._write_first(output)
                await asyncio.sleep(0)
            while self._tasks:
                await self._write_first(output)
        finally:
            for left in self._tasks:
                left.answering.cancel()
            await asyncio.gather(*(left.answering for left in self._tasks), return_exceptions=True)
            output.sync()

    async def _write_first(self, output: Output) -> None:
        task = self._tasks[0]
        result = await task.answering
        self._tasks.popleft()
        self._num_bytes -= task.size
        output.write(result.line)
        if time.monotonic() - self._synced_at > _SYNC_S:
            await asyncio.to_thread(output.sync)
            self._synced_at = time.monotonic()
        progress = self.progress
        progress.num_lines += 1
        progress.num_failed += not result.is_good
        progress.prompt_tokens += result.prompt_tokens
        progress.completion_tokens += result.completion_tokens
        self._on_progress(progress)

    async def _answer(self, number: int, data: bytes) -> _Result:
        try:
            if len(data) > MAX_LINE_BYTES:
                raise LineError(f"it has more than {MAX_LINE_BYTES} bytes")
            line = read_line(data, self._endpoint)
        except LineError as error:
            return _Result(error_line(error, number, name=line_id(number, data)), is_good=False)
        async with self._slots:
            return await self._generate(line, line_id(number, data))

    async def _generate(self, line: BatchLine, name: str) -> _Result:
        answer = await self._answerer.answer(line)
        written = answer_line(line, answer, name)
        if not answer.is_good:
            return _Result(written, is_good=False)
        usage = json.loads(answer.body).get("usage") or {}
        completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        return _Result(written, True, prompt, completion)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a JSONL file that are not blank; of one that is too long, its beginning."""
    with open_input(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            is_cut = len(line) > MAX_LINE_BYTES
            while is_cut and (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            if line.strip():
                yield line


def open_input(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def num_lines_of(path: Path) -> int:
    """How many lines there are to answer."""
    return sum(1 for _ in lines_of(path))
