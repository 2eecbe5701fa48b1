"""The official openai client against a real server over a real, tiny model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tests.server.servers import NAME, PacedExecutor, RunningServer, fake_server

from quire import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Hello there"}]


def chat(client: openai.OpenAI, **fields: object):  # type: ignore[no-untyped-def]
    given = {"model": NAME, "messages": MESSAGES, "max_tokens": 8, "temperature": 0.0}
    return client.chat.completions.create(**{**given, **fields})  # type: ignore[call-overload]


def complete(client: openai.OpenAI, **fields: object):  # type: ignore[no-untyped-def]
    given = {"model": NAME, "prompt": "Once upon", "max_tokens": 8, "temperature": 0.0}
    return client.completions.create(**{**given, **fields})  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def expected(text_model) -> LLM:  # type: ignore[no-untyped-def,misc]
    with LLM(text_model, device="reference", kv_memory="4MiB") as llm:
        yield llm


def test_chat_says_what_the_model_says(client: openai.OpenAI, expected: LLM) -> None:
    answer = chat(client)
    [output] = expected.chat([MESSAGES], SamplingParams(max_tokens=8, temperature=0.0))
    assert answer.choices[0].message.content == output.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_completions_say_what_the_model_says(client: openai.OpenAI, expected: LLM) -> None:
    answer = complete(client)
    [output] = expected.generate("Once upon", SamplingParams(max_tokens=8, temperature=0.0))
    assert answer.choices[0].text == output.text
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"


def test_prompts_may_be_tokens_and_many(client: openai.OpenAI, expected: LLM) -> None:
    tokens = list(expected.generate("Once upon")[0].prompt_token_ids)
    single = complete(client).choices[0].text
    assert complete(client, prompt=tokens).choices[0].text == single
    many = complete(client, prompt=["Once upon", "The sea", "Once upon"], n=1)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.choices[0].text == many.choices[2].text == single
    lists = complete(client, prompt=[tokens, tokens])
    assert [choice.text for choice in lists.choices] == [single, single]


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True))
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_completions_adds_up(client: openai.OpenAI) -> None:
    whole = complete(client, prompt=["Once upon", "The sea"])
    texts = ["", ""]
    for chunk in complete(client, prompt=["Once upon", "The sea"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize(
    "asked",
    [
        {"stream_options": {"include_usage": True}},
        {"extra_body": {"usage": {"include": True}}},  # OpenRouter's clients
    ],
)
def test_usage_comes_last_in_a_stream(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    *chunks, last = chat(client, stream=True, **asked)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert last.usage.prompt_tokens > 0
    assert last.usage.prompt_tokens_details.cached_tokens >= 0


def test_n_gives_so_many_choices(client: openai.OpenAI) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 5}
    whole = chat(client, **fields)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == sum(1 for _ in range(3)) * 8
    streamed = ["", "", ""]
    for chunk in chat(client, stream=True, **fields):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    texts = [
        chat(client, temperature=1.0, seed=seed).choices[0].message.content for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_stop_ends_before_the_text_it_names(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    cut = complete(client, stop=[whole[3:5], "never this"])
    assert cut.choices[0].text == whole[: whole.index(whole[3:5])]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == whole[3:5]
    streamed = "".join(c.choices[0].text for c in complete(client, stop=whole[3:5], stream=True))
    assert streamed == cut.choices[0].text


def test_log_probabilities_of_chat(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    scores = choice.logprobs.content
    assert len(scores) == 8
    assert b"".join(bytes(score.bytes) for score in scores).decode(errors="replace") == (
        choice.message.content
    )
    for score in scores:
        assert len(score.top_logprobs) == 3
        assert score.logprob == score.top_logprobs[0].logprob <= 0, "greedy takes the likeliest"
    chunks = list(chat(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [s for c in chunks if c.choices[0].logprobs for s in c.choices[0].logprobs.content]
    assert [score.logprob for score in streamed] == [score.logprob for score in scores]
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(score.top_logprobs == [] for score in bare)
    assert chat(client).choices[0].logprobs is None


def test_log_probabilities_of_completions(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
    assert found.text_offset == [
        sum(map(len, found.tokens[:place])) for place in range(len(found.tokens))
    ]
    assert all(len(top) <= 2 for top in found.top_logprobs)
    chunks = list(complete(client, logprobs=2, stream=True))
    offsets = [
        o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == found.text_offset


@pytest.mark.parametrize("is_included", [False, True])
def test_usage_counts_the_stop_token_and_the_answer_leaves_it_out(
    client: openai.OpenAI, is_included: bool
) -> None:
    asks: dict[str, object] = {
        "return_token_ids": True,
        "include_stop_token": is_included,
        "ignore_eos": True,
    }
    whole = complete(client, extra_body=asks).choices[0].token_ids
    at = next(n for n in range(2, 8) if whole[n] not in whole[:n])
    asks |= {"stop_token_ids": [whole[at]]}
    expected = whole[: at + is_included]
    answer = complete(client, logprobs=0, extra_body=asks)
    [choice] = answer.choices
    assert choice.token_ids == expected
    assert len(choice.logprobs.tokens) == len(expected)
    assert answer.usage.completion_tokens == at + 1
    *chunks, last = complete(
        client, stream=True, stream_options={"include_usage": True}, logprobs=0, extra_body=asks
    )
    assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == expected
    scores = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(len(score.tokens) for score in scores) == len(expected)
    assert last.usage.completion_tokens == at + 1
    fields = {
        "logit_bias": {"2": 100},
        "logprobs": True,
        "extra_body": {**asks, "ignore_eos": False},
    }
    ended = chat(client, **fields)
    assert ended.usage.completion_tokens == 1
    assert len(ended.choices[0].logprobs.content) == is_included


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context(
    client: openai.OpenAI, expected: LLM
) -> None:
    fields = {"max_tokens": None, "extra_body": {"ignore_eos": True}}
    for answer in (complete(client, **fields), chat(client, **fields)):
        assert answer.choices[0].finish_reason == "length"
        assert (
            answer.usage.total_tokens == client.models.retrieve(NAME).model_dump()["max_model_len"]
        )


def test_what_users_of_other_servers_send(client: openai.OpenAI) -> None:
    greedy = complete(client).choices[0]
    extras = {"top_k": 1, "ignore_eos": True, "return_token_ids": True}
    same = complete(client, temperature=1.0, extra_body=extras).choices[0]
    assert same.text == greedy.text
    tokens = same.token_ids
    assert len(tokens) == 8
    stopped = complete(client, extra_body={"stop_token_ids": [tokens[2]]}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == tokens[2]
    longer = complete(
        client,
        extra_body={"stop_token_ids": [tokens[2]], "min_tokens": 6, "return_token_ids": True},
    ).choices[0]
    assert len(longer.token_ids) > 5
    likely = complete(client, temperature=1.0, extra_body={"min_p": 1.0}).choices[0]
    assert likely.text == greedy.text
    again = {"prompt": tokens, "max_tokens": 20}
    varied = complete(client, **again, extra_body={"repetition_penalty": 50.0}).choices[0]
    assert varied.text != complete(client, **again).choices[0].text
    biased = complete(client, logit_bias={str(tokens[0]): -100}, extra_body=extras).choices[0]
    assert biased.token_ids[0] != tokens[0]
    urgent = complete(client, extra_body={"priority": -3, "timeout": 60.0}).choices[0]
    assert urgent.text == greedy.text


def test_embeddings_are_states_of_length_one(client: openai.OpenAI) -> None:
    inputs = ["the sea", "the sea", "a mountain"]
    answer = client.embeddings.create(model=NAME, input=inputs)  # the client asks for base64
    vectors = [item.embedding for item in answer.data]
    assert vectors[0] == vectors[1] != vectors[2]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for vector in vectors:
        assert len(vector) == 256
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-5)
    plain = client.embeddings.create(model=NAME, input="the sea", encoding_format="float")
    assert plain.data[0].embedding == vectors[0]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert answer.pooling == "last_token"  # type: ignore[attr-defined]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    [card] = list(client.models.list())
    assert card.id == NAME
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_model_may_be_left_out_but_not_be_another(client: openai.OpenAI) -> None:
    assert chat(client, model=openai.omit).choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'") as caught:
        chat(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 10**6}, "n"),
        ({"n": 33}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"guided_regex": "(a+"}}, "guided_regex"),
        ({"extra_body": {"timeout": 0}}, "timeout"),
        ({"extra_body": {"priority": 10**400}}, "priority"),
        ({"extra_body": {"top_k": 1.5}}, "top_k"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(
    client: openai.OpenAI, fields: dict[str, object], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert caught.value.body["message"]  # type: ignore[index]


@pytest.fixture
def slow(text_model: Path) -> Iterator[RunningServer]:
    """A step in 50 ms: long answers take so long that whoever leaves leaves in the middle."""
    with fake_server(text_model, PacedExecutor(step_s=0.05)) as server:
        yield server


def test_leaving_a_stream_ends_its_request(slow: RunningServer) -> None:
    with slow.client() as client:
        stream = chat(client, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    slow.wait_until_idle()
    assert slow.engine.stats.requests_ended == {"cancelled": 1}


def test_a_client_that_gives_up_waiting_ends_its_request(slow: RunningServer) -> None:
    """It waits long enough for the engine to have its request, and not for the answer."""
    with slow.client() as impatient, pytest.raises(openai.APITimeoutError):
        chat(impatient.with_options(timeout=10.0), max_tokens=450, extra_body={"ignore_eos": True})
    slow.wait_until_idle()
    assert slow.engine.stats.requests_ended == {"cancelled": 1}


def test_a_deadline_is_a_timeout(slow: RunningServer) -> None:
    with slow.client() as client:
        expect_timeouts(client)


def expect_timeouts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, max_tokens=450, extra_body={"ignore_eos": True, "timeout": 0.05})
    assert caught.value.status_code == 408
    with pytest.raises(openai.APIError, match="ran out of time"):
        list(
            chat(
                client, max_tokens=450, stream=True, extra_body={"ignore_eos": True, "timeout": 0.3}
            )
        )
