"""Gemma 4's kind of vocabulary: SentencePiece's letters, merged by a list."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.vocabularies import Metadata, built, sentencepiece_metadata
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from quire.core.errors import ModelFileError

LETTERS = ["▁", "\n", "a", "b", "c", "é", "1"]
MERGES = [
    *(("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("▁", "▁"), ("▁▁", "▁▁")),
    *(("a", "b"), ("▁", "ab"), ("ab", "c"), ("▁ab", "c"), ("b", "c"), ("é", "a"), ("1", "1")),
]


def metadata(merges: list[tuple[str, str]] = MERGES, **more: Any) -> Metadata:
    texts = dict.fromkeys([*LETTERS, *(left + right for left, right in merges)], 0.0)
    pairs = [" ".join(pair) for pair in merges]
    fields = {"model": "gemma4", "merges": pairs, "unknown_token_id": 0, **more}
    return sentencepiece_metadata(texts, **fields)


def library(fields: Metadata, merges: list[tuple[str, str]] = MERGES) -> Any:
    """Set up as Gemma's tokenizer.json is."""
    texts = fields["tokenizer.ggml.tokens"]
    model = models.BPE(
        {text: token for token, text in enumerate(texts)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = [AddedToken(text, normalized=False, special=True) for text in ("<s>", "</s>")]
    backend.add_special_tokens(special)
    return backend


@given(text=st.text(alphabet="abcé1 \n\tZ😀", max_size=60))
@settings(max_examples=300)
def test_tokens_are_those_of_gemmas_own_tokenizer(text: str) -> None:
    fields = metadata()
    tokenizer = built(fields)
    tokens = tokenizer.encode(text, add_special=False)
    assert tokens == library(fields).encode(text).ids
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("more", [("a", "▁"), ("\n", "a")])
def test_tokens_that_reach_into_the_next_word_or_line_are_found(more: tuple[str, str]) -> None:
    merges = [more, *MERGES]
    fields = metadata(merges)
    text = "a b\na\n\nab \nabc a"
    found = built(fields).encode(text, add_special=False)
    assert found == library(fields, merges).encode(text).ids
    assert fields["tokenizer.ggml.tokens"].index("".join(more)) in found


def test_what_goes_before_a_text_is_what_the_file_says() -> None:
    assert built(metadata(bos_token_id=1)).encode("ab") == built(metadata()).encode("ab")
    with_bos = built(metadata(bos_token_id=1, add_bos_token=True)).encode("ab")
    assert with_bos == [1, *built(metadata()).encode("ab")]


@pytest.mark.parametrize("pre", ["gemma4", "sarvam-moe"])
def test_a_pre_tokenizer_may_say_so_instead(pre: str) -> None:
    fields = metadata(model="gpt2", pre=pre)
    assert built(fields).encode("ab 1\n\nc") == built(metadata()).encode("ab 1\n\nc")


def test_a_merge_of_tokens_that_are_not_there_is_named() -> None:
    fields = metadata()
    fields["tokenizer.ggml.merges"] += ["a z"]
    with pytest.raises(ModelFileError, match="merges has 'a z'"):
        built(fields)
