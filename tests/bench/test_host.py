"""`quire bench host`: a server whose steps compute nothing; its processor time is read."""

import json
import sys
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model

from quire.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's clocks of processes")


@pytest.mark.parametrize("kind", ["greedy", "sampled", "logprobs", "constrained"])
def test_streams_are_served_and_the_time_of_the_host_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    text_model = write_text_model(tmp_path / "text.gguf")
    load = ["--clients", "4", "--requests", "2", "--prompt-tokens", "8", "--new-tokens", "16"]
    load += ["--step-ms", "20", "--kind", kind]
    code = main(["bench", "host", "--model", str(text_model), *load, "--json"])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert 16 <= found["num_steps"] <= 8 * 17, "eight completions of 16 tokens, four at a time"
    assert found["rows_per_step"] == pytest.approx(8 * 16 / found["num_steps"])
    assert found["step_ms"] >= 20, "a step takes its time"
    assert found["host_ms"] > 0
    requests_ms = 8 * found["host_ms_per_request"]
    assert requests_ms == pytest.approx(found["num_steps"] * found["host_ms"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients must be at least 1"),
        (["--new-tokens", "-3"], "--new-tokens must be at least 1"),
        (["--step-ms", "-1"], "--step-ms must be between 0 and 10000"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "host", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--model", "dummy:tiny", "--clients", "2"]) != 0
    assert "has no tokenizer" in capfd.readouterr().err
