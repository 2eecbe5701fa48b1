"""The grid: its cells, what counts as done, how far it is, and what it says in the end."""

from pathlib import Path
from typing import Any

import pytest
from tests.bench.sound_receipt import make_receipt

from quire.core.errors import ConfigError
from quire_bench.grid import (
    Cell,
    Conditions,
    Grid,
    finished,
    summary,
    table,
)
from quire_bench.receipts import Model, Receipt, write

GRID = Grid(quants=("Q8_0",), batches=(2, 1, 2), prompts=(16, 1), new_tokens=4, repeats=3)
CELL = Cell("Q8_0", 16, 2)
MODEL: Model = {"name": "dummy:tiny:Q8_0", "sha256": None, "quant": "Q8_0"}
CONDITIONS = Conditions(
    model=MODEL,
    machine=make_receipt().machine,
    versions={"quire": "1.0"},
    asked={"device": "auto"},
    executor="reference",
    seed=7,
)


def cell_receipt(cell: Cell, rate: float | None = 10.0, **changes: Any) -> Receipt:
    facts: dict[str, Any] = {
        "kind": "grid-cell",
        "model": MODEL,
        "versions": {"quire": "1.0"},
        "settings": GRID.settings(cell),
        "results": {
            "completion_tokens_per_second": rate,
            "utilisation": {"decode_memory_share": 0.25, "decode_integer_share": 0.5},
        },
    }
    return make_receipt(**(facts | changes))


def test_cells_are_every_combination_once_cheap_ones_first() -> None:
    pairs = [(cell.prompt_tokens, cell.batch) for cell in GRID.cells("Q8_0")]
    assert pairs == [(1, 1), (1, 2), (16, 1), (16, 2)]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batches": ()}, "--batches must name one"),
        ({"batches": (1, 0)}, "--batches must be at least 1, got 0"),
        ({"prompts": (-1,)}, "--prompts must be at least 1, got -1"),
        ({"new_tokens": 0}, "--new-tokens must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1"),
    ],
)
def test_a_grid_of_nothing_is_refused(changes: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {"quants": (None,), "batches": (1,), "prompts": (1,)}
    with pytest.raises(ConfigError, match=complaint):
        Grid(**({"new_tokens": 1, "repeats": 1} | fields | changes))


def test_a_cell_is_done_where_its_receipt_is(tmp_path: Path) -> None:
    write(cell_receipt(CELL), tmp_path)
    found = finished(GRID, GRID.cells("Q8_0"), tmp_path, CONDITIONS)
    assert list(found) == [CELL]
    assert finished(GRID, GRID.cells("Q8_0"), tmp_path / "absent", CONDITIONS) == {}


def test_of_two_receipts_of_a_cell_the_newer_counts(tmp_path: Path) -> None:
    write(cell_receipt(CELL, 2.0, created="2026-03-01T00:00:00Z"), tmp_path)
    write(cell_receipt(CELL, 1.0, created="2026-02-01T00:00:00Z"), tmp_path)
    found = finished(GRID, [CELL], tmp_path, CONDITIONS)
    assert found[CELL].results["completion_tokens_per_second"] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "throughput"},
        {"model": MODEL | {"name": "dummy:tiny:Q8_0:1"}},
        {"model": MODEL | {"sha256": "0" * 64}},
        {"machine": {**CONDITIONS.machine, "cpu": "another"}},
        {"machine": {**CONDITIONS.machine, "cores": 64}},
        {"versions": {"quire": "1.1"}},
        {"asked": {"device": "cpu"}},
        {"executed": {"device": "cpu", "kernels": [], "fallback": None}},
        {"seed": 8},
        {"settings": GRID.settings(CELL) | {"repeats": 4}},
        {"settings": GRID.settings(CELL) | {"new_tokens": 5}},
        {"results": {"completion_tokens_per_second": 10.0, "utilisation": None}},
    ],
)
def test_a_receipt_of_anything_else_leaves_the_cell_to_do(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write(cell_receipt(CELL, **changes), tmp_path)
    assert finished(GRID, [CELL], tmp_path, CONDITIONS) == {}


def test_scaling_is_against_batch_1_of_the_same_prompt_and_mix() -> None:
    one, two, other = Cell("Q8_0", 16, 1), CELL, Cell("Q8_0", 1, 2)
    receipts = {one: cell_receipt(one, 10.0), two: cell_receipt(two, 15.0)}
    receipts[other] = cell_receipt(other, 99.0)
    entries = summary(receipts)
    assert [entry["scaling"] for entry in entries] == [1.0, 1.5, None]
    assert [(entry["prompt_tokens"], entry["batch"]) for entry in entries] == [
        (16, 1),
        (16, 2),
        (1, 2),
    ]


def test_the_table_has_a_dash_where_nothing_was_measured() -> None:
    one = Cell("Q8_0", 16, 1)
    receipts = {one: cell_receipt(one, 10.0), CELL: cell_receipt(CELL, None)}
    title, header, row = table(receipts)
    assert title.startswith("dummy:tiny:Q8_0")
    assert header.split() == ["prompt", "batch", "1", "batch", "2"]
    assert row.split() == ["16", "10.0", "(1.00×,", "50%)", "-"]
