"""`quire bench traffic`: greedy, sampled and long loads of one model, beside vLLM's figures."""

import argparse
from dataclasses import replace
from typing import Any

from quire.cli.program import print_status
from quire.core.errors import ConfigError
from quire.loader.defaults import DUMMY_PREFIX
from quire_bench.commands.options import (
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    finish,
    keep,
    load_options,
    make_receipt,
)
from quire_bench.commands.progress import Progress
from quire_bench.receipts import Receipt
from quire_bench.subject import open_subject
from quire_bench.traffic import (
    KIND,
    PARTS,
    RIVAL_SOURCE,
    check_context,
    measure_traffic,
    rows_of,
    table,
)

_EPILOG = """\
examples:
  quire bench traffic --model dummy:llama-8b:Q4_K_M --device cuda --receipts receipts/h200
  quire bench traffic --model dummy:llama-8b:BF16 --device cuda --rows greedy
  quire bench traffic --model dummy:llama-8b:Q4_K_M --device cuda --rows long --kv-cache-dtype fp8
  quire bench traffic --model dummy:tiny --rows greedy,sampled --short 0.1 --repeats 1

Each row is a number of requests of so many prompt and new tokens, all at once; the model is loaded
once. greedy, sampled (temperature 0.8, top-p 0.95, top-k 50, seeded), penalties and logprobs (5)
are the same loads, so that each has its share of the greedy rate. Rows of the 8B shape stand beside
figures of vLLM on an H200, which the receipt has with their source.
"""
_DUMMY_CONTEXT = 8192


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure greedy, sampled and long loads of one loaded model."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("loads")
    group.add_argument(
        "--rows",
        type=_words,
        default=PARTS,
        metavar="PART,PART",
        help=f"which of {','.join(PARTS)} (default: all)",
    )
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of each row (default: %(default)s)"
    )
    group.add_argument(
        "--short",
        type=float,
        default=1.0,
        metavar="X",
        help="so many times the tokens, for a trial (default: %(default)s)",
    )
    add_seed_option(parser)
    add_receipt_options(parser)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        results: Any = receipt.results
        print("\n".join(table(results)))
    return finish(args, [receipt])


def _measured(args: argparse.Namespace) -> Receipt:
    if args.repeats < 1 or not 0 < args.short <= 1:
        raise ConfigError(
            f"--repeats is {args.repeats} and --short {args.short}: at least 1, and at most 1"
        )
    rows = rows_of(args.model, args.rows, args.short)
    largest = max(row.load.num_requests for row in rows)
    longest = 1 + max(row.load.prompt_tokens + row.load.new_tokens for row in rows)
    options = load_options(args, largest)
    if args.model.startswith(DUMMY_PREFIX):
        options = replace(options, max_context=max(longest, _DUMMY_CONTEXT))
    print_status("loading the model …")
    subject = open_subject(args.model, None, options)
    try:
        check_context(rows, subject.assembly.executor.capacity.max_context)
        progress = Progress([1.0] * len(rows), "rows")
        found = measure_traffic(
            subject.assembly, rows, repeats=args.repeats, seed=args.seed, on_row=progress.begin
        )
        progress.finish()
        return make_receipt(
            args,
            subject,
            KIND,
            settings={
                "rows": [row.name for row in rows],
                "repeats": args.repeats,
                "max_context": subject.assembly.executor.capacity.max_context,
                "rival": RIVAL_SOURCE,
            },
            samples={f"{name}, seconds": seconds for name, seconds in found.seconds.items()},
            results=found.figures,
            limits=None,
        )
    finally:
        subject.close()
