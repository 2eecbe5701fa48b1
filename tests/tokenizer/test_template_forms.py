"""Each template gets content, arguments and parts in the form that it was written for."""

from typing import Any

import pytest
from tests.tokenizer.references import transformers_renders

from quire.core.errors import RequestError
from quire.tokenizer import ChatTemplate
from quire.tokenizer.chat_template import MAX_VARIABLES

TEXT = "{{ '[' + m.role + ']' }}"
LOOP = "{% for m in messages %}" + TEXT + "{}{% endfor %}"
# Small templates in the ways of published ones, each with what it takes.
NULL_ALONE = LOOP.replace(
    "{}",  # DeepSeek-R1-Distill: a message with content has no calls; arguments are text
    "{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}"
    "{% endif %}",
)
STRING_WANTED = LOOP.replace(
    "{}",  # Qwen: content is added to text, where null fails
    "{{ m.content + '.' }}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + (c.function.arguments | tojson) }}{% endfor %}",
)
NULL_WRITTEN = LOOP.replace(
    "{}",  # GLM: null becomes the word None
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}({{ k }}={{ v }}){% endfor %}{% endfor %}",
)
BOTH = LOOP.replace(
    "{}",
    "{{ m.content if m.content else '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}"
    "{% endfor %}",
)
AS_PYTHON = LOOP.replace(
    "{}",  # functionary: an object would be written as Python writes it
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "{{ c.function.arguments }}{% endfor %}",
)
PARTS = LOOP.replace(
    "{}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}+{% endfor %}{% endif %}",
)
USER = {"role": "user", "content": "hi"}
OBJECT, TEXTUAL = {"a": 1}, '{"a": 1}'


def calling(content: str | None, arguments: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    return [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, answer]


@pytest.mark.parametrize(
    ("source", "content", "arguments"),
    [
        (NULL_ALONE, None, TEXTUAL),
        (STRING_WANTED, "", OBJECT),
        (NULL_WRITTEN, "", OBJECT),
        (BOTH, None, OBJECT),
        (AS_PYTHON, None, TEXTUAL),
    ],
)
@pytest.mark.parametrize("given", [OBJECT, TEXTUAL])
def test_calls_reach_a_template_in_its_own_form(
    source: str, content: str | None, arguments: object, given: object
) -> None:
    expected = transformers_renders(source, messages=calling(content, arguments))
    assert "f" in expected and "a" in expected and "None" not in expected
    template = ChatTemplate(source)
    assert template.render(calling(None, given)).text == expected
    without = calling(None, given)
    del without[1]["content"]
    assert template.render(without).text == expected


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_reaches_a_template_by_the_name_that_it_reads(given: str, read: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m." + read + " }}:{{ m.content }}{% endfor %}"
    )
    message = {"role": "assistant", "content": "Yes.", given: "Hm."}
    assert template.render([message]).text == "Hm.:Yes."


def test_text_beside_calls_stays() -> None:
    expected = transformers_renders(BOTH, messages=calling("so:", OBJECT))
    assert ChatTemplate(BOTH).render(calling("so:", TEXTUAL)).text == expected


def test_parts_are_joined_by_the_template_that_reads_them_and_else_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert ChatTemplate(PARTS).render(messages).text == "[system]a+b+[user]a+b+"
    assert ChatTemplate(BOTH).render(messages).text == "[system]a\nb[user]a\nb"
    only_user = PARTS.replace("is string", "is string or m.role == 'system'")
    assert ChatTemplate(only_user).render(messages).text == "[system]a\nb[user]a+b+"


def test_parts_are_checked_though_the_template_reads_them() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].type 'image_url'"):
        ChatTemplate(PARTS).render([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"messages": []}, r"chat_template_kwargs.messages is set by the engine"),
        ({"range": 1}, r"chat_template_kwargs.range is set by the engine"),
        ({"a b": 1}, "has the name 'a b', which no template can read"),
        ({1: 1}, "has the name 1, which no template can read"),
        ({"x" * 65: 1}, "which no template can read"),
        ({f"x{n}": n for n in range(MAX_VARIABLES + 1)}, "has 65 names; the limit is 64"),
        ([1], "chat_template_kwargs must be an object, got list"),
        ({"x": b""}, "chat_template_kwargs.x must be plain JSON data"),
    ],
)
def test_variables_that_are_wrong_are_refused_by_name(variables: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error) as raised:
        ChatTemplate("{{ x }}").render([USER], variables=variables)
    assert raised.value.param == "chat_template_kwargs"


def test_variables_reach_the_template_and_never_as_its_own_text() -> None:
    text, spans = ChatTemplate("{{ x }}{{ on }}").render([USER], variables={"x": "<s>", "on": True})
    assert (text, list(spans)) == ("<s>True", [])


# ---- what a template leaves out


