"""How far loading a model is, for whoever waits for it.

What loads reports to the listener of its thread, if there is one: `with reporting(listener)`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, float], None]  # the phase's name, and how much of it is done: 0 to 1

FILE = "reading the file"
WEIGHTS = "loading weights"
KERNELS = "compiling kernels"
GRAPHS = "capturing graphs"
MEASURING = "measuring both devices"

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report(phase: str, done: float) -> None:
    """So much of a phase is done; phases come one after another."""
    listener = _listener.get()
    if listener is not None:
        listener(phase, done)


def reported(phase: str, items: Sequence[T]) -> Iterator[T]:
    """The items of a phase, each reported when it is begun."""
    for index, item in enumerate(items):
        report(phase, index / len(items))
        yield item


@contextmanager
def reporting(listener: Listener) -> Iterator[None]:
    """Have what is loaded within, on this thread, report to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class PhaseTimes:
    """A listener that remembers where loading is, and how long each phase took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = ""
        self.done = 0.0
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def __call__(self, phase: str, done: float) -> None:
        if phase != self.phase:
            self.finish()
            self.phase = phase
        self.done = done

    def finish(self) -> None:
        """The phase that runs has ended."""
        now = self._clock()
        if self.phase:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self.done, self._since = "", 0.0, now

    @property
    def seconds(self) -> dict[str, float]:
        """Of the phases that ended, in order."""
        return dict(self._seconds)
