"""Where the native module comes from: one import, one error that says what to do without it."""

import importlib
from typing import Any

from quire.core.errors import ConfigError


def native_module() -> Any:
    """quire._native, or a ConfigError that says how to build it."""
    try:
        return importlib.import_module("quire._native")
    except ImportError as error:
        raise ConfigError(
            f"the native CPU module cannot be imported ({error}): install quire with a C++ "
            "compiler at hand (`pip install .`), or run `make native` in a checkout; "
            "device='reference' runs without it, slowly"
        ) from error


def has_native_module() -> bool:
    try:
        native_module()
    except ConfigError:
        return False
    return True


def units() -> list[str]:
    """The instruction sets whose kernels run on this processor, the best one last."""
    names: list[str] = native_module().units()
    return names


def check_unit(name: str) -> str:
    """The name of a unit that runs here, or a ConfigError that says which do."""
    if name not in units():
        raise ConfigError(
            f"no CPU kernels called {name!r} run on this processor: there are {', '.join(units())}"
        )
    return name
