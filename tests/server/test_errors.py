"""Errors of the engine, the tokenizer and the template name the field that they are about.

Each body here passes its schema: what refuses it knows no HTTP.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.server.servers import RunningServer, fake_server

from quire.core.errors import RequestError
from quire.server.errors import as_api_error

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "max_tokens": [513, 2**31 - 1],
    "min_tokens": [100],  # above max_tokens
    "n": [65],
    "logit_bias": [{"512": 1.0}, {"9999999999": -1.0}],
    "stop_token_ids": [[512], [3, 2**31 - 1]],
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_a_value_that_the_engine_refuses_is_named(
    fake: RunningServer, path: str, field: str
) -> None:
    for value in REFUSED_VALUES[field]:
        reply = fake.post(path, {"max_tokens": 5, **PROMPTS[path], field: value})
        assert (reply.status, reply.error["param"]) == (400, field), value


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [512]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 512}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": ["hi", "word " * 3000]}, "prompt"),
        ("/v1/embeddings", {"input": [512]}, "input"),
        ("/v1/embeddings", {"input": [1] * 512}, "input"),
        ("/v1/embeddings", {"input": "word " * 3000}, "input"),
        ("/v1/embeddings", {"input": "\ud800"}, "input"),
        ("/tokenize", {"prompt": "word " * 3000}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_as_its_body_calls_it(
    fake: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    reply = fake.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": 1}]}],
        [{"role": "user", "content": "word " * 3000}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_a_conversation_that_cannot_run_is_named(
    fake: RunningServer, path: str, messages: list[dict[str, Any]]
) -> None:
    reply = fake.post(path, {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 512}),
        ("/v1/completions", {"prompt": [1] * 600}),
        ("/v1/completions", {"prompt": "word " * 3000}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 512}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 512}),
        ("/v1/embeddings", {"input": "word " * 3000}),
    ],
)
def test_what_outgrows_the_context_is_told_as_openais_clients_know_it(
    fake: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = fake.post(path, body)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, "
    )
    assert reply.error["param"] in body


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/uploads", "keeps files of requests alone"),
        ("/v1/vector_stores/a/files", "keeps files of requests alone"),
        ("/v1/audio/transcriptions", "text alone"),
        ("/v1/images/generations", "text alone"),
        ("/completion", "use /v1/completions"),
        ("/infill", "use /v1/completions with prompt and suffix"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/nope", "see /docs"),
        ("/nowhere/at/all/of/any/use", "see /docs"),
    ],
)
def test_a_path_that_there_is_not_is_a_404_that_says_what_to_use(
    fake: RunningServer, method: str, path: str, hint: str
) -> None:
    """Whatever is posted: a file must not be told that its content type is wrong."""
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = fake.send(method, path, b"--x--" if method == "POST" else None, multipart)
    assert (reply.status, reply.error["code"]) == (404, "unknown_path")
    assert hint in reply.error["message"]


def test_names_that_the_template_leaves_out_are_written(fake: RunningServer) -> None:
    """The fixture's writes every role and no names."""
    named = {"role": "user", "content": "x", "name": "Ann"}
    written = {"role": "user", "content": "Ann: x"}
    first, second = (
        fake.post("/tokenize", {"messages": [*MESSAGES, message]}).json["tokens"]
        for message in (named, written)
    )
    assert first == second


def test_marks_of_what_to_cache_change_nothing(fake: RunningServer) -> None:
    """Clients of Anthropic's models send them through OpenAI's API, too."""
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "look"}}
    parts = [{"type": "text", "text": "x"}]
    plain, marked = (
        fake.chat(messages=messages, tools=tools, max_tokens=4, temperature=0).json["choices"]
        for messages, tools in (
            ([{"role": "user", "content": parts}], [tool]),
            ([{"role": "user", "content": [parts[0] | mark], **mark}], [tool | mark]),
        )
    )
    assert plain == marked


def test_openais_own_message_is_taken_back(fake: RunningServer) -> None:
    """As its client's model_dump() writes it, with the nulls of everything that it is not."""
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    again = [*MESSAGES, answer, *MESSAGES]
    assert fake.chat(messages=again, max_tokens=2).status == 200
    plain = [*MESSAGES, {"role": "assistant", "content": "hello"}, *MESSAGES]
    counts = [fake.post("/tokenize", {"messages": m}).json["count"] for m in (again, plain)]
    assert counts[0] == counts[1]


def test_every_model_there_is_not_is_a_404(fake: RunningServer) -> None:
    for path, body in PROMPTS.items():
        reply = fake.post(path, {**body, "model": "gpt-4o"})
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert (reply.error["param"], reply.error["type"]) == ("model", "invalid_request_error")


def fields_of(caplog: pytest.LogCaptureFixture, request_id: str) -> Any:
    """The log line of one request: those of other tests' servers may come meanwhile."""
    records = [record for record in caplog.records if record.getMessage() == "request"]
    lines: list[Any] = [vars(record)["fields"] for record in records]
    [found] = [line for line in lines if line["request_id"] == request_id]
    return found


def test_unknown_fields_are_ignored_on_request_and_named_in_a_header_and_the_log(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.server")
    with fake_server(text_model, ignore_unknown_fields=True) as server:
        reply = server.chat(max_tokens=2, wizard=True, temprature=1)
        assert reply.status == 200
        assert reply.headers["x-quire-ignored-fields"] == "wizard, temprature"
        plain = server.chat(max_tokens=2)
        assert "x-quire-ignored-fields" not in plain.headers
        refused = server.chat(web_search_options={})  # known: obeyed or refused as ever
        assert (refused.status, refused.error["param"]) == (400, "web_search_options")
        streamed = server.post(
            "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True, "wizard": 1}
        )
        assert streamed.headers["x-quire-ignored-fields"] == "wizard"
        for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})):
            assert server.post(path, {**body, "wizard": 1}).status == 200
    first, second, third = (
        fields_of(caplog, each.headers["x-request-id"]) for each in (reply, plain, refused)
    )
    assert first["ignored_fields"] == ["wizard", "temprature"]
    assert "ignored_fields" not in second
    assert (third["error"], third["field"]) == ("unsupported_field", "web_search_options")


def test_a_log_line_has_an_errors_code_and_field_and_none_of_its_words(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages repeat values of the request."""
    caplog.set_level(logging.INFO, "quire.server")
    with fake_server(text_model) as server:
        said = [{"role": "user", "content": [{"type": "secret"}]}]
        replies = [server.chat(messages=said), server.chat(temperature="secret")]
    assert all("secret" in reply.error["message"] for reply in replies)
    lines = [fields_of(caplog, reply.headers["x-request-id"]) for reply in replies]
    assert [line["error"] for line in lines] == ["invalid_field", "invalid_field"]
    assert [line["field"] for line in lines] == ["messages", "temperature"]
    assert not any("secret" in str(line) for line in lines)


@pytest.mark.parametrize(
    ("param", "fields", "named"),
    [
        ("prompt", {"prompt"}, "prompt"),
        ("prompt", {"messages", "n"}, "messages"),
        ("prompt", {"input"}, "input"),
        ("text", {"prompt", "messages"}, "prompt"),
        ("timeout_s", {"timeout"}, "timeout"),
        ("n", {"n"}, "n"),
        ("request_id", {"n"}, None),  # no field of a body
        (None, {"n"}, None),
    ],
)
def test_a_parameter_is_named_as_the_body_calls_it(
    param: str | None, fields: set[str], named: str | None
) -> None:
    """Whatever words the message has."""
    error = as_api_error(RequestError("n prompt", param=param), fields, is_draining=False)
    assert (error.status, error.param) == (400, named)
