"""LLM and AsyncLLM: a model, an executor and an engine wired together."""

from quire.llm.forward import TextScore
from quire.llm.offline import LLM, TextStream
from quire.llm.online import AsyncLLM, OnlineModel

__all__ = ["LLM", "AsyncLLM", "OnlineModel", "TextScore", "TextStream"]
