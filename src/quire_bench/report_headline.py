"""The table that says how fast quire is: by model and batch, beside rivals and beside the floor."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire_bench.compare import KIND, QUIRE, Measured, measured
from quire_bench.grid import KIND as GRID_KIND
from quire_bench.receipts import Receipt, number
from quire_bench.report_compare import engine_name
from quire_bench.report_data import title_of
from quire_bench.report_tables import NONE, Table, ranged, short
from quire_bench.utilisation import floor_share, utilisation_of

_WHOLE, _COMPLETION = "output_tokens_per_second", "completion_tokens_per_second"
_FLOOR_PROMPT = 128  # tokens: the grid's cells whose floor is shown


class _Cell(NamedTuple):
    batch: int
    engine: str
    metric: str


def headline(receipts: Sequence[Receipt]) -> Table:
    """Of each cell the newest receipt; a rival's rows where one was measured."""
    ordered = sorted(receipts, key=lambda receipt: receipt.created)
    found: dict[str, dict[_Cell, Measured]] = defaultdict(dict)
    names: dict[str, str] = {}
    for receipt in ordered:
        for one in measured(receipt.results) if receipt.kind == KIND else ():
            found[title_of(receipt)][_Cell(one.batch, one.engine, one.metric)] = one
            names[one.engine] = engine_name(receipt, one.engine)
    floors = _floors(ordered)
    batches = sorted({cell.batch for cells in found.values() for cell in cells})
    rows = [
        [title if index == 0 else "", *row]
        for title, cells in sorted(found.items())
        for index, row in enumerate(_rows(cells, floors.get(title, {}), names, batches))
    ]
    return Table("", ("model", "batch", *map(str, batches)), rows, _note(ordered), text_columns=2)


def _rows(
    cells: Mapping[_Cell, Measured],
    floors: Mapping[int, float],
    names: Mapping[str, str],
    batches: Sequence[int],
) -> list[list[str]]:
    def row(what: str, engine: str, metric: str, is_ratio: bool) -> list[str]:
        ones = [cells.get(_Cell(batch, engine, metric)) for batch in batches]
        return [what, *(_shown(one, is_ratio) for one in ones)]

    rows = [row("tokens/s, the whole run", QUIRE, _WHOLE, False)]
    for engine in dict.fromkeys(cell.engine for cell in cells if cell.engine != QUIRE):
        rows.append(row(f"times {names[engine]}", engine, _WHOLE, True))
        rows.append(row("the same, completions alone", engine, _COMPLETION, True))
    if floors:
        shares = [floors.get(batch) for batch in batches]
        rows.append(["share of the floor", *(NONE if s is None else f"{s:.0%}" for s in shares)])
    return rows


def _shown(one: Measured | None, is_ratio: bool) -> str:
    if one is None:
        return NONE
    return ranged(one.ratio) if is_ratio else short(number(one.rate, "median") or 0.0)


def _floors(receipts: Sequence[Receipt]) -> dict[str, dict[int, float]]:
    """Of decode steps, by model and batch: how near the grid's cells come to the floor."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for receipt in receipts:
        batch = number(receipt.settings, "batch")
        is_shown = number(receipt.settings, "prompt_tokens") == _FLOOR_PROMPT
        if receipt.kind == GRID_KIND and is_shown and batch is not None:
            share = floor_share(utilisation_of(receipt, receipts))
            if share is not None:
                found[title_of(receipt)][int(batch)] = share
    return found


def _note(receipts: Sequence[Receipt]) -> str:
    loads = set()
    for receipt in receipts:
        if receipt.kind == KIND:
            prompt, new = (number(receipt.settings, f"{name}_tokens") for name in ("prompt", "new"))
            loads.add(f"{prompt or 0:g} + {new or 0:g}")
    compared, grids = (_machines(receipts, kind) for kind in (KIND, GRID_KIND))
    elsewhere = f", measured on {grids}" if grids and grids != compared else ""
    return (
        f"Requests of {' or '.join(sorted(loads))} tokens (prompt + completion) on {compared}, "
        "engines in turn; ratios are medians of the rounds, "
        "with the least and the most. The floor is the time that a decode step takes at least, for "
        "the bytes that it reads or the integer operations that it computes, at the rates that "
        f"`quire bench limits` measured; prompts of {_FLOOR_PROMPT} tokens, from the grid"
        f"{elsewhere}. Weights that stay in the processor's caches come to more than 100%."
    )


def _machines(receipts: Sequence[Receipt], kind: str) -> str:
    found = {
        f"{receipt.machine['cpu']}, {receipt.machine['cores']:g} cores"
        for receipt in receipts
        if receipt.kind == kind
    }
    return " and ".join(sorted(found))
