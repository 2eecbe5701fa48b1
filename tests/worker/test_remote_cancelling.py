"""Cancelling what waits for a worker: it is not lost, whatever comes at the same moment."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.worker.remote import RemoteEngine


class Transport:
    def abort(self) -> None:
        pass


async def _cancelled_at(work: Any, happens: Any, num_turns: int) -> bool:
    """Whether a task that is cancelled so many turns of the loop after something happened ends as
    cancelled, or had ended before."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    happens()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    had_ended = task.done()
    task.cancel()
    await asyncio.wait({task})
    return had_ended or task.cancelled()


@pytest.mark.parametrize("num_turns", range(5))
def test_a_cancellation_that_comes_with_the_channels_end_is_not_lost(num_turns: int) -> None:
    async def work() -> None:
        engine: Any = RemoteEngine.__new__(RemoteEngine)
        is_lost = asyncio.Event()
        engine._transport, engine._connection = Transport(), SimpleNamespace(is_lost=is_lost)
        assert await _cancelled_at(engine._leave(60.0), is_lost.set, num_turns)

    asyncio.run(work())
