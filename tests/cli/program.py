"""Runs the real program, as a shell would, and holds every run to the same manners."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

COMMAND = [sys.executable, "-m", "quire.cli"]


class Run(NamedTuple):
    code: int
    out: str
    err: str


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own, without what would change the program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return kept | dict(more or {})


def quire(
    *arguments: str | Path,
    stdin: str | bytes = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run a command to its end. Whatever happens, there is no traceback."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=environment(env),
        cwd=cwd,
        timeout=120,
        check=False,
    )
    run = Run(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in run.err, run.err
    assert "should not have happened" not in run.err, run.err
    return run


def without_native_module(folder: Path) -> dict[str, str]:
    """An environment in which quire has no native module: importing it fails from the start."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['quire._native'] = None\n")
    return {"PYTHONPATH": str(folder)}


def fails(*arguments: str | Path, stdin: str | bytes = "") -> str:
    """Run a command that is refused: exit code 1, nothing printed, one line that says why."""
    run = quire(*arguments, stdin=stdin)
    assert run.code == 1, run
    assert run.out == ""
    assert run.err.startswith("quire: ")
    assert run.err.count("\n") == 1
    return run.err
