"""The application on a cluster of three nodes: one endpoint, nodes that die, prefixes."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import NODE, PATIENCE_S, Application, application

from quire import LLM

NAME = "tiny"
NUM_CLIENTS = 12
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Application]:
    with application(
        model, "--served-model-name", NAME, "--also", f"other={model}", "--cpus", "0.5"
    ) as found:
        yield found


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


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Asked, str]:
    """What an engine in this process says."""
    with LLM(model, device="cpu", trust_model_file=True) as llm:
        return {one: llm.generate(one.prompt, **one.fields)[0].text for one in ASKED}


def test_both_models_are_listed_and_chosen_by_name(
    served: Application, expected: dict[Asked, str]
) -> None:
    client = served.client()
    assert [card.id for card in client.models.list()] == [NAME, "other"]
    for name in (NAME, "other"):
        assert ASKED[0].complete(client, name) == expected[ASKED[0]]
    with pytest.raises(Exception, match="there is no model 'third'"):
        ASKED[0].complete(client, "third")


def test_figures_are_those_of_all_replicas(served: Application) -> None:
    client = served.client()
    before = served.metric("quire:generation_tokens_total")

    def num_tokens(number: int) -> int:
        usage = client.completions.create(model=NAME, prompt=f"{number}", max_tokens=50).usage
        return usage.completion_tokens if usage is not None else 0

    with ThreadPoolExecutor(8) as pool:
        used = sum(pool.map(num_tokens, range(16)))
    assert served.metric("quire:generation_tokens_total") - before == used > 0


def test_a_wrong_request_is_answered_as_by_one_server(served: Application) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt="x " * 2000, max_tokens=1)


class Load:
    """Clients that ask again and again until they are told to stop."""

    def __init__(self, served: Application, expected: dict[Asked, str]) -> None:
        self._served = served
        self._expected = expected
        self._stop = threading.Event()
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
        while not self._stop.is_set():
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

    def wait_for(self, more: int) -> None:
        """Until so many more answers have come."""
        target, deadline = self.num_answers + more, time.monotonic() + PATIENCE_S
        while self.num_answers < target:
            assert time.monotonic() < deadline, "no answers come"
            time.sleep(0.05)


def test_nodes_die_under_load_and_no_request_fails(
    model: Path, expected: dict[Asked, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with application(model, "--served-model-name", NAME) as served:
        workers = list(served.cluster.worker_nodes)
        with Load(served, expected) as load:
            for node in workers:
                load.wait_for(NUM_CLIENTS)
                served.cluster.remove_node(node, allow_graceful=False)
                load.wait_for(NUM_CLIENTS)
                served.cluster.add_node(**NODE)
                load.wait_for(3 * NUM_CLIENTS)
        lost = served.metric("quire:worker_restarts_total")
    with capsys.disabled():
        print(f"\n{load.num_answers} answers, {lost:g} moved from a replica that died")
    assert load.wrong == []
    assert lost > 0, "no request was on a node that died"


def test_prefixes_are_found_more_often_than_by_load_alone(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {routing: _hit_rate(model, routing) for routing in ("load", "prefix")}
    factor = rates["prefix"] / max(rates["load"], 1e-9)
    with capsys.disabled():
        shown = ", ".join(f"{routing} {rate:.0%}" for routing, rate in rates.items())
        print(f"\nprompt tokens found in a prefix cache: {shown}; factor {factor:.2f}")
    assert factor > 1.2


def _hit_rate(model: Path, routing: str) -> float:
    """Of conversations whose prompts begin alike, eight turns each."""
    options = ("--served-model-name", NAME, "--routing", routing, "--max-batch-size", "8")
    with application(model, *options, num_workers=4) as served:
        client = served.client()

        def converse(number: int) -> None:
            text = f"conversation {number}: " + 6 * f"{number} is the number. "
            for _ in range(6):
                made = client.completions.create(
                    model=NAME, prompt=text, max_tokens=8, temperature=0
                )
                text += made.choices[0].text + " go on. "

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(converse, range(32)))
        hits = served.metric("quire:prefix_cache_hits")
        return hits / served.metric("quire:prefix_cache_queries")
