"""Tokens that may or may not come, text with control tokens or none at all, prompts alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixture_files import fixture_file
from tests.llm.text_models import write_text_model

from quire import LLM, Constraint, RequestError, SamplingParams
from quire.core.request import FinishReason
from quire.tokenizer import Tokenizer

KV_MEMORY = "4MiB"
PROMPT = "hello there"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(model, device=request.param, kv_memory=KV_MEMORY) as loaded:
        yield loaded


def params(**given: Any) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": 24, "seed": 5, "ignore_eos": True, **given})


def tokenizer_of(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


# ---- allowed_token_ids


def test_only_allowed_tokens_come(llm: LLM) -> None:
    [free] = llm.generate(PROMPT, params())
    allowed = [5, 9, 77]
    [held] = llm.generate(PROMPT, params(allowed_token_ids=allowed))
    assert not set(free.token_ids) <= set(allowed)
    assert len(held.token_ids) == 24 and set(held.token_ids) <= set(allowed)


def test_allowed_tokens_narrow_a_grammar(llm: LLM) -> None:
    digits = [token for d in "37" if (token := tokenizer_of(llm).token_id(d)) is not None]
    held = params(structured=Constraint.regex("[0-9]{12}"), allowed_token_ids=digits)
    [output] = llm.generate(PROMPT, held)
    assert len(output.text) == 12 and set(output.text) <= set("37")


def test_allowed_tokens_need_no_tokenizer() -> None:
    with LLM(fixture_file("tiny/Q4_0.gguf"), kv_memory=KV_MEMORY) as plain:
        [output] = plain.generate([[1, 2]], allowed_token_ids=[3], max_tokens=4, ignore_eos=True)
        assert output.token_ids == [3, 3, 3, 3]
        with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
            plain.generate([[1, 2]], bad_words=["a"], max_tokens=3)


@pytest.mark.parametrize("wrong", [[], [-1], [10**6], "3", [True]])
def test_wrong_allowed_tokens_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids") as caught:
        llm.generate(PROMPT, allowed_token_ids=wrong, max_tokens=2)
    assert caught.value.param == "allowed_token_ids"


# ---- bad_words


def test_a_bad_word_of_one_token_never_comes(llm: LLM) -> None:
    [free] = llm.generate(PROMPT, params())
    tokenizer = tokenizer_of(llm)
    words = [text for token in free.token_ids if (text := tokenizer.token_text(token)).isalnum()]
    assert words
    [held] = llm.generate(PROMPT, params(bad_words=words))
    banned = {tuple(llm.tokenize(word, add_special_tokens=False)) for word in words}
    assert not any((token,) in banned for token in held.token_ids)


def test_the_last_token_of_a_bad_word_never_follows_the_others(llm: LLM) -> None:
    """Two tokens that come one after another become a bad word: each still comes alone."""
    first, second, third = 40, 41, 42
    tokenizer = tokenizer_of(llm)
    word = tokenizer.decode([first, second], continuation=True)
    assert llm.tokenize(word, add_special_tokens=False) == [first, second]
    narrow = {"allowed_token_ids": [first, second, third], "max_tokens": 64, "temperature": 2.0}
    [free] = llm.generate(PROMPT, params(**narrow))
    [held] = llm.generate(PROMPT, params(**narrow, bad_words=[word]))
    assert word in free.text
    assert word not in held.text
    assert set(held.token_ids) == {first, second, third}


@pytest.mark.parametrize("wrong", [[""], [" "], [3], ["a"] * 2000, ["ab" * 500]])
def test_wrong_bad_words_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="bad_words") as caught:
        llm.generate(PROMPT, bad_words=wrong, max_tokens=2)
    assert caught.value.param == "bad_words"


def test_filtered_completions_are_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    draw = random.Random(4)
    several = [
        params(
            seed=number,
            temperature=1.5,
            allowed_token_ids=draw.sample(range(30, 200), 20) if number % 3 else None,
            bad_words=[chr(draw.randrange(97, 123)) for _ in range(4)] if number % 2 else (),
        )
        for number in range(9)
    ]
    together = llm.generate([PROMPT] * 9, several)
    for own, output in zip(several, together, strict=True):
        [alone] = llm.generate(PROMPT, own)
        assert alone.token_ids == output.token_ids


# ---- text


def test_control_tokens_are_written_where_that_is_asked_for(llm: LLM) -> None:
    end = tokenizer_of(llm).eos_token_id
    assert end is not None
    forced = params(allowed_token_ids=[end], max_tokens=2)
    name = tokenizer_of(llm).token_name(end)
    [hidden] = llm.generate(PROMPT, forced)
    [shown] = llm.generate(
        PROMPT, params(allowed_token_ids=[end], max_tokens=2, skip_special_tokens=False)
    )
    assert hidden.token_ids == shown.token_ids == [end, end]
    assert (hidden.text, shown.text) == ("", name * 2)


def test_text_is_left_out_where_that_is_asked_for(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, params())
    [bare] = llm.generate(PROMPT, params(detokenize=False))
    assert bare.token_ids == whole.token_ids
    assert (bool(whole.text), bare.text) == (True, "")
    with pytest.raises(RequestError, match="stop strings need detokenize"):
        params(detokenize=False, stop=["x"])


# ---- prompts alone


@pytest.mark.parametrize("scores", [None, 0, 3])
def test_a_prompt_can_be_computed_without_a_completion(llm: LLM, scores: int | None) -> None:
    [usual] = llm.generate(PROMPT, params(max_tokens=1, prompt_logprobs=scores))
    [alone] = llm.generate(PROMPT, params(max_tokens=0, prompt_logprobs=scores))
    assert alone.token_ids == [] and alone.finish_reason is FinishReason.LENGTH
    assert alone.prompt_logprobs == usual.prompt_logprobs
    pieces = list(llm.stream(PROMPT, params(max_tokens=0, prompt_logprobs=scores)))
    assert [piece.finish_reason for piece in pieces] == [FinishReason.LENGTH]


def test_a_prompt_alone_may_fill_the_context(model: Path) -> None:
    with LLM(model, device="cpu", kv_memory=KV_MEMORY, max_context=64) as short:
        [output] = short.generate([[7] * 64], max_tokens=0, prompt_logprobs=0)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 63
        with pytest.raises(RequestError, match="65 tokens"):
            short.generate([[7] * 65], max_tokens=0)
        with pytest.raises(RequestError, match="at least one for the completion"):
            short.generate([[7] * 64], max_tokens=1)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 33])
def test_prompts_alone_of_any_length_end(llm: LLM, length: int) -> None:
    several = [params(max_tokens=0, prompt_logprobs=0), params(max_tokens=0), params(max_tokens=3)]
    found = llm.generate([[9] * length] * 3, several)
    assert [len(output.token_ids) for output in found] == [0, 0, 3]
    assert found[0].prompt_logprobs is not None and len(found[0].prompt_logprobs) == length - 1


def test_a_prompt_alone_has_no_further_completions() -> None:
    with pytest.raises(RequestError, match="n must be 1"):
        params(max_tokens=0, n=2)
