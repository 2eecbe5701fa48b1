"""`quire bench serve` as a user runs it: its table, its receipt, its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.openai_like_server import Behaviour, serving
from tests.bench.sound_receipt import is_valid_to_jsonschema

from quire.cli import main
from quire_bench.receipts import Receipt, as_data, read_folder

SMALL = ["--prompt-tokens", "5", "--new-tokens", "4", "--clients", "2", "--requests", "3"]


def bench(url: str, out: Path, *more: str) -> int:
    return main(["bench", "serve", url, "--receipts", str(out), *more])


def only_receipt(folder: Path) -> Receipt:
    (found,) = read_folder(folder).values()
    assert is_valid_to_jsonschema(as_data(found))
    return found


def test_a_load_gives_a_table_and_a_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour(statuses={3: 500})) as server:
        assert bench(server.url, tmp_path, *SMALL) == 0
    printed = capsys.readouterr().out
    assert "tiny at http://127.0.0.1" in printed
    assert "tokens counted by usage" in printed
    assert "all: 1 × http 500" in printed
    receipt = only_receipt(tmp_path)
    assert receipt.kind == "serve"
    assert receipt.command[:4] == ["quire", "bench", "serve", server.url]
    assert receipt.command[receipt.command.index("--clients") + 1] == "2"
    assert receipt.model["name"] == "tiny"
    assert receipt.settings["clients"] == 2
    assert receipt.results["completed"] == 5
    assert receipt.results["completion_tokens"] == 20
    assert receipt.results["errors_by_kind"] == {"http 500": 1}
    assert len(receipt.samples["time_to_first_token_s"]) == 5
    assert len(receipt.samples["inter_token_s"]) == 15


@pytest.mark.parametrize(
    ("scenario", "more", "told"),
    [
        ("convoy", ["--rate", "20", "--long-rate", "5"], "short requests' p99, first token"),
        ("neighbour", ["--rate", "20", "--clients", "1", "--flood", "3"], "beside a flood:"),
        ("saturation", ["--rate", "10", "--max-steps", "2"], "most served"),
        ("soak", ["--clients", "2"], "drift over the run, completion_tokens_per_second"),
    ],
)
def test_every_scenario_prints_what_it_found(
    scenario: str,
    more: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_bench.load_scenarios.LEAD_S", 0.05)
    lengths = ["--mix", "chat", "--scale", "0.05", "--duration", "0.5", "--ignore-eos"]
    with serving(Behaviour()) as server:
        assert bench(server.url, tmp_path, "--scenario", scenario, *lengths, *more) == 0
    assert told in capsys.readouterr().out
    receipt = only_receipt(tmp_path)
    assert receipt.settings["scenario"] == scenario
    assert receipt.settings.get("rate") == (None if scenario == "soak" else float(more[1]))
    assert receipt.settings["max_new_tokens"] == 1024  # the usual value, where none is given
    assert "new_tokens" not in receipt.settings
    assert "--new-tokens" not in receipt.command


def test_the_command_of_a_receipt_runs_again(tmp_path: Path) -> None:
    with serving(Behaviour()) as server:
        assert bench(server.url, tmp_path, *SMALL, "--server-name", "a server 1.0") == 0
        first = only_receipt(tmp_path)
        assert main(list(first.command[1:])) == 0
    again = [found for found in read_folder(tmp_path).values() if found.created != first.created]
    assert [found.settings for found in again] == [first.settings]
    assert first.executed["server"] == "a server 1.0"


def test_the_key_is_sent_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour(api_key="s3cret")) as server:
        assert bench(server.url, tmp_path, *SMALL) == 1
        assert "QUIRE_API_KEY" in capsys.readouterr().err
        assert bench(server.url, tmp_path, *SMALL, "--api-key", "s3cret") == 0
        monkeypatch.setenv("QUIRE_API_KEY", "s3cret")
        assert bench(server.url, tmp_path, *SMALL, "--json") == 0
    written = [path.read_text() for path in read_folder(tmp_path)]
    assert len(written) == 2
    assert not any("s3cret" in text for text in [*written, capsys.readouterr().out])


def test_json_is_the_receipt_and_the_model_may_be_chosen_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour(has_models=False, has_usage=False)) as server:
        assert bench(server.url, tmp_path / "a", *SMALL, "--json") == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert told["model"]["name"] == "unnamed"
        assert told["executed"]["tokens_counted_by"] == "pieces"
        assert not any("model" in body for body in server.behaviour.bodies)
        assert bench(server.url, tmp_path / "b", *SMALL, "--model", "mine", "--api", "chat") == 0
    assert server.behaviour.bodies[-1]["model"] == "mine"


def test_a_model_named_by_its_path_is_asked_for_so_and_shown_by_its_file(tmp_path: Path) -> None:
    with serving(Behaviour(model="/home/me/models/one.gguf")) as server:
        assert bench(server.url, tmp_path, *SMALL) == 0
    assert server.behaviour.bodies[-1]["model"] == "/home/me/models/one.gguf"
    assert only_receipt(tmp_path).model["name"] == "one.gguf"


def test_completions_that_end_early_although_ignore_eos_was_sent_fail_a_strict_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour(max_pieces=2)) as server:
        assert bench(server.url, tmp_path, *SMALL) == 0
        assert not capsys.readouterr().err
        assert bench(server.url, tmp_path, *SMALL, "--ignore-eos") == 0
        assert "not heeded: 6 of 6" in capsys.readouterr().err
        assert bench(server.url, tmp_path, *SMALL, "--ignore-eos", "--strict") == 1


def test_a_load_of_which_nothing_came_back_fails(tmp_path: Path) -> None:
    with serving(Behaviour(statuses=dict.fromkeys(range(1, 9), 503))) as server:
        assert bench(server.url, tmp_path, *SMALL) == 1
    assert only_receipt(tmp_path).results["errors"] == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["http://127.0.0.1:1"], "no server answers"),
        (["http://192.0.2.1"], "--allow-remote"),
        (["http://127.0.0.1:1", "--pid", "1"], "for --scenario soak"),
        (["http://127.0.0.1:1", "--scenario", "soak", "--rate", "1"], "--rate has no effect"),
        (["http://127.0.0.1:1", "--scale", "2"], "--scale has no effect on a closed loop"),
        (["http://127.0.0.1:1", "--mix", "chat", "--new-tokens", "2"], "--new-tokens has no"),
        (["http://127.0.0.1:1", "--rate", "2", "--clients", "2"], "--clients has no effect on an"),
        (
            ["http://127.0.0.1:1", "--duration", "2"],
            "of effect: --prompt-tokens, --prompt-spread, --new-tokens, --",
        ),
        (["http://127.0.0.1:1", "--timeout", "0"], "--timeout"),
        (["http://127.0.0.1:1", "--clients", "0"], "--clients must be at least 1"),
    ],
)
def test_a_wrong_call_says_what_to_do(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(words[0], tmp_path, *words[1:]) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
