"""CompiledGrammar: a constraint that matchers are made of, one for each completion."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.core.errors import OverloadedError, RequestError
from quire.core.sampling import Constraint
from quire.structured.masks import on_large_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A matcher takes some 100 KB, and 10 to 250 bytes for each character of its constraint.
MAX_MATCHER_CHARACTERS = 16 << 20
_RETRY_S = 1.0


class MatcherBudget:
    """Counts the characters of constraints that have matchers, as often as each has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_characters = 0
        # Of owners that are gone: the garbage collector may find them while the lock is held.
        self._given_back: deque[int] = deque()

    def reserve(self, owner: object, constraint: Constraint, count: int) -> None:
        """hold() where there is room for so many matchers."""
        wanted = count * len(constraint.value)
        if wanted > MAX_MATCHER_CHARACTERS:
            message = (
                f"structured ({constraint.kind}) has {len(constraint.value)} characters, for n = "
                f"{count} completions {wanted}; the limit is {MAX_MATCHER_CHARACTERS}"
            )
            raise RequestError(message, param="n")
        with self._lock:
            self._count_given_back()
            if self._num_characters + wanted > MAX_MATCHER_CHARACTERS:
                raise OverloadedError("too many large constraints are in use", _RETRY_S)
            self._hold(owner, wanted)

    def hold(self, owner: object, num_characters: int) -> None:
        """As long as there is the owner."""
        with self._lock:
            self._count_given_back()
            self._hold(owner, num_characters)

    def _hold(self, owner: object, num_characters: int) -> None:
        self._num_characters += num_characters
        weakref.finalize(owner, self._given_back.append, num_characters).atexit = False

    def _count_given_back(self) -> None:
        while self._given_back:
            self._num_characters -= self._given_back.popleft()


class PreparedGrammar:
    """Matchers for a request's completions, there as long as somebody has this."""

    def __init__(self, compiled: "CompiledGrammar") -> None:
        self.compiled = compiled
        self.matchers: list[LLMatcher] = []


class CompiledGrammar:
    """A constraint ready for completions; whoever has it keeps it in the cache."""

    def __init__(
        self,
        constraint: Constraint,
        make_matcher: "Callable[[], LLMatcher]",
        matcher: "LLMatcher",
        first_mask: bytes,
        *,
        is_slow: bool,
    ) -> None:
        self.constraint = constraint
        self.first_mask = first_mask
        self.is_slow = is_slow  # the first mask took long
        self._make_matcher = make_matcher
        self._lock = threading.Lock()
        self._spare = [matcher]  # the one that it was compiled with, until it is taken
        self._prepared: weakref.WeakSet[PreparedGrammar] = weakref.WeakSet()

    def prepare(self, count: int, budget: MatcherBudget) -> PreparedGrammar:
        """Matchers for so many completions, made here and not when the engine wants them."""
        prepared = PreparedGrammar(self)
        budget.reserve(prepared, self.constraint, count)
        prepared.matchers = self._some_of(count)
        with self._lock:
            self._prepared.add(prepared)
        return prepared

    def take_prepared(self) -> "LLMatcher | None":
        with self._lock:
            for prepared in self._prepared:
                if prepared.matchers:
                    return prepared.matchers.pop()
        return None

    def made_matcher(self) -> "LLMatcher":
        return self._some_of(1)[0]

    def _some_of(self, count: int) -> "list[LLMatcher]":
        with self._lock:
            found = self._spare[:count]
            del self._spare[:count]

        def make() -> None:
            found.extend(self._make_matcher() for _ in range(count - len(found)))

        if len(found) < count:
            on_large_stack(make, name="quire-matchers").join()
        if len(found) < count:
            raise MemoryError(f"{self.constraint.kind}: a matcher could not be made")
        return found
