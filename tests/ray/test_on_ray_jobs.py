"""Batches on a cluster: every line is answered once, whatever ends in the middle."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray import serve
from tests.llm.text_models import write_text_model
from tests.ray.clusters import Application, application, wait_until
from tests.ray.loads import ASKED, NAME, Asked, texts_here

from quire import AsyncLLM
from quire.llm.assembly import assemble
from quire.llm.devices import Options
from quire.ray.ingresses import OneIngress
from quire.server import ServerSettings, Service

NUM_LINES = 96
NUM_LONG = 12_000  # tokens of a stream that keeps its ingress draining
ENDED = ("completed", "incomplete")  # statuses of a response that was made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_text_model(path, max_context=NUM_LONG + 100)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Asked, str]:
    return texts_here(model)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Eight lines are answered at a time."""
    state = ("--state", str(tmp_path_factory.mktemp("state")), "--drain-timeout", "100")
    engine = ("--max-batch-size", "4", "--cpus", "0.5", "--kv-memory", "64MiB")
    with application(model, "--served-model-name", NAME, *engine, *state) as found:
        yield found


class BatchOfLines:
    """A batch of NUM_LINES lines, through the openai client."""

    def __init__(self, served: Application) -> None:
        self._asked = {f"line-{n}": ASKED[n % len(ASKED)] for n in range(NUM_LINES)}
        self._client = served.client()
        lines = "\n".join(_line(name, asked) for name, asked in self._asked.items())
        made = self._client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        self._id = self._client.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        ).id

    def num_answered(self) -> int:
        counts = self._batch().request_counts
        return 0 if counts is None else counts.completed

    def wait_for_some(self) -> None:
        """Until it is in its middle."""
        wait_until(lambda: self.num_answered() > 0, "no line was answered")
        assert self.num_answered() < NUM_LINES, "the batch was over too soon"

    def texts(self) -> dict[Asked, set[str]]:
        """Of the finished batch, by what was asked; a line that is there twice is an error."""
        wait_until(lambda: self._batch().status == "completed", "the batch does not end")
        done = self._batch()
        assert done.output_file_id is not None and done.error_file_id is None
        answers = self._client.files.content(done.output_file_id).text.splitlines()
        found: dict[Asked, set[str]] = {}
        for answer in map(json.loads, answers):
            text = answer["response"]["body"]["choices"][0]["text"]
            found.setdefault(self._asked[answer["custom_id"]], set()).add(text)
        names = [json.loads(answer)["custom_id"] for answer in answers]
        assert sorted(names) == sorted(self._asked)
        return found

    def _batch(self) -> Any:
        """While an ingress is replaced, nobody answers."""
        while True:
            try:
                return self._client.batches.retrieve(self._id)
            except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                wait_until(lambda: "quire" in serve.status().applications, "no application")


def _line(name: str, asked: Asked) -> str:
    body = {"model": NAME, "prompt": asked.prompt, **asked.fields}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line)


def _actors(deployment: str) -> list[str]:
    """The names of its replicas, draining ones too."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if f"quire#{deployment}#" in name]


def _kill_one(deployment: str) -> None:
    """As if its process had crashed."""
    ray.kill(ray.get_actor(_actors(deployment)[0], namespace="serve"), no_restart=True)


def _delete_and_deploy(served: Application) -> None:
    serve.delete("quire")
    served.deploy()


INTERRUPTIONS: dict[str, Callable[[Application], None]] = {
    "nothing happens": lambda _: None,
    "the ingress is killed": lambda _: _kill_one("ingress"),
    "a new version is deployed": lambda served: served.deploy("--max-queue-requests", "100"),
    "the application is deleted and deployed again": _delete_and_deploy,
}


@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_every_line_of_a_batch_is_answered_once_when(
    what: str, served: Application, expected: dict[Asked, str]
) -> None:
    batch = BatchOfLines(served)
    batch.wait_for_some()
    INTERRUPTIONS[what](served)
    assert batch.texts() == {asked: {text} for asked, text in expected.items()}


def test_a_replica_dies_and_every_line_is_answered_once(
    served: Application, expected: dict[Asked, str]
) -> None:
    moved = served.metric("quire:worker_restarts_total")
    batch = BatchOfLines(served)
    batch.wait_for_some()
    _kill_one(f"model-{NAME}")
    assert batch.texts() == {asked: {text} for asked, text in expected.items()}
    assert served.metric("quire:worker_restarts_total") > moved, "no line was on that replica"


def test_a_batch_is_taken_while_the_ingress_before_drains(
    served: Application, expected: dict[Asked, str]
) -> None:
    """The old ingress has the folder until its last stream has ended."""
    BatchOfLines(served).texts()  # the old ingress works batches off
    stream = _long_stream(served)
    with _deployed_beside(served, "--max-jobs", "9"):
        batch = BatchOfLines(served)
        assert len(_actors("ingress")) == 2, "the stream was too short"
        assert _finish_reason(stream) == "length"
    assert batch.texts() == {asked: {text} for asked, text in expected.items()}


@contextmanager
def _deployed_beside(served: Application, *options: str) -> Iterator[None]:
    """A new ingress runs, and the one before drains."""
    with ThreadPoolExecutor() as pool:
        deploying = pool.submit(served.deploy, *options)  # returns when the old one has ended
        wait_until(lambda: _has_both_ingresses(served), "there is no new ingress")
        yield
        deploying.result()


def _has_both_ingresses(served: Application) -> bool:
    return len(_actors("ingress")) == 2 and served.num_running("ingress") == 1


def _long_stream(served: Application) -> Any:
    """One that has begun."""
    stream: Any = served.client().completions.create(
        model=NAME, prompt="x", max_tokens=NUM_LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return stream


def _finish_reason(stream: Any) -> str:
    """Of a stream that is read to its end."""
    [reason] = {chunk.choices[0].finish_reason for chunk in stream} - {None}
    return str(reason)


async def _is_left_alone(model: Path, folder: Path) -> None:
    settings = ServerSettings(model_names=(NAME,), state_folder=folder)
    before = OneIngress.over(settings, "the application")
    await before.own_folder()
    assert before.folder_lock is not None
    options = Options(device="cpu", trust_model_file=True)
    now = Service(
        settings,
        lambda on_stuck: AsyncLLM.of(assemble(model, options), on_stuck),
        OneIngress.over(settings, "the application"),
    )
    opening = asyncio.create_task(now.open())
    while not now.is_ready:
        await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([opening], timeout=0.5)
    assert not done, "it works jobs off beside the ingress before"
    os.close(before.folder_lock)
    await opening
    await now.drain()


def test_an_ingress_goes_on_with_jobs_when_the_one_before_has_ended(
    model: Path, tmp_path: Path
) -> None:
    asyncio.run(_is_left_alone(model, tmp_path))


def test_background_responses_are_made_when_the_ingress_is_killed(served: Application) -> None:
    client = served.client()

    def ask(number: int) -> str:
        asked: Any = {"model": NAME, "input": f"{number}", "max_output_tokens": 400}
        return str(client.responses.create(**asked, background=True).id)

    names = [ask(number) for number in range(24)]
    assert any(_status(client, name) not in ENDED for name in names), "they ended too soon"
    _kill_one("ingress")
    wait_until(lambda: all(_status(client, name) in ENDED for name in names), "not all were made")


def _status(client: openai.OpenAI, name: str) -> str:
    try:
        return str(client.responses.retrieve(name).status)
    except (openai.APIConnectionError, openai.InternalServerError):
        return "unknown"  # there is no ingress right now
