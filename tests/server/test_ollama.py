"""Ollama's API: the same answers as by OpenAI's, in its shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.servers import NAME, RunningServer, ScriptedExecutor, fake_server

from quire.chat import AnswerEvent, ArgumentsDelta, ContentDelta, ReasoningDelta, ToolCallBegin
from quire.server.dialects.ollama_answer import OLLAMA_CHAT
from quire.server.dialects.ollama_body import OllamaChatRequest, chat_of
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing, digest_of

MESSAGES = [{"role": "user", "content": "Hello there"}]
OPTIONS = {"num_predict": 6, "temperature": 0}


def post(server: RunningServer, path: str, **fields: Any) -> Any:
    reply = server.post(path, {"model": NAME, "stream": False, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def lines(server: RunningServer, path: str, **fields: Any) -> list[Any]:
    reply = server.post(path, {"model": f"{NAME}:latest", **fields})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


def openai_answer(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, **fields}
    return server.post("/v1/chat/completions", body).json["choices"][0]


# ---- chat


def test_a_chat_says_what_openais_api_says(tiny: RunningServer) -> None:
    whole = post(tiny, "/api/chat", messages=MESSAGES, options=OPTIONS)
    expected = openai_answer(tiny)
    assert whole["message"] == {"role": "assistant", "content": expected["message"]["content"]}
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", NAME)
    assert (whole["eval_count"], whole["load_duration"]) == (6, 0)
    assert whole["prompt_eval_count"] > 6
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0


def test_a_chat_is_streamed_in_lines(tiny: RunningServer) -> None:
    *first, last = lines(tiny, "/api/chat", messages=MESSAGES, options=OPTIONS)
    assert first and all(not line["done"] for line in first)
    text = "".join(line["message"]["content"] for line in first)
    assert text == openai_answer(tiny)["message"]["content"]
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["eval_count"] == 6 and last["total_duration"] > 0


@pytest.mark.parametrize(
    "kind", ["", "application/x-www-form-urlencoded", "application/octet-stream"]
)
def test_programs_need_not_say_that_a_body_is_json(tiny: RunningServer, kind: str) -> None:
    """As curl posts Ollama's examples, and LiteLLM what it has a key for; pages may not."""
    body = json.dumps({"model": NAME, "messages": MESSAGES, "stream": False, "options": OPTIONS})
    reply = tiny.post("/api/chat", body.encode(), {"Content-Type": kind})
    assert (reply.status, reply.json["eval_count"]) == (200, 6)
    for page in ({"Origin": "http://localhost:1"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = tiny.post("/api/chat", body.encode(), {"Content-Type": kind, **page})
        assert refused.status == 415, page
    assert tiny.post("/v1/completions", body.encode(), {"Content-Type": kind}).status == 415


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "Hello there"}),
        ("/api/generate", {"prompt": "Hello there", "raw": True}),
    ],
)
def test_more_tokens_than_fit_are_as_many_as_fit(
    text_model: Path, path: str, given: dict[str, Any]
) -> None:
    with fake_server(text_model, ScriptedExecutor([65] * 1000, max_context=256)) as server:
        whole = post(server, path, options={"num_predict": 100_000}, **given)
    assert whole["done_reason"] == "length"
    assert whole["prompt_eval_count"] + whole["eval_count"] == 256


