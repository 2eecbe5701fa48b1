"""A body that is all errors is refused at its first one, and nobody else waits for that."""

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server.raw import head
from tests.server.servers import PATIENCE_S, PacedExecutor, RunningServer, fake_server, wait_until

from quire.core.errors import RequestError
from quire.core.heap import settle_heap
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.replies import LogprobWriter
from quire.server.work_pool import PoolLimits, WorkPool

HOSTILE, QUIET = "h" * 20, "q" * 20
SIZE = (4 << 20) - 200  # just below the limit of a body


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[RunningServer]:
    keys = [ApiKey("hostile", digest_of(HOSTILE)), ApiKey("quiet", digest_of(QUIET))]
    with fake_server(text_model, PacedExecutor(num_blocks=1024), keys=KeyRing(keys)) as made:
        made.headers["Authorization"] = f"Bearer {HOSTILE}"
        thresholds = gc.get_threshold()
        settle_heap()  # a collection looks through what all tests have made: seconds
        yield made
        gc.unfreeze()
        gc.set_threshold(*thresholds)


class Monitor:
    """Ticks on the server's loop: its longest pause, and the most CPU time the loop used in one."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            at, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.005)
            self.longest_s = max(self.longest_s, time.monotonic() - at)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu)


@contextmanager
def monitored(server: RunningServer) -> Iterator[Monitor]:
    monitor = Monitor()
    watching = asyncio.run_coroutine_threadsafe(monitor.watch(), server.loop)
    try:
        yield monitor
    finally:
        watching.cancel()


def filled(start: str, item: str, end: str) -> bytes:
    return (start + item * ((SIZE - len(start) - len(end)) // len(item)) + end).encode()


CONTENT = '{"messages": [{"role": "user", "content": '
BODIES = {
    "texts": ("/v1/completions", filled('{"prompt": [', '"",', '""]}'), "prompt"),
    "lists": ("/v1/completions", filled('{"prompt": [', "[],", "[]]}"), "prompt"),
    "mixed": ("/v1/completions", filled('{"prompt": [0,', '"",', '""]}'), "prompt"),
    "ids": ("/v1/completions", filled('{"prompt": [', "1,", "1]}"), "prompt"),
    "parts": ("/v1/chat/completions", filled(f"{CONTENT}[", "0,", "0]}]}"), "messages"),
    "objects": ("/v1/chat/completions", filled(f"{CONTENT}[", "{},", "{}]}]}"), "messages"),
    "messages": ("/v1/chat/completions", filled('{"messages": [', "{},", "{}]}"), "messages"),
    "inputs": ("/v1/embeddings", filled('{"input": [', '"",', '""]}'), "input"),
    "biases": (
        "/v1/completions",
        b'{"prompt": "x", "logit_bias": {%s}}' % b",".join(b'"x%d":0' % n for n in range(300_000)),
        "logit_bias",
    ),
    "fields": ("/tokenize", b"{%s}" % b",".join(b'"f%d":0' % n for n in range(300_000)), "f"),
    "tokens": ("/detokenize", filled('{"tokens": [', "-1,", "1]}"), "tokens"),
    "a long name": (
        "/v1/chat/completions",
        f'{CONTENT}[{{"type": "text", "{"k" * 1_000_000}": [{"0," * 300_000}0]}}]}}]}}'.encode(),
        "messages[0].content[0].kkk",
    ),
    "depth": ("/v1/chat/completions", filled(f"{CONTENT}", "[", ""), "messages[0].content[0][0]"),
    "digits": ("/v1/completions", filled('{"prompt": "x", "seed": ', "9", "}"), "seed"),
    "a text": ("/v1/completions", filled('{"prompt": "', "a ", '"}'), None),
    "escapes": ("/v1/completions", filled('{"prompt": "', "\\u00e9", '"}'), None),
    "spaces": ("/v1/completions", filled('{"prompt": ', " ", ""), "prompt"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_by_name_and_stops_nobody(
    server: RunningServer, name: str
) -> None:
    path, body, param = BODIES[name]
    with monitored(server) as monitor:
        reply = server.post(path, body)
        assert reply.status == 400
        assert len(reply.body) < 2000
        if param is not None:
            assert str(reply.error["param"]).startswith(param)
    assert monitor.longest_cpu_s < 0.5  # some ms; bodies that were read on the loop took ten s
    assert monitor.longest_s < 5.0  # likewise, as far as a busy machine can tell
    quiet = {"Authorization": f"Bearer {QUIET}"}
    assert server.post("/tokenize", {"prompt": "hi"}, quiet).status == 200


def test_no_more_tokens_become_text_than_text_becomes_tokens(server: RunningServer) -> None:
    longest = server.get("/v1/models").json["data"][0]["max_model_len"]
    assert server.post("/detokenize", {"tokens": [5] * longest}).status == 200
    reply = server.post("/detokenize", {"tokens": [5] * (longest + 1)})
    assert (reply.status, reply.error["param"]) == (400, "tokens")


def test_many_long_prompts_are_tokenised_off_the_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = server.service.loaded
    assert llm is not None
    threads = set()

    def read(*_: Any, **__: Any) -> Any:
        threads.add(threading.current_thread().name)
        raise RequestError("prompt seen")

    monkeypatch.setattr(llm.prompts, "read", read)
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        reply = server.post(path, {field: ["word " * 3000] * 256})
        assert (reply.status, reply.error["message"]) == (400, "prompt seen")
    assert threads
    assert all(name.startswith("quire-request") for name in threads)


@contextmanager
def rendering_that_waits(server: RunningServer, content: str) -> Iterator[list[str]]:
    """Chats of this content are not rendered until the block ends; gives those that were begun."""
    llm = server.service.loaded
    assert llm is not None
    usual = llm.prompts.read_chat
    is_over = threading.Event()
    begun: list[str] = []

    def read_chat(messages: Any, *args: Any, **options: Any) -> Any:
        if messages[0]["content"] == content:
            begun.append(content)
            assert is_over.wait(PATIENCE_S)
        return usual(messages, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.prompts, "read_chat", read_chat)
        try:
            yield begun
        finally:
            is_over.set()


def chat_of(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def test_a_key_that_fills_its_part_of_the_pool_delays_no_other(server: RunningServer) -> None:
    """Forty templates that do not end; another key's chat is answered meanwhile."""
    quiet = {"Authorization": f"Bearer {QUIET}"}
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(40) as clients:
        with rendering_that_waits(server, "stuck"):
            replies = [clients.submit(server.post, path, chat_of("stuck")) for _ in range(40)]
            wait_until(lambda: server.service.pool.num_waiting >= 38)
            for _ in range(3):
                assert server.post(path, chat_of("hello"), quiet).status == 200
            assert not any(reply.done() for reply in replies)
        assert {reply.result().status for reply in replies} == {200}


