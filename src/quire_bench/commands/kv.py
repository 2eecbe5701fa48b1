"""`quire bench kv`: what keys and values in fewer bytes cost in accuracy, and what they save."""

import argparse
from dataclasses import replace

from quire.cli.program import print_status
from quire.llm.machine import format_bytes
from quire_bench.commands.options import (
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    finish,
    keep,
    load_options,
    make_receipt,
)
from quire_bench.kv_quality import (
    Divergence,
    compared_types,
    divergence,
    logits_along,
    written_texts,
)
from quire_bench.receipts import Receipt, thinned
from quire_bench.subject import open_subject

_EPILOG = """\
examples:
  quire bench kv --model smollm2
  quire bench kv --model model.gguf --device cuda --kv-cache-dtype fp8 --tokens 2048

The model writes texts with the type of cache that its device takes by default. Then it reads them
with each other type that the device has, or with the one given: the KL divergence says how far its
next-token probabilities move, in nats.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare the types of the KV cache: accuracy and memory."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("texts")
    for name, value, text in (("texts", 4, "how many"), ("tokens", 256, "tokens of each")):
        group.add_argument(
            f"--{name}",
            type=int,
            default=value,
            metavar="N",
            help=f"{text} (default: %(default)s)",
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
    options = load_options(args, max_batch_size=max(1, args.texts))
    print_status("loading the model …")
    subject = open_subject(args.model, None, replace(options, kv_cache_dtype="auto"))
    device = subject.assembly.options.device
    kinds = compared_types(device, options.kv_cache_dtype)
    try:
        print_status("writing texts …")
        texts = written_texts(subject.assembly, args.texts, args.tokens, args.seed)
        expected = logits_along(subject.assembly, texts)
        results: dict[str, float] = {"own_kv_bytes_per_token": subject.assembly.memory.kv_per_token}
        receipt = make_receipt(
            args,
            subject,
            "kv",
            settings={"texts": args.texts, "tokens": args.tokens, "types": kinds},
            samples={},
            results={},
        )
    finally:
        subject.close()
    samples = {}
    for kind in kinds:
        print_status(f"reading them with keys and values as {kind} …")
        other = open_subject(args.model, None, replace(options, device=device, kv_cache_dtype=kind))
        try:
            found = divergence(expected, logits_along(other.assembly, texts))
            results |= _figures(kind, found, other.assembly.memory.kv_per_token)
            samples[f"{kind}_kl"] = thinned(found.each.tolist())
        finally:
            other.close()
    return replace(receipt, results=results, samples=samples)


def _figures(kind: str, found: Divergence, num_bytes: int) -> dict[str, float]:
    return {
        f"{kind}_mean_kl": found.mean,
        f"{kind}_99th_percentile_kl": found.percentile_99,
        f"{kind}_same_top_token": found.same_top_token,
        f"{kind}_kv_bytes_per_token": num_bytes,
    }


def _print(receipt: Receipt) -> None:
    results, settings = receipt.results, receipt.settings
    own = float(str(results["own_kv_bytes_per_token"]))
    print(
        f"{receipt.model['name']} on {receipt.executed['device']}, {settings['texts']} texts of "
        f"{settings['tokens']} tokens; keys and values by default {format_bytes(own)} a token"
    )
    print(f"{'type':6} {'a token':>10} {'capacity':>9} {'mean KL':>9} {'99%':>9} same top token")
    kinds = settings["types"]
    assert isinstance(kinds, list)
    for kind in kinds:
        figures = [
            float(str(results[f"{kind}_{name}"]))
            for name in ("kv_bytes_per_token", "mean_kl", "99th_percentile_kl", "same_top_token")
        ]
        size, mean, high, same = figures
        print(
            f"{kind:6} {format_bytes(size):>10} {own / size:>8.2f}x {mean:>9.2e} {high:>9.2e} "
            f"{same:>14.2%}"
        )