def test_options_reach_the_engine(tiny: RunningServer) -> None:
    """Each against the same request by OpenAI's names."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"num_predict": 3}, {"max_tokens": 3}),
        ({"temperature": 1.3, "seed": 5}, {"temperature": 1.3, "seed": 5}),
        ({"temperature": 2.0, "seed": 5, "top_k": 3}, {"temperature": 2.0, "seed": 5, "top_k": 3}),
        (
            {"temperature": 2.0, "seed": 6, "top_p": 0.5, "min_p": 0.1},
            {"temperature": 2.0, "seed": 6, "top_p": 0.5, "min_p": 0.1},
        ),
        (
            {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repeat_penalty": 1.5},
            {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
        ),
    ]
    for ours, theirs in pairs:
        found = post(tiny, "/api/chat", messages=MESSAGES, options={**OPTIONS, **ours})
        assert found["message"]["content"] == openai_answer(tiny, **theirs)["message"]["content"]
    text = openai_answer(tiny)["message"]["content"]
    stop = text[2:4]
    found = post(tiny, "/api/chat", messages=MESSAGES, options={**OPTIONS, "stop": [stop]})
    assert found["done_reason"] == "stop"
    assert found["message"]["content"] == text[: text.index(stop)]


def test_the_form_and_the_scores_of_an_answer(tiny: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    options = {"num_predict": 60, "seed": 1}
    for form in (schema, "json"):
        found = post(tiny, "/api/chat", messages=MESSAGES, options=options, format=form)
        if form is schema:
            assert json.loads(found["message"]["content"]) == {"a": 7}
        else:
            assert found["message"]["content"].lstrip().startswith("{")
    scored = post(
        tiny, "/api/chat", messages=MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2
    )
    assert len(scored["logprobs"]) == 6
    assert all(len(each["top_logprobs"]) == 2 for each in scored["logprobs"])
    *first, _ = lines(tiny, "/api/chat", messages=MESSAGES, options=OPTIONS, logprobs=True)
    assert sum(len(line["logprobs"]) for line in first) == 6


def test_the_beginning_of_an_answer_is_continued(tiny: RunningServer) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The"}]
    found = post(tiny, "/api/chat", messages=begun, options=OPTIONS)
    same = openai_answer(tiny, messages=begun, continue_final_message=True)
    assert found["message"]["content"] == same["message"]["content"]


def test_the_choice_of_tools_is_obeyed(tiny: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    asked = {"messages": MESSAGES, "tools": [tool], "options": {"num_predict": 60, "seed": 1}}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        found = post(tiny, "/api/chat", **asked, tool_choice=choice)["message"]
        assert [call["function"]["name"] for call in found["tool_calls"]] == ["look"]
    assert "tool_calls" not in post(tiny, "/api/chat", **asked, tool_choice="none")["message"]
    refused = tiny.post("/api/chat", {"model": NAME, **asked, "tool_choice": "never"})
    assert refused.status == 400 and "tool_choice" in refused.json["error"]


def test_calls_of_a_history_get_ids_and_results_find_them() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}}

    body = OllamaChatRequest.model_validate(
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
                {"role": "tool", "tool_name": "b", "content": "two"},
                {"role": "tool", "content": "one"},
            ]
        }
    )
    found = chat_of(body).messages
    assert found[1].tool_calls is not None
    ids = [each["id"] for each in found[1].tool_calls]
    assert len(set(ids)) == 2
    assert found[1].tool_calls[0]["function"] == {"name": "a", "arguments": '{"x": 1}'}
    assert [message.tool_call_id for message in found[2:]] == [ids[1], ids[0]]


def results_of(calls: list[str | None], results: list[str]) -> list[int]:
    """Which calls results belong to, by the ids of both."""
    function = {"name": "a", "arguments": {}}
    called = [{"function": function, **({"id": each} if each else {})} for each in calls]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": called},
        *({"role": "tool", "tool_call_id": each, "content": "x"} for each in results),
    ]
    found = chat_of(OllamaChatRequest.model_validate({"messages": messages})).messages
    ids = [each["id"] for each in found[0].tool_calls or ()]
    return [ids.index(message.tool_call_id) for message in found[1:]]


def test_calls_without_ids_take_results_that_have_some() -> None:
    """As LiteLLM sends a conversation that it had through OpenAI's API."""
    assert results_of([None, None], ["x", "y"]) == [0, 1]
    assert results_of(["x", "y"], ["y", "x"]) == [1, 0]
    assert results_of([None, "x"], ["x", "y"]) == [1, 0]
    with pytest.raises(ApiError, match="no message before it has a call"):
        results_of(["x"], ["y"])


def test_calls_and_thoughts_are_streamed_whole(fake: RunningServer) -> None:
    class Generation:
        llm = fake.service.llm

    frames = OLLAMA_CHAT.frames(fake.service, Generation())  # type: ignore[arg-type]
    events: list[AnswerEvent] = [ToolCallBegin(0, "c1", "look"), ArgumentsDelta(0, '{"x"')]
    assert frames.chunk(0, [ReasoningDelta("hm")], [], None)
    assert frames.chunk(0, events, [], None) == b"", "arguments are not whole"
    events = [ArgumentsDelta(0, ": 1}"), ToolCallBegin(1, "c2", "go"), ArgumentsDelta(1, "{}")]
    written = frames.chunk(0, [ReasoningDelta("hm"), ContentDelta("x"), *events], [], None)
    assert [json.loads(line)["message"] for line in written.splitlines()] == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": {"x": 1}}}],
        },
    ]
    last = json.loads(frames.chunk(0, [], [], "tool_calls"))
    assert last["message"]["tool_calls"][0]["function"] == {"name": "go", "arguments": {}}


# ---- generate


