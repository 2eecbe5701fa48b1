"""`quire serve` with its engine in a worker answers as one without, and outlives its worker."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model
from tests.server.processes import ServeProcess, serving
from tests.server.servers import PATIENCE_S

SMALL = ("--device", "reference", "--kv-memory", "8MiB")
QUESTION = [{"role": "user", "content": "Hello there"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": QUESTION, "max_tokens": 20, "seed": 3}),
    (CHAT, {"messages": QUESTION, "max_tokens": 20, "seed": 3, "stream": True}),
    (CHAT, {"messages": QUESTION, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "seed": 1}),
    (CHAT, {"messages": QUESTION, "n": 3, "max_tokens": 8, "seed": 5, "stop": ["e"]}),
    (CHAT, {"messages": QUESTION, "max_tokens": 40, "seed": 5, "tools": [TOOL],
            "tool_choice": "required"}),
    (CHAT, {"messages": QUESTION, "max_tokens": 30, "seed": 6,
            "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": QUESTION, "max_tokens": 0, "prompt_logprobs": 1}),
    (TEXT, {"prompt": ["one", "two"], "max_tokens": 6, "seed": 2, "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": "x", "max_tokens": 10**6}),
    (TEXT, {"prompt": "x", "regex": "(", "max_tokens": 4}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "logit_bias": {"99999999": 1}}),
    ("/v1/embeddings", {"input": ["one", "two"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


def ask(
    server: ServeProcess, path: str, body: object = None, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json", **(more or {})}
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def plain(answer: tuple[int, str]) -> object:
    """Without ids and times; of a stream what its frames say, however tokens share them."""
    status, text = answer
    text = re.sub(r'"(id|created)": ?("[^"]*"|\d+)', '"-":0', text)
    if not text.startswith("data: "):
        return status, re.sub(r"call_\w+", "call", text)
    frames = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    said = [choice["delta"].get("content", "") for f in frames for choice in f["choices"]]
    ends = [choice["finish_reason"] for f in frames for choice in f["choices"]]
    return status, "".join(filter(None, said)), ends[-1], text.endswith("data: [DONE]\n\n")


def worker_of(server: ServeProcess) -> int:
    """The worker's process id. A new worker has the server's own arguments until it calls exec."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        workers = [line for line in found.stdout.splitlines() if "quire.worker" in line]
        if len(workers) == 1:
            return int(workers[0].split()[0])
        time.sleep(0.02)
    raise AssertionError(f"no worker, or several: {found.stdout}")


def _wait_for_restart(server: ServeProcess) -> None:
    """The stream may have been finished before the worker was killed: then nothing waits for the
    next worker but this."""
    until = time.monotonic() + PATIENCE_S
    while not re.search(r"quire:worker_restarts_total\{.*\} 1\n", ask(server, "/metrics")[1]):
        assert time.monotonic() < until, "the worker was not restarted, or more than once"
        time.sleep(0.02)


def test_answers_are_those_of_an_engine_in_the_same_process(model: Path) -> None:
    with serving(model, *SMALL, "--no-worker") as server:
        expected = [plain(ask(server, path, body)) for path, body in CALLS]
    with serving(model, *SMALL) as server:
        for (path, body), wanted in zip(CALLS, expected, strict=True):
            assert plain(ask(server, path, body)) == wanted, body
        assert '"num_steps"' in ask(server, "/v1/stats?steps=4")[1]
        assert "quire:steps_total" in ask(server, "/metrics")[1]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_stream_goes_on_when_the_worker_is_killed(model: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "seed": 4, "stream": True}
    with serving(model, *SMALL) as server:
        whole = ask(server, TEXT, body)[1]
        first = worker_of(server)
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", TEXT, json.dumps(body), headers)
        answer = connection.getresponse()
        begun = answer.read(300)
        os.kill(first, signal.SIGKILL)
        text = (begun + answer.read()).decode()
        connection.close()
        assert _text_of(text) == _text_of(whole)
        _wait_for_restart(server)
        assert worker_of(server) != first
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        events = [json.loads(line)["event"] for line in server.errors().splitlines()]
        assert "worker_died" in events and "worker_restarted" in events


def test_a_server_without_a_worker_is_not_ready_until_the_next_one_is_there(model: Path) -> None:
    with serving(model, *SMALL) as server:
        assert ask(server, "/ready")[0] == 200
        os.kill(worker_of(server), signal.SIGKILL)
        while (answer := ask(server, "/ready"))[0] == 200:
            pass  # it has not noticed yet
        assert answer[0] == 503 and "recovering" in answer[1]
        while ask(server, "/ready")[0] != 200:
            pass


def test_a_worker_that_says_nothing_for_as_long_as_was_asked_for_is_replaced(model: Path) -> None:
    with serving(model, *SMALL, "--hang", "1") as server:
        os.kill(worker_of(server), signal.SIGSTOP)
        assert ask(server, TEXT, {"prompt": "x", "max_tokens": 4})[0] == 200


def _text_of(stream: str) -> str:
    frames = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert "data: [DONE]" in stream
    return "".join(choice["text"] for frame in frames for choice in frame["choices"])


def test_a_worker_ends_with_its_server(model: Path) -> None:
    with serving(model, *SMALL) as server:
        worker = worker_of(server)
        server.signal(signal.SIGKILL)
        server.wait()
        for _ in range(int(PATIENCE_S * 20)):
            try:
                state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return
            if state == "Z":
                return
            subprocess.run(["sleep", "0.05"], check=True)
        raise AssertionError("the worker is still there")
