"""`quire bench throughput`: tokens a second of a model under one load."""

import argparse
from typing import Any

from quire.cli.program import print_status
from quire.llm.machine import format_bytes
from quire_bench.commands.options import (
    add_limits_option,
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    expected_device,
    finish,
    keep,
    load_options,
    make_receipt,
)
from quire_bench.commands.progress import Progress
from quire_bench.machine_info import machine
from quire_bench.measure import Load
from quire_bench.receipts import Receipt
from quire_bench.subject import open_subject
from quire_bench.throughput import check_load, measure_throughput
from quire_bench.utilisation import find_limits

_EPILOG = """\
examples:
  quire bench throughput --model dummy:llama-1b --quant Q4_K_M --requests 16
  quire bench throughput --model model.gguf --prompt-tokens 512 --new-tokens 64 --json --strict

A step that computes prompt tokens counts for the prompts' rate, any other for the completions'.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run the same load several times and measure tokens a second."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--quant", metavar="MIX", help="the mix of a dummy model, such as Q4_K_M")
    add_load_options(group, requests=8)
    group.add_argument(
        "--max-batch-size", type=int, metavar="N", help="sequences a step (default: all requests)"
    )
    add_seed_option(parser)
    add_limits_option(parser)
    add_receipt_options(parser)


def add_load_options(group: Any, requests: int | None) -> None:
    """How many requests of what size, how often."""
    numbers = {"prompt-tokens": 128, "new-tokens": 32, "repeats": 7}
    if requests is not None:
        numbers = {"requests": requests} | numbers
    for name, usual in numbers.items():
        group.add_argument(
            f"--{name}", type=int, default=usual, metavar="N", help="(default: %(default)s)"
        )


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        _print(receipt)
    receipts = [receipt]
    if args.no_invariant:
        receipts.append(_with_invariance(args, receipt))
    return finish(args, receipts)


def _with_invariance(args: argparse.Namespace, free: Receipt) -> Receipt:
    """The same with one order of summation, and what that costs."""
    kept = argparse.Namespace(**{**vars(args), "no_invariant": False, "json": False})
    receipt = _measured(kept)
    keep(kept, receipt)
    rates: list[Any] = [each.results["output_tokens_per_second"] for each in (receipt, free)]
    line = (
        f"batch invariance: {rates[0]:.1f} output tokens/s with it, {rates[1]:.1f} without: "
        f"costs {rates[1] / rates[0] - 1:+.1%}"
    )
    (print_status if args.json else print)(line)
    return receipt


def _measured(args: argparse.Namespace) -> Receipt:
    batch = args.requests if args.max_batch_size is None else args.max_batch_size
    load = Load(args.requests, args.prompt_tokens, args.new_tokens)
    check_load(load, args.repeats, 1 << 31)  # what the model holds is asked once it is there
    options = load_options(args, batch)
    limits = find_limits(args.limits, args.receipts, machine(), expected_device(options))
    print_status("loading the model …")
    subject = open_subject(args.model, args.quant, options)
    try:
        progress = Progress([1.0] * args.repeats, "runs")
        figures = measure_throughput(
            subject,
            load,
            repeats=args.repeats,
            seed=args.seed,
            limits=limits,
            on_run=progress.begin,
        )
        progress.finish()
        settings = {
            "requests": args.requests,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "max_batch_size": batch,
            "repeats": args.repeats,
        }
        return make_receipt(
            args,
            subject,
            "throughput",
            settings=settings,
            samples=figures.samples,
            results=figures.results,
            limits=limits,
        )
    finally:
        subject.close()


def _print(receipt: Receipt) -> None:
    results: Any = receipt.results
    print(f"{receipt.model['name']} on {receipt.executed['device']}")
    for name in ("prompt", "completion", "total"):
        found = results["spread"][f"{name}_tokens_per_second"]
        if found is None:
            print(f"  {name:<12} nothing to measure")
            continue
        print(
            f"  {name:<12}{found['median']:>10.1f} tokens/s  "
            f"({found['low']:.1f} to {found['high']:.1f})"
        )
    memory = results["memory"]
    peak = memory.get("peak_gpu_bytes", memory["peak_rss_bytes"])
    print(
        f"  memory      weights {format_bytes(memory['weights_bytes'])}, "
        f"KV {format_bytes(memory['kv_bytes'])}, peak {format_bytes(peak)}"
    )
    if results["utilisation"] is None:
        print("  utilisation unknown: run `quire bench limits` first")
        return
    for name, share in results["utilisation"].items():
        shown = "nothing to measure" if share is None else f"{share:.1%}"
        print(f"  {name.replace('_', ' '):<24} {shown}")
