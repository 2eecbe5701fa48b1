"""Byte-level vocabularies: words as the models' own tokenizers split them, then plain merging."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.references import merge_by_rank, split_words
from tests.tokenizer.vocabularies import built, byte_level_metadata, learnt_merges, to_letters

from quire.core.errors import UnsupportedModelError
from quire.tokenizer import Tokenizer
from quire.tokenizer.bpe import PRE_TOKENIZERS

CHARACTERS = (
    "abzABZ'sStrelvmd .,!?$+<=>^~|`_-()[]{}\"#/\\%&*:;@0123456789"
    "\t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000²½٣Ⅷ"
    "éßÉñǅʰªſ中文字あア가ㄱ。，“’…—आिกา\u0301\u200d🙂👩𐐀\ufeff\ufffd"
)

# The patterns of the models' own tokenizer.json files, except that llama.cpp is the only
# authority for "default".
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
OFFICIAL = {
    "gpt-2": [GPT_2],
    "smollm": [r"\p{N}", GPT_2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-coder": [
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
}


@cache
def merges() -> list[tuple[str, str]]:
    """Merges learnt from text in one piece, so that every wrong split of words shows in tokens."""
    generator = random.Random(1)
    texts = [
        "".join(generator.choices(CHARACTERS[:40], k=3000)),
        "".join(generator.choices(CHARACTERS, k=2000)),
        "".join(generator.choices(["'ll", "'re", "'s", "a", "\n", "  ", "12", "..."], k=3000)),
    ]
    return learnt_merges([*map(to_letters, texts)], 500)


@cache
def tokenizer_of(pre: str) -> Tokenizer:
    return built(byte_level_metadata(merges(), pre))


def expected_tokens(text: str, pre: str, tokenizer: Tokenizer) -> list[int]:
    ranks = {pair: rank for rank, pair in enumerate(merges())}
    tokens: list[int] = []
    for word in split_words(text, OFFICIAL[pre], CHARACTERS):
        letters = to_letters(word)
        whole = tokenizer.token_id(letters) if PRE_TOKENIZERS[pre].ignore_merges else None
        pieces = [letters] if whole is not None else merge_by_rank(letters, ranks)
        tokens += [token for piece in pieces if (token := tokenizer.token_id(piece)) is not None]
    return tokens


@pytest.mark.parametrize("pre", OFFICIAL)
@given(text=st.text(alphabet=CHARACTERS, max_size=40))
@settings(max_examples=150)
def test_tokens_are_those_of_splitting_and_merging_plainly(pre: str, text: str) -> None:
    tokenizer = tokenizer_of(pre)
    assert tokenizer.encode(text, add_special=False) == expected_tokens(text, pre, tokenizer)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_in_the_table_gives_back_the_text(pre: str) -> None:
    text = f"{CHARACTERS} It's 12345 o'clock,\r\n\n  they'LL say: «ΌΧΙ» 你好 안녕 "
    tokenizer = tokenizer_of(pre)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'m", " 12345", "  ", " ok", "?!", "\n\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", "  ", " ok", "?!", "\n\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "45", "  ", " ok", "?!\n\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "5", "  ", " ok", "?!\n\n"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", "5", "  ", " ok", "?!\n\n"]),
        ("default", ["I", "'", "m", " ", "123", "45", "  ", " ok", "?!", "\n\n"]),
    ],
)
def test_words_split_as_known_by_hand(pre: str, words: list[str]) -> None:
    """In a vocabulary that has each of these words whole, and otherwise only bytes."""
    text = "".join(words)
    whole = sorted({to_letters(word) for word in words if len(word) > 1})
    steps = [(word[:n], word[n]) for word in whole for n in range(1, len(word))]
    chains = list({left + right: (left, right) for left, right in steps}.values())
    tokenizer = built(byte_level_metadata(chains, pre))
    tokens = tokenizer.encode(text, add_special=False)
    assert [tokenizer.token_text(token) for token in tokens] == words


def test_an_unknown_pre_tokenizer_is_refused_with_the_names_of_those_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*supported: .*llama-bpe"):
        Tokenizer.from_gguf(byte_level_metadata([], "klingon"))


def test_a_file_without_a_pre_tokenizer_has_the_default_one() -> None:
    named, unnamed = tokenizer_of("default"), byte_level_metadata(merges(), "default")
    del unnamed["tokenizer.ggml.pre"]
    text = "It's 12345 = «x»!"
    assert built(unnamed).encode(text) == named.encode(text)


def test_a_whole_word_is_one_token_where_merges_are_ignored() -> None:
    """Llama 3 has words that no chain of merges leads to."""
    word = to_letters(" strange")
    more = byte_level_metadata([], "llama-bpe")
    more["tokenizer.ggml.tokens"].append(word)
    more["tokenizer.ggml.token_type"].append(1)
    assert built(more).token_id(word) in built(more).encode(" strange")
    more["tokenizer.ggml.pre"] = "qwen2"
    assert built(more).token_id(word) not in built(more).encode(" strange")


@pytest.mark.parametrize(
    ("pre", "fields", "prefix", "suffix"),
    [
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("qwen2", {}, [], []),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("qwen2", {"add_bos_token": True, "bos_token_id": None}, [], []),
    ],
)
def test_what_goes_before_and_after_a_text_is_as_the_file_and_its_kind_say(
    pre: str, fields: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = built(byte_level_metadata([], pre, **fields))
    plain = tokenizer.encode("a", add_special=False)
    assert tokenizer.encode("a") == prefix + plain + suffix
    assert tokenizer.encode("") == prefix + suffix


def test_control_tokens_are_parsed_only_where_wanted_and_user_defined_ones_always() -> None:
    metadata = byte_level_metadata([], "qwen2")
    metadata["tokenizer.ggml.tokens"].append("<tool>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = built(metadata)
    tool = tokenizer.token_id("<tool>")
    text = "a<|im_end|><tool>b"
    parsed, literal = tokenizer.encode(text), tokenizer.encode(text, parse_special=False)
    assert [2, tool] == parsed[1:3]
    assert tool in literal
    assert 2 not in literal
    assert tokenizer.decode(parsed) == "a<tool>b"
    assert tokenizer.decode(parsed, skip_special=False) == tokenizer.decode(literal) == text


def test_of_special_tokens_at_one_place_the_longest_is_found() -> None:
    metadata = byte_level_metadata([], "qwen2")
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>\n", "<|im"]
    metadata["tokenizer.ggml.token_type"] += [3, 4]
    tokenizer = built(metadata)
    assert tokenizer.encode("<|im_end|>\n") == [tokenizer.token_id("<|im_end|>\n")]


def test_an_end_token_that_the_file_calls_normal_is_a_control_token_all_the_same() -> None:
    metadata = byte_level_metadata([], "qwen2", eos_token_id=None)
    metadata["tokenizer.ggml.token_type"][:3] = [1, 1, 4]
    tokenizer = built(metadata)
    assert tokenizer.eos_token_id is None
    assert tokenizer.end_token_ids == (0, 2)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2, *tokenizer.encode("a")]) == "a"


def test_end_tokens_are_those_named_and_those_known_by_their_text() -> None:
    metadata = byte_level_metadata(
        [], "llama-bpe", eos_token_id=3, eot_token_id=4, eom_token_id=5, fim_pad_token_id=6
    )
    metadata["tokenizer.ggml.tokens"] += ["<|eot_id|>", "<|file_sep|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    assert built(metadata).end_token_ids == (0, 2, 3, 4, 5, 6, 259, 260, 261)


def test_end_is_no_end_where_return_and_call_are() -> None:
    metadata = byte_level_metadata([], "gpt-4o")
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    tokenizer = built(metadata)
    assert tokenizer.token_id("<|end|>") not in tokenizer.end_token_ids
    assert tokenizer.token_id("<|return|>") in tokenizer.end_token_ids


def test_unused_tokens_have_no_text() -> None:
    metadata = byte_level_metadata([], "qwen2")
    metadata["tokenizer.ggml.tokens"] += ["[PAD259]", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 1]
    tokenizer = built(metadata)
    assert tokenizer.decode([259], skip_special=False) == ""
    assert tokenizer.token_id("[EMPTY_260]") == 260


def test_ids_past_the_vocabulary_are_a_models_padding_and_have_no_text() -> None:
    tokenizer = tokenizer_of("qwen2")
    assert tokenizer.decode([tokenizer.vocabulary_size + 7]) == ""
