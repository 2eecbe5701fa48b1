"""quire runs many text-generation requests through one language model together."""

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

__all__ = [
    "AsyncEngine",
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
    "UnsupportedModelError",
]
