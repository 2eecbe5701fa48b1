"""`quire doctor`: what this machine offers, and what quire would make of it."""

import argparse
from typing import TYPE_CHECKING, Any

from quire.cli.results import print_json

if TYPE_CHECKING:
    from quire.cli.diagnosis import Facts

_EPILOG = """\
examples:
  quire doctor
  quire doctor --json              to go with a report of a problem
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine",
        description="Show processor, memory, GPUs, versions, and which executor quire would take.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    from quire.cli.diagnosis import diagnose

    facts = diagnose()
    if args.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _print(facts: "Facts") -> None:
    from quire.llm.kv_memory import format_bytes

    def size(amount: int | None) -> str:
        return "unknown" if amount is None else format_bytes(amount)

    cpu, memory, executors = facts["cpu"], facts["memory"], facts["executors"]
    cache = facts["cache"]
    quota = "" if cpu["quota"] is None else f", held to {cpu['quota']:g} by a cgroup"
    print(f"processor  {cpu['name'] or 'unknown'} ({cpu['architecture']})")
    print(f"           {cpu['cores']} cores, {cpu['usable_cores']:g} usable here{quota}")
    print(f"           {' '.join(cpu['features']) or 'no vector features known'}")
    print(f"memory     {size(memory['total'])}, {size(memory['available'])} available")
    for gpu in facts["gpus"] or [{"name": "none found"}]:
        print(f"GPU        {', '.join(gpu.values())}")
    for name, state in executors["known"].items():
        mark = "  <- device=auto takes this one" if name == executors["picked"] else ""
        print(f"{'executors' if name == 'cpu' else '':<10} {name:<10} {state}{mark}")
    if facts["cpu_kernels"] is not None:
        print(f"           {_kernel_line(facts['cpu_kernels'])}")
    print(f"cache      {cache['folder']}")
    for name, is_there in cache["models"].items():
        print(f"           {name}: {'there' if is_there else 'not there; quire pull fetches it'}")
    isolation = facts["isolation"]
    measures = ", ".join(isolation["in_force"]) or f"none: {isolation['why_not']}"
    print(f"isolation  of reading model files: {measures}")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"versions   {versions}")
    print(f"system     {facts['system']}")
    for line in facts["advice"]:
        print(f"advice     {line}")


def _kernel_line(kernels: "Facts") -> str:
    threads = "1 thread" if kernels["threads"] == 1 else f"{kernels['threads']} threads"
    others = [unit for unit in kernels["units"] if unit != kernels["unit"]]
    also = f"; also here: {', '.join(others)}" if others else ""
    return f"cpu kernels: {kernels['unit'] or 'none'} on {threads}{also}"
