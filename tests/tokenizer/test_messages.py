"""Chat messages: what is wrong with one is said, with its place; contents become strings."""

import re
from typing import Any

import pytest

from quire.core.errors import RequestError
from quire.tokenizer import ChatTemplate

ECHO = ChatTemplate("{{ messages|tojson }}{{ tools|tojson if tools else '' }}")


def rendered(message: dict[str, Any]) -> str:
    return ECHO.render([message])


def test_parts_of_text_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered({"role": "user", "content": parts}) == '[{"role": "user", "content": "a\\nb"}]'


def test_an_assistant_who_only_calls_tools_has_said_nothing() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        text = rendered({**message, "tool_calls": [call]})
        assert '"content": ""' in text
        assert '"arguments": {"a": [1]}' in text  # as templates expect them: no string


def test_other_fields_reach_the_template_as_they_are() -> None:
    message = {"role": "tool", "content": "3", "name": "f", "tool_call_id": "1", "more": {"a": [1]}}
    assert '"more": {"a": [1]}' in rendered(message)


def test_no_tools_at_all_are_none() -> None:
    template = ChatTemplate("{{ tools }}")
    messages = [{"role": "user", "content": ""}]
    assert template.render(messages, tools=[]) == template.render(messages) == "None"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, "messages must be a list of at least one message, got None"),
        ("hello", "messages must be a list of at least one message, got 'hello'"),
        ([], "messages must be a list of at least one message, got []"),
        (["hello"], "messages[0] must be an object, got str"),
        ([{"content": "a"}], "messages[0].role must be a non-empty string, got None"),
        ([{"role": 5, "content": "a"}], "messages[0].role must be a non-empty string, got 5"),
        ([{"role": "", "content": "a"}], "messages[0].role must be a non-empty string, got ''"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type 'image_url' is not supported; supported: 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text must be a string, got None",
        ),
        ([{"role": "user", "content": "a", 5: 6}], "messages[0] has the key 5"),
        ([{"role": "user", "content": b"a"}], "messages[0].content must be plain JSON data"),
        (
            [{"role": "assistant", "tool_calls": "f"}],
            "messages[0].tool_calls must be a list, got str",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            "messages[0].tool_calls[0].function must be an object with a name",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments is not JSON",
        ),
    ],
)
def test_a_message_that_is_wrong_is_a_request_error_with_its_place(
    messages: Any, error: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(error)):
        ECHO.render(messages)


def test_data_nested_too_deep_are_a_request_error() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        rendered({"role": "user", "content": "a", "x": deep})


@pytest.mark.parametrize("tools", ["f", 5, [5], ["f"]])
def test_tools_must_be_a_list_of_objects(tools: Any) -> None:
    with pytest.raises(RequestError, match=r"tools(\[0\])? must be"):
        ECHO.render([{"role": "user", "content": "a"}], tools=tools)
