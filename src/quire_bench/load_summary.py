"""Figures of a load: percentiles of the times, tokens a second, errors by kind."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from quire_bench.load import Load, Outcome
from quire_bench.receipts import thinned


class Times(TypedDict):
    """Percentiles, None of nothing, and how many values they are of."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    count: int


class LoadFigures(TypedDict):
    """Everything that the tables and charts show of one load."""

    requests: int
    completed: int
    errors: int
    errors_by_kind: Mapping[str, int]
    seconds: float
    requests_per_second: float
    completion_tokens: int
    completion_tokens_per_second: float
    prompt_tokens: int | None  # None: the server did not count every prompt
    tokens_per_piece: float | None
    time_to_first_token_s: Times
    inter_token_s: Times
    sent_late_s: Times


def percentile(values: Iterable[float], share: float) -> float | None:
    """The nearest rank: a value that occurred, and that so large a share does not exceed."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Times:
    """Percentiles, with how many values they are of."""
    return {
        "p50": percentile(values, 0.50),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
        "max": max(values, default=None),
        "count": len(values),
    }


def first_token_times(outcomes: Iterable[Outcome]) -> list[float]:
    """Of the requests that ended well, in order."""
    times = [outcome.first_token_s for outcome in outcomes if outcome.error is None]
    return [seconds for seconds in times if seconds is not None]


def gaps(outcomes: Iterable[Outcome]) -> list[float]:
    return [gap for outcome in outcomes if outcome.error is None for gap in outcome.gaps]


def speeds(outcomes: Iterable[Outcome]) -> list[float]:
    """Each request's own tokens a second, from due to end."""
    return [
        outcome.completion_tokens / (outcome.ended_at - outcome.due_at)
        for outcome in outcomes
        if outcome.error is None and outcome.completion_tokens
    ]


def counted_by(outcomes: Iterable[Outcome]) -> str:
    """Where token counts come from: the server's usage, pieces of text, or both."""
    kinds = {
        "pieces" if outcome.usage_tokens is None else "usage"
        for outcome in outcomes
        if outcome.error is None
    }
    return "mixed" if len(kinds) > 1 else kinds.pop() if kinds else "nothing"


def samples(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """What a receipt keeps of a load."""
    every = {
        "time_to_first_token_s": first_token_times(outcomes),
        "inter_token_s": gaps(outcomes),
        "request_tokens_per_second": speeds(outcomes),
    }
    return {name: thinned(values) for name, values in every.items()}


def figures(load: Load) -> LoadFigures:
    outcomes = load.outcomes
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.completion_tokens for outcome in good)
    pieces = sum(len(outcome.piece_times) for outcome in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": sum(errors(outcomes).values()),
        "errors_by_kind": dict(errors(outcomes)),
        "seconds": load.seconds,
        "requests_per_second": len(good) / load.seconds,
        "completion_tokens": tokens,
        "completion_tokens_per_second": tokens / load.seconds,
        "prompt_tokens": _prompt_tokens(good),
        "tokens_per_piece": tokens / pieces if pieces else None,
        "time_to_first_token_s": spread(first_token_times(outcomes)),
        "inter_token_s": spread(gaps(outcomes)),
        "sent_late_s": spread([outcome.sent_at - outcome.due_at for outcome in outcomes]),
    }


def errors(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """How many failed, by kind, most first."""
    kinds = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return dict(kinds.most_common())


def _prompt_tokens(good: Sequence[Outcome]) -> int | None:
    """All prompts' tokens, where the server counted every one."""
    counts = [outcome.prompt_tokens for outcome in good]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
