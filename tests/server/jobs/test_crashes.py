"""A batch whose server and worker are killed again and again: the answers of one that was not."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.server.jobs.test_batches import CHAT, begin, wait
from tests.server.processes import ServeProcess, serving
from tests.server.servers import PATIENCE_S

# Of an answer: new whenever it is made; and what the process that made it had in its prefix cache.
TIMED = ("id", "request_id", "created", "cached_tokens")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def requests(count: int) -> list[dict[str, Any]]:
    """Greedy and sampled, with and without a seed, some with fields that are refused."""
    return [_request(number) for number in range(count)]


def _request(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Count to {number}"}]
    fields: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.1}, {"logprobs": True}]
    fields.append({"seed": number})
    body = {"messages": messages, "max_tokens": 24, **fields[number % len(fields)]}
    if number % 13 == 12:
        body["max_tokens"] = -2
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": CHAT,
        "body": body,
    }


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[ServeProcess, openai.OpenAI]]:
    settings = ("--device", "cpu", "--kv-memory", "4MiB", "--max-batch-size", "2")
    log = folder.with_name("serve.log")
    with (
        serving(model, *settings, "--state", folder, log=log) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def kill_everything(server: ServeProcess) -> None:
    """The server and all that it started, none of which can clean up."""
    doomed = [server.process.pid, *_descendants(server.process.pid)]
    assert len(doomed) > 1, "the model has a process of its own"
    for pid in doomed:
        with suppress(ProcessLookupError):  # a worker may end by itself when its server is gone
            os.kill(pid, signal.SIGKILL)
    server.wait()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    found = list(parents.get(pid, ()))
    for child in found:
        found += parents.get(child, ())
    return found


def reach(client: openai.OpenAI, batch: Batch, num_answers: int) -> int:
    """Wait for so many answers of a batch; how many there are. On a busy machine it may have ended
    before anybody looks."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = client.batches.retrieve(batch.id)
        assert found.status in ("validating", "in_progress", "finalizing", "completed"), found
        assert found.request_counts is not None
        num_done = found.request_counts.completed + found.request_counts.failed
        if num_done >= num_answers:
            return num_done
        time.sleep(0.002)
    raise AssertionError(f"{num_done} answers, not {num_answers}")


def contents(client: openai.OpenAI, batch: Batch) -> tuple[list[Any], list[Any]]:
    """The answers and the errors of a batch, without ids and times and what was cached."""
    assert batch.output_file_id is not None and batch.error_file_id is not None
    good, bad = (
        [_untimed(json.loads(each)) for each in client.files.content(name).content.splitlines()]
        for name in (batch.output_file_id, batch.error_file_id)
    )
    return good, bad


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _untimed(each) for name, each in value.items() if name not in TIMED}
    return [_untimed(each) for each in value] if isinstance(value, list) else value


def check_killed(model: Path, folder: Path, num_lines: int, num_kills: int) -> None:
    """A batch through so many kills, then the same one undisturbed."""
    lines = requests(num_lines)
    draw = random.Random(num_kills)
    made, num_done = None, 0
    for kill in range(num_kills):
        with served(model, folder) as (server, client):
            made = made or begin(client, lines)
            num_kept = reach(client, made, 0)
            assert num_kept >= num_done, "an answer that counted was lost"
            num_done = reach(client, made, max(num_kept, num_lines * kill // num_kills))
            time.sleep(draw.uniform(0, 0.02))
            kill_everything(server)
    assert made is not None
    with served(model, folder) as (_, client):
        done = wait(client, made)
        assert done.status == "completed"
        killed = contents(client, done)
        names = [answer["custom_id"] for answer in (*killed[0], *killed[1])]
        assert sorted(names) == sorted(each["custom_id"] for each in lines)
        undisturbed = wait(client, begin(client, lines))
        assert killed == contents(client, undisturbed)
        assert done.request_counts == undisturbed.request_counts
        kept = [path.name for path in (folder / "jobs" / "files").iterdir()]
        assert sorted(kept) == sorted(file.id for file in client.files.list())


def test_a_killed_job_goes_on_with_the_same_answers(text_model: Path, folder: Path) -> None:
    check_killed(text_model, folder, num_lines=60, num_kills=2)


@pytest.mark.long
def test_a_job_of_500_lines_killed_20_times_has_the_same_answers(
    text_model: Path, folder: Path
) -> None:
    check_killed(text_model, folder, num_lines=500, num_kills=20)
