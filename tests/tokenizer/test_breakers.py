"""DRY's sequence breakers: which tokens hold them, and which begin them."""

import pytest
from tests.tokenizer.vocabularies import smollm2

from quire.core.errors import RequestError
from quire.core.sampling import SEQUENCE_BREAKERS
from quire.tokenizer.breakers import SequenceBreakers

find = SequenceBreakers(smollm2())


def test_the_usual_breakers_are_all_tokens_that_hold_them() -> None:
    tokenizer = smollm2()
    found = find(SEQUENCE_BREAKERS)
    holding = {
        token
        for token in range(tokenizer.vocabulary_size)
        if any(text.encode() in tokenizer.token_bytes(token) for text in SEQUENCE_BREAKERS)
    }
    assert found.tokens == holding
    assert len(holding) > 100
    assert found.tails == {}, "of one byte each: no token holds a part of one"


def test_a_longer_breaker_also_begins_in_tokens_that_end_with_its_first_bytes() -> None:
    tokenizer = smollm2()
    found = find(["\n\nUser"])
    texts = {token: tokenizer.token_bytes(token) for token in found.tokens}
    assert all(b"\n\nUser" in text for text in texts.values())
    newline = tokenizer.encode("\n", add_special=False)[0]
    tail = tuple(tokenizer.encode("\nUser", add_special=False))
    assert tail in found.tails[newline]
    for head, tails in found.tails.items():
        for one in tails:
            joined = tokenizer.token_bytes(head) + b"".join(map(tokenizer.token_bytes, one))
            assert joined.endswith(b"\n\nUser")
            assert not tokenizer.token_bytes(head).endswith(b"\n\nUser")


def test_a_breaker_cut_within_a_character_has_no_tail_there() -> None:
    found = find(["\u20ac"])  # three bytes
    assert all(b"\xe2\x82\xac" in smollm2().token_bytes(token) for token in found.tokens)
    assert found.tails == {}


def test_no_breakers_are_none() -> None:
    assert find([]) == (frozenset(), {})


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="UTF-8") as caught:
        find(["\ud800"])
    assert caught.value.param == "dry_sequence_breakers"
