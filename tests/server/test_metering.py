"""Every call that reaches the engine is admitted with the most it can use and settled once."""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.server.raw import head
from tests.server.servers import (
    PATIENCE_S,
    PacedExecutor,
    RunningServer,
    fake_server,
    wait_until,
)

from quire.core.request import RequestOutput
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.quotas import Demand

KEY = "k" * 20


@dataclass
class Entry:
    demand: Demand
    settled: list[list[RequestOutput]] = field(default_factory=list)
    headers: tuple[tuple[str, str], ...] = ()

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        self.settled.append(list(outputs))

    @property
    def new_tokens(self) -> list[int]:
        [outputs] = self.settled
        return [len(done.token_ids) for output in outputs for done in output.completions]


class Book:
    """A meter that admits everything up to a limit."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.max_new_tokens = 10_000

    def admit(self, key: ApiKey | None, demand: Demand) -> Entry:
        assert key is not None
        if demand.max_new_tokens > self.max_new_tokens:
            raise ApiError(429, f"{key.name} has no such quota", code="quota", retry_after_s=7)
        self.entries.append(Entry(demand))
        return self.entries[-1]

    @property
    def last(self) -> Entry:
        wait_until(lambda: bool(self.entries) and bool(self.entries[-1].settled))
        return self.entries[-1]


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[RunningServer]:
    ring = KeyRing([ApiKey("one", digest_of(KEY))])
    with fake_server(text_model, PacedExecutor(num_blocks=1024), keys=ring) as made:
        made.headers["Authorization"] = f"Bearer {KEY}"
        yield made


@pytest.fixture
def book(server: RunningServer) -> Book:
    made = Book()
    server.service.meter = made
    return made


ASKED = {"max_tokens": 6, "n": 2, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_settled_with_what_it_used(
    server: RunningServer, book: Book, *, stream: bool
) -> None:
    body = {"prompt": [[1, 2, 3], [4, 5]], "stream": stream, **ASKED}
    assert server.post("/v1/completions", body).status == 200
    assert book.last.demand == Demand(2, 5, 24)
    assert book.last.new_tokens == [6, 6, 6, 6]
    assert server.chat(stream=stream, **ASKED).status == 200
    assert book.last.demand.num_prompts == 1
    assert book.last.demand.max_new_tokens == 12
    assert book.last.new_tokens == [6, 6]


def test_what_the_engine_refuses_is_settled_with_nothing(server: RunningServer, book: Book) -> None:
    assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 9000}).status == 400
    assert book.last.settled == [[]]


def test_a_refusal_reaches_the_client(server: RunningServer, book: Book) -> None:
    book.max_new_tokens = 11
    for stream in (False, True):
        reply = server.post("/v1/completions", {"prompt": "hi", "stream": stream, **ASKED})
        assert (reply.status, reply.error["code"]) == (429, "quota")
        assert reply.headers["retry-after"] == "7"
    assert book.entries == []
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 11}).status == 200


def test_states_ask_for_no_new_tokens(server: RunningServer, book: Book) -> None:
    server.post("/v1/embeddings", {"input": ["hello", [1, 2]][1:]})
    assert book.last.demand == Demand(1, 2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_pays_for_what_it_got(
    server: RunningServer, book: Book, *, stream: bool
) -> None:
    assert isinstance(server.executor, PacedExecutor)
    server.executor.step_s = 0.01
    asked = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    start = head("/v1/completions", *lines, f"Authorization: Bearer {KEY}")
    try:
        before = server.engine.snapshot().stats.completion_tokens
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as leaving:
            leaving.sendall(start + body)
            wait_until(lambda: server.engine.snapshot().stats.completion_tokens > before)
        assert 1 <= sum(book.last.new_tokens) < 400
    finally:
        server.executor.step_s = 0.0
