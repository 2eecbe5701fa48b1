"""Compares the device's sampler with the reference on random rows, and times it, on a GPU:

python -m tests.executors.cuda.samplers_on_gpu [--cases 10000] [--device cuda]
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from tests.executors.sampler_cases import Case, make_case

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling
from quire.core.sampling import SamplingParams
from quire.executors.cuda import sampling
from quire.executors.cuda.kernels.layers import FINITE
from quire.executors.cuda.sampling import SampleRow
from quire.executors.sampler import sample

SMALL, LARGE = 300, 128_256
BATCH = 64
TIMED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "typical_p": {"typical_p": 0.9},
    "xtc": {"xtc_probability": 0.5},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    "llama.cpp's order": {
        "samplers": "edskypmxt",
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "temperature": 0.8,
        "typical_p": 0.95,
        "top_n_sigma": 2.0,
        "xtc_probability": 0.5,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": (),
        "repetition_penalty": 1.1,
        "repeat_last_n": 64,
    },
}


def reference(case: Case) -> int | None:
    try:
        return sample(*case).token
    except RowFaultError:
        return None


def disagreeing(numbers: range, vocabulary: int, device: str) -> int:
    """How many rows of these cases have another token, or a fault where the other has none."""
    cases = [make_case(number, vocabulary, bans=False) for number in numbers]
    rows = [SampleRow(c.sampling, c.position, c.history, None, c.allowed) for c in cases]
    logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(device)
    tokens, status = sampling.choose(logits, rows, torch.zeros(1, device=device))
    is_fine = (status == FINITE).tolist()
    found = [token if fine else None for token, fine in zip(tokens.tolist(), is_fine, strict=True)]
    return sum(one != reference(case) for one, case in zip(found, cases, strict=True))


def milliseconds(values: dict[str, Any], device: str, num_rows: int) -> float:
    params = SamplingParams.from_mapping(values)
    history = None
    if params.needs_history:
        tokens = np.random.default_rng(3).integers(0, 1000, 400).tolist()
        history = History(tuple(tokens[:300]), tuple(tokens[300:]))
    rows = [SampleRow(Sampling(params, n, 0), 9, history) for n in range(num_rows)]
    logits = torch.from_numpy(
        np.random.default_rng(1).normal(0.0, 3.0, (num_rows, LARGE)).astype(np.float32)
    ).to(device)
    samples = torch.zeros(1, device=device)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        sampling.choose(logits, rows, samples)[0].tolist()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def compare(first: int, count: int, vocabulary: int, device: str) -> None:
    wrong = 0
    for start in range(first, first + count, BATCH):
        numbers = range(start, min(start + BATCH, first + count))
        wrong += disagreeing(numbers, vocabulary, device)
        done = numbers.stop - first
        print(f"{vocabulary} logits: {wrong} of {done} rows differ, from case {first}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--large-cases", type=int, default=64)
    parser.add_argument("--times", type=int, default=0, metavar="ROWS", help="only measure times")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if not args.times:
        compare(args.first, args.large_cases, LARGE, args.device)
        compare(args.first, args.cases, SMALL, args.device)
    for name, values in TIMED.items() if args.times else ():
        print(f"{name}: {milliseconds(values, args.device, args.times):.2f} ms, {args.times} rows")


if __name__ == "__main__":
    main()
