"""Long texts: encoded in windows, the tokens are those of one pass, and limits are felt early."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.test_byte_level import CHARACTERS, tokenizer_of
from tests.tokenizer.vocabularies import (
    built,
    sentencepiece_metadata,
    sentencepiece_scores,
    smollm2,
)

from quire.core.errors import RequestError
from quire.tokenizer import Tokenizer
from quire.tokenizer.bpe import PRE_TOKENIZERS
from quire.tokenizer.text_encoder import WINDOW, encode_text

PARTS = st.one_of(
    st.sampled_from(CHARACTERS),
    st.sampled_from(
        ["<|im_end|>", "<|im_", "end|>", " \n", "   ", "\r\n", "'ll", "'", "word", "1234567"]
    ),
)
ONE_OF_EACH_KIND = sorted({kind: name for name, kind in PRE_TOKENIZERS.items()}.values())
SENTENCEPIECE = built(sentencepiece_metadata(sentencepiece_scores("abcdeé", 5, 120)))
TEXTS = st.lists(PARTS, min_size=80, max_size=120).map("".join)


def in_windows(tokenizer: Tokenizer, text: str, window: int) -> list[int]:
    return encode_text(tokenizer._spec.encoder, text, None, window)


def in_one_pass(tokenizer: Tokenizer, text: str) -> list[int]:
    return in_windows(tokenizer, text, len(text) + 1)


@pytest.mark.parametrize("pre", ONE_OF_EACH_KIND)
@given(text=TEXTS, window=st.sampled_from([1, 64, 100]))
@settings(max_examples=40)
def test_windows_of_any_size_give_the_tokens_of_one_pass(pre: str, text: str, window: int) -> None:
    tokenizer = tokenizer_of(pre)
    assert in_windows(tokenizer, text, window) == in_one_pass(tokenizer, text)


@given(
    text=st.lists(
        st.sampled_from([*"abcdeé  \n😀", "<s>", "</s>", "<", "s>"]), min_size=80, max_size=150
    ),
    window=st.sampled_from([1, 30, 50]),
)
@settings(max_examples=200)
def test_windows_put_no_space_into_a_sentencepiece_text(text: list[str], window: int) -> None:
    assert in_windows(SENTENCEPIECE, "".join(text), window) == in_one_pass(
        SENTENCEPIECE, "".join(text)
    )


HARD_TO_SPLIT = [
    "<|endoftext|>",
    "   <|endoftext|>",
    " \n" + " " * 40 + "\n ",
    "a" + " " * 40 + "b",
    "I'll 're",
    "1234567890",
    "...",
    "\n" * 40,
    "आ" + " " * 40 + "आ",
    "xIMGIMGABCDZx",
]


@pytest.mark.parametrize("pre", ONE_OF_EACH_KIND)
@pytest.mark.parametrize("hard", HARD_TO_SPLIT)
def test_a_window_may_end_anywhere_in_what_is_hard_to_split(pre: str, hard: str) -> None:
    parts = tokenizer_of(pre)._spec
    for place in range(60 - len(hard), 66):
        text = ("x " * 40)[:place] + hard + "z y " * 20
        for encoder in (parts.encoder, parts.control.marked(text, ())[1]):
            in_one = encode_text(encoder, text, None, len(text) + 1)
            assert encode_text(encoder, text, None, 64) == in_one


class CountingBackend:
    """Passes text on to a tokenizer of the library, and counts the characters."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.num_characters = 0
        self.largest = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        self.largest = max(self.largest, len(text))
        return self._backend.encode(text, **options)


def test_a_long_text_is_read_once_in_windows_that_stay_small() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    backend = CountingBackend(smollm2()._spec.encoder.backend)
    encoder = smollm2()._spec.encoder._replace(backend=backend)
    assert smollm2().decode(encode_text(encoder, text, None, WINDOW)) == text
    assert backend.largest == WINDOW
    assert backend.num_characters < 1.02 * len(text)


@pytest.mark.parametrize("text", ["a ", "a", " ", "\n", "1", "<|im_end|>", "<|im_", "'", "𝄞"])
def test_ten_megabytes_for_a_small_context_are_refused_unread(text: str) -> None:
    backend = CountingBackend(smollm2()._spec.encoder.backend)
    encoder = smollm2()._spec.encoder._replace(backend=backend)
    with pytest.raises(RequestError, match="more than the limit of 8192"):
        encode_text(encoder, text * (10_000_000 // len(text)), 8192, WINDOW)
    assert backend.num_characters == 0


@pytest.mark.parametrize("text", ["a ", "a", "1", "<|im_", "'s"])
def test_a_text_over_the_limit_is_read_no_farther_than_the_limit(text: str) -> None:
    backend = CountingBackend(smollm2()._spec.encoder.backend)
    encoder = smollm2()._spec.encoder._replace(backend=backend)
    with pytest.raises(RequestError, match="more than the limit of 8000"):
        encode_text(encoder, text * (640_000 // len(text)), 8000, WINDOW)
    most = 1_400_000 if text == "a" else 60_000  # "aaa" is one word, read in ever larger windows
    assert backend.num_characters <= most


@pytest.mark.parametrize("text", ["a", " ", "\n", "1", "<|im_", "a\n \n", "中", " 中 ", "'s"])
@pytest.mark.parametrize(
    "pre", ["smollm", "tekken", "deepseek-llm", "superbpe", "default", "tiny_aya", "jais-2"]
)
def test_long_repeating_texts_take_no_quadratic_time(pre: str, text: str) -> None:
    """They would not end: a hundred thousand characters squared are ten thousand million."""
    text *= 100_000 // len(text)
    tokenizer = tokenizer_of(pre)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_limit_counts_what_is_put_around_the_text() -> None:
    tokenizer = tokenizer_of("llama-bpe")
    tokens = tokenizer.encode("hello")
    assert tokenizer.encode("hello", limit=len(tokens)) == tokens
    with pytest.raises(RequestError, match="limit"):
        tokenizer.encode("hello", limit=len(tokens) - 1)


@pytest.mark.parametrize("text", [None, b"bytes", 5, "half \ud83d a pair"])
def test_what_is_no_text_is_a_request_error(text: str) -> None:
    with pytest.raises(RequestError, match=r"must be a string|character 5"):
        smollm2().encode(text)
