"""The hostile client: a program that sends every attack in turn, over and over, at the lowest rank.

python -m tests.hostile.client --port 8000 --key KEY --seconds 60

It prints one JSON object: what came of each attack, and its own CPU time. `--rounds` sends every
attack so many times instead, for runs that must be the same every time.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from tests.hostile.attacks import ATTACKS, Target
from tests.hostile.bodies import broken, heavy, slow_to_check, slow_to_read

Outcomes = dict[str, Counter[str]]


async def work(target: Target, names: Iterator[str], outcomes: Outcomes) -> None:
    for name in names:
        for outcome in await ATTACKS[name](target):
            outcomes[name][outcome] += 1


async def attack_all(
    target: Target, chosen: list[str], workers: int, seconds: float | None, rounds: int
) -> Outcomes:
    """So many attacks at a time: for so long, in orders of their own, or all of them in rounds."""
    outcomes: Outcomes = {name: Counter() for name in chosen}

    def names(number: int) -> Iterator[str]:
        if seconds is None:
            return iter((chosen * rounds)[number::workers])
        return itertools.cycle(Random(number).sample(chosen, len(chosen)))

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(
                *(work(target, names(number), outcomes) for number in range(workers))
            )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), metavar="ATTACK")
    given = parser.parse_args()
    os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for made in (slow_to_check, slow_to_read, heavy, broken):
        made()  # once, before anything is measured
    print("ready", flush=True)
    sys.stdin.readline()
    before = _cpu_s()
    target = Target(given.port, given.key, Random(given.seed), every=given.seconds is None)
    attacking = attack_all(target, given.only, given.workers, given.seconds, given.rounds)
    outcomes = asyncio.run(attacking)
    print(json.dumps({"cpu_s": round(_cpu_s() - before, 2), "outcomes": outcomes}))
    return 0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
