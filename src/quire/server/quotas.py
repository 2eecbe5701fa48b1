"""Quotas: requests at a time and a minute, tokens a minute and a day; and what each key has used.

    read the body, tokenise -> Meter.admit(key, demand) -> engine
      -> QuotaReservation.settle(outputs)

A call reserves the most that it can use before it is queued; its usage replaces that at its end.
`settle` is called exactly once for every admission, whatever became of the call: with the outputs
of all its requests, or with none where the engine refused them. A request that was cut off has an
output too, with the tokens it got.

A minute's quota is a bucket that holds a minute's tokens and refills steadily. One call may ask for
more than it holds: it waits for a full bucket and overdraws it; the next call waits longer. A day's
quota is never overdrawn, and counts from midnight to midnight in UTC.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn, Protocol

from quire.core.errors import ConfigError
from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.stats import CompletionRate
from quire.llm.prompts import Prepared
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing
from quire.server.logs import LOGGER, log
from quire.server.usage_file import UsageFile


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a call can use."""

    num_prompts: int
    num_prompt_tokens: int
    max_new_tokens: int  # of all completions of all prompts


class QuotaReservation(Protocol):
    """The reservation of an admitted call."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Rate-limit headers of the answer."""

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        """Replace the demand by the actual usage."""


class Meter(Protocol):
    """Decides whether a key may have what it asks for; raises an ApiError (429) where not."""

    def admit(self, key: ApiKey | None, demand: Demand) -> QuotaReservation: ...


def demand_of(
    prompts: Iterable[tuple[Prepared, SamplingParams]], *, pooling: bool = False
) -> Demand:
    """`pooling`: prompts that are computed for their states, without new tokens."""
    listed = list(prompts)
    return Demand(
        len(listed),
        sum(len(prompt.tokens) for prompt, _ in listed),
        # Where a client does not say how many, the server has put what the context leaves.
        0 if pooling else sum((params.max_tokens or 0) * params.n for _, params in listed),
    )


