"""A program in a terminal of its own, and the screen that a person would see."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.cli.program import COMMAND, environment

_PATIENCE_S = 120.0  # a guard against waiting for ever
_SEQUENCE = re.compile(r"\x1b\[(\?\d+[hl]|[\d;]*m|H|K|J)")


class Screen:
    """What is on it after the sequences that the program uses; any other one is an error."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}
        self.modes: set[str] = set()
        self._row = self._column = 0

    def feed(self, text: str) -> str:
        """Show text; an unfinished sequence at its end is given back."""
        while text:
            if text[0] != "\x1b":
                self._put(text[0])
                text = text[1:]
            elif found := _SEQUENCE.match(text):
                self._obey(found[1])
                text = text[found.end() :]
            else:
                assert re.fullmatch(r"\x1b(\[[\d;?]*)?", text), f"unknown: {text[:20]!r}"
                break
        return text

    def _put(self, mark: str) -> None:
        if mark == "\r":
            self._column = 0
        elif mark == "\n":
            self._row += 1
        else:
            line = self.lines.get(self._row, "").ljust(self._column)
            self.lines[self._row] = line[: self._column] + mark + line[self._column + 1 :]
            self._column += 1

    def _obey(self, sequence: str) -> None:
        if sequence == "H":
            self._row = self._column = 0
        elif sequence == "K":
            self.lines[self._row] = self.lines.get(self._row, "")[: self._column]
        elif sequence == "J":
            self.lines = {row: line for row, line in self.lines.items() if row <= self._row}
        elif sequence.startswith("?"):
            change = self.modes.add if sequence.endswith("h") else self.modes.discard
            change(sequence[1:-1])

    @property
    def text(self) -> str:
        return "\n".join(self.lines.get(row, "") for row in range(max(self.lines, default=-1) + 1))


class Terminal:
    """A pseudo-terminal with a program in it, which is the leader of its session."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int, slave: int) -> None:
        self.process = process
        self.screen = Screen()
        self._master = master
        self._slave = slave
        self._rest = ""
        self._undecoded = b""

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self, seconds: float = 0.05) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            self._undecoded += os.read(self._master, 65536)
            text = self._undecoded.decode("utf-8", "ignore")
            self._undecoded = self._undecoded[len(text.encode()) :]
            self._rest = self.screen.feed(self._rest + text)
            seconds = 0.0

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.read()
            if is_so():
                return
            assert time.monotonic() < deadline, f"never; the screen:\n{self.screen.text}"

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.screen.text)

    def wait(self) -> int:
        """The exit code, with what was written to the end read."""
        self.wait_until(lambda: self.process.poll() is not None)
        self.read()
        return self.process.returncode


@contextmanager
def in_terminal(
    *arguments: str, env: Mapping[str, str] | None = None, width: int = 100, height: int = 30
) -> Iterator[Terminal]:
    """A command of quire in a terminal; it is killed if the block leaves it running."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment({"TERM": "xterm-256color", **(env or {})}),
        preexec_fn=take_terminal,
    )
    try:
        yield Terminal(process, master, slave)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
