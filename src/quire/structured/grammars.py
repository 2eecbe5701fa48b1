"""Grammars: constraints compiled for a model's vocabulary, cached by content; and MatcherGrammar,
which holds one completion to a constraint.

Each completion has a matcher made for it alone: copies of one share its lexer, so that a text that
overruns llguidance's limits would end the texts of all. Its masks, and what they count towards
these limits, are a function of the constraint and of its own tokens.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.core.sampling import Constraint, SamplingParams, Thinking
from quire.structured.compiled import CompiledGrammar, MatcherBudget, PreparedGrammar
from quire.structured.filters import Masks, TokenFilter, banned_after, bits_of
from quire.structured.masks import (
    NUM_POOL_THREADS,
    SLOW_S,
    Mask,
    MaskPool,
    MaskThreads,
    on_large_stack,
)
from quire.structured.thinking import ThinkingMasks
from quire.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 256
MAX_CACHED_CHARACTERS = 4 << 20  # of constraints: compiled ones take 1 to 250 bytes for each
_MOST_FORCED_BYTES = 1024  # longer texts become tokens in threads
_DEAD_END = "NoExtensionBias"  # llguidance's word where no token fits
_MISSING = (
    "structured output needs the package llguidance: pip install 'quire[structured]' where quire "
    "runs"
)


class Grammars:
    """Makes grammars for the engine. check() and prepare() may be called from any thread."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocabulary_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        # Without an end token, one beyond the vocabulary says that the text may end.
        self._end_token_ids = tuple(end_token_ids) or (vocabulary_size,)
        self._threads = MaskThreads()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._recent: OrderedDict[Constraint, CompiledGrammar | RequestError] = OrderedDict()
        self._num_characters = 0  # of these
        self._budget = MatcherBudget()
        self._in_use: weakref.WeakValueDictionary[Constraint, CompiledGrammar]
        self._in_use = weakref.WeakValueDictionary()
        self._banned = lru_cache(MAX_CACHED)(lambda words: banned_after(words, tokenizer))

    def check(self, params: SamplingParams) -> CompiledGrammar | None:
        """Compile the constraint, or find it compiled. A RequestError says what is wrong with
        it."""
        if params.bad_words:
            self._banned(params.bad_words)
        return None if params.structured is None else self._compiled(params.structured)

    def prepare(self, params: SamplingParams) -> PreparedGrammar | None:
        """check(), and all that the engine's thread would have to make; keep the result until the
        engine has the request."""
        compiled = self.check(params)
        return None if compiled is None else compiled.prepare(params.n, self._budget)

    def for_completion(self, params: SamplingParams) -> Masks:
        """All that masks one completion's tokens; on the engine's thread."""
        matcher: Masks | None = None if params.structured is None else self(params)
        if params.thinking is not None:
            matcher = self._after_thinking(params.thinking, matcher)
        if matcher is not None and params.allowed_token_ids is None and not params.bad_words:
            return matcher
        allowed = params.allowed_token_ids
        permitted = (1 << self._vocabulary_size) - 1 if allowed is None else bits_of(allowed)
        banned = self._banned(params.bad_words) if params.bad_words else {}
        return TokenFilter(matcher, permitted, banned)

    def __call__(self, params: SamplingParams) -> "MatcherGrammar":
        """A grammar for one completion; on the engine's thread."""
        assert params.structured is not None
        compiled = self._compiled(params.structured)
        ends = EndBits(self._end_token_ids, params)
        return MatcherGrammar(compiled, ends, self._threads, self._budget)

    def _after_thinking(self, thinking: Thinking, grammar: Masks | None) -> ThinkingMasks:
        assert self._tokenizer is not None
        tokenizer, size = self._tokenizer, self._vocabulary_size
        control = tokenizer.hidden_token_ids.union(self._end_token_ids)
        return ThinkingMasks(thinking, grammar, tokenizer.token_bytes, size, control)

    def start_masks(self, at_once: bool = False) -> None:
        """Begin with the masks that were promised since the last call; on the engine's thread.
        `at_once`: llguidance's threads are at theirs when this returns."""
        self._threads.start(at_once=at_once)

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        with self._lock:
            known = self._recent.get(constraint) or self._in_use.get(constraint)
            if known is not None and constraint in self._recent:
                self._recent.move_to_end(constraint)
        if known is None:
            known = self._compile(constraint)
            with self._lock:
                self._remember(constraint, known)
        if isinstance(known, RequestError):
            raise RequestError(str(known), param=known.param)
        return known

    def _remember(self, constraint: Constraint, known: CompiledGrammar | RequestError) -> None:
        """Under the lock. The latest stays, whatever its length."""
        if constraint not in self._recent:
            self._num_characters += len(constraint.value)
        self._recent[constraint] = known
        if isinstance(known, CompiledGrammar):
            self._in_use[constraint] = known
        while len(self._recent) > MAX_CACHED or (
            self._num_characters > MAX_CACHED_CHARACTERS and len(self._recent) > 1
        ):
            oldest, _ = self._recent.popitem(last=False)
            self._num_characters -= len(oldest.value)

    def _compile(self, constraint: Constraint) -> CompiledGrammar | RequestError:
        if self._tokenizer is None:
            message = f"structured ({constraint.kind}) needs a tokenizer, and this model has none"
            return RequestError(message, param="structured")
        try:
            vocabulary = self._loaded_vocabulary()
            # Imports llguidance, which may be missing.
            from quire.structured.checker import checked_grammar

            grammar = checked_grammar(constraint)
        except RequestError as error:
            return error
        found: list[CompiledGrammar | RequestError] = []

        def compile_here() -> None:
            try:
                found.append(_compiled(vocabulary, constraint, grammar))
            except BaseException as error:  # also a panic in Rust, which is no Exception
                found.append(_refusal(constraint, f"{type(error).__name__}: {error}"))

        on_large_stack(compile_here, name="quire-compile").join()
        return found[0]

    def _loaded_vocabulary(self) -> "LLTokenizer":
        """llguidance's form of the vocabulary, made when it is first wanted."""
        with self._lock:
            assert self._tokenizer is not None
            if self._vocabulary is None:
                try:
                    from quire.structured.vocabulary import load_vocabulary  # needs llguidance
                except ImportError:
                    raise RequestError(_MISSING, param="structured") from None
                self._vocabulary = load_vocabulary(
                    self._tokenizer, self._vocabulary_size, self._end_token_ids
                )
                if NUM_POOL_THREADS > 1:
                    size = self._vocabulary.vocab_size
                    self._threads.pool = MaskPool(size, self._end_token_ids, NUM_POOL_THREADS)
            return self._vocabulary


