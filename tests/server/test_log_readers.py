"""Whoever reads what the server prints cannot stop it: unread pipes, full disks, closed streams."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import COMMAND, environment
from tests.server.processes import ROOT
from tests.server.servers import PATIENCE_S, free_port, wait_until

UNREAD = 400  # requests; a line each is more than a pipe of one page and its queue hold


@contextmanager
def process(model: Path, port: int, redirection: str = "", **streams: Any) -> Iterator[Any]:
    """`quire serve` with these streams; a shell closes or redirects them."""
    command = [*COMMAND, "serve", str(model), "--device", "reference", "--kv-memory", "4MiB"]
    command += ["--port", str(port), "--log-level", "debug"]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    started = subprocess.Popen(
        shell, stdin=subprocess.DEVNULL, env=environment(), cwd=ROOT, **streams
    )
    try:
        wait_until(lambda: started.poll() is not None or status(port, "/ready") == 200)
        assert started.poll() is None, "it serves"
        yield started
    finally:
        started.kill()
        started.wait()


def status(port: int, path: str = "/health") -> int | None:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


def ends_on_sigterm(started: "subprocess.Popen[bytes]") -> bool:
    started.send_signal(signal.SIGTERM)
    return started.wait(PATIENCE_S) == 0


def small_pipe() -> tuple[int, int]:
    """A pipe that holds one page, so that few lines fill it."""
    reader, writer = os.pipe()
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    for size in (512, 1):  # a page takes what is left of it in small writes
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n" * size)
    os.set_blocking(writer, True)


@pytest.mark.parametrize("name", ["stderr", "stdout"])
def test_a_pipe_that_nobody_reads_stops_nothing(text_model: Path, name: str) -> None:
    reader, writer = small_pipe()
    fill(writer)
    other = {"stdout", "stderr"} - {name}
    streams: dict[str, Any] = {name: writer, **dict.fromkeys(other, subprocess.DEVNULL)}
    try:
        with process(text_model, port := free_port(), **streams) as started:
            for _ in range(UNREAD if name == "stderr" else 1):
                assert status(port) == 200
            assert ends_on_sigterm(started)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    "redirection",
    [
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
        ">&-",
        "2>&-",
        ">&- 2>&-",
        "<&- >&- 2>&-",
    ],
)
def test_streams_that_take_nothing_stop_nothing(text_model: Path, redirection: str) -> None:
    with process(text_model, port := free_port(), redirection) as started:
        assert [status(port) for _ in range(5)] == [200] * 5
        assert ends_on_sigterm(started)


def test_a_reader_that_leaves_stops_nothing(text_model: Path) -> None:
    reader, writer = os.pipe()
    with process(text_model, port := free_port(), stdout=writer, stderr=writer) as started:
        os.close(writer)
        os.close(reader)
        assert [status(port) for _ in range(5)] == [200] * 5
        assert ends_on_sigterm(started)


def test_a_closed_stream_is_not_taken_by_a_connection(text_model: Path) -> None:
    """Native code prints to descriptor 2: that must not be somebody's socket or the model."""
    with process(text_model, free_port(), "<&- >&- 2>&-") as started:
        held = {number: os.readlink(f"/proc/{started.pid}/fd/{number}") for number in range(3)}
        assert set(held.values()) == {os.devnull}, held
