"""`quire bench steps`: the engine over the CUDA executor without its kernels."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.llm.text_models import write_text_model

from quire.cli import main


def test_every_kind_of_rows_is_measured_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_text_model(tmp_path / "text.gguf")
    sizes = ["--rows", "3", "--steps", "5", "--rounds", "1", "--json"]
    assert main(["bench", "steps", "--model", str(model), *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = ["greedy", "sampled", "filtered", "penalties", "logprobs", "constrained"]
    assert [figures["kind"] for figures in found] == kinds
    for figures in found:
        parts = figures["parts_us"]
        assert set(parts) == {"schedule", "submit", "sample", "collect", "apply", "device"}
        assert 0 < sum(parts.values()) - parts["device"] < 1.01 * figures["engine_us"] + 100


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", "--kinds", "greedy,fast"]) != 0
    assert "'fast' is none of greedy" in capsys.readouterr().err
