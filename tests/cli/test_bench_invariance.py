"""--no-invariant measures both ways and says what one order of summation costs."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from tests.bench.sound_receipt import make_receipt

from quire.cli.program import main
from quire_bench.commands import throughput
from quire_bench.receipts import Receipt, read_folder


def test_the_cost_of_invariance_is_printed_and_both_receipts_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(args: argparse.Namespace) -> Receipt:
        rate = 100.0 if args.no_invariant else 80.0
        return make_receipt(results={"output_tokens_per_second": rate}, settings={"rate": rate})

    monkeypatch.setattr(throughput, "_measured", measured)
    monkeypatch.setattr(throughput, "_print", lambda _: None)
    where: list[Any] = ["--receipts", str(tmp_path)]
    assert main(["bench", "throughput", "--no-invariant", *where]) == 0
    told = capsys.readouterr().out
    assert "80.0 output tokens/s with it, 100.0 without: costs +25.0%" in told
    kept = read_folder(tmp_path, "throughput").values()
    assert {receipt.settings["rate"] for receipt in kept} == {80.0, 100.0}


def test_an_executor_with_one_order_of_summation_refuses_to_give_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "reference", "--no-invariant", "--receipts", str(tmp_path)]
    assert main(["bench", "throughput", "--model", "dummy:tiny", *words]) == 1
    assert "the reference executor has one order of summation" in capsys.readouterr().err
