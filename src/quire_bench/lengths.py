"""How long prompts and completions of a load are: mixes shaped like real traffic, and their text.

A mix is a pair of log-normal distributions, because real lengths are skewed that way: most are
short, a few are very long. Means and medians are published ones; the spread (sigma) is ours.

    instruct      Alpaca: prompts of mean 19, completions of mean 58 (figures of the vLLM paper)
    chat          ShareGPT: mean 161 and 338 (the same paper)
    conversation  Azure's trace of 2023: median 1020 and 129 (figures of the Splitwise paper)
    code          the same trace's coding half: median 1500 and 13

The server's tokenizer is unknown here, so a prompt of n tokens is n short, common English words,
which most vocabularies hold whole; receipts give the count that the server reports.
"""

import math
from dataclasses import dataclass
from random import Random

from quire.core.errors import ConfigError

# Common words of one token in usual vocabularies (with the blank before them).
_TEXT = (
    "the of and to in is was for that with his they this have from one had word but not what all "
    "were when your can said there use each which how their will other about out many then them "
    "these some her would make like him into time has look two more write see number way could "
    "people than first water been call who now find long down day did get come made may part over "
    "new sound take only little work know place year live back give most very after thing our just "
    "name good sentence man think say great where help through much before line right too mean old "
    "any same tell boy follow came want show also around form three small set put end does another "
    "well large must big even such because turn here why ask went men read need land different home"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, in tokens: log-normal, or equally likely within a spread."""

    median: float
    sigma: float = 0.0
    spread: int = 0

    def draw(self, rng: Random, scale: float, limit: int) -> int:
        if self.spread:
            drawn = self.median + rng.randint(-self.spread, self.spread)
        else:
            drawn = scale * self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return max(1, min(limit, round(drawn)))


def _of_mean(mean: float, sigma: float) -> Lengths:
    return Lengths(mean / math.exp(sigma * sigma / 2), sigma)


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of prompts and completions."""

    prompt: Lengths
    new: Lengths

    def scaled_draw(self, rng: Random, bounds: "Bounds") -> tuple[int, int]:
        return (
            self.prompt.draw(rng, bounds.scale, bounds.max_prompt_tokens),
            self.new.draw(rng, bounds.scale, bounds.max_new_tokens),
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a mix is scaled by and cut to, for models with a short context and slow machines."""

    scale: float = 1.0
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 100:
            raise ConfigError(f"--scale must be above 0 and at most 100, got {self.scale}")
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


MIXES = {
    "instruct": Mix(_of_mean(19.0, 0.8), _of_mean(58.0, 0.8)),
    "chat": Mix(_of_mean(161.0, 1.1), _of_mean(338.0, 0.9)),
    "conversation": Mix(Lengths(1020.0, 1.0), Lengths(129.0, 0.9)),
    "code": Mix(Lengths(1500.0, 0.9), Lengths(13.0, 1.1)),
}


def fixed(prompt_tokens: int, new_tokens: int, prompt_spread: int = 0) -> Mix:
    """Every request of the same lengths, but for prompts shorter or longer by the spread."""
    if prompt_tokens < 1 or new_tokens < 1:
        raise ConfigError(f"lengths must be at least 1, got {prompt_tokens} and {new_tokens}")
    if not 0 <= prompt_spread < prompt_tokens:
        raise ConfigError(
            f"--prompt-spread must be from 0 to below --prompt-tokens ({prompt_tokens}), "
            f"got {prompt_spread}"
        )
    return Mix(Lengths(prompt_tokens, spread=prompt_spread), Lengths(new_tokens))


def prompt_text(rng: Random, num_tokens: int) -> str:
    """Words drawn at random, so that no prefix cache answers for the model."""
    return " ".join(rng.choices(_WORDS, k=num_tokens))
