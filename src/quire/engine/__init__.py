"""Which tokens of which request are computed when: the loop, and all that decides."""

from quire.engine.engine import Engine

__all__ = ["Engine"]
