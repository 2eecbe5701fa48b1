"""Progress of a measurement on a terminal: what is done, what runs, how long the rest will take."""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

_BAR_WIDTH = 24


class Progress:
    """One line, drawn anew as each part begins; a pipe sees nothing.

    `works` are the parts' sizes, in the order in which they are done: the estimate is the pace so
    far, by size.
    """

    def __init__(self, works: Sequence[float], unit: str, stream: TextIO | None = None) -> None:
        self._works, self._unit = list(works), unit
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty() and bool(works)
        self._num_begun = 0
        self._started = time.monotonic()

    def begin(self, what: str) -> None:
        """The next part begins, so the one before is done."""
        self._draw(self._num_begun, what)
        self._num_begun += 1

    def finish(self) -> None:
        self._draw(self._num_begun, "done")
        if self._is_shown:
            print(file=self._stream, flush=True)

    def _draw(self, num_done: int, what: str) -> None:
        if not self._is_shown:
            return
        total = len(self._works)
        filled = min(_BAR_WIDTH, _BAR_WIDTH * num_done // total)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"[{bar}] {num_done}/{total} {self._unit}, {what}{self._estimate(num_done)}"
        width = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._stream, flush=True)

    def _estimate(self, num_done: int) -> str:
        done, left = sum(self._works[:num_done]), sum(self._works[num_done:])
        seconds = remaining_s(time.monotonic() - self._started, done, left)
        return "" if seconds is None or not left else f", about {in_words(seconds)} left"


def remaining_s(elapsed_s: float, work_done: float, work_left: float) -> float | None:
    """How long the rest takes at the pace so far; None before there is one."""
    return elapsed_s / work_done * work_left if work_done else None


def in_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
