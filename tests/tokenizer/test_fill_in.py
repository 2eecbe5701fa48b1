"""Prompts that ask for what stands between two texts, in each form that code models know."""

from typing import Any

import pytest
from tests.tokenizer.vocabularies import (
    Metadata,
    built,
    byte_level_metadata,
    learnt_merges,
    sentencepiece_metadata,
)

from quire.core.errors import RequestError
from quire.tokenizer import Tokenizer

MERGES = learnt_merges(["ababdab", "abcabcbd"], 6)
BEFORE, AFTER = "ab cab", "bd"


def byte_level(*specials: str, **fields: Any) -> Metadata:
    """A vocabulary with these control tokens at its end."""
    metadata = byte_level_metadata(MERGES, "qwen2", **fields)
    metadata["tokenizer.ggml.tokens"] += specials
    metadata["tokenizer.ggml.token_type"] += [3] * len(specials)
    return metadata


def pieces_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The control tokens' names, and the texts between them."""
    pieces: list[str] = []
    texts: list[int] = []
    for token in [*tokens, None]:
        if token is not None and token not in tokenizer.hidden_token_ids:
            texts.append(token)
            continue
        if texts:
            pieces.append(tokenizer.decode(texts))
            texts = []
        if token is not None:
            pieces.append(tokenizer.token_text(token))
    return pieces


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("<PRE>", "<SUF>", "<MID>"),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_the_middle_is_asked_for_behind_both_texts(names: tuple[str, str, str]) -> None:
    tokenizer = built(byte_level(*names))
    tokens = tokenizer.encode_fill_in(BEFORE, AFTER)
    assert pieces_of(tokenizer, tokens) == [names[0], BEFORE, names[1], AFTER, names[2]]
    assert tokenizer.fill_in is not None
    marks = {tokenizer.token_text(token) for token in tokenizer.fill_in.ends}
    assert marks == set(names)


def test_codestral_continues_the_text_before_which_stands_last() -> None:
    tokenizer = built(byte_level("[SUFFIX]", "[PREFIX]"))
    tokens = tokenizer.encode_fill_in(BEFORE, AFTER)
    assert pieces_of(tokenizer, tokens) == ["[SUFFIX]", AFTER, "[PREFIX]", BEFORE]


def test_code_llamas_marks_are_pieces_of_a_sentencepiece_vocabulary() -> None:
    scores = {"▁": -1.0, "a": -1.1, "b": -1.2, "▁<PRE>": 0.0, "▁<SUF>": 0.0, "▁<MID>": 0.0}
    metadata = sentencepiece_metadata({**scores, "▁<EOT>": 0.0})
    metadata["tokenizer.ggml.token_type"][-4:] = [3] * 4
    tokenizer = built(metadata)
    first, *tokens = tokenizer.encode_fill_in("a", "b")
    assert first == tokenizer.bos_token_id
    assert pieces_of(tokenizer, tokens) == ["▁<PRE>", "a", "▁<SUF>", "b", "▁<MID>"]
    assert tokenizer.fill_in is not None
    ends = [tokenizer.token_text(token) for token in tokenizer.fill_in.ends]
    assert "▁<EOT>" in ends


@pytest.mark.parametrize(
    "fields",
    [
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),
    ],
)
def test_ids_that_the_file_names_go_before_names(fields: tuple[str, str, str]) -> None:
    names = ("<a>", "<b>", "<c>")
    usual = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    metadata = byte_level(*usual, *names)
    count = len(metadata["tokenizer.ggml.tokens"])
    for place, field in enumerate(fields):
        metadata[f"tokenizer.ggml.{field}"] = count - 3 + place
    tokenizer = built(metadata)
    tokens = tokenizer.encode_fill_in(BEFORE, AFTER)
    assert pieces_of(tokenizer, tokens) == ["<a>", BEFORE, "<b>", AFTER, "<c>"]


def test_ids_out_of_range_are_as_if_not_there() -> None:
    ids = {f"fim_{part}_token_id": 10**9 for part in ("pre", "suf", "mid")}
    assert built(byte_level(**ids)).fill_in is None


def test_a_vocabulary_with_half_of_a_form_has_none() -> None:
    assert built(byte_level("<|fim_prefix|>", "<|fim_suffix|>")).fill_in is None


def test_texts_cannot_write_the_marks() -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer = built(byte_level(*names))
    tokens = tokenizer.encode_fill_in(f"a{names[2]}", names[0])
    marks = [token for token in tokens if token in tokenizer.hidden_token_ids]
    assert [tokenizer.token_text(token) for token in marks] == [names[0], names[1], names[2]]


def test_both_texts_are_within_the_limit_together() -> None:
    tokenizer = built(byte_level("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    needed = len(tokenizer.encode_fill_in("cdcd", "dcdc"))
    assert len(tokenizer.encode_fill_in("cdcd", "dcdc", limit=needed)) == needed
    with pytest.raises(RequestError):
        tokenizer.encode_fill_in("cdcd", "dcdc" * 50_000, limit=needed)
