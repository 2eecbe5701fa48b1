"""`quire doctor`: what this machine offers, and what quire would make of it.

Its options are in `quire.cli.options`.
"""

import argparse
from dataclasses import asdict
from typing import Any

from quire.cli.program import print_json
from quire.diagnosis import CpuKernels, Diagnosis, Executors, Processor, diagnose
from quire.llm.machine import format_bytes


def run(args: argparse.Namespace) -> int:
    found = diagnose()
    if args.json:
        print_json(_as_json(found))
    else:
        _print(found)
    return 0


def _as_json(found: Diagnosis) -> dict[str, Any]:
    verdict = found.isolation
    isolation = {"in_force": verdict.in_force, "why_not": verdict.why_not}
    return {**asdict(found), "isolation": isolation, "advice": found.advice}


def _print(found: Diagnosis) -> None:
    _print_processor(found.cpu)
    print(f"memory     {_size(found.memory.total)}, {_size(found.memory.available)} available")
    for gpu in found.gpus or [{"name": "none found"}]:
        print(f"GPU        {', '.join(gpu.values())}")
    _print_executors(found.executors)
    if found.cpu_kernels is not None:
        print(f"           {_kernel_line(found.cpu_kernels)}")
    print(f"cache      {found.cache.folder}")
    for name, is_there in found.cache.models.items():
        print(f"           {name}: {'there' if is_there else 'not there; quire pull fetches it'}")
    print(f"isolation  of reading model files: {found.isolation.text}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    print(f"versions   {versions}")
    print(f"system     {found.system}")
    for line in found.advice:
        print(f"advice     {line}")


def _print_processor(cpu: Processor) -> None:
    quota = "" if cpu.quota is None else f", held to {cpu.quota:g} by a cgroup"
    print(f"processor  {cpu.name or 'unknown'} ({cpu.architecture})")
    print(f"           {cpu.cores} cores, {cpu.usable_cores:g} usable here{quota}")
    print(f"           {' '.join(cpu.features) or 'no vector features known'}")


def _print_executors(executors: Executors) -> None:
    for name, state in executors.known.items():
        mark = "  <- device=auto takes this one" if name == executors.picked else ""
        print(f"{'executors' if name == 'cpu' else '':<10} {name:<10} {state}{mark}")


def _kernel_line(kernels: CpuKernels) -> str:
    threads = "1 thread" if kernels.threads == 1 else f"{kernels.threads} threads"
    others = [unit for unit in kernels.units if unit != kernels.unit]
    also = f"; also here: {', '.join(others)}" if others else ""
    return f"cpu kernels: {kernels.unit or 'none'} on {threads}{also}"


def _size(amount: int | None) -> str:
    return "unknown" if amount is None else format_bytes(amount)
