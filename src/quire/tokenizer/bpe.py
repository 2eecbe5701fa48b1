"""Byte-pair encoding in the two forms that model files use, built on the `tokenizers` library.

Byte-level, as GPT-2 began it: bytes as letters, merged in a learnt order. SentencePiece: of all
neighbours that form a token, the best-scored merge first. The library merges pairs in the order of
a list, so the scores become such a list. Of equal scores SentencePiece merges the leftmost pair,
the library the pair that comes first in the list; as trained scores are all different, that matters
only where a token can be put together in two ways from the same few letters, as "aaa" from "a" and
"aa".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from quire.core.errors import ModelFileError
from quire.tokenizer.detokenizer import SPACE_MARK
from quire.tokenizer.pretokenizers import PreTokenizer
from quire.tokenizer.vocabulary import PREFIX, TokenKind, Vocabulary


def byte_level_backend(
    ids: Mapping[str, int], merges: Sequence[tuple[str, str]], kind: PreTokenizer
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens.

    Some vocabularies lack bytes that their training never saw. Such a byte has no token, yet its
    neighbours must not merge across it, so it gets a placeholder: the id after the last.
    """
    placeholder = "\0"  # in no token: the byte alphabet is printable
    while placeholder in ids:
        placeholder += "\0"
    model = models.BPE(
        {**ids, placeholder: len(ids)},
        list(merges),
        ignore_merges=kind.ignore_merges,
        unk_token=placeholder,
    )
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
    return backend


_MAX_MERGED_LENGTH = 1024  # characters: the work to find a token's merges grows with its square
_NEVER_MERGED = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)
WORDS = f"{SPACE_MARK}+[^{SPACE_MARK}]*|[^{SPACE_MARK}]+"


def sentencepiece_backend(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: int | None, add_space_prefix: bool
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens."""
    mergeable = {
        text: scores[token]
        for token, text in enumerate(vocabulary.texts)
        if vocabulary.kinds[token] not in _NEVER_MERGED
    }
    model = models.BPE(
        dict(vocabulary.ids),
        merges_by_score(mergeable),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    to_marks = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, to_marks])
    if splits_at_spaces(mergeable):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return backend


def merges_by_score(mergeable: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored tokens first."""
    merges: list[tuple[str, str]] = []
    for text in sorted(mergeable, key=lambda text: -mergeable[text]):
        if len(text) > _MAX_MERGED_LENGTH:
            raise ModelFileError(
                f"{PREFIX}tokens holds a token of {len(text)} characters that text can be merged "
                f"to; the limit is {_MAX_MERGED_LENGTH}"
            )
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
    return merges


def splits_at_spaces(texts: Iterable[str]) -> bool:
    """Whether no token reaches from one word into the next, so that words can be merged alone."""
    return not any(SPACE_MARK in text.lstrip(SPACE_MARK) for text in texts)
