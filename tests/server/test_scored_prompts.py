"""Prompts scored by HTTP, and vLLM's fields of what may come and how it is written."""

from pathlib import Path
from typing import Any

import openai
import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import NAME, QUESTION, RunningServer, fake_server

from quire import LLM, SamplingParams

PROMPT = "Once upon a time"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello there"}]


def complete(server: RunningServer, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def chat(server: RunningServer, **fields: Any) -> Any:
    answer = server.chat(**{"max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def refusal(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> Any:
    given = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = server.post(path, {**given, "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    return answer.error


@pytest.fixture(scope="module")
def scores(text_model: Path) -> list[float]:
    """The log-probabilities of the prompt's tokens after the first."""
    with LLM(text_model, device="reference", kv_memory="4MiB") as llm:
        return llm.score(PROMPT)[0].logprobs


# ---- echo


def test_echo_puts_the_prompt_and_its_scores_first(
    tiny: RunningServer, scores: list[float]
) -> None:
    plain = complete(tiny, logprobs=1)["choices"][0]
    [choice] = complete(tiny, echo=True, logprobs=1)["choices"]
    assert choice["text"] == PROMPT + plain["text"]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == scores + plain["logprobs"]["token_logprobs"]
    assert len({len(listed) for listed in found.values()}) == 1
    assert "".join(found["tokens"]).startswith(PROMPT)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if offset < len(PROMPT):
            assert choice["text"].startswith(token, offset)


def test_a_prompt_is_scored_without_a_completion(tiny: RunningServer, scores: list[float]) -> None:
    answer = complete(tiny, echo=True, logprobs=0, max_tokens=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *scores]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_prompt_has_the_same_scores_alone_and_with_others(tiny: RunningServer) -> None:
    prompts = ["The sea", PROMPT, "x" * 40, "Yes"]
    fields = {"echo": True, "logprobs": 2, "max_tokens": 0}
    together = complete(tiny, prompt=prompts, **fields)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        [alone] = complete(tiny, prompt=prompt, **fields)["choices"]
        assert alone["logprobs"] == choice["logprobs"]
        assert choice["text"] == prompt


def test_token_ids_are_echoed_as_their_text(tiny: RunningServer) -> None:
    text = "<|im_start|>user\nhé"
    tokens = tiny.post("/tokenize", {"prompt": text}).json["tokens"]
    for prompt in (text, tokens):
        [choice] = complete(tiny, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
        assert choice["text"] == text
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[:2] == [0, len("<|im_start|>")]
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)


def test_every_choice_is_echoed_and_streamed(tiny: RunningServer, client: openai.OpenAI) -> None:
    whole = complete(tiny, prompt=[PROMPT, "The sea"], n=2, echo=True, seed=1)["choices"]
    assert [choice["text"][:7] for choice in whole] == [PROMPT[:7]] * 2 + ["The sea"] * 2
    streamed = client.completions.create(
        model=NAME, prompt=PROMPT, echo=True, max_tokens=4, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == complete(tiny, echo=True, ignore_eos=None)["choices"][0]["text"]


# ---- prompt_logprobs


def test_prompt_logprobs_come_by_token_id(tiny: RunningServer, scores: list[float]) -> None:
    [choice] = complete(tiny, prompt_logprobs=2, return_token_ids=True)["choices"]
    tokens, found = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert found[0] is None and len(found) == len(tokens)
    for token, score, entry in zip(tokens[1:], scores, found[1:], strict=True):
        assert entry[str(token)]["logprob"] == score
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    assert "prompt_logprobs" not in complete(tiny)["choices"][0]


def test_a_conversation_is_scored_as_its_prompt_is(tiny: RunningServer) -> None:
    answer = chat(tiny, prompt_logprobs=0, max_tokens=0, return_token_ids=True)
    assert answer["choices"][0]["message"]["content"] == ""
    tokens = tiny.post("/tokenize", {"messages": QUESTION}).json["tokens"]
    assert answer["prompt_token_ids"] == tokens
    [same] = complete(tiny, prompt=tokens, prompt_logprobs=0, max_tokens=0)["choices"]
    assert answer["prompt_logprobs"] == same["prompt_logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": ["x" * 500]}, "bad_words"),
        ({"detokenize": False, "stop": ["x"]}, "detokenize"),
        (
            {"spaces_between_special_tokens": True, "skip_special_tokens": False},
            "spaces_between_special_tokens",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    tiny: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(tiny, **fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_a_chat_cannot_ask_for_is_refused_by_name(
    tiny: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(tiny, "/v1/chat/completions", **fields)["param"] == param


# ---- what may come, and how it is written


def test_vllms_fields_reach_the_engine(tiny: RunningServer, text_model: Path) -> None:
    """Each against the same request of LLM."""
    several: list[dict[str, Any]] = [
        {"allowed_token_ids": [40, 41, 42]},
        {"bad_words": ["a", "th"], "temperature": 1.0, "seed": 3},
        {"allowed_token_ids": [2], "skip_special_tokens": False},
        {"detokenize": False},
    ]
    plain = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with LLM(text_model, device="reference", kv_memory="4MiB") as llm:
        for fields in several:
            params = SamplingParams.from_mapping({**plain, **fields})
            [output] = llm.generate(PROMPT, params)
            [choice] = complete(tiny, **{**plain, **fields}, return_token_ids=True)["choices"]
            assert (choice["token_ids"], choice["text"]) == (output.token_ids, output.text)
    assert choice["text"] == ""


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(tiny: RunningServer) -> None:
    fields = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = complete(tiny, **fields)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][0])
    answer = chat(tiny, logprobs=True, return_tokens_as_token_ids=True)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["token"].startswith("token_id:") and first["bytes"]


def test_a_long_prompt_is_cut_where_that_is_asked_for(tiny: RunningServer) -> None:
    tokens = [3 + number % 90 for number in range(600)]  # the context holds 512
    assert refusal(tiny, prompt=tokens)["param"] == "prompt"
    for count, kept in ((5, 5), (-1, 508), (512, None)):
        body = {"prompt": tokens, "max_tokens": 4, "truncate_prompt_tokens": count}
        answer = tiny.post("/v1/completions", {**body, "return_token_ids": True})
        if kept is None:
            assert answer.error["param"] == "prompt"
        else:
            assert answer.json["choices"][0]["prompt_token_ids"] == tokens[-kept:]
    answer = tiny.chat(max_tokens=1, truncate_prompt_tokens=3, return_token_ids=True).json
    assert len(answer["prompt_token_ids"]) == 3
    long = complete(tiny, prompt="word " * 2000, truncate_prompt_tokens=4, echo=True)
    assert long["usage"]["prompt_tokens"] == 4 and len(long["choices"][0]["text"]) < 40


# ---- the prompt of a conversation


def prompt_text(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = server.post(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields},
    )
    assert answer.status == 200, answer.body
    tokens = answer.json["prompt_token_ids"]
    text: str = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
    return text


def test_the_last_message_is_continued(tiny: RunningServer) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The a "}]
    asked = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(tiny, begun, continue_final_message=True) == f"{asked}The a "
    parts = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "The a "}]}]
    assert prompt_text(tiny, parts, continue_final_message=True) == f"{asked}The a "
    whole = prompt_text(tiny, begun, add_generation_prompt=False)
    assert whole == f"{asked}The a <|im_end|>\n"
    error = refusal(
        tiny,
        "/v1/chat/completions",
        messages=[*MESSAGES, {"role": "assistant", "content": ""}],
        continue_final_message=True,
    )
    assert "no text to continue" in error["message"]


def test_documents_reach_a_template_that_writes_them(tmp_path: Path) -> None:
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    model = write_text_model(tmp_path / "model.gguf", chat_template=template)
    with fake_server(model) as server:
        text = prompt_text(server, MESSAGES, documents=[{"text": "one"}, {"text": "two"}])
        assert text == "[one][two]Hello there"


def test_the_token_that_ends_a_completion_is_listed_with_a_scored_prompt(
    tiny: RunningServer,
) -> None:
    """lm-evaluation-harness leaves the last log-probability out, which must not be the prompt's."""
    fields = {"allowed_token_ids": [2], "ignore_eos": False, "max_tokens": 1, "logprobs": 1}
    [choice] = complete(tiny, echo=True, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    tokens = tiny.post("/tokenize", {"prompt": PROMPT}).json["tokens"]
    assert len(choice["logprobs"]["tokens"]) == len(tokens) + 1


# ---- tokens without an answer


def test_tokenize_takes_what_vllms_does(tiny: RunningServer) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The"}]

    def text(**fields: Any) -> str:
        answer = tiny.post("/tokenize", {"return_token_strs": True, **fields})
        assert answer.status == 200, answer.body
        found = answer.json
        assert len(found["token_strs"]) == found["count"] == len(found["tokens"])
        return "".join(found["token_strs"])

    asked = "<|im_start|>user\nHello there<|im_end|>\n"
    assert text(prompt="a b") == "a b"
    assert text(messages=MESSAGES) == f"{asked}<|im_start|>assistant\n"
    assert text(messages=MESSAGES, add_generation_prompt=False) == asked
    assert text(messages=begun, continue_final_message=True).endswith("assistant\nThe")
    assert tiny.post("/tokenize", {"prompt": "a"}).json["token_strs"] is None
    for fields, param in (
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
    ):
        assert tiny.post("/tokenize", fields).error["param"] == param


def test_tools_reach_the_template_of_tokenize(tmp_path: Path) -> None:
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}"
    model = write_text_model(tmp_path / "model.gguf", chat_template=template)
    with fake_server(model) as server:
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        body = {"messages": MESSAGES, "tools": [tool], "return_token_strs": True}
        assert "".join(server.post("/tokenize", body).json["token_strs"]) == "[look]Hello there"


def test_clients_of_other_servers_find_what_they_ask_first(tiny: RunningServer) -> None:
    assert tiny.get("/version").json.keys() == {"version"}
    assert tiny.get("/ping").status == tiny.post("/ping", {}).status == 200
    info = tiny.get("/tokenizer_info").json
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", None)
    assert info["model_max_length"] == 512 and "im_start" in info["chat_template"]
    props = tiny.get("/props").json
    assert props["default_generation_settings"] == {"n_ctx": 512}
    assert props["chat_template"] == info["chat_template"]


def test_vectors_are_cut_and_scaled_again(tiny: RunningServer) -> None:
    def vector(**fields: Any) -> list[float]:
        answer = tiny.post("/v1/embeddings", {"input": "a", **fields})
        assert answer.status == 200, answer.body
        found: list[float] = answer.json["data"][0]["embedding"]
        return found

    whole, short = vector(), vector(dimensions=8)
    assert (len(whole), len(short)) == (256, 8)
    scale = sum(value * value for value in whole[:8]) ** 0.5
    assert short == pytest.approx([value / scale for value in whole[:8]], abs=1e-6)
    answer = tiny.post("/v1/embeddings", {"input": "a", "dimensions": 257})
    assert (answer.status, answer.error["param"]) == (400, "dimensions")
