"""What a cluster of replicas gives: engines in virtual time behind quire's own router, with step
times that receipts of one device measured; and what the death of replicas costs."""

import gc
import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import SequencePlan, SequenceResult, Want
from quire.core.request import Completion, Ended, Piece
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.executors.base import TokenStore
from quire.executors.fake import FakeExecutor, StepCost
from quire.ray.prefixes import PrefixTable, Replicas, choose, prefix_hashes
from quire_bench.receipts import Receipt, read_folder
from quire_bench.simulation import percentile

_BLOCK_TOKENS = 16
_TOKEN = 1  # that every step samples: nothing here looks at tokens


# ---- one device


class Fit(NamedTuple):
    """Step times of a device, and how far the model is off the receipts it comes from."""

    cost: StepCost
    num_receipts: int
    worst_error: float  # of a run's time, as a share


def fit_step_cost(receipts: Sequence[Receipt], max_step_tokens: int) -> Fit:
    """a + b·tokens + c·context, by least squares of the runs' relative errors."""
    rows, seconds = [], []
    for receipt in receipts:
        settings = receipt.settings
        count, prompt, new = (
            _whole(settings[name]) for name in ("requests", "prompt_tokens", "new_tokens")
        )
        steps = math.ceil(count * prompt / max_step_tokens) + new - 1
        tokens = count * (prompt + new - 1)
        context = count * (prompt + sum(prompt + done for done in range(1, new)))
        rows.append((steps, tokens, context))
        seconds.append(float(np.median([float(run) for run in receipt.samples["run_s"]])))
    if len(rows) < 3:
        raise ConfigError(
            f"step times need three receipts of a model's throughput, got {len(rows)}"
        )
    relative = np.array(rows, float) / np.array(seconds)[:, None]
    a, b, c = (max(0.0, float(x)) for x in np.linalg.lstsq(relative, np.ones(len(rows)), None)[0])
    errors = np.abs(relative @ np.array([a, b, c]) - 1)
    return Fit(StepCost(a, b, c), len(rows), float(errors.max()))


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


def receipts_of(folder: Path, model: str) -> list[Receipt]:
    """Throughput of whole batches on a GPU."""
    return [
        receipt
        for receipt in read_folder(folder, "throughput").values()
        if receipt.model["name"] == model
        and receipt.settings["requests"] == receipt.settings["max_batch_size"]
    ]


class TimedExecutor(FakeExecutor):
    """A FakeExecutor that takes its time and computes nothing: a thousand of them have room."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store = TokenStore(1, self.block_size)

    def _row(self, row: SequencePlan) -> SequenceResult:
        return SequenceResult(row.sequence_id, _TOKEN if row.want is Want.SAMPLE else None)


# ---- a cluster


@dataclass(frozen=True, slots=True)
class Traffic:
    """Chats in virtual time: prompts begin with one of `num_prefixes` system prompts for each ten
    replicas."""

    rate: float  # requests a second and replica
    seconds: float = 2.0
    num_prefixes: int = 400
    prefix_tokens: int = 512
    own_tokens: tuple[int, int] = (64, 512)
    new_tokens: tuple[int, int] = (16, 64)


@dataclass(frozen=True, slots=True)
class Deaths:
    """So many replicas end at a moment; their requests are known to have lost them after a while,
    and no replica comes in their place."""

    count: int
    at: float
    noticed_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a simulation; rates are of completion tokens, in the second half of the time."""

    num_replicas: int
    num_requests: int
    tokens_per_second: float
    hit_rate: float  # of prompt tokens, found in a prefix cache
    first_token_p95_s: float
    token_gap_p95_s: float
    most_live: int  # requests of one replica, at any arrival
    num_moved: int = 0  # requests whose replica died
    num_recomputed: int = 0  # tokens of them that were computed once more
    longest_pause_s: float = 0.0  # of a moved request, between two tokens
    pause_p50_s: float = 0.0
    num_unfinished_moves: int = 0  # moved requests without a token since, at the end


