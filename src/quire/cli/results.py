"""How commands print: results as JSON, and lines for a person."""

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()


def printable(line: str) -> str:
    """A line that may come from a file, so that it cannot play tricks on a terminal."""
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in line)


def complain(message: str) -> None:
    """Say what is wrong, in one line on standard error."""
    print(f"quire: {printable(' '.join(message.split()))}", file=sys.stderr)


def tell(line: str) -> None:
    """Say something beside the results, to a person who watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
