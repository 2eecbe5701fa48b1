"""Pages of the guide as scripts: their examples run in order, against real servers."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.server.processes import ServeProcess, serving
from tests.server.servers import PATIENCE_S

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PORT = re.compile(r"(127\.0\.0\.1|localhost):8000")


class Block(NamedTuple):
    """An example: its language, its text, and the file that the line before it names."""

    language: str
    text: str
    file: str | None


def blocks(page: Path) -> Iterator[Block]:
    found = re.finditer(r"(?:^(\S+):\n\n)?^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    for match in found:
        yield Block(match.group(2), match.group(3), match.group(1))


class Script:
    """Runs a page's examples in order, each `quire serve` in the place of the one before."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._stack = stack
        self._python = python
        self._patience_s = patience_s
        self._more = {"XDG_STATE_HOME": str(folder / "state"), **(env or {})}  # not the user's
        self._environment = {**os.environ, "OPENAI_API_KEY": "none", **self._more}
        self._server: ServeProcess | None = None
        self.num_run = 0

    def run(self, block: Block) -> None:
        if block.file is not None:
            is_for_server = PORT.search(block.text) is not None
            text = self._at_port(block.text) if is_for_server else block.text
            (self._folder / block.file).write_text(text)
        match block.language:
            case "console":
                for line in block.text.splitlines():
                    assert line.startswith("$ "), f"a command or nothing: {line}"
                    self._command(line.removeprefix("$ "))
            case "python":
                self._check(self._executed([self._python, "-c", self._at_port(block.text)]))
            case _:
                assert block.file is not None, f"nobody runs this: {block.text}"
        self.num_run += 1

    def _command(self, line: str) -> None:
        words = shlex.split(line)
        if words[:2] == ["quire", "serve"]:
            self._serve(words[2:])
        elif words[0] == "quire":
            given = [self._at_port(word) for word in words[1:]]
            self._check(self._executed([sys.executable, "-m", "quire.cli", *given]))
        else:
            text = self._check(self._executed(["bash", "-c", self._at_port(line)]))
            assert not text.startswith('{"error"'), text

    def _serve(self, options: list[str]) -> None:
        """The tiny model stands in for the default one, on the executor that is everywhere; files
        are those of the page."""
        if not options or options[0].startswith("--"):
            options = ["model.gguf", "--served-model-name", "smollm2", *options]
        self._stack.close()
        given = [self._found(word) if "." in word else word for word in options]
        server = serving(*given, "--device", "reference", env=self._more)
        self._server = self._stack.enter_context(server)

    def _found(self, word: str) -> str:
        """A file of the page, or NAME=FILE."""
        name, separator, file = word.rpartition("=")
        return f"{name}{separator}{self._folder / file}"

    def _at_port(self, text: str) -> str:
        if self._server is None:
            assert PORT.search(text) is None, "an example before its server"
            return text
        return PORT.sub(rf"\1:{self._server.port}", text)

    def _executed(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self._folder,
            env=self._environment,
            timeout=self._patience_s,
            check=False,
        )

    def _check(self, done: "subprocess.CompletedProcess[str]") -> str:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "an example shows something"
        return done.stdout


def run_page(page: Path, script: Script) -> None:
    """Every example of a page."""
    for block in blocks(page):
        script.run(block)
    assert script.num_run == page.read_text().count("```") // 2 > 1
