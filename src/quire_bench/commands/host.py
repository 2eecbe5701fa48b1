"""`quire bench host`: the processor time of serving streams."""

import argparse
import json
import sys
from dataclasses import asdict

from quire.core.errors import ConfigError
from quire_bench.host import HostFigures, HostPlan, measure_host
from quire_bench.row_kinds import KINDS

_EPILOG = """\
examples:
  quire bench host
  quire bench host --clients 32 --step-ms 10
  quire bench host --clients 64 --kind constrained

The server has the model's tokenizer, and steps that take a given time and compute nothing. Its
processor time a step, in all threads but the steps', is what engine, detokenizer, streams and HTTP
cost; the clients are another process and do not count. Needs Linux.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure the processor time that serving streams takes, without a GPU."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2", help="whose tokenizer (default: %(default)s)")
    for name, usual, metavar, text in (
        ("--clients", 256, "N", "streams at a time"),
        ("--requests", 2, "N", "requests of each client"),
        ("--prompt-tokens", 64, "N", "tokens of a prompt, about"),
        ("--new-tokens", 400, "N", "tokens of a completion"),
    ):
        help_line = f"{text} (default: {usual})"
        parser.add_argument(name, type=int, default=usual, metavar=metavar, help=help_line)
    parser.add_argument(
        "--step-ms", type=float, default=3.0, metavar="MS", help="a step (default: %(default)s)"
    )
    parser.add_argument(
        "--kind",
        default="greedy",
        choices=list(KINDS),
        help="how tokens are asked for: at random, with log-probabilities, held to a schema ... "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    if not sys.platform.startswith("linux"):
        raise ConfigError("quire bench host reads Linux's clocks of processes: run it there")
    for name in ("clients", "requests", "prompt_tokens", "new_tokens"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.step_ms <= 10_000:
        raise ConfigError(f"--step-ms must be between 0 and 10000, got {args.step_ms:g}")
    plan = HostPlan(
        args.model,
        args.clients,
        args.requests,
        args.prompt_tokens,
        args.new_tokens,
        args.step_ms,
        args.kind,
    )
    figures = measure_host(plan, _say)
    print(json.dumps(asdict(figures), indent=2) if args.json else _summary(plan, figures))
    return 0


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr)


def _summary(plan: HostPlan, figures: HostFigures) -> str:
    return (
        f"{plan.num_clients} {plan.kind} streams, {plan.num_prompt_tokens} + "
        f"{plan.num_new_tokens} tokens, steps of {plan.step_ms:g} ms: {figures.host_ms:.2f} ms of "
        "processor time a step of "
        f"{figures.rows_per_step:.0f} tokens, {figures.host_ms_per_request:.2f} ms a request\n"
        f"{figures.tokens_per_second:,.0f} tokens/s in {figures.num_steps} steps of "
        f"{figures.step_ms:.2f} ms"
    )
