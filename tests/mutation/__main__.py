"""`make mutate`: how many small changes of the engine, the KV cache and the sampler tests notice.

A seeded sample of mutants is run against the tests that cover the changed line, quickest first. A
mutant that no test notices is a survivor: it needs a test, or an entry in equivalent.toml that says
why it does the same as the original. cosmic-ray's own runner rewrites source files in place and
starts an interpreter and the whole suite for each mutant; mutmut leaves out properties and module
constants, which are policy here. So their operators alone are used, see mutants.py and running.py.
"""

import argparse
import os
import random
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutation import mutants, running
from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quire"
PACKAGES = {
    "engine": SOURCE / "engine",
    "kvcache": SOURCE / "kvcache.py",
    "executors/sampler": SOURCE / "executors" / "sampler.py",
}
TESTS = (
    "tests/engine",
    "tests/kvcache",
    "tests/executors/test_sampler.py",
    "tests/executors/cpu/test_sampler.py",
)
# The random runs cover nearly all of engine and kvcache and take long: one of them runs last, for
# what no other test notices.
RANDOM = "tests/engine/test_random.py"
RANDOM_RUN = f"{RANDOM}::test_every_request_gets_the_tokens_of_its_solo_run[0]"
LEAST_KILLED = 0.9
EQUIVALENT = Path(__file__).parent / "equivalent.toml"


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    package: str
    outcome: str  # killed, timeout, survived, equivalent
    num_tests: int
    seconds: float


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    os.chdir(ROOT)
    started = time.monotonic()
    sources = [path for package in PACKAGES.values() for path in _files(package)]
    running.preload()
    if options.baseline:
        baseline = running.load(options.baseline)
    else:
        baseline = running.measure([f"--deselect={RANDOM}", *TESTS], sources)
    chosen = list(_sample(options.sample, options.seed))
    random.Random(options.seed).shuffle(chosen)  # so that a run cut short says something of all
    if options.again:
        log = options.again.read_text()
        chosen = [(name, m) for name, m in chosen if f"  - {m.was}\n  + {m.now}\n" in log]
    print(f"{len(chosen)} mutants, {time.monotonic() - started:.0f} s for coverage", flush=True)
    verdicts = []
    for verdict in _judge(chosen, baseline, options):
        verdicts.append(verdict)
        if verdict.outcome == "survived":
            print(_survivor(verdict), flush=True)
        if len(verdicts) % 25 == 0:
            print(f"{len(verdicts)} of {len(chosen)} done", flush=True)
    print(_table(verdicts))
    print(f"{time.monotonic() - started:.0f} s in all")
    return int(any(score < LEAST_KILLED for score in _scores(verdicts).values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=540, help="mutants, in equal parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--baseline", type=Path, help="use an earlier run's baseline.json")
    parser.add_argument("--again", type=Path, help="only the survivors of an earlier run's log")
    parser.add_argument("--longest", type=float, help="leave out tests of more seconds than this")
    parser.add_argument("--first", nargs="*", default=[], help="test files to run before others")
    return parser


def _files(package: Path) -> list[Path]:
    return sorted(package.glob("*.py")) if package.is_dir() else [package]


def _sample(count: int, seed: int) -> Iterator[tuple[str, Mutant]]:
    """Equal parts of each package; what a small one cannot fill, the engine does."""
    left = count
    for number, (name, package) in enumerate(reversed(PACKAGES.items())):
        share = left // (len(PACKAGES) - number)
        found = mutants.sample(_files(package), share, seed)
        left -= len(found)
        yield from ((name, mutant) for mutant in found)


def _judge(
    chosen: Sequence[tuple[str, Mutant]],
    baseline: running.Baseline,
    options: argparse.Namespace,
) -> Iterator[Verdict]:
    """Run each mutant's tests, several mutants at a time."""
    equivalent = known_equivalent()
    forks: dict[int, Verdict] = {}
    coming = list(reversed(chosen))
    while coming or forks:
        while coming and len(forks) < options.jobs:
            package, mutant = coming.pop()
            lines = mutants.statement_lines(mutant.path, mutant.line)
            tests = [*options.first, *baseline.tests_for(mutant.path, lines, options.longest)]
            if tests and options.longest is None and package in ("engine", "kvcache"):
                tests.append(RANDOM_RUN)
            verdict = Verdict(mutant, package, "survived", len(tests), time.monotonic())
            if (_name(mutant.path), mutant.function, mutant.was, mutant.now) in equivalent:
                yield replace(verdict, outcome="equivalent", seconds=0.0)
            elif not tests:
                yield replace(verdict, seconds=0.0)
            else:
                module = _name(mutant.path).removesuffix(".py").replace("/", ".")
                module = f"quire.{module.removesuffix('.__init__')}"
                pid = running.start(module, mutant.path, mutant.code, tests, baseline)
                forks[pid] = verdict
        if not forks:
            continue
        pid, status = os.wait()
        begun = forks.pop(pid)
        yield replace(begun, outcome=_outcome(status), seconds=time.monotonic() - begun.seconds)


def _outcome(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == running.TIMED_OUT:
        return "timeout"
    return "survived" if code == running.PASSED else "killed"


def known_equivalent() -> set[tuple[str, str, str, str]]:
    """Mutants that do what the original does: file, function, line before and after."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {(entry["file"], entry["in"], entry["was"], entry["now"]) for entry in entries}


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The share killed by package; equivalent mutants do not count."""
    scores = {}
    for package in PACKAGES:
        counted = [v for v in verdicts if v.package == package and v.outcome != "equivalent"]
        killed = sum(verdict.outcome != "survived" for verdict in counted)
        scores[package] = killed / len(counted) if counted else 1.0
    return scores


def _survivor(verdict: Verdict) -> str:
    mutant = verdict.mutant
    return (
        f"survived {_name(mutant.path)}:{mutant.line} {mutant.function} {mutant.operator} "
        f"({verdict.num_tests} tests, {verdict.seconds:.0f} s)\n  - {mutant.was}\n  + {mutant.now}"
    )


def _table(verdicts: Sequence[Verdict]) -> str:
    outcomes = ("killed", "timeout", "survived", "equivalent")
    lines = [f"{'package':20}" + "".join(f"{name:>12}" for name in (*outcomes, "score"))]
    for package, score in _scores(verdicts).items():
        own = [verdict.outcome for verdict in verdicts if verdict.package == package]
        counts = "".join(f"{own.count(outcome):12}" for outcome in outcomes)
        lines.append(f"{package:20}{counts}{score:12.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
