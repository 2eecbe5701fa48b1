"""`quire bench WHAT`: the table of subcommands; only the module of the one called is imported."""

import argparse
from pkgutil import resolve_name

from quire.cli.program import Command


def _command(name: str, help_line: str) -> Command:
    module = f"{__name__}.{name}"
    return Command(help_line, f"{module}:add_options", f"{module}:run")


COMMANDS = {
    "engine": _command("engine", "the engine without a model: host time a step, fairness, pacing"),
    "host": _command("host", "processor time of serving streams, with steps that compute nothing"),
    "steps": _command("steps", "processor time of a step by kind of rows, without a GPU"),
    "limits": _command("limits", "what this machine can do at best"),
    "crossover": _command("crossover", "which of CPU and GPU suits which batches"),
    "start": _command("start", "how long loading a model takes, by phase"),
    "make-model": _command("make_model", "write a dummy model as GGUF"),
    "throughput": _command("throughput", "tokens a second, memory, utilisation"),
    "latency": _command("latency", "time to the first token and between tokens"),
    "kv": _command("kv", "types of the KV cache: how far they move probabilities, what they save"),
    "grid": _command("grid", "throughput over batch sizes, prompt lengths and mixes"),
    "traffic": _command("traffic", "greedy, sampled and long loads, beside vLLM's figures"),
    "serve": _command("serve", "load an OpenAI-compatible server"),
    "jobs": _command("jobs", "chat requests without and beside a batch job, and what it gets"),
    "compare": _command(
        "compare", "quire beside llama.cpp, OpenVINO GenAI, transformers or a server"
    ),
    "scale": _command("scale", "what a cluster gives, simulated from receipts of one device"),
    "tune": _command("tune", "find settings for a latency target"),
    "regress": _command("regress", "compare two sets of receipts: change or noise"),
    "report": _command("report", "draw receipts: a page, pictures, tables"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, command in COMMANDS.items():
        benches.add_parser(name, help=command.help, command=command)


def run(args: argparse.Namespace) -> int:
    code: int = resolve_name(COMMANDS[args.bench].run)(args)
    return code
