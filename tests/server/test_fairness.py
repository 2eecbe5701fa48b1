"""Two keys on one server, one of them flooding it; time is counted in steps."""

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from tests.server.servers import PATIENCE_S, PacedExecutor, RunningServer, fake_server

from quire.core.plan import StepResult
from quire.server.keys import ApiKey, KeyRing, digest_of

LIGHT, HEAVY = "light-0123456789abcdef", "heavy-0123456789abcdef"
KEYS = KeyRing([ApiKey("light", digest_of(LIGHT)), ApiKey("heavy", digest_of(HEAVY))])
BATCH = 8
NUM_MEASURED = 20


class CountingExecutor(PacedExecutor):
    num_steps = 0

    def collect(self, ticket: object, timeout_s: float | None = None) -> StepResult:
        result = super().collect(ticket, timeout_s)
        self.num_steps += 1
        return result


def start_stream(
    server: RunningServer, key: str, seed: int, max_tokens: int, prompt_tokens: int = 30
) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    prompt = [3 + (seed * 7 + place) % 500 for place in range(prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def steps_to_first_token(server: RunningServer, seed: int) -> float:
    before = server.executor.num_steps
    connection = start_stream(server, LIGHT, seed, 4, prompt_tokens=400)  # several steps' worth
    answer = connection.getresponse()  # the status comes with the first token
    steps = server.executor.num_steps - before
    assert answer.status == 200
    answer.read()
    connection.close()
    return float(steps)


class Crowd:
    """So many clients of the heavy key, each with one request after the other."""

    def __init__(self, server: RunningServer, num_clients: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._server.wait_until(
            lambda: self._server.engine.snapshot().num_running >= min(BATCH, len(self._threads))
        )

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, seed: int) -> None:
        while not self._is_over.is_set():
            connection = start_stream(self._server, HEAVY, 1000 + seed, 40)
            connection.getresponse().read()
            connection.close()
            seed += 100


def p95(text_model: Path, num_heavy: int) -> float:
    """The light key's p95 steps to a first token beside so many clients of the other."""
    executor = CountingExecutor(step_s=0.010, num_blocks=512)
    engine = {"max_batch_size": BATCH, "max_step_tokens": 96}
    with ExitStack() as stack:
        server = stack.enter_context(fake_server(text_model, executor, engine, keys=KEYS))
        if num_heavy:
            stack.enter_context(Crowd(server, num_heavy))
        found = sorted(steps_to_first_token(server, n) for n in range(NUM_MEASURED))
        return found[int(0.95 * NUM_MEASURED)]


def test_a_key_that_floods_does_not_delay_the_other(text_model: Path) -> None:
    """A machine that stalls the client lets steps go by; it is tried again then. Without fairness
    a flood costs thirty times the steps of an unloaded server."""
    found = []
    for _ in range(3):
        alone, full, flooded = (p95(text_model, count) for count in (0, BATCH, 6 * BATCH))
        if flooded <= 1.5 * full and flooded <= 4 * alone:
            return
        found.append((alone, full, flooded))
    raise AssertionError(f"steps alone, beside a full batch and beside a flood: {found}")


def test_a_heavier_key_gets_more(text_model: Path) -> None:
    keys = KeyRing(
        [ApiKey("light", digest_of(LIGHT), weight=1), ApiKey("heavy", digest_of(HEAVY), weight=3)]
    )
    executor = PacedExecutor(step_s=0.002, num_blocks=512)
    engine = {"max_batch_size": BATCH, "max_step_tokens": 64}
    counts = {LIGHT: 0, HEAVY: 0}
    is_over = threading.Event()

    def work(key: str, seed: int) -> None:
        while not is_over.is_set():
            connection = start_stream(server, key, seed, 20)
            connection.getresponse().read()
            connection.close()
            counts[key] += 1
            seed += 1000

    with fake_server(text_model, executor, engine, keys=keys) as server:
        start: Callable[[str, int], threading.Thread] = lambda key, seed: threading.Thread(  # noqa: E731
            target=work, args=(key, seed)
        )
        threads = [start(key, n) for n in range(16) for key in (LIGHT, HEAVY)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: sum(counts.values()) > 300)
        is_over.set()
        for thread in threads:
            thread.join()
    assert 1.8 < counts[HEAVY] / counts[LIGHT] < 4.5
