"""`quire bench serve`: loads an OpenAI-compatible server and tells what it gave."""

import argparse
import os
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from quire.cli.bench_options import add_receipt_options, command_line, finish, keep
from quire.cli.results import printable

if TYPE_CHECKING:
    from quire.bench.load import Outcome, Target
    from quire.bench.load_scenarios import Finding, LoadSettings
    from quire.bench.receipts import Receipt

KEY_VARIABLE = "QUIRE_API_KEY"
FAILURE = 1
_MIXES = ("fixed", "instruct", "chat", "conversation", "code")
_SCENARIOS = ("plain", "convoy", "saturation", "soak")
_NUMBERS: tuple[tuple[str, int | float, str], ...] = (
    ("--prompt-tokens", 64, "fixed lengths: of a prompt"),
    ("--new-tokens", 64, "fixed lengths: of a completion"),
    ("--max-prompt-tokens", 4096, "other mixes: the longest prompt"),
    ("--max-new-tokens", 1024, "other mixes: the longest completion"),
    ("--clients", 4, "closed loop: requests at a time"),
    ("--requests", 8, "closed loop: requests of each client"),
    ("--duration", 30.0, "seconds of an open loop, a step or a soak"),
    ("--long-rate", 0.5, "convoy: long prompts a second"),
    ("--long-prompt-tokens", 2048, "convoy: of a long prompt"),
    ("--rate-factor", 1.5, "saturation: by which the rate rises"),
    ("--max-steps", 12, "saturation: at most so many steps"),
)
_EPILOG = """\
scenarios:
  plain        one load: closed (--clients, --requests) or open (--rate, --duration)
  convoy       short requests' p99 while long prompts arrive, beside the same without them
  saturation   load steps (--rate, times --rate-factor each) up to and past the knee
  soak         a closed loop for --duration: drift of speed, and of memory with --pid

length mixes (log-normal; `fixed` takes --prompt-tokens and --new-tokens as they are):
  instruct     prompts of mean 19 tokens, completions of mean 58 (Alpaca)
  chat         means 161 and 338 (ShareGPT)
  conversation medians 1020 and 129 (Azure's trace of 2023)
  code         medians 1500 and 13 (the same)

A prompt of n tokens is n common English words: the server's own count is told where it gives one.
Open loops count times from when a request was due. One short request warms the server first.

example: quire bench serve http://127.0.0.1:8000 --mix chat --rate 2 --duration 60
"""


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benches.add_parser(
        "serve",
        help="load an OpenAI-compatible server",
        description="Sends streaming requests to any OpenAI-compatible server and measures times "
        "to first token and between tokens, tokens a second, and errors by kind.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--scenario", choices=_SCENARIOS, default="plain")
    _add_server_options(parser.add_argument_group("server"))
    _add_load_options(parser.add_argument_group("load"))
    add_receipt_options(parser)


def _add_server_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", help="default: the first that /v1/models lists, or none")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument("--api-key", help=f"default: the environment's {KEY_VARIABLE}")
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one request")
    group.add_argument("--ignore-eos", action="store_true", help="send ignore_eos (an extension)")
    group.add_argument("--no-usage", action="store_true", help="do not ask for token counts")
    group.add_argument("--allow-remote", action="store_true", help="load another machine's server")
    group.add_argument("--pid", type=int, help="the server's process, to watch its memory (soak)")


def _add_load_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--mix", choices=_MIXES, default="fixed", help="of lengths (see below)")
    group.add_argument("--scale", type=float, default=1.0, help="multiplies the mix's lengths")
    for flag, usual, what in _NUMBERS:
        kind = type(usual)
        group.add_argument(
            flag, type=kind, default=usual, metavar="N", help=f"{what} (default: {usual:g})"
        )
    group.add_argument("--rate", type=float, metavar="N", help="open loop: requests a second")
    group.add_argument("--seed", type=int, default=0, help="of lengths, texts and arrivals")


def run(args: argparse.Namespace) -> int:
    import asyncio

    from quire.bench.load_tables import lines

    _check(args)
    target, finding = asyncio.run(_measure(args))
    receipt = _receipt(args, target, finding)
    keep(args, receipt)
    if not args.json:
        for line in lines(receipt):
            print(printable(line))
    is_empty = all(outcome.error is not None for outcome in finding.outcomes)
    return finish(args, [receipt]) or (FAILURE if is_empty else 0)


def _check(args: argparse.Namespace) -> None:
    """Refuse what the scenario would not heed, and what would fail only after the load."""
    from quire.bench.load_scenarios import memory_of
    from quire.core.errors import ConfigError

    if args.scenario == "soak" and args.rate is not None:
        raise ConfigError("--scenario soak is a closed loop: give --clients, not --rate")
    if args.pid is not None:
        if args.scenario != "soak":
            raise ConfigError("--pid is for --scenario soak, which watches the server's memory")
        memory_of(args.pid)
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, got {args.timeout}")


