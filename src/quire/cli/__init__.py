"""The command line: `quire generate`, `quire chat` and the rest."""

from quire.cli.program import main

__all__ = ["main"]
