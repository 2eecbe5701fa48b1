"""What a model makes of a text beside writing on: its score and its embedding.

A TextScore comes from the log-probabilities of the text's tokens. An embedding is the hidden state
after the last token and the final norm, scaled to length 1: fit to compare texts roughly, and no
match for a model trained to embed.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import RequestError
from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.llm.prompts import Prompt, listed_prompts

SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class TextScore(NamedTuple):
    """The log-probability of each token of a text, given all before it."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """Of the whole text: the sum."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The inverse of the tokens' mean probability, by the geometric mean; lower is likelier."""
        return math.exp(-self.logprob / len(self.logprobs))


def paired(
    prompts: Prompt | Iterable[Prompt], completions: Prompt | Iterable[Prompt] | None
) -> list[tuple[Prompt, Prompt | None]]:
    """Each prompt with its completion; one prompt goes with all of them."""
    firsts = listed_prompts(prompts)
    if completions is None:
        return [(prompt, None) for prompt in firsts]
    seconds = listed_prompts(completions)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"there are {len(firsts)} prompts but {len(seconds)} completions: give one for each, "
            "or one prompt for all",
            param="completions",
        )
    return list(zip(firsts, seconds, strict=True))


def score_of(output: RequestOutput, start: int) -> TextScore:
    """Of the prompt's tokens from `start` on, of which the first one has no log-probability."""
    found = output.prompt_logprobs or []
    scores = found[start - 1 :]
    if not scores:
        raise RequestError("a text of one token has nothing to score", param="prompts")
    return TextScore([score.token for score in scores], [score.logprob for score in scores])


# ---- embeddings


Vectors = npt.NDArray[np.float32]  # [prompts, hidden], or one of them

NO_TOKENS = SamplingParams(max_tokens=1)  # the least there is; pooling samples nothing


def unit_vector(pooled: Any) -> Vectors:
    """A pooled state at length 1; one of zeros as it is."""
    state = np.asarray(pooled, np.float64)
    length = float(np.linalg.norm(state))
    return (state / length if length > 0 else state).astype(np.float32)
