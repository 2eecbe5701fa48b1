"""`quire bench crossover`: how long steps take on the CPU and on the GPU, and which one
device="auto" then takes."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from quire.cli.options import add_model_name
from quire.cli.program import print_json
from quire.core.errors import ConfigError
from quire.llm.assembly import assemble
from quire.llm.crossover import StepSeconds, better_device, remember, step_seconds
from quire.llm.devices import DEVICES, Options
from quire.llm.model_names import find_model
from quire.model.loading import load_model
from quire_bench.charts import Chart, Point, Series, svg

_EPILOG = """\
examples:
  quire bench crossover --model smollm2
  quire bench crossover --model model.gguf --svg crossover.svg

Steps of 1 to 64 sequences, one token each, are measured on both devices. The times are kept in
quire's cache folder for this model and this machine, and device=auto obeys them from then on: the
CPU is taken where it is at least 1.2 times as fast for steps of max_batch_size sequences.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure steps on the CPU and on the GPU, and remember which is better."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_name(parser, "--model")
    parser.add_argument("--kv-memory", default="1GiB", metavar="SIZE", help="of each device")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves into this file")
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")


def run(args: argparse.Namespace) -> int:
    gpu = DEVICES["cuda"]
    reason = gpu.why_unavailable()
    if reason is not None:
        raise ConfigError(f"there is nothing to compare the CPU with: {reason}")
    times = {device: _measured(args, device) for device in ("cpu", "cuda")}
    path = find_model(args.model, lambda _: None, "auto")
    with load_model(path) as model:
        kept = remember(model, gpu.hardware, times)
    if args.svg is not None:
        args.svg.write_text(svg(chart_of(args.model, times)))
    if args.json:
        print_json({"seconds": times, "kept": str(kept)})
    else:
        _print(times)
    return 0


def _measured(args: argparse.Namespace, device: str) -> StepSeconds:
    options = Options(device=device, max_batch_size=64, kv_memory=args.kv_memory)
    assembly = assemble(args.model, options)
    try:
        return step_seconds(assembly.executor)
    finally:
        assembly.executor.close()


def _print(times: Mapping[str, StepSeconds]) -> None:
    print(f"{'sequences':>9}  {'cpu':>10}  {'cuda':>10}  device=auto")
    for count in sorted(times["cpu"].keys() & times["cuda"].keys()):
        cpu, gpu = (1000 * times[device][count] for device in ("cpu", "cuda"))
        print(f"{count:>9}  {cpu:>7.2f} ms  {gpu:>7.2f} ms  {better_device(times, count)}")


def chart_of(model: str, times: Mapping[str, StepSeconds]) -> Chart:
    counts = sorted({count for steps in times.values() for count in steps})
    return Chart(
        slug="crossover",
        title=f"A step of {model} on each device",
        x_label="sequences in a step, one token each (logarithmic)",
        y_label="ms (logarithmic)",
        series=[
            Series(device, [Point(count, 1000 * taken) for count, taken in sorted(steps.items())])
            for device, steps in times.items()
        ],
        x_scale="log",
        y_scale="log",
        x_ticks=counts,
    )
