"""The log's queue: what fits is written in order, what does not is counted and reported."""

import io
import json
import logging
import threading

import pytest
from tests.server.servers import PATIENCE_S

from quire.server import logs
from quire.server.logs import LineWriter, log, num_dropped_lines, set_up_logs


class StalledReader:
    """Blocks until it is released."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.is_asked = threading.Event()
        self.content = b""

    def write(self, content: bytes) -> int:
        self.is_asked.set()
        assert self.may_read.wait(PATIENCE_S)
        taken = content[:1000]  # as a pipe may
        self.content += taken
        return len(taken)


def test_what_does_not_fit_is_dropped_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_BYTES", 100)
    reader = StalledReader()
    writer = LineWriter(reader.write, lambda count: b"missed %d\n" % count)
    writer.put(b"0" * 49 + b"\n")
    assert reader.is_asked.wait(PATIENCE_S)
    for number in b"123":
        writer.put(bytes([number]) * 49 + b"\n")
    assert writer.num_dropped == 2
    assert not writer.flush(timeout_s=0.01)
    reader.may_read.set()
    assert writer.flush(PATIENCE_S)
    assert reader.content.split() == [b"0" * 49, b"missed", b"2", b"1" * 49]
    writer.put(b"next\n")
    assert writer.flush(PATIENCE_S)
    assert reader.content.endswith(b"1\nnext\n"), "reported once"


def test_a_full_disk_costs_lines_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray()
    capacity = [10]

    def write(some: bytes) -> int:
        taken = some[: capacity[0]]
        if not taken:
            raise OSError(28, "no space left")
        capacity[0] -= len(taken)
        content.extend(taken)
        return len(taken)

    writer = LineWriter(write, lambda count: b"missed %d\n" % count)
    for line in (b"first\n", b"second\n", b"third\n"):
        writer.put(line)
        assert writer.flush(PATIENCE_S)
    assert writer.num_dropped == 2
    capacity[0] = 1000
    writer.put(b"fourth\n")
    assert writer.flush(PATIENCE_S)
    assert bytes(content) == b"first\nseco\nmissed 2\nfourth\n"


def test_closing_waits_no_longer_than_told() -> None:
    reader = StalledReader()
    writer = LineWriter(reader.write)
    writer.put(b"never read\n")
    writer.close(timeout_s=0.01)
    writer.put(b"too late\n")
    assert writer.num_dropped == 1
    reader.may_read.set()


def test_many_threads_lose_nothing_that_fits() -> None:
    content = io.StringIO()
    writer = set_up_logs("json", "info", content)

    def work() -> None:
        for number in range(100):
            log("line", number=number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logging.getLogger("some.library").warning("through the same queue")
    assert writer.flush(PATIENCE_S)
    lines = [json.loads(line) for line in content.getvalue().splitlines()]
    assert sum(line["event"] == "line" for line in lines) == 800
    assert lines[-1]["event"] == "through the same queue"
    assert num_dropped_lines() == 0
    set_up_logs("json", "error", io.StringIO())
