"""A model's vocabulary as llguidance takes it, from any of quire's tokenizers."""

from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from quire.tokenizer import Tokenizer

_MARK = b"\x02"
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'  # of a JSON string
# Runs of characters by their length: a mask of a string that may have some more takes whole those
# that are no longer. llguidance's own begin with 10, and the last characters of a string with a
# maxLength took up to a millisecond.
_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in (3, 6, 10, 30)),
    _CHARACTER + "+",
)
_LONGEST_KEPT = 64  # bytes of a text
_MAX_KEPT = 16384


class Vocabulary:
    """What TokenizerWrapper asks for. Text never has control tokens: their bytes are not used."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[bytes, list[int]] = {}
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary_size)]
        self.special_token_ids = sorted(tokenizer.hidden_token_ids.union(end_token_ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of text that a grammar leaves no choice for; their bytes are those of the text.
        Texts recur, such as the names of a schema's properties."""
        if len(text) > _LONGEST_KEPT:
            return self._tokens(text)
        tokens = self._kept.get(text)
        if tokens is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            tokens = self._kept[text] = self._tokens(text)
        return tokens

    def _tokens(self, text: bytes) -> list[int]:
        plain = self._encode(text)
        if self._bytes_of(plain) == text:
            return plain
        # SentencePiece puts a space before a text. After a byte that merges with nothing there is
        # none.
        marked = self._encode(_MARK + text)
        for first in range(1, min(3, len(marked)) + 1):
            if self._bytes_of(marked[first:]) == text:
                return marked[first:]
        return self._longest_first(text)

    def _encode(self, text: bytes) -> list[int]:
        decoded = text.decode(errors="replace")
        return self._tokenizer.encode(decoded, add_special=False, parse_special=False)

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in tokens])

    def _longest_first(self, text: bytes) -> list[int]:
        """For text that does not come back as it was, such as half a character."""
        tokens = []
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            length = next((n for n in lengths if text[:n] in self._ids), 0)
            if not length:
                break  # the rest has no tokens
            tokens.append(self._ids[text[:length]])
            text = text[length:]
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        hidden = set(self.special_token_ids)
        return {text: token for token, text in enumerate(self.tokens) if token not in hidden}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


def load_vocabulary(
    tokenizer: Tokenizer, vocabulary_size: int, end_token_ids: Sequence[int]
) -> LLTokenizer:
    """`vocabulary_size` counts rows of the embedding; those beyond the tokenizer's are padding."""
    size = max(vocabulary_size, *(token + 1 for token in end_token_ids))
    wrapper = TokenizerWrapper(Vocabulary(tokenizer, size, end_token_ids))
    return LLTokenizer(wrapper, size, eos_token=list(end_token_ids), slices=list(_SLICES))
