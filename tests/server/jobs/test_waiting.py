"""Lines that cannot be answered now: quotas, a model that is lost; and uploads that trickle."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.server.jobs.test_batches import KEYS, answers, begin, line, wait
from tests.server.jobs.test_batches import _num_done as num_done
from tests.server.servers import PATIENCE_S, PacedExecutor, fake_server

from quire.executors.fake import Faults
from quire.server import middleware
from quire.server.jobs.lines import BatchLine, LineAnswerer
from quire.server.keys import ApiKey, KeyRing, digest_of

# ---- a model that is lost for good


def test_lines_that_a_lost_model_leaves_are_answered_after_a_restart(
    text_model: Path, tmp_path: Path
) -> None:
    executor = PacedExecutor(num_blocks=1024, step_s=0.05)
    limits = {"max_batch_size": 2, "step_timeout_s": 1.0, "step_grace_s": 0.1}
    with (
        fake_server(text_model, executor, limits, state_folder=tmp_path) as server,
        server.client() as client,
    ):
        made = begin(client, [line(number) for number in range(30)])
        wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)
        executor.faults = Faults(hangs=lambda _: True, heeds_cancel=False)
        server.wait_until(lambda: server.service.is_stuck)
        time.sleep(0.5)  # in which lines would be answered by errors
        store = server.service.jobs._store
        assert store is not None
        kept = store.batch("", made.id)
        assert kept is not None
        assert (kept.status, kept.num_failed) == ("in_progress", 0)
    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        done = wait(client, made)
        assert done.status == "completed"
        assert (done.error_file_id, len(answers(client, done.output_file_id))) == (None, 30)


# ---- quotas


class Quota:
    """An application with a quota of so many tokens; what it was asked."""

    def __init__(self, left: int, retry_ms: int) -> None:
        self.left = left
        self.retry_ms = retry_ms
        self.num_asked = 0

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        await receive()
        is_over = self.left <= 0
        self.left -= not is_over
        error = {"error": {"code": "insufficient_quota", "message": "", "param": None}}
        reply: Any = error if is_over else {"ok": True}
        headers = [(b"retry-after-ms", b"%d" % self.retry_ms)] if is_over else []
        status = 429 if is_over else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})


class Time:
    """A clock that sleeping moves, for all who sleep at once. In the place of `asyncio` in the
    module that is tested alone: servers of other tests sleep, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("quire.server.jobs.lines.asyncio", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            await asyncio.sleep(0)


async def _answered(app: Quota, clock: Time, num_lines: int, until_s: float) -> int:
    """How many lines have an answer after so long."""
    answerer = LineAnswerer(app, lambda _: None, now=lambda: clock.now)
    key = ApiKey("alice", digest_of(KEYS["alice"]))
    asked = [BatchLine(str(number), "/v1/completions", b"{}") for number in range(num_lines)]
    tasks = [asyncio.create_task(answerer.answer(each, key)) for each in asked]
    while clock.now < until_s and not all(task.done() for task in tasks):
        for _ in range(5):
            await asyncio.sleep(0)
        clock.now += 0.25
    num_done = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_done


def test_while_a_quota_has_no_room_one_line_is_tried_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, clock = Quota(left=0, retry_ms=20 * 3_600_000), Time(monkeypatch)
    assert asyncio.run(_answered(app, clock, num_lines=50, until_s=3600)) == 0
    first, tries_a_minute = 50, 60
    assert app.num_asked <= first + tries_a_minute + 2


def test_when_a_quota_has_room_again_all_lines_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    app, clock = Quota(left=3, retry_ms=30_000), Time(monkeypatch)

    async def refill() -> int:
        async def later() -> None:
            await clock.sleep(25)
            app.left = 100

        filling = asyncio.create_task(later())
        num_done = await _answered(app, clock, num_lines=50, until_s=60)
        await filling
        return num_done

    assert asyncio.run(refill()) == 50
    assert clock.now < 40


def test_a_batch_over_its_keys_quota_waits_for_the_next_minute(
    text_model: Path, tmp_path: Path
) -> None:
    secret = KEYS["alice"]
    ring = KeyRing([ApiKey("alice", digest_of(secret), tokens_per_minute=6000)])
    with (
        fake_server(text_model, keys=ring, state_folder=tmp_path) as server,
        server.client(secret) as client,
    ):
        made = begin(client, [line(number, max_tokens=200) for number in range(60)])
        done = wait(client, made, "in_progress", until=lambda batch: num_done(batch) > 5)
        assert done.request_counts is not None
        assert done.request_counts.failed == 0


# ---- uploads


def test_an_upload_that_trickles_is_given_up(text_model: Path, tmp_path: Path) -> None:
    """Each part comes within the time of a body, and all together would take hours."""
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n"
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with fake_server(text_model, state_folder=tmp_path, body_timeout_s=0.5) as server:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
            connection.sendall(head)
            connection.settimeout(0.05)
            reply = b""
            while not reply and time.monotonic() - started < PATIENCE_S:
                connection.sendall(b"x" * 10)
                try:
                    reply = connection.recv(4096)
                except TimeoutError:
                    continue
        assert b" 408 " in reply.splitlines()[0]
        assert b"send the file faster" in reply


def test_an_upload_that_is_fast_enough_may_take_longer_than_a_body(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_SLOWEST_UPLOAD", 500)
    content = json.dumps(line(0)).encode()
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form += content + b"\n" * 2000 + b"\r\n--x--\r\n"
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(form)}\r\n"
        "content-type: multipart/form-data; boundary=x\r\nconnection: close\r\n\r\n"
    ).encode()
    with (
        fake_server(text_model, state_folder=tmp_path, body_timeout_s=1.5) as server,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection,
    ):
        connection.sendall(head)
        for at in range(0, len(form), 500):
            connection.sendall(form[at : at + 500])
            time.sleep(0.4)  # a busy machine may make it a second
        assert b" 200 " in connection.recv(4096).splitlines()[0]
