"""SentencePiece-style vocabularies: the tokens are those of merging plainly by score."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.references import merge_by_score
from tests.tokenizer.vocabularies import (
    Metadata,
    built,
    sentencepiece_metadata,
    sentencepiece_scores,
)

LETTERS = "abcdeé"
SCORES = sentencepiece_scores(LETTERS, seed=5, num_merges=120)


def expected_tokens(text: str, scores: dict[str, float], metadata: Metadata) -> list[int]:
    ids = {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokens = []
    for piece in merge_by_score(text.replace(" ", "▁"), scores):
        values = [f"<0x{byte:02X}>" for byte in piece.encode()]
        tokens += [ids[piece]] if piece in ids else [ids[value] for value in values]
    return tokens


@given(text=st.text(alphabet=LETTERS + " \n😀Z", max_size=40))
@settings(max_examples=300)
def test_tokens_are_those_of_merging_plainly(text: str) -> None:
    metadata = sentencepiece_metadata(SCORES)
    expected = expected_tokens(f" {text}", SCORES, metadata) if text else []
    assert built(metadata).encode(text) == [1, *expected]


@given(seed=st.integers(0, 10_000), num_merges=st.integers(1, 30), text=st.text("ab ", max_size=25))
@settings(max_examples=200)
def test_tokens_are_right_for_vocabularies_of_few_letters_that_repeat(
    seed: int, num_merges: int, text: str
) -> None:
    scores = sentencepiece_scores("ab", seed, num_merges)
    metadata = sentencepiece_metadata(scores, add_space_prefix=False)
    assert built(metadata).encode(text, add_special=False) == expected_tokens(
        text, scores, metadata
    )


def test_tokens_that_reach_into_the_next_word_are_found() -> None:
    scores = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁b": -4.0, "a▁": -5.0, "a▁b": -6.0, "▁a": -7.0}
    metadata = sentencepiece_metadata(scores)
    tokenizer = built(metadata)
    assert tokenizer.encode("a b", add_special=False) == expected_tokens(" a b", scores, metadata)
    assert tokenizer.encode("b a b", add_special=False) == expected_tokens(
        " b a b", scores, metadata
    )


def test_the_best_score_wins_over_the_first_pair() -> None:
    scores = {"▁": -1.0, "a": -1.1, "b": -1.2, "c": -1.3, "ab": -9.0, "bc": -2.0}
    tokenizer = built(sentencepiece_metadata(scores, add_space_prefix=False))
    tokens = tokenizer.encode("abc", add_special=False)
    assert [tokenizer.token_text(token) for token in tokens] == ["a", "bc"]


@pytest.mark.parametrize("text", ["", "a", " a", "a b", "  a  b ", "\n", "é😀Z\t", "<s>a</s>"])
@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_decoding_gives_back_the_text(text: str, add_space_prefix: bool) -> None:
    tokenizer = built(sentencepiece_metadata(SCORES, add_space_prefix=add_space_prefix))
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_a_completion_keeps_the_space_it_begins_with() -> None:
    tokenizer = built(sentencepiece_metadata(SCORES))
    tokens = tokenizer.encode("a", add_special=False)
    assert tokenizer.decode(tokens) == "a"
    assert tokenizer.decode(tokens, continuation=True) == " a"


def test_a_space_is_put_before_a_text_and_after_each_special_token() -> None:
    tokenizer = built(sentencepiece_metadata(SCORES))
    assert tokenizer.encode("a<s>b") == [
        *tokenizer.encode("a"),
        *tokenizer.encode("b"),
    ]


def test_without_byte_tokens_a_letter_without_a_token_is_unknown() -> None:
    tokenizer = built(sentencepiece_metadata(SCORES, with_bytes=False))
    assert tokenizer.encode("😀", add_special=False)[-1] == tokenizer.unknown_token_id == 0


def test_text_never_merges_to_a_control_token() -> None:
    scores = {"▁": -1.0, "<": -2.0, "s": -3.0, ">": -4.0, "<s": -5.0, "s>": -6.0}
    tokenizer = built(sentencepiece_metadata(scores))
    assert 1 not in tokenizer.encode("<s>", add_special=False, parse_special=False)
    assert tokenizer.encode("<s>", add_special=False) == [1]


@pytest.mark.parametrize(
    ("fields", "bos", "eos", "prefix", "suffix"),
    [
        ({}, 1, 2, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, 1, 2, [], [2]),
        ({"bos_token_id": 2, "eos_token_id": 1}, 2, 1, [2], []),
    ],
)
def test_special_tokens_are_the_usual_ones_unless_the_file_says(
    fields: dict[str, Any], bos: int, eos: int, prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = built(sentencepiece_metadata(SCORES, **fields))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
    assert eos in tokenizer.end_token_ids
    assert tokenizer.encode("") == prefix + suffix
