"""`quire serve` over the hash model, as a process: steps of 0.2 s until SIGUSR1 has it hurry."""

import signal
import sys
from unittest.mock import patch

from tests.server.servers import PacedExecutor

from quire.cli import main
from quire.llm.devices import ReferenceDevice


def run() -> int:
    executor = PacedExecutor(step_s=0.2, num_blocks=1024)

    def hurry(*_: object) -> None:
        executor.step_s = 0.005

    signal.signal(signal.SIGUSR1, hurry)
    with patch.object(ReferenceDevice, "make_executor", lambda *_: executor):
        return main(
            ["serve", *sys.argv[1:], "--device", "reference", "--kv-memory", "4MiB", "--no-worker"]
        )


if __name__ == "__main__":
    sys.exit(run())
