"""Shows what `quire bench regress` makes of real runs: a build beside itself and a slowed one.

    python -m tests.bench.ten_pairs --pairs 10 --rounds 3 --slower 0.25

In every round three processes measure the same load, one after the other: the build, the build
again, and the build with an executor that takes so much longer for each step. Of each pair of sides
`regress` judges the receipts of all rounds. It takes minutes and real time, so it is no test; exit
1 where it raised a false alarm or missed a slowed side.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.cli import main as quire
from quire.executors.reference import ReferenceExecutor
from quire_bench.regress import compare, load_receipts

SIDES = ("build", "again", "slowed")
LOAD = (
    *("--model", "dummy:tiny", "--device", "reference", "--kv-memory", "16MiB"),
    *("--requests", "4", "--prompt-tokens", "16", "--new-tokens", "32", "--repeats", "7"),
)


def measure(folder: str, slower: float) -> None:
    """In a process of its own: one receipt, of an executor so much slower."""
    usual = ReferenceExecutor._compute

    def slowed(*args: Any) -> Any:
        started = time.perf_counter()
        result = usual(*args)
        time.sleep(slower * (time.perf_counter() - started))
        return result

    if slower:
        ReferenceExecutor._compute = slowed  # type: ignore[method-assign, assignment]
    raise SystemExit(quire(["bench", "throughput", *LOAD, "--receipts", folder]))


def measure_pair(folder: Path, rounds: int, slower: float) -> None:
    for number in range(rounds):
        turn = number % len(SIDES)  # nobody is always first
        for side in SIDES[turn:] + SIDES[:turn]:
            extra = slower if side == "slowed" else 0.0
            words = [sys.executable, "-m", "tests.bench.ten_pairs"]
            words += ["--measure", str(folder / side), "--slower", str(extra)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def verdicts(folder: Path, side: str) -> Counter[str]:
    found = compare(load_receipts(folder / "build"), load_receipts(folder / side))
    return Counter(row.verdict for row in found.comparisons)


def run_pair(number: int, rounds: int, slower: float) -> bool:
    """Whether both verdicts are right."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        measure_pair(folder, rounds, slower)
        same, slow = verdicts(folder, "again"), verdicts(folder, "slowed")
    is_right = not same["loss"] and not same["gain"] and bool(slow["loss"]) and not slow["gain"]
    print(f"pair {number}: same build {dict(same)}; slowed {dict(slow)}", flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=0.25, help="time added to a step")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure, args.slower)
    right = [run_pair(n + 1, args.rounds, args.slower) for n in range(args.pairs)]
    print(f"{sum(right)} of {len(right)} pairs judged rightly")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
