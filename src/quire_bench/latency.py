"""Latency: time to the first token and between tokens, alone and beside others."""

from quire_bench.measure import Load, percentiles, run_load
from quire_bench.receipts import thinned
from quire_bench.subject import Subject
from quire_bench.throughput import Figures, OnRun, check_load, warm_up


def measure_latency(
    subject: Subject, load: Load, *, repeats: int, seed: int, on_run: OnRun = lambda _: None
) -> Figures:
    """The load one request at a time, then with `concurrency` of them always with the engine."""
    check_load(load, repeats, subject.assembly.executor.capacity.max_context)
    warm_up(subject, load, seed)
    samples: dict[str, list[float]] = {}
    results: dict[str, object] = {}
    for name, concurrency in (("alone", 1), ("together", load.concurrency)):
        asked = load._replace(concurrency=concurrency)
        runs = []
        for repeat in range(repeats):
            on_run(f"{concurrency} at a time, run {repeat + 1}")
            runs.append(run_load(subject.assembly, asked, seed + 1 + repeat))
        first = [value for run in runs for value in run.first_token_s]
        between = [value for run in runs for value in run.inter_token_s]
        samples[f"{name}_time_to_first_token_s"] = thinned(first)
        samples[f"{name}_inter_token_s"] = thinned(between)
        results[name] = {
            "concurrency": concurrency,
            "time_to_first_token_s": percentiles(first),
            "inter_token_s": percentiles(between),
        }
    return Figures(samples, results)
