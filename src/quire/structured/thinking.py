"""ThinkingMasks: a completion may think first; a grammar holds for what follows, and a budget ends
the thinking."""

from collections.abc import Callable, Iterable

from quire.core.plan import PendingMask
from quire.core.sampling import Thinking
from quire.structured.filters import Masks, bits_of

_TAIL = 256  # bytes of thinking that the closing tag is looked for in


class ThinkingMasks:
    """A Grammar of the engine: a function of the request's parameters and of its own tokens."""

    def __init__(
        self,
        thinking: Thinking,
        grammar: Masks | None,
        token_bytes: Callable[[int], bytes],
        vocabulary_size: int,
        control_token_ids: Iterable[int],
    ) -> None:
        self._thinking = thinking
        self._grammar = grammar
        self._token_bytes = token_bytes
        self._num_bytes = -(-vocabulary_size // 8)
        # A completion that must have a form does not end before it has one, nor leave the thinking
        # but by the closing tag.
        others = set(control_token_ids).difference(thinking.close)
        control = bits_of(token for token in others if token < vocabulary_size)
        self._text_alone = self._mask(((1 << vocabulary_size) - 1) & ~control)
        self._close = b"".join(map(token_bytes, thinking.close))
        self._tail = b""
        self._num_thought = 0
        self._opening = list(thinking.open) if thinking.is_forced else []  # forced tokens
        self._closing: list[int] = []  # likewise
        self._is_thinking = thinking.is_open or thinking.is_forced
        # Before an answer that must have a form, only a tag of one token can be told apart.
        is_seen = bool(thinking.open) and (grammar is None or len(thinking.open) == 1)
        self._may_begin = not self._is_thinking and is_seen
        self._open = b"".join(map(token_bytes, thinking.open))
        self._head = b""  # of the completion, while it may be the tag
        self._close_if_spent()

    def allowed(self) -> bytes | PendingMask | None:
        if forced := self._opening or self._closing:
            return self._mask(1 << forced[0])
        if self._is_thinking:
            return None if self._grammar is None else self._text_alone
        mask = None if self._grammar is None else self._grammar.allowed()
        if self._may_begin and isinstance(mask, bytes):
            return self._mask(int.from_bytes(mask, "little") | 1 << self._thinking.open[0])
        return mask

    def accept(self, token: int) -> None:
        if self._opening:
            self._opening.pop(0)
        elif self._may_begin and self._begins(token):
            self._close_if_spent()
        elif self._is_thinking:
            self._think(token)
        elif self._grammar is not None:
            self._grammar.accept(token)

    def _begins(self, token: int) -> bool:
        """Whether the completion so far is the tag, or may become it."""
        if self._grammar is not None:
            self._may_begin = False
            self._is_thinking = token == self._thinking.open[0]
            return self._is_thinking
        self._head = (self._head + self._token_bytes(token)).lstrip()
        self._is_thinking = self._head.startswith(self._open)
        self._may_begin = not self._is_thinking and self._open.startswith(self._head)
        return self._is_thinking

    def _think(self, token: int) -> None:
        self._num_thought += 1
        self._closing = self._closing[1:]
        self._tail = (self._tail + self._token_bytes(token))[-_TAIL:]
        if self._close in self._tail:
            self._is_thinking = False
        self._close_if_spent()

    def _close_if_spent(self) -> None:
        """A budget of no tokens forces the end right after the begin."""
        budget = self._thinking.budget
        is_spent = budget is not None and self._num_thought >= budget
        if is_spent and self._is_thinking and not self._closing:
            self._closing = list(self._thinking.close)

    def _mask(self, bits: int) -> bytes:
        return bits.to_bytes(self._num_bytes, "little")

    @property
    def is_ready(self) -> bool:
        return self._is_thinking or self._grammar is None or self._grammar.is_ready

    @property
    def is_slow(self) -> bool:
        return not self._is_thinking and self._grammar is not None and self._grammar.is_slow

    @property
    def failure(self) -> str | None:
        return None if self._grammar is None else self._grammar.failure

    @property
    def is_complete(self) -> bool:
        return not self._is_thinking and self._grammar is not None and self._grammar.is_complete