def _compiled(
    vocabulary: "LLTokenizer", constraint: Constraint, grammar: str
) -> CompiledGrammar | RequestError:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)

    def make_matcher() -> LLMatcher:
        """All begin with the same mask, so that all have the same left of the limits."""
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()
        return matcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    started = time.thread_time()
    first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    seconds = time.thread_time() - started
    if matcher.is_error():
        return _refusal(constraint, _reason(matcher))
    is_slow = seconds > SLOW_S
    return CompiledGrammar(constraint, make_matcher, matcher, first_mask, is_slow=is_slow)


def _reason(matcher: "LLMatcher") -> str:
    """Its error, if it has one, without what llguidance adds for its own authors."""
    reason = matcher.get_error().partition("\n<")[0].strip()
    return "nothing may follow, and the text may not end" if reason == _DEAD_END else reason


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(f"{constraint.kind}: {reason}"[:2000], param="structured")


class EndBits:
    """What a mask says of the end: where it allows an end token, the text may end there. Then the
    request's own stop tokens are allowed as well; with ignore_eos the end tokens are not."""

    def __init__(self, end_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._ends = tuple(divmod(token, 8) for token in set(end_token_ids))
        self._stops = tuple(divmod(token, 8) for token in set(params.stop_token_ids))
        self._are_forbidden = params.ignore_eos
        self._are_plain = not self._stops and not params.ignore_eos

    def apply(self, mask: bytes) -> bytes:
        """Of most masks a few bytes are looked at: they are made for every row of a step."""
        if self._are_plain or not self._may_end(mask):
            return mask
        longest = max((byte + 1 for byte, _ in self._stops), default=0)
        bits = bytearray(mask.ljust(longest, b"\0"))
        if self._are_forbidden:
            for byte, bit in self._ends:
                if byte < len(bits):
                    bits[byte] &= ~(1 << bit)
        for byte, bit in self._stops:
            bits[byte] |= 1 << bit
        return bytes(bits)

    def is_within(self, token: int) -> bool:
        """Whether a text may have the token before its end: no mask of it alone is changed."""
        return divmod(token, 8) not in self._ends

    def _may_end(self, mask: bytes) -> bool:
        return any(byte < len(mask) and mask[byte] >> bit & 1 for byte, bit in self._ends)


class MatcherGrammar:
    """The state of one completion in its grammar (a Grammar of the engine).

    Where the grammar leaves no choice, such as in the name of a property, llguidance says once what
    tokens come: their masks need none of its threads, which would ask for each what the text's
    tokens are, and wait for the GIL to do so. Asked again after the first of them it may say
    others: digits are tokens in groups from where a text begins. So it is asked at the same tokens
    whether masks take long or not.
    """

    def __init__(
        self, compiled: CompiledGrammar, ends: EndBits, threads: MaskThreads, budget: MatcherBudget
    ) -> None:
        self._compiled = compiled  # kept for siblings to come
        self._budget = budget
        if (matcher := compiled.take_prepared()) is not None:
            self._take(matcher)
        self._ends = ends
        self._threads = threads
        self._is_slow = compiled.is_slow
        self._is_shared = True  # its masks may be computed in one call with others'
        self._first: bytes | None = ends.apply(compiled.first_mask)
        self._mask: Mask | None = None  # of the state that it is in
        # What must come next, of which so many tokens came that the matcher has not been given yet.
        self._forced: list[int] = []
        self._num_came = 0
        self._forced_mask: bytes | Mask | None = None  # of the next
        self.is_complete = False

    @cached_property
    def _matcher(self) -> "LLMatcher":
        """Where none was prepared, made for the first token: a completion that waits needs none."""
        return self._take(self._compiled.made_matcher())

    def _take(self, matcher: "LLMatcher") -> "LLMatcher":
        self._budget.hold(self, len(self._compiled.constraint.value))
        self._matcher = matcher
        return matcher

    def allowed(self) -> bytes | Mask:
        if self._first is not None:
            return self._first
        if self._mask is None and self._forced:
            if self._forced_mask is None:
                self._forced_mask = self._threads.share_forced(self._forced[self._num_came])
            return self._forced_mask
        if self._mask is None:
            if self._is_shared:
                self._mask = self._threads.share(self._compute, self._matcher, self._finished)
            else:
                self._mask = Mask(self._compute)
                self._threads.promise(self._mask)
        return self._mask

    @property
    def is_ready(self) -> bool:
        return not self._is_slow or self._mask is None or self._mask.is_done

    @property
    def is_slow(self) -> bool:
        return self._is_slow

    @property
    def failure(self) -> str | None:
        return None if self._mask is None else self._mask.failure

    def accept(self, token: int) -> None:
        if self._mask is not None:
            self._mask.wait()  # the matcher is used by one thread at a time
            seconds = self._mask.seconds
            self._is_slow = seconds is not None and seconds > SLOW_S
            self._is_shared = seconds is not None  # else find out whether it is the slow one
        elif self._first is None and not self._forced:
            # A token that is given again. Limits count from mask to mask.
            self._matcher.compute_bitmask()
        self._first = self._mask = self._forced_mask = None
        came = [*self._forced[: self._num_came], token]
        if len(came) < len(self._forced) and token == self._forced[self._num_came]:
            self._num_came += 1
            return
        self._forced, self._num_came = [], 0
        if not self._matcher.consume_tokens(came):
            raise ValueError(_reason(self._matcher) or f"token {token} does not fit")
        self.is_complete = self._matcher.is_stopped()
        if self.is_complete:
            return
        if self._is_slow:
            self._mask = Mask(self._compute_and_ask)
            self._threads.start_slow(self._mask)
        else:
            self._ask()

    def _ask(self) -> None:
        """Which tokens must come. An end token is left to its mask, which may allow others."""
        if 0 < len(self._matcher.compute_ff_bytes()) <= _MOST_FORCED_BYTES:
            tokens = self._matcher.compute_ff_tokens()
            self._forced = list(takewhile(self._ends.is_within, tokens))

    def _compute_and_ask(self) -> bytes:
        """For a mask llguidance finds the bytes that must come without the GIL, and keeps them."""
        mask = self._compute()
        self._ask()
        return mask

    def _compute(self) -> bytes:
        return self._finished(self._matcher.compute_bitmask())

    def _finished(self, mask: bytes) -> bytes:
        """The mask of the matcher's own."""
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher) or self._matcher.stop_reason())
        return self._ends.apply(mask)
