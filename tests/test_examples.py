"""The example programs run as they stand, and show what they say."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model

EXAMPLES = Path(__file__).parent.parent / "examples"
PATIENCE_S = 600.0  # on a machine with nothing else to do, a tenth of it at most


def output_of(name: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr or done.stdout
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "batch_your_own_model.py",
        "batched_against_single.py",
    }


SHOWN = re.compile(r"(\d+) +\d+ +[\d.]+ +\d+ +[\d.]+ +[\d.]+x   same tokens: (\w+)")


def test_prompts_together_are_compared_with_prompts_one_by_one(smollm2_path: Path) -> None:
    lines = output_of("batched_against_single.py")
    rows = [found.groups() for line in lines if (found := SHOWN.fullmatch(line.strip()))]
    assert rows == [("1", "yes"), ("4", "yes"), ("16", "yes"), ("64", "yes")]
    poisoned = lines.index("one of 16 requests is poisoned, and every batch with it raises")
    assert lines[poisoned + 1] == "  request 5 failed: ValueError: a poisoned row"
    assert re.fullmatch(r"  the 15 beside it, in \d+ calls, same tokens: yes", lines[poisoned + 2])
    assert lines[-2].startswith("one of 16 requests is cancelled after ")
    assert lines[-2].endswith(" tokens: 1 cancelled, 15 finished")
    assert lines[-1] == "  the 15 beside it, same tokens: yes"


def example(name: str) -> Any:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_that_are_not_the_same_are_told_and_end_it_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("batched_against_single")
    model = str(write_text_model(tmp_path / "text.gguf"))
    assert program.main(model) == 0
    assert "same tokens: no" not in capsys.readouterr().out
    usual = program.together

    def changed(llm: Any, count: int) -> Any:
        run = usual(llm, count)
        return run._replace(tokens=run.tokens[::-1]) if count == 4 else run

    program.together = changed
    assert program.main(model) == 1
    out = capsys.readouterr().out
    assert [found[2] for found in SHOWN.finditer(out)] == ["yes", "no", "yes", "yes"]


def test_a_model_of_ones_own_is_batched() -> None:
    lines = output_of("batch_your_own_model.py")
    assert lines[0] == "after 'the ow' comes 'l'"
    assert "96 tokens in 24 calls of forward" in lines, "four requests in every call"
    assert "the same alone: True" in lines
    assert "'t' failed: ValueError: this model wants two letters at least" in lines
    assert lines[-1] == "'th' got 'e'"
