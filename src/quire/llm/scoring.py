"""TextScore: how likely a model finds a text, from the log-probabilities of its tokens."""

import math
from collections.abc import Iterable
from typing import NamedTuple

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