def tokens_of(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """What a call used: tokens of prompts and of completions."""
    started = [output for output in outputs if output.metrics.started_at is not None]
    prompt = sum(len(output.prompt_token_ids) for output in started)
    return prompt, sum(c.num_tokens for output in started for c in output.completions)


# ---- requests


_LONGEST_BURST_S = 10.0  # a bucket holds this many seconds of its rate


@dataclass(slots=True)
class _Account:
    """A key's token bucket, which refills at its rate, and its open requests."""

    tokens: float
    filled_at: float
    num_open: int = 0
    completion_rate: CompletionRate = field(default_factory=CompletionRate)


class RequestLimits:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._accounts: dict[str, _Account] = {}

    def enter(self, key: ApiKey) -> None:
        """Count a request, or raise a 429 with the time to retry."""
        now = self._now()
        account = self._account(key, now)
        if key.max_concurrent is not None and account.num_open >= key.max_concurrent:
            raise ApiError(
                429,
                f"key {key.name!r} has {account.num_open} requests open; its limit is "
                f"{key.max_concurrent} (max_concurrent)",
                code="concurrency_limit",
                retry_after_s=account.completion_rate.interval_s(now),
            )
        if key.requests_per_minute is not None:
            self._take_one(key, account)
        if not account.num_open:
            account.completion_rate.busy_from(now)
        account.num_open += 1

    def count_prompts(self, key: ApiKey, num_prompts: int) -> None:
        """Count all prompts of a body; its request was counted as one.

        A body may have more prompts than the bucket holds: it is admitted unless the bucket is
        overdrawn, and overdraws it; the next request waits.
        """
        if key.requests_per_minute is None or num_prompts <= 1:
            return
        account = self._account(key, self._now())
        if account.tokens < 0:
            self._refuse(key, account)
        account.tokens -= num_prompts - 1

    def leave(self, key: ApiKey) -> None:
        account = self._accounts[key.name]
        account.num_open -= 1
        account.completion_rate.completed(self._now())

    def _account(self, key: ApiKey, now: float) -> _Account:
        rate = (key.requests_per_minute or 0.0) / 60
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = _Account(_burst(rate), now)
        account.tokens = min(_burst(rate), account.tokens + rate * (now - account.filled_at))
        account.filled_at = now
        return account

    def _take_one(self, key: ApiKey, account: _Account) -> None:
        if account.tokens < 1:
            self._refuse(key, account)
        account.tokens -= 1

    def _refuse(self, key: ApiKey, account: _Account) -> NoReturn:
        assert key.requests_per_minute is not None
        raise ApiError(
            429,
            f"key {key.name!r} sends more than {key.requests_per_minute:g} prompts a minute "
            "(requests_per_minute)",
            code="rate_limit_exceeded",
            retry_after_s=60 * (1 - account.tokens) / key.requests_per_minute,
        )


def _burst(rate: float) -> float:
    return max(1.0, rate * _LONGEST_BURST_S)


# ---- tokens


SAVE_INTERVAL_S = 1.0  # the most that a kill -9 loses

Now = Callable[[], float]


@dataclass(slots=True)
class Usage:
    """What a key has used. `owed` decreases at the rate of its quota by the minute."""

    prompt_tokens: int = 0  # since the server started, as are completions
    completion_tokens: int = 0
    today: int = 0  # of all processes with the same state; running calls count with their demand
    unsaved: int = 0  # of today, not in the file yet
    owed: float = 0.0
    owed_at: float = 0.0

    def take(self, tokens: int) -> None:
        """Add tokens; a negative number gives back what was reserved and not used."""
        self.today = max(0, self.today + tokens)
        self.unsaved += tokens
        self.owed = max(0.0, self.owed + tokens)


class Reservation:
    """The reservation of a call."""

    def __init__(self, quotas: "Quotas", key: ApiKey | None, tokens: int, day: str) -> None:
        self._quotas = quotas
        self._key = key
        self._tokens = tokens
        self._day = day
        self._is_settled = False

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        assert not self._is_settled, "a call ends once"
        self._is_settled = True
        self.settle_tokens(*tokens_of(outputs))

    def settle_tokens(self, prompt: int, completion: int) -> None:
        self._quotas.settle(self._key, self._tokens, prompt, completion, self._day)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return self._quotas.headers(self._key)


class Quotas:
    """The meter for the keys in force. Used on the event loop; `save` on any thread."""

    def __init__(
        self,
        limits: RequestLimits,
        file: UsageFile | None = None,
        *,
        now: Now = time.monotonic,
        wall_now: Now = time.time,
    ) -> None:
        self._limits = limits
        self._file = file
        self._now = now
        self._wall_now = wall_now
        self._day = self._today()
        self._usage: dict[str, Usage] = {}
        self._is_open = False  # the file was read, and is written to
        self._wants_news = False  # a call was refused; other processes may have given tokens back
        self._lock = threading.Lock()  # guards all of the above
        self._failure: str | None = None  # why it could not be saved the last time

    # ---- the meter

    def count(self, key: ApiKey | None, prompt: int, completion: int) -> None:
        """Usage of a call that reserved nothing."""
        self.settle(key, 0, prompt, completion, self._day)

    def admit(self, key: ApiKey | None, demand: Demand) -> QuotaReservation:
        """Reserve the most that a call can use; a 429 where that exceeds the key's quotas."""
        return self.reserve(key, demand)

    def reserve(self, key: ApiKey | None, demand: Demand) -> "Reservation":
        tokens = demand.num_prompt_tokens + demand.max_new_tokens
        with self._lock:
            usage = self._usage_of(key)
            if key is not None:
                self._check_day(key, usage, tokens)
                self._check_minute(key, usage, tokens)
                self._limits.count_prompts(key, demand.num_prompts)
            usage.take(tokens)
            return Reservation(self, key, tokens, self._day)

    def settle(
        self, key: ApiKey | None, booked: int, prompt: int, completion: int, day: str
    ) -> None:
        """Replace a reservation by the usage; a day that is over is not changed."""
        with self._lock:
            usage = self._usage_of(key)
            usage.prompt_tokens += prompt
            usage.completion_tokens += completion
            excess = booked - prompt - completion
            if day == self._day:
                usage.take(-excess)
            else:
                usage.owed = max(0.0, usage.owed - excess)

    def _check_minute(self, key: ApiKey, usage: Usage, tokens: int) -> None:
        limit = key.tokens_per_minute
        if limit is None:
            return
        missing = usage.owed + min(tokens, limit) - limit
        if missing > 0:
            raise ApiError(
                429,
                f"key {key.name!r} may use {limit} tokens a minute (tokens_per_minute) and has "
                f"{_left(limit, usage.owed)} left; this asks for up to {tokens}, prompt and "
                "max_tokens together",
                code="rate_limit_exceeded",
                retry_after_s=60 * missing / limit,
                headers=self._headers(key, usage),
            )

    def _check_day(self, key: ApiKey, usage: Usage, tokens: int) -> None:
        limit = key.tokens_per_day
        if limit is None or usage.today + tokens <= limit:
            return
        if tokens > limit:
            raise ApiError(
                400,
                f"this asks for up to {tokens} tokens, prompt and max_tokens together; key "
                f"{key.name!r} may use {limit} a day (tokens_per_day): ask for fewer",
                param="max_tokens",
                code="request_exceeds_quota",
            )
        self._wants_news = True
        raise ApiError(
            429,
            f"key {key.name!r} may use {limit} tokens a day (tokens_per_day) and has "
            f"{_left(limit, usage.today)} left until midnight UTC; this asks for up to {tokens}, "
            "prompt and max_tokens together",
            code="insufficient_quota",
            retry_after_s=self.day_left_s,
            headers=self._headers(key, usage),
        )

    # ---- figures

    def headers(self, key: ApiKey | None) -> tuple[tuple[str, str], ...]:
        """What is left of the minute, in OpenAI's headers."""
        if key is None:
            return ()
        with self._lock:
            return self._headers(key, self._usage_of(key))

    def _headers(self, key: ApiKey, usage: Usage) -> tuple[tuple[str, str], ...]:
        limit = key.tokens_per_minute
        if limit is None:
            return ()
        return (
            ("x-ratelimit-limit-tokens", str(limit)),
            ("x-ratelimit-remaining-tokens", str(_left(limit, usage.owed))),
            ("x-ratelimit-reset-tokens", f"{round(60_000 * usage.owed / limit)}ms"),
        )

    def usage_of(self, key: ApiKey | None) -> Usage:
        """A copy of what a key has used, as of now."""
        with self._lock:
            return replace(self._usage_of(key))

    def by_key(self) -> Mapping[str, Usage]:
        """The usage of every key that used something, since the start or today."""
        with self._lock:
            self._roll()
            return {name: replace(usage) for name, usage in sorted(self._usage.items())}

    # ---- the day

    def open(self, ring: KeyRing) -> None:
        """Read today's usage if a key has a quota by the day; raises a ConfigError."""
        if self._is_open or all(key.tokens_per_day is None for key in ring):
            return
        if self._file is None:
            raise ConfigError("keys have quotas of the day (tokens_per_day): give --state FOLDER")
        known = self._file.open(self._day)
        with self._lock:
            for name, tokens in known.items():
                usage = self._usage.setdefault(name, Usage(owed_at=self._now()))
                usage.today = tokens + usage.unsaved
            self._is_open = True

    def save(self) -> None:
        """Write new usage, read that of other processes. The next call retries a failure."""
        with self._lock:
            self._roll()
            day = self._day
            news = {name: usage.unsaved for name, usage in self._usage.items() if usage.unsaved}
            wants_news, self._wants_news = self._wants_news, False
        if not self._is_open or self._file is None or not (news or wants_news):
            return
        try:
            known = self._file.add(day, news)
        except OSError as error:
            self._report(str(error.strerror or error))
            return
        self._report(None)
        with self._lock:
            if day != self._day:
                return
            for name in {*known, *news}:
                usage = self._usage.setdefault(name, Usage(owed_at=self._now()))
                usage.unsaved -= news.get(name, 0)
                usage.today = max(0, known.get(name, 0) + usage.unsaved)

    def _report(self, failure: str | None) -> None:
        """Log when saving begins to fail, and when it works again."""
        if failure is not None and failure != self._failure:
            log("quota_state_unsaved", logging.WARNING, error=failure, retry_s=SAVE_INTERVAL_S)
        elif failure is None and self._failure is not None:
            log("quota_state_saved")
        self._failure = failure

    def _usage_of(self, key: ApiKey | None) -> Usage:
        self._roll()
        now = self._now()
        usage = self._usage.setdefault("" if key is None else key.name, Usage(owed_at=now))
        rate = 0.0 if key is None else (key.tokens_per_minute or 0) / 60
        if rate:
            usage.owed = max(0.0, usage.owed - rate * (now - usage.owed_at))
        else:
            usage.owed = 0.0
        usage.owed_at = now
        return usage

    def _roll(self) -> None:
        """Start a new day at midnight UTC."""
        today = self._today()
        if today == self._day:
            return
        self._day = today
        for usage in self._usage.values():
            usage.today = usage.unsaved = 0

    def _today(self) -> str:
        return datetime.fromtimestamp(self._wall_now(), UTC).date().isoformat()

    @property
    def day_left_s(self) -> float:
        """Until midnight."""
        now = datetime.fromtimestamp(self._wall_now(), UTC)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return (midnight - now).total_seconds()


class QuotaSaver:
    """Saves on a thread, as disks may be slow, and once more when it is closed."""

    def __init__(self, quotas: Quotas, interval_s: float = SAVE_INTERVAL_S) -> None:
        self._quotas = quotas
        self._interval_s = interval_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-quotas", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            self._save()
        self._save()

    def _save(self) -> None:
        try:
            self._quotas.save()
        except Exception:  # a bug: log it, and try again
            LOGGER.exception("quota_state_unsaved")

    def close(self, timeout_s: float = 5.0) -> None:
        self._is_closed.set()
        self._thread.join(timeout_s)


def _left(limit: int, used: float) -> int:
    return max(0, int(limit - used))
