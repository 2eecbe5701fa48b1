"""Log-probabilities as OpenAI's two APIs write them.

They are written as JSON one token at a time: an answer can have a hundred thousand of them, and one
call that writes them all would hold the interpreter for as long.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from quire.core.plan import TokenLogprob
from quire.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


class TextScores(NamedTuple):
    """CompletionLogprobs as JSON, and how many characters their tokens have together."""

    json: str
    num_characters: int


class ScoreWriter:
    """Spells tokens; a model without a tokenizer has their numbers alone."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._spelling = cache(self._spelling_of)

    def for_chat(self, scores: Sequence[TokenLogprob]) -> str:
        """ChatLogprobs as JSON."""
        content = ",".join([self._score(score) for score in scores])
        return f'{{"content":[{content}],"refusal":null}}'

    def for_text(self, scores: Sequence[TokenLogprob], offset: int = 0) -> TextScores:
        """`offset`: characters of the completion before the first of these tokens."""
        tokens = [self._text(score.token) for score in scores]
        offsets = []
        start = offset
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        logprobs = ",".join([repr(_finite(score.logprob)) for score in scores])
        tops = ",".join([self._top_by_text(score) for score in scores])
        written = (
            f'{{"tokens":{json.dumps(tokens)},"token_logprobs":[{logprobs}],'
            f'"top_logprobs":[{tops}],"text_offset":{json.dumps(offsets)}}}'
        )
        return TextScores(written, offset - start)

    def _score(self, score: TokenLogprob) -> str:
        top = ",".join([f"{self._entry(token, logprob)}}}" for token, logprob in score.top])
        return f'{self._entry(score.token, score.logprob)},"top_logprobs":[{top}]}}'

    def _entry(self, token: int, logprob: float) -> str:
        """A TopLogprob as JSON, without its end."""
        return f'{self._spelling(token)},"logprob":{_finite(logprob)!r}'

    def _spelling_of(self, token: int) -> str:
        spelled = json.dumps(self._bytes(token))
        return f'{{"token":{json.dumps(self._text(token))},"bytes":{spelled}'

    def _top_by_text(self, score: TokenLogprob) -> str:
        """By their texts, of which two tokens may have the same: the likelier one stays."""
        found = {self._text(token): _finite(logprob) for token, logprob in score.top}
        return json.dumps(found)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
