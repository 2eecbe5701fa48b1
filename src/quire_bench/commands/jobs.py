"""`quire bench jobs`: requests that somebody waits for beside a batch job."""

import argparse
from typing import Any

from quire.cli.program import print_status
from quire.core.errors import ConfigError
from quire.loader.defaults import DUMMY_PREFIX
from quire_bench.commands.options import (
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    asked,
    command_line,
    finish,
    keep,
)
from quire_bench.commands.progress import Progress
from quire_bench.jobs import JobsPlan, Lengths, measure_jobs, started_server
from quire_bench.load import run as run_load
from quire_bench.machine_info import machine, versions
from quire_bench.receipts import Receipt, now
from quire_bench.subject import read_facts

_EPILOG = """\
examples:
  quire bench jobs
  quire bench jobs --model model.gguf --rate 2 --rounds 6 --json

A `quire serve` is started with the model. In every round chat requests arrive at random for
--seconds; as long a batch job runs by itself; and both together. What is left to a job is its rate
alone less the requests' tokens, of prompts and completions. Rounds take turns in their order.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure first-token times of chat requests without and beside a batch job, and how much "
        "the job gets of what they leave."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    parser.set_defaults(model="smollm2")
    group = parser.add_argument_group("load")
    group.add_argument("--max-batch-size", type=int, metavar="N", help="the server's")
    for name, usual, metavar, text in (
        ("--rate", 1.0, "R", "requests a second"),
        ("--seconds", 10.0, "S", "of each part of a round"),
    ):
        help_line = f"{text} (default: {usual:g})"
        group.add_argument(name, type=float, default=usual, metavar=metavar, help=help_line)
    for name, usual, text in (
        ("--rounds", 6, "of three parts each"),
        ("--prompt-tokens", 128, "of a request's prompt, about"),
        ("--new-tokens", 32, "of a request's completion"),
        ("--job-prompt-tokens", 64, "of a line's prompt, about"),
        ("--job-new-tokens", 48, "of a line's completion"),
    ):
        help_line = f"{text} (default: {usual})"
        group.add_argument(name, type=int, default=usual, metavar="N", help=help_line)
    add_seed_option(parser)
    add_receipt_options(parser)


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        _print(receipt)
    return finish(args, [receipt])


def _measured(args: argparse.Namespace) -> Receipt:
    if args.model.startswith(DUMMY_PREFIX):
        raise ConfigError(f"{args.model} has no tokenizer, which chats need: name another --model")
    plan = JobsPlan(
        args.rate,
        Lengths(args.prompt_tokens, args.new_tokens),
        Lengths(args.job_prompt_tokens, args.job_new_tokens),
        args.seconds,
        args.rounds,
        args.seed,
    )
    facts = read_facts(args.model, trusted=args.trust_model_file)
    print_status("starting the server …")
    with started_server(_serve_words(args)) as url:
        progress = Progress([1.0] * (1 + 3 * plan.rounds), "parts")
        found = run_load(measure_jobs(url, plan, progress.begin))
        progress.finish()
    return Receipt(
        kind="jobs",
        created=now(),
        command=command_line(args),
        seed=args.seed,
        model=facts.as_data(),
        machine=machine(),
        versions=versions(),
        asked=asked(args),
        executed={"device": found.device, "kernels": [], "fallback": None},
        settings=_settings(args),
        samples=found.samples,
        results=found.results,
    )


def _serve_words(args: argparse.Namespace) -> list[str]:
    """The server's options, as given."""
    words = [args.model, "--device", args.device, "--kv-cache-dtype", args.kv_cache_dtype]
    for name in ("kv_memory", "threads", "max_batch_size", "i2s_packing"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for name in ("no_invariant", "trust_model_file"):
        if getattr(args, name):
            words.append(f"--{name.replace('_', '-')}")
    return words


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        *("rate", "seconds", "rounds", "prompt_tokens", "new_tokens"),
        *("job_prompt_tokens", "job_new_tokens", "max_batch_size"),
    )
    return {name: getattr(args, name) for name in names}


def _print(receipt: Receipt) -> None:
    results: Any = receipt.results
    print(f"{receipt.model['name']} on {receipt.executed['device']}, {_load(receipt)}")
    print(f"{'':<16}{'requests':>9}{'errors':>8}{'first token p50':>18}{'p95':>10}")
    for name, words in (("alone", "without a job"), ("beside_job", "beside a job")):
        found = results[name]
        times = [found["time_to_first_token_s"][share] for share in ("p50", "p95")]
        shown = [f"{1000 * seconds:.0f} ms" if seconds else "–" for seconds in times]
        counts = f"{found['requests']:>9}{found['errors']:>8}"
        print(f"{words:<16}{counts}{shown[0]:>18}{shown[1]:>10}")
    ratios = [results[f"first_token_{share}_ratio"] for share in ("p50", "p95")]
    ratio_words = [f"{ratio:.2f}" if ratio else "–" for ratio in ratios]
    print(f"{'ratio':<33}{ratio_words[0]:>18}{ratio_words[1]:>10}")
    print(
        f"the job: {results['job_alone_tokens_per_second']:,.0f} tokens/s alone, "
        f"{results['job_tokens_per_second']:,.0f} beside requests of "
        f"{results['request_tokens_per_second']:,.0f}: "
        f"{results['job_share_of_what_is_left']:.0%} of what is left "
        f"({results['least_share_of_a_round']:.0%} at least; by completion tokens "
        f"{results['job_share_by_completion_tokens']:.0%})"
    )


def _load(receipt: Receipt) -> str:
    settings: Any = receipt.settings
    return (
        f"{settings['rate']:g} requests/s of {settings['prompt_tokens']} + "
        f"{settings['new_tokens']} tokens, lines of {settings['job_prompt_tokens']} + "
        f"{settings['job_new_tokens']}"
    )
