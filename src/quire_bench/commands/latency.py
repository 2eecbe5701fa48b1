"""`quire bench latency`: time to the first token and between tokens, alone and beside others."""

import argparse
from typing import Any

from quire.cli.program import print_status
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
from quire_bench.commands.throughput import add_load_options
from quire_bench.latency import measure_latency
from quire_bench.measure import Load
from quire_bench.receipts import Receipt
from quire_bench.subject import open_subject
from quire_bench.throughput import check_load

_EPILOG = """\
examples:
  quire bench latency --model dummy:llama-1b:Q4_K_M --concurrency 8
  quire bench latency --model model.gguf --prompt-tokens 512 --json

Requests run one at a time first, then with as many in the engine at once as --concurrency says: as
one ends, the next begins.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure what a single request waits for, alone and beside others."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--quant", metavar="MIX", help="the mix of a dummy model, such as Q4_K_M")
    add_load_options(group, requests=16)
    group.add_argument(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="requests at a time (default: %(default)s)",
    )
    add_seed_option(parser)
    add_receipt_options(parser)


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        _print(receipt)
    return finish(args, [receipt])


def _measured(args: argparse.Namespace) -> Receipt:
    load = Load(args.requests, args.prompt_tokens, args.new_tokens, args.concurrency)
    check_load(load, args.repeats, 1 << 31)  # what the model holds is asked once it is there
    print_status("loading the model …")
    subject = open_subject(args.model, args.quant, load_options(args, args.concurrency))
    try:
        progress = Progress([1.0] * 2 * args.repeats, "runs")  # alone, and beside others
        figures = measure_latency(
            subject, load, repeats=args.repeats, seed=args.seed, on_run=progress.begin
        )
        progress.finish()
        settings = {
            "requests": args.requests,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "concurrency": args.concurrency,
            "repeats": args.repeats,
        }
        return make_receipt(
            args,
            subject,
            "latency",
            settings=settings,
            samples=figures.samples,
            results=figures.results,
        )
    finally:
        subject.close()


def _print(receipt: Receipt) -> None:
    print(f"{receipt.model['name']} on {receipt.executed['device']}, milliseconds")
    print(f"{'':<38}{'p50':>10}{'p95':>10}{'p99':>10}")
    for name in ("alone", "together"):
        found: Any = receipt.results[name]
        for key, what in (("time_to_first_token_s", "first token"), ("inter_token_s", "between")):
            title = f"{what}, {name} ({found['concurrency']} at a time)"
            ranks = found[key] or {}
            shown = "".join(f"{1000 * value:>10.2f}" for value in ranks.values())
            print(f"  {title:<36}{shown or '  nothing to measure'}")