@dataclass(slots=True)
class _Live:
    """A request as its ingress knows it."""

    prompt: list[int]
    num_new: int
    arrived_at: float
    num_tokens: int = 0
    last_token_at: float | None = None
    moved_at: float | None = None  # and no token since


@dataclass(slots=True)
class _Samples:
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # of requests that were moved
    num_tokens: int = 0  # in the second half
    num_requests: int = 0
    num_moved: int = 0
    num_recomputed: int = 0


class _Replica:
    """An engine with a clock of its own."""

    def __init__(self, cost: StepCost, config: EngineConfig, num_blocks: int) -> None:
        executor = TimedExecutor(
            num_blocks=num_blocks, cost=cost, max_context=8192, max_batch_size=config.max_batch_size
        )
        self.engine = Engine(executor, config, clock=executor.clock)
        self.clock = executor.clock
        self.live: dict[str, _Live] = {}

    def add(self, live: _Live, now: float) -> None:
        params = SamplingParams(max_tokens=live.num_new, temperature=0.0)
        self.clock.advance_to(now)
        resumed = None
        if live.moved_at is not None:
            resumed = [Completion(0, [_TOKEN] * live.num_tokens)] if live.num_tokens else []
        request = self.engine.add_request(
            live.prompt, params, stream=True, arrived_at=now, resumed=resumed
        )
        self.live[request.id] = live

    def step(self, samples: _Samples, half: float) -> float | None:
        """One step from the clock's time; when the next can be, or None where nothing is left."""
        for event in self.engine.step():
            if isinstance(event, Piece):
                self._took(event, samples, half)
            elif isinstance(event, Ended):
                self.live.pop(event.request_id)
        if not self.engine.has_work:
            return None
        return max(self.clock.now(), self.engine.wake_at or 0.0)

    def _took(self, piece: Piece, samples: _Samples, half: float) -> None:
        live, now = self.live[piece.request_id], self.clock.now()
        live.num_tokens += 1
        samples.num_tokens += now >= half
        if live.moved_at is not None:
            begun = live.moved_at if live.last_token_at is None else live.last_token_at
            samples.pauses.append(now - begun)
            live.moved_at = None
        elif live.last_token_at is None:
            samples.first_tokens.append(now - live.arrived_at)
        else:
            samples.gaps.append(now - live.last_token_at)
        live.last_token_at = now


class Cluster:
    """Every replica's engine, step by step, behind the router of `quire ray serve`."""

    def __init__(
        self,
        replicas: Sequence[_Replica],
        traffic: Traffic,
        *,
        by_prefix: bool,
        max_lead: int,
        deaths: Deaths | None,
    ) -> None:
        self._all = replicas
        self._running = Replicas(range(len(replicas)))
        self._traffic = traffic
        self._by_prefix = by_prefix
        self._max_lead = max_lead
        self._deaths = deaths
        self._table = PrefixTable()
        self._due: list[tuple[float, int]] = []  # when a replica's next step can begin
        self._lost: list[_Live] = []
        self.samples = _Samples()
        self.most_live = 0

    def run(self) -> None:
        end, deaths = self._traffic.seconds, self._deaths
        moments: list[tuple[float, _Live | None]] = []
        if deaths is not None:
            moments = [(deaths.at, None), (deaths.at + deaths.noticed_after_s, None)]
        for live in arrivals(self._traffic, len(self._all)):
            while moments and moments[0][0] <= live.arrived_at:
                self._advance(moments[0][0])
                self._die() if len(moments) == 2 else self._move(moments[0][0])
                del moments[0]
            self._advance(live.arrived_at)
            self.samples.num_requests += 1
            self._send(live, live.arrived_at)
        self._advance(end)

    def _advance(self, moment: float) -> None:
        """Every step that begins before the moment."""
        half = self._traffic.seconds / 2
        while self._due and self._due[0][0] < moment:
            at, number = heapq.heappop(self._due)
            replica = self._all[number]
            if number not in self._running.alive or not replica.engine.has_work:
                continue
            replica.clock.advance_to(at)
            then = replica.step(self.samples, half)
            if then is not None:
                heapq.heappush(self._due, (then, number))

    def _send(self, live: _Live, now: float) -> None:
        prefix = prefix_hashes("", live.prompt) if self._by_prefix else []
        ranked = choose(prefix, self._running, self._load_of, self._table, self._max_lead)
        self._table.add(prefix, ranked[0])
        replica = self._all[ranked[0]]
        was_idle = not replica.engine.has_work
        replica.add(live, now)
        self.most_live = max(self.most_live, len(replica.live))
        # One that waits for others (its batching delay) looks again as well.
        if was_idle or replica.engine.wake_at is not None:
            heapq.heappush(self._due, (max(now, replica.clock.now()), ranked[0]))

    def _load_of(self, number: int) -> int:
        return len(self._all[number].live)

    def _die(self) -> None:
        assert self._deaths is not None
        dead = range(self._deaths.count)
        self._running = Replicas([n for n in self._running.alive if n not in dead])
        self._lost = [live for number in dead for live in self._all[number].live.values()]

    def _move(self, now: float) -> None:
        """To other replicas, behind the tokens that their clients have."""
        for live in self._lost:
            live.moved_at = now
            self.samples.num_moved += 1
            self.samples.num_recomputed += len(live.prompt) + live.num_tokens
            self._send(live, now)


