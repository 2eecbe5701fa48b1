"""Requests in hard times: too few blocks, templates that loop, prompts of a call that fail."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.server.raw import exchange
from tests.server.servers import QUESTION, PacedExecutor, RunningServer, fake_server, model_server
from tests.server.test_streams import completion_bytes, disconnect, events

from quire.core.plan import SequencePlan
from quire.executors.fake import Faults


def test_too_few_blocks_change_no_token(text_model: Path) -> None:
    """A pool for two of the eight: they are pre-empted and computed again."""

    def answers(num_blocks: int) -> tuple[list[str], int]:
        executor = PacedExecutor(num_blocks=num_blocks, step_s=0.01)  # they all meet
        with fake_server(text_model, executor) as server:

            def ask(seed: int) -> str:
                body = {"prompt": [seed + 3] * 20, "max_tokens": 100, "ignore_eos": True}
                reply = server.post("/v1/completions", {**body, "seed": seed})
                text: str = reply.json["choices"][0]["text"]
                return text

            with ThreadPoolExecutor(8) as pool:
                texts = list(pool.map(ask, range(8)))
            server.wait_until_idle()
            return texts, server.engine.stats.num_preemptions

    plenty, none = answers(256)
    scarce, some = answers(17)
    assert scarce == plenty
    assert none == 0 < some


def test_a_template_that_loops_holds_nobody_up(tmp_path: Path) -> None:
    loops = "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{{ c }}"
    template = loops + "{% endfor %}" * 3
    model = write_text_model(tmp_path / "loops.gguf", chat_template=template)
    with model_server(model) as server:
        is_over = threading.Event()
        replies: list[int] = []

        def keep_asking() -> None:
            while not is_over.is_set():
                replies.append(server.get("/health").status)

        watcher = threading.Thread(target=keep_asking)
        watcher.start()
        reply = server.post("/v1/chat/completions", {"messages": QUESTION})
        is_over.set()
        watcher.join()
        assert reply.status == 500
        assert "loops or grows without end" in reply.error["message"]
        assert len(replies) > 3, "the event loop went on"
        assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status == 200


def poisoned(row: SequencePlan) -> bool:
    return row.sampling is not None and row.sampling.params.seed == 9 and row.tokens == (77,)


def test_a_call_of_many_prompts_says_what_the_one_that_failed_died_of(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.002, faults=Faults(nan=poisoned))
    with fake_server(text_model, executor) as server:
        prompts = [[5, 6], [8, 9], [77]]
        body = {"prompt": prompts, "max_tokens": 200, "ignore_eos": True, "seed": 9}
        whole = server.post("/v1/completions", body)
        assert (whole.status, whole.error["code"]) == (500, "row_fault")
        answer = exchange(server.port, completion_bytes(200, prompts, seed=9))
        if answer.startswith(b"HTTP/1.1 200"):
            assert json.loads(events(answer)[-1].removeprefix("data: "))["error"]["code"] == (
                "row_fault"
            )
        else:
            assert b'"row_fault"' in answer
        server.wait_until_idle()


def soak(server: RunningServer, seed: int, until: float) -> None:
    """Requests that finish, fail, run out of time and are left, in any order."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        if chance.random() < 0.5:
            disconnect(server, 1, chance.randrange(1 << 30))
            continue
        body = {
            "prompt": [chance.randrange(3, 500) for _ in range(chance.randrange(1, 300))],
            "max_tokens": chance.randrange(1, 150),
            "ignore_eos": True,
            "n": chance.choice([1, 1, 1, 3]),
            "seed": chance.choice([1, 2, 9]),
            "stream": chance.random() < 0.7,
            "timeout": chance.choice([0.01, 0.1, 60]),
            "priority": chance.randrange(-3, 4),
        }
        reply = server.post("/v1/completions", body)
        assert reply.status in (200, 400, 408, 429, 500), reply


@pytest.mark.long
def test_a_long_life_leaks_nothing(text_model: Path) -> None:
    faults = Faults(nan=poisoned, raises=lambda row: row.tokens == (78,) and row.start > 200)
    executor = PacedExecutor(step_s=0.0005, num_blocks=128, faults=faults)
    engine = {"max_queue_requests": 32, "max_unread_tokens": 64}
    with fake_server(text_model, executor, engine, body_timeout_s=0.2) as server:
        until = time.monotonic() + 60
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda seed: soak(server, seed, until), range(16)))
        server.wait_until_idle()
        server.wait_until(lambda: server.service.num_streams == 0)
        ended = server.engine.stats.requests_ended
        assert {"finished", "cancelled", "expired", "failed"} <= set(ended)
        assert server.get("/ready").status == 200
