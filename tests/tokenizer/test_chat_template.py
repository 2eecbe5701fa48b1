"""Chat templates as models bring them: the prompts are as by jinja and transformers."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.references import transformers_renders

from quire.core.errors import ModelFileError, RequestError
from quire.tokenizer import ChatTemplate
from quire.tokenizer.chat_template import MAX_SOURCE_LENGTH

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
CHATML, LLAMA_3, MISTRAL, QWEN = (
    (TEMPLATES / f"{name}.jinja").read_text() for name in ("chatml", "llama_3", "mistral", "qwen")
)
CONSTRUCTS = (TEMPLATES / "constructs.txt").read_text().split("\n----\n")

USER = [{"role": "user", "content": " Hi "}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}],
}
TOOLS_TALK = [
    *USER,
    CALL,
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <two> numbers"}}


@pytest.mark.parametrize(
    ("source", "messages", "options", "prompt"),
    [
        (
            CHATML,
            TALK[:2],
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            CHATML,
            USER,
            {"add_generation_prompt": False},
            "<|im_start|>user\n Hi <|im_end|>\n",
        ),
        (
            LLAMA_3,
            TALK[:2],
            {},
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            LLAMA_3,
            TOOLS_TALK[:3],
            {"tools": [TOOL]},
            "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            '{"name": "add", "parameters": {"a": 1, "b": "é"}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            MISTRAL,
            TALK,
            {},
            "<s>[INST] Hi[/INST] <think>\nhm\n</think>\n\nHello</s>[INST] Be brief.\n\nBye[/INST]",
        ),
        (
            QWEN,
            TALK[1:],
            {"variables": {"enable_thinking": False}},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            QWEN,
            TOOLS_TALK,
            {"tools": [TOOL]},
            "<|im_start|>system\n# Tools\n<tools>\n"
            '{"type": "function", "function": {"name": "add", "description": "Adds <two> numbers"}}'
            "\n</tools><|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_templates_in_the_style_of_known_models_render_as_expected(
    source: str, messages: list[dict[str, Any]], options: dict[str, Any], prompt: str
) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(messages, **options).text == prompt


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_a_template_means_what_transformers_means_by_it(source: str) -> None:
    values: dict[str, Any] = {"x": "abc", "n": 3, "l": [1, 2, 3], "d": {"k": "v"}}
    expected = transformers_renders(source, **values)
    assert ChatTemplate(source).render(USER, variables=values).text == expected


@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant"]), "content": st.text()}
        ),
        min_size=1,
        max_size=4,
    ),
    source=st.sampled_from([CHATML, QWEN]),
)
@settings(max_examples=60)
def test_any_messages_render_as_jinja_renders_them(
    messages: list[dict[str, str]], source: str
) -> None:
    values = {"messages": messages, "tools": None, "add_generation_prompt": True}
    expected = transformers_renders(source, **values)
    assert ChatTemplate(source).render(messages).text == expected


def test_what_the_model_wrote_may_be_marked() -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    assert ChatTemplate(source).render(USER).text == " Hi !"


def test_the_time_is_that_of_the_day() -> None:
    before = datetime.now()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M:%S %b') }}").render(USER).text
    rendered = datetime.strptime(text, "%Y-%m-%d %H:%M:%S %b")
    assert before - timedelta(seconds=1) <= rendered <= datetime.now()


def test_a_templates_refusal_is_a_request_error_in_its_words() -> None:
    with pytest.raises(RequestError, match="conversation roles must alternate"):
        ChatTemplate(MISTRAL).render([*USER, *USER])


def test_a_template_that_fails_on_the_messages_says_in_which_line() -> None:
    with pytest.raises(RequestError, match=r"line 2: UndefinedError: .*'nothing'"):
        ChatTemplate("a\n{{ nothing.at_all }}").render(USER)
    with pytest.raises(RequestError, match=r"line 1: ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}").render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("\n\n{{ a", "line 3"),
        ("{% nonsense %}", "unknown tag 'nonsense'"),
        ("{{ a|nonsense }}", "line 1: No filter named 'nonsense'"),
        ("\n{{ a is nonsense }}", "line 2: No test named 'nonsense'"),
        ("{% include 'x' %}{% do x %}", "unknown tag 'do'"),
        ("{{ " + "9" * 5000 + " }}", "does not compile"),
        ("{{ " + "(" * 5000, "does not compile"),
        ("{{ a" + ".b" * 5000 + " }}", "does not compile"),
        ("{% if a %}" * 5000 + "{% endif %}" * 5000, "does not compile"),
        ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "does not compile"),
        ("x" * (MAX_SOURCE_LENGTH + 1), f"the limit is {MAX_SOURCE_LENGTH}"),
    ],
)
def test_a_template_that_does_not_compile_is_a_model_file_error(source: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(message)):
        ChatTemplate(source)


def test_what_the_model_sets_cannot_be_given() -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.bos_token is set by the engine"):
        ChatTemplate(CHATML).render(USER, variables={"bos_token": "x"})


def test_a_template_has_the_models_other_special_tokens_where_there_are_some() -> None:
    source = "{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}"
    assert ChatTemplate(source, pad_token="<pad>").render(USER).text == "<pad>False"
    assert ChatTemplate(source, "<s>", unk_token="").render(USER).text == "<s>True"


def test_a_template_may_be_rendered_again_and_keeps_nothing() -> None:
    template = ChatTemplate("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}")
    assert [template.render(USER).text, template.render(USER).text] == ["1", "1"]
