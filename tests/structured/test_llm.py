"""Structured output through LLM: on every executor, alone and in company, to the end."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.llm.text_models import write_text_model
from tests.structured.schemas import random_schema, validate

from quire import LLM, AsyncLLM, Constraint, RequestError, SamplingParams
from quire.core.request import FinishReason

KV_MEMORY = "4MiB"
DATE = Constraint.regex(r"\d{4}-\d{2}-\d{2}")


class Person(BaseModel):
    name: str
    age: int


SHORT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", kv_memory=KV_MEMORY) as loaded:
        yield loaded


def params(structured: Any, **more: Any) -> SamplingParams:
    return SamplingParams.from_mapping({"structured": structured, "max_tokens": 60, **more})


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_completion_has_the_form_that_was_asked_for(model: Path, device: str) -> None:
    with LLM(model, device=device, kv_memory=KV_MEMORY) as loaded:
        [output] = loaded.generate("a", structured=DATE, seed=1, max_tokens=20)
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", output.text)
        assert output.finish_reason is FinishReason.STOP
        [output] = loaded.chat("a", structured=["left", "right"], seed=2, max_tokens=20)
        assert output.text in ("left", "right")
        [output] = loaded.chat("a", params(SHORT, seed=2))
        assert json.loads(output.text)["age"] in (1, 22, 333)


def test_a_pydantic_model_is_taken_as_it_is(llm: LLM) -> None:
    [output] = llm.chat("a", structured=Person, seed=5, logit_bias=ENDING, max_tokens=300)
    person = Person.model_validate_json(output.text)
    assert isinstance(person.age, int)


# Text ends soon where the quote is likely: the tiny model has no preferences of its own.
ENDING = {3 + 1: 8.0}  # the second byte of the vocabulary's alphabet is the quote


def test_every_completion_of_a_request_is_held_and_none_alike(llm: LLM) -> None:
    [output] = llm.generate("a", params(DATE, n=6, seed=4))
    texts = [completion.text for completion in output.completions]
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) for text in texts)
    assert len(set(texts)) > 1


def test_options_of_sampling_keep_the_form(llm: LLM) -> None:
    for more in (
        {"temperature": 0.0},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"min_tokens": 60},
        {"logprobs": 3},
        {"ignore_eos": True},
        {"prompt_logprobs": 1},
    ):
        [output] = llm.generate("abc", params(DATE, seed=3, **more))
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", output.text), more
        assert output.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_a_held_completion(llm: LLM) -> None:
    [output] = llm.generate("abc", params(DATE, stop="-", seed=1))
    assert re.fullmatch(r"[0-9]{4}", output.text)
    assert output.completions[0].stop_reason == "-"


def test_max_tokens_cuts_a_held_completion(llm: LLM) -> None:
    [output] = llm.generate("abc", params(DATE, max_tokens=3, seed=1))
    assert output.finish_reason is FinishReason.LENGTH
    assert re.fullmatch(r"[0-9]{3}", output.text)


def test_an_end_token_ends_where_the_text_may_go_on(llm: LLM) -> None:
    eager = {2: 100.0}  # the end token
    [output] = llm.generate("abc", params(Constraint.regex("[ab]{2,}"), logit_bias=eager, seed=1))
    assert re.fullmatch("[ab]{2,3}", output.text), "tokens have one letter or two"
    assert output.finish_reason is FinishReason.STOP
    ignoring = params(Constraint.regex("[ab]{2,}"), logit_bias=eager, ignore_eos=True, seed=1)
    [output] = llm.generate("abc", ignoring)
    assert output.finish_reason is FinishReason.LENGTH


def test_a_stream_is_held(llm: LLM) -> None:
    text = "".join(piece.text for piece in llm.stream("abc", params(DATE, seed=9)))
    [whole] = llm.generate("abc", params(DATE, seed=9))
    assert text == whole.text


def test_a_wrong_constraint_fails_its_own_prompt(llm: LLM) -> None:
    each = [params(Constraint.regex("(")), params(DATE)]
    bad, good = llm.generate(["a", "b"], each, on_error="keep")
    assert isinstance(bad.error, RequestError) and bad.error.param == "structured"
    assert good.error is None


def test_a_model_without_a_tokenizer_says_so() -> None:
    from tests.fixture_files import fixture_file

    with (
        LLM(fixture_file("tiny/Q4_0.gguf"), kv_memory=KV_MEMORY) as plain,
        pytest.raises(RequestError, match="needs a tokenizer"),
    ):
        plain.generate([[1, 2]], structured=DATE, max_tokens=3)


# ---- in company


def requests_of(count: int, seed: int) -> list[SamplingParams]:
    """Every third without a constraint."""
    draw = random.Random(seed)
    found: list[SamplingParams] = []
    for number in range(count):
        schema = random_schema(draw)
        found.append(params(schema if number % 3 else None, seed=number, max_tokens=80))
    return found


@pytest.mark.parametrize("settings", [{}, {"max_batch_size": 16, "kv_memory": "640KiB"}])
def test_tokens_are_the_same_alone_and_in_company(model: Path, settings: dict[str, Any]) -> None:
    each = requests_of(24, seed=8)
    prompts = [f"number {number}" * (1 + number % 4) for number in range(len(each))]
    with LLM(model, device="cpu", **{"kv_memory": KV_MEMORY, **settings}) as loaded:
        together = loaded.generate(prompts, each)
        assert not settings or loaded.stats.stats.num_preemptions
        alone = [loaded.generate(prompt, one)[0] for prompt, one in zip(prompts, each, strict=True)]
    with LLM(model, device="cpu", kv_memory=KV_MEMORY, plan_ahead=True) as loaded:
        ahead = loaded.generate(prompts, each)
    for one, other, third in zip(together, alone, ahead, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids


def test_a_thousand_random_schemas_give_valid_json_at_batch_16(model: Path) -> None:
    count = 1000
    draw = random.Random(2)
    schemas = [random_schema(draw) for _ in range(count)]
    each = [params(schema, seed=n, max_tokens=480) for n, schema in enumerate(schemas)]
    with LLM(model, device="cpu", kv_memory="16MiB", max_batch_size=16) as loaded:
        outputs = loaded.generate(["a"] * count, each)
    num_whole = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason is FinishReason.STOP:
            validate(schema, json.loads(output.text))
            num_whole += 1
    assert num_whole >= 0.95 * count


# ---- on an event loop


def test_many_constrained_requests_share_an_event_loop(model: Path) -> None:
    async def main() -> list[str]:
        async with AsyncLLM(model, device="cpu", kv_memory=KV_MEMORY) as loaded:
            asked = [loaded.generate("a", params(DATE, seed=n)) for n in range(12)]
            outputs = await asyncio.gather(*asked)
            pieces = [piece async for piece in loaded.stream("a", params(DATE, seed=3))]
            assert "".join(piece.text for piece in pieces) == outputs[3].text
            with pytest.raises(RequestError, match="unclosed group"):
                await loaded.generate("a", params(Constraint.regex("(a")))
            return [output.text for output in outputs]

    texts = asyncio.run(main())
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) for text in texts)
