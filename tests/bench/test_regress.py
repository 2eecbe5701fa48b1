"""regress: a slow-down is caught, noise is not, and what cannot be told is said to be so."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.receipt_samples import receipt

from quire.cli import main
from quire.core.errors import ConfigError
from quire_bench.receipts import Receipt, write
from quire_bench.regress import compare, folded, less_is_better, load_receipts, permutation_p_value


def noisy(rng: np.random.Generator, level: float, count: int, spread: float = 0.03) -> list[float]:
    """Times of a level: multiplicative noise, and one in twenty up to twice as long."""
    outliers = 1 + (rng.random(count) < 0.05) * rng.random(count)
    return [float(x) for x in level * np.exp(spread * rng.normal(size=count)) * outliers]


def run_of(seed: int, slowness: float = 1.0) -> Receipt:
    """A run whose machine is up to 1% off its usual self for all of it."""
    rng = np.random.default_rng(seed)
    level = slowness * float(np.exp(0.01 * rng.normal()))
    return receipt(
        {
            "inter_token_s": noisy(rng, 0.020 * level, 600),
            "time_to_first_token_s": noisy(rng, 0.3 * level, 10),
            "completion_tokens_per_second": [1 / x for x in noisy(rng, 0.02 * level, 10)],
        },
        settings={"batch_size": 4},
    )


def verdicts(before: Sequence[Receipt], after: Sequence[Receipt], **settings: Any) -> list[str]:
    return [row.verdict for row in compare(before, after, **settings).comparisons]


def test_a_slow_down_of_a_tenth_is_caught_in_ten_of_ten_pairs() -> None:
    for pair in range(10):
        found = compare([run_of(2 * pair)], [run_of(2 * pair + 1, slowness=1.1)])
        assert found.has_loss, pair
        assert "gain" not in [row.verdict for row in found.comparisons]


def test_ten_pairs_of_the_same_speed_show_no_change() -> None:
    for pair in range(10):
        assert verdicts([run_of(100 + 2 * pair)], [run_of(101 + 2 * pair)]) == ["same"] * 3, pair


def test_a_gain_is_no_loss() -> None:
    found = compare([run_of(1)], [run_of(2, slowness=0.8)])
    assert [row.verdict for row in found.comparisons] == ["gain"] * 3
    assert not found.has_loss
    assert found.comparisons[0].change == pytest.approx(-0.2, abs=0.05)


def test_a_certain_but_tiny_change_is_none() -> None:
    exact = receipt({"request_s": [1.0 + place / 1e6 for place in range(10)]})
    slower = receipt({"request_s": [1.02 + place / 1e6 for place in range(10)]})
    assert verdicts([exact], [slower]) == ["same"]
    assert verdicts([exact], [slower], least_effect=0.01) == ["loss"]


def test_with_too_few_samples_nothing_is_called_the_same() -> None:
    assert verdicts([receipt({"a_s": [1.0] * 4})], [receipt({"a_s": [9.0] * 4})]) == ["too few"]
    assert verdicts([receipt({"a_s": [1.0] * 5})], [receipt({"a_s": [9.0] * 5})]) == ["loss"]


def test_noise_between_whole_runs_is_seen_where_there_are_several() -> None:
    """Each run is steady in itself, and runs differ more than the two sides do."""
    levels = {"before": (1.0, 1.3), "after": (1.2, 1.5)}
    runs = {
        side: [receipt({"a_s": noisy(np.random.default_rng(7), level, 20, 0.001)}) for level in two]
        for side, two in levels.items()
    }
    assert verdicts(runs["before"], runs["after"]) == ["same"]
    assert verdicts(runs["before"][:1], runs["after"][:1]) == ["loss"]


def test_a_slow_down_is_caught_through_noise_between_runs() -> None:
    """Runs differ by some 1%; three a side tell a tenth from it, and nothing from nothing."""
    for pair in range(5):
        seeds = range(6 * pair, 6 * pair + 6)
        before = [run_of(seed) for seed in seeds[::2]]
        assert compare(before, [run_of(seed, slowness=1.1) for seed in seeds[1::2]]).has_loss
        assert verdicts(before, [run_of(seed) for seed in seeds[1::2]]) == ["same"] * 3


def test_a_fall_to_a_ninth_is_seen_through_noise_as_a_rise_to_nine_times_is() -> None:
    """As shares, -89% is less than 800%; as ratios they are one."""
    quick, slow = (
        [noisy(np.random.default_rng(seed), level, 10, 0.3) for seed in (1, 2)]
        for level in (1.0, 9.0)
    )
    times = [[receipt({"a_s": run}) for run in runs] for runs in (quick, slow)]
    rates = [
        [receipt({"a_per_second": [1 / value for value in run]}) for run in runs]
        for runs in (quick, slow)
    ]
    assert verdicts(*times) == verdicts(*rates) == ["loss"]


def test_receipts_pair_by_what_was_measured() -> None:
    def of(batch: int, quant: str, level: float) -> Receipt:
        samples = {"a_s": [level + place / 1000 for place in range(8)], "odd": [1.0]}
        return receipt(samples, quant=quant, settings={"batch": batch, "same": 1})

    found = compare(
        [of(1, "Q8_0", 1.0), of(2, "Q8_0", 1.0), of(4, "Q8_0", 1.0)],
        [of(2, "Q8_0", 2.0), of(1, "Q8_0", 1.0), of(1, "Q4_1", 1.0)],
    )
    assert [(row.name, row.verdict) for row in found.comparisons] == [
        ("throughput tiny Q8_0 batch=1", "same"),
        ("throughput tiny Q8_0 batch=2", "loss"),
    ]
    assert found.only_before == ["throughput tiny Q8_0 batch=4"]
    assert found.only_after == ["throughput tiny Q4_1 batch=1"]
    with pytest.raises(ConfigError, match="partner"):
        compare([of(1, "Q8_0", 1.0)], [of(2, "Q8_0", 1.0)])


def test_another_machine_or_path_is_noted() -> None:
    one = run_of(1)
    elsewhere = replace(one, machine={**one.machine, "cpu": "another"})
    slow_path = replace(one, executed={**one.executed, "device": "reference"})
    two = [one, one]
    assert not compare(two, two).notes
    assert "another machine" in compare(two, [elsewhere] * 2).notes[0]
    assert "path executed" in compare(two, [slow_path] * 2).notes[0]
    assert "1 of 1 pairs have a single receipt" in compare([one], two).notes[0]


def test_the_permutation_test_is_exact_for_few_and_close_for_many() -> None:
    rng = np.random.default_rng(0)
    assert permutation_p_value([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], rng) == 2 / 252
    assert permutation_p_value([1.0] * 5, [1.0] * 5, rng) == 1.0
    even = [float(x) for x in rng.normal(size=40)]
    assert permutation_p_value(even[::2], even[1::2], rng) > 0.05
    assert permutation_p_value(even[:20], [x + 5 for x in even[20:]], rng) < 1e-4


def test_names_of_samples_tell_which_way_is_better() -> None:
    assert less_is_better("inter_token_s") is True
    assert less_is_better("peak_bytes") is True
    assert less_is_better("prompt_tokens_per_second") is False
    assert less_is_better("memory_read_bytes_per_second.threads_2") is False
    assert less_is_better("batch_size") is None


def test_many_samples_fold_into_medians_in_order() -> None:
    assert folded([float(x) for x in range(60)]) == [3.0 * block + 1 for block in range(20)]
    assert folded([3.0, 1.0]) == [3.0, 1.0]


def test_the_command_prints_a_table_and_fails_on_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(run_of(1), old)
    slow = write(run_of(2, slowness=1.2), new)
    assert main(["bench", "regress", str(old), str(old)]) == 0
    assert "0 loss, 0 gain, 3 same, 0 too few" in capsys.readouterr().out
    assert main(["bench", "regress", str(old), str(slow)]) == 1
    assert "LOSS" in capsys.readouterr().out
    assert main(["bench", "regress", str(old), str(new), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["has_loss"] is True
    assert {row["verdict"] for row in told["comparisons"]} == {"loss"}
    assert main(["bench", "regress", str(old), str(tmp_path / "none")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_a_folder_without_receipts_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no receipts"):
        load_receipts(tmp_path)
