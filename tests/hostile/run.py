"""Measures what one key's streams notice of a hostile client with another key.

python -m tests.hostile.run --seconds 60                    over the hash model, steps of 10 ms
python -m tests.hostile.run --seconds 60 --model smollm2    over a real model

One run: quiet and hostile phases in turn, so that what else the machine does falls on both; a look
at what is left over; and SIGTERM while the hostile client is at it again. Prints a JSON object;
exits 1 where a goal is missed.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.program import COMMAND, environment
from tests.hostile.watch import Books, Streams, summary_of
from tests.llm.text_models import write_text_model
from tests.server.processes import ServeProcess, serving

CALM, HOSTILE, WATCHER = "calm-calm-calm-calm", "hostile-hostile-hostile", "watcher-watcher-watch"
KEYS = f"""
[keys.calm]
key = "{CALM}"
[keys.hostile]
key = "{HOSTILE}"
[keys.watcher]
key = "{WATCHER}"
scopes = ["stats"]
"""
GOAL_GAP_RATIO = 3.0
GOAL_RSS_MIB = 512
DRAIN_S = 10
CLIENT = [sys.executable, "-m", "tests.hostile.client"]
EXIT_SLACK_S = 15  # for the last errors to be written and the process to end
MOST_NEW_THREADS = 16  # pools may fill on first use
MOST_NEW_DESCRIPTORS = 8


def serve_command(model: str, folder: Path) -> tuple[list[str], list[str | Path]]:
    """The program and its arguments; `paced` is the hash model with a tiny tokenizer."""
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    options: list[str | Path] = ["--api-keys", keys, "--drain-timeout", str(DRAIN_S)]
    options += ["--log-level", "warning"]
    if model == "paced":
        path = write_text_model(folder / "text.gguf")
        return [sys.executable, "-m", "tests.hostile.paced_server"], [path, *options]
    return [*COMMAND, "serve"], [model, "--kv-memory", "256MiB", *options]


@asynccontextmanager
async def hostile(port: int, *arguments: str) -> AsyncIterator[subprocess.Popen[str]]:
    """The hostile client, started and at it; `outcome` reads what it says at its end."""
    process = subprocess.Popen(
        [*CLIENT, "--port", str(port), "--key", HOSTILE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert (await asyncio.to_thread(process.stdout.readline)) == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


def outcome_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the hostile client has to say; waits for its end."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    process.wait()
    return found


@dataclass
class Phases:
    """All phases of one kind, quiet or hostile, taken together."""

    gaps: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_done: int = 0
    peak_rss: int = 0
    cpu_s: float = 0.0

    async def add(self, streams: Streams, books: Books, seconds: float) -> None:
        """Streams for so long, and the most memory meanwhile."""
        streams.start_phase()
        books.peak_rss = 0
        cpu_before, until = books.cpu_s, time.monotonic() + seconds
        watching = asyncio.create_task(books.watch())
        try:
            await streams.run(lambda: time.monotonic() >= until)
        finally:
            watching.cancel()
        self.gaps += streams.gaps
        self.first_token_s += streams.first_token_s
        self.num_done += streams.num_done
        self.peak_rss = max(self.peak_rss, books.peak_rss)
        self.cpu_s += books.cpu_s - cpu_before

    def summary(self) -> dict[str, Any]:
        return {
            "completions": self.num_done,
            **summary_of(self.gaps, self.first_token_s),
            "server_cpu_s": round(self.cpu_s, 1),
            "peak_rss_mib": self.peak_rss >> 20,
        }


async def wait_until_idle(books: Books) -> dict[str, Any]:
    """What the engine says when nobody asks for anything; the last answer if it never rests."""
    deadline = time.monotonic() + 120
    while True:
        stats = await asyncio.to_thread(books.stats)
        left = {name: stats[name] for name in ("num_running", "num_waiting", "kv_cache_usage")}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


async def settled(books: Books, before: dict[str, int]) -> dict[str, int]:
    """What the process holds once connections that were left have been noticed."""
    deadline = time.monotonic() + 30
    while True:
        found = books.summary()
        is_few = found["descriptors"] <= before["descriptors"] + MOST_NEW_DESCRIPTORS
        if (is_few and found["children"] <= before["children"]) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


async def measure(
    server: ServeProcess, seconds: float, turns: int, clients: int, more: list[str]
) -> dict[str, Any]:
    """Quiet and hostile in turn, what is left over, and SIGTERM."""
    books = Books(server.process.pid, server.port, WATCHER)
    streams = Streams(server.port, CALM, clients)
    await streams.run(lambda: streams.num_done >= clients)  # warm, and what is expected
    quiet, loud = Phases(), Phases()
    attacks: list[dict[str, Any]] = []
    await quiet.add(streams, books, seconds / turns)
    before = books.summary()
    for turn in range(turns):
        if turn:
            await quiet.add(streams, books, seconds / turns)
        options = ["--seconds", str(seconds / turns), "--seed", str(turn), *more]
        async with hostile(server.port, *options) as attacker:
            await loud.add(streams, books, seconds / turns)
            attacks.append(await asyncio.to_thread(outcome_of, attacker))
        left = await wait_until_idle(books)
    result: dict[str, Any] = {
        "quiet": quiet.summary(),
        "hostile": loud.summary(),
        "attacker": merged(attacks),
        "before": before,
        "left": {**left, **await settled(books, before)},
        "wrong": streams.wrong[:10],
        "num_wrong": len(streams.wrong),
    }
    async with hostile(server.port, "--seconds", "600", *more):
        await asyncio.sleep(min(seconds, 5))
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        try:
            result["exit_code"] = await asyncio.to_thread(server.wait)
        except subprocess.TimeoutExpired:
            result["exit_code"] = None
        result["drain_s"] = round(time.monotonic() - started, 1)
    result["missed"] = missed(result)
    return result


def merged(attacks: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of all of them."""
    outcomes: dict[str, Counter[str]] = {}
    for attack in attacks:
        for name, counts in attack["outcomes"].items():
            outcomes.setdefault(name, Counter()).update(counts)
    return {"cpu_s": round(sum(attack["cpu_s"] for attack in attacks), 2), "outcomes": outcomes}


