"""Every example of the guide is run: a page is a script, its servers are real."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cli.program import quire
from tests.server.processes import ServeProcess, serving
from tests.server.servers import PATIENCE_S

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
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

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._server: ServeProcess | None = None
        self.num_run = 0

    def run(self, block: Block) -> None:
        if block.file is not None:
            (self._folder / block.file).write_text(block.text)
        match block.language:
            case "console":
                for line in block.text.splitlines():
                    assert line.startswith("$ "), f"a command or nothing: {line}"
                    self._command(line.removeprefix("$ "))
            case "python":
                self._check(self._executed([sys.executable, "-c", self._at_port(block.text)]))
            case _:
                assert block.file is not None, f"nobody runs this: {block.text}"
        self.num_run += 1

    def _command(self, line: str) -> None:
        words = line.split()
        if words[:2] == ["quire", "serve"]:
            self._serve(words[2:])
        elif words[0] == "quire":
            self._check(self._executed([sys.executable, "-m", "quire.cli", *words[1:]]))
        else:
            text = self._check(self._executed(["bash", "-c", self._at_port(line)]))
            assert not text.startswith('{"error"'), text

    def _serve(self, options: list[str]) -> None:
        """The tiny model stands in for the default one, on the executor that is everywhere; files
        are those of the page."""
        if not options or options[0].startswith("--"):
            options = ["model.gguf", "--served-model-name", "smollm2", *options]
        self._stack.close()
        given = [str(self._folder / word) if "." in word else word for word in options]
        self._server = self._stack.enter_context(serving(*given, "--device", "reference"))

    def _at_port(self, text: str) -> str:
        assert self._server is not None, "an example before its server"
        return PORT.sub(rf"\1:{self._server.port}", text)

    def _executed(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "OPENAI_API_KEY": "none"}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self._folder,
            env=environment,
            timeout=PATIENCE_S,
            check=False,
        )

    def _check(self, done: "subprocess.CompletedProcess[str]") -> str:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "an example shows something"
        return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_runs(page: Path, text_model: Path, tmp_path: Path) -> None:
    shutil.copy(text_model, tmp_path / "model.gguf")
    with ExitStack() as stack:
        script = Script(tmp_path, stack)
        for block in blocks(page):
            script.run(block)
    assert script.num_run == page.read_text().count("```") // 2 > 1


def test_the_guide_has_its_pages() -> None:
    assert [page.stem for page in PAGES] == [
        *("configuration", "from-llama-cpp", "from-vllm", "keys-and-limits", "metrics"),
        "quick-start",
    ]


def test_every_option_is_in_the_guide_and_no_other() -> None:
    help_text = quire("serve", "--help").out
    options = set(re.findall(r"^  (--[a-z0-9-]+)", help_text, re.M))
    assert len(options) > 20
    documented = set(
        re.findall(r"^\| `(--[a-z0-9-]+)`", (GUIDE / "configuration.md").read_text(), re.M)
    )
    assert documented == options


def test_every_metric_is_in_the_guide(text_model: Path) -> None:
    given = (text_model, "--device", "reference")
    with serving(*given) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := raw.recv(1 << 16):
            answer += piece
    names = set(re.findall(r"# TYPE quire:(\w+)", answer.decode()))
    documented = set(re.findall(r"`(\w+)`", (GUIDE / "metrics.md").read_text()))
    assert len(names) > 25
    assert names <= documented


def test_the_digest_of_the_keys_page_is_that_of_its_key() -> None:
    text = (GUIDE / "keys-and-limits.md").read_text()
    [key] = re.findall(r"printf %s '(\S+)' \| sha256sum", text)
    assert hashlib.sha256(key.encode()).hexdigest() in text