EVERY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NAMES = "{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}{% endfor %}"
USERS_NAMES = (
    "{% for m in messages %}<{{ m.role }}{% if m.role == 'user' %} {{ m.name }}{% endif %}>"
    "{{ m.content }}{% endfor %}"
)
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}"
    "{% elif m.role in ('assistant', 'system') %}A{{ m.content }}{% endif %}{% endfor %}"
)
OR_ELSE = (
    "{% for m in messages %}{% if m.role == 'user' %}U{% else %}A{% endif %}{{ m.content }}"
    "{% endfor %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [TWO_ROLES, OR_ELSE])
@pytest.mark.parametrize("role", ["narrator", "function", "User"])
def test_a_role_that_a_template_leaves_out_is_refused_by_name(source: str, role: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].role is '{role}'") as caught:
        ChatTemplate(source).render([USER, {"role": role, "content": "x"}])
    assert caught.value.param == "messages[1].role"


def test_a_role_that_a_template_writes_is_taken() -> None:
    text = ChatTemplate(EVERY_ROLE).render([USER, {"role": "narrator", "content": "x"}]).text
    assert text == "<user>hi<narrator>x"


def test_a_template_that_refuses_a_role_says_so_itself() -> None:
    with pytest.raises(RequestError, match="no such role"):
        ChatTemplate(REFUSING).render([USER, {"role": "narrator", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (EVERY_ROLE, "<system>x<user>hi"),
        (TWO_ROLES, "AxUhi"),
        (EVERY_ROLE + "{# developer #}", "<developer>x<user>hi"),
    ],
)
def test_a_developer_is_the_system_where_the_template_knows_none(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "developer", "content": "x"}, USER]).text == text


@pytest.mark.parametrize(
    ("source", "role", "is_written"),
    [
        (NAMES, "user", True),
        (NAMES, "assistant", True),
        (NAMES, "system", True),
        (EVERY_ROLE, "user", False),
        (EVERY_ROLE, "assistant", False),
        (USERS_NAMES, "user", True),
        (USERS_NAMES, "assistant", False),
    ],
)
def test_a_name_reaches_the_prompt(source: str, role: str, is_written: bool) -> None:
    template = ChatTemplate(source)
    messages: list[dict[str, object]] = [
        {"role": role, "content": "x", "name": "Ann"},
        {"role": role, "content": [{"type": "text", "text": "y"}], "name": "Bob"},
        {"role": role, "content": "z"},
    ]
    text = template.render([USER, *messages]).text
    if is_written:
        assert f"<{role} Ann>" in text and "Ann: " not in text
    else:
        assert "Ann: x" in text and "Bob: y" in text and ": z" not in text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "x", "name": "Ann"}, "Ann: x"),
        ({"role": "user", "content": "x", "name": "user"}, "x"),
        ({"role": "assistant", "content": "x", "name": "Ann"}, "x"),
        ({"role": "system", "content": "x", "name": "Ann"}, "x"),
        ({"role": "user", "content": "", "name": "Ann"}, ""),
    ],
)
def test_a_name_that_tells_nobody_apart_is_left_out(message: dict[str, str], text: str) -> None:
    """Agents of Semantic Kernel and AutoGen send such with every message."""
    bare = {"role": message["role"], "content": text}
    assert ChatTemplate(EVERY_ROLE).render([message]) == ChatTemplate(EVERY_ROLE).render([bare])


ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('order') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>"
    "{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [ALTERNATING, DROPPING])
def test_late_system_messages_are_the_users_where_there_is_no_place_for_them(source: str) -> None:
    """Claude Code sends a system message behind the user's first one."""
    system = {"role": "system", "content": "s"}
    answer = {"role": "assistant", "content": "a"}
    template = ChatTemplate(source)
    text = template.render([USER, system, answer, {"role": "developer", "content": "t"}, USER]).text
    question = USER["content"]
    assert text == f"<user>{question}\n\ns<assistant>a<user>t\n\n{question}"
    parts = [{"type": "text", "text": "p"}]
    assert "p\n\ns" in template.render([{"role": "user", "content": parts}, system]).text


def test_late_system_messages_stay_where_the_template_has_a_place_for_them() -> None:
    system = {"role": "system", "content": "s"}
    assert ChatTemplate(EVERY_ROLE).render([USER, system]).text.count("system") == 1


def test_a_tools_name_may_be_left_out_because_its_call_has_it() -> None:
    answer = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    assert "3" in ChatTemplate(BOTH).render([*calling("", TEXTUAL)[:-1], answer]).text


def test_roles_that_a_client_makes_up_cost_few_probes() -> None:
    template = ChatTemplate(EVERY_ROLE)
    made_up = [{"role": f"role{n}", "content": "x"} for n in range(4096)]
    with pytest.raises(RequestError, match="more than 8 roles"):
        template.render(made_up)
    for n in range(0, 200, 8):
        template.render(made_up[n : n + 8])
    assert len(template.forms._roles) <= 64
