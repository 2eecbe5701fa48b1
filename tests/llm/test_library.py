"""The library as users of vLLM, transformers and llama.cpp type it: keywords, streams, errors."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llm.conftest import KV_MEMORY
from tests.llm.text_models import write_changed_model

from quire import (
    LLM,
    AsyncLLM,
    ConfigError,
    QuireError,
    RequestError,
    SamplingParams,
)
from quire.core.errors import RowFaultError
from quire.core.sampling import SamplingOptions
from quire.llm.prompts import Conversation, Prompt

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
QUESTION = [{"role": "user", "content": "hi there"}]


def run(path: Path, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(path, kv_memory=KV_MEMORY, **options) as llm:
            await work(llm)

    asyncio.run(main())


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes no numbers after token 7."""
    path = tmp_path_factory.mktemp("models") / "poisoned.gguf"
    return write_changed_model(path, {"token_embd.weight": (7, float("nan"))})


@pytest.fixture(scope="module")
def poisoned(poisoned_model: Path) -> Iterator[LLM]:
    with LLM(poisoned_model, kv_memory=KV_MEMORY) as llm:
        yield llm


# ---- parameters


def test_fields_by_name_are_sampling_params(text_model: Path, text_llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.2, seed=3, n=2, stop=("zz",))
    [expected] = text_llm.generate("Hello", params)
    [by_name] = text_llm.generate("Hello", sampling_params=params)
    [keywords] = text_llm.generate("Hello", max_tokens=9, temperature=1.2, seed=3, n=2, stop=["zz"])
    assert [c.token_ids for c in by_name.outputs] == [c.token_ids for c in expected.outputs]
    assert [c.token_ids for c in keywords.outputs] == [c.token_ids for c in expected.outputs]
    [chat] = text_llm.chat(QUESTION, GREEDY)
    assert text_llm.chat(QUESTION, max_tokens=8, temperature=0)[0].text == chat.text

    async def work(llm: AsyncLLM) -> None:
        output = await llm.generate("Hello", temperature=1.2, max_tokens=9, seed=3, key="a")
        assert output.token_ids == expected.token_ids
        output = await llm.generate("Hello", sampling_params=params)
        assert output.token_ids == expected.token_ids
        output = await llm.chat(QUESTION, max_tokens=8, temperature=0)
        assert output.text == chat.text

    run(text_model, work)


def test_every_field_may_be_given_by_name() -> None:
    names = [field.name for field in fields(SamplingParams) if field.init]
    assert list(SamplingOptions.__annotations__) == names


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        (
            {"params": GREEDY, "max_tokens": 3},
            "params and max_tokens were both given",
            "max_tokens",
        ),
        (
            {"sampling_params": GREEDY, "top_p": 0.5},
            "sampling_params and top_p were both given: put top_p into the SamplingParams",
            "top_p",
        ),
        (
            {"params": GREEDY, "sampling_params": GREEDY},
            "params and sampling_params are two names of one parameter",
            "sampling_params",
        ),
        ({"max_token": 3}, "there is no 'max_token' here: did you mean 'max_tokens'?", "max_token"),
        (
            {"use_tqdm": False},
            "no 'use_tqdm' here: write progress=True or progress=False",
            "use_tqdm",
        ),
        ({"max_new_tokens": 3}, "write max_tokens", "max_new_tokens"),
        ({"xyz": 3}, "there is no 'xyz' here; there are allowed_token_ids, bad_words", "xyz"),
        ({"temperature": -1}, "temperature must be from 0 to 100, got -1", "temperature"),
        ({"on_error": "ignore"}, 'on_error must be "raise" or "keep"', "on_error"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(
    text_llm: LLM, given: dict[str, Any], message: str, param: str
) -> None:
    calls: list[Callable[..., object]] = [text_llm.generate, text_llm.chat]
    if "on_error" not in given:
        calls += [text_llm.stream, text_llm.chat_stream]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call("Hello", **given)
        assert message in str(caught.value)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_model_len", "max_context"),
        ("n_gpu_layers", "gpu_layers"),
        ("gpu_memory_utilization", "kv_memory"),
        ("max_batchsize", "did you mean 'max_batch_size'"),
    ],
)
def test_options_of_other_libraries_say_what_to_write(name: str, instead: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"there is no '{name}' here: .*{instead}"):
        LLM(**options)


