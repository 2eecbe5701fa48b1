"""What the parts that all replicas of a cluster share cost, measured on this machine: the router,
the store of jobs, and with Ray installed ingress and proxy."""

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ConfigError, ExecutorError
from quire.ray.prefixes import PrefixTable, Replicas, choose, prefix_hashes
from quire.server.jobs.store import JobLimits, JobStore, NewBatch, Result
from quire_bench.scale import Traffic, arrivals

MEASURED_MODEL = "smollm2"
_MAX_LEAD = 8
_ANSWER_BYTES = 600  # of a line's answer: a chat completion of 40 tokens
_READY = re.compile(r"^quire serves ", re.M)
_READY_S = 120.0
_SHARED = {"ingress": "ray::ServeReplica:quire:ingress", "proxy": "ray::ProxyActor"}


# ---- the router


def router_seconds(num_replicas: int, num_requests: int = 2000) -> float:
    """Of processor time a request: hashes of its prompt, the choice, and remembering it."""
    rng = random.Random(2)
    loads = [rng.randrange(4) for _ in range(num_replicas)]
    replicas, table = Replicas(range(num_replicas)), PrefixTable()
    traffic = Traffic(num_requests / num_replicas, 1.2)
    prompts = [live.prompt for live in arrivals(traffic, num_replicas)]
    begun = time.process_time()
    for prompt in prompts:
        prefix = prefix_hashes("", prompt)
        ranked = choose(prefix, replicas, loads.__getitem__, table, _MAX_LEAD)
        table.add(prefix, ranked[0])
    return (time.process_time() - begun) / len(prompts)


# ---- the store of jobs


class StoreRate(NamedTuple):
    """Lines a second that the store of jobs takes."""

    one_by_one: float  # a transaction for each, as where answers come apart
    together: float  # a hundred in a transaction, as where steps of many rows end together


def job_store_rate(folder: Path, num_lines: int = 20_000) -> StoreRate:
    """On the disk of `folder`, for answers of 600 bytes."""
    return StoreRate(
        _lines_per_second(folder / "one", num_lines // 10, 1),
        _lines_per_second(folder / "many", num_lines, 100),
    )


def _lines_per_second(folder: Path, num_lines: int, a_transaction: int) -> float:
    store = JobStore(folder, JobLimits(max_lines=num_lines))
    store.open()
    try:
        line = b'{"custom_id": "line", "method": "POST", "url": "/v1/chat/completions"}\n'
        file = store.add_file("", "lines.jsonl", [line] * num_lines)
        batch = store.add_batch("", NewBatch("/v1/chat/completions", file.id, "24h", 86_400))
        assert batch is not None
        store.begin(batch.id, num_lines, None)
        answers = [Result(n, True, b"a" * (_ANSWER_BYTES - 1) + b"\n") for n in range(num_lines)]
        begun = time.perf_counter()
        for first in range(0, num_lines, a_transaction):
            store.add_results(batch.id, answers[first : first + a_transaction])
        return num_lines / (time.perf_counter() - begun)
    finally:
        store.close()


# ---- ingress and proxy


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """Of a streamed token."""

    ingress_s: float  # processor time of the ingress
    proxy_s: float  # ... and of Serve's proxy
    direct_s: float  # ... of the ingress, at its own port
    frame_bytes: float  # to the client


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    """The streams that are measured: of a model that this machine has or fetches."""

    model: str = MEASURED_MODEL
    num_streams: int = 16
    num_tokens: int = 100
    rounds: int = 4


def has_ray() -> bool:
    return find_spec("ray") is not None


def shared_costs(plan: StreamsPlan) -> SharedCosts:
    """By `quire ray serve` on a cluster of this machine, which ends with it."""
    with _served(plan.model) as (port, direct_port):
        through_proxy = _spent(plan, port)
        direct = _spent(plan, direct_port)
    return SharedCosts(
        through_proxy["ingress"], through_proxy["proxy"], direct["ingress"], direct["bytes"]
    )


def _spent(plan: StreamsPlan, port: int) -> dict[str, float]:
    """Processor time of ingress and proxy, and bytes, for each token of streams at a port."""
    _stream(port, plan.num_tokens, 0)
    before = {name: _processor_seconds(word) for name, word in _SHARED.items()}
    with ThreadPoolExecutor(plan.num_streams) as pool:
        numbers = range(1, 1 + plan.rounds * plan.num_streams)
        sizes = list(pool.map(lambda n: _stream(port, plan.num_tokens, n), numbers))
    tokens = plan.num_tokens * len(sizes)
    spent = {
        name: (_processor_seconds(word) - before[name]) / tokens for name, word in _SHARED.items()
    }
    return {**spent, "bytes": sum(sizes) / tokens}


@contextmanager
def _served(model: str) -> Iterator[tuple[int, int]]:
    """The ports of Serve's proxy and of the ingress."""
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        port, direct_port = one.getsockname()[1], other.getsockname()[1]
    command: Sequence[str] = (
        *(sys.executable, "-m", "quire.cli", "ray", "serve", model, "--port", str(port)),
        *("--direct-port", str(direct_port), "--served-model-name", "measured"),
        *("--address", "local"),
    )
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, told)
            yield port, direct_port
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", told: Any) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        told.seek(0)
        text = told.read()
        if _READY.search(text):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise ExecutorError(f"quire ray serve did not start: {text[-500:].strip()}")
        time.sleep(0.1)


def _stream(port: int, num_tokens: int, number: int) -> int:
    """Bytes that came."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_READY_S)
    body = (
        f'{{"model": "measured", "messages": [{{"role": "user", "content": "{number}"}}], '
        f'"max_tokens": {num_tokens}, "seed": {number}, "stream": true, "ignore_eos": true}}'
    )
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    if reply.status != 200 or b"[DONE]" not in content:
        raise ExecutorError(f"a stream was not answered: {reply.status} {content[:200]!r}")
    return len(content)


def _processor_seconds(begins_with: str) -> float:
    """Of the process whose command line begins so."""
    found = [process for process in Path("/proc").glob("[0-9]*") if _begins(process, begins_with)]
    if len(found) != 1:
        raise ConfigError(
            f"expected one process {begins_with!r} on this machine, found {len(found)}: measure "
            "where no other application of Ray Serve runs"
        )
    fields = (found[0] / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _begins(process: Path, word: str) -> bool:
    try:
        return (process / "cmdline").read_text().startswith(word)
    except OSError:
        return False
