"""The example programs run as they stand, and show what they say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"batch_your_own_model.py"}


def test_a_model_of_ones_own_is_batched() -> None:
    lines = output_of("batch_your_own_model.py")
    assert lines[0] == "after 'the ow' comes 'l'"
    assert "96 tokens in 24 calls of forward" in lines, "four requests in every call"
    assert "the same alone: True" in lines
    assert "'t' failed: ValueError: this model wants two letters at least" in lines
    assert lines[-1] == "'th' got 'e'"
