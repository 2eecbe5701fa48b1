"""What a terminal sees of a measurement under way, and that a pipe sees nothing of it."""

import io

import pytest

from quire_bench.commands.progress import Progress, in_words, remaining_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_rest_takes_as_long_as_the_pace_says() -> None:
    assert remaining_s(10.0, work_done=5, work_left=15) == 30.0
    assert remaining_s(10.0, work_done=0, work_left=15) is None
    assert (in_words(59.6), in_words(125.0), in_words(7.0)) == ("1 min 00 s", "2 min 05 s", "7 s")


def test_a_terminal_sees_a_bar_what_runs_and_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    progress = Progress([1, 9], "cells", terminal)  # a tenth of the work, and the rest
    progress.begin("batch 1")
    now[0] = 10.0
    progress.begin("batch 9")
    progress.finish()
    lines = terminal.getvalue().split("\r")
    assert "0/2 cells, batch 1" in lines[1]
    assert "left" not in lines[1]
    assert "[############............] 1/2 cells, batch 9, about 1 min 30 s left" in lines[2]
    assert "2/2 cells, done" in lines[3] and lines[3].endswith("\n")


def test_a_line_is_cut_to_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    Progress([1], "cells", terminal).begin("x" * 100)
    assert len(terminal.getvalue().split("\x1b[K")[1]) == 39


def test_a_pipe_sees_nothing() -> None:
    stream = io.StringIO()
    progress = Progress([1.0], "cells", stream)
    progress.begin("batch 1")
    progress.finish()
    assert stream.getvalue() == ""
