"""`quire bench`: hands over to quire_bench when it is asked for. Nothing else here imports that.

quire_bench comes with quire; the packages that it needs come with the extra `bench`.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.core.errors import ConfigError

_PACKAGES = ("aiohttp", "jsonschema", "matplotlib", "tqdm")  # of the extra


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("bench", help="measure quire", fill=_fill)


def run(args: argparse.Namespace) -> int:
    with _extra():
        from quire_bench import commands

        return commands.run(args)


def _fill(parser: argparse.ArgumentParser) -> None:
    with _extra():
        from quire_bench import commands

        commands.add_parsers(parser)


@contextmanager
def _extra() -> Iterator[None]:
    """Where a package of the extra is missing, say how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        raise ConfigError(f"quire bench needs {missing}: pip install 'quire[bench]'") from error
