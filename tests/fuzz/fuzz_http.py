"""Fuzzes the server in-process with grammars of requests.

python -m tests.fuzz.fuzz_http --runs 100000 --seed 1     random, any number of runs
python -m tests.fuzz.fuzz_http --case 1:4711              one run again, alone

A run is one connection: one to five requests, sound or not, in pieces. The first that is treated
wrongly ends everything with status 77 and says how to see it again.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from tests.fuzz.choices import Choices
from tests.fuzz.http_wire import case_of
from tests.fuzz.http_world import World, world

BATCH = 96  # connections at a time
FOUND = 77
CORPUS = Path(__file__).parent / "corpus" / "http"


async def fuzz(seed: int, first: int, runs: int, seconds: float) -> int:
    """Random cases, batch by batch, until enough have run or the time is over."""
    started = told_at = time.monotonic()
    done = first
    async with world() as server:
        while done < first + runs and time.monotonic() - started < seconds:
            numbers = range(done, min(first + runs, done + BATCH))
            try:
                await run_numbers(server, seed, numbers)
            except (AssertionError, TimeoutError) as error:
                told = f"{error!r}"[:2000]
                print(f"FOUND with seed {seed} in runs {numbers[0]} to {numbers[-1]}: {told}")
                break
            done = numbers[-1] + 1
            if time.monotonic() - told_at > 30:
                told_at = time.monotonic()
                print(_told(server, done - first, started), flush=True)
        else:
            print(_told(server, done - first, started))
            return 0
    for number in numbers:
        await run_alone(seed, number)
    return FOUND


async def run_numbers(server: World, seed: int, numbers: range) -> None:
    await server.run([case_of(Choices.drawn(seed, number)) for number in numbers])


async def run_alone(seed: int, number: int) -> int:
    """One case against a server of its own; says what it is where it is treated wrongly."""
    case = case_of(Choices.drawn(seed, number))
    async with world() as server:
        try:
            await server.run([case])
        except (AssertionError, TimeoutError) as error:
            print(f"--case {seed}:{number}: {error!r:.2000}\n{case!r:.2000}", flush=True)
            return FOUND
    return 0


def _told(server: World, done: int, started: float) -> str:
    statuses = dict(sorted(server.statuses.items()))
    return (
        f"{done} runs in {time.monotonic() - started:.0f} s, {sum(statuses.values())} answers "
        f"{statuses}, the largest of {server.largest_answer} bytes"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--case", metavar="SEED:NUMBER")
    given = parser.parse_args()
    if given.case is not None:
        seed, _, number = given.case.partition(":")
        return asyncio.run(run_alone(int(seed), int(number)))
    return asyncio.run(fuzz(given.seed, given.first, given.runs, given.seconds))


if __name__ == "__main__":
    sys.exit(main())
