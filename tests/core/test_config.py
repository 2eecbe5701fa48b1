"""EngineConfig: settings that cannot work are named, with what was given."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError

COUNTS = [
    "max_batch_size",
    "max_step_tokens",
    "max_queue_requests",
    "max_queue_tokens",
    "max_unread_tokens",
]
TIMES = ["aging_s", "step_grace_s", "slo_itl_ms", "slo_ttft_ms", "step_timeout_s", "timeout_s"]


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    return str(caught.value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_a_count_below_one_or_no_integer_is_refused(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_time_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1"])
def test_the_batch_timeout_may_be_zero_but_not(value: object) -> None:
    assert EngineConfig(batch_timeout_ms=0).batch_timeout_ms == 0
    assert "batch_timeout_ms" in refusal(batch_timeout_ms=value)


def test_a_step_must_hold_a_token_of_each_running_sequence() -> None:
    message = refusal(max_batch_size=65, max_step_tokens=64)
    assert "max_step_tokens (64)" in message
    assert "max_batch_size (65)" in message
    EngineConfig(max_batch_size=64, max_step_tokens=64)


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, 0.001, 101.0])
def test_a_weight_out_of_bounds_names_its_key(weight: float) -> None:
    assert "key_weights['gold']" in refusal(key_weights={"gold": weight})


def test_targets_and_timeouts_can_be_left_out() -> None:
    config = EngineConfig(step_timeout_s=None, timeout_s=None, slo_itl_ms=None, slo_ttft_ms=None)
    assert config.step_timeout_s is None


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().max_batch_size = 3  # type: ignore[misc]
