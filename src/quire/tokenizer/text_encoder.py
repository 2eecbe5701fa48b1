"""Encoding long text a window at a time, with the tokens that one pass over all of it would give.

One pass over ten megabytes takes gigabytes and holds the interpreter for ten seconds. Text is split
into words before it is encoded, each word alone, so a window may end wherever a word begins. What
cannot be trusted is the end of a window: there a word, a run of spaces or a special token may go
on. Nor can its first word, before which a SentencePiece vocabulary puts a space. So windows overlap
by a word, and only what lies between is kept:

    window 1  | kept ....................... | uncertain |
    window 2                     | last kept | kept .................... | uncertain |
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.core.errors import ModelFileError, RequestError

WINDOW = 8192  # characters: some milliseconds of work
_LOOKAHEAD = 16  # no pattern that splits words looks farther ahead, runs of spaces apart


class TextEncoder(NamedTuple):
    """A tokenizer of the `tokenizers` library, and what must be known to feed it windows."""

    backend: Any  # tokenizers.Tokenizer
    longest_special: int  # of the tokens it finds in text before it splits words, in characters
    longest_token: int | None  # no token covers more characters; None: not known
    in_windows: bool = True  # false: a word may depend on text at any distance around it
    run_characters: str | None = None  # whitespace whose words depend on a run's end; None: all
    placeholder: int | None = None  # its id for bytes without a token; left out of results
    marked: Mapping[int, int] = MappingProxyType({})  # the control tokens that its marks stand for
    forbidden: frozenset[int] = frozenset()  # control tokens that no text may become


def encode_text(encoder: TextEncoder, text: str, limit: int | None, window: int) -> list[int]:
    """The tokens of a text, none added. A text of more than `limit` tokens is refused early."""
    if limit is not None and encoder.longest_token is not None:
        _check_limit(-(-len(text) // encoder.longest_token), limit)
    margin = encoder.longest_special + _LOOKAHEAD
    window = max(window, 2 * margin) if encoder.in_windows else len(text)
    ids: list[int] = []
    start, size = 0, window
    known = 0  # characters at the window's start that the window before covered
    while True:
        piece = text[start : start + size]
        with library_errors("the tokenizer cannot encode"):
            encoding = encoder.backend.encode(piece, add_special_tokens=False)
        first = _first_new_token(encoding, known)
        if start + size >= len(text):
            _extend(ids, encoding.ids[first:], encoder, limit)
            return ids
        cut = _last_certain_cut(
            encoding, first, min(size - margin, len(piece.rstrip(encoder.run_characters)))
        )
        if cut is None:  # one word fills the window
            size *= 8
            continue
        _extend(ids, encoding.ids[first : cut.num_tokens], encoder, limit)
        start, known, size = start + cut.last_word, cut.end - cut.last_word, window


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns the library's errors over a bad tokenizer.json into ModelFileErrors.

    It raises bare exceptions, and panics, which are no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(f"{what}: {error}") from None
        raise


class _Cut(NamedTuple):
    """How much of a window is certain."""

    num_tokens: int
    last_word: int  # the character with which the last certain word begins ...
    end: int  # ... and the one after it


def _first_new_token(encoding: Any, known: int) -> int:
    if known == 0:
        return 0
    starts = (begin for begin, _ in encoding.offsets)
    return next((n for n, begin in enumerate(starts) if begin >= known), len(encoding))


def _last_certain_cut(encoding: Any, first: int, bound: int) -> _Cut | None:
    """The last end of a word within the bound, after at least one new word. Where bytes are split
    as letters (falcon), a word may end within a character: no window can begin there."""
    words, offsets = encoding.word_ids, encoding.offsets
    for token in range(len(words) - 1, first, -1):
        is_between = offsets[token][0] >= offsets[token - 1][1]
        if words[token] != words[token - 1] and is_between and offsets[token][0] <= bound:
            last_word = words.index(words[token - 1], first)
            return _Cut(token, offsets[last_word][0], offsets[token][0])
    return None


def _extend(ids: list[int], more: list[int], encoder: TextEncoder, limit: int | None) -> None:
    if encoder.placeholder in more:
        more = [token for token in more if token != encoder.placeholder]
    if not encoder.forbidden.isdisjoint(more):
        token = encoder.backend.id_to_token(next(filter(encoder.forbidden.__contains__, more)))
        raise RequestError(
            f"the text holds {token!r}, which this vocabulary cannot write but as a control token",
            param="text",
        )
    marked = encoder.marked
    ids += [marked.get(token, token) for token in more] if marked else more
    _check_limit(len(ids), limit)


def _check_limit(num_tokens: int, limit: int | None) -> None:
    if limit is not None and num_tokens > limit:
        raise RequestError(
            f"the text has at least {num_tokens} tokens, more than the limit of {limit}",
            param="text",
        )
