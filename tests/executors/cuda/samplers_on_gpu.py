"""Compares the device's sampler with the reference on random rows, and times it, on a GPU:

python -m tests.executors.cuda.samplers_on_gpu [--cases 10000] [--device cuda]
"""

import argparse
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from tests.executors.sampler_cases import make_case

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


def reference(given: tuple[int, int]) -> int | None:
    case = make_case(given[0], given[1], bans=False)
    try:
        return sample(*case).token
    except RowFaultError:
        return None


def disagreeing(numbers: range, vocabulary: int, device: str, in_order: Callable[..., Any]) -> int:
    """How many rows of these cases have another token, or a fault where the other has none."""
    wanted: Iterable[int | None] = in_order(reference, [(n, vocabulary) for n in numbers])
    found: list[int | None] = []
    for start in range(0, len(numbers), BATCH):
        cases = [make_case(n, vocabulary, bans=False) for n in numbers[start : start + BATCH]]
        rows = [SampleRow(c.sampling, c.position, c.history, None, c.allowed) for c in cases]
        logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(device)
        tokens, status = sampling.choose(logits, rows, torch.zeros(1, device=device))
        ok = (status == FINITE).tolist()
        found += [token if fine else None for token, fine in zip(tokens.tolist(), ok, strict=True)]
    return sum(one != other for one, other in zip(found, wanted, strict=True))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--large-cases", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=BATCH)
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:

        def in_order(function: Callable[..., Any], given: Iterable[Any]) -> Any:
            return pool.map(function, given, chunksize=16)

        for count, size in ((args.cases, SMALL), (args.large_cases, LARGE)):
            started = time.perf_counter()
            wrong = disagreeing(range(count), size, args.device, in_order)
            took = time.perf_counter() - started
            print(f"{size} logits: {wrong} of {count} rows differ ({took:.1f} s)", flush=True)
    for name, values in TIMED.items():
        print(f"{name}: {milliseconds(values, args.device, args.rows):.2f} ms for {args.rows} rows")


if __name__ == "__main__":
    main()
