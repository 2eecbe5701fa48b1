"""The tokenizer of a real model: SmolLM2's tokens and prompts are those of llama.cpp."""

from typing import Any

import pytest
from tests.tokenizer.vocabularies import smollm2, smollm2_golden

from quire.tokenizer import ChatTemplate, check_vocabulary


@pytest.mark.parametrize("case", smollm2_golden()["texts"], ids=lambda case: case["text"][:20])
def test_every_text_has_its_tokens_with_special_tokens_parsed_and_not(case: Any) -> None:
    assert smollm2().encode(case["text"]) == case["special"]
    assert smollm2().encode(case["text"], parse_special=False) == case["plain"]


@pytest.mark.parametrize("case", smollm2_golden()["texts"], ids=lambda case: case["text"][:20])
def test_every_text_comes_back_from_its_tokens(case: Any) -> None:
    assert smollm2().decode(case["special"], skip_special=False) == case["text"]
    assert smollm2().decode(case["plain"]) == case["text"]


@pytest.mark.parametrize("case", smollm2_golden()["chats"], ids=lambda case: case["user"])
def test_every_chat_renders_to_its_prompt_and_its_tokens(case: Any) -> None:
    tokenizer = smollm2()
    assert tokenizer.chat_template is not None
    assert tokenizer.bos_token_id is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.token_text(tokenizer.bos_token_id))
    chat = template.render([{"role": "user", "content": case["user"]}])
    assert chat.text == case["prompt"]
    for spans in (True, chat.own_spans):
        tokens = tokenizer.encode(chat.text, add_special=False, parse_special=spans)
        assert tokens == case["prompt_tokens"]


def test_the_special_tokens_are_those_the_file_names() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocabulary_size == 49152
    assert tokenizer.bos_token_id == tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.unknown_token_id == 0
    assert tokenizer.padding_token_id == 2


def test_generation_ends_at_every_token_at_which_llama_cpp_ends_it() -> None:
    texts = [smollm2().token_text(token) for token in smollm2().end_token_ids]
    assert texts == ["<|endoftext|>", "<|im_end|>", "<reponame>"]


def test_neighbours_of_a_byte_without_a_token_do_not_merge() -> None:
    tokenizer = smollm2()
    assert tokenizer.token_id("Ą") is None  # the byte 4
    assert tokenizer.encode("!!") != 2 * tokenizer.encode("!")
    assert tokenizer.encode("!\x04!") == 2 * tokenizer.encode("!")


def test_the_vocabulary_fits_the_model_it_belongs_to() -> None:
    check_vocabulary(smollm2(), 49152)
