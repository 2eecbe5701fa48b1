"""`quire bench jobs`: requests and a job at a real server, and the figures made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.sound_receipt import make_receipt
from tests.llm.text_models import write_text_model

from quire.cli import main
from quire.core.errors import ConfigError, ExecutorError
from quire_bench.jobs import JobsPlan, Lengths, Part, Round, _results, started_server
from quire_bench.load import Load, Outcome
from quire_bench.receipts import read_folder
from quire_bench.report_tables import tables


def test_requests_and_a_job_are_measured_alone_and_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_text_model(tmp_path / "text.gguf")
    load = ["--rate", "4", "--seconds", "1", "--rounds", "2", "--max-batch-size", "2"]
    lengths = ["--prompt-tokens", "4", "--new-tokens", "3", "--job-prompt-tokens", "4"]
    options = ["--device", "cpu", "--kv-memory", "4MiB", "--receipts", str(tmp_path / "receipts")]
    words = ["--model", str(model), *load, *lengths, "--job-new-tokens", "24", *options]
    assert main(["bench", "jobs", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    results, samples = found["results"], found["samples"]
    assert results["alone"]["errors"] == results["beside_job"]["errors"] == 0
    assert results["alone"]["requests"] == results["beside_job"]["requests"] > 2
    assert results["alone"]["completion_tokens"] == 3 * results["alone"]["requests"]
    assert results["first_token_p95_ratio"] > 0
    rates = ("job_alone_tokens_per_second", "job_tokens_per_second", "request_tokens_per_second")
    assert min(results[name] for name in rates) > 0
    assert len(samples["job_completion_tokens_per_second"]) == 2
    assert (found["executed"]["device"], found["model"]["name"]) == ("cpu", "text.gguf")
    [kept] = read_folder(tmp_path / "receipts", "jobs").values()
    [table] = [each for each in tables([kept]) if each.title == "Requests beside a batch job"]
    assert table.rows[0][1:3] == ["4 + 3", "4 + 24"]


def part(seconds: float, first_token_s: float | None, line_tokens: int) -> Part:
    """Ten requests of 20 + 10 tokens, if their first tokens' time is given."""
    if first_token_s is None:
        return Part(seconds, None, line_tokens)
    outcomes = [
        Outcome("request", 0.0, 0.0, [first_token_s], seconds, prompt_tokens=20, usage_tokens=10)
        for _ in range(10)
    ]
    return Part(seconds, Load(outcomes, 0.0, seconds), line_tokens)


def test_a_share_is_of_the_rate_alone_less_the_requests_tokens() -> None:
    # Lines of three tokens for each new one: alone 3 * 200 / s, 300 / 10 s go to requests.
    rounds = [Round(part(10, 0.1, 0), part(5, None, 1000), part(10, 0.125, 1710))]
    found: Any = _results(rounds, tokens_per_new=3.0)
    assert found["first_token_p95_ratio"] == pytest.approx(1.25)
    assert found["job_alone_tokens_per_second"] == pytest.approx(600)
    assert found["request_tokens_per_second"] == pytest.approx(30)
    assert found["job_share_of_what_is_left"] == pytest.approx(513 / 570)
    assert found["job_share_by_completion_tokens"] == pytest.approx(171 / 190)


def test_requests_that_leave_nothing_are_refused() -> None:
    rounds = [Round(part(10, 0.1, 0), part(10, None, 90), part(10, 0.1, 1))]
    with pytest.raises(ExecutorError, match="lower --rate"):
        _results(rounds, tokens_per_new=3.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate": 0.0}, "--rate must be above 0"),
        ({"seconds": 0.5}, "--seconds must be from 1"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"lines": Lengths(0, 4)}, "a prompt token and a new one"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "rate": 1.0,
        "requests": Lengths(4, 4),
        "lines": Lengths(4, 4),
        "seconds": 5.0,
        "rounds": 2,
    }
    with pytest.raises(ConfigError, match=message):
        JobsPlan(**{**usual, **changed})


def test_a_model_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "jobs", "--model", "dummy:tiny"]) != 0
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ExecutorError, match=r"(?s)did not start: .*missing.gguf is neither"),
        started_server([str(tmp_path / "missing.gguf")]),
    ):
        pass


def test_receipts_without_figures_have_dashes() -> None:
    receipt = make_receipt(kind="jobs", settings={}, results={})
    [table] = [each for each in tables([receipt]) if each.title == "Requests beside a batch job"]
    assert set(table.rows[0][3:]) == {"–"}
