"""Progress of a measurement that has parts of known sizes, and durations in words."""

from collections.abc import Sequence
from typing import TextIO

from quire.llm.progress import ProgressBar


class Progress:
    """A bar that moves as each part begins; the estimate is the pace so far, by size of the parts.

    `works` are the parts' sizes, in the order in which they are done.
    """

    def __init__(self, works: Sequence[float], unit: str, stream: TextIO | None = None) -> None:
        self._works, self._unit = list(works), unit
        show = None if works else False
        self._bar = ProgressBar(sum(works), show=show, estimate=True, stream=stream)
        self._num_begun = 0

    def begin(self, what: str) -> None:
        """The next part begins, so the one before is done."""
        self._bar.show(*self._state(what))
        self._num_begun += 1

    def finish(self) -> None:
        self._bar.finish(*self._state("done"))

    def _state(self, what: str) -> tuple[float, str]:
        done = sum(self._works[: self._num_begun])
        return done, f"{self._num_begun}/{len(self._works)} {self._unit}, {what}"


def in_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
