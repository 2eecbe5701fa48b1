"""One bad request among many: the others do not notice; a hung executor is said to be one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.raw import exchange
from tests.server.servers import PacedExecutor, fake_server
from tests.server.test_streams import completion_bytes, events, texts

from quire.core.plan import SequencePlan
from quire.executors.fake import Faults
from quire.server.model_service import State

POISON = 499
NUM_STREAMS = 32


def is_poisoned(row: SequencePlan) -> bool:
    """Rows of the request whose prompt begins with the poison, once it is decoding."""
    return row.sampling is not None and row.sampling.params.seed == POISON and row.start > 60


def asks() -> list[bytes]:
    """Streams of prompts of their own; the last is the poisoned one."""
    fields: dict[str, Any] = {"logprobs": 1}
    asked = [
        completion_bytes(100, [number + 3] * (5 + number), seed=number, **fields)
        for number in range(NUM_STREAMS - 1)
    ]
    return [*asked, completion_bytes(100, [POISON] * 20, seed=POISON, **fields)]


@pytest.mark.parametrize(
    "faults",
    [Faults(nan=is_poisoned), Faults(raises=is_poisoned), Faults(no_memory=is_poisoned)],
    ids=["a row yields NaN", "a step raises", "memory runs out"],
)
def test_a_poisoned_request_among_32_live_streams_fails_alone(
    text_model: Path, faults: Faults
) -> None:
    with fake_server(text_model) as sound:
        expected = [texts(exchange(sound.port, ask)) for ask in asks()]
    executor = PacedExecutor(step_s=0.002, num_blocks=1024, faults=faults)
    with fake_server(text_model, executor) as server:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            answers = list(pool.map(lambda ask: exchange(server.port, ask), asks()))
        *others, poisoned = answers
        for answer, wanted in zip(others, expected, strict=False):
            assert events(answer)[-1] == "data: [DONE]"
            assert "".join(texts(answer)) == "".join(wanted)
        assert '"error"' in events(poisoned)[-1]
        server.wait_until_idle()
        assert server.engine.stats.requests_ended == {"finished": 31, "failed": 1}
        assert server.get("/ready").status == 200


def test_a_hung_step_ends_its_requests_and_the_readiness(text_model: Path) -> None:
    faults = Faults(hangs=lambda row: row.completion_position == 3, heeds_cancel=False)
    engine = {"step_timeout_s": 1.0}
    with fake_server(text_model, PacedExecutor(faults=faults), engine) as server:
        reply = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 9, "seed": 1})
        assert reply.status == 500
        assert "did not answer within" in reply.error["message"]
        server.wait_until(lambda: server.service.state is State.STUCK)
        ready = server.get("/ready")
        assert (ready.status, ready.json) == (503, {"status": "stuck"})
        assert server.get("/health").status == 200
        later = server.post("/v1/completions", {"prompt": "hi"})
        assert (later.status, later.error["code"]) == (503, "stuck")
        assert server.service.has_ended.is_set(), "the process is to end"


def test_a_hung_step_that_heeds_its_flag_costs_one_request(text_model: Path) -> None:
    faults = Faults(
        hangs=lambda row: (
            row.sampling is not None
            and row.sampling.params.seed == POISON
            and row.completion_position == 3
        )
    )
    engine = {"step_timeout_s": 1.0}
    with fake_server(text_model, PacedExecutor(faults=faults), engine) as server:
        body = {"prompt": "hi", "max_tokens": 9, "ignore_eos": True}
        statuses: dict[int, int] = {}

        def ask(seed: int) -> None:
            statuses[seed] = server.post("/v1/completions", {**body, "seed": seed}).status

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2, POISON)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == {1: 200, 2: 200, POISON: 500}
        assert server.get("/ready").status == 200


def test_an_unforeseen_error_is_a_500_in_the_usual_shape(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(text_model) as server:

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr("quire.server.openai_answers.usage_of", broken)
        reply = server.post("/v1/completions", {"prompt": "hi"})
        assert (reply.status, reply.error["code"]) == (500, "internal")
        assert "a bug" not in reply.error["message"]
        monkeypatch.undo()
        assert server.post("/v1/completions", {"prompt": "hi"}).status == 200
