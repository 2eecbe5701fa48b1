"""`quire bench engine`: what the engine itself costs and keeps, measured without a model.

The host's time a step is real time. Fairness and pacing are simulated in virtual time over step
times like those of real machines, so that their figures repeat exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

from quire.core.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost
from quire_bench.simulation import (
    CPU_135M,
    GPU_8B,
    Arrival,
    Run,
    jain,
    percentile,
    poisson,
    simulate,
)

PROMPT = (50, 150)  # tokens, uniform
NEW = (40, 120)
NUM_LIGHT_KEYS = 5
LIGHT_LOAD = 0.5  # of capacity, all light keys together; the heavy key asks for ten times one's


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to simulate, with settings that suit it."""

    name: str
    cost: StepCost
    max_batch_size: int
    max_step_tokens: int
    slo_itl_ms: float
    seconds: float  # to simulate
    saturating_rate: float  # requests a second, well above what it can do
    static_batches: tuple[int, ...]  # to search for the best static setting
    static_tokens: tuple[int, ...]

    def config(self, **settings: object) -> EngineConfig:
        chosen: dict[str, object] = {
            "max_batch_size": self.max_batch_size,
            "max_step_tokens": self.max_step_tokens,
            "plan_ahead": False,  # a simulated host takes no time to hide
            "max_queue_requests": 1_000_000,
            "max_queue_tokens": 1_000_000_000,
            **settings,
        }
        return EngineConfig(**chosen)  # type: ignore[arg-type]

    def run(self, arrivals: Iterator[Arrival], config: EngineConfig) -> Run:
        return simulate(arrivals, self.cost, config, until=self.seconds, num_blocks=16384)


MACHINES = (
    Machine(
        name="8B on a GPU",
        cost=GPU_8B,
        max_batch_size=64,
        max_step_tokens=192,
        slo_itl_ms=8.0,
        seconds=5.0,
        saturating_rate=400.0,
        static_batches=(64, 96, 128, 192),
        static_tokens=(128, 160, 192, 256),
    ),
    Machine(
        name="135M on two CPU cores",
        cost=CPU_135M,
        max_batch_size=32,
        max_step_tokens=96,
        slo_itl_ms=45.0,
        seconds=90.0,
        saturating_rate=30.0,
        static_batches=(16, 32, 48, 64),
        static_tokens=(64, 80, 96, 128),
    ),
)


# ---- the host's part of a step


@dataclass(frozen=True, slots=True)
class HostCost:
    """Milliseconds to plan and update a step of so many running sequences."""

    num_sequences: int
    median_ms: float
    p95_ms: float


def host_cost(num_sequences: int = 256, num_steps: int = 200) -> HostCost:
    """Real time of schedule and update, the executor's left out, with streaming on."""
    executor = FakeExecutor(num_blocks=num_sequences * 48, max_context=1024)
    config = EngineConfig(max_batch_size=num_sequences, max_step_tokens=8 * num_sequences)
    engine = Engine(executor, config, clock=executor.clock)
    params = SamplingParams(max_tokens=2 * num_steps + 100, temperature=0.0, ignore_eos=True)
    for i in range(num_sequences):
        engine.add_request([i % 1000] * 64, params, stream=True)
    while engine.stats.num_steps < 20:
        engine.step()
    samples = []
    for _ in range(num_steps):
        before = engine.stats.host_seconds.sum
        engine.step()
        samples.append(1000 * (engine.stats.host_seconds.sum - before))
    return HostCost(num_sequences, median(samples), percentile(samples, 0.95))


# ---- fairness


@dataclass(frozen=True, slots=True)
class Fairness:
    """Five keys with and without a sixth at ten times their load."""

    machine: str
    quiet_p95_s: float  # first-token time of the light keys without the heavy one
    flooded_p95_s: float  # ... and with it
    jain_index: float  # of served / min(demand, fair share), with it

    @property
    def ratio(self) -> float:
        return self.flooded_p95_s / self.quiet_p95_s


def fairness(machine: Machine, *, seed: int = 1, is_fair: bool = True) -> Fairness:
    config = machine.config(fairness=is_fair)
    capacity = _requests_per_second(machine.run(_saturating(machine, seed), config))
    rate = LIGHT_LOAD * capacity / NUM_LIGHT_KEYS
    quiet = machine.run(_light_keys(machine, rate, seed), config)
    offered = [*_light_keys(machine, rate, seed), *_key(machine, "heavy", 10 * rate, seed + 100)]
    flooded = machine.run(iter(offered), config)
    return Fairness(
        machine.name,
        percentile(quiet.first_token_times(), 0.95),
        percentile([t for k in _light_names() for t in flooded.first_token_times(k)], 0.95),
        _jain_of_shares(flooded, offered),
    )


