"""`quire bench tune`: finds settings for a model, a machine and a latency target."""

import argparse
from pathlib import Path
from typing import Any

from quire.cli.program import print_error, print_status, printable
from quire.core.errors import ConfigError
from quire.llm.assembly import configuration_text
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
from quire_bench.receipts import Receipt
from quire_bench.subject import open_subject
from quire_bench.tune import (
    KIND,
    Trial,
    Tuning,
    best,
    engine_table,
    nearest,
    samples,
    table,
    try_settings,
)

FAILURE = 1
_EPILOG = """\
examples:
  quire bench tune --model model.gguf --slo-itl-ms 50 --out quire.toml
  quire bench tune --model dummy:llama-1b --quant Q4_K_M --slo-itl-ms 80 --batches 4,8,16

Every setting runs twice as many requests as it has places. Of those whose p95 time between tokens
is within the target, the one with most completion tokens a second is written as a configuration;
where there is none, nothing is written and the exit is 1.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Try batch and step sizes, and write the best within a latency target."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_subject_options(parser)
    group = parser.add_argument_group("tuning")
    group.add_argument("--quant", metavar="MIX", help="the mix of a dummy model, such as Q4_K_M")
    group.add_argument(
        "--slo-itl-ms",
        type=float,
        required=True,
        metavar="MS",
        help="target: p95 time between tokens",
    )
    for name, usual in (("batches", "1,2,4,8,16,32"), ("step-tokens", "16,64,256")):
        group.add_argument(
            f"--{name}",
            type=_numbers,
            default=_numbers(usual),
            metavar="N,N",
            help=f"sizes to try (default: {usual})",
        )
    group.add_argument(
        "--try-threads",
        type=_numbers,
        metavar="N,N",
        help="numbers of threads to try (default: --threads, or the executor's own)",
    )
    for name, count in (("prompt-tokens", 128), ("new-tokens", 32), ("repeats", 3)):
        group.add_argument(
            f"--{name}", type=int, default=count, metavar="N", help="(default: %(default)s)"
        )
    group.add_argument(
        "--out",
        type=Path,
        default=Path("quire.toml"),
        metavar="FILE",
        help="the configuration to write (default: %(default)s)",
    )
    group.add_argument("--force", action="store_true", help="write over a file that is there")
    add_seed_option(parser)
    add_receipt_options(parser)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


_numbers.__name__ = "list of numbers"  # argparse names it in errors


def run(args: argparse.Namespace) -> int:
    wanted = _wanted(args)
    receipt, trials = _measured(args, wanted)
    chosen = best(trials, args.slo_itl_ms)
    keep(args, receipt)
    if not args.json:
        print(f"{receipt.model['name']} on {receipt.executed['device']}")
        print("\n".join(table(trials, chosen, args.slo_itl_ms)))
    code = finish(args, [receipt])
    if chosen is None:
        closest = nearest(trials)
        print_error(
            f"no setting keeps p95 within {args.slo_itl_ms:g} ms; the nearest has "
            f"{1000 * closest.p95_s:.2f} ms with batch {closest.setting.max_batch_size} and "
            f"{closest.setting.max_step_tokens} tokens a step: {args.out} was not written"
        )
        return FAILURE
    _write(args, receipt, chosen)
    print_status(f"configuration: {args.out}")
    return code


def _wanted(args: argparse.Namespace) -> Tuning:
    wanted = Tuning(
        slo_itl_ms=args.slo_itl_ms,
        batches=args.batches,
        step_tokens=args.step_tokens,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    wanted.check(1 << 31)  # what the model holds is asked once it is there
    if args.out.exists() and not args.force:
        raise ConfigError(f"{args.out} is there already: --force writes over it")
    if args.threads is not None and args.try_threads is not None:
        raise ConfigError("give --threads or --try-threads, not both")
    return wanted


def _measured(args: argparse.Namespace, wanted: Tuning) -> tuple[Receipt, list[Trial]]:
    trials: list[Trial] = []
    for threads in args.try_threads or (args.threads,):
        print_status("loading the model …")
        with_threads = argparse.Namespace(**{**vars(args), "threads": threads})
        subject = open_subject(
            args.model, args.quant, load_options(with_threads, max(args.batches))
        )
        try:
            works = [s.max_batch_size for s in wanted.settings(subject, threads)]
            progress = Progress(works, "settings" if threads is None else f"on {threads} threads")
            trials += try_settings(subject, wanted, threads, progress.begin)
            progress.finish()
        finally:
            subject.close()
    if not trials:
        raise ConfigError("the executor offers none of the sizes to try: give smaller ones")
    chosen = best(trials, args.slo_itl_ms)
    results: dict[str, Any] = {"best": None if chosen is None else chosen.as_data()}
    results |= {trial.setting.name: trial.as_data() for trial in trials}
    settings = {
        "slo_itl_ms": args.slo_itl_ms,
        "batches": list(args.batches),
        "step_tokens": list(args.step_tokens),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
    }
    receipt = make_receipt(
        args, subject, KIND, settings=settings, samples=samples(trials), results=results
    )
    return receipt, trials


def _write(args: argparse.Namespace, receipt: Receipt, chosen: Trial) -> None:
    run_table: dict[str, int | str] = {"device": str(receipt.executed["device"])}
    if chosen.setting.threads is not None:
        run_table["threads"] = chosen.setting.threads
    if args.kv_memory is not None:
        run_table["kv_memory"] = args.kv_memory
    if args.kv_cache_dtype != "auto":
        run_table["kv_cache_dtype"] = args.kv_cache_dtype
    notes = [
        f"Found by `quire bench tune` for {receipt.model['name']} on {receipt.machine['cpu']}.",
        f"Target: p95 of {args.slo_itl_ms:g} ms between tokens; measured: "
        f"{1000 * chosen.p95_s:.2f} ms, at {chosen.rate:.1f} completion tokens a second.",
    ]
    text = configuration_text(
        {"engine": engine_table(chosen.setting), "run": run_table}, list(map(printable, notes))
    )
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error.strerror or error}") from error
