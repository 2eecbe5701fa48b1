"""LLM and AsyncLLM: a model, an executor and an engine wired together."""

from quire.llm.offline import LLM, TextStream
from quire.llm.online import AsyncLLM
from quire.llm.scoring import TextScore

__all__ = ["LLM", "AsyncLLM", "TextScore", "TextStream"]
