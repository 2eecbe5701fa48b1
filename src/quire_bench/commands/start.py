"""`quire bench start`: how long it takes until a model can be used, by phase."""

import argparse
import time

from quire.cli.options import add_model_options, load
from quire.cli.program import print_json
from quire.core.progress import PhaseTimes, reporting
from quire.llm import LLM

_EPILOG = """\
examples:
  quire bench start --model smollm2
  quire bench start --model model.gguf --device cuda --json

Compiled GPU kernels stay in Triton's cache ($TRITON_CACHE_DIR, usually ~/.triton/cache): the first
start on a machine compiles them, others read them. Keep that folder where containers come and go.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Load a model once, and say how long each phase took."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")


def run(args: argparse.Namespace) -> int:
    phases = PhaseTimes()
    started = time.monotonic()
    with reporting(phases):
        llm = load(LLM, args, max_batch_size=64)
    phases.finish()
    total = time.monotonic() - started
    llm.close()
    if args.json:
        print_json({"phases": phases.seconds, "total": total})
        return 0
    for phase, seconds in phases.seconds.items():
        print(f"{phase:<20} {seconds:8.2f} s")
    print(f"{'all':<20} {total:8.2f} s")
    return 0
