"""`quire bench tune`: what is tried, what is chosen, and the file that comes of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bench.models import TINY_KV
from tests.bench.sound_receipt import is_valid_to_jsonschema

from quire.cli import main
from quire.core.errors import ConfigError
from quire.executors.cpu import has_native_module
from quire.llm.assembly import Assembly, assemble, read_configuration
from quire.llm.devices import Options
from quire_bench import tune
from quire_bench.measure import Load, Run
from quire_bench.receipts import Receipt, read_folder
from quire_bench.subject import Subject, open_subject
from quire_bench.tune import Setting, Trial, Tuning, best, nearest, table, try_settings

SMALL = ["--model", "dummy:tiny", "--kv-memory", TINY_KV, "--prompt-tokens", "6"]
SMALL += [
    "--device",
    "reference",
    "--new-tokens",
    "3",
    "--repeats",
    "2",
    "--batches",
    "1,3",
    "--step-tokens",
    "2,8",
]


@pytest.fixture
def subject() -> Iterator[Subject]:
    opened = open_subject(
        "dummy:tiny", None, Options(max_batch_size=3, kv_memory=TINY_KV, device="reference")
    )
    yield opened
    opened.close()


def trial(batch: int, rates: list[float], p95_ms: float) -> Trial:
    return Trial(Setting(None, batch, 16), rates, [p95_ms / 1000], p95_ms / 1000)


def test_the_most_throughput_within_the_target_is_chosen() -> None:
    trials = [
        trial(1, [10.0, 11.0, 90.0], 5.0),
        trial(2, [20.0, 19.0, 20.0], 10.0),
        trial(4, [40.0, 41.0, 42.0], 10.1),
    ]
    assert best(trials, 10.0) is trials[1]
    assert best(trials, 11.0) is trials[2]
    assert best(trials, 5.0) is trials[0]
    assert best(trials, 4.9) is None
    assert nearest(trials[::-1]) is trials[0]
    lines = table(trials, trials[1], 10.0)
    assert lines[2].split()[-1] == "chosen"
    assert lines[3].endswith("above the target")
    assert lines[1].endswith("ms")


def test_every_setting_runs_as_it_is_named(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(assembly: Assembly, load: Load, seed: int) -> Run:
        config = assembly.options.engine_config()
        ran.append((config.max_batch_size, config.max_step_tokens, load, seed))
        return Run(load, seconds=2.0, inter_token_s=[0.25, 0.25])

    monkeypatch.setattr(tune, "run_load", run)
    monkeypatch.setattr(tune, "warm_up", lambda *_: None)
    wanted = Tuning(slo_itl_ms=1.0, batches=(3, 1), step_tokens=(2, 8), repeats=2, new_tokens=5)
    trials = try_settings(subject, wanted, threads=None)
    small, large = Load(2, 128, 5, 1), Load(6, 128, 5, 3)
    expected = [(1, 2, small), (1, 8, small), (3, 3, large), (3, 8, large)]
    assert ran == [(*setting, seed) for setting in expected for seed in (1, 2)]
    assert [found.setting[1:] for found in trials] == [setting[:2] for setting in expected]
    assert [found.rate for found in trials] == [5.0, 5.0, 15.0, 15.0]
    assert {found.p95_s for found in trials} == {0.25}


def test_what_the_executor_does_not_offer_is_not_tried(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = subject.assembly.executor
    small = executor.capacity._replace(max_batch_size=2, max_step_tokens=8)
    monkeypatch.setattr(executor, "capacity", small)
    wanted = Tuning(slo_itl_ms=1.0, batches=(1, 2, 4), step_tokens=(8, 16))
    assert list(wanted.settings(subject, 2)) == [Setting(2, 1, 8), Setting(2, 2, 8)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slo_itl_ms": 0.0}, "--slo-itl-ms must be above 0"),
        ({"slo_itl_ms": float("nan")}, "--slo-itl-ms must be above 0"),
        ({"batches": (0,)}, "--batches must be sizes of at least 1"),
        ({"step_tokens": ()}, "--step-tokens must be sizes of at least 1"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"prompt_tokens": 2048}, "more than the 2048 tokens"),
    ],
)
def test_what_cannot_be_tried_is_refused(change: dict[str, Any], told: str) -> None:
    usual: dict[str, Any] = {"slo_itl_ms": 1.0}
    with pytest.raises(ConfigError, match=told):
        Tuning(**(usual | change)).check(2048)


# ---- the command


def bench(folder: Path, *more: str) -> int:
    out = ["--receipts", str(folder / "receipts"), "--out", str(folder / "quire.toml")]
    return main(["bench", "tune", *SMALL, *out, *more])


def only_receipt(folder: Path) -> Receipt:
    [(path, receipt)] = read_folder(folder / "receipts", "tune").items()
    assert is_valid_to_jsonschema(json.loads(path.read_text()))
    return receipt


def test_the_best_setting_becomes_a_configuration_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--slo-itl-ms", "60000", "--strict") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4
    receipt = only_receipt(tmp_path)
    chosen: Any = receipt.results["best"]
    rates = {
        name: told["output_tokens_per_second"]["median"]
        for name, told in receipt.results.items()
        if name != "best" and isinstance(told, dict)
    }
    assert rates.keys() == {"batch_1_step_2", "batch_1_step_8", "batch_3_step_3", "batch_3_step_8"}
    assert chosen["output_tokens_per_second"]["median"] == max(rates.values())
    assert len(receipt.samples["batch_3_step_8_p95_inter_token_s"]) == 2
    options = read_configuration(tmp_path / "quire.toml")
    config = options.engine_config()
    assert config.max_batch_size == chosen["max_batch_size"]
    assert config.max_step_tokens == chosen["max_step_tokens"]
    assert (options.device, options.kv_memory) == ("reference", TINY_KV)
    assemble("dummy:tiny", options).executor.close()


def test_without_a_setting_within_the_target_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--slo-itl-ms", "0.0001", "--json") == 1
    printed, complaints = capsys.readouterr()
    assert "no setting keeps p95 within 0.0001 ms; the nearest has" in complaints
    assert json.loads(printed)["results"]["best"] is None
    assert only_receipt(tmp_path).results["best"] is None
    assert not (tmp_path / "quire.toml").exists()


def test_a_file_that_is_there_is_written_over_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quire.toml").write_text("mine")
    assert bench(tmp_path, "--slo-itl-ms", "60000") == 1
    assert "is there already: --force writes over it" in capsys.readouterr().err
    assert (tmp_path / "quire.toml").read_text() == "mine"
    assert bench(tmp_path, "--slo-itl-ms", "60000", "--force") == 0
    assert "[engine]" in (tmp_path / "quire.toml").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--threads", "1", "--try-threads", "2"], "--threads or --try-threads, not both"),
        (["--try-threads", "1,2"], "the reference executor does not compute on threads"),
    ],
)
def test_threads_that_cannot_be_had_are_refused(
    more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--slo-itl-ms", "60000", *more) == 1
    assert told in capsys.readouterr().err


@pytest.mark.skipif(not has_native_module(), reason="the native module is not built")
def test_numbers_of_threads_are_tried_and_the_best_is_written(tmp_path: Path) -> None:
    sizes = ["--batches", "2", "--step-tokens", "8", "--device", "cpu", "--try-threads", "1,2"]
    assert bench(tmp_path, "--slo-itl-ms", "60000", *sizes) == 0
    receipt = only_receipt(tmp_path)
    assert {"threads_1_batch_2_step_8", "threads_2_batch_2_step_8"} <= receipt.results.keys()
    chosen: Any = receipt.results["best"]
    assert read_configuration(tmp_path / "quire.toml").threads == chosen["threads"]
