"""`quire bench scale`: what a cluster gives, simulated from the receipts of one device."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from quire.core.config import EngineConfig
from quire_bench.scale import (
    Deaths,
    Fit,
    Outcome,
    Traffic,
    fit_step_cost,
    num_blocks_in,
    receipts_of,
    simulate_cluster,
)
from quire_bench.shared_costs import (
    MEASURED_MODEL,
    SharedCosts,
    StoreRate,
    StreamsPlan,
    has_ray,
    job_store_rate,
    router_seconds,
    shared_costs,
)

_EPILOG = """\
The engine and the router are quire's own. The tables of clusters and of deaths are in virtual time,
and the same on every machine. What the shared parts cost is measured on this one: the router, the
store of jobs, and, where Ray is installed, ingress and proxy of a cluster that is started here.
docs/scale.md quotes all of it. A thousand replicas take minutes and 5 GB of memory.

examples:
  quire bench scale
  quire bench scale --sizes 10 100 --rate 30
"""
MODEL = "dummy:llama-8b:Q4_K_M"
SIZES = (10, 100, 1000)
RATE = 50.0
SECONDS = 1.2  # of virtual time
_KV_BYTES = 32 << 30
_KV_TOKEN_BYTES = 131_072  # of llama-8b: 32 layers, 8 KV heads of 128, keys and values of two bytes
_DEATHS_AT = SECONDS / 2  # in the middle: rates are of the time behind it
_MOST_BY_LOAD = 100  # replicas: without prefixes a larger cluster is the same, and takes minutes


class Run(NamedTuple):
    """A simulation of the tables."""

    num_replicas: int
    by_prefix: bool
    has_deaths: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Simulate clusters of replicas from the receipts of one device."
    parser.epilog = _EPILOG
    add("--receipts", type=Path, default=Path("receipts/h200"), metavar="FOLDER")
    add("--rate", type=float, default=RATE, metavar="N", help="requests a second and replica")
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="(default: 10 100 1000)")
    add("--model", default=MEASURED_MODEL, help="served to measure ingress and proxy (%(default)s)")


def run(args: argparse.Namespace) -> int:
    fit = fit_step_cost(receipts_of(args.receipts, MODEL), EngineConfig().max_step_tokens)
    print(fit_text(fit), flush=True)
    found = simulate_all(fit, args.rate, runs_of(args.sizes))
    print(cluster_table(found))
    print(deaths_table(found), flush=True)
    router = {size: router_seconds(size) for size in args.sizes}
    print(router_table(router))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        store = job_store_rate(Path(folder))
    print(store_text(store), flush=True)
    if not has_ray():
        print("ray is not installed: ingress and proxy are not measured", file=sys.stderr)
        return 0
    costs = shared_costs(StreamsPlan(args.model))
    print(costs_text(costs))
    print(shared_table(found, args.sizes, router, store, costs))
    return 0


# ---- simulations


def runs_of(sizes: Iterable[int]) -> list[Run]:
    """The largest first, so that they do not wait for each other."""
    made = [Run(1, False)]
    for size in sizes:
        made += [Run(size, False)] if size <= _MOST_BY_LOAD else []
        made += [Run(size, True), Run(size, True, True)]
    return sorted(made, reverse=True)


def simulate_all(fit: Fit, rate: float, runs: Iterable[Run]) -> dict[Run, Outcome]:
    wanted = list(runs)
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        outcomes = pool.map(simulated, [fit] * len(wanted), [rate] * len(wanted), wanted)
        return dict(sorted(zip(wanted, outcomes, strict=True)))


def simulated(fit: Fit, rate: float, wanted: Run) -> Outcome:
    count = wanted.num_replicas
    return simulate_cluster(
        fit.cost,
        EngineConfig(max_batch_size=256),
        Traffic(rate, SECONDS),
        num_replicas=count,
        num_blocks=num_blocks_in(_KV_BYTES, _KV_TOKEN_BYTES),
        by_prefix=wanted.by_prefix,
        deaths=Deaths(count // 10, _DEATHS_AT) if wanted.has_deaths else None,
    )


# ---- what is printed


def fit_text(fit: Fit) -> str:
    a, b, c = fit.cost.a * 1e3, fit.cost.b * 1e6, fit.cost.c * 1e9
    return (
        f"A step takes {a:.2f} ms, {b:.1f} µs a token and {c:.1f} ns a position of context: the "
        f"least squares of {fit.num_receipts} receipts, at most {fit.worst_error:.0%} off.\n"
    )


def _table(head: str, rows: Iterable[str]) -> str:
    line = "|---" * head.count("|")
    return "\n".join([head, line[: -len("---")], *rows, ""])


def cluster_table(found: Mapping[Run, Outcome]) -> str:
    rows = [
        f"| {one.num_replicas:,} | {'prefix' if made.by_prefix else 'load'} | "
        f"{one.num_requests:,} | {one.tokens_per_second:,.0f} | {one.hit_rate:.0%} | "
        f"{1e3 * one.first_token_p95_s:.0f} ms | {1e3 * one.token_gap_p95_s:.0f} ms |"
        for made, one in found.items()
        if not made.has_deaths
    ]
    head = (
        "| replicas | routing | requests | tokens/s | prompt tokens cached | first token p95 | "
        "gap p95 |"
    )
    return _table(head, rows)


def deaths_table(found: Mapping[Run, Outcome]) -> str:
    rows = []
    for made, one in found.items():
        if made.has_deaths:
            whole = found[made._replace(has_deaths=False)]
            kept = one.tokens_per_second / whole.tokens_per_second
            rows.append(
                f"| {one.num_replicas:,} | {one.num_replicas // 10:,} | {one.num_moved:,} | "
                f"{one.num_recomputed:,} | {1e3 * one.pause_p50_s:.0f} ms | "
                f"{1e3 * one.longest_pause_s:.0f} ms | {one.num_unfinished_moves} | {kept:.1%} | "
                f"{1e3 * whole.first_token_p95_s:.0f} to {1e3 * one.first_token_p95_s:.0f} ms |"
            )
    head = (
        "| replicas | that die | requests moved | tokens recomputed | pause p50 | longest pause | "
        "without a token since | tokens/s kept | first token p95 |"
    )
    return _table(head, rows)


def router_table(router: Mapping[int, float]) -> str:
    rows = [f"| {size:,} | {1e6 * seconds:.0f} µs |" for size, seconds in router.items()]
    return _table("| replicas | router, a request |", rows)


def store_text(store: StoreRate) -> str:
    return (
        f"The store of jobs takes {store.one_by_one:,.0f} answers a second one by one, and "
        f"{store.together:,.0f} in transactions of a hundred.\n"
    )


def costs_text(costs: SharedCosts) -> str:
    return (
        f"A streamed token takes {1e6 * costs.ingress_s:.0f} µs of the ingress, "
        f"{1e6 * costs.proxy_s:.0f} µs of Serve's proxy, and {costs.frame_bytes:.0f} bytes to the "
        f"client; at the ingress's own port (--direct-port) {1e6 * costs.direct_s:.0f} µs of it "
        "alone.\n"
    )


def shared_table(
    found: Mapping[Run, Outcome],
    sizes: Iterable[int],
    router: Mapping[int, float],
    store: StoreRate,
    costs: SharedCosts,
) -> str:
    rows = []
    for size in sizes:
        one = found[Run(size, True)]
        tokens, requests = one.tokens_per_second, one.num_requests / SECONDS
        rows.append(
            f"| {size:,} | {tokens:,.0f} | {requests:,.0f} | {requests * router[size]:,.1f} | "
            f"{tokens * costs.ingress_s:,.0f} | {tokens * costs.proxy_s:,.0f} | "
            f"{tokens * costs.direct_s:,.0f} | "
            f"{tokens * costs.frame_bytes * 8e-9:,.2f} Gbit/s | {requests / store.together:,.2f} |"
        )
    head = (
        "| replicas | tokens/s | requests/s | router cores | ingress cores | proxy cores | "
        "direct ingress cores | to clients | stores of jobs |"
    )
    return _table(head, rows)
