"""`quire bench traffic`: greedy, sampled and long loads of one loaded model, beside a rival's."""

import json
from pathlib import Path

import pytest

from quire.cli import main
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire_bench.measure import Load, Run
from quire_bench.traffic import (
    PARTS,
    Figures,
    Row,
    check_context,
    measure_traffic,
    rows_of,
    table,
)

LARGE = "dummy:llama-8b:Q4_K_M"


def test_every_part_of_the_8b_shape_has_its_loads() -> None:
    rows = rows_of(LARGE)
    assert {row.part for row in rows} == set(PARTS)
    assert [row.load.num_requests for row in rows if row.part == "greedy"] == [1, 4, 16, 64, 256]
    [published] = [row for row in rows if row.part == "sampled" and row.rival is not None]
    assert (published.load, published.rival) == (Load(256, 129, 256), 17_243)
    assert [row.rival for row in rows if row.part == "long"] == [2.15, 1.57, 2.39, 4.14]


def test_greedy_rows_stand_beside_the_rivals_weights_of_as_many_bits() -> None:
    [four, *_], [sixteen, *_] = rows_of(LARGE), rows_of("dummy:llama-8b:BF16")
    assert (four.rival, sixteen.rival) == (254, 203)
    assert all(row.rival is row.goal is None for row in rows_of("dummy:tiny"))
    assert all(row.rival is None for row in rows_of(LARGE, short=0.5))


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="wide: there are greedy, sampled"):
        rows_of(LARGE, ("greedy", "wide"))


def test_shares_and_times_are_of_the_median_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Load, int, float, int | None]] = []
    seconds = iter([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 4.0, 8.0, 2.0, 4.0])

    def run(assembly: object, load: Load, seed: int, params: SamplingParams) -> Run:
        asked.append((load, seed, params.temperature, params.logprobs))
        return Run(load, seconds=next(seconds), first_token_s=[0.5])

    monkeypatch.setattr("quire_bench.traffic.run_load", run)
    load, long = Load(4, 128, 100), Load(2, 4096, 1)
    rows = [Row("greedy", load, 100.0, 2.0), Row("logprobs", load), Row("long", long, 8.0, 1.0)]
    found = measure_traffic(None, rows, repeats=3, seed=5)  # type: ignore[arg-type]
    assert asked[0] == (Load(4, 16, 8), 5, 0.8, None)
    assert asked[1:4] == [(load, seed, 0.0, None) for seed in (6, 7, 8)]
    assert asked[4] == (load, 6, 0.8, 5)
    greedy, scored, last = found.figures.values()
    assert (greedy["output_tokens_per_second"], greedy["times_rival"]) == (200.0, 2.0)
    assert (scored["of_greedy"], scored["times_rival"]) == (0.5, None)
    assert (last["seconds"], last["times_rival"], last["of_greedy"]) == (4.0, 2.0, None)
    assert found.seconds["long 2 x (4096 + 1)"] == [8.0, 2.0, 4.0]


def test_the_table_marks_what_misses_its_goal() -> None:
    figures: Figures = {
        "seconds": 1.0,
        "output_tokens_per_second": 1234.0,
        "first_token_s": 0.1,
        "of_greedy": 0.94,
        "rival": None,
        "times_rival": None,
        "goal": None,
    }
    near: Figures = {**figures, "of_greedy": None, "rival": 1000, "times_rival": 1.2, "goal": 1.1}
    held: Figures = {**figures, "of_greedy": 0.91}
    rows = {"sampled": figures, "greedy": near, "constrained": held}
    _, slow, fast, constrained = table(rows)
    assert slow.endswith("missed") and "1,234" in slow
    assert not fast.endswith("missed")
    assert not constrained.endswith("missed"), "its goal is 0.9"
    [_, alone] = table({"sampled": figures})
    assert not alone.endswith("missed"), "a model without goals"


def test_the_command_keeps_one_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "traffic", "--model", "dummy:tiny", "--device", "reference", "--repeats", "1"]
    words += ["--rows", "long", "--short", "0.002", "--receipts", str(tmp_path)]
    assert main(words) == 0
    assert "long 64 x (4 + 1)" in capsys.readouterr().out
    [path] = tmp_path.iterdir()
    receipt = json.loads(path.read_text())
    assert receipt["kind"] == "traffic"
    assert "vLLM 0.24" in receipt["settings"]["rival"]
    assert set(receipt["results"]) == set(receipt["settings"]["rows"])


def test_a_row_longer_than_the_context_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"long 1 x \(32768 \+ 64\) does not fit .* 8192"):
        check_context([Row("greedy", Load(1, 8000, 192)), Row("long", Load(1, 32_768, 64))], 8192)


def test_constrained_rows_have_a_schema_each_and_a_vocabulary_where_the_model_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [row, _] = rows_of("dummy:tiny", ("constrained",))
    assert not isinstance(row.params, SamplingParams)
    assert len({own.structured for own in row.params}) == 16
    words = ["bench", "traffic", "--model", "dummy:tiny", "--device", "reference", "--repeats", "1"]
    words += ["--rows", "greedy,constrained", "--short", "0.05", "--receipts", str(tmp_path)]
    assert main(words) == 0
    [path] = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert results["constrained 16 x (6 + 12)"]["of_greedy"] > 0


def test_no_runs_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "traffic", "--model", "dummy:tiny", "--repeats", "0"]) != 0
    assert "--repeats" in capsys.readouterr().err
