"""llama.cpp's samplers through LLM: a completion is the same alone and in company."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model

from quire import LLM, Constraint, SamplingParams

PROMPT = "hello there"
OPTIONS: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.4},
    "sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.001},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 0, "dry_sequence_breakers": []},
    "dynamic temperature": {"dynatemp_range": 0.9, "temperature": 1.0},
    "window": {"repetition_penalty": 3.0, "presence_penalty": 2.0, "repeat_last_n": 4},
    "order": {"samplers": "kpt", "top_k": 40, "top_p": 0.9, "temperature": 1.7},
    "mask": {
        "structured": Constraint.regex("[a-e ]{20,40}"),
        "xtc_probability": 1.0,
        "xtc_threshold": 0.001,
    },
    "scores": {"typical_p": 0.4, "logprobs": 3},
    "minimum": {"xtc_probability": 1.0, "xtc_threshold": 0.001, "min_tokens": 6},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", kv_memory="4MiB", max_batch_size=8) as loaded:
        yield loaded


def params(**given: Any) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": 60, "seed": 5, **given})


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    return {
        name: llm.generate(PROMPT, params(**given))[0].token_ids for name, given in OPTIONS.items()
    }


def test_every_sampler_changes_what_comes(llm: LLM, alone: dict[str, list[int]]) -> None:
    [plain] = llm.generate(PROMPT, params())
    for name, given in OPTIONS.items():
        without = {"structured": given["structured"]} if "structured" in given else {}
        if "min_tokens" in given:
            without["min_tokens"] = given["min_tokens"]
        [other] = llm.generate(PROMPT, params(**without)) if without else [plain]
        assert alone[name] != other.token_ids, name


def test_company_changes_nothing(llm: LLM, alone: dict[str, list[int]]) -> None:
    together = llm.generate(
        [PROMPT] * len(OPTIONS), [params(**given) for given in OPTIONS.values()]
    )
    assert {name: o.token_ids for name, o in zip(OPTIONS, together, strict=True)} == alone


def test_tight_memory_changes_nothing(model: Path, alone: dict[str, list[int]]) -> None:
    """So little memory that requests are pre-empted and computed again."""
    with LLM(model, device="cpu", kv_memory="128KiB", max_batch_size=4) as tight:
        found = tight.generate([PROMPT] * len(OPTIONS), [params(**g) for g in OPTIONS.values()])
        assert tight.stats.stats.num_preemptions > 0
    assert {name: o.token_ids for name, o in zip(OPTIONS, found, strict=True)} == alone


def test_several_completions_draw_for_themselves(llm: LLM) -> None:
    given = params(n=3, **OPTIONS["xtc"])
    [first] = llm.generate(PROMPT, given)
    [again] = llm.generate([PROMPT, "another"], [given, params()])[:1]
    texts = [completion.token_ids for completion in first.completions]
    assert texts == [completion.token_ids for completion in again.completions]
    assert len(set(map(tuple, texts))) == 3


def test_dry_keeps_greedy_tokens_from_going_round(llm: LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
    greedy["logit_bias"] = {77: 60.0}
    [looping] = llm.generate(PROMPT, params(**greedy))
    [dry] = llm.generate(PROMPT, params(**greedy, dry_multiplier=100.0, dry_penalty_last_n=-1))
    assert longest_repeat(looping.token_ids) > 50
    assert longest_repeat(dry.token_ids) <= 3


def longest_repeat(tokens: list[int]) -> int:
    """Of the tokens that stand in two places, which may overlap."""
    found = 0
    for first in range(len(tokens)):
        for second in range(first + 1, len(tokens)):
            length = 0
            while (
                second + length < len(tokens) and tokens[first + length] == tokens[second + length]
            ):
                length += 1
            found = max(found, length)
    return found


def test_breakers_are_resolved_by_the_models_tokenizer(llm: LLM) -> None:
    given: dict[str, Any] = {"dry_multiplier": 4.0, "dry_allowed_length": 0, "temperature": 0.0}
    every = [chr(letter) for letter in range(97, 123)]
    [free] = llm.generate(PROMPT, params(**given, dry_sequence_breakers=[]))
    [broken] = llm.generate(PROMPT, params(**given, dry_sequence_breakers=every))
    assert free.token_ids != broken.token_ids
