"""Batch a model of your own: here a table of letter pairs, with no more than numpy.

BatchProcessor takes any function of (tokens, mask) that returns one row of logits for each
sequence. Requests that come while others run join them; each gets the tokens it would get alone.

    python examples/batch_your_own_model.py
"""

import asyncio
import logging

import numpy as np
from numpy.typing import NDArray

from quire import BatchProcessor, QuireError, SamplingParams

VERSE = (
    "the owl and the pussycat went to sea in a beautiful pea green boat they took some honey "
    "and plenty of money wrapped up in a five pound note the owl looked up to the stars above "
)
LETTERS = sorted(set(VERSE))
PAD = LETTERS.index(" ")


class PairModel:
    """How often each letter follows two others; forward() looks at the last two real tokens."""

    def __init__(self) -> None:
        size = len(LETTERS)
        counts = np.full((size, size, size), 0.001, np.float32)
        tokens = encode(VERSE)
        for before, last, following in zip(tokens, tokens[1:], tokens[2:], strict=False):
            counts[before, last, following] += 1.0
        self.logits = np.log(counts)
        self.batch_sizes: list[int] = []

    def forward(self, tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        """tokens [B, T], padded on the left; mask [B, T], true on real tokens -> logits [B, V]"""
        if mask.shape[1] < 2 or not mask[:, -2:].all():
            raise ValueError("this model wants two letters at least")
        self.batch_sizes.append(len(tokens))
        logits: NDArray[np.float32] = self.logits[tokens[:, -2], tokens[:, -1]]
        return logits


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


async def main() -> None:
    model = PairModel()
    async with BatchProcessor(model.forward, max_batch_size=8, pad_token=PAD) as batcher:
        letter = await batcher.process_request(encode("the ow"))
        print(f"after 'the ow' comes {decode([letter])!r}")

        prompts = ["the owl", "in a", "honey and", "they"]
        params = SamplingParams(max_tokens=24, temperature=0.6, seed=7)
        model.batch_sizes.clear()
        completions = await asyncio.gather(
            *[batcher.generate(encode(prompt), params) for prompt in prompts]
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            print(f"{prompt!r} goes on {decode(completion)!r}")
        num_tokens = sum(len(completion) for completion in completions)
        print(f"{num_tokens} tokens in {len(model.batch_sizes)} calls of forward")

        alone = await batcher.generate(encode(prompts[0]), params)
        print(f"the same alone: {alone == completions[0]}")

        # A step that fails is run again in halves: the request that causes it fails alone. The log
        # warns of it with the error's traceback, which is left out here.
        logging.getLogger("quire").setLevel(logging.ERROR)
        results = await asyncio.gather(
            batcher.process_request(encode("t")),
            batcher.process_request(encode("th")),
            return_exceptions=True,
        )
        for prompt, result in zip(["t", "th"], results, strict=True):
            if isinstance(result, QuireError):
                print(f"{prompt!r} failed: {result}")
            elif isinstance(result, int):
                print(f"{prompt!r} got {decode([result])!r}")


if __name__ == "__main__":
    asyncio.run(main())
