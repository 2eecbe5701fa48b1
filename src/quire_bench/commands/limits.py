"""`quire bench limits`: what this machine's memory and arithmetic can do at best."""

import argparse

from quire.cli.program import print_status
from quire.llm.machine import parse_bytes
from quire_bench.commands.options import add_receipt_options, command_line, finish, keep
from quire_bench.commands.progress import in_words
from quire_bench.machine_info import machine, versions
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
from quire_bench.receipts import Receipt, listed, now, number, section

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
