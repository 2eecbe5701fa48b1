"""A reader whose process finds no Landlock and no seccomp, as in some containers."""

from quire.core import lockdown
from quire.model.isolated_reader import read

lockdown._LANDLOCK_CREATE_RULESET = 9999  # no system has it
lockdown._ARCHITECTURES = {}

__all__ = ["read"]
