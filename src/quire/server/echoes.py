"""Prompts in answers: their text before the completion (`echo`), and their log-probabilities."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.plan import TokenLogprob
from quire.core.request import RequestOutput
from quire.llm.prompts import Prepared
from quire.server.replies import finite
from quire.tokenizer import Tokenizer


class Echo(NamedTuple):
    """A prompt's tokens as an answer lists them; the first has no log-probability."""

    first: int
    scores: Sequence[TokenLogprob]
    offsets: list[int]  # of each token in the text


def echoed(tokenizer: Tokenizer | None, prompt: Prepared) -> Prepared:
    """The prompt with the text that stands for it: what was given, or that of its tokens."""
    if prompt.text is not None:
        return prompt
    text = "" if tokenizer is None else "".join(_pieces(tokenizer, prompt.tokens))
    return prompt._replace(text=text)


def echo_of(tokenizer: Tokenizer | None, prompt: Prepared, output: RequestOutput) -> Echo | None:
    """None where the prompt was not scored."""
    if output.prompt_logprobs is None:
        return None
    offsets = [0] * len(prompt.tokens)
    if tokenizer is not None:
        offsets = _offsets(tokenizer, prompt.tokens, prompt.text or "")
    return Echo(prompt.tokens[0], output.prompt_logprobs, offsets)


def _pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token completes; control tokens by their names."""
    detokenizer = tokenizer.detokenizer(continuation=False)
    hidden = tokenizer.hidden_token_ids
    pieces = [
        tokenizer.token_text(token) if token in hidden else detokenizer.add(token)
        for token in tokens
    ]
    pieces[-1] += detokenizer.flush()
    return pieces


def _offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Where each token's text begins. Control tokens that were put around a text, such as at its
    beginning, have no place in it."""
    offsets = []
    at = 0
    for token, piece in zip(tokens, _pieces(tokenizer, tokens), strict=True):
        offsets.append(min(at, len(text)))
        if token not in tokenizer.hidden_token_ids or text.startswith(piece, at):
            at += len(piece)
    return offsets


def prompt_logprobs(tokenizer: Tokenizer | None, output: RequestOutput) -> str:
    """As JSON, in vLLM's form: null for the first token, then for each an object by token id: the
    token itself and the likeliest in its place."""
    written = ["null", *(_by_id(tokenizer, score) for score in output.prompt_logprobs or ())]
    return f"[{','.join(written)}]"


def _by_id(tokenizer: Tokenizer | None, score: TokenLogprob) -> str:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top, 1)}
    found = {score.token: (score.logprob, score.rank)} | ranked
    return json.dumps(
        {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": None if tokenizer is None else tokenizer.token_text(token),
            }
            for token, (logprob, rank) in found.items()
        }
    )
