"""LazyEvent: set once, seen by whoever waits before or after."""

import threading

from quire.core.lazy_event import LazyEvent

PATIENCE_S = 60.0


def test_whoever_waits_before_it_is_set_goes_on() -> None:
    event = LazyEvent()
    waiting = threading.Barrier(4)
    done: list[int] = []

    def wait(number: int) -> None:
        waiting.wait(PATIENCE_S)
        event.wait()
        assert event.is_set()
        done.append(number)

    threads = [threading.Thread(target=wait, args=[number], daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait(PATIENCE_S)
    assert not event.is_set() and not done
    event.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(done) == [0, 1, 2]


def test_nothing_is_made_for_an_event_that_is_set_before_anybody_waits() -> None:
    event = LazyEvent()
    event.set()
    event.wait()
    assert event._event is None


def test_a_wait_that_races_with_the_setting_ends() -> None:
    for _ in range(300):
        event = LazyEvent()
        waiter = threading.Thread(target=event.wait, daemon=True)
        waiter.start()
        event.set()
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
