"""Text as its tokens arrive: whole characters only, and in sum what decoding them all gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.vocabularies import (
    built,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_scores,
    smollm2,
)

from quire.core.errors import RequestError
from quire.tokenizer import Tokenizer

SENTENCEPIECE = built(sentencepiece_metadata(sentencepiece_scores("abcdeé", 5, 120)))
BYTE_LEVEL = built(byte_level_metadata([], "qwen2"))
TEXTS = [
    *("", "plain text", " leading", "a<|im_end|>b\n"),
    *("🙂👩\u200d👩\u200d👧\u200d👦 emoji", "你好，世界", "e\u0301"),
]
VOCABULARIES = pytest.mark.parametrize("tokenizer", [smollm2(), BYTE_LEVEL, SENTENCEPIECE])


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.add, tokens), detokenizer.flush()]


@VOCABULARIES
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_add_up_to_it(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    joined = "".join(pieces(tokenizer, tokens))
    assert joined == tokenizer.decode(tokens, continuation=True)
    assert tokenizer.decode(tokens) == text
    assert joined.endswith(text)


@VOCABULARIES
@given(data=st.data())
@settings(max_examples=200)
def test_any_tokens_add_up_to_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Random tokens are mostly half characters and invalid bytes."""
    last = min(tokenizer.vocabulary_size, 400)
    tokens = data.draw(st.lists(st.integers(0, last), max_size=30))
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, continuation=True)
    stripping = tokenizer.detokenizer(continuation=False)
    parts = [*map(stripping.add, tokens), stripping.flush()]
    assert "".join(parts) == tokenizer.decode(tokens)


@VOCABULARIES
@given(text=st.text(max_size=20))
@settings(max_examples=100)
def test_no_piece_holds_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    known = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
    shown = ""
    for piece in pieces(tokenizer, tokens):
        shown += piece
        assert known.startswith(shown)


def test_a_character_comes_whole_with_its_last_token() -> None:
    tokens = BYTE_LEVEL.encode("é🙂", parse_special=False)
    assert len(tokens) == 6
    assert pieces(BYTE_LEVEL, tokens) == ["", "é", "", "", "", "🙂", ""]


def test_what_cannot_become_a_character_does_not_wait_for_more() -> None:
    first, letter = BYTE_LEVEL.encode("é")[0], BYTE_LEVEL.encode("a")[0]
    assert pieces(BYTE_LEVEL, [first, letter, first]) == ["", "\ufffda", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokens = [1, *smollm2().encode("hi"), 2]
    assert pieces(smollm2(), tokens) == ["", "hi", "", ""]
    shown = smollm2().detokenizer(skip_special=False)
    assert [*map(shown.add, tokens)] == ["<|im_start|>", "hi", "<|im_end|>"]


def test_a_negative_token_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="-1"):
        smollm2().decode([-1])


def test_a_tokens_bytes_and_text_are_its_own() -> None:
    first = BYTE_LEVEL.encode("é")[0]
    assert BYTE_LEVEL.token_bytes(first) == b"\xc3"
    assert BYTE_LEVEL.token_text(first) == "\ufffd"
    assert BYTE_LEVEL.token_text(2) == "<|im_end|>"
    assert SENTENCEPIECE.token_bytes(SENTENCEPIECE.encode("a")[1]) == b" a"
    assert SENTENCEPIECE.token_bytes(3 + 0x0A) == b"\n"