def missed(result: dict[str, Any]) -> list[str]:
    """Goals that were not reached, each with its figure."""
    quiet, loud, left, before = (result[name] for name in ("quiet", "hostile", "left", "before"))
    ratio = loud["gap_p99_ms"] / max(quiet["gap_p99_ms"], 1e-9)
    grown = loud["peak_rss_mib"] - quiet["peak_rss_mib"]
    result["gap_ratio"] = round(ratio, 2)
    result["rss_grown_mib"] = grown
    statuses = [
        (name, outcome)
        for name, outcomes in result["attacker"]["outcomes"].items()
        for outcome in outcomes
    ]
    checks = {
        f"p99 gap is {ratio:.1f} x of quiet": ratio <= GOAL_GAP_RATIO,
        f"memory grew by {grown} MiB": grown <= GOAL_RSS_MIB,
        f"{result['num_wrong']} streams went wrong": not result["num_wrong"],
        f"exit code {result['exit_code']}": result["exit_code"] == 0,
        f"SIGTERM took {result['drain_s']} s": result["drain_s"] <= DRAIN_S + EXIT_SLACK_S,
        f"left over: {left}": not any(
            (left["num_running"], left["num_waiting"], left["kv_cache_usage"])
        )
        and left["descriptors"] <= before["descriptors"] + MOST_NEW_DESCRIPTORS
        and left["threads"] <= before["threads"] + MOST_NEW_THREADS
        and left["children"] <= before["children"],
        f"bad answers: {[s for s in statuses if s[1] in BAD]}": not any(
            outcome in BAD for _, outcome in statuses
        ),
    }
    return [complaint for complaint, is_reached in checks.items() if not is_reached]


BAD = ("500", "502", "504", "desync", "no answer")


async def run(given: argparse.Namespace) -> dict[str, Any]:
    more = ["--workers", str(given.workers), *(["--only", *given.only] if given.only else [])]
    with tempfile.TemporaryDirectory() as folder:
        command, arguments = serve_command(given.model, Path(folder))
        log = Path(folder) / "log"
        env = {"PACED_STEP_MS": str(given.step_ms)}
        with serving(*arguments, *given.serve, env=env, command=command, log=log) as server:
            found = await measure(server, given.seconds, given.turns, given.clients, more)
        lines = log.read_text().splitlines()
        traced = [line[-3000:] for line in lines if "Traceback" in line or '"error"' in line]
        found["errors_logged"] = len(traced)
        if traced:
            found["missed"].append(f"errors in the log, the first: {traced[0]}")
        return {"model": given.model, "seconds": given.seconds, **found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind of phase")
    parser.add_argument("--turns", type=int, default=5, help="quiet and hostile phases alternate")
    parser.add_argument("--model", default="paced", help="a model, or paced: the hash model")
    parser.add_argument("--clients", type=int, default=4, help="streams that must not notice")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the hash model")
    parser.add_argument("--only", nargs="*", default=[], metavar="ATTACK")
    parser.add_argument("--workers", type=int, default=4, help="attacks at a time")
    parser.add_argument("--serve", nargs="*", default=[], help="further options of quire serve")
    given = parser.parse_args()
    result = asyncio.run(run(given))
    print(json.dumps(result, indent=1))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
