"""What a terminal sees of a measurement under way, and that a pipe sees nothing of it."""

import io
import os

import pytest

from quire_bench.commands.progress import Progress, in_words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    @property
    def lines(self) -> list[str]:
        """What stood on the line, state after state."""
        return self.getvalue().split("\r")


def test_durations_are_told_in_words() -> None:
    assert (in_words(59.6), in_words(125.0), in_words(7.0)) == ("1 min 00 s", "2 min 05 s", "7 s")


def test_a_terminal_sees_a_bar_what_runs_and_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    progress = Progress([1, 9], "cells", terminal)  # a tenth of the work, and the rest
    progress.begin("batch 1")
    assert "[........................] 0/2 cells, batch 1, ? left" in terminal.lines[-1]
    now[0] += 10.0
    progress.begin("batch 9")
    assert "[##......................] 1/2 cells, batch 9, 01:30 left" in terminal.lines[-1]
    progress.finish()
    assert "[########################] 2/2 cells, done" in terminal.lines[-1]
    assert "left" not in terminal.lines[-1] and terminal.lines[-1].endswith("\n")


def test_a_line_is_cut_to_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((60, 40)))
    terminal = Terminal()
    Progress([1], "cells", terminal).begin("x" * 100)
    assert max(len(line.rstrip("\n")) for line in terminal.lines) == 59


def test_a_pipe_sees_nothing() -> None:
    stream = io.StringIO()
    progress = Progress([1.0], "cells", stream)
    progress.begin("batch 1")
    progress.finish()
    assert stream.getvalue() == ""
