"""regress over receipts of real runs: a slowed executor is caught."""

import time
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.executors.reference import ReferenceExecutor

SLOWER_S = 0.05  # a step, of a model whose steps take some milliseconds


def measure(folder: Path) -> None:
    load = ["--requests", "2", "--prompt-tokens", "4", "--new-tokens", "4", "--repeats", "7"]
    words = [
        "bench",
        "throughput",
        "--model",
        "dummy:tiny",
        "--kv-memory",
        "4MiB",
        *load,
        "--device",
        "reference",
    ]
    assert main([*words, "--receipts", str(folder)]) == 0


def test_a_slowed_executor_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ReferenceExecutor.collect

    def slowed(*args: Any, **more: Any) -> Any:
        time.sleep(SLOWER_S)
        return usual(*args, **more)

    for _ in range(2):  # in turn, as regress asks for
        measure(tmp_path / "before")
        with monkeypatch.context() as patch:
            patch.setattr(ReferenceExecutor, "collect", slowed)
            measure(tmp_path / "after")
    capsys.readouterr()
    assert main(["bench", "regress", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    told = capsys.readouterr().out
    assert "LOSS" in told
    assert ", 0 gain" in told
    same = ["bench", "regress", str(tmp_path / "before"), str(tmp_path / "before")]
    assert main(same) == 0
