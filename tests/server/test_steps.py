"""/v1/stats?steps=N: what a key sees of the engine's latest steps."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.servers import PacedExecutor, RunningServer, fake_server, model_server
from tests.server.test_keys import bearer, with_scopes

from quire.core.errors import ConfigError
from quire.server.keys import KeyRing, KeyScope
from quire.server.settings import ServerSettings

LONG = {"prompt": [[1, 2, 3]], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(text_model: Path) -> Iterator[RunningServer]:
    """Two keys with a request each that runs, and one that may watch."""
    ring = KeyRing(
        [
            with_scopes("alice", KeyScope.INFERENCE),
            with_scopes("bob", KeyScope.INFERENCE),
            with_scopes("watcher", KeyScope.STATS),
        ]
    )
    executor = PacedExecutor(0.01, num_blocks=1024)
    with fake_server(text_model, executor, keys=ring, memory_bandwidth=1e9) as server:
        server.get("/v1/stats?steps=1", bearer("watcher"))
        with ThreadPoolExecutor() as pool:
            names = ("alice", "bob")
            asked = [pool.submit(server.post, "/v1/completions", LONG, bearer(n)) for n in names]
            server.wait_until(lambda: server.engine.snapshot().num_running == 2)
            server.wait_until(lambda: server.engine.stats.batch_size.counts[1] > 3)
            yield server
            executor.step_s = 0.0
            assert [one.result().status for one in asked] == [200, 200]


def latest(server: RunningServer, name: str, query: str = "steps=64") -> Any:
    reply = server.get(f"/v1/stats?{query}", bearer(name))
    assert reply.status == 200
    return reply.json["latest"]


def test_the_scope_stats_shows_every_lane(shared: RunningServer) -> None:
    found = latest(shared, "watcher")
    assert {lane["key"] for lane in found["lanes"].values()} == {"alice", "bob"}
    assert all(lane["prompt_tokens"] == 3 for lane in found["lanes"].values())
    step = found["steps"][-1]
    assert sorted(lane for lane, _ in step["decodes"]) == sorted(map(int, found["lanes"]))
    assert step["elapsed_s"] > 0
    uptime = shared.get("/v1/stats", bearer("watcher")).json["uptime_s"]
    assert 0 < step["at"] <= uptime


def test_another_key_sees_its_own_lanes_alone(shared: RunningServer) -> None:
    reply = shared.get("/v1/stats?steps=64", bearer("alice"))
    found = reply.json["latest"]
    assert b"bob" not in reply.body
    assert [lane["key"] for lane in found["lanes"].values()] == ["alice"]
    rows = [row for step in found["steps"] for row in step["decodes"] + step["chunks"]]
    assert {str(row[0]) for row in rows} == found["lanes"].keys()
    assert all(step["floor_s"] is None for step in found["steps"]), "it tells of others' contexts"


def test_who_has_nothing_in_the_steps_sees_none(shared: RunningServer) -> None:
    found = latest(shared, "watcher")
    newest = found["steps"][-1]["id"]
    after = latest(shared, "watcher", f"steps=64&after={newest}")
    assert all(step["id"] > newest for step in after["steps"])
    assert latest(shared, "alice", f"steps=4&after={2**53}") == {"lanes": {}, "steps": []}


def test_without_a_number_there_are_no_steps(shared: RunningServer) -> None:
    for query in ("", "?steps=0", "?after=3"):
        assert "latest" not in shared.get(f"/v1/stats{query}", bearer("watcher")).json


@pytest.mark.parametrize(
    "query", ["steps=-1", "steps=x", "steps=257", "steps=%D9%A3", "after=1.5", "since=3"]
)
def test_what_is_no_number_or_unknown_is_refused_by_name(shared: RunningServer, query: str) -> None:
    reply = shared.get(f"/v1/stats?{query}", bearer("alice"))
    assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])


def test_blocks_of_the_cache_are_counted(shared: RunningServer) -> None:
    blocks = shared.get("/v1/stats", bearer("watcher")).json["kv_blocks"]
    assert blocks["total"] == 1024
    assert 2 <= blocks["used"] < 100
    assert 0 <= blocks["cached"] <= 1024 - blocks["used"]


def test_a_step_is_held_against_the_time_that_reading_takes(text_model: Path) -> None:
    """At one byte a second the floor is the number of bytes."""
    with model_server(text_model, memory_bandwidth=1.0) as server:
        server.get("/v1/stats?steps=1")
        assert server.chat(max_tokens=3, ignore_eos=True).status == 200
        llm = server.service.loaded
        assert llm is not None
        read = llm.step_read
        assert read is not None
        weights = server.get("/v1/stats").json["memory_bytes"]["weights"]
        assert weights / 2 < read.weights <= weights
        steps = server.get("/v1/stats?steps=9").json["latest"]["steps"]
    floors = [step["floor_s"] for step in steps]
    assert floors[0] > read.weights
    assert floors[2] - floors[1] == read.kv_per_position > 0


def test_without_a_bandwidth_no_floor_is_known(tiny: RunningServer) -> None:
    tiny.get("/v1/stats?steps=1")
    assert tiny.chat(max_tokens=3).status == 200
    steps = tiny.get("/v1/stats?steps=9").json["latest"]["steps"]
    assert steps
    assert all(step["floor_s"] is None for step in steps)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_is_a_number_above_0(value: float) -> None:
    with pytest.raises(ConfigError, match="memory_bandwidth must be a number above 0"):
        ServerSettings(memory_bandwidth=value)


def test_a_bandwidth_is_refused_in_the_unit_that_it_is_given_in() -> None:
    with pytest.raises(ConfigError, match=r"got -5 GB/s"):
        ServerSettings(memory_bandwidth=-5e9)
