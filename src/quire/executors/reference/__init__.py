"""The reference executor: numpy float32, a row at a time; what all other executors are held to."""

from quire.executors.reference.executor import ReferenceExecutor

__all__ = ["ReferenceExecutor"]