# ---- prompts


def test_prompts_may_come_in_vllms_forms(text_llm: LLM) -> None:
    [expected] = text_llm.generate("Hello", GREEDY)
    ids = list(expected.prompt_token_ids)
    forms: list[Prompt] = [{"prompt": "Hello"}, {"prompt_token_ids": ids}, ids]
    for form in forms:
        [output] = text_llm.generate(form, GREEDY)
        assert output.token_ids == expected.token_ids
    outputs = text_llm.generate(forms, GREEDY)
    assert [output.token_ids for output in outputs] == [expected.token_ids] * 3
    assert [output.prompt for output in outputs] == ["Hello", None, None]
    with pytest.raises(RequestError, match="a prompt has no 'multi_modal_data': give"):
        text_llm.generate({"prompt": "Hello", "multi_modal_data": {}})
    with pytest.raises(RequestError, match="the prompt is empty"):
        text_llm.generate({})


def test_a_string_is_one_message(text_model: Path, text_llm: LLM) -> None:
    [expected] = text_llm.chat([{"role": "user", "content": "hi there"}], GREEDY)
    [output] = text_llm.chat("hi there", GREEDY)
    assert (output.prompt, output.text) == (expected.prompt, expected.text)
    several: list[Conversation] = ["hi there", [{"role": "user", "content": "hi there"}]]
    both = text_llm.chat(several, GREEDY)
    assert [output.text for output in both] == [expected.text] * 2

    async def work(llm: AsyncLLM) -> None:
        assert (await llm.chat("hi there", GREEDY)).text == expected.text

    run(text_model, work)


def test_outputs_have_vllms_names(text_llm: LLM) -> None:
    [output] = text_llm.generate("Hello", n=2, max_tokens=4, seed=1)
    assert output.outputs is output.completions
    assert output.outputs[0].text == output.text
    assert output.outputs[0].token_ids == output.token_ids
    assert output.outputs[1].finish_reason == "length"
    assert output.outputs[1].index == 1
    assert output.prompt_token_ids


# ---- errors


def test_a_prompt_that_cannot_run_raises(text_llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^the prompt is empty$"):
        text_llm.generate("", GREEDY)
    with pytest.raises(RequestError, match=r"^prompts\[2\]: the prompt is empty$") as caught:
        text_llm.generate(["Hello", "World", "", "x" * 9999], GREEDY)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"^messages\[1\]: .* does not fit"):
        text_llm.chat(["Hello", "x" * 9999], GREEDY)
    kept = text_llm.generate(["Hello", ""], GREEDY, on_error="keep")
    assert [str(output.error) for output in kept] == ["None", "the prompt is empty"]
    assert text_llm.stats.num_running == text_llm.stats.num_waiting == 0


def test_an_error_ends_the_call_and_leaves_the_model_as_it_was(poisoned: LLM) -> None:
    params = replace(GREEDY, logit_bias={7: -100.0}, max_tokens=100)
    [expected] = poisoned.generate([1, 2], params)
    poisoned.forward_batch([[1, 2, 3]])
    steps = poisoned.stats.stats.num_steps
    with pytest.raises(RowFaultError, match=r"^prompts\[1\]: .*not finite"):
        poisoned.generate([[1, 2], [1, 7], [3]], params)
    assert 0 < poisoned.stats.stats.num_steps - steps < 50, "the others did not run to their end"
    assert poisoned.stats.num_running == 0
    assert len(poisoned.forward_batch([[4]], 3)) == 1, "rows are kept"
    poisoned.clear()
    assert poisoned.stats.kv_usage == 0.0
    assert poisoned.generate([1, 2], params)[0].token_ids == expected.token_ids


def test_an_error_raises_from_async_calls_too(poisoned_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RowFaultError, match="not finite"):
            await llm.generate([1, 7], GREEDY)
        output = await llm.generate([1, 7], GREEDY, on_error="keep")
        assert isinstance(output.error, RowFaultError)

    run(poisoned_model, work)


# ---- streams


