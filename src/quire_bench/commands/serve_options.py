"""The options of `quire bench serve`: what each is for, and which of them a scenario uses."""

import argparse
from typing import Any

from quire.core.errors import ConfigError
from quire_bench.load_scenarios import DEFAULT_RATES

KEY_VARIABLE = "QUIRE_API_KEY"
NEIGHBOUR_VARIABLE = "QUIRE_NEIGHBOUR_KEY"
MIXES = ("fixed", "instruct", "chat", "conversation", "code")
_NUMBERS: dict[str, tuple[int | float | None, str]] = {
    "prompt_tokens": (64, "fixed lengths: of a prompt"),
    "prompt_spread": (0, "fixed lengths: prompts are up to so much shorter or longer"),
    "new_tokens": (64, "fixed lengths: of a completion"),
    "scale": (1.0, "other mixes: multiplies their lengths"),
    "max_prompt_tokens": (4096, "other mixes: the longest prompt"),
    "max_new_tokens": (1024, "other mixes: the longest completion"),
    "clients": (4, "closed loop: requests at a time"),
    "requests": (8, "closed loop: requests of each client"),
    "rate": (None, "open loop: requests a second"),
    "duration": (30.0, "seconds of an open loop, a step or a soak"),
    "long_rate": (0.5, "convoy: long prompts a second"),
    "long_prompt_tokens": (2048, "convoy: of a long prompt"),
    "flood": (128, "neighbour: requests at a time of a key that floods"),
    "rate_factor": (1.5, "saturation: by which the rate rises"),
    "max_steps": (12, "saturation: at most so many steps"),
}
_USED_BY = {
    "closed": ("clients", "requests"),
    "open": ("rate", "duration"),
    "convoy": ("rate", "duration", "long_prompt_tokens", "long_rate"),
    "neighbour": ("rate", "duration", "clients", "flood"),
    "saturation": ("rate", "duration", "rate_factor", "max_steps"),
    "soak": ("clients", "duration"),
}


def add_server_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", help="default: the first that /v1/models lists, or none")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument("--api-key", help=f"default: the environment's {KEY_VARIABLE}")
    group.add_argument(
        "--neighbour-key", help=f"neighbour: of the other user (default: {NEIGHBOUR_VARIABLE})"
    )
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one request")
    group.add_argument("--ignore-eos", action="store_true", help="send ignore_eos (an extension)")
    group.add_argument("--no-usage", action="store_true", help="do not ask for token counts")
    group.add_argument("--allow-remote", action="store_true", help="load another machine's server")
    group.add_argument("--pid", type=int, help="the server's process, to watch its memory (soak)")
    group.add_argument(
        "--server-name",
        metavar="TEXT",
        help="which server it is, with its version: no API tells, and receipts should",
    )


def add_load_options(group: "argparse._ArgumentGroup") -> None:
    """Numbers stay None unless given, so that one that would have no effect can be refused."""
    group.add_argument("--mix", choices=MIXES, default="fixed", help="of lengths (see below)")
    for name, (usual, what) in _NUMBERS.items():
        kind = float if usual is None else type(usual)
        shown = what if usual is None else f"{what} (default: {usual:g})"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=shown)
    group.add_argument("--seed", type=int, default=0, help="of lengths, texts and arrivals")


def fill(args: argparse.Namespace) -> None:
    """Give the options that count their usual values; refuse those that would not count."""
    counting = used_options(args)
    for name, (usual, _) in _NUMBERS.items():
        given = getattr(args, name)
        if given is not None and name not in counting:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on {_load(args)} with --mix "
                f"{args.mix}: leave it out (of effect: {', '.join(map(_flag, counting))})"
            )
        if given is None and name in counting:
            setattr(args, name, DEFAULT_RATES[args.scenario] if name == "rate" else usual)


def used_options(args: argparse.Namespace) -> list[str]:
    """The names of the numbers that count for this load."""
    lengths = ["prompt_tokens", "prompt_spread", "new_tokens"]
    if args.mix != "fixed":
        lengths = ["scale", "max_prompt_tokens", "max_new_tokens"]
    return [*lengths, *_USED_BY[_loop(args)]]


def value(args: argparse.Namespace, name: str) -> Any:
    """An option's value, or what it would be if it counted."""
    given = getattr(args, name)
    return _NUMBERS[name][0] if given is None else given


def _loop(args: argparse.Namespace) -> str:
    if args.scenario != "plain":
        return str(args.scenario)
    return "closed" if args.rate is None else "open"


def _load(args: argparse.Namespace) -> str:
    if args.scenario != "plain":
        return f"--scenario {args.scenario}"
    return "a closed loop (no --rate)" if args.rate is None else "an open loop (--rate)"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
