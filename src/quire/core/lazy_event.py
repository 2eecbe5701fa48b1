"""LazyEvent: a threading.Event that is made when somebody waits for it.

A step has hundreds of events that are set before anybody asks: making a lock for each costs more
than all else about them.
"""

import threading

_making = threading.Lock()


class LazyEvent:
    """Set once; waited for by any thread."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        # Before it looks for those who wait: they look again after they have made an event.
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def wait(self) -> None:
        if self._is_set:
            return
        with _making:
            if self._event is None:
                self._event = threading.Event()
        if not self._is_set:
            self._event.wait()
