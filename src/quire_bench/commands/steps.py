"""`quire bench steps`: the processor time of a step, for each kind of rows."""

import argparse
import json
import os

from quire.core.errors import ConfigError
from quire_bench.host_steps import KindFigures, measure_steps
from quire_bench.row_kinds import KINDS

_EPILOG = """\
examples:
  quire bench steps
  quire bench steps --rows 64 --kinds greedy,constrained

The engine runs over the CUDA executor with its kernels left out: no GPU is needed, but torch and
triton are. All rows of a step are of one kind. Times are of the processor, in microseconds a step:
of the engine's thread by part, and of other threads (masks of grammars). What a GPU's driver takes
for copies and launches is not in them. Kinds are measured in turns, and the least is printed.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure what a step costs the host, part by part, without a GPU."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2", help="whose tokenizer (default: %(default)s)")
    for name, usual, text in (
        ("--rows", 256, "sequences of a step"),
        ("--steps", 100, "steps to measure"),
        ("--rounds", 3, "turns of each kind"),
    ):
        help_line = f"{text} (default: {usual})"
        parser.add_argument(name, type=int, default=usual, metavar="N", help=help_line)
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        metavar="LIST",
        help="kinds of rows, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    for name in ("rows", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    kinds = args.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing is launched, and no compiler needed
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's: copies that a GPU makes need no others
    try:
        figures = measure_steps(args.model, args.rows, args.steps, kinds, args.rounds)
    except ImportError as error:
        raise ConfigError(f"quire bench steps needs torch and triton ({error})") from None
    if args.json:
        print(json.dumps([found._asdict() for found in figures], indent=2))
    else:
        print(_table(args.rows, figures))
    return 0


def _table(num_rows: int, figures: list[KindFigures]) -> str:
    """Microseconds a step; the parts are of the engine's thread."""
    parts = [name for name in figures[0].parts_us if name != "device"]
    lines = [f"{num_rows} rows a step; microseconds of processor time"]
    head = ("rows", "engine", *parts, "other threads")
    widths = [max(12, len(name)) for name in head]
    lines.append("  ".join(name.rjust(width) for name, width in zip(head, widths, strict=True)))
    for found in figures:
        values = [found.engine_us, *(found.parts_us[part] for part in parts), found.others_us]
        cells = [found.kind, *(f"{value:.0f}" for value in values)]
        lines.append(
            "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)
