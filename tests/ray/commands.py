"""`quire ray serve` as a user runs it: a process, on a cluster of its own or on one that runs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from tests.ray.clusters import PATIENCE_S, free_port

ROOT = Path(__file__).parents[2]
_OWN = ("--trust-model-file", "--kv-memory", "16MiB")


class Command:
    """A process of `quire ray serve` that has said where it serves."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, port: int) -> None:
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """By a signal; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


def _environment(**more: str) -> dict[str, str]:
    own = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, **own, **more}


def _words(*options: str) -> list[str]:
    return [sys.executable, "-m", "quire.cli", "ray", "serve", *options]


@contextmanager
def serving(folder: Path, *options: str, address: str = "local") -> Iterator[Command]:
    port = free_port()
    log = folder / "serve.log"
    given = (*options, *_OWN, "--port", str(port), "--address", address)
    with log.open("wb") as told:
        process = subprocess.Popen(
            _words(*given), stdout=told, stderr=subprocess.STDOUT, env=_environment()
        )
    made = Command(process, log, port)
    try:
        made.wait_for("quire serves ")
        yield made
    finally:
        if process.poll() is None:
            made.end()


def refusal(*options: str, **environment: str) -> str:
    """What a command that cannot start says in its last line, without a traceback."""
    run = subprocess.run(
        _words(*options),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=_environment(**environment),
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr.strip().splitlines()[-1]
