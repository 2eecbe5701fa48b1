"""`quire bench serve`: loads an OpenAI-compatible server and reports what it measured."""

import argparse
import os
import time
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from quire.cli.program import printable
from quire.core.errors import ConfigError
from quire.llm.progress import ProgressBar
from quire_bench.commands.options import add_receipt_options, command_line, finish, keep
from quire_bench.commands.progress import in_words
from quire_bench.commands.serve_options import (
    KEY_VARIABLE,
    NEIGHBOUR_VARIABLE,
    add_load_options,
    add_server_options,
    fill,
    used_options,
    value,
)
from quire_bench.http_client import parse_endpoint
from quire_bench.lengths import MIXES, Bounds, fixed
from quire_bench.load import Outcome, Target, check_server, find_model
from quire_bench.load import run as run_load
from quire_bench.load_scenarios import SCENARIOS, Finding, LoadSettings, memory_of
from quire_bench.load_summary import counted_by
from quire_bench.load_tables import lines
from quire_bench.machine_info import machine, versions
from quire_bench.receipts import Receipt, now

FAILURE = 1
_EPILOG = """\
scenarios:
  plain        one load: closed (--clients, --requests) or open (--rate, --duration)
  convoy       short requests' p99 while long prompts arrive, beside the same without them
  neighbour    one key's first-token times alone, beside another key that keeps --clients requests
               running, and beside one that floods with --flood of them
  saturation   load steps (--rate, times --rate-factor each) up to and past the knee
  soak         a closed loop for --duration: drift of speed, and of memory with --pid

length mixes (log-normal; `fixed` takes --prompt-tokens and --new-tokens as they are):
  instruct     prompts of mean 19 tokens, completions of mean 58 (Alpaca)
  chat         means 161 and 338 (ShareGPT)
  conversation medians 1020 and 129 (Azure's trace of 2023)
  code         medians 1500 and 13 (the same)

A prompt of n tokens is n common English words; the server's own count is shown where it gives one.
Open loops count times from when a request was due. One short request warms the server first.

example: quire bench serve http://127.0.0.1:8000 --mix chat --rate 2 --duration 60
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends streaming requests to any OpenAI-compatible server and measures times "
        "to first token and between tokens, tokens a second, and errors by kind."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), default="plain")
    add_server_options(parser.add_argument_group("server"))
    add_load_options(parser.add_argument_group("load"))
    add_receipt_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    fill(args)
    target, finding = run_load(_measure(args))
    receipt = _receipt(args, target, finding)
    keep(args, receipt)
    if not args.json:
        for line in lines(receipt):
            print(printable(line))
    is_empty = all(outcome.error is not None for outcome in finding.outcomes)
    return finish(args, [receipt]) or (FAILURE if is_empty else 0)


def _check(args: argparse.Namespace) -> None:
    """Refuse options without effect, and what would fail only after the load."""
    if args.pid is not None:
        if args.scenario != "soak":
            raise ConfigError("--pid is for --scenario soak, which watches the server's memory")
        memory_of(args.pid)
    if args.neighbour_key is not None and args.scenario != "neighbour":
        raise ConfigError("--neighbour-key is for --scenario neighbour")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, got {args.timeout}")


async def _measure(args: argparse.Namespace) -> tuple[Target, Finding]:
    target, settings = _target(args), _settings(args)
    if target.model is None:
        target = replace(target, model=await find_model(target))
    await check_server(target)
    progress = _Progress(args)
    finding = await SCENARIOS[args.scenario](target, settings, progress.count)
    progress.end()
    return target, finding


def _target(args: argparse.Namespace) -> Target:
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    return Target(
        parse_endpoint(args.url, api_key=key, allow_remote=args.allow_remote),
        api=args.api,
        model=args.model,
        ignore_eos=args.ignore_eos,
        wants_usage=not args.no_usage,
        timeout_s=args.timeout,
    )


def _settings(args: argparse.Namespace) -> LoadSettings:
    is_fixed = args.mix == "fixed"
    sizes = ("prompt_tokens", "new_tokens")
    if not is_fixed:
        sizes = ("max_prompt_tokens", "max_new_tokens")
    longest: tuple[int, int] = (value(args, sizes[0]), value(args, sizes[1]))
    spread = value(args, "prompt_spread")
    mix = fixed(*longest, spread) if is_fixed else MIXES[args.mix]
    if is_fixed:
        longest = (longest[0] + spread, longest[1])
    return LoadSettings(
        mix=mix,
        bounds=Bounds(1.0 if is_fixed else args.scale, *longest),
        seed=args.seed,
        num_clients=value(args, "clients"),
        num_requests=value(args, "requests"),
        rate=args.rate,
        duration_s=value(args, "duration"),
        long_rate=value(args, "long_rate"),
        long_prompt_tokens=value(args, "long_prompt_tokens"),
        rate_factor=value(args, "rate_factor"),
        max_steps=value(args, "max_steps"),
        num_flooding=value(args, "flood"),
        neighbour_key=args.neighbour_key or os.environ.get(NEIGHBOUR_VARIABLE) or None,
        pid=args.pid,
    )


class _Progress:
    """Counts requests on a terminal, beside how long the load is to last.

    A load of a duration may last longer: a server that falls behind takes its time.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._counts_requests = args.duration is None
        if self._counts_requests:
            total, self._whole = args.clients * args.requests, f"{args.clients * args.requests}"
        else:
            steps = {"convoy": 2, "neighbour": 3, "saturation": args.max_steps}
            total = steps.get(args.scenario, 1) * args.duration
            word = "at most about" if args.scenario == "saturation" else "about"
            self._whole = f"{word} {in_words(total)}"
        self._total = total
        self._bar = ProgressBar(total)
        self._done = self._failed = 0
        self._started = time.monotonic()

    def count(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.error is not None
        self._bar.update(*self._state())

    def end(self) -> None:
        self._bar.finish(*self._state())

    def _state(self) -> tuple[float, str]:
        elapsed_s = time.monotonic() - self._started
        failures = f", {self._failed} failed" if self._failed else ""
        if self._counts_requests:
            text = f"{self._done} of {self._whole} requests{failures}, {in_words(elapsed_s)}"
            return self._done, text
        text = f"{self._done} requests{failures}, {in_words(elapsed_s)} of {self._whole}"
        return min(elapsed_s, self._total), text


def _receipt(args: argparse.Namespace, target: Target, finding: Finding) -> Receipt:
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
            "device": None,  # not known of a server
            "kernels": [],
            "fallback": _shortfall(args, finding),
            "tokens_counted_by": counted_by(finding.outcomes),
            "server": args.server_name,
        },
        settings=_settings_data(args),
        samples=finding.samples,
        results=finding.results,
    )


def _shown_name(model: str | None) -> str:
    """Some servers name a model by its path: receipts are shown to others, who need the file's."""
    name = model or "unnamed"
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _shortfall(args: argparse.Namespace, finding: Finding) -> str | None:
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
    """What was asked of the load; only what the scenario uses."""
    names = ["scenario", "api", "mix", "ignore_eos", *used_options(args)]
    return {name: getattr(args, name) for name in names}


def _command(args: argparse.Namespace) -> list[str]:
    """The command without the keys: receipts are shown to others."""
    left_out = ("url", "api_key", "neighbour_key")
    options = {name: value for name, value in vars(args).items() if name not in left_out}
    words = command_line(argparse.Namespace(**options))
    return [*words[:3], args.url, *words[3:]]
