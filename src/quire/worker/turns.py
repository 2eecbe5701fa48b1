"""Turns: how processes that share a worker find out together which request kills it.

Each process judges its own requests. It has to know whether the others had suspects as well, and
only one process at a time may run one of its suspects apart.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

_REPORT_S = 10.0  # for all processes to notice a worker's death


class Others(Protocol):
    """The other processes that share a worker, as one of them asks for them."""

    async def has_only_suspects(self, num_suspects: int, *, has_probed: bool) -> bool:
        """After a crash: whether no other process had suspects, or ran one apart."""

    async def take_turn(self) -> None:
        """Wait until no other process runs a suspect apart."""

    def end_turn(self) -> None: ...


@dataclass(slots=True)
class _Report:
    num_suspects: int
    has_probed: bool
    answer: "asyncio.Future[bool]"


@dataclass(eq=False)
class Turns:
    """Where all of them meet, on one event loop; a process is known by its name."""

    names: set[int] = field(default_factory=set)
    _reports: dict[int, _Report] = field(default_factory=dict)
    _holder: int | None = None
    _waiting: deque[tuple[int, "asyncio.Future[None]"]] = field(default_factory=deque)

    def enter(self, name: int) -> None:
        self.names.add(name)

    def leave(self, name: int) -> None:
        """A process has ended."""
        self.names.discard(name)
        self._reports.pop(name, None)
        self._waiting = deque(each for each in self._waiting if each[0] != name)
        self.end(name)
        self._answer_if_all()

    async def report(self, name: int, num_suspects: int, *, has_probed: bool) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reports[name] = _Report(num_suspects, has_probed, answer)
        self._answer_if_all()
        try:
            async with asyncio.timeout(_REPORT_S):  # wait_for() may lose a cancellation
                return await answer
        except TimeoutError:  # nobody is blamed for what is not known
            self._reports.pop(name, None)
            return False

    def _answer_if_all(self) -> None:
        if not self._reports or self.names - self._reports.keys():
            return
        reports, self._reports = self._reports, {}
        for name, report in reports.items():
            others = [each for other, each in reports.items() if other != name]
            is_clear = not any(each.num_suspects or each.has_probed for each in others)
            if not report.answer.done():
                report.answer.set_result(is_clear)

    async def take(self, name: int) -> None:
        if self._holder is None:
            self._holder = name
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, turn))
        await turn

    def end(self, name: int) -> None:
        if self._holder != name:
            return
        self._holder = None
        while self._waiting and self._holder is None:
            next_name, turn = self._waiting.popleft()
            if not turn.done():
                self._holder = next_name
                turn.set_result(None)
