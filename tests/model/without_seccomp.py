"""A reader that tells what it could do in a process that finds no seccomp, but all else."""

from tests.model.hostile_readers import tell_what_is_possible

from quire.core import lockdown

lockdown._ARCHITECTURES = {}

__all__ = ["tell_what_is_possible"]
