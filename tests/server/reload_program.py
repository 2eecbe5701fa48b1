"""A server with two files to read again, as a process: the first cannot be used, ever."""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.server.servers import PacedExecutor, fake_assembly, settings_of

from quire.core.errors import ConfigError
from quire.llm import AsyncLLM
from quire.server import serve


def load(on_stuck: Callable[[], None]) -> AsyncLLM:
    return AsyncLLM.of(fake_assembly(Path(sys.argv[1]), PacedExecutor()), on_stuck)


def broken() -> None:
    raise ConfigError("the first file is broken")


def main() -> int:
    serve(
        settings_of(port=0),
        load,
        lambda url: print(f"at {url}\n", flush=True),
        on_hangup=[broken, lambda: print("read again", flush=True)],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
