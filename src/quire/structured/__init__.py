"""Structured output: completions held to a JSON schema, a pattern, a choice or a grammar, by masks
that llguidance computes."""

from quire.structured.compiled import PreparedGrammar
from quire.structured.grammars import Grammars

__all__ = ["Grammars", "PreparedGrammar"]