def test_a_stream_gives_the_same_text_piece_by_piece(text_llm: LLM) -> None:
    [expected] = text_llm.generate("Hello", max_tokens=20, temperature=1.1, seed=5, ignore_eos=True)
    stream = text_llm.stream("Hello", max_tokens=20, temperature=1.1, seed=5, ignore_eos=True)
    pieces = list(stream)
    assert len(pieces) == 20
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert pieces[-1].finish_reason == "length"
    assert stream.output is not None
    assert (stream.output.text, stream.output.prompt) == (expected.text, "Hello")
    [answer] = text_llm.chat("hi", GREEDY)
    assert "".join(piece.text for piece in text_llm.chat_stream("hi", GREEDY)) == answer.text


def test_leaving_a_stream_ends_its_request(text_llm: LLM) -> None:
    for _ in text_llm.stream("Hello", max_tokens=400, ignore_eos=True):
        break
    assert text_llm.stats.num_running == 0
    assert text_llm.stats.kv_usage == 0.0
    open_stream = text_llm.stream("Hello", max_tokens=400, ignore_eos=True)
    next(open_stream)
    with pytest.raises(RequestError, match=r"another call or stream runs: .* end the stream"):
        text_llm.generate("Hello")
    open_stream.close()
    assert text_llm.stats.num_running == 0
    assert text_llm.generate("Hello", GREEDY)[0].error is None


def test_a_stream_that_fails_raises(text_llm: LLM, poisoned: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        text_llm.stream("")
    stream = poisoned.stream([1, 7], GREEDY)
    with pytest.raises(RowFaultError, match="not finite"):
        list(stream)
    assert len(list(poisoned.stream([1], replace(GREEDY, logit_bias={7: -100.0})))) == 8


# ---- without generating


def test_embeddings_are_vectors_of_length_one(text_model: Path, text_llm: LLM) -> None:
    prompts: list[Prompt] = ["the sea", "a hill", [5, 6, 7]]
    together = text_llm.embed(prompts)
    assert together.shape == (3, 256)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(text_llm.embed("a hill"), together[1:2])
    assert text_llm.embed([]).shape == (0, together.shape[1])
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt is empty"):
        text_llm.embed(["the sea", ""])

    async def work(llm: AsyncLLM) -> None:
        np.testing.assert_array_equal(await llm.embed("a hill"), together[1])

    run(text_model, work)


def test_a_score_is_the_log_probability_of_a_text(text_model: Path, text_llm: LLM) -> None:
    ids = text_llm.tokenize("Hello there")
    [whole] = text_llm.score("Hello there")
    assert whole.token_ids == ids[1:]
    [logits] = text_llm.forward_batch([ids])
    text_llm.clear()
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    expected = [logprobs[n, token] for n, token in enumerate(ids[1:])]
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)
    assert whole.logprob == pytest.approx(sum(expected), abs=1e-3)
    assert whole.perplexity == pytest.approx(math.exp(-np.mean(expected)), rel=1e-4)

    scores = text_llm.score("Hello", [" there", " sea"])
    assert len(scores) == 2
    start = len(text_llm.tokenize("Hello"))
    assert scores[0].token_ids == ids[start:]
    assert scores[0].logprobs == whole.logprobs[start - 1 :]
    assert text_llm.score(["Hello"], [[9, 10]])[0].token_ids == [9, 10]
    with pytest.raises(RequestError, match="2 prompts but 3 completions"):
        text_llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(RequestError, match="the completion has no tokens"):
        text_llm.score("Hello", "")

    async def work(llm: AsyncLLM) -> None:
        assert await llm.score("Hello there") == whole
        assert await llm.score("Hello", " there") == scores[0]

    run(text_model, work)


def test_texts_become_tokens_and_texts_again(text_model: Path, text_llm: LLM, llm: LLM) -> None:
    ids = text_llm.tokenize("Hello there")
    assert ids == list(text_llm.generate("Hello there", GREEDY)[0].prompt_token_ids)
    assert text_llm.detokenize(ids) == "Hello there"
    chat = text_llm.tokenize(QUESTION)
    assert chat == list(text_llm.chat(QUESTION, GREEDY)[0].prompt_token_ids)
    assert text_llm.detokenize(chat).startswith("<|im_start|>user\nhi there<|im_end|>")
    assert text_llm.detokenize(chat, skip_special_tokens=True).startswith("user\nhi there\n")
    assert len(text_llm.tokenize("x" * 9999)) > text_llm.max_context
    with pytest.raises(RequestError, match=r"token_ids\[1\] is 512; the vocabulary has 0 to 511"):
        text_llm.detokenize([1, 512])
    for refused in (lambda: llm.tokenize("x"), lambda: llm.detokenize([1])):
        with pytest.raises(RequestError, match="this model has no tokenizer"):
            refused()

    async def work(one: AsyncLLM) -> None:
        assert await one.tokenize("Hello there") == ids
        assert await one.detokenize(ids) == "Hello there"

    run(text_model, work)


