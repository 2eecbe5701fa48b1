"""ProgressBar: one line on a terminal that says how far a batch of requests has come."""

import shutil
import sys
import time
from typing import TextIO

_REDRAW_S = 0.1
_CELLS = 24


class ProgressBar:
    """Draws on standard error where that is a terminal, or where it is told to."""

    def __init__(self, total: int, *, show: bool | None = None, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty() if show is None else show
        self._total = total
        self._started = time.monotonic()
        self._drawn_at = float("-inf")

    def update(self, num_done: int, num_tokens: int) -> None:
        """So many requests have ended, so many tokens have come; drawn a few times a second."""
        now = time.monotonic()
        if self._is_shown and now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._draw(num_done, num_tokens, now - self._started)

    def finish(self, num_done: int, num_tokens: int) -> None:
        """Draw the last state and leave the line behind."""
        if self._is_shown:
            self._draw(num_done, num_tokens, time.monotonic() - self._started)
            self._write("\n")

    def _draw(self, num_done: int, num_tokens: int, elapsed_s: float) -> None:
        cells = _CELLS * num_done // self._total if self._total else _CELLS
        bar = "#" * cells + "." * (_CELLS - cells)
        rate = num_tokens / elapsed_s if elapsed_s > 0 else 0.0
        line = (
            f"[{bar}] {num_done}/{self._total} requests, {num_tokens} tokens, {rate:.1f} tokens/s"
        )
        width = shutil.get_terminal_size().columns
        self._write(f"\r\x1b[K{line[: width - 1]}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
