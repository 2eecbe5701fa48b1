"""Limits of keys: how many prompts a minute, and how many requests at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from quire.engine.stats import CompletionRate
from quire.server.errors import ApiError
from quire.server.keys import ApiKey

_LONGEST_BURST_S = 10.0  # of its rate, a key can use so much at once


@dataclass(slots=True)
class _Account:
    """What a key has left and has open. The bucket refills at its rate."""

    tokens: float
    filled_at: float
    num_open: int = 0
    completion_rate: CompletionRate = field(default_factory=CompletionRate)


class KeyLimits:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._accounts: dict[str, _Account] = {}

    def enter(self, key: ApiKey) -> None:
        """Count a request in, or raise a 429 that says when it may come again."""
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
            self._pay(key, account)
        if not account.num_open:
            account.completion_rate.busy_from(now)
        account.num_open += 1

    def count_prompts(self, key: ApiKey, num_prompts: int) -> None:
        """Count all prompts of a body whose request was counted in as one.

        A body may have more than the key can send at once: it is let through where nothing is
        owed, and what it overdraws is waited for by the next.
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

    def _pay(self, key: ApiKey, account: _Account) -> None:
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
