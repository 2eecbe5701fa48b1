"""`quire serve` over the hash model: every step takes PACED_STEP_MS, whatever the machine does."""

import os
import sys
from unittest.mock import patch

from tests.server.servers import PacedExecutor

from quire.cli import main
from quire.llm.devices import ReferenceDevice


def run() -> int:
    step_s = float(os.environ.get("PACED_STEP_MS", "10")) / 1000
    executor = PacedExecutor(step_s=step_s, num_blocks=2048, max_context=512)
    with patch.object(ReferenceDevice, "make_executor", lambda *_: executor):
        options = ["--device", "reference", "--kv-memory", "4MiB", "--no-worker"]
        return main(["serve", *sys.argv[1:], *options])


if __name__ == "__main__":
    sys.exit(run())
