"""Convoy, neighbour, saturation and soak, against a server whose limits are known."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.bench.openai_like_server import Behaviour, OpenAILikeServer, serving

from quire.core.errors import ConfigError
from quire_bench.http_client import parse_endpoint
from quire_bench.lengths import Bounds, fixed
from quire_bench.load import Target
from quire_bench.load_scenarios import (
    SCENARIOS,
    Finding,
    LoadSettings,
    _drift,
    _is_past_knee,
    memory_of,
)
from quire_bench.receipts import section


def settings(**changes: Any) -> LoadSettings:
    return LoadSettings(mix=fixed(5, 3), bounds=Bounds(), **changes)


def run(name: str, server: OpenAILikeServer, chosen: LoadSettings) -> Finding:
    target = Target(parse_endpoint(server.url), timeout_s=20.0)
    return asyncio.run(SCENARIOS[name](target, chosen, lambda _: None))


def test_a_plain_load_is_closed_without_a_rate_and_open_with_one() -> None:
    with serving(Behaviour()) as server:
        closed = run("plain", server, settings(num_clients=2, num_requests=3))
        opened = run("plain", server, settings(rate=40.0, duration_s=0.5, seed=3))
    assert closed.results["requests"] == 6
    assert closed.results["completion_tokens"] == 18
    assert opened.results["requests"] == len(opened.outcomes) > 5
    spans = [outcome.due_at - opened.outcomes[0].due_at for outcome in opened.outcomes]
    assert spans == sorted(spans)
    assert spans[-1] < 0.5


def test_the_same_seed_sends_the_same_requests() -> None:
    sent = []
    for _ in range(2):
        with serving(Behaviour()) as server:
            run("plain", server, settings(rate=30.0, duration_s=0.3, seed=9))
        sent.append(sorted(body["prompt"] for body in server.behaviour.bodies))
    assert sent[0] == sent[1]


def test_a_convoy_shows_what_long_prompts_do_to_short_requests() -> None:
    """One request at a time, and a long prompt holds the server for 0.2 s."""
    with serving(Behaviour(max_running=1, long_prompt_delay_s=0.2)) as server:
        chosen = settings(rate=30.0, duration_s=0.6, long_rate=4.0, long_prompt_tokens=300)
        found = run("convoy", server, chosen)
    results: Any = found.results
    alone, beside = results["alone"], results["beside_long"]
    assert alone["requests"] == beside["requests"]  # the same short ones both times
    assert results["long"]["requests"] >= 1
    assert beside["time_to_first_token_s"]["max"] >= 0.1
    p99 = [part["time_to_first_token_s"]["p99"] for part in (beside, alone)]
    assert results["time_to_first_token_p99_ratio"] == p99[0] / p99[1]
    assert {"alone_time_to_first_token_s", "beside_long_inter_token_s"} <= set(found.samples)


def test_a_neighbour_is_shown_to_hold_up_whom_a_server_treats_unfairly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First come, first served, two at a time of 0.05 s each: 8 that wait take 0.2 s more."""
    monkeypatch.setattr("quire_bench.load_scenarios.LEAD_S", 0.2)
    with serving(Behaviour(max_running=2, first_delay_s=0.05)) as server:
        chosen = settings(
            rate=10.0, duration_s=1.0, num_clients=2, num_flooding=14, neighbour_key="other"
        )
        found = run("neighbour", server, chosen)
    results: Any = found.results
    names = ("alone", "beside_full", "beside_flood")
    assert len({results[name]["requests"] for name in names}) == 1  # the same each time
    p95 = {name: results[name]["time_to_first_token_s"]["p95"] for name in names}
    met = server.behaviour.met[""]
    count = results["alone"]["requests"]
    most_met = [max(met[start : start + count]) for start in range(0, len(met), count)]
    alone, beside_full, beside_flood = most_met
    assert alone == 0
    assert 1 <= beside_full <= 2
    assert 10 <= beside_flood <= 14 + 2  # of the two before, the server may have some left
    assert results["beside_flood"]["time_to_first_token_s"]["max"] >= 0.2 + 0.05
    assert results["flood_over_full"] == p95["beside_flood"] / p95["beside_full"]
    assert results["flood_over_alone"] == p95["beside_flood"] / p95["alone"]
    assert results["neighbour_when_flooding"]["completed"] > 0
    assert "beside_flood_time_to_first_token_s" in found.samples


