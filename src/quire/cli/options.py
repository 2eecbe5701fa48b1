"""Options that several commands share: which model and how to run it, how to choose tokens."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quire.cli.results import tell

if TYPE_CHECKING:
    from quire.core.sampling import SamplingParams

DEFAULT_MODEL = "smollm2"

Loaded = TypeVar("Loaded")


class _Option(NamedTuple):
    """A field of SamplingParams as a flag."""

    name: str
    type: Any
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


_bias.__name__ = "TOKEN=BIAS"  # argparse names it in errors

_SAMPLING = (
    _Option("min_tokens", int, "N", "at least so many tokens before it may end"),
    _Option("top_k", int, "N", "choose among the N likeliest tokens"),
    _Option("top_p", float, "P", "choose among the likeliest tokens that sum to P"),
    _Option("min_p", float, "P", "choose among tokens at least P times as likely as the likeliest"),
    _Option("repetition_penalty", float, "X", "above 1: tokens that were there become less likely"),
    _Option("presence_penalty", float, "X", "lowers tokens that the completion has"),
    _Option("frequency_penalty", float, "X", "lowers them by how often it has them"),
    _Option("seed", int, "N", "makes sampling repeatable"),
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a safetensors folder, or a name (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda or reference; `quire doctor` says which are there",
    )
    group.add_argument(
        "--kv-memory", metavar="SIZE", help='memory for keys and values, such as "512MiB"'
    )
    group.add_argument(
        "--max-context", type=int, metavar="N", help="hold prompt and completion to N tokens"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads to compute on")
    add_cache_type_option(group, "auto")
    add_invariance_option(group)
    add_template_option(group)
    add_trust_option(group)


def add_invariance_option(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--no-invariant",
        action="store_true",
        help="let a GPU sum as is fastest: a request's tokens may then depend on its company",
    )


def add_trust_option(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    group.add_argument(
        "--trust-model-file",
        action="store_true",
        help="do not have the file read first in a process without privileges",
    )


def add_template_option(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a chat template to take in the place of the model's own",
    )


def add_cache_type_option(group: "argparse._ArgumentGroup", default: str | None) -> None:
    group.add_argument(
        "--kv-cache-dtype",
        default=default,
        metavar="TYPE",
        help="how keys and values are kept: auto, f16 or int8 (half the memory)",
    )


def load(kind: Callable[..., Loaded], args: argparse.Namespace, max_batch_size: int) -> Loaded:
    """An LLM or AsyncLLM as the options above ask for it."""
    names = ("model", "device", "kv_memory", "max_context", "threads", "kv_cache_dtype")
    options = {name: getattr(args, name) for name in (*names, "trust_model_file")}
    options["chat_template"] = True if args.chat_template is None else args.chat_template
    tell(f"quire: loading {args.model}")
    return kind(**options, invariant=not args.no_invariant, max_batch_size=max_batch_size)


def add_sampling_options(
    parser: argparse.ArgumentParser, *, temperature: float, usual_max_tokens: int
) -> None:
    group = parser.add_argument_group("choosing tokens")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"at most so many tokens (default: {usual_max_tokens}, or what the context leaves)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help="0: always the likeliest token; higher: more varied (default: %(default)s)",
    )
    for option in _SAMPLING:
        group.add_argument(option.flag, type=option.type, metavar=option.metavar, help=option.help)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="TOKEN=BIAS",
        help="make a token likelier or less likely; may be repeated",
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="N",
        help="end at this token; may be repeated",
    )
    group.add_argument(
        "--include-stop",
        dest="include_stop_str_in_output",
        action="store_true",
        help="keep the text of --stop at the end",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end of text"
    )


def sampling_params(args: argparse.Namespace, max_tokens: int, **more: Any) -> "SamplingParams":
    """What the options above ask for, with room for so many tokens where they do not say."""
    from quire.core.sampling import SamplingParams

    names = [option.name for option in _SAMPLING]
    names += ["max_tokens", "temperature", "stop", "stop_token_ids"]
    names += ["include_stop_str_in_output", "ignore_eos"]
    given = {name: getattr(args, name) for name in names}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values.setdefault("max_tokens", max(1, max_tokens, values.get("min_tokens", 0)))
    return SamplingParams(**values, logit_bias=dict(args.logit_bias or ()), **more)
