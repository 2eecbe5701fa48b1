"""Log-probabilities as OpenAI's two APIs write them."""

from collections.abc import Sequence

from quire.core.plan import TokenLogprob
from quire.server.replies import ChatLogprobs, CompletionLogprobs, TokenScore, TopLogprob
from quire.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


class ScoreWriter:
    """Spells tokens; a model without a tokenizer has their numbers alone."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def for_chat(self, scores: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._score(score) for score in scores])

    def for_text(self, scores: Sequence[TokenLogprob], offset: int = 0) -> CompletionLogprobs:
        """`offset`: characters of the completion before the first of these tokens."""
        tokens = [self._text(score.token) for score in scores]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(score.logprob) for score in scores],
            top_logprobs=[
                {self._text(token): _finite(logprob) for token, logprob in score.top}
                for score in scores
            ],
            text_offset=offsets,
        )

    def _score(self, score: TokenLogprob) -> TokenScore:
        return TokenScore(
            token=self._text(score.token),
            logprob=_finite(score.logprob),
            bytes=self._bytes(score.token),
            top_logprobs=[
                TopLogprob(
                    token=self._text(token), logprob=_finite(logprob), bytes=self._bytes(token)
                )
                for token, logprob in score.top
            ],
        )

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
