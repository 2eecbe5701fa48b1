"""`quire bench WHAT`: each subcommand is a module of its name here."""

import argparse

from quire_bench.commands import (
    compare,
    engine,
    grid,
    latency,
    limits,
    make_model,
    regress,
    report,
    serve,
    throughput,
    tune,
)

# Each has add_parser(benches), and run(args), which gives the exit code.
_MODULES = (
    engine,
    limits,
    make_model,
    throughput,
    latency,
    grid,
    serve,
    compare,
    tune,
    regress,
    report,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for module in _MODULES:
        module.add_parser(benches)


def run(args: argparse.Namespace) -> int:
    name = f".{args.bench.replace('-', '_')}"
    [module] = [module for module in _MODULES if module.__name__.endswith(name)]
    code: int = module.run(args)
    return code
