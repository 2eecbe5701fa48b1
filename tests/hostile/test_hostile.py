"""A hostile client beside calm streams: they get their tokens, and everything is given back.

Nothing is timed here; `python -m tests.hostile.run` measures.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.hostile.attacks import ATTACKS
from tests.hostile.bodies import LIMIT, broken, heavy, slow_to_check, slow_to_read
from tests.hostile.run import (
    BAD,
    CALM,
    WATCHER,
    hostile,
    outcome_of,
    serve_command,
    settled,
    wait_until_idle,
)
from tests.hostile.watch import Books, Streams
from tests.server.processes import ServeProcess, serving

MOST_GROWN_BYTES = 1 << 30  # the goal is half of it, on a machine that does nothing else
LONG_S = 600 * float(os.environ.get("QUIRE_HOSTILE_HOURS", "1"))  # ten minutes stand for an hour


async def attacked(
    server: ServeProcess, *arguments: str
) -> tuple[Streams, dict[str, Any], dict[str, Any]]:
    """Calm streams while the hostile client does its worst: they, its outcomes, what is left."""
    books = Books(server.process.pid, server.port, WATCHER)
    streams = Streams(server.port, CALM, num_clients=3, max_tokens=40)
    await streams.run(lambda: streams.num_done >= 3)
    before = books.summary()
    quiet_rss = books.rss
    watching = asyncio.create_task(books.watch())
    async with hostile(server.port, *arguments) as attacker:
        ending = asyncio.create_task(asyncio.to_thread(outcome_of, attacker))
        streams.start_phase()
        await streams.run(ending.done)
        outcomes = (await ending)["outcomes"]
    watching.cancel()
    left = {**await wait_until_idle(books), **await settled(books, before)}
    left |= {"grown_bytes": books.peak_rss - quiet_rss, "before": before}
    return streams, outcomes, left


def check_left(left: dict[str, Any]) -> None:
    assert (left["num_running"], left["num_waiting"], left["kv_cache_usage"]) == (0, 0, 0)
    before = left["before"]
    assert left["descriptors"] <= before["descriptors"] + 8
    assert left["threads"] <= before["threads"] + 32, "no more than pools that fill on first use"
    assert left["children"] <= before["children"]


def statuses_of(outcomes: dict[str, Any]) -> set[str]:
    return {outcome for found in outcomes.values() for outcome in found}


def test_streams_of_another_key_notice_nothing_but_time(tmp_path: Path) -> None:
    command, arguments = serve_command("paced", tmp_path)
    log = tmp_path / "log"
    with serving(*arguments, command=command, log=log) as server:
        streams, outcomes, left = asyncio.run(attacked(server, "--rounds", "1"))
        assert server.process.poll() is None, "it crashed"
    assert streams.wrong == []
    assert streams.num_done >= 3
    assert {*outcomes} == {*ATTACKS}
    assert all(outcomes.values()), "every attack came to something"
    assert not statuses_of(outcomes) & {*BAD}, outcomes
    assert {"200", "400", "401", "413"} <= statuses_of(outcomes)
    assert "held" not in outcomes["trickled bodies"]
    assert left["grown_bytes"] < MOST_GROWN_BYTES
    check_left(left)
    assert "Traceback" not in log.read_text()


@pytest.mark.long
def test_an_hour_of_mixed_hostile_load_leaves_nothing(tmp_path: Path) -> None:
    """Ten minutes stand for the hour; QUIRE_HOSTILE_HOURS=6 makes it one."""
    command, arguments = serve_command("paced", tmp_path)
    log = tmp_path / "log"
    with serving(*arguments, command=command, log=log) as server:
        asyncio.run(attacked(server, "--rounds", "1"))  # what is made on first use
        rss = Books(server.process.pid, server.port, WATCHER).rss
        for part in range(5):
            seconds = str(LONG_S / 5)
            streams, outcomes, left = asyncio.run(
                attacked(server, "--seconds", seconds, "--seed", str(part))
            )
            assert server.process.poll() is None, "it crashed"
            assert streams.wrong == []
            assert not statuses_of(outcomes) & {*BAD}, outcomes
            check_left(left)
            assert left["rss_mib"] < (rss >> 20) + 256, f"memory grows: part {part}"
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("made", [slow_to_check, slow_to_read, heavy, broken])
def test_the_bodies_are_within_the_limit_so_that_they_are_looked_at(made: Any) -> None:
    sizes = {name: len(content) for name, (_, content) in made().items()}
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}
    if made is slow_to_check:
        assert sum(size > LIMIT // 4 for size in sizes.values()) >= 15
