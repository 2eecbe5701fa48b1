"""`quire bench grid`: throughput over batch sizes, prompt lengths and mixes; resumable."""

import argparse
import subprocess
import sys

from quire.cli.program import print_json, print_status
from quire.core.errors import ExecutorError
from quire.loader.defaults import DUMMY_PREFIX
from quire_bench.commands.limits import find_or_measure
from quire_bench.commands.options import (
    add_limits_option,
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    asked,
    command_line,
    expected_device,
    finish,
    load_options,
    make_receipt,
)
from quire_bench.commands.progress import Progress
from quire_bench.grid import (
    KIND,
    Cell,
    Conditions,
    Grid,
    check_blocks,
    finished,
    summary,
    table,
    with_batch,
)
from quire_bench.machine_info import machine, versions
from quire_bench.receipts import Receipt, write
from quire_bench.subject import ModelFacts, Subject, open_subject, read_facts, with_quant
from quire_bench.throughput import measure_throughput

_EPILOG = """\
examples:
  quire bench grid --model dummy:llama-1b
  quire bench grid --model dummy:llama-1b --quants Q4_K_M,Q8_0 --batches 1,8,64 --prompts 16,512
  quire bench grid --model model.gguf

A cell is one batch: all its prompts first, then all its completions together, so that the rates
are those of that batch size. Each cell is a receipt. The same command goes on where it was
interrupted; --again measures anew. Mixes are measured in a process each, so that the peak of a
cell's memory is that of its own model.

Utilisation relates to the limits of this machine: those of --limits, or of the newest receipt of
`quire bench limits` among the receipts; where there is none, they are measured first.
"""
BATCHES = (1, 2, 4, 8, 16)
PROMPTS = (1, 16, 128, 512)
QUANTS = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure every combination of batch size, prompt length and mix."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("grid")
    group.add_argument(
        "--quants",
        type=_words,
        metavar="MIX,MIX",
        help=f"mixes of a dummy model (default: {','.join(QUANTS)}; a file has its own)",
    )
    for name, usual, what in (
        ("batches", BATCHES, "sequences that run together"),
        ("prompts", PROMPTS, "prompt lengths"),
    ):
        shown = ",".join(map(str, usual))
        group.add_argument(
            f"--{name}",
            type=_numbers,
            default=usual,
            metavar="N,N",
            help=f"{what} (default: {shown})",
        )
    for name, usual_count in (("new-tokens", 32), ("repeats", 7)):
        group.add_argument(
            f"--{name}", type=int, default=usual_count, metavar="N", help="(default: %(default)s)"
        )
    group.add_argument("--again", action="store_true", help="measure cells that are there, too")
    add_seed_option(parser)
    add_limits_option(parser)
    add_receipt_options(parser)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_numbers.__name__ = "list of numbers"  # argparse names it in errors


def run(args: argparse.Namespace) -> int:
    receipts, num_measured = _GridRun(args).run()
    if args.json:
        resumed = len(receipts) - num_measured
        print_json({"measured": num_measured, "resumed": resumed, "cells": summary(receipts)})
    else:
        for line in table(receipts):
            print(line)
    return finish(args, list(receipts.values()))


class _GridRun:
    """One call: what is done already, what is left, and how far it has come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        has_mix = not args.model.startswith(DUMMY_PREFIX) or args.model.count(":") > 1
        self._grid = Grid(
            quants=args.quants or ((None,) if has_mix else QUANTS),
            batches=args.batches,
            prompts=args.prompts,
            new_tokens=args.new_tokens,
            repeats=args.repeats,
        )
        self._executor = expected_device(load_options(args, max(self._grid.batches)))

    def run(self) -> tuple[dict[Cell, Receipt], int]:
        """The receipts of all cells, and how many of them were measured now."""
        done: dict[Cell, Receipt] = {}
        left: dict[str | None, list[Cell]] = {}
        for quant in self._grid.quants:
            found = self._finished(quant)
            done |= found
            left[quant] = [cell for cell in self._grid.cells(quant) if cell not in found]
        todo = [cell for cells in left.values() for cell in cells]
        if done:
            print_status(f"{len(done)} cells are there already; --again measures them anew")
        quants = [quant for quant, cells in left.items() if cells]
        if todo:
            self._limits = find_or_measure(self._args, self._executor)
        for quant in quants:
            is_only = len(self._grid.quants) == 1
            done |= self._measure(quant, left[quant]) if is_only else self._measure_apart(quant)
        order = [cell for quant in self._grid.quants for cell in self._grid.cells(quant)]
        return {cell: done[cell] for cell in order}, len(todo)

    def _finished(self, quant: str | None) -> dict[Cell, Receipt]:
        name = with_quant(self._args.model, quant)
        facts = read_facts(name, trusted=self._args.trust_model_file)  # says what is wrong
        return {} if self._args.again else self._kept(quant, facts)

    def _kept(self, quant: str | None, facts: ModelFacts) -> dict[Cell, Receipt]:
        conditions = Conditions(
            facts.as_data(),
            machine(),
            versions(),
            asked(self._args),
            self._executor,
            self._args.seed,
        )
        return finished(self._grid, self._grid.cells(quant), self._args.receipts, conditions)

    def _measure_apart(self, quant: str | None) -> dict[Cell, Receipt]:
        """One mix of several, by this command in a process of its own, which goes on where an
        earlier one stopped. Whatever another model left in memory would count as this one's."""
        own = argparse.Namespace(**{**vars(self._args), "quants": (quant,), "strict": False})
        command = [sys.executable, "-m", "quire.cli", *command_line(own)[1:]]
        print_status(f"{quant}:")
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        name = with_quant(self._args.model, quant)
        kept = self._kept(quant, read_facts(name, trusted=self._args.trust_model_file))
        if done.returncode or len(kept) < len(self._grid.cells(quant)):
            raise ExecutorError(
                f"measuring {name} ended with status {done.returncode}; the cells that are done "
                "are kept, and the same command goes on from there"
            )
        return kept

    def _measure(self, quant: str | None, cells: list[Cell]) -> dict[Cell, Receipt]:
        largest = max(cell.batch for cell in cells)
        progress = Progress([self._grid.work(cell) for cell in cells], "cells")
        subject = open_subject(self._args.model, quant, load_options(self._args, largest))
        try:
            check_blocks(self._grid, cells, subject)
            found = {cell: self._measure_cell(subject, cell, progress) for cell in cells}
        finally:
            subject.close()
        progress.finish()
        return found

    def _measure_cell(self, subject: Subject, cell: Cell, progress: Progress) -> Receipt:
        what = f"batch {cell.batch}, prompt {cell.prompt_tokens}"
        progress.begin(f"{cell.quant}, {what}" if cell.quant else what)
        figures = measure_throughput(
            with_batch(subject, cell),
            self._grid.load(cell),
            repeats=self._grid.repeats,
            seed=self._args.seed,
            limits=self._limits,
            in_phases=True,
        )
        receipt = make_receipt(
            self._args,
            subject,
            KIND,
            settings=self._grid.settings(cell),
            samples=figures.samples,
            results=figures.results,
            limits=self._limits,
        )
        write(receipt, self._args.receipts)
        return receipt
