"""The headline: rates, ratios and shares of the floor, from the newest receipts, between marks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.receipt_samples import receipt

from quire.cli import main
from quire.core.errors import ConfigError
from quire_bench.receipts import Receipt, write
from quire_bench.report import BEGIN, END, HEADLINE_BEGIN, HEADLINE_END, with_tables
from quire_bench.report_headline import headline

WHOLE, COMPLETION = "output_tokens_per_second", "completion_tokens_per_second"


def spread(middle: float) -> dict[str, float]:
    return {"low": middle / 2, "median": middle, "high": 2 * middle, "relative": 1.5}


def compared(batch: int, rate: float, ratio: float, *, created: str = "2026-01-02") -> Receipt:
    rival = {"rate": spread(rate / ratio), "quire_by_rival": spread(ratio)}
    cell: dict[str, Any] = {
        "quire": {WHOLE: {"rate": spread(rate)}, COMPLETION: {"rate": spread(2 * rate)}},
        "llama.cpp": {WHOLE: rival, COMPLETION: rival | {"quire_by_rival": spread(2 * ratio)}},
    }
    made = receipt(
        kind="compare",
        settings={"batches": [batch], "prompt_tokens": 64, "new_tokens": 32},
        results={f"batch_{batch}": cell},
        versions={"quire": "0.1.0", "llama.cpp": "9.9"},
    )
    return replace(made, created=f"{created}T00:00:00Z")


def grid_cell(batch: int, prompt: int, bytes_rate: float, operations: float) -> Receipt:
    achieved = {"decode_bytes_per_second": bytes_rate, "decode_operations_per_second": operations}
    settings = {"batch": batch, "prompt_tokens": prompt, "new_tokens": 32}
    return receipt(kind="grid-cell", settings=settings, results={"achieved": achieved})


def limits() -> Receipt:
    results = {
        "memory_read_bytes_per_second": {"best": 10e9},
        "float32_operations_per_second": {"best": 1e9},
        "integer_operations_per_second": {"best": 100e9},
    }
    return receipt(kind="limits", name="machine", quant=None, results=results)


def test_it_has_the_rate_the_ratios_and_the_share_of_the_floor_by_batch() -> None:
    table = headline(
        [
            *(compared(1, 10.0, 2.0), compared(4, 30.0, 3.0), limits()),
            grid_cell(1, 128, 8e9, 1e9),  # memory is the floor
            grid_cell(4, 128, 1e9, 50e9),  # arithmetic is
            grid_cell(4, 512, 9e9, 90e9),  # of other prompts
        ]
    )
    assert table.columns == ("model", "batch", "1", "4")
    assert table.rows == [
        ["tiny Q8_0 on cpu", "tokens/s, the whole run", "10.0", "30.0"],
        ["", "times llama.cpp 9.9", "2 (1–4)", "3 (1.5–6)"],
        ["", "the same, completions alone", "4 (2–8)", "6 (3–12.0)"],
        ["", "share of the floor", "80%", "50%"],
    ]
    assert "Requests of 64 + 32 tokens" in table.note
    assert "a CPU, 2 cores" in table.note


def test_it_says_where_the_grid_was_measured_if_not_where_engines_were_compared() -> None:
    cell = grid_cell(1, 128, 8e9, 1e9)
    assert "measured on" not in headline([compared(1, 10.0, 2.0), cell]).note
    elsewhere = replace(cell, machine={**cell.machine, "cpu": "another", "cores": 8})
    note = headline([compared(1, 10.0, 2.0), elsewhere]).note
    assert "from the grid, measured on another, 8 cores." in note


def test_the_newest_receipt_of_a_cell_counts_and_a_floor_needs_measured_limits() -> None:
    newer = compared(1, 20.0, 5.0, created="2026-01-03")
    table = headline([newer, compared(1, 10.0, 2.0), grid_cell(1, 128, 8e9, 1e9)])
    assert [row[-1] for row in table.rows] == ["20.0", "5 (2.5–10.0)", "10.0 (5–20.0)"]


def test_it_goes_between_its_own_marks() -> None:
    receipts = [compared(1, 10.0, 2.0)]
    page = with_tables(f"# Fast\n{HEADLINE_BEGIN}\nold\n{HEADLINE_END}\nthe end\n", receipts)
    assert "| times llama.cpp 9.9 | 2 (1–4) |" in page
    assert "old" not in page and page.endswith(f"{HEADLINE_END}\nthe end\n")
    assert "Where the figures come from" not in page
    both = with_tables(f"{HEADLINE_BEGIN}\n{HEADLINE_END}\n{BEGIN}\n{END}\n", receipts)
    assert "times llama.cpp" in both and "Where the figures come from" in both
    for wrong in (HEADLINE_BEGIN, f"{HEADLINE_END}\n{HEADLINE_BEGIN}"):
        with pytest.raises(ConfigError, match="headline:"):
            with_tables(wrong, receipts)


def test_the_command_keeps_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(compared(1, 10.0, 2.0), tmp_path / "receipts")
    pages = [tmp_path / "headline.md", tmp_path / "tables.md"]
    pages[0].write_text(f"{HEADLINE_BEGIN}\n{HEADLINE_END}\n")
    pages[1].write_text(f"{BEGIN}\n{END}\n")
    words = ["bench", "report", str(tmp_path / "receipts")]
    for page in pages:
        words += ["--markdown", str(page)]
    assert main([*words, "--check"]) == 1
    assert capsys.readouterr().err.count("does not match its receipts") == 2
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    pages[0].write_text(pages[0].read_text().replace("10.0", "11.0"))
    assert main([*words, "--check"]) == 1
