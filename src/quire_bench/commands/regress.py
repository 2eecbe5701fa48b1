"""`quire bench regress`: tells change from noise between two sets of receipts."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.cli.program import print_json, printable
from quire_bench.regress import Comparison, Regression, compare, load_receipts

_MARKS = {"loss": "LOSS", "gain": "gain", "same": "same", "too few": "too few samples"}
LOSS = 1  # the exit code


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Pairs receipts by kind, model, device and settings, and tells change from "
        "noise on their samples: a change is larger than the least effect, unlikely by chance "
        "(permutation test, false discoveries at 1%), at least four standard errors large, and "
        "holds between all receipts of either side. Exit code 1 where anything became worse."
    )
    parser.epilog = "example: quire bench regress receipts/before receipts/after"
    parser.add_argument("before", type=Path, metavar="A", help="a receipt, or a folder of them")
    parser.add_argument("after", type=Path, metavar="B", help="what to compare with it")
    parser.add_argument(
        "--least-effect",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="smaller changes of a median are no change (default: %(default)s, that is 5%%)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the permutations (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    found = compare(
        load_receipts(args.before),
        load_receipts(args.after),
        least_effect=args.least_effect,
        seed=args.seed,
    )
    if args.json:
        print_json(_as_data(found))
    else:
        _print_table(found)
    return LOSS if found.has_loss else 0


def _as_data(found: Regression) -> dict[str, Any]:
    return {
        "has_loss": found.has_loss,
        "comparisons": [asdict(row) | {"change": row.change} for row in found.comparisons],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "notes": found.notes,
    }


def _print_table(found: Regression) -> None:
    name = ""
    for row in found.comparisons:
        if row.name != name:
            name = row.name
            print(printable(name))
        print(f"  {_line(row)}")
    for title, names in (("only in A", found.only_before), ("only in B", found.only_after)):
        for unpaired in names:
            print(printable(f"{title}: {unpaired}"))
    for note in found.notes:
        print(printable(f"note: {note}"))
    counts = dict.fromkeys(_MARKS, 0)
    for row in found.comparisons:
        counts[row.verdict] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _line(row: Comparison) -> str:
    return printable(
        f"{row.sample:<32} {row.before:>12.6g} -> {row.after:>12.6g}  {row.change:>+7.1%}  "
        f"p {row.p_value:.4f}  n {row.count_before}/{row.count_after}  {_MARKS[row.verdict]}"
    )
