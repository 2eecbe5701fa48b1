"""`quire serve` as a process of its own, as its users run it."""

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.cli.program import COMMAND, environment
from tests.server.servers import PATIENCE_S

ROOT = Path(__file__).parents[2]


@dataclass
class ServeProcess:
    """A server that has said where it is."""

    process: subprocess.Popen[str]
    url: str
    greeting: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def serving(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (*COMMAND, "serve"),
    log: Path | None = None,
) -> Iterator[ServeProcess]:
    """Start a server on a free port; it is killed if the block leaves it running.

    `log`: where its standard error goes, for servers that write more than a pipe holds.
    """
    with nullcontext(subprocess.PIPE) if log is None else log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *map(str, arguments), "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(env),
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        greeting = _lines(process.stdout, 2)
        found = re.search(r"https?://\S+:\d+", greeting)
        assert found, f"{greeting}{process.stderr.read() if process.stderr else ''}"
        yield ServeProcess(process, found.group(), greeting)
    finally:
        process.kill()
        process.communicate()


def _lines(stream: IO[str], count: int) -> str:
    return "".join(stream.readline() for _ in range(count))
