"""A server whose executor hangs on its first request, as a process: `... MODEL --port 0`."""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.server.servers import PacedExecutor, fake_assembly, settings_of

from quire.core.errors import ExecutorError
from quire.executors.fake import Faults
from quire.llm import AsyncLLM
from quire.server import serve


def load(on_stuck: Callable[[], None]) -> AsyncLLM:
    faults = Faults(hangs=lambda _: True, heeds_cancel=False)
    assembly = fake_assembly(Path(sys.argv[1]), PacedExecutor(faults=faults), step_timeout_s=1.0)
    return AsyncLLM.of(assembly, on_stuck)


def main() -> int:
    try:
        serve(settings_of(port=0), load, lambda url: print(f"at {url}\n", flush=True))
    except ExecutorError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
