"""Ray clusters on this machine, each node a raylet of its own, and quire's application on them."""

import os
import socket
import urllib.request
from collections.abc import Iterator
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
PATIENCE_S = 120.0  # a guard against waiting for ever; nothing is measured


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ["--port", str(port), "--replicas", str(num_workers)]
    own = ["--trust-model-file", "--kv-memory", "16MiB", "--replica-silence", "10"]
    config = cluster_config(parse([str(model), *given, *own, *options]))
    with cluster(num_workers) as made:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="HeadOnly", http_options=where)
        try:
            serve.run(build(config), name="quire", route_prefix="/")
            yield Application(made, f"http://127.0.0.1:{port}")
        finally:
            serve.shutdown()
