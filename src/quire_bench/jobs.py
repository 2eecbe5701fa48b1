"""What a batch job costs the requests that somebody waits for, and what it gets beside them.

A server of its own is measured in rounds of three parts of equal length: chat requests that arrive
at random, alone; a job of /v1/batches, alone; and both. The requests of both parts of a round have
the same lengths and times of arrival, and other words. Every second round is the other way round,
so that a machine that slows down is no part's disadvantage.

Lines of a job have one length, so its rate follows from the completion tokens that the server
counts as delivered, less those of the requests: what is computed twice, since a line lost its
blocks to a request, does not count twice.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from quire.core.errors import ConfigError, ExecutorError
from quire_bench.http_client import Client, connect, parse_endpoint
from quire_bench.lengths import prompt_text
from quire_bench.load import Load, PlannedRequest, Target, draw_arrivals, open_loop
from quire_bench.load_summary import figures, first_token_times, percentile
from quire_bench.receipts import Facts, thinned

_CHAT = "/v1/chat/completions"
_MAX_LINES = 50_000  # of one batch
_POLL_S = 0.05
_PATIENCE_S = 120.0
_STOP_S = 30.0
_LEAD_S = 2.0  # that a job runs before it is measured
_FIRST_LINES = 64  # of the job that the server is warmed with
_SPARE = 4.0  # times the lines that a job needs by that one's rate, which fills no batch

OnPart = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request; of its prompt about so many."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class JobsPlan:
    rate: float  # requests a second
    requests: Lengths
    lines: Lengths
    seconds: float  # of a part
    rounds: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1e4:
            raise ConfigError(f"--rate must be above 0 and below 10000, got {self.rate:g}")
        if not 1 <= self.seconds <= 3600:
            raise ConfigError(f"--seconds must be from 1 to 3600, got {self.seconds:g}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        lengths = (self.requests.prompt_tokens, self.requests.new_tokens)
        if min(*lengths, self.lines.prompt_tokens, self.lines.new_tokens) < 1:
            raise ConfigError("requests and lines need a prompt token and a new one at least")


class Part(NamedTuple):
    """A stretch of time: what came in it."""

    seconds: float
    load: Load | None  # of requests
    line_completion_tokens: int  # of the job

    @property
    def request_tokens(self) -> int:
        """Of prompts and completions."""
        return sum(
            (outcome.prompt_tokens or 0) + outcome.completion_tokens
            for outcome in (self.load.outcomes if self.load else ())
        )

    @property
    def request_completion_tokens(self) -> int:
        outcomes = self.load.outcomes if self.load else ()
        return sum(outcome.completion_tokens for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class Round:
    requests_alone: Part
    job_alone: Part
    both: Part


@dataclass(frozen=True, slots=True)
class JobsFigures:
    results: Facts
    samples: dict[str, list[float]]
    device: str | None


# ---- the server


@contextmanager
def started_server(words: Sequence[str]) -> Iterator[str]:
    """`quire serve` with these words, on a free port and with a state folder of its own: its URL.
    It is ended afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-jobs-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        command = [sys.executable, "-m", "quire.cli", "serve", *words]
        server = subprocess.Popen(
            [*command, "--port", "0", "--state", str(Path(folder) / "state"), "--no-page"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert server.stdout is not None
            found = re.search(r"https?://\S+:\d+", server.stdout.readline())
            if found is None:
                errors.seek(0)
                raise ExecutorError(f"the server did not start: {errors.read()[-2000:].strip()}")
            yield found.group()
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


# ---- the measurement


async def measure_jobs(url: str, plan: JobsPlan, on_part: OnPart = lambda _: None) -> JobsFigures:
    """Rounds of requests, of a job and of both, at a server without keys."""
    target = Target(parse_endpoint(url), api="chat", ignore_eos=True)
    async with connect(target.endpoint) as client:
        run = _Run(client, target, plan, on_part)
        await run.warm_up()
        rounds = [await run.round(number) for number in range(plan.rounds)]
        _, stats = await client.get_json("/stats")
    return JobsFigures(
        _results(rounds, run.tokens_per_new), _samples(rounds), stats and stats.get("device")
    )


class _Run:
    def __init__(self, client: Client, target: Target, plan: JobsPlan, on_part: OnPart) -> None:
        self.tokens_per_new = 1.0  # of a line: tokens of prompt and completion, by those of it
        self._client = client
        self._target = target
        self._plan = plan
        self._on_part = on_part
        self._words = Random(plan.seed)  # of prompts: no two are alike
        self._num_lines = _FIRST_LINES  # of the next job

    async def warm_up(self) -> None:
        """Requests and a job of the sizes to come; how many tokens a line has, and how many lines
        a job needs that is not over before it is measured."""
        self._on_part("warming up")
        load = await open_loop(self._target, self._arrivals(0)[:4])
        failed = [outcome for outcome in load.outcomes if outcome.error is not None]
        if failed:
            raise ExecutorError(f"a request failed, {failed[0].error}: {failed[0].detail}")
        started_at = time.perf_counter()
        usage = await self._usage(await self._wait(await self._begin(_FIRST_LINES), "completed"))
        rate = len(usage) / (time.perf_counter() - started_at)
        needed = _SPARE * rate * (2 * self._plan.seconds + _LEAD_S)
        self._num_lines = max(_FIRST_LINES, min(_MAX_LINES, int(needed)))
        new_tokens = fmean(each["completion_tokens"] for each in usage)
        self.tokens_per_new = fmean(each["total_tokens"] for each in usage) / new_tokens

    async def _usage(self, batch: dict[str, Any]) -> list[dict[str, int]]:
        if batch["output_file_id"] is None:
            raise ExecutorError(f"the job's lines failed: {batch['request_counts']}")
        content = await self._client.get_text(f"/files/{batch['output_file_id']}/content")
        return [json.loads(line)["response"]["body"]["usage"] for line in content.splitlines()]

    async def round(self, number: int) -> Round:
        is_turned = bool(number % 2)
        if not is_turned:
            alone = await self._requests_alone(number)
        job = await self._begin(self._num_lines)
        await self._wait(job, "in_progress")
        await asyncio.sleep(_LEAD_S)
        both = await self._both(number) if is_turned else None
        job_alone = await self._job_alone(number)
        if both is None:
            both = await self._both(number)
        await self._end(job)
        if is_turned:
            alone = await self._requests_alone(number)
        return Round(alone, job_alone, both)

    async def _requests_alone(self, number: int) -> Part:
        self._on_part(f"round {number + 1}, requests alone")
        load = await open_loop(self._target, self._arrivals(number))
        return Part(load.seconds, load, 0)

    async def _job_alone(self, number: int) -> Part:
        self._on_part(f"round {number + 1}, the job alone")
        before, started_at = await self._num_tokens(), time.perf_counter()
        await asyncio.sleep(self._plan.seconds)
        return Part(time.perf_counter() - started_at, None, await self._num_tokens() - before)

    async def _both(self, number: int) -> Part:
        self._on_part(f"round {number + 1}, both")
        before = await self._num_tokens()
        load = await open_loop(self._target, self._arrivals(number))
        part = Part(load.seconds, load, 0)
        job_tokens = await self._num_tokens() - before - part.request_completion_tokens
        return part._replace(line_completion_tokens=job_tokens)

    def _arrivals(self, number: int) -> list[PlannedRequest]:
        """A round's requests: their times are the same whenever it is asked."""
        plan = self._plan
        times = draw_arrivals(Random(f"{plan.seed} {number}"), plan.rate, plan.seconds)
        return [
            PlannedRequest(
                prompt_text(self._words, plan.requests.prompt_tokens),
                plan.requests.new_tokens,
                due_s=at,
            )
            for at in times
        ]

    async def _num_tokens(self) -> int:
        """That the server has delivered."""
        status, stats = await self._client.get_json("/stats")
        if status != 200:
            raise ExecutorError(f"/v1/stats answers {status}")
        return int(stats["completion_tokens"])

    # ---- the job

    async def _begin(self, num_lines: int) -> str:
        content = "".join(self._line(number) for number in range(num_lines)).encode()
        file = await self._client.upload("/files", {"purpose": "batch"}, "lines.jsonl", content)
        asked = {"input_file_id": file["id"], "endpoint": _CHAT, "completion_window": "24h"}
        return str((await self._client.post_json("/batches", asked))["id"])

    def _line(self, number: int) -> str:
        lengths = self._plan.lines
        text = prompt_text(self._words, lengths.prompt_tokens)
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": lengths.new_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return json.dumps({"custom_id": str(number), "url": _CHAT, "body": body}) + "\n"

    async def _wait(self, job: str, status: str) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            _, batch = await self._client.get_json(f"/batches/{job}")
            if batch["status"] == status:
                return dict(batch)
            if batch["status"] in ("failed", "expired"):
                raise ExecutorError(f"the job is {batch['status']}: {batch['errors']}")
            await asyncio.sleep(_POLL_S)
        raise ExecutorError(f"the job is not {status} after {_PATIENCE_S:g} s: {batch['status']}")

    async def _end(self, job: str) -> None:
        """Cancel it; a job that ended by itself was too short to measure anything by."""
        _, batch = await self._client.get_json(f"/batches/{job}")
        if batch["status"] != "in_progress":
            raise ExecutorError(
                f"the job of {self._num_lines:,} lines was over before it was measured: take "
                "longer lines (--job-new-tokens) or shorter parts (--seconds)"
            )
        await self._client.post_json(f"/batches/{job}/cancel", {})
        await self._wait(job, "cancelled")


# ---- figures


def _results(rounds: Sequence[Round], tokens_per_new: float) -> Facts:
    """`tokens_per_new`: a line's tokens by its completion tokens."""
    alone = _joined([each.requests_alone for each in rounds])
    beside = _joined([each.both for each in rounds])
    shares = [_share(each, tokens_per_new) for each in rounds]
    by_completion = [_share(each, None) for each in rounds]
    job_alone, job_beside = ([each.job_alone for each in rounds], [each.both for each in rounds])
    request_tokens = sum(part.request_tokens for part in job_beside)
    return {
        "alone": figures(alone),
        "beside_job": figures(beside),
        "first_token_p50_ratio": _ratio(alone, beside, 0.5),
        "first_token_p95_ratio": _ratio(alone, beside, 0.95),
        "job_alone_tokens_per_second": tokens_per_new * _line_rate(job_alone),
        "job_tokens_per_second": tokens_per_new * _line_rate(job_beside),
        "request_tokens_per_second": request_tokens / sum(part.seconds for part in job_beside),
        "job_share_of_what_is_left": median(shares),
        "least_share_of_a_round": min(shares),
        "job_share_by_completion_tokens": median(by_completion),
    }


def _joined(parts: Sequence[Part]) -> Load:
    """The requests of several parts as one load that lasted as long as all."""
    loads = [part.load for part in parts if part.load is not None]
    outcomes = [outcome for load in loads for outcome in load.outcomes]
    return Load(outcomes, 0.0, sum(load.seconds for load in loads))


def _ratio(alone: Load, beside: Load, share: float) -> float | None:
    before, after = (
        percentile(first_token_times(load.outcomes), share) for load in (alone, beside)
    )
    return after / before if before and after else None


def _line_rate(parts: Sequence[Part]) -> float:
    """Completion tokens of the job a second."""
    return sum(part.line_completion_tokens for part in parts) / sum(part.seconds for part in parts)


def _share(found: Round, tokens_per_new: float | None) -> float:
    """What the job got beside requests, of its rate alone less the requests' tokens; by tokens of
    prompts and completions, or (None) of completions alone."""
    both = found.both
    taken = both.request_completion_tokens if tokens_per_new is None else both.request_tokens
    scale = 1.0 if tokens_per_new is None else tokens_per_new
    left = scale * _line_rate([found.job_alone]) - taken / both.seconds
    if left <= 0:
        raise ExecutorError(
            f"requests alone take all that the job gets alone, {taken / both.seconds:,.0f} "
            "tokens/s: lower --rate"
        )
    return scale * _line_rate([both]) / left


def _samples(rounds: Sequence[Round]) -> dict[str, list[float]]:
    alone = [part for each in rounds if (part := each.requests_alone.load)]
    beside = [part for each in rounds if (part := each.both.load)]
    return {
        "alone_time_to_first_token_s": thinned(_first_tokens(alone)),
        "beside_job_time_to_first_token_s": thinned(_first_tokens(beside)),
        "job_alone_completion_tokens_per_second": [_line_rate([r.job_alone]) for r in rounds],
        "job_completion_tokens_per_second": [_line_rate([r.both]) for r in rounds],
    }


def _first_tokens(loads: Sequence[Load]) -> list[float]:
    return [seconds for load in loads for seconds in first_token_times(load.outcomes)]