# ---- how long a completion is that does not say


def test_without_max_tokens_a_completion_goes_on_to_the_end_of_the_context(
    text_model: Path, text_llm: LLM
) -> None:
    [output] = text_llm.generate("Hello", temperature=0.0, ignore_eos=True)
    assert len(output.prompt_token_ids) + len(output.token_ids) == text_llm.max_context == 512
    assert output.finish_reason == "length"
    [none] = text_llm.generate("Hello", temperature=0.0, ignore_eos=True, max_tokens=None)
    assert none.token_ids == output.token_ids
    [two] = text_llm.generate("Hello", n=2, seed=1, ignore_eos=True)
    assert [len(c.token_ids) for c in two.outputs] == [len(output.token_ids)] * 2
    [ended] = text_llm.chat("Hello", logit_bias={2: 100.0})
    assert ended.finish_reason == "stop"
    with pytest.raises(RequestError, match=r"prompt \(2\) and min_tokens \(511\) come to 513"):
        text_llm.generate([1, 2], min_tokens=511)

    async def work(llm: AsyncLLM) -> None:
        async_output = await llm.generate("Hello", temperature=0.0, ignore_eos=True)
        assert async_output.token_ids == output.token_ids
        # The queue counts the tokens that requests ask for: these ask for none in particular.
        ended = await asyncio.gather(*(llm.chat("a", logit_bias={2: 100.0}) for _ in range(40)))
        assert {one.finish_reason for one in ended} == {"stop"}

    run(text_model, work, max_batch_size=1, max_queue_tokens=4000)


def test_without_max_tokens_a_completion_fills_what_rows_leave_of_the_cache(llm: LLM) -> None:
    llm.forward_batch([[1] * 512, [1] * 512, [1] * 512, [1] * 300])  # 115 of 128 blocks
    [output] = llm.generate([1, 2], temperature=0.0, ignore_eos=True)
    assert 2 + len(output.token_ids) == 13 * 16
    llm.clear()


# ---- mistakes


MISTAKES: dict[str, Callable[[Any], object]] = {
    "prompts must be a list, got int": lambda llm: llm.generate(5),
    "got {1.5}": lambda llm: llm.generate([[{1.5}]]),
    "prompt_token_ids must be a list": lambda llm: llm.generate({"prompt_token_ids": "x"}),
    "messages must be a list, got dict": lambda llm: llm.chat(QUESTION[0]),
    "messages[0] must be an object": lambda llm: llm.chat([[5]]),
    "got 'a'; this call takes one prompt": lambda llm: llm.stream(["a"]),
    "params must be SamplingParams": lambda llm: llm.stream("a", [GREEDY]),
    "params[0] must be SamplingParams": lambda llm: llm.generate("a", [1]),
    "tokenize takes a text or a list": lambda llm: llm.tokenize(5),
    "token_ids[0] must be an integer": lambda llm: llm.detokenize([1.5]),
    "nothing to score": lambda llm: llm.score([[5]]),
    "rows must be a list, got None": lambda llm: llm.forward_batch(None),
    "a batch holds 64 sequences": lambda llm: llm.generate("a", n=100),
    "no JSON schema": lambda llm: llm.generate("a", structured="a+"),
    "model must be a name or a path, got 5": lambda _: LLM(5),  # type: ignore[arg-type]
    "model must be a name or a path, got ''": lambda _: LLM(""),
    "key_weights must map names": lambda llm: LLM(key_weights=5),
    "device must be one of auto": lambda llm: LLM(device="gpu"),
}
# Private names, paths of modules, reprs of objects.
INTERNAL = re.compile(r"(?<!\w)_\w+|\bquire\.\w+|object at 0x|has no attribute|\.py\b")


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_told_in_the_users_words(text_llm: LLM, message: str) -> None:
    with pytest.raises(QuireError) as caught:
        MISTAKES[message](text_llm)
    assert message in str(caught.value)
    assert not INTERNAL.search(str(caught.value))
