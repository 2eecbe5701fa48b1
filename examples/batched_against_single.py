"""What batching is worth, and that it changes nothing: the same prompts one by one and together.

    python examples/batched_against_single.py [MODEL]

MODEL is a model file or a name; left out, the default model. Each request is sampled with a seed of
its own. Its tokens must be the same alone, in any batch, beside a request that fails and beside one
that is cancelled: where they are not, this ends with status 1.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire import LLM, AsyncLLM, BatchProcessor, QuireError, RequestOutput, SamplingParams

COUNTS = (1, 4, 16, 64)
NUM_TOKENS = 32  # of each request
NUM_BESIDE = 16  # requests with one that fails or is cancelled among them
NUM_TOKENS_BESIDE = 6
CANCELLED_AFTER = 8
POISONED = 5  # the request that fails
OPENINGS = ("Once upon a time", "I remember", "Nobody knew", "In the year of", "The history of")
SUBJECTS = ("the sea", "a hill", "the moon", "an old house", "rain", "bread", "a train", "winter")
PROMPTS = [
    f"{OPENINGS[index % len(OPENINGS)]} {SUBJECTS[index % len(SUBJECTS)]}, chapter {index}:"
    for index in range(max(COUNTS))
]
Tokens = list[list[int]]  # of each request


def params(index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=index, ignore_eos=True)


def yes(is_true: bool) -> str:
    return "yes" if is_true else "no"


# ---- one by one and together


class Run(NamedTuple):
    tokens: Tokens
    tokens_per_second: float  # of all requests
    ms_per_token: float  # from one token of a request to its next, the median request


def run_of(outputs: Sequence[RequestOutput], seconds: float) -> Run:
    tokens = [list(output.token_ids) for output in outputs]
    return Run(tokens, sum(map(len, tokens)) / seconds, median(map(ms_per_token, outputs)))


def ms_per_token(output: RequestOutput) -> float:
    first, last = output.metrics.first_token_at, output.metrics.finished_at
    assert first is not None and last is not None
    return 1000 * (last - first) / (len(output.token_ids) - 1)


def one_by_one(llm: LLM, count: int) -> Run:
    started = time.perf_counter()
    outputs = [llm.generate(PROMPTS[index], params(index))[0] for index in range(count)]
    return run_of(outputs, time.perf_counter() - started)


def together(llm: LLM, count: int) -> Run:
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS[:count], [params(index) for index in range(count)])
    return run_of(outputs, time.perf_counter() - started)


def compare(llm: LLM, count: int) -> tuple[Tokens, bool]:
    """A line of the table; the tokens of every request alone, and whether they are the same."""
    alone, batched = one_by_one(llm, count), together(llm, count)
    factor = batched.tokens_per_second / alone.tokens_per_second
    rates = [f"{run.tokens_per_second:10.0f} {run.ms_per_token:9.1f}" for run in (alone, batched)]
    is_same = alone.tokens == batched.tokens
    print(f"{count:7} {rates[0]} {rates[1]} {factor:7.1f}x   same tokens: {yes(is_same)}")
    return alone.tokens, is_same


# ---- one that fails


async def beside_a_poisoned_one(llm: LLM, prompts: Tokens, alone: Tokens) -> bool:
    """Dynamic batching over a function of one's own, which raises for every batch that has the
    poisoned request in it. Such a batch is run again in halves until that request is alone."""
    num_calls = 0

    def forward(tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        nonlocal num_calls
        num_calls += 1
        rows = [row[is_real].tolist() for row, is_real in zip(tokens, mask, strict=True)]
        if any(row[: len(prompts[POISONED])] == prompts[POISONED] for row in rows):
            raise ValueError("a poisoned row")
        return np.stack([logits[-1] for logits in llm.forward_batch(rows)])

    async with BatchProcessor(forward, max_batch_size=NUM_BESIDE, batch_timeout_ms=50) as batcher:
        results = await asyncio.gather(
            *[
                batcher.generate(prompts[index], params(index, NUM_TOKENS_BESIDE))
                for index in range(NUM_BESIDE)
            ],
            return_exceptions=True,
        )
    failed = [index for index, result in enumerate(results) if isinstance(result, QuireError)]
    others = [index for index in range(NUM_BESIDE) if index != POISONED]
    is_same = all(results[index] == alone[index][:NUM_TOKENS_BESIDE] for index in others)
    print(f"\none of {NUM_BESIDE} requests is poisoned, and every batch with it raises")
    for index in failed:
        print(f"  request {index} failed: {results[index]}")
    print(f"  the {len(others)} beside it, in {num_calls} calls, same tokens: {yes(is_same)}")
    return is_same and failed == [POISONED]


# ---- one that is cancelled


async def beside_a_cancelled_one(model: str, alone: Tokens) -> bool:
    async with AsyncLLM(model) as llm:
        others = range(1, NUM_BESIDE)
        tasks = [
            asyncio.create_task(llm.generate(PROMPTS[index], params(index))) for index in others
        ]
        received: list[int] = []
        async for piece in llm.stream(PROMPTS[0], params(0)):
            received += piece.token_ids
            if len(received) >= CANCELLED_AFTER:
                break  # leaving the loop ends the request
        outputs = await asyncio.gather(*tasks)
        ended = llm.stats.stats.requests_ended
    is_same = [output.token_ids for output in outputs] == [alone[index] for index in others]
    is_same &= received == alone[0][: len(received)]
    counts = ", ".join(f"{count} {status}" for status, count in sorted(ended.items()))
    print(f"\none of {NUM_BESIDE} requests is cancelled after {len(received)} tokens: {counts}")
    print(f"  the {len(others)} beside it, same tokens: {yes(is_same)}")
    return is_same and ended.get("cancelled") == 1


def main(model: str) -> int:
    # Without prefix reuse: the second run of a prompt must not be cheaper than the first.
    with LLM(model, prefix_reuse=False) as llm:
        print(f"{model}, {NUM_TOKENS} tokens for each prompt")
        print(f"{'':7} {'one by one':^20} {'together':^20}")
        print("prompts   tokens/s  ms/token   tokens/s  ms/token   factor")
        llm.generate(PROMPTS[:2], params(0))  # the first run waits for memory
        lines = [compare(llm, count) for count in COUNTS]
        alone, _ = lines[-1]
        are_same = [is_same for _, is_same in lines]
        prompts = [llm.tokenize(prompt) for prompt in PROMPTS[:NUM_BESIDE]]
        are_same.append(asyncio.run(beside_a_poisoned_one(llm, prompts, alone)))
    are_same.append(asyncio.run(beside_a_cancelled_one(model, alone)))
    return 0 if all(are_same) else 1


if __name__ == "__main__":
    logging.getLogger("quire").setLevel(logging.ERROR)  # it warns of the batch that fails, too
    sys.exit(main(*sys.argv[1:2] or ["smollm2"]))
