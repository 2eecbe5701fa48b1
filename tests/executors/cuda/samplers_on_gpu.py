"""Compares the device's sampler with the reference on random rows, and times it, on a GPU:

python -m tests.executors.cuda.samplers_on_gpu [--cases 10000] [--device cuda]
python -m tests.executors.cuda.samplers_on_gpu --times 1,16,64,256 --vocabulary 128256
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from tests.executors.sampler_cases import Case, make_case, without_chain

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, SequencePlan, Want
from quire.core.sampling import SamplingParams
from quire.executors.cuda.chain import SampleRow
from quire.executors.cuda.kernels.layers import FINITE
from quire.executors.cuda.sampling import Sampler, SampleRequest, Tile, wants_argmax
from quire.executors.sampler import Choice, sample

SMALL, LARGE = 300, 128_256
BATCH = 64
SMALL_TILE = Tile(64, 8, 16)  # so that a small vocabulary has chunks, and lists that are too short
TIMED: dict[str, dict[str, Any]] = {
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 0.5},
    "temperature": {"temperature": 1.0},
    "top-k 50, top-p": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "min-p": {"min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 0.8, "top_k": 50, "logprobs": 5},
    "typical_p": {"typical_p": 0.9},
}


def plan_of(row: SampleRow, sequence_id: int) -> SequencePlan:
    how, position, history, pending, allowed = row
    return SequencePlan(
        sequence_id,
        start=position,
        tokens=(),
        follows=None if pending is None else 1,
        block_table=(0,),
        want=Want.SAMPLE,
        sampling=how,
        completion_position=position,
        history=history,
        allowed=allowed,
    )


class Samplers:
    """A sampler over random logits."""

    def __init__(self, num_rows: int, vocabulary: int, device: str, tile: Tile | None = None):
        self.logits = torch.zeros((num_rows, vocabulary), device=device)
        self.samples = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.sampled = torch.zeros((num_rows, 2), dtype=torch.int32, device=device)
        self.sampler = Sampler(self.logits, self.samples, self.sampled, tile)

    def run(self, rows: list[SampleRow]) -> None:
        """As the executor does, whose head has taken the argmax of rows that want no more."""
        plans = [plan_of(row, at) for at, row in enumerate(rows)]
        argmaxes = [
            SampleRequest(at, at, rows[at]) for at, plan in enumerate(plans) if wants_argmax(plan)
        ]
        if argmaxes:
            assert not self.sampler.sample(argmaxes, len(rows))
        sources = [-1 if row.pending is None else row.pending for row in rows]
        assert not self.sampler.sample_plans(plans, sources, range(len(rows))).faults


def reference(case: Case) -> Choice | None:
    try:
        return sample(*case)
    except RowFaultError:
        return None


def disagreeing(cases: list[Case], samplers: Samplers) -> list[int]:
    """The places of rows that have another token, other scores, or a fault where the other has
    none."""
    samplers.logits[: len(cases)] = torch.from_numpy(np.stack([case.logits for case in cases]))
    samplers.run([SampleRow(c.sampling, c.position, c.history, None, c.allowed) for c in cases])
    found = samplers.sampled.tolist()
    scores = samplers.sampler.scores_on_host(len(cases))
    if samplers.logits.is_cuda:
        torch.cuda.synchronize()
    wrong = []
    for at, case in enumerate(cases):
        wanted = reference(case)
        token, status = found[at]
        if wanted is None or status != FINITE:
            is_right = wanted is None and status != FINITE
        else:
            is_right = token == wanted.token
            if wanted.logprob is not None:
                _, rank, top = scores.of(at, 3)
                is_right &= rank == wanted.logprob.rank
                is_right &= [t for t, _ in top] == [t for t, _ in wanted.logprob.top]
        if not is_right:
            wrong.append(at)
    return wrong


def compare(first: int, count: int, vocabulary: int, device: str, tile: Tile | None) -> None:
    """Of four cases three are made plain, so that the kernels have them."""
    samplers = Samplers(BATCH, vocabulary, device, tile)
    wrong: list[int] = []
    done = 0
    for start in range(first, first + count, BATCH):
        numbers = range(start, min(start + BATCH, first + count))
        cases = [make_case(number, vocabulary, bans=False) for number in numbers]
        cases = [case if at % 4 == 0 else without_chain(case) for at, case in enumerate(cases)]
        wrong += [start + at for at in disagreeing(cases, samplers)]
        done += len(cases)
    print(f"{vocabulary} logits: {len(wrong)} of {done} rows differ {wrong[:9]}", flush=True)


def microseconds(values: dict[str, Any], samplers: Samplers, num_rows: int) -> tuple[float, float]:
    """Of the device, and of the host until it has submitted."""
    params = SamplingParams.from_mapping(values)
    prompt = tuple(np.random.default_rng(3).integers(0, 1000, 400).tolist())
    hows = [Sampling(params, seed, 0) for seed in range(num_rows)]
    events, host = [], []
    for step in range(12):
        history = History(prompt, prompt[:step]) if params.needs_history else None
        rows = [SampleRow(how, step, history) for how in hows]
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # so that the host is ahead, as it is of a step's layers
        begun.record()
        started = time.perf_counter()
        samplers.run(rows)
        host.append(time.perf_counter() - started)
        done.record()
        torch.cuda.synchronize()
        events.append(begun.elapsed_time(done))
    return sorted(events[2:])[5] * 1e3, sorted(host[2:])[5] * 1e6


def measure(counts: list[int], vocabulary: int, spread: float) -> None:
    samplers = Samplers(max(counts), vocabulary, "cuda")
    samplers.logits.normal_(0.0, spread, generator=torch.Generator("cuda").manual_seed(1))
    stream = torch.cuda.Stream()

    def captured(run: Any) -> Any:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return graph

    with torch.cuda.stream(stream):
        samplers.sampler.capture(counts, captured)
        for name, values in TIMED.items():
            if "typical_p" in values and max(counts) > 64:
                continue
            for count in counts:
                device, host = microseconds(values, samplers, count)
                print(
                    f"{vocabulary} spread {spread} {name}: N={count} {device:.0f} us, "
                    f"host {host:.0f} us",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--large-cases", type=int, default=64)
    parser.add_argument("--times", default="", metavar="ROWS,...", help="only measure times")
    parser.add_argument("--vocabulary", type=int, default=LARGE)
    parser.add_argument("--spread", type=float, default=3.0, help="of the logits that are timed")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.times:
        measure([int(count) for count in args.times.split(",")], args.vocabulary, args.spread)
        return
    compare(args.first, args.large_cases, LARGE, args.device, None)
    compare(args.first, args.cases // 2, SMALL, args.device, SMALL_TILE)
    compare(args.first + args.cases // 2, args.cases // 2, SMALL, args.device, None)


if __name__ == "__main__":
    main()
