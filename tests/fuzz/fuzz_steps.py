"""Fuzzes the executors' steps: `python -m tests.fuzz.fuzz_steps --runs 100000 --seed 0`.

Episode by episode (see steps.py) until so many steps were run, or a finding ends it with status 77
and the seed that makes it happen again (`--runs 1 --seed S`). $QUIRE_NATIVE_BUILD names a folder
whose native module is fuzzed in the place of the one in src/quire.
"""

import argparse
import os
import sys
import time

if "QUIRE_NATIVE_BUILD" in os.environ:
    import tests.native_build  # noqa: F401

from tests.fuzz.steps import Episode, Tally

FOUND = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="steps, of all executors")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--mutations", type=int, default=200, help="mutated plans an episode")
    options = parser.parse_args()
    tally, seed, started = Tally(), options.seed, time.monotonic()
    next_report = 60.0
    while tally.num_runs < options.runs:
        try:
            Episode(seed, tally).run(options.mutations)
        except Exception:
            print(f"seed {seed} found something, after {tally.num_runs} runs", flush=True)
            sys.excepthook(*sys.exc_info())
            return FOUND
        seed += 1
        if time.monotonic() - started > next_report:
            next_report += 60.0
            print(f"{tally.num_runs} runs, seed {seed}", flush=True)
    took = time.monotonic() - started
    print(f"{tally.num_runs} runs, seeds {options.seed} to {seed - 1}, {took:.0f} s: no findings")
    for kind, counts in (("runs", tally.runs), ("outcomes", tally.outcomes)):
        print(kind, dict(counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
