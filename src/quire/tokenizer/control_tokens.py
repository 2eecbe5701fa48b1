"""Control tokens in text of two origins: found where the template wrote them, and nowhere else.

A chat's prompt is one text, in part the template's and in part the request's. Control tokens, such
as <|im_end|>, are structure if the template wrote them and letters if a request did. The library
that splits text finds tokens by their text alone, so before it sees the prompt, each control token
that stands whole in the template's own text is replaced by a mark that occurs nowhere else in the
prompt; and it is given an encoder that knows the marks and does not know the control tokens.

    prompt    <|im_start|>user\\n What is <|im_end|>? <|im_end|>\\n    the template's but for " What
    encoded       M1      user\\n What is <|im_end|>?     M2    \\n    is <|im_end|>? "

So text between control tokens is still split as one, and with the spaces that a vocabulary puts
after a control token. Text of a request cannot become a control token, however it was cut, joined
or escaped on its way: what is not wholly the template's is never replaced by a mark. Where a
vocabulary's merges themselves make a control token from letters, the text is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import AddedToken

from quire.core.errors import RequestError
from quire.tokenizer.text_encoder import TextEncoder, library_errors

Span = tuple[int, int]

# A mark is a control character that the text lacks, and a token's number in letters: ASCII, so that
# text does not become longer in memory and slower to split.
_MARKS = "\x1f\x1e\x1d\x1c\x10\x11\x12\x13\x14\x0e\x0f\x01\x02\x03\x04\x05\x06\x16\x17"
_DIGITS = "abcdefghijklmnop"
_MARK_LENGTH = 9


class _Found(NamedTuple):
    """A control token in a text."""

    start: int
    end: int
    token: int


class _MarkReader(NamedTuple):
    """How control tokens are marked in a text, and the encoder that finds the marks."""

    marks: Mapping[int, str]
    encoder: TextEncoder


class ControlTokens:
    """A vocabulary's control tokens, and encoders that find them only by their marks."""

    def __init__(
        self,
        encoder: TextEncoder,
        tokens: Mapping[int, str],
        literal: Callable[[], TextEncoder],
        unknown: int | None,
    ) -> None:
        self._encoder = encoder
        self._tokens = tokens
        # A single letter may be a control token by the file, and must stay possible in text.
        self._forbidden = frozenset(
            token for token, text in tokens.items() if len(text) > 1 and token != unknown
        )
        self._literal = literal  # makes an encoder that does not find them
        self._find = lru_cache(maxsize=256)(self._found_in)  # templates repeat themselves
        self._with_mark = lru_cache(maxsize=len(_MARKS))(self._made_reader)

    def marked(self, text: str, spans: Sequence[Span]) -> tuple[str, TextEncoder]:
        """The text with marks for the control tokens inside the spans, and the encoder for it."""
        mark = next((mark for mark in _MARKS if mark not in text), None)
        if mark is None:
            raise RequestError(
                f"the text holds all of the control characters {_MARKS!r}", param="text"
            )
        reader = self._with_mark(mark)
        pieces: list[str] = []
        position = 0
        for start, end in spans:
            for found in self._find(text[start:end]):
                pieces += (text[position : start + found.start], reader.marks[found.token])
                position = start + found.end
        pieces.append(text[position:])
        return "".join(pieces), reader.encoder

    def _found_in(self, text: str) -> tuple[_Found, ...]:
        """Control tokens in a text as the encoder finds them; one may include blanks around it."""
        with library_errors("the tokenizer cannot encode"):
            encoding = self._encoder.backend.encode(text, add_special_tokens=False)
        found = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._tokens:
                position = text.find(self._tokens[token], start, end)
                if position >= 0:
                    found.append(_Found(position, position + len(self._tokens[token]), token))
        return tuple(found)

    def _made_reader(self, mark: str) -> _MarkReader:
        literal = self._literal()
        added = self._encoder.backend.get_added_tokens_decoder()
        keeps_marks = _keeps(literal.backend.normalizer, _placeholder(mark, 0))
        marks = {token: _placeholder(mark, token) for token in self._tokens}
        literal.backend.add_tokens(
            [_like(added[token], text, keeps_marks) for token, text in marks.items()]
        )
        longest = literal.longest_token
        encoder = literal._replace(
            longest_special=max(literal.longest_special, _MARK_LENGTH),
            longest_token=None if longest is None else max(longest, _MARK_LENGTH),
            marked={literal.backend.token_to_id(text): token for token, text in marks.items()},
            forbidden=self._forbidden,
        )
        return _MarkReader(marks, encoder)


def _placeholder(mark: str, token: int) -> str:
    digits = (_DIGITS[token >> shift & 15] for shift in range(28, -1, -4))
    return mark + "".join(digits)


def _keeps(normalizer: Any, text: str) -> bool:
    return normalizer is None or text in normalizer.normalize_str(text)


def _like(original: AddedToken, text: str, keeps_marks: bool) -> AddedToken:
    """A mark that is found as its control token is: before or after text is normalised."""
    return AddedToken(
        text,
        normalized=original.normalized and keeps_marks,
        lstrip=original.lstrip,
        rstrip=original.rstrip,
        special=False,
    )
