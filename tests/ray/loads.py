"""Clients of an application: what they ask, and loads of them that go on until they are stopped."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.ray.clusters import PATIENCE_S, Application

from quire import LLM

NAME = "tiny"
NUM_CLIENTS = 12
NUM_TOKENS = 300


class Asked(NamedTuple):
    prompt: str
    seed: int
    is_streamed: bool

    @property
    def fields(self) -> dict[str, Any]:
        temperature = 0.0 if self.seed % 3 == 0 else 0.9
        return {"max_tokens": NUM_TOKENS, "seed": self.seed, "temperature": temperature}

    def complete(self, client: Any, model: str = NAME) -> str:
        """Its text, through the openai client; raises whatever the client raises."""
        ask = {"model": model, "prompt": self.prompt, **self.fields}
        if not self.is_streamed:
            return str(client.completions.create(**ask).choices[0].text)
        stream = client.completions.create(**ask, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


ASKED = [Asked(f"request {number}", number, number % 4 != 0) for number in range(24)]


def texts_here(model: Path, asked: Iterable[Asked] = ASKED) -> dict[Asked, str]:
    """What an engine in this process says."""
    with LLM(model, device="cpu", trust_model_file=True) as llm:
        return {one: llm.generate(one.prompt, **one.fields)[0].text for one in asked}


class Load:
    """Clients that ask again and again until they are told to stop."""

    def __init__(self, served: Application, expected: dict[Asked, str]) -> None:
        self._served = served
        self._expected = expected
        self._stop = threading.Event()
        self._num_active = NUM_CLIENTS
        self.num_answers = 0
        self.wrong: list[str] = []

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._pool.submit(self._ask, n) for n in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(PATIENCE_S)
        self._pool.shutdown()

    def _ask(self, number: int) -> None:
        client = self._served.client()
        own = number
        while not self._stop.is_set():
            if own >= self._num_active:
                time.sleep(0.05)
                continue
            one = ASKED[number % len(ASKED)]
            number += 1
            try:
                text = one.complete(client)
            except Exception as error:
                self.wrong.append(f"{one}: {error!r}")
            else:
                if text != self._expected[one]:
                    self.wrong.append(f"{one}: other tokens")
            self.num_answers += 1

    def set_num_active(self, count: int) -> None:
        """Only so many clients ask from now on."""
        self._num_active = count

    def wait_for(self, more: int) -> None:
        """Until so many more answers have come."""
        target, deadline = self.num_answers + more, time.monotonic() + PATIENCE_S
        while self.num_answers < target:
            assert time.monotonic() < deadline, "no answers come"
            time.sleep(0.05)
