"""Those who must not notice: another key's streams, timed by token, and the server's books."""

import asyncio
import http.client
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_bench.http_client import Client, Endpoint, ExchangeError, connect

PATIENCE_S = 120.0


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def quantile_of_time(gaps: list[float], share: float) -> float:
    """The gap that a moment falls into or a shorter one, for this share of all moments.

    A stall of ten seconds is one gap among thousands, but a reader waits in it for long.
    """
    left = (1 - share) * sum(gaps)
    for gap in sorted(gaps, reverse=True):
        left -= gap
        if left <= 0:
            return gap
    return 0.0


@dataclass
class Streams:
    """Clients that each stream one completion after the other, and compare it with the first."""

    port: int
    key: str
    num_clients: int = 4
    max_tokens: int = 64
    expected: dict[int, str] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # of the phase
    first_token_s: list[float] = field(default_factory=list)
    num_done: int = 0
    wrong: list[str] = field(default_factory=list)

    def start_phase(self) -> None:
        self.gaps, self.first_token_s, self.num_done = [], [], 0

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Stream until it is over; every client ends its last completion."""
        endpoint = Endpoint("127.0.0.1", self.port, "/v1", False, self.key)
        async with connect(endpoint) as client:
            numbers = range(self.num_clients)
            await asyncio.gather(*(self._stream(client, number, is_over) for number in numbers))

    async def _stream(self, client: Client, number: int, is_over: Callable[[], bool]) -> None:
        while not is_over():
            try:
                text = await self._complete(client, number)
            except ExchangeError as error:
                self.wrong.append(f"client {number}: {error.kind}: {error}"[:300])
                await asyncio.sleep(0.1)
                continue
            if text != self.expected.setdefault(number, text):
                self.wrong.append(f"client {number} got {text!r:.200}")
            self.num_done += 1

    async def _complete(self, client: Client, number: int) -> str:
        body = {
            "prompt": f"Once upon a time there were {number + 2} friends who",
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        last = started = time.perf_counter()
        text = ""
        async for event in client.post_for_events("/completions", body):
            now = time.perf_counter()
            if event == "[DONE]":
                break
            chunk = json.loads(event)
            if "error" in chunk:
                raise ExchangeError("error event", event)
            if last is started:
                self.first_token_s.append(now - started)
            else:
                self.gaps.append(now - last)
            last = now
            text += chunk["choices"][0]["text"]
        return text


def summary_of(gaps: list[float], first_token_s: list[float]) -> dict[str, Any]:
    return {
        "gaps": len(gaps),
        "gap_p50_ms": round(1000 * quantile(gaps, 0.5), 2),
        "gap_p99_ms": round(1000 * quantile(gaps, 0.99), 2),
        "gap_p99_of_time_ms": round(1000 * quantile_of_time(gaps, 0.99), 2),
        "gap_max_ms": round(1000 * max(gaps, default=0.0), 2),
        "first_token_p50_ms": round(1000 * quantile(first_token_s, 0.5), 2),
        "first_token_p99_ms": round(1000 * quantile(first_token_s, 0.99), 2),
    }


@dataclass
class Books:
    """What a server process holds, seen from outside."""

    pid: int
    port: int
    key: str
    peak_rss: int = 0

    def stats(self) -> Any:
        return json.loads(self._get("/v1/stats"))

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.key}"})
            return connection.getresponse().read()
        finally:
            connection.close()

    @property
    def rss(self) -> int:
        """Of the process and of those it started."""
        return sum(map(_rss_of, (self.pid, *self.children)))

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(child) for task in tasks for child in _read(task / "children").split()]

    async def watch(self, interval_s: float = 0.1) -> None:
        """Remember the most memory it ever had, of all that it had at a time."""
        while True:
            self.peak_rss = max(self.peak_rss, self.rss)
            await asyncio.sleep(interval_s)

    def summary(self) -> dict[str, int]:
        return {
            "rss_mib": self.rss >> 20,
            "threads": self.num_threads,
            "descriptors": self.num_descriptors,
            "children": len(self.children),
        }


def _read(path: Path) -> str:
    """Empty where the process or thread has gone meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _rss_of(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
