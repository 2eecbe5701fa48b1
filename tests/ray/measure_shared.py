"""Processor time of the parts that all replicas share, for each token that is streamed.

`python -m tests.ray.measure_shared`, in the environment of `make test-ray`: what it prints is an
experiment on this machine, which docs/scale.md names as one.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.llm.text_models import write_text_model
from tests.ray.clusters import Application, application

NUM_STREAMS = 32
NUM_TOKENS = 400
ROUNDS = 3
_PARTS = {"ingress": "ray::ServeReplica:quire:ingress", "proxy": "ray::ProxyActor"}


def processor_seconds(begins_with: str) -> float:
    """Of all processes whose command line begins so."""
    total = 0
    for process in Path("/proc").iterdir():
        try:
            if (process / "cmdline").read_text().startswith(begins_with):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def stream(served: Application, number: int) -> int:
    """Bytes that came."""
    made = served.client().chat.completions.with_streaming_response.create(
        model="tiny",
        messages=[{"role": "user", "content": f"{number}"}],
        max_tokens=NUM_TOKENS,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with made as reply:
        return sum(len(part) for part in reply.iter_bytes())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "tiny.gguf")
        with application(model, "--served-model-name", "tiny") as served:
            stream(served, 0)
            before = {name: processor_seconds(word) for name, word in _PARTS.items()}
            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                sizes = list(pool.map(lambda n: stream(served, n), range(ROUNDS * NUM_STREAMS)))
            tokens = NUM_TOKENS * len(sizes)
            for name, word in _PARTS.items():
                seconds = processor_seconds(word) - before[name]
                print(f"{name}: {1e6 * seconds / tokens:.0f} µs of a processor a token")
            print(f"to the client: {sum(sizes) / tokens:.0f} bytes a token")


if __name__ == "__main__":
    main()