def simulate_cluster(
    cost: StepCost,
    config: EngineConfig,
    traffic: Traffic,
    *,
    num_replicas: int,
    num_blocks: int,
    by_prefix: bool,
    max_lead: int = 8,
    deaths: Deaths | None = None,
) -> Outcome:
    random.seed(0)  # chance decides between equally idle replicas
    replicas = [_Replica(cost, config, num_blocks) for _ in range(num_replicas)]
    cluster = Cluster(replicas, traffic, by_prefix=by_prefix, max_lead=max_lead, deaths=deaths)
    gc.disable()  # it would look at the objects of all engines again and again
    try:
        cluster.run()
    finally:
        gc.enable()
    return _outcome(cluster, replicas, traffic)


def arrivals(traffic: Traffic, num_replicas: int) -> Iterator[_Live]:
    rng = random.Random(1)
    at, rate = 0.0, traffic.rate * num_replicas
    shared: dict[int, list[int]] = {}
    others = rng.choices(range(1000), k=1 << 20)
    while (at := at + rng.expovariate(rate)) < traffic.seconds:
        # Popular and rare ones: the square of an even choice.
        number = int(rng.random() ** 2 * traffic.num_prefixes * max(1, num_replicas / 10))
        if number not in shared:
            shared[number] = random.Random(number).choices(range(1000), k=traffic.prefix_tokens)
        own = rng.randrange(len(others) - traffic.own_tokens[1])
        end = own + rng.randint(*traffic.own_tokens)
        yield _Live(shared[number] + others[own:end], rng.randint(*traffic.new_tokens), at)


def _outcome(cluster: Cluster, replicas: Sequence[_Replica], traffic: Traffic) -> Outcome:
    samples = cluster.samples
    stats = [replica.engine.stats for replica in replicas]
    queries = sum(one.prefix_queries for one in stats)
    waiting = [live for one in replicas for live in one.live.values() if live.moved_at is not None]
    pauses = samples.pauses
    return Outcome(
        num_replicas=len(replicas),
        num_requests=samples.num_requests,
        tokens_per_second=samples.num_tokens / (traffic.seconds / 2),
        hit_rate=sum(one.prefix_hits for one in stats) / max(1, queries),
        first_token_p95_s=percentile(samples.first_tokens, 0.95),
        token_gap_p95_s=percentile(samples.gaps, 0.95),
        most_live=cluster.most_live,
        num_moved=samples.num_moved,
        num_recomputed=samples.num_recomputed,
        longest_pause_s=max(pauses, default=0.0),
        pause_p50_s=percentile(pauses, 0.5) if pauses else 0.0,
        num_unfinished_moves=len(waiting) if samples.num_moved else 0,
    )


def num_blocks_in(kv_bytes: int, bytes_per_token: int) -> int:
    return kv_bytes // (bytes_per_token * _BLOCK_TOKENS)
