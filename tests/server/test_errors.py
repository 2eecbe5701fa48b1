"""Errors of the engine, the tokenizer and the template name the field that they are about.

Each body here passes its schema: what refuses it knows no HTTP.
"""

from typing import Any

import pytest
from tests.server.servers import RunningServer

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
