"""`quire bench scale`: what a cluster gives, simulated from the receipts of one device."""

import argparse
from pathlib import Path

from quire.core.config import EngineConfig
from quire_bench.scale import (
    Fit,
    Outcome,
    SharedCosts,
    Traffic,
    fit_step_cost,
    num_blocks_in,
    receipts_of,
    shared_load,
    simulate_cluster,
)

_EPILOG = """\
The engine and the router are quire's own; time is virtual, so that the tables are the same on every
machine. docs/scale.md quotes them.

examples:
  quire bench scale
  quire bench scale --rate 30
"""
MODEL = "dummy:llama-8b:Q4_K_M"
_KV_BYTES = 32 << 30
_KV_TOKEN_BYTES = 131_072  # of llama-8b: 32 layers, 8 KV heads of 128, keys and values of two bytes
_SIZES = (10, 100, 1000)
_ROWS_A_PART, _ROW_TOKENS = 256, 160


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Simulate clusters of replicas from the receipts of one device."
    parser.epilog = _EPILOG
    add("--receipts", type=Path, default=Path("receipts/h200"), metavar="FOLDER")
    add("--rate", type=float, default=50.0, metavar="N", help="requests a second and replica")
    add("--ingress-us", type=float, required=True, metavar="US", help="a token, as measured")
    add("--proxy-us", type=float, required=True, metavar="US", help="a token, as measured")
    add("--frame-bytes", type=int, required=True, metavar="N", help="a token, as measured")


def run(args: argparse.Namespace) -> int:
    fit = fit_step_cost(receipts_of(args.receipts, MODEL), EngineConfig().max_step_tokens)
    print(fit_text(fit))
    found = {
        (count, by_prefix): simulated(fit, args.rate, count, by_prefix)
        for count, by_prefix in ((1, False), (10, False), (10, True))
    }
    print(cluster_table(found))
    costs = SharedCosts(args.ingress_us * 1e-6, args.proxy_us * 1e-6, args.frame_bytes)
    print(shared_table(found[10, True], costs))
    return 0


def simulated(fit: Fit, rate: float, count: int, by_prefix: bool, seconds: float = 5.0) -> Outcome:
    return simulate_cluster(
        fit.cost,
        EngineConfig(max_batch_size=256),
        Traffic(rate, seconds),
        num_replicas=count,
        num_blocks=num_blocks_in(_KV_BYTES, _KV_TOKEN_BYTES),
        by_prefix=by_prefix,
    )


def fit_text(fit: Fit) -> str:
    a, b, c = fit.cost.a * 1e3, fit.cost.b * 1e6, fit.cost.c * 1e9
    return (
        f"A step takes {a:.2f} ms, {b:.1f} µs a token and {c:.1f} ns a position of context: the "
        f"least squares of {fit.num_receipts} receipts, at most {fit.worst_error:.0%} off.\n"
    )


def cluster_table(found: dict[tuple[int, bool], Outcome]) -> str:
    lines = [
        "| replicas | routing | tokens/s | prompt tokens cached | first token p95 | gap p95 |",
        "|---|---|---|---|---|---|",
    ]
    for (count, by_prefix), one in found.items():
        lines.append(
            f"| {count} | {'prefix' if by_prefix else 'load'} | {one.tokens_per_second:,.0f} | "
            f"{one.hit_rate:.0%} | {1e3 * one.first_token_p95_s:.0f} ms | "
            f"{1e3 * one.token_gap_p95_s:.0f} ms |"
        )
    return "\n".join([*lines, ""])


def shared_table(outcome: Outcome, costs: SharedCosts) -> str:
    lines = [
        "| replicas | tokens/s | ingress cores | proxy cores | to clients | part files/s |",
        "|---|---|---|---|---|---|",
    ]
    for count in _SIZES:
        load = shared_load(outcome, count, costs, _ROWS_A_PART, _ROW_TOKENS)
        lines.append(
            f"| {count:,} | {load.tokens_per_second:,.0f} | {load.ingress_cores:,.0f} | "
            f"{load.proxy_cores:,.0f} | {load.gigabits_out:,.1f} Gbit/s | "
            f"{load.part_files_per_second:,.1f} |"
        )
    return "\n".join([*lines, ""])
