"""Vocabularies that are broken or lie: an error that says where, never another exception."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.vocabularies import (
    Metadata,
    built,
    byte_level_metadata,
    learnt_merges,
    sentencepiece_metadata,
    sentencepiece_scores,
)

from quire.core.errors import ModelFileError, QuireError, UnsupportedModelError
from quire.tokenizer import Tokenizer, check_vocabulary

MERGES = learnt_merges(["ababdab", "abcabcbd"], 6)
Change = Callable[[Metadata], Any]


def byte_level() -> Metadata:
    return byte_level_metadata(MERGES, "qwen2")


def sentencepiece() -> Metadata:
    return sentencepiece_metadata(sentencepiece_scores("ab", 1, 20))


def key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_without_a_vocabulary_takes_token_ids_alone(model: str | None) -> None:
    assert Tokenizer.from_gguf({} if model is None else {key("model"): model}) is None


def test_a_model_of_another_kind_is_refused_with_the_names_of_those_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*supported: gpt2, llama"):
        Tokenizer.from_gguf({key("model"): "bert"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[key("tokens")].append("a"), r"tokens \d+ and \d+ are both 'a'"),
        (lambda m: m[key("tokens")].clear(), "tokens is empty"),
        (lambda m: m.pop(key("tokens")), "tokens is missing"),
        (lambda m: m.update({key("tokens"): "abc"}), "tokens must be an array"),
        (lambda m: m[key("tokens")].__setitem__(7, 7), r"tokens\[7\] must be a string"),
        (lambda m: m[key("tokens")].__setitem__(7, "\udcff"), r"tokens\[7\] is not UTF-8"),
        (lambda m: m[key("tokens")].__setitem__(7, "x" * 5000), r"tokens\[7\] has 5000 characters"),
        (lambda m: m[key("token_type")].pop(), r"token_type has \d+ entries for the \d+ tokens"),
        (lambda m: m[key("token_type")].__setitem__(7, 99), r"token_type\[7\] is 99"),
        (lambda m: m[key("token_type")].__setitem__(7, []), r"token_type\[7\] is \[\]"),
        (lambda m: m.pop(key("merges")), "merges is missing"),
        (lambda m: m[key("merges")].append("ab nowhere"), r"merges has 'ab nowhere'"),
        (lambda m: m[key("merges")].append("nowhere"), r"merges has 'nowhere '"),
        (lambda m: m[key("merges")].append(""), r"merges has ' '"),
        (lambda m: m[key("merges")].append("c c"), r"merges has 'c c'"),
        (lambda m: m.update({key("bos_token_id"): 10**9}), "bos_token_id is 1000000000"),
        (lambda m: m.update({key("eos_token_id"): -1}), "eos_token_id is -1"),
        (lambda m: m.update({key("eot_token_id"): "x"}), "eot_token_id is 'x'"),
        (lambda m: m.update({key("add_bos_token"): 1}), "add_bos_token must be true or false"),
        (lambda m: m.update({key("model"): 5}), "model must be a string"),
        (lambda m: m.update({key("pre"): ["a"]}), "pre must be a string"),
        (lambda m: m.update({"tokenizer.chat_template": 5}), "chat_template must be a string"),
    ],
)
def test_a_broken_byte_level_vocabulary_is_an_error_that_says_where(
    change: Change, message: str
) -> None:
    metadata = byte_level()
    change(metadata)
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(key("scores")), "scores is missing"),
        (lambda m: m[key("scores")].pop(), r"scores has \d+ entries for the \d+ tokens"),
        (lambda m: m[key("scores")].__setitem__(7, float("nan")), r"scores\[7\] must be a number"),
        (lambda m: m[key("scores")].__setitem__(7, "x"), r"scores\[7\] must be a number, got 'x'"),
        (lambda m: m[key("tokens")].__setitem__(-1, "x" * 2000), "token of 2000 characters"),
        (lambda m: m[key("tokens")].__setitem__(7, "<0xZZ>"), r"tokens\[7\] is '<0xZZ>'.*byte"),
    ],
)
def test_a_broken_sentencepiece_vocabulary_is_an_error_that_says_where(
    change: Change, message: str
) -> None:
    metadata = sentencepiece()
    change(metadata)
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(data=st.data())
@settings(max_examples=150)
def test_random_damage_gives_a_typed_error_or_a_tokenizer_that_works(
    make: Callable[[], Metadata], data: st.DataObject
) -> None:
    metadata = make()
    anything = st.one_of(
        st.none(), st.booleans(), st.integers(-5, 2**65), st.floats(), st.text(), st.just([])
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        value = metadata[name]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(anything)
        else:
            metadata[name] = data.draw(anything)
    try:
        tokenizer = Tokenizer.from_gguf(json.loads(json.dumps(metadata)))
    except QuireError:
        return
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("ab <s><|im_end|>🙂"))
        check_vocabulary(tokenizer, tokenizer.vocabulary_size)


def test_of_a_merge_listed_twice_the_first_counts() -> None:
    merges = [("a", "b"), ("b", "c"), ("a", "b")]
    metadata = byte_level_metadata(merges[:2], "qwen2")
    metadata[key("merges")].append("a b")
    tokenizer = built(metadata)
    tokens = tokenizer.encode("abc")
    assert [tokenizer.token_text(token) for token in tokens] == ["ab", "c"]


def test_numbers_may_come_as_arrays() -> None:
    plain, arrays = sentencepiece(), sentencepiece()
    arrays[key("scores")] = np.array(arrays[key("scores")], np.float32)
    arrays[key("token_type")] = np.array(arrays[key("token_type")], np.int32)
    arrays[key("tokens")] = tuple(arrays[key("tokens")])
    assert built(arrays).encode("ab ba") == built(plain).encode("ab ba")


@pytest.mark.parametrize("name", ["padding_token_id", "unknown_token_id", "fim_pad_token_id"])
def test_ids_that_nothing_hangs_on_may_be_out_of_range(name: str) -> None:
    """Such files are common, and llama.cpp reads them too."""
    metadata = byte_level()
    metadata[key(name)] = 2**32 - 1
    tokenizer = built(metadata)
    assert tokenizer.padding_token_id is None
    assert tokenizer.unknown_token_id is None
    assert tokenizer.end_token_ids == (0, 2)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused() -> None:
    tokenizer = built(byte_level())
    size = tokenizer.vocabulary_size
    check_vocabulary(tokenizer, size)
    check_vocabulary(tokenizer, size + 100)  # rows to spare are padding
    with pytest.raises(ModelFileError, match=f"{size} tokens .* {size - 1} rows"):
        check_vocabulary(tokenizer, size - 1)


def test_a_file_may_have_a_template_for_requests_with_tools() -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "usual"}
    metadata["tokenizer.chat_template.tool_use"] = "for tools"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    assert tokenizer.chat_template == "{%+ if tools +%}for tools{%+ else +%}usual{%+ endif %}"
