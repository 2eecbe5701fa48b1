"""Sends requests to an OpenAI-compatible server and times what streams back.

Two kinds of load. Closed loop: so many clients, each sending its next request when the last one
has ended; the server sets the pace. Open loop: requests arrive at random (Poisson) at a rate,
whether or not the server keeps up; their times count from when they were due, not from when they
could be sent, so that a stalled server cannot hide behind a stalled client.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from random import Random
from typing import Any, Literal, TypeVar

from quire.core.errors import ConfigError
from quire_bench.http_client import Client, Endpoint, ExchangeError, connect
from quire_bench.lengths import Bounds, Mix, prompt_text

Result = TypeVar("Result")
Api = Literal["completions", "chat"]
_PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
PAUSE_AFTER_ERROR_S = 0.1  # of a closed loop's client, so that a server that fails is not flooded


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send; `due_s` is its time of arrival where the loop is open."""

    prompt: str
    max_tokens: int
    due_s: float = 0.0
    label: str = "request"


@dataclass(slots=True)
class Outcome:
    """What became of a request; times in seconds of one clock."""

    label: str
    due_at: float
    sent_at: float
    piece_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    prompt_tokens: int | None = None  # as the server counted; None: it did not say
    usage_tokens: int | None = None  # completion tokens, likewise
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def completion_tokens(self) -> int:
        """Tokens by the server's count, or else pieces of text."""
        return len(self.piece_times) if self.usage_tokens is None else self.usage_tokens

    @property
    def first_token_s(self) -> float | None:
        return self.piece_times[0] - self.due_at if self.piece_times else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces; with one token a piece, between tokens."""
        return [after - before for before, after in pairwise(self.piece_times)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to request it."""

    endpoint: Endpoint
    api: Api = "completions"
    model: str | None = None
    ignore_eos: bool = False
    wants_usage: bool = True
    timeout_s: float = 300.0
    temperature: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of every body

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self.model is not None:
            body["model"] = self.model
        if self.wants_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.more}


def draw_requests(
    rng: Random, mix: Mix, bounds: Bounds, count: int, label: str = "request"
) -> list[PlannedRequest]:
    """So many requests of a mix, the same for the same generator."""
    requests = []
    for _ in range(count):
        prompt_tokens, new_tokens = mix.scaled_draw(rng, bounds)
        requests.append(PlannedRequest(prompt_text(rng, prompt_tokens), new_tokens, label=label))
    return requests


def draw_arrivals(rng: Random, rate: float, duration_s: float) -> list[float]:
    """Times of Poisson arrivals at a rate, up to the duration; at least one."""
    times = [rng.expovariate(rate)]
    while times[-1] < duration_s:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1] or [0.0]


async def find_model(target: Target) -> str | None:
    """The first model that the server lists; None where it has no list."""
    try:
        async with asyncio.timeout(target.timeout_s):
            async with connect(target.endpoint) as client:
                status, data = await client.get_json("/models")
    except (ExchangeError, TimeoutError, OSError) as error:
        raise _cannot_use(target, error) from error
    if status in (401, 403):
        raise _cannot_use(target, ExchangeError(f"http {status}", "", status))
    try:
        return str(data["data"][0]["id"]) if status == 200 else None
    except (TypeError, KeyError, IndexError):
        return None


async def check_server(target: Target) -> Outcome:
    """Send one short request, which also warms the server; ConfigError where it cannot answer."""
    async with connect(target.endpoint) as client:
        outcome = await perform(
            client, target, PlannedRequest("Once upon a time", 2), time.perf_counter()
        )
    if outcome.error is not None:
        raise _cannot_use(target, ExchangeError(outcome.error, outcome.detail))
    return outcome


def _cannot_use(target: Target, error: Exception) -> ConfigError:
    url, path = target.endpoint.url, _PATHS[target.api]
    kind = error.kind if isinstance(error, ExchangeError) else "timeout"
    reasons = {
        "connect": f"no server answers at {url}: start it, or correct host and port ({error})",
        "timeout": f"the server at {url} did not answer within {target.timeout_s:g} s (--timeout)",
        "http 401": f"the server at {url} wants a key (401): give --api-key or set QUIRE_API_KEY",
        "http 403": f"the server at {url} refuses this key (403): check --api-key or QUIRE_API_KEY",
        "http 404": f"the server at {url} has no POST {path} or not this model (404): is it "
        f"OpenAI-compatible? Try --api or --model ({error})",
        "http 400": f"the server at {url} refuses the request: {error} (--no-usage leaves out "
        "stream_options, --ignore-eos adds ignore_eos)",
        "bad reply": f"the server at {url} is not OpenAI-compatible: {error}",
    }
    return ConfigError(reasons.get(kind, f"the server at {url} failed, {kind}: {error}"))


