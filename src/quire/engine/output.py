"""From tokens to what the caller sees: text, stop strings, the reasons a sequence ends."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from quire.core.sampling import Constraint


class Detokenizer(Protocol):
    """Turns tokens into text one by one, never splitting a character."""

    def add(self, token: int) -> str: ...

    def flush(self) -> str:
        """What is left when no more tokens come."""


class Grammar(Protocol):
    """Holds a completion to a constraint; one for each sequence."""

    def allowed(self) -> bytes:
        """The mask of tokens that may come next (see SequencePlan.allowed)."""

    def accept(self, token: int) -> None: ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""


MakeDetokenizer = Callable[[], Detokenizer]
MakeGrammar = Callable[[Constraint], Grammar]


class NewText(NamedTuple):
    """Text that became certain, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None = None


class Transcript:
    """The text of one sequence; withholds an end that may begin a stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...], *, include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._withheld = ""

    def add(self, token: int, *, may_stop: bool) -> NewText:
        return self._release(self._detokenizer.add(token), may_stop=may_stop)

    def add_all(self, tokens: Iterable[int]) -> str:
        """The text of tokens that did not stop the sequence."""
        return "".join([self.add(token, may_stop=True).text for token in tokens])

    def finish(self) -> NewText:
        """The sequence ended for another reason: the withheld text is released."""
        released = self._release(self._detokenizer.flush(), may_stop=True)
        if released.stopped_by is None:
            released = NewText(released.text + self._withheld)
        self._withheld = ""
        return released

    def _release(self, fresh: str, *, may_stop: bool) -> NewText:
        if not self._stop:
            return NewText(fresh)
        text = self._withheld + fresh
        if not may_stop:
            self._withheld = ""
            return NewText(text)
        found = min(((text.find(s), s) for s in self._stop if s in text), default=None)
        if found is not None:
            self._withheld = ""
            at, stop = found
            return NewText(text[: at + len(stop) if self._include_stop else at], stop)
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._withheld = text[len(text) - keep :]
        return NewText(text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
