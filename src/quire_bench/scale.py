"""What a cluster of replicas gives: engines in virtual time behind quire's own router, with step
times that receipts of one device measured, and what the parts that all share need to carry it."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import Ended, Piece
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost
from quire.ray.prefixes import PrefixTable, choose, prefix_hashes
from quire_bench.receipts import Receipt, read_folder
from quire_bench.simulation import percentile

_BLOCK_TOKENS = 16


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


# ---- a cluster


@dataclass(frozen=True, slots=True)
class Traffic:
    """Chats in virtual time: prompts begin with one of `num_prefixes` system prompts."""

    rate: float  # requests a second and replica
    seconds: float = 8.0
    num_prefixes: int = 400
    prefix_tokens: int = 512
    own_tokens: tuple[int, int] = (64, 512)
    new_tokens: tuple[int, int] = (64, 256)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a simulation; rates are of completion tokens, in the second half of the time."""

    num_replicas: int
    tokens_per_second: float
    hit_rate: float  # of prompt tokens, found in a prefix cache
    first_token_p95_s: float
    token_gap_p95_s: float
    most_waiting: int  # requests of one replica, at any arrival


class _Replica:
    """An engine with a clock of its own, which is never behind the arrivals."""

    def __init__(self, cost: StepCost, config: EngineConfig, num_blocks: int) -> None:
        executor = FakeExecutor(
            num_blocks=num_blocks, cost=cost, max_context=8192, max_batch_size=config.max_batch_size
        )
        self.engine = Engine(executor, config, clock=executor.clock)
        self._clock = executor.clock
        self.num_live = 0
        self.first_tokens: list[float] = []
        self.gaps: list[float] = []
        self._last: dict[str, float] = {}
        self.tokens_at: list[float] = []

    def run_until(self, moment: float) -> None:
        while self.engine.has_work and self._clock.now() < moment:
            for event in self.engine.step():
                if isinstance(event, Piece):
                    self._took(event)
                elif isinstance(event, Ended):
                    self._ended(event)
            idle_until = self.engine.wake_at
            if idle_until is not None:
                self._clock.advance_to(min(idle_until, moment))
        self._clock.advance_to(moment)

    def _took(self, piece: Piece) -> None:
        now = self._clock.now()
        if piece.request_id in self._last:
            self.gaps.append(now - self._last[piece.request_id])
        self._last[piece.request_id] = now
        self.tokens_at.append(now)

    def _ended(self, event: Ended) -> None:
        self.num_live -= 1
        self._last.pop(event.request_id, None)
        seconds = event.output.metrics.time_to_first_token_s
        if seconds is not None:
            self.first_tokens.append(seconds)

    def add(self, prompt: list[int], new: int, at: float) -> None:
        params = SamplingParams(max_tokens=new, temperature=0.0)
        self.engine.add_request(prompt, params, stream=True, arrived_at=at)
        self.num_live += 1


def simulate_cluster(
    cost: StepCost,
    config: EngineConfig,
    traffic: Traffic,
    *,
    num_replicas: int,
    num_blocks: int,
    by_prefix: bool,
    max_lead: int = 8,
) -> Outcome:
    """Every replica's engine, step by step, behind the router of `quire ray serve`."""
    random.seed(0)  # chance decides between equally idle replicas
    replicas = [_Replica(cost, config, num_blocks) for _ in range(num_replicas)]
    table, most_waiting = PrefixTable(), 0
    for at, prompt, new in _arrivals(traffic, num_replicas):
        for replica in replicas:
            replica.run_until(at)
        loads = {number: replica.num_live for number, replica in enumerate(replicas)}
        prefix = prefix_hashes("", prompt) if by_prefix else []
        chosen = choose(prefix, loads, table, max_lead)[0]
        table.add(prefix, chosen)
        replicas[chosen].add(prompt, new, at)
        most_waiting = max(most_waiting, loads[chosen])
    for replica in replicas:
        replica.run_until(traffic.seconds)
    return _outcome(replicas, traffic, most_waiting)


def _arrivals(traffic: Traffic, num_replicas: int) -> Iterator[tuple[float, list[int], int]]:
    rng = random.Random(1)
    at, rate = 0.0, traffic.rate * num_replicas
    while (at := at + rng.expovariate(rate)) < traffic.seconds:
        # Popular and rare ones: the square of an even choice.
        number = int(rng.random() ** 2 * traffic.num_prefixes * max(1, num_replicas / 10))
        shared = random.Random(number).choices(range(1000), k=traffic.prefix_tokens)
        own = rng.choices(range(1000), k=rng.randint(*traffic.own_tokens))
        yield at, shared + own, rng.randint(*traffic.new_tokens)


def _outcome(replicas: Sequence[_Replica], traffic: Traffic, most_waiting: int) -> Outcome:
    half = traffic.seconds / 2
    tokens = sum(sum(half <= at < traffic.seconds for at in one.tokens_at) for one in replicas)
    stats = [replica.engine.stats for replica in replicas]
    queries = sum(one.prefix_queries for one in stats)
    return Outcome(
        num_replicas=len(replicas),
        tokens_per_second=tokens / half,
        hit_rate=sum(one.prefix_hits for one in stats) / max(1, queries),
        first_token_p95_s=percentile([s for one in replicas for s in one.first_tokens], 0.95),
        token_gap_p95_s=percentile([s for one in replicas for s in one.gaps], 0.95),
        most_waiting=most_waiting,
    )


def num_blocks_in(kv_bytes: int, bytes_per_token: int) -> int:
    return kv_bytes // (bytes_per_token * _BLOCK_TOKENS)


# ---- what all replicas share


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """Measured on one machine: see docs/scale.md."""

    ingress_s_per_token: float  # processor time of the ingress, for a token that is streamed
    proxy_s_per_token: float  # ... and of Serve's proxy
    frame_bytes: int  # to the client, for a token


@dataclass(frozen=True, slots=True)
class SharedLoad:
    num_replicas: int
    tokens_per_second: float
    ingress_cores: float
    proxy_cores: float
    gigabits_out: float  # to clients
    part_files_per_second: float  # of a dataset's checkpoint


def shared_load(
    outcome: Outcome, num_replicas: int, costs: SharedCosts, rows_a_part: int, row_tokens: int
) -> SharedLoad:
    """For `num_replicas` of the kind that was simulated."""
    tokens = outcome.tokens_per_second / outcome.num_replicas * num_replicas
    return SharedLoad(
        num_replicas=num_replicas,
        tokens_per_second=tokens,
        ingress_cores=tokens * costs.ingress_s_per_token,
        proxy_cores=tokens * costs.proxy_s_per_token,
        gigabits_out=tokens * costs.frame_bytes * 8e-9,
        part_files_per_second=tokens / (rows_a_part * row_tokens),
    )
