"""ProgressBar: the one bar of the program, a line on a terminal that says how far work has come."""

import sys
import threading
from typing import Any, TextIO

_WITHOUT_ESTIMATE = "[{bar:24}] {desc}"
_WITH_ESTIMATE = _WITHOUT_ESTIMATE + ", {remaining} left"


class ProgressBar:
    """Draws on standard error where that is a terminal, or where it is told to.

    `total` is all work, in whatever unit `update` counts what is done of it.
    """

    def __init__(
        self,
        total: float,
        *,
        show: bool | None = None,
        estimate: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self.is_shown = stream.isatty() if show is None else show
        form = _WITH_ESTIMATE if estimate else _WITHOUT_ESTIMATE
        self._bar = _tqdm(total, form, stream) if self.is_shown else None

    def update(self, done: float, text: str) -> None:
        """So much of the work is done; drawn a few times a second."""
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(done - self._bar.n)

    def show(self, done: float, text: str) -> None:
        """The same, drawn now."""
        if self._bar is not None:
            self.update(done, text)
            self._bar.refresh()

    def finish(self, done: float, text: str) -> None:
        """Draw the last state and leave the line behind."""
        if self._bar is not None:
            self._bar.bar_format = _WITHOUT_ESTIMATE
            self.show(done, text)
            self._bar.close()


def _tqdm(total: float, bar_format: str, stream: TextIO) -> Any:
    from tqdm import tqdm  # only where a bar is drawn

    class Bar(tqdm):  # type: ignore[misc] # it comes without types
        monitor_interval = 0  # no thread of its own: programs that draw bars also fork

    Bar.set_lock(threading.RLock())  # by itself it takes one of multiprocessing's
    return Bar(
        total=total,
        bar_format=bar_format,
        file=stream,
        dynamic_ncols=True,
        ascii=".#",
        miniters=0,
        smoothing=0,  # the estimate is the pace since the start
    )
