"""`quire audit`: whether an audit log is as the server wrote it."""

import argparse
from dataclasses import asdict
from pathlib import Path

from quire.cli.program import print_error, print_json, printable
from quire.core.hash_chain import Verdict, read_secret, verify

_EPILOG = """\
Every line has the hash of the one before it. A line that was changed, taken out, put in or moved
is found by this alone; lines cut off at the end are found with --expect, which takes the hash of a
line that must be there (`/v1/stats` tells the last one). Exit code 1: the log is not sound.

examples:
  quire audit audit.jsonl
  quire audit audit.jsonl.1 audit.jsonl         a log and the one before it, the older first
  quire audit audit.jsonl --expect HASH --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check the hash chain of an audit log (`quire serve --audit-log`)."
    parser.epilog = _EPILOG
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="in the order they were written in"
    )
    parser.add_argument("--expect", metavar="HASH", help="of a line that must be there")
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="the secret, if the server had --audit-key"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    secret = None if args.key is None else read_secret(args.key)
    verdict = verify(args.files, secret, None if args.expect is None else args.expect.lower())
    if args.json:
        print_json({"ok": verdict.is_sound, **asdict(verdict)})
    elif verdict.is_sound:
        _print(verdict)
    if not verdict.is_sound:
        print_error(_problem(verdict))
    return 0 if verdict.is_sound else 1


def _print(verdict: Verdict) -> None:
    print(
        f"OK: {verdict.num_lines} lines, {verdict.first_seq} to {verdict.last_seq}, last hash "
        f"{verdict.last_hash}"
    )
    if verdict.first_seq != 1:
        print(f"the {(verdict.first_seq or 1) - 1} lines before them are in an earlier file")
    if verdict.lines_after_expected is not None:
        print(f"{verdict.lines_after_expected} lines follow the expected one")
    if verdict.num_lost_events:
        print(f"{verdict.num_lost_events} events could not be written, as the log itself says")
    events = ", ".join(f"{event} {count}" for event, count in sorted(verdict.events.items()))
    print(printable(f"events: {events}"))


def _problem(verdict: Verdict) -> str:
    if verdict.file is None:
        return f"{verdict.problem}"
    sound = f"{verdict.num_lines} lines before it are sound"
    return f"{verdict.file}, line {verdict.line}: {verdict.problem} ({sound})"
