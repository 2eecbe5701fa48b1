"""`quire bench engine`: the engine without a model."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire_bench.drawing import draw_fairness, draw_pacing
from quire_bench.engine import MACHINES, Fairness, HostCost, Pacing, fairness, host_cost, pacing

_LOADS = (0.2, 0.4, 0.6, 0.8, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures what planning and updating a step costs in real time, and simulates "
        "fairness between keys and pacing to a latency target in virtual time."
    )
    parser.epilog = "example: quire bench engine --out docs/figures"
    parser.add_argument("--out", type=Path, help="folder to draw the figures into, as SVG")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"{what} …", file=sys.stderr)

    say("host time a step")
    cost = host_cost()
    fair: list[tuple[Fairness, Fairness]] = []
    paced: list[Pacing] = []
    for machine in MACHINES:
        say(f"fairness, {machine.name}")
        fair.append((fairness(machine), fairness(machine, is_fair=False)))
        say(f"pacing, {machine.name}")
        paced.append(pacing(machine, _LOADS))
    if args.out is not None:
        draw_fairness(fair, args.out / "fairness.svg")
        draw_pacing(paced, args.out / "pacing.svg")
    if args.json:
        print(json.dumps(_as_data(cost, fair, paced), indent=2))
    else:
        _print_tables(cost, fair, paced)
    return 0


def _as_data(
    cost: HostCost, fair: list[tuple[Fairness, Fairness]], paced: list[Pacing]
) -> dict[str, Any]:
    return {
        "host_cost": asdict(cost),
        "fairness": [
            {"fair": asdict(on) | {"ratio": on.ratio}, "unfair": asdict(off) | {"ratio": off.ratio}}
            for on, off in fair
        ],
        "pacing": [asdict(result) for result in paced],
    }


def _print_tables(
    cost: HostCost, fair: list[tuple[Fairness, Fairness]], paced: list[Pacing]
) -> None:
    print(
        f"Host time to plan and update a step of {cost.num_sequences} sequences: "
        f"median {cost.median_ms:.2f} ms, p95 {cost.p95_ms:.2f} ms (goal: 1 ms)\n"
    )
    print("Fairness: five keys beside one at ten times their load (simulated)")
    for on, off in fair:
        print(
            f"  {on.machine}: p95 first token {1000 * on.quiet_p95_s:.1f} ms without it, "
            f"{1000 * on.flooded_p95_s:.1f} ms with it: {on.ratio:.2f}× (goal: 1.5×), "
            f"Jain {on.jain_index:.3f} (goal: 0.95); fairness off: {off.ratio:.0f}×, "
            f"Jain {off.jain_index:.3f}"
        )
    for result in paced:
        print(
            f"\nPacing to {result.slo_itl_ms:g} ms between tokens, {result.machine} (simulated); "
            f"best static: batch {result.best_batch}, {result.best_step_tokens} tokens a step"
        )
        print("  load   p95 paced   of target   p95 static   throughput, paced / static")
        for row in result.loads:
            print(
                f"  {row.load:4.0%}   {row.p95_itl_ms:6.2f} ms   "
                f"{row.p95_itl_ms / result.slo_itl_ms:9.2f}   {row.static_p95_itl_ms:7.2f} ms   "
                f"{row.tokens_per_second / row.static_tokens_per_second:.3f}"
            )
