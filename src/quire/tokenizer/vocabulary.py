"""What a tokenizer is made of: its special tokens; the tokens that a GGUF file lists, read and
checked before anything is built from them; TokenizerSpec, all of it, whichever file it is from.

Files name few of their end tokens, so the rest are known by their text, as llama.cpp knows them.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quire.core.errors import ModelFileError
from quire.tokenizer.control_tokens import ControlTokens
from quire.tokenizer.fill_in import MIDDLE_END_NAMES, FillIn
from quire.tokenizer.text_encoder import TextEncoder

END_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|tool_response>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    }
)

# A token of one of these names is a control token, whatever its type in the file.
CONTROL_NAMES = END_NAMES.union(*MIDDLE_END_NAMES.values())

# Where all of the first are in the vocabulary, the second is a separator and ends nothing.
_NOT_AN_END = (
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>"),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>"),
    (frozenset({"<|tool_response>"}), "</s>"),
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that mean something to the engine; None where the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    padding: int | None = None
    ends: tuple[int, ...] = ()  # each of them ends a generation


def end_token_ids(named: Iterable[int | None], candidates: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that end a generation: those a file names, and those known by their text."""
    found = {text: token for text, token in candidates.items() if text in END_NAMES}
    for required, separator in _NOT_AN_END:
        if required <= found.keys():
            found.pop(separator, None)
    return tuple(sorted({token for token in named if token is not None}.union(found.values())))


# ---- the tokens of a GGUF file


MAX_TOKEN_LENGTH = 4096  # characters
PREFIX = "tokenizer.ggml."


class TokenKind(IntEnum):
    """What GGUF's tokenizer.ggml.token_type says of a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2  # replaces text without a token
    CONTROL = 3  # never text
    USER_DEFINED = 4  # found in text before anything else
    UNUSED = 5
    BYTE = 6  # one byte, as <0x0A>


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id: their text as the file writes it, and their kind."""

    texts: Sequence[str]
    kinds: Sequence[TokenKind]
    ids: Mapping[str, int]

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The tokens of a GGUF file's metadata."""
    texts = read_strings(metadata, "tokens")
    if not texts:
        raise ModelFileError(f"{PREFIX}tokens is empty; the tokenizer needs at least one token")
    texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
    _check_texts(texts)
    ids = {text: token for token, text in enumerate(texts)}
    if len(ids) < len(texts):
        _refuse_duplicate(texts)
    kinds = _read_kinds(metadata, len(texts))
    for name in CONTROL_NAMES & ids.keys():
        kinds[ids[name]] = TokenKind.CONTROL
    return Vocabulary(texts, kinds, ids)


def _check_texts(texts: Sequence[str]) -> None:
    longest = max(range(len(texts)), key=lambda token: len(texts[token]))
    if len(texts[longest]) > MAX_TOKEN_LENGTH:
        raise ModelFileError(
            f"{PREFIX}tokens[{longest}] has {len(texts[longest])} characters; "
            f"the limit is {MAX_TOKEN_LENGTH}"
        )


def _refuse_duplicate(texts: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text in first:
            raise ModelFileError(f"{PREFIX}tokens {first[text]} and {token} are both {text!r}")
        first[text] = token


def _read_kinds(metadata: Mapping[str, object], count: int) -> list[TokenKind]:
    key = f"{PREFIX}token_type"
    if key not in metadata:
        return [TokenKind.NORMAL] * count
    values = _read_array(metadata, "token_type")
    _check_length("token_type", len(values), count)
    known = {int(kind): kind for kind in TokenKind}
    try:
        return [known[value] for value in values]
    except (KeyError, TypeError):
        wrong = next(n for n, value in enumerate(values) if _is_not_in(value, known))
        raise ModelFileError(
            f"{key}[{wrong}] is {values[wrong]!r}; token types are 0 to {max(known)}"
        ) from None


def _is_not_in(value: object, known: Mapping[int, TokenKind]) -> bool:
    return not isinstance(value, int) or value not in known


def read_scores(metadata: Mapping[str, object], count: int) -> list[float]:
    """How early each token is merged: the higher, the earlier."""
    scores = _read_array(metadata, "scores")
    _check_length("scores", len(scores), count)
    for token, score in enumerate(scores):
        if not isinstance(score, numbers.Real) or math.isnan(score):
            raise ModelFileError(f"{PREFIX}scores[{token}] must be a number, got {score!r}")
    return scores


def read_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they merge; of pairs listed twice the first counts."""
    return list(dict.fromkeys(map(_pair, read_strings(metadata, "merges"))))


def _pair(line: str) -> tuple[str, str]:
    index = line.find(" ", 1)  # a token may itself begin with a space
    return (line[:index], line[index + 1 :]) if index > 0 else (line, "")


def check_merges(merges: Sequence[tuple[str, str]], ids: Mapping[str, int]) -> None:
    """Refuse merges of tokens that are not there; slow, so only for merges known to be wrong."""
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelFileError(
                f"{PREFIX}merges has {f'{left} {right}'[:100]!r}; each must name two tokens, a "
                f"space between them, that are in {PREFIX}tokens, as must be what they merge to"
            )


def read_flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{PREFIX}{name} must be true or false, got {value!r}")
    return value


def read_text(metadata: Mapping[str, object], key: str, default: str | None) -> str | None:
    value = metadata.get(key, default)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"{key} must be a string, got {type(value).__name__}")
    return value


def read_token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    """A token id that the file names; None where it names none."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ModelFileError(
            f"{PREFIX}{name} is {value!r}; it must be a token id from 0 to {count - 1}"
        )
    return value


def read_strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = _read_array(metadata, name)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise ModelFileError(
                f"{PREFIX}{name}[{index}] must be a string, got {type(value).__name__}"
            )
    try:
        "".join(values).encode()
    except UnicodeEncodeError:  # readers keep bytes that are not UTF-8 as lone surrogates
        index = next(n for n, value in enumerate(values) if not _is_utf8(value))
        raise ModelFileError(f"{PREFIX}{name}[{index}] is not UTF-8: {values[index]!r}") from None
    return values


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_array(metadata: Mapping[str, object], name: str) -> list[Any]:
    key = PREFIX + name
    if key not in metadata:
        raise ModelFileError(f"{key} is missing; this kind of tokenizer needs it")
    value = metadata[key]
    if hasattr(value, "tolist"):  # numbers arrive as numpy arrays
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise ModelFileError(f"{key} must be an array, got {type(value).__name__}")
    return list(value)


def _check_length(name: str, length: int, count: int) -> None:
    if length != count:
        raise ModelFileError(
            f"{PREFIX}{name} has {length} entries for the {count} tokens of {PREFIX}tokens"
        )


# ---- TokenizerSpec


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """All that a Tokenizer is made of."""

    encoder: TextEncoder  # finds special tokens in text
    control: ControlTokens  # ... and those that only a template may write
    texts: Sequence[str]  # by id, as the file writes them
    ids: Mapping[str, int]
    piece_bytes: Callable[[int], bytes]  # of a token, whether or not it is shown
    hidden: frozenset[int]  # not part of the text, unless asked for
    special: SpecialTokens
    prefix: tuple[int, ...]  # put before a text ...
    suffix: tuple[int, ...]  # ... and after it
    strip_space: bool  # the text began with a space that encoding put there
    chat_template: str | None
    fill_in: FillIn | None
