"""Ray clusters on this machine, each node a raylet of its own, and quire's application on them."""

import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")

import ray
from ray import serve
from ray.cluster_utils import Cluster

from quire.cli.ray import cluster_config
from quire.cli.ray_options import parse
from quire.ray.application import build

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
HEAD = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
PATIENCE_S = 300.0  # a guard against waiting for ever; nothing is measured


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited too long: {what}"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def cluster(num_workers: int) -> Iterator[Cluster]:
    """A head without CPUs, for proxy and ingress, and workers of one CPU each."""
    made = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(num_workers):
            made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@dataclass
class Application:
    """quire on a cluster, as clients see it."""

    cluster: Cluster
    url: str
    given: tuple[str, ...]  # the words of its command

    def deploy(self, *options: str) -> None:
        """Put it in the place of what runs, with other options."""
        config = cluster_config(parse([*self.given, *options]))
        serve.run(build(config), name="quire", route_prefix="/")

    def num_replicas(self, model: str) -> int:
        """That run."""
        return self.num_running(f"model-{model}")

    def num_running(self, deployment: str) -> int:
        states = serve.status().applications["quire"].deployments[deployment].replica_states
        return int(states.get("RUNNING", 0))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as reply:
            return str(reply.read().decode())

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def application(model: Path, *options: str, num_workers: int = 2) -> Iterator[Application]:
    """A replica on each worker; proxy and ingress on the head."""
    port = free_port()
    replicas = () if "--min-replicas" in options else ("--replicas", str(num_workers))
    own = ("--trust-model-file", "--kv-memory", "16MiB", "--replica-silence", "10")
    given = (str(model), "--port", str(port), *replicas, *own, *options)
    with cluster(num_workers) as made:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="HeadOnly", http_options=where)
        try:
            found = Application(made, f"http://127.0.0.1:{port}", given)
            found.deploy()
            yield found
        finally:
            serve.shutdown()
