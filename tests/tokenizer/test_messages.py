"""Chat messages: what is wrong with one is said, with its place; contents become strings."""

import re
import time
from typing import Any

import pytest

from quire.core.errors import RequestError
from quire.tokenizer import ChatTemplate
from quire.tokenizer.chat_template import MAX_VALUES, plain_values
from quire.tokenizer.template_forms import TemplateForms

FORMS = TemplateForms(lambda messages, tools: None)
ECHO = ChatTemplate("{{ messages|tojson }}{{ tools|tojson if tools else '' }}")


def rendered(message: dict[str, Any]) -> str:
    return ECHO.render([message]).text


def test_parts_of_text_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered({"role": "user", "content": parts}) == '[{"role": "user", "content": "a\\nb"}]'


def test_an_assistant_who_only_calls_tools_has_said_nothing() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        text = rendered({**message, "tool_calls": [call]})
        assert '"content": ""' in text
        assert '"arguments": {"a": [1]}' in text  # as templates expect them: no string


@pytest.mark.parametrize("arguments", ["", " ", None])
@pytest.mark.parametrize("written", ["| tojson", "+ ''"])
def test_a_call_without_arguments_has_none(arguments: str | None, written: str) -> None:
    """As clients make of a stream in which none came; both of templates that take objects and of
    those that take text."""
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += f"{{{{ c.function.name }}}}{{{{ c.function.arguments {written} }}}}"
    template = ChatTemplate(source + "{% endfor %}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert (
        template.render([{"role": "assistant", "content": "", "tool_calls": [call]}]).text == "f{}"
    )


def test_other_fields_reach_the_template_as_they_are() -> None:
    message = {"role": "tool", "content": "3", "name": "f", "tool_call_id": "1", "more": {"a": [1]}}
    assert '"more": {"a": [1]}' in rendered(message)


def test_no_tools_at_all_are_none() -> None:
    template = ChatTemplate("{{ tools }}")
    messages = [{"role": "user", "content": ""}]
    assert template.render(messages, tools=[]).text == template.render(messages).text == "None"


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


def test_the_way_to_a_value_is_put_into_words_only_where_it_is_wrong() -> None:
    """For each of many values it would be a megabyte of text: minutes of processor time."""
    key = "k" * 1_000_000
    message = {"role": "user", "content": "a", key: [0] * 150_000}
    began = time.process_time()
    plain_values([message], None, {}, FORMS)
    assert time.process_time() - began < 10.0


def test_a_long_key_on_the_way_to_a_wrong_value_is_shortened() -> None:
    message = {"role": "user", "content": "a", "k" * 1000: [{"a": [b""]}]}
    with pytest.raises(RequestError) as error:
        rendered(message)
    path = f"messages[0].{'k' * 40}…[0].a[0]"
    assert str(error.value) == f"{path} must be plain JSON data, got bytes"


@pytest.mark.parametrize(
    "request_of",
    [
        lambda values: ([{"role": "user", "content": "a", "x": values}], None, {}),
        lambda values: ([{"role": "user", "content": "a"}], [{"x": values}], {}),
        lambda values: ([{"role": "user", "content": "a"}], None, {"x": values}),
        lambda values: (
            [{"role": "user", "content": "a", "x": [0] * 9}] * (len(values) // 10),
            None,
            {},
        ),
        lambda values: (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": str(values)}}],
                }
            ],
            None,
            {},
        ),
    ],
)
def test_a_request_holds_a_bounded_number_of_values(request_of: Any) -> None:
    values = [0] * (MAX_VALUES + 1)
    with pytest.raises(RequestError, match=f"is too much: a request may hold {MAX_VALUES} values"):
        messages, tools, variables = request_of(values)
        plain_values(messages, tools, variables, FORMS)


def test_an_integer_without_end_is_a_request_error() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].x is an integer of more than 4096 bits"):
        rendered({"role": "user", "content": "a", "x": 10**5000})
