"""Loads with a question: convoy, neighbour, saturation and soak; and the plain load.

convoy      Do long prompts hold up short requests? The same short requests, at the same times,
            once alone and once while long prompts arrive.
neighbour   Does a key that floods hold up another? The same requests of one key, at the same times:
            alone, beside a key that keeps some requests running, and beside one that floods.
saturation  How much can it take? Poisson arrivals at rising rates. A step is past the knee when
            more than 1% of its requests fail, or when the median first-token time is more than
            KNEE_FACTOR times that of the lightest step. The knee is the last step before the
            first such one; two such steps in a row end the climb.
soak        Does it slow down or grow? A closed loop for a duration, cut into windows of equal
            length; drift is the Theil-Sen slope over the windows' figures, times the run's
            length, as a share of their median.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

from quire.core.errors import ConfigError
from quire_bench.lengths import Bounds, Mix, fixed
from quire_bench.load import (
    Load,
    Outcome,
    PlannedRequest,
    Target,
    closed_loop,
    draw_arrivals,
    draw_requests,
    open_loop,
)
from quire_bench.load_summary import LoadFigures, errors, figures, first_token_times, samples
from quire_bench.receipts import Facts

DEFAULT_RATES = {"convoy": 2.0, "neighbour": 1.0, "saturation": 1.0}  # where none is given
KNEE_FACTOR = 3.0
MAX_ERROR_SHARE = 0.01
NUM_WINDOWS = 10
MEMORY_INTERVAL_S = 0.5
LEAD_S = 2.0  # that a neighbour is there before the requests that are measured


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What to send; which fields count depends on the scenario."""

    mix: Mix
    bounds: Bounds
    seed: int = 0
    num_clients: int = 4
    num_requests: int = 8  # a client's
    rate: float | None = None  # requests a second; None: closed loop
    duration_s: float = 30.0
    long_rate: float = 0.5
    long_prompt_tokens: int = 2048
    rate_factor: float = 1.5
    max_steps: int = 12
    num_flooding: int = 128
    neighbour_key: str | None = None
    pid: int | None = None

    def __post_init__(self) -> None:
        for name, flag, limit in (
            ("num_clients", "--clients", 1),
            ("num_requests", "--requests", 1),
            ("long_prompt_tokens", "--long-prompt-tokens", 1),
            ("max_steps", "--max-steps", 2),
            ("num_flooding", "--flood", 1),
        ):
            if getattr(self, name) < limit:
                raise ConfigError(f"{flag} must be at least {limit}, got {getattr(self, name)}")
        for name, flag in (
            ("rate", "--rate"),
            ("duration_s", "--duration"),
            ("long_rate", "--long-rate"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e6:
                raise ConfigError(f"{flag} must be above 0, below a million, got {value}")
        if not 1 < self.rate_factor <= 10:
            raise ConfigError(f"--rate-factor must be above 1, at most 10, got {self.rate_factor}")


@dataclass(frozen=True, slots=True)
class Finding:
    """Results of a scenario: figures, samples and every outcome."""

    results: Facts
    samples: dict[str, list[float]]
    outcomes: list[Outcome]


class SaturationStep(LoadFigures):
    """One rate's load."""

    rate: float
    offered_tokens_per_second: float
    is_past_knee: bool


OnOutcome = Callable[[Outcome], None]


async def plain(target: Target, settings: LoadSettings, on_outcome: OnOutcome) -> Finding:
    """One load: open where a rate is given, else closed."""
    rng = Random(settings.seed)
    if settings.rate is None:
        count = settings.num_clients * settings.num_requests
        requests = draw_requests(rng, settings.mix, settings.bounds, count)
        load = await closed_loop(
            target, iter(requests), settings.num_clients, on_outcome=on_outcome
        )
    else:
        requests = _arriving(rng, settings, settings.rate)
        load = await open_loop(target, requests, on_outcome=on_outcome)
    return Finding(figures(load), samples(load.outcomes), load.outcomes)


async def convoy(target: Target, settings: LoadSettings, on_outcome: OnOutcome) -> Finding:
    """Short requests alone, then the same beside long prompts."""
    rng = Random(settings.seed)
    short = _arriving(rng, settings, settings.rate or DEFAULT_RATES["convoy"], "short")
    bounds = replace(settings.bounds, scale=1.0, max_prompt_tokens=settings.long_prompt_tokens)
    times = draw_arrivals(rng, settings.long_rate, settings.duration_s)
    drawn = draw_requests(rng, fixed(settings.long_prompt_tokens, 16), bounds, len(times), "long")
    long = [replace(request, due_s=at) for request, at in zip(drawn, times, strict=True)]
    alone = await open_loop(target, short, on_outcome=on_outcome)
    beside = await open_loop(target, short + long, on_outcome=on_outcome)
    shorts = _labelled(beside, "short")
    quiet, busy = figures(alone), figures(shorts)
    results = {
        "alone": quiet,
        "beside_long": busy,
        "long": figures(_labelled(beside, "long")),
        "time_to_first_token_p99_ratio": _ratio(busy, quiet, "time_to_first_token_s"),
        "inter_token_p99_ratio": _ratio(busy, quiet, "inter_token_s"),
        "errors": quiet["errors"] + sum(errors(beside.outcomes).values()),
    }
    kept = {f"alone_{name}": values for name, values in samples(alone.outcomes).items()}
    kept |= {f"beside_long_{name}": values for name, values in samples(shorts.outcomes).items()}
    return Finding(results, kept, alone.outcomes + beside.outcomes)


async def neighbour(target: Target, settings: LoadSettings, on_outcome: OnOutcome) -> Finding:
    """One key's requests alone, then beside another key that is busy, and that floods."""
    rate = settings.rate or DEFAULT_RATES["neighbour"]
    requests = _arriving(Random(settings.seed), settings, rate)
    other = replace(target, endpoint=replace(target.endpoint, api_key=settings.neighbour_key))
    own = {"alone": await open_loop(target, requests, on_outcome=on_outcome)}
    others: dict[str, Load] = {}
    for name, clients in (
        ("beside_full", settings.num_clients),
        ("beside_flood", settings.num_flooding),
    ):
        others[name] = Load([], time.perf_counter(), 0.0)
        crowd = asyncio.create_task(
            closed_loop(other, _endless(settings), clients, on_outcome=others[name].outcomes.append)
        )
        await asyncio.sleep(LEAD_S)
        own[name] = await open_loop(target, requests, on_outcome=on_outcome)
        crowd.cancel()
        await asyncio.wait([crowd])
        others[name] = replace(others[name], ended_at=time.perf_counter())
    found = {name: figures(load) for name, load in own.items()}
    flooded = found["beside_flood"]
    results = {
        **found,
        "neighbour_when_full": figures(others["beside_full"]),
        "neighbour_when_flooding": figures(others["beside_flood"]),
        "flood_over_full": _ratio(flooded, found["beside_full"], "time_to_first_token_s", "p95"),
        "flood_over_alone": _ratio(flooded, found["alone"], "time_to_first_token_s", "p95"),
        "errors": sum(figures["errors"] for figures in found.values()),
    }
    kept = {
        f"{name}_{what}": values
        for name, load in own.items()
        for what, values in samples(load.outcomes).items()
    }
    return Finding(results, kept, [outcome for load in own.values() for outcome in load.outcomes])


async def saturation(target: Target, settings: LoadSettings, on_outcome: OnOutcome) -> Finding:
    """Steps of rising load, up to the knee and past it."""
    steps: list[SaturationStep] = []
    outcomes: list[Outcome] = []
    kept: dict[str, list[float]] = {}
    rate = settings.rate or DEFAULT_RATES["saturation"]
    for number in range(settings.max_steps):
        rng = Random(settings.seed + number)
        requests = _arriving(rng, settings, rate)
        load = await open_loop(target, requests, on_outcome=on_outcome)
        offered = sum(request.max_tokens for request in requests) / settings.duration_s
        found = figures(load)
        is_past = _is_past_knee(found, steps[0] if steps else found)
        steps.append(
            {
                "rate": rate,
                "offered_tokens_per_second": offered,
                "is_past_knee": is_past,
                **found,
            }
        )
        outcomes += load.outcomes
        for name, values in samples(load.outcomes).items():
            kept[f"step{number + 1}_{name}"] = values
        if len(steps) > 1 and all(step["is_past_knee"] for step in steps[-2:]):
            break
        rate *= settings.rate_factor
    return Finding(_saturation_results(steps), kept, outcomes)


def _saturation_results(steps: list[SaturationStep]) -> Facts:
    past = next((index for index, step in enumerate(steps) if step["is_past_knee"]), None)
    best = max(steps, key=lambda step: step["completion_tokens_per_second"])
    return {
        "capacity_tokens_per_second": best["completion_tokens_per_second"],
        "capacity_requests_per_second": max(step["requests_per_second"] for step in steps),
        # None: no step was past it, or already the first
        "knee_rate": steps[past - 1]["rate"] if past else None,
        "errors": sum(step["errors"] for step in steps),
        "saturation": {"steps": steps},
    }


def _is_past_knee(step: LoadFigures, lightest: LoadFigures) -> bool:
    if step["errors"] > MAX_ERROR_SHARE * step["requests"]:
        return True
    now, then = step["time_to_first_token_s"]["p50"], lightest["time_to_first_token_s"]["p50"]
    return now is not None and then is not None and now > KNEE_FACTOR * then


async def soak(target: Target, settings: LoadSettings, on_outcome: OnOutcome) -> Finding:
    """A closed loop for a duration, and the server's memory where its process is known."""
    memory: list[tuple[float, float]] = []
    watching = asyncio.create_task(_watch_memory(settings.pid, memory))
    try:
        load = await closed_loop(
            target,
            _endless(settings),
            settings.num_clients,
            until_s=settings.duration_s,
            on_outcome=on_outcome,
        )
    finally:
        watching.cancel()
    windows = _windows(load, settings.duration_s, memory)
    names = ("completion_tokens_per_second", "time_to_first_token_p50_s", "memory_bytes")
    results = {
        **figures(load),
        "drift": {name: _drift(windows, name) for name in names},
        "soak": {"windows": windows},
    }
    kept = samples(load.outcomes)
    if memory:
        kept["memory_bytes"] = [size for _, size in memory]
    return Finding(results, kept, load.outcomes)


SCENARIOS = {
    "plain": plain,
    "convoy": convoy,
    "neighbour": neighbour,
    "saturation": saturation,
    "soak": soak,
}


def memory_of(pid: int) -> int:
    """Resident bytes of a process, its children not counted; Linux only."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"--pid {pid}: its memory cannot be read ({error})") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _watch_memory(pid: int | None, found: list[tuple[float, float]]) -> None:
    while pid is not None:
        try:
            found.append((time.perf_counter(), float(memory_of(pid))))
        except ConfigError:
            return  # the process has ended; its requests fail
        await asyncio.sleep(MEMORY_INTERVAL_S)


def _windows(
    load: Load, duration_s: float, memory: list[tuple[float, float]]
) -> list[dict[str, float | None]]:
    """Figures of equal parts of a run; a piece counts where it came, a request where it was due."""
    width = duration_s / NUM_WINDOWS
    windows = []
    for number in range(NUM_WINDOWS):
        start, end = load.started_at + number * width, load.started_at + (number + 1) * width
        tokens = sum(
            outcome.completion_tokens / len(outcome.piece_times)
            for outcome in load.outcomes
            for at in outcome.piece_times
            if start <= at < end
        )
        due = [outcome for outcome in load.outcomes if start <= outcome.due_at < end]
        first = first_token_times(due)
        sizes = [size for at, size in memory if start <= at < end]
        windows.append(
            {
                "start_s": number * width,
                "completion_tokens_per_second": tokens / width,
                "time_to_first_token_p50_s": median(first) if first else None,
                "memory_bytes": median(sizes) if sizes else None,
            }
        )
    return windows


def _drift(windows: list[dict[str, float | None]], name: str) -> float | None:
    """The Theil-Sen slope over the whole run as a share of the median; None: too few windows."""
    points = [(index, window[name]) for index, window in enumerate(windows)]
    known = [(index, value) for index, value in points if value is not None]
    if len(known) < 3 or median(value for _, value in known) <= 0:
        return None
    slope = median((b - a) / (y - x) for (x, a), (y, b) in combinations(known, 2))
    return slope * len(windows) / median(value for _, value in known)


def _arriving(
    rng: Random, settings: LoadSettings, rate: float, label: str = "request"
) -> list[PlannedRequest]:
    times = draw_arrivals(rng, rate, settings.duration_s)
    requests = draw_requests(rng, settings.mix, settings.bounds, len(times), label)
    return [replace(request, due_s=at) for request, at in zip(requests, times, strict=True)]


def _endless(settings: LoadSettings) -> Iterator[PlannedRequest]:
    rng = Random(settings.seed)
    while True:
        yield from draw_requests(rng, settings.mix, settings.bounds, 1)


def _labelled(load: Load, label: str) -> Load:
    chosen = [outcome for outcome in load.outcomes if outcome.label == label]
    return Load(chosen, load.started_at, load.ended_at)


def _ratio(
    one: LoadFigures,
    other: LoadFigures,
    name: Literal["time_to_first_token_s", "inter_token_s"],
    share: Literal["p95", "p99"] = "p99",
) -> float | None:
    above, below = one[name][share], other[name][share]
    return above / below if above is not None and below else None
