"""Progress: what loads reports to the listener of its thread."""

import threading

from quire.core.progress import PhaseTimes, report, reported, reporting


def test_reports_reach_the_listener_of_their_thread_alone() -> None:
    heard: list[tuple[str, float]] = []
    report("before", 0.0)
    with reporting(lambda phase, done: heard.append((phase, done))):
        report("weights", 0.5)
        other = threading.Thread(target=report, args=("elsewhere", 0.1))
        other.start()
        other.join()
    report("after", 1.0)
    assert heard == [("weights", 0.5)]


def test_items_are_reported_as_they_are_begun() -> None:
    heard: list[tuple[str, float]] = []
    with reporting(lambda phase, done: heard.append((phase, done))):
        assert list(reported("weights", "abcd")) == ["a", "b", "c", "d"]
    assert heard == [("weights", 0.0), ("weights", 0.25), ("weights", 0.5), ("weights", 0.75)]


def test_times_are_those_between_the_first_reports_of_phases() -> None:
    now = iter([0.0, 1.0, 4.0, 9.0])
    times = PhaseTimes(lambda: next(now))
    times("file", 0.0)
    times("weights", 0.0)
    times("weights", 0.75)
    assert (times.phase, times.done) == ("weights", 0.75)
    times.finish()
    assert times.phase == "" and times.seconds == {"file": 3.0, "weights": 5.0}
