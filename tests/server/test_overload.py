"""More than the engine can do: refusals that say when to come back, memory that stays flat."""

import gc
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import openai
import pytest
from tests.server.servers import NAME, PacedExecutor, Reply, RunningServer, fake_server

from quire_bench.load_scenarios import memory_of

BODY = {"prompt": "hello", "ignore_eos": True}


def replies_to(
    server: RunningServer, executor: PacedExecutor, body: dict[str, object], count: int
) -> list[Reply]:
    """Of so many at once; steps are slow until one of them has been refused."""
    replies: list[Reply] = []
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(lambda: replies.append(server.post("/v1/completions", body)))
        server.wait_until(lambda: any(reply.status == 429 for reply in replies))
        executor.step_s = 0.0
    assert len(replies) == count
    return replies


def test_a_full_queue_is_a_429_that_says_when(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.1)
    engine = {"max_queue_requests": 2, "max_batch_size": 2}
    with fake_server(text_model, executor, engine) as server:
        replies = replies_to(server, executor, {**BODY, "max_tokens": 100}, 12)
        counts = Counter(reply.status for reply in replies)
        assert set(counts) == {200, 429}
        assert counts[200] >= 2
        for reply in replies:
            if reply.status == 429:
                assert reply.error["type"] == "rate_limit_error"
                assert reply.error["code"] == "overloaded"
                assert int(reply.headers["retry-after"]) >= 1
                assert int(reply.headers["retry-after-ms"]) >= 1
        with server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=NAME, prompt=["a"] * 9, max_tokens=40)
        server.wait_until_idle()


def test_a_queue_is_bounded_by_tokens_too(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.1)
    engine = {"max_queue_tokens": 100, "max_batch_size": 1}
    with fake_server(text_model, executor, engine) as server:
        replies = replies_to(server, executor, {**BODY, "max_tokens": 60}, 6)
        refused = [reply for reply in replies if reply.status == 429]
        assert refused
        assert all("tokens wait" in reply.error["message"] for reply in refused)


def test_the_openai_client_comes_back_and_is_served(text_model: Path) -> None:
    engine = {"max_queue_requests": 1, "max_batch_size": 1}
    with fake_server(text_model, PacedExecutor(step_s=0.005), engine) as server:

        def ask(_: int) -> str:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=50)
            with client:
                answer = client.completions.create(
                    model=NAME, prompt="hello", max_tokens=5, extra_body={"ignore_eos": True}
                )
            return answer.choices[0].finish_reason

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(8))) == ["length"] * 8


class SteadyLoad:
    """Clients that each send their next request when the last has ended."""

    def __init__(self, server: RunningServer, num_clients: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.ends: list[float] = []
        self._threads = [
            threading.Thread(target=self._work, args=(20 + number,))
            for number in range(num_clients)
        ]

    def __enter__(self) -> "SteadyLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, max_tokens: int) -> None:
        body = {**BODY, "max_tokens": max_tokens}
        while not self._is_over.is_set():
            if self._server.post("/v1/completions", body).status == 200:
                self.ends.append(time.perf_counter())
            else:
                time.sleep(0.01)


def hints_and_pace(server: RunningServer, load: SteadyLoad) -> tuple[float, float]:
    """The median hint of thirty refusals, and the pace of ends while they were given."""
    hints: list[tuple[float, float]] = []
    while len(hints) < 30:
        reply = server.post("/v1/completions", {**BODY, "max_tokens": 30})
        if reply.status == 429:
            hints.append((time.perf_counter(), int(reply.headers["retry-after-ms"]) / 1000))
        time.sleep(0.02)
    first, last = hints[0][0], hints[-1][0]
    num_ends = sum(first <= end <= last for end in load.ends)
    return median(hint for _, hint in hints), (last - first) / num_ends


def test_retry_after_is_right_on_a_steady_load(text_model: Path) -> None:
    """As far as a machine that is not steady itself can show it; tests/engine holds it exactly."""
    executor = PacedExecutor(step_s=0.005)
    engine = {"max_queue_requests": 8, "max_batch_size": 8}
    with fake_server(text_model, executor, engine) as server, SteadyLoad(server, 18) as load:
        server.wait_until(lambda: len(load.ends) > 80)
        found = []
        for _ in range(20):  # the machine is not steady either
            hint, interval_s = hints_and_pace(server, load)
            if interval_s / 3 < hint < interval_s * 3:
                return
            found.append((hint, interval_s))
    raise AssertionError(f"hints and what they should have been: {found}")


def flood(server: RunningServer, num_requests: int) -> Counter[int]:
    body = {**BODY, "max_tokens": 20, "stream": True}
    with ThreadPoolExecutor(40) as pool:
        statuses = pool.map(
            lambda _: server.post("/v1/completions", body).status, range(num_requests)
        )
        return Counter(statuses)


def overload(text_model: Path, num_requests: int, rounds: int) -> list[int]:
    """Ten times as many clients as there are places, round after round: memory after each."""
    engine = {"max_queue_requests": 2, "max_batch_size": 2}
    sizes = []
    with fake_server(text_model, PacedExecutor(step_s=0.005), engine) as server:
        for _ in range(rounds):
            statuses = flood(server, num_requests)
            assert statuses[200] > 0
            assert statuses[429] > statuses[200], "most are refused"
            assert sum(statuses.values()) == statuses[200] + statuses[429]
            server.wait_until_idle()
            gc.collect()
            sizes.append(memory_of(os.getpid()))
    return sizes


def test_ten_times_the_load_leaves_memory_flat(text_model: Path) -> None:
    first, *_, last = overload(text_model, num_requests=300, rounds=4)
    assert last - first < 8 << 20


@pytest.mark.long
def test_a_long_overload_leaves_memory_flat(text_model: Path) -> None:
    first, *_, last = overload(text_model, num_requests=3000, rounds=10)
    assert last - first < 8 << 20
