"""The engine in a process of its own: the worker, the channel to it, and the model as a server sees
it from outside. A worker that dies is replaced, and every request goes on where it was."""

from quire.worker.remote_llm import RemoteLLM

__all__ = ["RemoteLLM"]