def _light_names() -> list[str]:
    return [f"light-{i}" for i in range(NUM_LIGHT_KEYS)]


def _light_keys(machine: Machine, rate: float, seed: int) -> Iterator[Arrival]:
    for i, name in enumerate(_light_names()):
        yield from _key(machine, name, rate, seed + i)


def _key(machine: Machine, name: str, rate: float, seed: int) -> Iterator[Arrival]:
    return poisson(Random(seed), name, rate, machine.seconds, PROMPT, NEW)


def _saturating(machine: Machine, seed: int) -> Iterator[Arrival]:
    return _key(machine, "all", machine.saturating_rate, seed)


def _requests_per_second(run: Run) -> float:
    finished = [output for output in run.outputs.values() if output.error is None]
    return len(finished) / run.seconds


def _jain_of_shares(run: Run, offered: list[Arrival]) -> float:
    """How evenly keys got what they asked for or, where that is more, their fair share."""
    demand: dict[str, int] = {}
    for arrival in offered:
        demand[arrival.key] = demand.get(arrival.key, 0) + arrival.num_new_tokens
    entitled = _max_min_shares(demand, sum(run.served.values()))
    return jain(run.served[key] / entitled[key] for key in demand)


def _max_min_shares(demand: dict[str, int], total: float) -> dict[str, float]:
    """Split `total` so that nobody gets more than it wants, and the rest is even."""
    shares: dict[str, float] = {}
    left = dict(demand)
    while left:
        even = total / len(left)
        satisfied = {key: want for key, want in left.items() if want <= even}
        if not satisfied:
            return shares | dict.fromkeys(left, even)
        shares |= satisfied
        total -= sum(satisfied.values())
        left = {key: want for key, want in left.items() if key not in satisfied}
    return shares


# ---- pacing


@dataclass(frozen=True, slots=True)
class PacedLoad:
    """One load: the paced engine beside the best static setting."""

    load: float  # of what the best static setting can do
    p95_itl_ms: float
    tokens_per_second: float
    static_p95_itl_ms: float
    static_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Pacing:
    machine: str
    slo_itl_ms: float
    best_batch: int  # the static setting with most throughput of those that meet the target
    best_step_tokens: int
    loads: tuple[PacedLoad, ...]


def pacing(machine: Machine, loads: tuple[float, ...], *, seed: int = 3) -> Pacing:
    best_batch, best_tokens, capacity = _best_static(machine, seed)
    rows = []
    for load in loads:
        paced = _at_rate(
            machine,
            load * capacity,
            seed,
            machine.config(max_batch_size=256, max_step_tokens=1024, slo_itl_ms=machine.slo_itl_ms),
        )
        static = _at_rate(
            machine,
            load * capacity,
            seed,
            machine.config(max_batch_size=best_batch, max_step_tokens=best_tokens),
        )
        rows.append(
            PacedLoad(
                load,
                1000 * percentile(paced.gaps, 0.95),
                paced.tokens_per_second,
                1000 * percentile(static.gaps, 0.95),
                static.tokens_per_second,
            )
        )
    return Pacing(machine.name, machine.slo_itl_ms, best_batch, best_tokens, tuple(rows))


def _best_static(machine: Machine, seed: int) -> tuple[int, int, float]:
    """The batch and step size that give most tokens a second within 1.1 × the target."""
    best: tuple[float, int, int, float] | None = None
    for batch in machine.static_batches:
        for tokens in machine.static_tokens:
            if tokens < batch:
                continue
            config = machine.config(max_batch_size=batch, max_step_tokens=tokens)
            run = machine.run(_saturating(machine, seed), config)
            meets = 1000 * percentile(run.gaps, 0.95) <= 1.1 * machine.slo_itl_ms
            if meets and (best is None or run.tokens_per_second > best[0]):
                best = (run.tokens_per_second, batch, tokens, _requests_per_second(run))
    assert best is not None, "no static setting meets the target"
    return best[1], best[2], best[3]


def _at_rate(machine: Machine, rate: float, seed: int, config: EngineConfig) -> Run:
    return machine.run(_key(machine, "all", rate, seed), config)