async def _measure(args: argparse.Namespace) -> "tuple[Target, Finding]":
    from dataclasses import replace

    from quire.bench.load import check_server, find_model
    from quire.bench.load_scenarios import SCENARIOS

    target, settings = _target(args), _settings(args)
    if target.model is None:
        target = replace(target, model=await find_model(target))
    await check_server(target)
    progress = _Progress()
    finding = await SCENARIOS[args.scenario](target, settings, progress.count)
    progress.end()
    return target, finding


def _target(args: argparse.Namespace) -> "Target":
    from quire.bench.http_client import parse_endpoint
    from quire.bench.load import Target

    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    return Target(
        parse_endpoint(args.url, api_key=key, allow_remote=args.allow_remote),
        api=args.api,
        model=args.model,
        ignore_eos=args.ignore_eos,
        wants_usage=not args.no_usage,
        timeout_s=args.timeout,
    )


def _settings(args: argparse.Namespace) -> "LoadSettings":
    from quire.bench.lengths import MIXES, Bounds, fixed
    from quire.bench.load_scenarios import LoadSettings

    is_fixed = args.mix == "fixed"
    limits = (args.prompt_tokens, args.new_tokens) if is_fixed else None
    return LoadSettings(
        mix=fixed(*limits) if limits else MIXES[args.mix],
        bounds=Bounds(
            1.0 if is_fixed else args.scale,
            limits[0] if limits else args.max_prompt_tokens,
            limits[1] if limits else args.max_new_tokens,
        ),
        seed=args.seed,
        num_clients=args.clients,
        num_requests=args.requests,
        rate=args.rate,
        duration_s=args.duration,
        long_rate=args.long_rate,
        long_prompt_tokens=args.long_prompt_tokens,
        rate_factor=args.rate_factor,
        max_steps=args.max_steps,
        pid=args.pid,
    )


class _Progress:
    """Counts requests on a terminal."""

    def __init__(self) -> None:
        self.done = 0
        self.failed = 0

    def count(self, outcome: "Outcome") -> None:
        self.done += 1
        self.failed += outcome.error is not None
        if sys.stderr.isatty():
            failures = f", {self.failed} failed" if self.failed else ""
            print(f"\r{self.done} requests{failures} ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)


def _receipt(args: argparse.Namespace, target: "Target", finding: "Finding") -> "Receipt":
    from quire.bench.load_summary import counted_by
    from quire.bench.machine_info import machine, versions
    from quire.bench.receipts import Receipt, now

    return Receipt(
        kind="serve",
        created=now(),
        command=_command(args),
        seed=args.seed,
        model={"name": _shown_name(target.model), "sha256": None, "quant": None},
        machine=machine(),
        versions=versions(),
        asked={"device": None, "url": target.endpoint.url, "ignore_eos": args.ignore_eos},
        executed={
            "device": None,  # the server's own matter
            "kernels": [],
            "fallback": _shortfall(args, finding),
            "tokens_counted_by": counted_by(finding.outcomes),
        },
        settings=_settings_data(args),
        samples=finding.samples,
        results=finding.results,
    )


def _shown_name(model: str | None) -> str:
    """Some servers name a model by its path: receipts are shown to others, who need the file's."""
    name = model or "unnamed"
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _shortfall(args: argparse.Namespace, finding: "Finding") -> str | None:
    """Whether completions ended early although ignore_eos was sent."""
    if not args.ignore_eos or args.mix != "fixed" or args.scenario == "convoy":
        return None
    good = [outcome for outcome in finding.outcomes if outcome.error is None]
    short = sum(outcome.completion_tokens < args.new_tokens for outcome in good)
    if not short:
        return None
    return (
        f"ignore_eos was not heeded: {short} of {len(good)} completions have fewer than "
        f"{args.new_tokens} tokens"
    )


def _settings_data(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked of the load; only what the scenario heeds."""
    from quire.bench.load_scenarios import DEFAULT_RATES

    names = ["scenario", "api", "mix", "ignore_eos"]
    lengths = ["prompt_tokens", "new_tokens"]
    names += lengths if args.mix == "fixed" else ["scale", "max_prompt_tokens", "max_new_tokens"]
    is_closed = args.scenario == "soak" or (args.scenario == "plain" and args.rate is None)
    names += {
        "plain": ["clients", "requests"] if is_closed else ["rate", "duration"],
        "convoy": ["rate", "duration", "long_prompt_tokens", "long_rate"],
        "saturation": ["rate", "duration", "rate_factor", "max_steps"],
        "soak": ["clients", "duration"],
    }[args.scenario]
    data = {name: getattr(args, name) for name in names}
    if "rate" in data:
        data["rate"] = args.rate or DEFAULT_RATES[args.scenario]
    return data


def _command(args: argparse.Namespace) -> list[str]:
    """The command without the key: receipts are shown to others."""
    options = {name: value for name, value in vars(args).items() if name not in ("url", "api_key")}
    words = command_line(argparse.Namespace(**options))
    return [*words[:3], args.url, *words[3:]]
