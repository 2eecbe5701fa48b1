"""The grid: throughput for every batch size, prompt length and mix, each cell a receipt.

A cell whose receipt is there already, of the same model, settings, machine and version, counts as
done: an interrupted grid goes on where it stopped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire_bench.measure import Load
from quire_bench.receipts import (
    Asked,
    Facts,
    Machine,
    Model,
    Receipt,
    number,
    read_folder,
    section,
)
from quire_bench.subject import Subject
from quire_bench.utilisation import floor_share

KIND = "grid-cell"
_SHOWN = (
    *("prompt_tokens_per_second", "completion_tokens_per_second", "time_to_first_token_s"),
    *("inter_token_s", "memory", "achieved", "utilisation"),
)


class Cell(NamedTuple):
    """One combination."""

    quant: str | None  # None: the one the file has
    prompt_tokens: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is to be measured of one model."""

    quants: tuple[str | None, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    repeats: int

    def __post_init__(self) -> None:
        for name in ("quants", "batches", "prompts"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} must name one at least")
        numbers = {"--batches": self.batches, "--prompts": self.prompts}
        numbers |= {"--new-tokens": (self.new_tokens,), "--repeats": (self.repeats,)}
        for flag, values in numbers.items():
            if min(values) < 1:
                raise ConfigError(f"{flag} must be at least 1, got {min(values)}")

    def cells(self, quant: str | None) -> list[Cell]:
        """The cells of one mix, cheap ones first."""
        pairs = product(sorted(set(self.prompts)), sorted(set(self.batches)))
        return [Cell(quant, prompt, batch) for prompt, batch in pairs]

    def load(self, cell: Cell) -> Load:
        return Load(cell.batch, cell.prompt_tokens, self.new_tokens)

    def settings(self, cell: Cell) -> dict[str, int]:
        return {
            "batch": cell.batch,
            "prompt_tokens": cell.prompt_tokens,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
        }

    def work(self, cell: Cell) -> int:
        """Tokens that measuring a cell computes, the run that is not counted aside."""
        return self.repeats * cell.batch * (cell.prompt_tokens + self.new_tokens)


def check_blocks(grid: Grid, cells: Sequence[Cell], subject: Subject) -> None:
    """Each cell must run as one batch: pre-empting would measure something else."""
    capacity = subject.assembly.executor.capacity
    for cell in cells:
        blocks = cell.batch * -(-(cell.prompt_tokens + grid.new_tokens) // capacity.block_size)
        if blocks > capacity.num_blocks:
            size = blocks * subject.assembly.memory.block_bytes
            raise ConfigError(
                f"batch {cell.batch} of {cell.prompt_tokens} prompt tokens needs {blocks} blocks "
                f"of the KV cache, which holds {capacity.num_blocks}: give --kv-memory at least "
                f"{size} bytes, or leave such cells out"
            )


def with_batch(subject: Subject, cell: Cell) -> Subject:
    return replace(subject, assembly=subject.assembly.with_batch_size(cell.batch))


class Conditions(NamedTuple):
    """What beside its settings makes a cell's receipt one of this grid."""

    model: Model
    machine: Machine
    versions: Mapping[str, str]
    asked: Asked
    executor: str  # what runs now, however it was asked for
    seed: int

    def hold(self, receipt: Receipt) -> bool:
        model, machine = receipt.model, receipt.machine
        same_model = (model["name"], model["sha256"]) == (self.model["name"], self.model["sha256"])
        same_machine = (machine["cpu"], machine["cores"]) == (
            self.machine["cpu"],
            self.machine["cores"],
        )
        same_version = receipt.versions.get("quire") == self.versions.get("quire")
        same_run = dict(receipt.asked) == dict(self.asked) and receipt.seed == self.seed
        same_executor = receipt.executed["device"] == self.executor
        return same_model and same_machine and same_version and same_run and same_executor


def finished(
    grid: Grid, cells: Sequence[Cell], folder: Path, conditions: Conditions
) -> dict[Cell, Receipt]:
    """The cells whose receipts, with their utilisation, are in the folder; of several, the
    newest."""
    known = sorted(read_folder(folder, KIND).values(), key=lambda receipt: receipt.created)
    fitting = [
        receipt
        for receipt in known
        if conditions.hold(receipt) and section(receipt.results, "utilisation")
    ]
    found = {}
    for cell in cells:
        settings = grid.settings(cell)
        for receipt in fitting:
            if dict(receipt.settings) == settings:
                found[cell] = receipt
    return found


def summary(receipts: Mapping[Cell, Receipt]) -> list[Facts]:
    """One entry a cell: its figures, and how its completion rate scales against batch 1."""
    return [
        {
            "model": receipt.model["name"],
            "quant": receipt.model["quant"],
            "batch": cell.batch,
            "prompt_tokens": cell.prompt_tokens,
            **{name: receipt.results.get(name) for name in _SHOWN},
            "scaling": _scaling(receipts, cell),
        }
        for cell, receipt in receipts.items()
    ]


def _scaling(receipts: Mapping[Cell, Receipt], cell: Cell) -> float | None:
    alone = receipts.get(cell._replace(batch=1))
    own, single = (
        None if receipt is None else number(receipt.results, "completion_tokens_per_second")
        for receipt in (receipts[cell], alone)
    )
    return own / single if own is not None and single else None


def table(receipts: Mapping[Cell, Receipt]) -> Iterator[str]:
    """Completion tokens a second by batch size, with the scaling and how near decode steps come to
    the machine's limits; one block of lines a mix."""
    batches = sorted({cell.batch for cell in receipts})
    for name in dict.fromkeys(receipt.model["name"] for receipt in receipts.values()):
        own = {cell: found for cell, found in receipts.items() if found.model["name"] == name}
        yield f"{name}: completion tokens/s (× batch 1, share of the floor)"
        yield f"{'prompt':>8}" + "".join(f"{f'batch {batch}':>22}" for batch in batches)
        for prompt in sorted({cell.prompt_tokens for cell in own}):
            row = {cell.batch: cell for cell in own if cell.prompt_tokens == prompt}
            cells = [_shown(own, row.get(batch)) for batch in batches]
            yield f"{prompt:>8}" + "".join(f"{cell:>22}" for cell in cells)


def _shown(receipts: Mapping[Cell, Receipt], cell: Cell | None) -> str:
    rate = cell and number(receipts[cell].results, "completion_tokens_per_second")
    if cell is None or rate is None:
        return "-"
    scaling = _scaling(receipts, cell)
    share = floor_share(section(receipts[cell].results, "utilisation"))
    more = [f"{scaling:.2f}×" if scaling else "", f"{share:.0%}" if share else ""]
    told = ", ".join(filter(None, more))
    return f"{rate:.1f}" + (f" ({told})" if told else "")
