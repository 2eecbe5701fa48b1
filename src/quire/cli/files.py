"""`quire convert`: a BitNet model as another GGUF file."""

import argparse
import os
from pathlib import Path
from typing import Any

from quire.cli.program import print_json, print_progress, printable
from quire.core.errors import ConfigError
from quire.llm.machine import format_bytes
from quire.llm.progress import ProgressBar
from quire.loader import defaults
from quire.model.conversion import Conversion, plan_conversion
from quire.model.isolated import examine
from quire.model.loading import load_model


def convert(args: argparse.Namespace) -> int:
    out: Path = args.out
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the file to write in it")
    if os.path.lexists(out) and not args.force:
        raise ConfigError(f"{out} is there already: --force replaces it")
    path = defaults.resolve(args.model, _progress)
    examine(args.model, path, trusted=args.trust_model_file).check()
    with load_model(path, i2s_packing=args.i2s_packing) as model:
        plan = plan_conversion(
            model, args.to, embedding=args.embedding, with_tokenizer=not args.no_tokenizer
        )
        bar = ProgressBar(plan.nbytes, estimate=True)
        try:
            plan.write(out, bar.update)
        except BaseException:
            bar.finish(0, "nothing was written")
            raise
        bar.finish(plan.nbytes, "written")
    if args.json:
        print_json(_report(args, path, plan))
    else:
        for line in _lines(out, plan):
            print(printable(line))
    return 0


def _progress(line: str) -> None:
    print_progress(f"quire: {line}")


def _report(args: argparse.Namespace, path: Path, plan: Conversion) -> dict[str, Any]:
    worst = plan.worst_loss
    return {
        "input": str(path),
        "output": str(args.out),
        "bytes": args.out.stat().st_size,
        "to": plan.to,
        "architecture": plan.architecture,
        "architecture_reason": plan.reason,
        "matrices": plan.matrices,
        "scales": {
            "rounded": sum(loss.before != loss.after for loss in plan.losses.scales),
            "largest_relative_error": worst.relative if worst else 0.0,
            "largest_in": worst.tensor if worst else None,
        },
        "embeddings": plan.embeddings,
        "embedding_weights_rounded": plan.losses.rounded,
        "tokenizer": None if plan.tokenizer is None else plan.tokenizer._asdict(),
        "left_out": list(plan.left_out),
        "notes": list(plan.notes),
    }


def _lines(out: Path, plan: Conversion) -> list[str]:
    came = "; ".join(f"{count} of {kind}" for kind, count in plan.matrices.items())
    rows = [
        ("written", f"{out}, {format_bytes(out.stat().st_size)}"),
        ("matrices", f"{came}; as {plan.to}, every code kept"),
        ("scales", _scale_line(plan)),
        ("embedding", ", ".join(f"{name} {kind}" for name, kind in plan.embeddings.items())),
        ("", _rounding_line(plan)),
        ("architecture", f"{plan.architecture}: {plan.reason}"),
        ("tokenizer", _tokenizer_line(plan)),
        ("left out", ", ".join(plan.left_out)),
        *(("note", note) for note in plan.notes),
    ]
    return [f"{name:<13}{text}" for name, text in rows if text]


def _scale_line(plan: Conversion) -> str:
    scales, worst = plan.losses.scales, plan.worst_loss
    if worst is None:
        return "as they were"
    rounded = sum(loss.before != loss.after for loss in scales)
    return (
        f"{rounded} of {len(scales)} rounded from float32 to float16, by up to "
        f"{worst.relative:.2g} of their size ({worst.tensor}: {worst.before:.8g} to "
        f"{worst.after:.8g})"
    )


def _rounding_line(plan: Conversion) -> str:
    rounded = {name: count for name, count in plan.losses.rounded.items() if count}
    return ", ".join(f"{count} weights of {name} rounded" for name, count in rounded.items())


def _tokenizer_line(plan: Conversion) -> str:
    found = plan.tokenizer
    if found is None:
        return "none: the file takes token ids alone"
    template = "a" if found.has_chat_template else "no"
    pre = found.pre_tokenizer or "not named"
    return f"{found.num_tokens} tokens, pre-tokenizer {pre}, {template} chat template"
