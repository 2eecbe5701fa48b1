"""quire runs many text-generation requests through one language model together."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.batching import BatchProcessor
    from quire.core.config import EngineConfig
    from quire.core.errors import (
        ConfigError,
        DeadlineError,
        ExecutorError,
        ModelFileError,
        OverloadedError,
        QuireError,
        RequestCancelledError,
        RequestError,
        UnsupportedModelError,
    )
    from quire.core.request import Completion, FinishReason, Piece, RequestOutput
    from quire.core.sampling import Constraint, SamplingParams
    from quire.engine.aio import AsyncEngine
    from quire.engine.engine import Engine
    from quire.llm import LLM, AsyncLLM, TextScore, TextStream

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "BatchProcessor",
    "Completion",
    "ConfigError",
    "Constraint",
    "DeadlineError",
    "Engine",
    "EngineConfig",
    "ExecutorError",
    "FinishReason",
    "ModelFileError",
    "OverloadedError",
    "Piece",
    "QuireError",
    "RequestCancelledError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TextScore",
    "TextStream",
    "UnsupportedModelError",
]

_HOMES = {
    "quire.batching": ("BatchProcessor",),
    "quire.core.config": ("EngineConfig",),
    "quire.core.request": ("Completion", "FinishReason", "Piece", "RequestOutput"),
    "quire.core.sampling": ("Constraint", "SamplingParams"),
    "quire.engine.aio": ("AsyncEngine",),
    "quire.engine.engine": ("Engine",),
    "quire.llm": ("LLM", "AsyncLLM", "TextScore", "TextStream"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name, imported when first used: the command line starts without numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF.get(name, "quire.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