def test_a_prompt_is_a_message_unless_it_is_raw(tiny: RunningServer) -> None:
    found = post(tiny, "/api/generate", prompt="Hello there", options=OPTIONS)
    assert found["response"] == openai_answer(tiny)["message"]["content"]
    system = post(tiny, "/api/generate", prompt="Hello there", system="Hi", options=OPTIONS)
    messages = [{"role": "system", "content": "Hi"}, *MESSAGES]
    assert system["response"] == openai_answer(tiny, messages=messages)["message"]["content"]
    raw = post(tiny, "/api/generate", prompt="Hello there", raw=True, options=OPTIONS)
    plain = {"prompt": "Hello there", "max_tokens": 6, "temperature": 0}
    expected = tiny.post("/v1/completions", plain).json["choices"][0]["text"]
    assert raw["response"] == expected
    *first, last = lines(tiny, "/api/generate", prompt="Hello there", raw=True, options=OPTIONS)
    assert "".join(line["response"] for line in first) == expected
    assert (last["response"], last["done"], last["eval_count"]) == ("", True, 6)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_for_nothing_says_that_the_model_is_loaded(
    tiny: RunningServer, path: str
) -> None:
    found = post(tiny, path, keep_alive="5m")
    assert (found["done"], found["done_reason"]) == (True, "load")
    other = tiny.post(path, {"model": "other"})
    assert (other.status, other.json["error"][:25]) == (404, "there is no model 'other'")
    refused = tiny.post(path, {"model": NAME, "keep_alive": 0})
    assert refused.status == 400 and "keeps its model" in refused.json["error"]


# ---- refusals and errors


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"messages": MESSAGES, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_ctx": 10**6}}, "num_ctx"),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 0}}, "num_predict"),
        ("/api/chat", {"messages": MESSAGES, "options": {"tempratur": 1}}, "temperature?"),
        ("/api/chat", {"messages": MESSAGES, "truncate": True}, "truncate"),
        ("/api/chat", {"messages": [{**MESSAGES[0], "images": ["x"]}]}, "images"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ("/api/chat", {"messages": MESSAGES, "model": "other"}, "no model 'other'"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "template": "x"}, "template"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "x"}, "system"),
        ("/api/embed", {"input": "x", "dimensions": 257}, "dimensions"),
        ("/api/pull", {"model": "x"}, "quire pull"),
        ("/api/delete", {"model": "x"}, "quire rm"),
        ("/api/nothing", {}, "there is nothing at"),
    ],
)
def test_what_is_refused_is_named_in_ollamas_shape(
    tiny: RunningServer, path: str, fields: dict[str, Any], words: str
) -> None:
    reply = tiny.post(path, fields)
    assert reply.status in (400, 404)
    assert reply.json.keys() == {"error"}
    assert words in reply.json["error"]


def test_a_key_is_asked_for_in_ollamas_shape(text_model: Path) -> None:
    secret = "s" * 32
    with fake_server(text_model, keys=KeyRing([ApiKey("a", digest_of(secret))])) as server:
        for path in ("/api/chat", "/api/tags", "/api/nothing"):
            reply = server.post(path, {})
            assert reply.status == 401 and isinstance(reply.json["error"], str)
        allowed = server.get("/api/tags", {"Authorization": f"Bearer {secret}"})
        assert allowed.status == 200


# ---- the model


def test_the_model_is_listed_and_shown(tiny: RunningServer) -> None:
    [model] = tiny.get("/api/tags").json["models"]
    assert (model["name"], model["model"]) == (NAME, NAME)
    assert len(model["digest"]) == 64
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "1.44M",
        "quantization_level": "Q4_0",
    }
    assert model["details"] == details
    [running] = tiny.get("/api/ps").json["models"]
    assert running["context_length"] == 512
    assert running["details"] == details
    version = tiny.get("/api/version").json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4), "Codex refuses older ones"
    shown = post_show(tiny)
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["model_info"]["general.parameter_count"] > 10**5
    assert shown["capabilities"] == ["completion"]
    assert shown["details"] == details
    assert "im_start" in shown["template"]


def post_show(server: RunningServer) -> Any:
    reply = server.post("/api/show", {"model": NAME})
    assert reply.status == 200, reply.body
    return reply.json


def test_vectors_are_those_of_openais_api(tiny: RunningServer) -> None:
    expected = [
        item["embedding"]
        for item in tiny.post("/v1/embeddings", {"input": ["a b", "c"]}).json["data"]
    ]
    many = tiny.post("/api/embed", {"model": NAME, "input": ["a b", "c"]}).json
    assert many["embeddings"] == expected and many["prompt_eval_count"] > 2
    one = tiny.post("/api/embed", {"input": "a b", "dimensions": 4}).json["embeddings"]
    assert [len(vector) for vector in one] == [4]
    old = tiny.post("/api/embeddings", {"model": NAME, "prompt": "a b"}).json
    assert old["embedding"] == expected[0]
    long = {"input": "word " * 600}
    assert tiny.post("/api/embed", long).json["prompt_eval_count"] == 511
    assert tiny.post("/api/embed", {**long, "truncate": False}).status == 400
