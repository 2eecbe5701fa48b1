"""Claims: which answers that may be computed once are being computed now, in the whole server."""


class Claims:
    """Those of one process, or of the one that keeps them for others. A process that dies gives
    its own back; a server that starts has none."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, name: str) -> bool:
        """False where somebody has it."""
        if name in self._taken:
            return False
        self._taken.add(name)
        return True

    def leave(self, name: str) -> None:
        self._taken.discard(name)
