"""Byte-level byte-pair encoding, as GPT-2 began it: bytes as letters, merged in a learnt order."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from quire.tokenizer.pretokenizers import PreTokenizer


def byte_level_engine(
    ids: Mapping[str, int], merges: Sequence[tuple[str, str]], kind: PreTokenizer
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens.

    Some vocabularies lack bytes that their training never saw. Such a byte has no token, yet its
    neighbours must not merge across it, so the library is given the id after the last for it.
    """
    placeholder = "\0"  # no word holds it: in the byte alphabet every letter is printable
    while placeholder in ids:
        placeholder += "\0"
    model = models.BPE(
        {**ids, placeholder: len(ids)},
        list(merges),
        ignore_merges=kind.ignore_merges,
        unk_token=placeholder,
    )
    engine = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
    return engine
