"""Random walks through grammars, as a model without preferences would take them."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.core.sampling import Constraint, SamplingParams
from quire.structured import Grammars
from quire.structured.grammars import MatcherGrammar
from quire.tokenizer import Tokenizer


class Walk(NamedTuple):
    tokens: list[int]
    is_complete: bool
    masks: list[bytes]


def grammars_of(
    tokenizer: Tokenizer, ends: Sequence[int] | None = None, padding: int = 0
) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocabulary_size + padding, tokenizer.end_token_ids)


def mask_of(grammars: Grammars, grammar: MatcherGrammar) -> bytes:
    allowed = grammar.allowed()
    grammars.start_masks()
    return allowed if isinstance(allowed, bytes) else allowed.result()


def tokens_in(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def walk(
    grammars: Grammars,
    params: SamplingParams | Constraint,
    ends: Sequence[int],
    seed: int = 0,
    max_tokens: int = 400,
) -> Walk:
    """Follow random allowed tokens, preferring the end, until it is reached."""
    if isinstance(params, Constraint):
        params = SamplingParams(structured=params)
    draw = random.Random(seed)
    grammar = grammars(params)
    tokens: list[int] = []
    masks: list[bytes] = []
    while not grammar.is_complete and len(tokens) < max_tokens:
        mask = mask_of(grammars, grammar)
        masks.append(mask)
        found = tokens_in(mask)
        assert found, grammar.failure
        if set(found) & set(ends):
            return Walk(tokens, True, masks)
        token = draw.choice(found)
        grammar.accept(token)
        tokens.append(token)
    return Walk(tokens, grammar.is_complete, masks)