async def perform(
    client: Client, target: Target, request: PlannedRequest, due_at: float
) -> Outcome:
    """Send one request and follow its stream to the end; errors become its outcome."""
    outcome = Outcome(request.label, due_at, time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _follow(client, target, request, outcome)
    except ExchangeError as error:
        outcome.error, outcome.detail = error.kind, str(error)
    except TimeoutError:
        outcome.error, outcome.detail = "timeout", f"no end within {target.timeout_s:g} s"
    outcome.ended_at = time.perf_counter()
    return outcome


async def _follow(
    client: Client, target: Target, request: PlannedRequest, outcome: Outcome
) -> None:
    events = client.post_for_events(_PATHS[target.api], target.body(request))
    async with aclosing(events):
        async for event in events:
            now = time.perf_counter()
            if event == "[DONE]":
                return
            chunk = _parse(event)
            if _text_of(chunk):
                outcome.piece_times.append(now)
            usage = chunk.get("usage")
            if isinstance(usage, dict):
                outcome.prompt_tokens = _count(usage, "prompt_tokens")
                outcome.usage_tokens = _count(usage, "completion_tokens")


def _parse(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except (ValueError, RecursionError):
        raise ExchangeError("bad reply", f"an event that is no JSON: {event[:100]!r}") from None
    if not isinstance(chunk, dict):
        raise ExchangeError("bad reply", f"an event that is no object: {event[:100]!r}")
    if chunk.get("error") is not None:
        raise ExchangeError("error event", f"the stream says: {json.dumps(chunk['error'])[:300]}")
    return chunk


def _text_of(chunk: dict[str, Any]) -> str:
    """The text of a chunk of either API; reasoning counts as text."""
    with suppress(KeyError, IndexError, TypeError, AttributeError):
        choice = chunk["choices"][0]
        if "text" in choice:
            return str(choice["text"] or "")
        delta = choice["delta"]
        return str(delta.get("content") or delta.get("reasoning_content") or "")
    return ""


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and value >= 0 else None


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a load, where it is installed on uvloop, which halves what a token costs the client."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        return import_module("uvloop").new_event_loop  # type: ignore[no-any-return]
    except ImportError:
        return None


@dataclass(frozen=True, slots=True)
class Load:
    """A load's results: every request's outcome, and when the load began and ended."""

    outcomes: list[Outcome]
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


async def closed_loop(
    target: Target,
    requests: Iterator[PlannedRequest],
    num_clients: int,
    *,
    until_s: float | None = None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Load:
    """Clients that share the requests; none starts after `until_s`."""
    started_at = time.perf_counter()
    outcomes: list[Outcome] = []

    async def send_in_turn(client: Client) -> None:
        for request in requests:  # one iterator: whoever is free takes the next
            if until_s is not None and time.perf_counter() - started_at >= until_s:
                return
            outcome = await perform(client, target, request, time.perf_counter())
            outcomes.append(outcome)
            on_outcome(outcome)
            if outcome.error is not None:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async with connect(target.endpoint) as client, asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(send_in_turn(client))
    return Load(outcomes, started_at, time.perf_counter())


async def open_loop(
    target: Target,
    requests: Sequence[PlannedRequest],
    *,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Load:
    """Send each request when it is due, whatever became of the others."""
    started_at = time.perf_counter()

    async def arrive(client: Client, request: PlannedRequest) -> Outcome:
        due_at = started_at + request.due_s
        await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
        outcome = await perform(client, target, request, due_at)
        on_outcome(outcome)
        return outcome

    async with connect(target.endpoint) as client:
        outcomes = await asyncio.gather(*(arrive(client, request) for request in requests))
    return Load(list(outcomes), started_at, time.perf_counter())
