"""`quire bench limits`: what this machine's memory and arithmetic can do at best."""

import argparse
import subprocess
import sys

from quire.cli.program import print_status
from quire.core.errors import ExecutorError
from quire.llm.machine import parse_bytes
from quire_bench.commands.options import add_receipt_options, command_line, finish, keep
from quire_bench.commands.progress import in_words
from quire_bench.machine_info import machine, usable_threads, versions
from quire_bench.machine_limits import (
    RATES,
    LimitsPlan,
    integer_kernel,
    measure_gpu,
    measure_limits,
    summarise,
    usual_buffer_bytes,
    usual_threads,
)
from quire_bench.receipts import Limits, Receipt, listed, now, number, section
from quire_bench.utilisation import find_limits

_EPILOG = """\
examples:
  quire bench limits
  quire bench limits --threads 1,2,4,8 --seconds 2 --json

memory read         sum of squares of a buffer far larger than the caches; bytes read
memory copy         one buffer into another; bytes read and written
float32             square matrix products by numpy's BLAS, one BLAS thread on each thread
integer             multiply and add on cached arrays; the kernel is named (elementwise numpy is
                    a floor, not the rate of an integer dot product)

Of a GPU that torch sees: memory read and copied, and products of float16 matrices.
"""
_BRIEFLY = ("--seconds", "0.2", "--repeats", "3")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure memory bandwidth and arithmetic by thread count."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--threads",
        type=_counts,
        metavar="1,2,4",
        help="thread counts (default: powers of two up to the usable cores, and these)",
    )
    parser.add_argument(
        "--buffer", metavar="SIZE", help="memory to go through (default: 8 times the last cache)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="S", help="a sample (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="samples of each (default: %(default)s)"
    )
    parser.add_argument(
        "--matrix-size",
        type=int,
        default=1024,
        metavar="N",
        help="rows and columns of the matrices (default: %(default)s)",
    )
    add_receipt_options(parser)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


_counts.__name__ = "list of thread counts"  # argparse names it in errors


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        _print(receipt)
    return finish(args, [receipt])


def find_or_measure(args: argparse.Namespace, executor: str) -> Limits:
    """The limits of --limits or of the newest receipt of such a machine; where there is none, they
    are measured now, briefly, and kept among the receipts."""
    if (found := find_limits(args.limits, args.receipts, machine(), executor)) is not None:
        return found
    print_status(f"{args.receipts} has no limits of this machine: measured first")
    words = ["bench", "limits", *_BRIEFLY, "--receipts", str(args.receipts)]
    # a process of its own, so that nothing of it stays in the memory of the one that measures
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", *words, "--threads", str(usable_threads())],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    found = find_limits(None, args.receipts, machine(), executor)
    if done.returncode or found is None:
        raise ExecutorError(
            f"the limits of this machine could not be measured (status {done.returncode}): run "
            "`quire bench limits`, and give its receipt with --limits"
        )
    return found


def _measured(args: argparse.Namespace) -> Receipt:
    plan = LimitsPlan(
        threads=args.threads or usual_threads(),
        buffer_bytes=parse_bytes(args.buffer, "--buffer") if args.buffer else usual_buffer_bytes(),
        seconds=args.seconds,
        repeats=args.repeats,
        matrix_size=args.matrix_size,
    )
    counts = ", ".join(map(str, plan.threads))
    print_status(f"memory and arithmetic on {counts} threads: about {in_words(plan.expected_s)} …")
    samples = measure_limits(plan)
    gpu = measure_gpu(plan)
    samples |= gpu.samples
    return Receipt(
        kind="limits",
        created=now(),
        command=command_line(args),
        seed=0,  # nothing is drawn
        model={"name": "machine", "sha256": None, "quant": None},
        machine=machine(),
        versions=versions(),
        asked={"device": "cpu"},
        executed={
            "device": "cpu",
            "kernels": ["numpy", "numpy's BLAS", integer_kernel().name],
            "fallback": None,
        },
        settings={
            "threads": list(plan.threads),
            "buffer_bytes": plan.buffer_bytes,
            "seconds": plan.seconds,
            "repeats": plan.repeats,
            "matrix_size": plan.matrix_size,
            "integer_kernel": integer_kernel().name,
            "gpu": gpu.name,
        },
        samples=samples,
        results=summarise(samples),
    )


def _print(receipt: Receipt) -> None:
    names = {rate: kind.replace("_", " ") for kind, rate in RATES.items()}
    counts = [str(count) for count in listed(receipt.settings, "threads")]
    print(f"{'threads':<19}" + "".join(f"{count:>12}" for count in counts))
    for rate, name in names.items():
        rates = [number(receipt.results, rate, count) or 0.0 for count in counts]
        unit = "GB/s" if "bytes" in rate else "Gop/s"
        print(f"{name:<19}" + "".join(f"{found / 1e9:>12.1f}" for found in rates) + f"  {unit}")
    print(f"integer kernel: {receipt.settings['integer_kernel']}")
    print(f"GPU: {receipt.settings['gpu']}")
    on_gpu = section(receipt.results, "gpu")
    for rate in on_gpu:
        name = rate.partition("_bytes")[0].partition("_operations")[0].replace("_", " ")
        unit = "GB/s" if "bytes" in rate else "Gop/s"
        print(f"{name:<19}{(number(on_gpu, rate) or 0.0) / 1e9:>12.1f}  {unit}")
