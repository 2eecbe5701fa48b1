"""Runs an engine over a fake executor through arrivals in virtual time: exact, and instant."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from quire.core.config import EngineConfig
from quire.core.request import Ended, Piece, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost

# Step times like those of real machines: a second, b a token, c a position of context.
GPU_8B = StepCost(a=2.5e-3, b=3.0e-5, c=3.0e-8)
CPU_135M = StepCost(a=8.0e-3, b=4.4e-4, c=9.0e-7)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    key: str
    num_prompt_tokens: int
    num_new_tokens: int


@dataclass(slots=True)
class Run:
    """Results of a simulation."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    key_of: dict[str, str] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # between a sequence's tokens
    served: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # tokens by key
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(self.served.values()) / self.seconds

    def first_token_times(self, key: str | None = None) -> list[float]:
        """Times to first token, of one key or of all; of the requests that got one."""
        found = []
        for request_id, output in self.outputs.items():
            seconds = output.metrics.time_to_first_token_s
            if seconds is not None and key in (None, self.key_of[request_id]):
                found.append(seconds)
        return found


def poisson(
    rng: Random, key: str, rate: float, until: float, prompt: tuple[int, int], new: tuple[int, int]
) -> Iterator[Arrival]:
    """Requests of one key at `rate` a second, with lengths uniform in the given bounds."""
    at = rng.expovariate(rate)
    while at < until:
        yield Arrival(at, key, rng.randint(*prompt), rng.randint(*new))
        at += rng.expovariate(rate)


def simulate(
    arrivals: Iterable[Arrival],
    cost: StepCost,
    config: EngineConfig,
    *,
    until: float,
    num_blocks: int = 8192,
    seed: int = 0,
) -> Run:
    """Offer the arrivals to an engine; stop at `until`, and count what was served by then."""
    executor = FakeExecutor(num_blocks=num_blocks, cost=cost, max_context=8192)
    engine = Engine(executor, config, clock=executor.clock)
    rng = Random(seed)
    coming = iter(sorted(arrivals, key=lambda arrival: arrival.at))
    arrival = next(coming, None)
    run = Run()
    last_token_at: dict[tuple[str, int], float] = {}
    while (arrival is not None or engine.has_work) and executor.clock.now() < until:
        while arrival is not None and arrival.at <= executor.clock.now():
            _offer(engine, arrival, rng, run)
            arrival = next(coming, None)
        _take_events(engine, run, last_token_at)
        idle_until = engine.wake_at
        if idle_until is not None:
            upcoming = arrival.at if arrival is not None else until
            executor.clock.advance_to(min(idle_until, upcoming))
    for request_id in [name for name in run.key_of if name not in run.outputs]:
        engine.cancel(request_id)
    for event in engine.take_events():
        if isinstance(event, Ended):
            run.outputs[event.request_id] = event.output
    run.seconds = executor.clock.now()
    return run


def _offer(engine: Engine, arrival: Arrival, rng: Random, run: Run) -> None:
    prompt = [rng.randrange(1000) for _ in range(arrival.num_prompt_tokens)]
    params = SamplingParams(max_tokens=arrival.num_new_tokens, temperature=0.0)
    request = engine.add_request(
        prompt, params, key=arrival.key, stream=True, arrived_at=arrival.at
    )
    run.key_of[request.id] = arrival.key


def _take_events(engine: Engine, run: Run, last_token_at: dict[tuple[str, int], float]) -> None:
    for event in engine.step():
        now = engine.clock.now()
        if isinstance(event, Ended):
            run.outputs[event.request_id] = event.output
        elif isinstance(event, Piece):
            sequence = (event.request_id, event.completion_index)
            if sequence in last_token_at:
                run.gaps.append(now - last_token_at[sequence])
                run.served[run.key_of[event.request_id]] += 1
            else:  # the first token: the prompt was served as well
                run.served[run.key_of[event.request_id]] += 1
            last_token_at[sequence] = now


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: 1 where all are equal, 1/n where one has everything."""
    found = list(values)
    return sum(found) ** 2 / (len(found) * sum(value * value for value in found))
