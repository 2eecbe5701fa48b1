"""Throughput: the same load several times over a loaded model, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.errors import ConfigError
from quire_bench.machine_info import PeakMemory
from quire_bench.measure import Load, Run, percentiles, run_load, run_phases, spread
from quire_bench.receipts import Facts, Limits, thinned
from quire_bench.subject import Subject
from quire_bench.utilisation import Cost, achieved, limits_of, shares

_WARM_UP_TOKENS = 2

OnRun = Callable[[str], None]  # called with the run that begins


@dataclass(frozen=True, slots=True)
class Figures:
    """Samples and results as a receipt holds them."""

    samples: dict[str, list[float]]
    results: Facts


def check_load(load: Load, repeats: int, max_context: int) -> None:
    """Refuse what cannot be measured, before anything is loaded or run."""
    least = {"requests": load.num_requests, "prompt-tokens": load.prompt_tokens}
    least |= {"new-tokens": load.new_tokens, "repeats": repeats}
    if load.concurrency is not None:
        least["concurrency"] = load.concurrency
    for name, value in least.items():
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if load.prompt_tokens + load.new_tokens > max_context:
        raise ConfigError(
            f"--prompt-tokens {load.prompt_tokens} and --new-tokens {load.new_tokens} come to more "
            f"than the {max_context} tokens of context that the model and its cache hold"
        )


def warm_up(subject: Subject, load: Load, seed: int) -> None:
    """Let the first requests wait for whatever is done but once."""
    subject.assembly.executor.warm_up()
    tokens = min(_WARM_UP_TOKENS, load.new_tokens)
    run_load(subject.assembly, Load(min(2, load.num_requests), load.prompt_tokens, tokens), seed)


def measure_throughput(
    subject: Subject,
    load: Load,
    *,
    repeats: int,
    seed: int,
    limits: Limits | None = None,
    in_phases: bool = False,
    on_run: OnRun = lambda _: None,
) -> Figures:
    """Run the load so many times, each with prompts of its own, after a run that is not counted.

    `in_phases`: prompts first, then completions, all of them together (see run_phases).
    """
    check_load(load, repeats, subject.assembly.executor.capacity.max_context)
    warm_up(subject, load, seed)
    device = subject.assembly.options.device
    peak = PeakMemory(device)
    run_once = run_phases if in_phases else run_load
    runs = []
    for repeat in range(repeats):
        on_run(f"run {repeat + 1}")
        runs.append(run_once(subject.assembly, load, seed + 1 + repeat))
    samples = _samples(runs)
    memory = {
        **{f"{kind}_bytes": size for kind, size in subject.assembly.executor.memory_bytes.items()},
        **peak.as_data(),
    }
    rates = _median_of([achieved(Cost.of(subject), run) for run in runs])
    bounds = limits_of(device, limits)
    results = {
        **_results(runs, samples),
        "memory": memory,
        "achieved": rates,
        "utilisation": None if bounds is None else shares(rates, bounds),
    }
    return Figures(samples, results)


def _samples(runs: Sequence[Run]) -> dict[str, list[float]]:
    rates: dict[str, Sequence[float | None]] = {
        "prompt_tokens_per_second": [run.prompt_rate for run in runs],
        "completion_tokens_per_second": [run.completion_rate for run in runs],
        "output_tokens_per_second": [run.output_rate for run in runs],
        "total_tokens_per_second": [run.total_rate for run in runs],
    }
    known = {name: [v for v in values if v is not None] for name, values in rates.items()}
    return {
        "run_s": [run.seconds for run in runs],
        **known,
        "time_to_first_token_s": thinned(_every(runs, "first_token_s")),
        "inter_token_s": thinned(_every(runs, "inter_token_s")),
    }


def _every(runs: Sequence[Run], name: str) -> list[float]:
    return [value for run in runs for value in getattr(run, name)]


def _results(runs: Sequence[Run], samples: Mapping[str, Sequence[float]]) -> dict[str, object]:
    per_run = [name for name in samples if name == "run_s" or name.endswith("_per_second")]
    spreads = {name: spread(samples[name]) for name in per_run}
    busy = [run.busy_s / run.seconds for run in runs]
    histogram: dict[str, int] = {}
    for run in runs:
        for size, count in run.batch_histogram.items():
            histogram[size] = histogram.get(size, 0) + count
    return {
        **{name: found and found["median"] for name, found in spreads.items()},
        "spread": spreads,
        "time_to_first_token_s": percentiles(_every(runs, "first_token_s")),
        "inter_token_s": percentiles(_every(runs, "inter_token_s")),
        "executor_busy_share": float(np.median(busy)),
        "batch_histogram": dict(sorted(histogram.items(), key=lambda item: int(item[0]))),
    }


def _median_of(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The median of each of the runs' figures; None where no run has any."""
    medians: dict[str, float | None] = {}
    for name in runs[0]:
        known = [value for run in runs if (value := run[name]) is not None]
        medians[name] = float(np.median(known)) if known else None
    return medians
