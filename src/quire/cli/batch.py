"""`quire batch`: a file of requests answered into another, resumably. Its options are in
`quire.cli.batch_options`."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.cli.options import load
from quire.cli.program import print_json, print_progress
from quire.cli.serve import name_of
from quire.core.errors import ConfigError, ExecutorError
from quire.llm import AsyncLLM
from quire.server.app import create_routes
from quire.server.calls import Call
from quire.server.jobs.files import (
    FileRun,
    Output,
    Progress,
    lines_of,
    num_lines_of,
    open_output,
)
from quire.server.jobs.lines import GivenUpError, LineAnswerer
from quire.server.jobs.tables import SUFFIXES, TableInput, write_table
from quire.server.service import Service
from quire.server.settings import ServerSettings

_EVERY_S = {True: 1.0, False: 10.0}  # between lines of progress: to a terminal, to a file


def run(args: argparse.Namespace) -> int:
    source, target = args.input, args.output
    if source.resolve() == target.resolve():
        raise ConfigError(f"{target} is the input: name another output")
    table = _table(args)
    is_table = target.suffix in SUFFIXES
    written = target.with_name(target.name + ".jsonl") if is_table else target
    if is_table and target.exists() and not written.exists() and not args.restart:
        raise ConfigError(f"{target} is there and whole; say --restart to write it anew")
    if str(target) == "-" or _is_standard_output(written):
        raise ConfigError(f"{target} is standard output, where the summary goes: name a file")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {target.parent}; make it first")
    can_be_read_twice = not (source.is_fifo() or source.is_char_device())
    total = num_lines_of(source) if table is None and can_be_read_twice else None
    lines = lines_of(source) if table is None else table.lines()
    with open_output(written, lines, args.restart) as (output, num_done):
        progress, seconds = asyncio.run(_answer_all(args, lines, output, num_done, total))
    if is_table:
        write_table(lines_of(written), target)
        written.unlink()
    _summarise(args, progress, seconds)
    return 0


def _is_standard_output(path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(1))
    return False  # one of them is not there


def _table(args: argparse.Namespace) -> TableInput | None:
    if args.input.suffix not in SUFFIXES:
        for name in ("column", "id_column", "body"):
            if getattr(args, name) is not None:
                args.usage_error(f"--{name.replace('_', '-')} is for Parquet and CSV files")
        return None
    body = {} if args.body is None else _body(args)
    endpoint = args.endpoint or "/v1/chat/completions"
    return TableInput(args.input, args.column or "prompt", args.id_column, endpoint, body)


def _body(args: argparse.Namespace) -> dict[str, Any]:
    try:
        body: object = json.loads(args.body)
    except ValueError as error:
        args.usage_error(f"--body is no JSON: {error}")
    if not isinstance(body, dict):
        args.usage_error("--body must be a JSON object, such as '{\"max_tokens\": 64}'")
    assert isinstance(body, dict), "usage_error() raises"
    return body


async def _answer_all(
    args: argparse.Namespace,
    lines: Iterator[bytes],
    output: Output,
    num_done: int,
    total: int | None,
) -> tuple[Progress, float]:
    settings = ServerSettings(
        model_names=tuple(args.served_model_name or (name_of(args.model),)),
        page=False,
        ignore_unknown_fields=args.ignore_unknown_fields,
    )
    service = Service(settings, lambda _: load(AsyncLLM, args, args.max_batch_size))
    await service.open()
    if service.failure is not None:
        raise service.failure
    started = time.monotonic()
    show = _Shown(total, started)
    answerer = LineAnswerer(create_routes(service), _settle, lambda: service.is_stuck)
    run = FileRun(answerer, args.max_batch_size, args.endpoint, show)
    try:
        await run.run(lines, output, num_done)
    except GivenUpError as error:
        raise ExecutorError(f"{error}; the same command goes on behind the lines it has") from error
    finally:
        await service.drain()
        service.pool.close()
    return run.progress, time.monotonic() - started


def _settle(call: Call) -> None:
    """Nothing is kept of a line's call."""


class _Shown:
    """Prints progress now and then."""

    def __init__(self, total: int | None, started: float) -> None:
        self._total = total
        self._started = self._shown_at = started
        self._every_s = _EVERY_S[sys.stderr.isatty()]

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        of = "" if self._total is None else f" of {self._total:,}"
        rate = progress.completion_tokens / (now - self._started)
        failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
        print_progress(f"quire: {progress.num_lines:,}{of} lines, {rate:,.0f} tokens/s{failed}")


def _summarise(args: argparse.Namespace, progress: Progress, seconds: float) -> None:
    answered = progress.num_lines - progress.num_earlier
    if args.json:
        print_json(
            {
                "lines": progress.num_lines,
                "answered_before": progress.num_earlier,
                "answered": answered - progress.num_failed,
                "failed": progress.num_failed,
                "prompt_tokens": progress.prompt_tokens,
                "completion_tokens": progress.completion_tokens,
                "seconds": round(seconds, 3),
                "output": str(args.output),
            }
        )
        return
    earlier = f", {progress.num_earlier:,} by earlier runs" if progress.num_earlier else ""
    print(
        f"{args.output}: {progress.num_lines:,} lines{earlier}; {progress.num_failed:,} of "
        f"{answered:,} failed, {progress.prompt_tokens:,} + {progress.completion_tokens:,} tokens "
        f"in {seconds:,.1f} s"
    )
