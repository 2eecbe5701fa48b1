"""What the benchmarks' commands share: which model, where receipts go, how a run ends."""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quire.cli.options import (
    add_cache_type_option,
    add_invariance_option,
    add_packing_option,
    add_trust_option,
)
from quire.cli.program import print_error, print_json, print_status
from quire.llm.devices import AUTO, DEVICES, Options, device_of
from quire_bench.machine_info import machine, versions
from quire_bench.receipts import Asked, Receipt, as_data, deviation, now, write
from quire_bench.subject import Subject

DEFAULT_MODEL = "dummy:smollm2-135m"
_NOT_RECORDED = ("command", "bench", "json")  # parsed arguments that are no part of a measurement


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a model file, a name, or dummy:SHAPE[:MIX[:SEED]], which needs no file and holds "
        "noise: smollm2-135m, llama-1b, llama-8b, bitnet-2b, olmoe-7b, qwen3-30b-a3b, tiny, "
        "tiny-moe (default: %(default)s)",
    )
    group.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or reference"
    )
    group.add_argument(
        "--kv-memory", metavar="SIZE", help='memory for keys and values, such as "512MiB"'
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads to compute on")
    add_cache_type_option(group, "auto")
    add_invariance_option(group)
    add_packing_option(group)
    add_trust_option(group)


def add_receipt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="print everything as JSON")
    group.add_argument(
        "--strict",
        action="store_true",
        help="exit 1 if anything else ran than was asked for",
    )
    group.add_argument(
        "--receipts",
        type=Path,
        default=Path("receipts"),
        metavar="FOLDER",
        help="where receipts are kept (default: %(default)s)",
    )


def add_seed_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)"
    )


def add_limits_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limits",
        metavar="FILE",
        help="a receipt of `quire bench limits` to relate to; left out, the newest of this "
        "processor among the receipts",
    )


def load_options(args: argparse.Namespace, max_batch_size: int) -> Options:
    """How the model is to be loaded."""
    return Options(
        device=args.device,
        max_batch_size=max_batch_size,
        kv_memory=args.kv_memory,
        threads=args.threads,
        kv_cache_dtype=args.kv_cache_dtype,
        invariant=not args.no_invariant,
        trust_model_file=args.trust_model_file,
        i2s_packing=args.i2s_packing,
    )


def expected_device(options: Options) -> str:
    """The device that will run a model; "auto" takes a GPU that is there, if the model fits it."""
    name = device_of(options).name
    gpu = DEVICES["cuda"]
    for_processor = options.threads is not None or options.kv_cache_dtype not in gpu.cache_types
    if options.device == AUTO and not for_processor and not gpu.why_unavailable():
        return gpu.name
    return name


def command_line(args: argparse.Namespace) -> list[str]:
    """The command with every option spelt out, so that later defaults change nothing."""
    words = ["quire", "bench", args.bench]
    for name, value in sorted(vars(args).items()):
        flag = "--" + name.replace("_", "-")
        if name in _NOT_RECORDED or value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, ",".join(map(str, value))]
        else:
            words += [flag, str(value)]
    return words


def asked(args: argparse.Namespace) -> Asked:
    """How the model was to be run."""
    return {
        "device": args.device,
        "threads": args.threads,
        "kv_memory": args.kv_memory,
        "kv_cache_dtype": args.kv_cache_dtype,
    }


_machine = cache(machine)  # a grid makes many receipts, and asking for the GPU starts a program


def make_receipt(args: argparse.Namespace, subject: Subject, kind: str, **more: Any) -> Receipt:
    """A receipt of a model's measurement; `more` are its settings, samples, results, limits."""
    return Receipt(
        kind=kind,
        created=now(),
        command=command_line(args),
        seed=args.seed,
        model=subject.facts.as_data(),
        machine=_machine(),
        versions=versions(),
        asked=asked(args),
        executed=subject.executed,
        **more,
    )


def finish(args: argparse.Namespace, receipts: Sequence[Receipt]) -> int:
    """Say where a run left the path asked for; with --strict that is a failure."""
    deviations = set(filter(None, map(deviation, receipts)))
    for line in sorted(deviations):
        print_error(f"not what was asked for: {line}")
    return 1 if deviations and args.strict else 0


def keep(args: argparse.Namespace, receipt: Receipt) -> Path:
    """Write a receipt and say where it is; print it with --json."""
    path = write(receipt, args.receipts)
    print_status(f"receipt: {path}")
    if args.json:
        print_json(as_data(receipt))
    return path
