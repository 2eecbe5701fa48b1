"""`quire bench compare`: quire beside other engines, in one run."""

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from quire.cli.program import print_status, printable
from quire.core.errors import ConfigError
from quire_bench.commands.options import (
    add_receipt_options,
    add_seed_option,
    add_subject_options,
    finish,
    keep,
    load_options,
    make_receipt,
)
from quire_bench.commands.progress import Progress
from quire_bench.commands.throughput import add_load_options
from quire_bench.compare import KIND, Comparison, Findings, compare, model_file, table
from quire_bench.http_client import parse_endpoint
from quire_bench.load import Target
from quire_bench.machine_info import usable_threads
from quire_bench.receipts import Executed, Receipt
from quire_bench.rivals import (
    PackageRival,
    Rival,
    RivalFailedError,
    RivalMissingError,
    ServerRival,
    WorkerSettings,
)
from quire_bench.subject import Subject, open_subject, with_quant

KEY_VARIABLE = "QUIRE_API_KEY"
_PACKAGED = ("llama.cpp", "openvino", "transformers")
_EPILOG = """\
examples:
  quire bench compare --model dummy:llama-1b --quant Q4_K_M --rivals llama.cpp
  quire bench compare --model model.gguf --batch 1,8 --rivals llama.cpp,http://127.0.0.1:8000
  quire bench compare --model smollm2 --rivals openvino --python-for openvino=venv/bin/python

Engines take turns, round by round, on the same prompts; a round gives one ratio, and the median and
range of the ratios are reported. A dummy model is written to a file for the rivals, and removed. A
server gets words for tokens, asks and answers over HTTP, takes a key from QUIRE_API_KEY, and must
heed ignore_eos. A rival that is missing or fails is named and left out; with --strict that is an
exit of 1.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure quire and other engines in turn, and the ratios of their rates."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--quant", metavar="MIX", help="the mix of a dummy model, such as Q4_K_M")
    group.add_argument(
        "--batch",
        type=_numbers,
        default=(1, 4, 16),
        metavar="N,N",
        help="sequences that run together (default: 1,4,16)",
    )
    add_load_options(group, requests=None)
    _add_rival_options(parser.add_argument_group("rivals"))
    add_seed_option(parser)
    add_receipt_options(parser)


def _add_rival_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--rivals",
        type=_words,
        default=_PACKAGED,
        metavar="NAME,URL",
        help=f"{', '.join(_PACKAGED)} or a server's URL (default: {','.join(_PACKAGED)})",
    )
    group.add_argument(
        "--python-for",
        type=_words,
        default=(),
        metavar="NAME=PATH",
        help="the Python interpreter that has a rival's package (default: this one)",
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="of a rival's batch"
    )
    group.add_argument(
        "--rival-threads",
        type=int,
        metavar="N",
        help="threads of rivals (default: --threads, or else all this process may use)",
    )
    group.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp: leave weights as the file has them (slower; some virtual machines refuse "
        "the AMX instructions that it repacks them for)",
    )
    group.add_argument("--allow-remote", action="store_true", help="load another machine's server")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in text.split(",") if word))


_numbers.__name__ = "list of numbers"  # argparse names it in errors


def run(args: argparse.Namespace) -> int:
    receipt = _measured(args)
    keep(args, receipt)
    if not args.json:
        print(f"{receipt.model['name']}; quire on {receipt.executed['device']}")
        for line in table(receipt.results):
            print(printable(line))
    return finish(args, [receipt])


def _measured(args: argparse.Namespace) -> Receipt:
    interpreters = _interpreters(args)
    wanted = Comparison(
        batches=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    wanted.check(1 << 31)  # what the model holds is asked once it is there
    print_status("loading the model …")
    with ExitStack() as stack:
        subject = open_subject(args.model, args.quant, load_options(args, max(args.batch)))
        stack.callback(subject.close)
        rivals, missing = _open_rivals(args, subject, interpreters, stack)
        works = [float(batch) for batch in wanted.batches for _ in range(wanted.repeats)]
        progress = Progress(works, "rounds")
        findings = compare(subject, rivals, wanted, progress.begin)
        progress.finish()
        findings.failures |= missing
        return _receipt(args, subject, rivals, wanted, findings)


def _interpreters(args: argparse.Namespace) -> dict[str, str]:
    """The interpreters by rival; what names nothing is refused before anything is loaded."""
    for name in args.rivals:
        if name not in _PACKAGED and "://" not in name:
            raise ConfigError(
                f"--rivals has {name!r}: there are {', '.join(_PACKAGED)} and URLs of servers"
            )
    found: dict[str, str] = {}
    for pair in args.python_for:
        name, _, path = pair.partition("=")
        if name not in _PACKAGED or not path:
            raise ConfigError(
                f"--python-for is {pair!r}: expected NAME=PATH with NAME of {', '.join(_PACKAGED)}"
            )
        if name not in args.rivals:
            raise ConfigError(f"--python-for {name} has no effect: --rivals does not name {name}")
        found[name] = path
    if args.no_repack and "llama.cpp" not in args.rivals:
        raise ConfigError("--no-repack has no effect: --rivals does not name llama.cpp")
    if args.rival_threads is not None and not set(_PACKAGED) & set(args.rivals):
        raise ConfigError("--rival-threads has no effect on servers: start them with as many")
    if args.rival_threads is not None and args.rival_threads < 1:
        raise ConfigError(f"--rival-threads must be at least 1, got {args.rival_threads}")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, got {args.timeout}")
    return found


def _open_rivals(
    args: argparse.Namespace,
    subject: Subject,
    interpreters: Mapping[str, str],
    stack: ExitStack,
) -> tuple[list[Rival], dict[str, str]]:
    """Those that are there, and why the others are not."""
    rivals: list[Rival] = []
    missing: dict[str, str] = {}
    needs_file = any(name in _PACKAGED for name in args.rivals)
    path = Path()
    if needs_file:
        path = stack.enter_context(model_file(with_quant(args.model, args.quant)))
    for name in args.rivals:
        print_status(f"starting {name} …")
        try:
            rival = _open_rival(args, name, path, subject, interpreters)
        except (RivalMissingError, RivalFailedError) as error:
            missing[name] = str(error)
            continue
        stack.callback(rival.close)
        rivals.append(rival)
    return rivals, missing


def _open_rival(
    args: argparse.Namespace,
    name: str,
    path: Path,
    subject: Subject,
    interpreters: Mapping[str, str],
) -> Rival:
    if name in _PACKAGED:
        settings = WorkerSettings(
            python=interpreters.get(name, sys.executable),
            threads=args.rival_threads or args.threads or usable_threads(),
            use_gpu=subject.executed["device"] == "cuda",
            timeout_s=args.timeout,
            repack=not args.no_repack,
        )
        return PackageRival(name, path, settings)
    key = os.environ.get(KEY_VARIABLE) or None
    endpoint = parse_endpoint(name, api_key=key, allow_remote=args.allow_remote)
    return ServerRival(name, Target(endpoint, ignore_eos=True, timeout_s=args.timeout), args.seed)


def _receipt(
    args: argparse.Namespace,
    subject: Subject,
    rivals: list[Rival],
    wanted: Comparison,
    findings: Findings,
) -> Receipt:
    figures = findings.figures()
    # Receipts hold no local paths.
    recorded = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "python_for"})
    receipt = make_receipt(
        recorded,
        subject,
        KIND,
        settings={
            "batches": list(wanted.batches),
            "prompt_tokens": wanted.prompt_tokens,
            "new_tokens": wanted.new_tokens,
            "repeats": wanted.repeats,
            "rivals": list(args.rivals),
            "rival_threads": args.rival_threads,
            "repack": not args.no_repack,
        },
        samples=figures.samples,
        results=figures.results,
    )
    facts = {rival.name: rival.facts for rival in rivals if rival.name not in findings.failures}
    reasons = [*filter(None, [receipt.executed["fallback"]]), *findings.failures.values()]
    executed: Executed = {
        **receipt.executed,
        "fallback": "; ".join(reasons) or None,
        "rivals": facts,
    }
    versions = {name: rival["version"] for name, rival in facts.items()}
    return replace(receipt, executed=executed, versions={**receipt.versions, **versions})