def test_who_leaves_before_its_turn_costs_nothing(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkPool(PoolLimits(max_wait_s=10 * PATIENCE_S))  # nobody leaves for having waited
    monkeypatch.setattr(server.service, "pool", pool)
    body = json.dumps(chat_of("leaving")).encode()
    lines = (f"Content-Length: {len(body)}", "Content-Type: application/json")
    start = head("/v1/chat/completions", *lines, f"Authorization: Bearer {HOSTILE}")
    with rendering_that_waits(server, "leaving") as begun:
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
        for connection in connections:
            connection.sendall(start + body)
        most = pool._limits.max_running
        wait_until(lambda: len(begun) == most and pool.num_waiting == 12 - most)
        for connection in connections:
            connection.close()
        wait_until(lambda: pool.num_waiting == 0)
    wait_until(lambda: pool.num_running == 0)
    assert begun == ["leaving"] * most


def test_a_full_queue_is_a_429_that_says_when(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "pool", WorkPool(PoolLimits(num_threads=2, max_waiting=0)))
    reply = server.chat(max_tokens=1)
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status == 200


def test_many_scores_are_written_off_the_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    usual = LogprobWriter.for_chat

    def for_chat(self: LogprobWriter, scores: Any) -> str:
        threads.add(threading.current_thread().name)
        return usual(self, scores)

    monkeypatch.setattr(LogprobWriter, "for_chat", for_chat)
    fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": 400, "n": 2, "ignore_eos": True}
    reply = server.chat(**fields)
    assert reply.status == 200
    assert threads
    assert all(name.startswith("quire-request") for name in threads)
    for choice in reply.json["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 400
        assert all(len(score["top_logprobs"]) == 20 for score in content)