def test_a_neighbour_sends_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_bench.load_scenarios.LEAD_S", 0.1)
    with serving(Behaviour(api_key="own")) as server:
        target = Target(parse_endpoint(server.url, api_key="own"), timeout_s=20.0)
        chosen = settings(rate=20.0, duration_s=0.2, neighbour_key="other")
        found = asyncio.run(SCENARIOS["neighbour"](target, chosen, lambda _: None))
    assert found.results["errors"] == 0
    assert set(section(found.results, "neighbour_when_full", "errors_by_kind")) == {"http 401"}


def test_saturation_finds_the_knee_of_a_server_of_known_capacity() -> None:
    """Two requests at a time, of 0.04 s each: some 50 a second at best."""
    with serving(Behaviour(max_running=2, first_delay_s=0.04)) as server:
        chosen = settings(rate=5.0, duration_s=0.5, rate_factor=4.0, max_steps=5)
        found = run("saturation", server, chosen)
    results: Any = found.results
    steps = results["saturation"]["steps"]
    assert [step["rate"] for step in steps] == [5.0 * 4**number for number in range(len(steps))]
    assert steps[-1]["is_past_knee"]
    assert results["knee_rate"] in (5.0, 20.0, 80.0)
    assert results["capacity_requests_per_second"] <= 52
    assert "step1_time_to_first_token_s" in found.samples


def test_a_step_with_errors_is_past_the_knee_and_a_slower_median_as_well() -> None:
    light: Any = {"errors": 0, "requests": 100, "time_to_first_token_s": {"p50": 0.1}}
    assert not _is_past_knee(light, light)
    assert not _is_past_knee(light | {"errors": 1}, light)
    assert _is_past_knee(light | {"errors": 2}, light)
    assert _is_past_knee(light | {"time_to_first_token_s": {"p50": 0.31}}, light)


def test_a_soak_lasts_its_duration_and_watches_the_process() -> None:
    with serving(Behaviour(first_delay_s=0.005)) as server:
        found = run("soak", server, settings(num_clients=2, duration_s=1.2, pid=os.getpid()))
    results: Any = found.results
    windows = results["soak"]["windows"]
    assert len(windows) == 10
    counted = sum(window["completion_tokens_per_second"] * 0.12 for window in windows)
    assert counted == pytest.approx(results["completion_tokens"], abs=7)
    assert results["seconds"] >= 1.2
    assert all(size > 1 << 20 for size in found.samples["memory_bytes"])


def test_drift_is_the_trend_over_a_run_whatever_single_windows_do() -> None:
    def windows(shape: Callable[[int], float]) -> list[dict[str, float | None]]:
        return [{"x": shape(place)} for place in range(10)]

    assert _drift(windows(lambda _: 5.0), "x") == 0.0
    slowing = _drift(windows(lambda place: 100.0 - 2 * place), "x")
    assert slowing == pytest.approx(-20 / 91)
    assert _drift(windows(lambda place: 900.0 if place == 4 else 5.0), "x") == 0.0
    assert _drift([{"x": None}] * 10, "x") is None


def test_settings_that_cannot_work_are_refused() -> None:
    refused: dict[str, dict[str, Any]] = {
        "--clients": {"num_clients": 0},
        "--rate": {"rate": 0.0},
        "--duration": {"duration_s": -1.0},
        "--rate-factor": {"rate_factor": 1.0},
    }
    for flag, wrong in refused.items():
        with pytest.raises(ConfigError, match=f"^{flag} must"):
            settings(**wrong)
    with pytest.raises(ConfigError, match="memory cannot be read"):
        memory_of(2**22 + 1)  # beyond the largest process number
